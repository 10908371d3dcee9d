"""What the head of a bench's table says about the pair that ran."""

from pathlib import Path

from specgen.config import EngineConfig
from specgen.engine.loading import Models
from specgen.report.table import Row


def pair_head(config: EngineConfig, models: Models) -> Row:
    """Target and head, the number format, and whether the weights were trained."""
    weights = "synthetic" if models.synthetic else "as trained"
    return {
        "model": f"{_short(config.model)}, {config.dtype}, weights {weights}",
        "drafter": _short(str(config.drafter)),
    }


def _short(checkpoint: str) -> str:
    """``demo/target`` of a path; a hub id as it is."""
    return "/".join(Path(checkpoint).parts[-2:])
