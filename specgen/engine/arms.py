"""An arm: one of several ways to run the same requests, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specgen.config import DraftLength, EngineConfig

DECODING: Mapping[str, Mapping[str, Any]] = {
    "plain": {"num_spec_tokens": 0},
    "padded": {"drafter_batch": "padded"},
    "non-padded": {"drafter_batch": "non-padded"},
}
_SHORT = {"batch": "max_batch_size", "K": "num_spec_tokens"}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to run, and what it changes.

    ``changes`` are fields of ``EngineConfig``, of which ``num_spec_tokens`` may be ``auto``, under their names or as
    ``decoding`` (a key of ``DECODING``), ``batch`` and ``K``. A ``temperature`` among them is the requests'.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    def configure(self, engine: EngineConfig) -> EngineConfig:
        """``engine`` with this arm's changes."""
        fields = {_SHORT.get(name, name): value for name, value in self.changes.items()}
        fields |= DECODING[fields.pop("decoding")] if "decoding" in fields else {}
        fields.pop("temperature", None)
        if "num_spec_tokens" in fields:
            fields["num_spec_tokens"] = DraftLength.of(fields["num_spec_tokens"])
        return replace(engine, **fields)
