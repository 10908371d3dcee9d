"""specgen: offline batch generation with speculative decoding."""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from specgen.config import VERSION
from specgen.config.errors import did_you_mean

if TYPE_CHECKING:
    from specgen.checkpoints.weight_files import saved_head
    from specgen.config import EngineConfig, SamplingParams, StructuredOutputs, UserError
    from specgen.engine.conversations import RequestOutput, summarize
    from specgen.engine.engine import Engine
    from specgen.jobs.batch_generator import BatchGenerator
    from specgen.prompts import Prompt
    from specgen.report.report import Report, read_run
    from specgen.text.tokenizer import Message

# GNU OpenMP reads it when torch loads. By default waiting threads spin for milliseconds on cores that another run
# needs: two runs at once had a tenth of their speed. With this they have over half of what threads that never spin have
# together, and a single run loses under 5 %; threads that never spin lose 40 % when alone.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1500")

__version__ = VERSION
__all__ = [
    "BatchGenerator",
    "Engine",
    "EngineConfig",
    "Message",
    "Prompt",
    "Report",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "UserError",
    "read_run",
    "saved_head",
    "summarize",
]
_HOMES = {
    "BatchGenerator": "jobs.batch_generator",
    "Engine": "engine.engine",
    "EngineConfig": "config",
    "Message": "text.tokenizer",
    "Prompt": "prompts",
    "Report": "report.report",
    "RequestOutput": "engine.conversations",
    "SamplingParams": "config",
    "StructuredOutputs": "config",
    "UserError": "config",
    "read_run": "report.report",
    "saved_head": "checkpoints.weight_files",
    "summarize": "engine.conversations",
}


def __getattr__(name: str) -> object:
    """The public names, imported on access (PEP 562): the engine's imports torch."""
    if name not in _HOMES:
        meant = did_you_mean(name, __all__) if not name.startswith("_") else ""
        raise AttributeError(f"module 'specgen' has no attribute {name!r}{meant}")
    return getattr(import_module(f"specgen.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
