"""What happened, as rows of two tables: requests (in ``completions.jsonl``) and passes (``passes.jsonl``).

The engine tells of its work by events; a ``Recorder`` makes rows of them. Every figure is a function of the rows.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from specgen.config import UserError, require
from specgen.events import (
    Captured,
    Event,
    Finished,
    OutOfMemory,
    Preempted,
    Prefilled,
    Stepped,
    Submitted,
    Switched,
    Touched,
    Verified,
)
from specgen.record.counts import StepCounts, count_parts

WHOLE = "0/1"  # the shard of a run that has no others
_NOTHING = {each.name: 0 for each in fields(Stepped) if each.name not in ("kind", "experts")}
_encode = json.JSONEncoder(separators=(",", ":"), default=vars).encode


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One verify step of a request, in pass ``number`` of its session; fields as in ``events.Verified``."""

    number: int
    drafts: Sequence[int]
    accepted: int
    emitted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRow:
    """One request that has ended; times are seconds since the session's engine was warm.

    ``steps`` is None where they were not kept; ``counts`` are theirs, and ``parts`` as from ``count_parts`` where the
    text has reasoning.
    """

    name: str
    session: str
    reason: str
    category: str | None
    turn: int
    num_turns: int  # of its conversation
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    num_output_tokens: int
    arrival: float
    first_token: float | None
    ended: float
    counts: Mapping[str, Any]
    parts: Mapping[str, Any] | None
    steps: Sequence[RecordedStep] | None

    def to_json(self, *, with_steps: bool) -> dict[str, Any]:
        """The ``record`` of a row, which has the other fields itself; see ``of_row``."""
        found: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("session", "arrival", "first_token", "ended", "num_cached_tokens", "counts")
        }
        if self.num_turns > 1:
            found["num_turns"] = self.num_turns
        if self.parts is not None:
            found["parts"] = self.parts
        if with_steps and self.steps is not None:
            found["steps"] = {
                "pass": [step.number for step in self.steps],
                "drafts": [step.drafts for step in self.steps],
                "accepted": [step.accepted for step in self.steps],
            }
        return found

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """From a row of ``completions.jsonl``; ``UserError`` for one of a version that kept no record in it."""
        require(
            "record" in row,
            f"the row of {row.get('id')!r} has no record, as in earlier versions: generate into a new directory",
        )
        record, num_tokens = row["record"], len(row["token_ids"])
        return cls(
            name=row["id"],
            session=record["session"],
            reason=row.get("ended_by", row["finish_reason"]),
            category=row.get("category"),
            turn=row.get("turn", 1),
            num_turns=record.get("num_turns", 1),
            num_prompt_tokens=row["num_prompt_tokens"],
            num_cached_tokens=record["num_cached_tokens"],
            num_output_tokens=num_tokens,
            arrival=record["arrival"],
            first_token=record["first_token"],
            ended=record["ended"],
            counts=record["counts"],
            parts=record.get("parts"),
            steps=_steps(record["steps"], num_tokens) if "steps" in record else None,
        )

    @property
    def num_rejections(self) -> int:
        """Steps that rejected a draft."""
        return sum(step.accepted < len(step.drafts) for step in self.steps or ())

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts over steps with drafts; None without one."""
        steps = sum(self.counts["histogram"])
        return 1 + sum(self.counts["accepted"]) / steps if steps else None


def _steps(arrays: Mapping[str, Any], num_tokens: int) -> list[RecordedStep]:
    """The steps of a text; the last may have given less than it accepted, as the text ended within it."""
    left, found = num_tokens - 1, []  # the first token is the prefill's
    for number, drafts, accepted in zip(
        *(arrays[name] for name in ("pass", "drafts", "accepted")), strict=True
    ):
        emitted = min(accepted + 1, left)
        found.append(RecordedStep(number, drafts, accepted, emitted))
        left -= emitted
    return found


@dataclass(frozen=True, kw_only=True)
class PassRow:
    """A pass of the engine: ``number`` counts those of a session from 0.

    ``num_rejected`` are the drafts that its target pass rejected, ``num_preempted`` the sequences that gave their
    pages back before it.
    """

    number: int
    num_rejected: int
    num_preempted: int
    step: Stepped


@dataclass(frozen=True, kw_only=True)
class Session:
    """A process begins to work on a run; the rows behind this one are its own, by its clock.

    ``name`` is ``SHARD-NUMBER``: shards run side by side, the sessions of one of them after each other.
    """

    name: str
    time: float  # of the first request
    machine: str = ""


def shard_of(session: str) -> str:
    """The shard that the session of this name is of, as in ``1/4``."""
    return session.rpartition("-")[0]


Pass = PassRow | Captured | OutOfMemory | Session
_KINDS: dict[str, type[Session | Captured | OutOfMemory]] = {
    "session": Session,
    "capture": Captured,
    "out_of_memory": OutOfMemory,
}


def to_line(row: Pass) -> str:
    """One JSON object whose first key is ``row``, the kind; no line break. Of a pass, what is 0 or None is left out."""
    if isinstance(row, PassRow):
        own = {name: value for name, value in vars(row).items() if name != "step"}
        step = {name: value for name, value in vars(row.step).items() if value}
        return _encode({"row": "pass", **own, **step})
    kind = next(kind for kind, each in _KINDS.items() if isinstance(row, each))
    return _encode({"row": kind, **vars(row)})


def from_line(line: str) -> Pass:
    """The inverse of ``to_line``; ``UserError`` for an invalid line."""
    try:
        found = json.loads(line)
        kind = found.pop("row")
        if kind != "pass":
            return _KINDS[kind](**found)
        own = {name: found.pop(name) for name in ("number", "num_rejected", "num_preempted")}
        if "experts" in found:
            found["experts"] = Touched(**found["experts"])
        return PassRow(**own, step=Stepped(**_NOTHING | found))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"not a row of passes.jsonl: {line[:80]!r} ({error})") from error


def read_passes(path: Path) -> Iterator[Pass]:
    """The rows of a ``passes.jsonl`` in order, but for a last one that a kill, or a write at this moment, has cut."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield from_line(line)


