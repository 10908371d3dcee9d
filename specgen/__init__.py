"""specgen: offline batch generation with EAGLE3 speculative decoding."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specgen.config import EngineConfig, SamplingParams
    from specgen.engine import Engine
    from specgen.output import RequestOutput
    from specgen.prompts import Prompt
    from specgen.tokenizer import Message

__version__ = "0.1.0"
__all__ = ["Engine", "EngineConfig", "Message", "Prompt", "RequestOutput", "SamplingParams"]
_HOMES = {
    "Engine": "engine",
    "EngineConfig": "config",
    "Message": "tokenizer",
    "Prompt": "prompts",
    "RequestOutput": "output",
    "SamplingParams": "config",
}


def __getattr__(name: str) -> object:
    """The public names, each loaded when it is asked for: the engine's loads torch (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'specgen' has no attribute {name!r}")
    return getattr(import_module(f"specgen.{_HOMES[name]}"), name)
