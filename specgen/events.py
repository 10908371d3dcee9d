"""What happened in a run, recorded once: the event types, their JSON lines, and the reader.

Every rate in a report is a fold over these; no decoding code computes one. Times are seconds since the
engine was warm (a monotonic clock); ``sequence`` is the request's id.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specgen.config import UserError


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A request entered the queue."""

    sequence: str
    time: float
    num_prompt_tokens: int
    category: str | None = None
    turn: int = 1  # 1 for the first user turn


@dataclass(frozen=True, kw_only=True)
class Prefilled:
    """A prompt is in the cache, ``num_cached`` positions of which were there before.

    ``emitted`` is 1 with its first token, 0 after a preemption.
    """

    sequence: str
    time: float
    emitted: int
    num_cached: int


@dataclass(frozen=True, kw_only=True)
class Verified:
    """One verify step of one sequence: the drafts in order, how many the target accepted, how many tokens were kept.

    ``emitted`` is ``accepted + 1`` except where a text ended inside the step. Plain decoding has no drafts.
    """

    sequence: str
    time: float
    drafts: tuple[int, ...]
    accepted: int
    emitted: int


@dataclass(frozen=True, kw_only=True)
class Preempted:
    """A sequence gave its pages back and will be prefilled again."""

    sequence: str
    time: float


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A sequence ended: ``reason`` is ``stop``, ``length`` or ``error`` (refused; ``num_output_tokens`` 0)."""

    sequence: str
    time: float
    reason: str
    num_output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """One pass of the engine's loop and the rows it computed.

    ``num_spec_tokens`` are the drafts that a sequence had in it (K; 0 in a prefill). ``first_pass_rows`` are the rows
    that the drafter takes in (its KV fill) and ``first_pass_kept`` those of them that held accepted tokens (the rest is
    what a padded drafter batch wastes); ``loop_rows`` the rows of the passes that draft.
    """

    kind: str  # "prefill" or "decode"
    time: float  # at the end of the step
    seconds: float
    num_sequences: int
    num_spec_tokens: int
    target_rows: int
    first_pass_rows: int
    first_pass_kept: int
    loop_rows: int


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A CUDA graph was captured: later steps of ``num_sequences`` are replayed; not ``fits``: no memory for it."""

    time: float
    what: str  # "step", or the pass of one
    num_sequences: int
    seconds: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """The device had no memory for a pass; the run goes on within these limits."""

    time: float
    max_batch_size: int
    max_prefill_tokens: int


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A run that was killed goes on: what had not finished begins again, and times count from here."""

    time: float


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """The events of another shard follow: it ran beside those before, in a process whose times count from here."""

    time: float
    shard: str  # as in ``1/4``


@dataclass(frozen=True, kw_only=True)
class Merged:
    """All shards have been brought together: what follows ran after every one of them."""

    time: float


Event = (
    Submitted
    | Prefilled
    | Verified
    | Preempted
    | Finished
    | Stepped
    | Captured
    | OutOfMemory
    | Resumed
    | Sharded
    | Merged
)
_TYPES: dict[str, type[Event]] = {
    "submitted": Submitted,
    "prefilled": Prefilled,
    "verified": Verified,
    "preempted": Preempted,
    "finished": Finished,
    "stepped": Stepped,
    "captured": Captured,
    "out_of_memory": OutOfMemory,
    "resumed": Resumed,
    "sharded": Sharded,
    "merged": Merged,
}
_NAMES = {event_type: name for name, event_type in _TYPES.items()}
_encode = json.JSONEncoder(separators=(",", ":")).encode


def to_line(event: Event) -> str:
    """One JSON object with the event's type under ``event``; no line break."""
    return _encode({"event": _NAMES[type(event)], **vars(event)})  # asdict takes three times as long


def from_line(line: str) -> Event:
    """The inverse of ``to_line``; ``UserError`` for a line that is no event."""
    try:
        fields = json.loads(line)
        if "drafts" in fields:
            fields["drafts"] = tuple(fields["drafts"])
        return _TYPES[fields.pop("event")](**fields)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"not an event: {line[:80]!r} ({error})") from error


def read(path: Path) -> Iterator[Event]:
    """The events of an ``events.jsonl`` in order."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield from_line(line)
