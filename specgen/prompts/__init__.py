"""Prompts to run: what one is, the data sets they come from, and the rows that cannot be run. May import text."""

from specgen.prompts.formats import DATASETS
from specgen.prompts.load import PromptSet, load_prompts, open_prompts
from specgen.prompts.prompt import Prompt, Rejected, prompt_ids
from specgen.text.tokenizer import Message

__all__ = [
    "DATASETS",
    "Message",
    "Prompt",
    "PromptSet",
    "Rejected",
    "load_prompts",
    "open_prompts",
    "prompt_ids",
]