def require_present_version(directory: Path) -> None:
    """``UserError`` for a directory whose run an earlier version began."""
    require(
        not (directory / "events.jsonl").exists(),
        f"{str(directory)!r} holds a run of an earlier version, whose record (events.jsonl) this one does not read: "
        "name a new directory, or move this one away",
    )


@dataclass(kw_only=True)
class _Running:
    """A request that has not ended."""

    submitted: Submitted
    num_cached: int = 0
    first_token: float | None = None
    num_prefill: int = 0
    switches: list[tuple[int, str]] = field(default_factory=list)
    steps: list[Verified] = field(default_factory=list)  # the engine's own objects, which it holds too
    numbers: list[int] = field(default_factory=list)  # of their passes

    def emit(self, num_tokens: int, time: float) -> None:
        if num_tokens and self.first_token is None:
            self.first_token = time

    def row(self, session: str, end: Finished) -> RequestRow:
        steps, asked = self.steps, self.submitted
        most = max((len(step.drafts) for step in steps), default=0)
        parts = None
        if self.switches:
            parts = count_parts(self.switches, steps, end.num_output_tokens, self.num_prefill, most)
        return RequestRow(
            name=end.sequence,
            session=session,
            reason=end.reason,
            category=asked.category,
            turn=asked.turn,
            num_turns=asked.num_turns,
            num_prompt_tokens=asked.num_prompt_tokens,
            num_cached_tokens=self.num_cached,
            num_output_tokens=end.num_output_tokens,
            arrival=asked.time,
            first_token=self.first_token,
            ended=end.time,
            counts=vars(StepCounts.of(steps, most)),
            parts=parts,
            steps=[
                RecordedStep(number, step.drafts, step.accepted, step.emitted)
                for number, step in zip(self.numbers, steps, strict=True)
            ],
        )


class Recorder:
    """Makes rows of the events of one session; ``UserError`` for events that cannot belong to one."""

    def __init__(self, session: str = f"{WHOLE}-0", machine: str = "") -> None:
        self._session = session
        self._machine = machine
        self._is_begun = False
        self._running: dict[str, _Running] = {}
        self._num_passes = self._num_rejected = self._num_preempted = 0

    def take(self, event: Event) -> Iterator[Pass | RequestRow]:
        """The rows that ``event`` completes; a failed request has one too, with the reason ``error``."""
        if not self._is_begun:
            self._is_begun = True
            yield Session(name=self._session, time=event.time, machine=self._machine)
        match event:
            case Verified():
                request = self._request(event.sequence)
                request.emit(event.emitted, event.time)
                request.steps.append(event)
                request.numbers.append(self._num_passes)
                self._num_rejected += len(event.drafts) - event.accepted
            case Submitted(sequence=name):
                require(
                    name not in self._running, f"{name!r} is submitted twice: give every prompt its own id"
                )
                self._running[name] = _Running(submitted=event)
            case Prefilled():
                request = self._request(event.sequence)
                request.emit(event.emitted, event.time)
                request.num_prefill += event.emitted
                request.num_cached += event.num_cached if event.emitted else 0
            case Switched():
                self._request(event.sequence).switches.append((event.at, event.part))
            case Preempted():
                self._num_preempted += 1
            case Finished():
                request = self._request(event.sequence)
                del self._running[event.sequence]
                yield request.row(self._session, event)
            case Stepped():
                yield PassRow(
                    number=self._num_passes,
                    num_rejected=self._num_rejected,
                    num_preempted=self._num_preempted,
                    step=event,
                )
                self._num_passes += 1
                self._num_rejected = self._num_preempted = 0
            case Captured() | OutOfMemory():
                yield event

    def _request(self, name: str) -> _Running:
        if name not in self._running:
            raise UserError(f"{name!r} is not running here: the events are corrupt, run again")
        return self._running[name]


def tables(events: Iterable[Event]) -> tuple[list[RequestRow], list[Pass]]:
    """The rows of one session in memory: requests as they ended, without those that were tried again, and passes."""
    requests: dict[str, RequestRow] = {}
    passes: list[Pass] = []
    recorder = Recorder()
    for event in events:
        for row in recorder.take(event):
            if isinstance(row, RequestRow):
                requests.pop(row.name, None)
                requests[row.name] = row
            else:
                passes.append(row)
    return list(requests.values()), passes
