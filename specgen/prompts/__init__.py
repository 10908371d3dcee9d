"""Prompts, the data sets they come from, and rejected rows. May import text and record."""

from specgen.prompts.formats import DATASETS
from specgen.prompts.load import DataSource, PromptSet
from specgen.prompts.prompt import Prompt, Rejected, failure, prompt_ids
from specgen.prompts.shapes import PromptRun, content_of
from specgen.text.tokenizer import Message

__all__ = [
    "DATASETS",
    "DataSource",
    "Message",
    "Prompt",
    "PromptRun",
    "PromptSet",
    "Rejected",
    "content_of",
    "failure",
    "prompt_ids",
]
