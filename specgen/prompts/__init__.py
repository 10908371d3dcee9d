"""Prompts, the data sets they come from, and rejected rows. May import text and record."""

from specgen.prompts.formats import DATASETS
from specgen.prompts.load import DataSource, PromptSet
from specgen.prompts.prompt import Prompt, Rejected, content_of, failure, prompt_ids
from specgen.text.tokenizer import Message

__all__ = [
    "DATASETS",
    "DataSource",
    "Message",
    "Prompt",
    "PromptSet",
    "Rejected",
    "content_of",
    "failure",
    "prompt_ids",
]
