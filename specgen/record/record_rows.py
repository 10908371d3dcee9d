"""What happened, as rows of two tables: requests (in ``completions.jsonl``) and passes (``passes.jsonl``).

The engine hands out both, and every figure is a function of them. Times are seconds since its engine was warm.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import msgspec

from specgen.config import CONFIDENCE_LEVELS, UserError, first_line, require
from specgen.record.files import sample_id, whole_lines

PARTS = ("reasoning", "answer")


class Step(NamedTuple):
    """One verify step of one request: its drafts, how many the target accepted, how many tokens became output.

    ``emitted`` is ``accepted + 1`` unless the text ended within the step. Plain decoding has no drafts. ``levels`` are
    those of the drafter's confidence in what it drafted, of which ``drafts`` were the first ones; not kept in rows.
    """

    number: int  # of its pass
    drafts: Sequence[int]
    accepted: int
    emitted: int
    levels: Sequence[int] = ()
    # the first draft that was not accepted is one that constraints do not allow; not kept either
    is_cut: bool = False


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]  # as a row that is read has it


def _no_levels() -> list[int]:
    return [0] * len(CONFIDENCE_LEVELS)


class StepCounts(msgspec.Struct, forbid_unknown_fields=True):
    """The verify steps of a request, by draft position: lists of ``[K]``, the histogram ``[K + 1]``.

    ``level_reached`` and ``level_accepted`` are by level of confidence (see ``config.CONFIDENCE_LEVELS``), of drafts
    behind accepted ones; ``unverified`` counts the drafts that the target was not asked about, and ``cut`` the steps
    that accepted no more because of a constraint. It is the form of ``record.counts`` in a row; K is the longest
    step's, at most the run's.
    """

    drafted: list[Count]
    reached: list[Count]
    accepted: list[Count]
    histogram: list[Count]
    without_drafts: Count = 0
    unverified: Count = 0
    level_reached: list[Count] = msgspec.field(default_factory=_no_levels)
    level_accepted: list[Count] = msgspec.field(default_factory=_no_levels)
    cut: Count = 0

    def __post_init__(self) -> None:
        """``ValueError`` for lists that are not of one K."""
        num, levels = len(self.drafted), len(CONFIDENCE_LEVELS)
        lists = (self.drafted, self.reached, self.accepted, self.histogram)
        lengths = [len(each) for each in (*lists, self.level_reached, self.level_accepted)]
        if lengths != [num, num, num, num + 1, levels, levels]:
            raise ValueError(f"record.counts has lists of {', '.join(map(str, lengths))}")

    @classmethod
    def of(cls, steps: Sequence[Step], num_spec_tokens: int) -> Self:
        """The counts of ``steps``; ``UserError`` for one that cannot belong to a run with this K."""
        most, levels = num_spec_tokens, len(CONFIDENCE_LEVELS)
        drafted, reached, accepted = [0] * most, [0] * most, [0] * most
        histogram, level_reached, level_accepted = [0] * (most + 1), [0] * levels, [0] * levels
        without_drafts = unverified = 0
        for step in steps:
            if not step.levels:  # most steps of most runs, and a text has hundreds
                continue
            verified = len(step.drafts)
            unverified += max(len(step.levels) - verified, 0)
            for level in step.levels[: min(step.accepted + 1, verified)]:
                level_reached[level] += 1
            for level in step.levels[: step.accepted]:
                level_accepted[level] += 1
        pairs = zip([len(step.drafts) for step in steps], [step.accepted for step in steps], strict=True)
        for (num, right), number in Counter(pairs).items():
            require(num <= most, f"a step has {num} drafts but K is {most}: give the run's K")
            require(
                0 <= right <= num,
                f"a step accepted {right} of {num} drafts: the rows are corrupt, run again",
            )
            if num == 0:
                without_drafts += number
                continue
            for position in range(num):
                drafted[position] += number
                reached[position] += number * (right >= position)
                accepted[position] += number * (right > position)
            histogram[right] += number
        return cls(
            drafted,
            reached,
            accepted,
            histogram,
            without_drafts,
            unverified,
            level_reached,
            level_accepted,
            sum([step.is_cut for step in steps]),
        )

    def __add__(self, other: "StepCounts") -> "StepCounts":
        """Those of both, of which one may have a smaller K."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        added: list[Any] = [
            [*map(sum, zip_longest(ours, theirs, fillvalue=0))] if isinstance(ours, list) else ours + theirs
            for ours, theirs in pairs
        ]
        return StepCounts(*added)

    @property
    def num_steps(self) -> int:
        """Steps with drafts."""
        return sum(self.histogram)


class TextParts(msgspec.Struct):
    """The steps and tokens of a text with reasoning, by part (see ``PARTS``); ``part`` is the one in which it ended."""

    part: str
    steps: dict[str, StepCounts]
    tokens: dict[str, Count]

    def __post_init__(self) -> None:
        """``ValueError`` for other parts."""
        if not {*self.steps} == {*self.tokens} == {*PARTS}:
            raise ValueError(f"the parts of the text are {', '.join(self.steps)}")


def count_parts(
    switches: Sequence[tuple[int, str]],
    steps: Sequence[Step],
    num_output_tokens: int,
    most: int,
) -> TextParts:
    """The steps and tokens of one text by part: a step belongs to the part of its first token.

    ``switches`` has the output token from which on the text is of a part, an answer before the first;
    other tokens than those of ``steps``, which have at most ``most`` drafts, came before them.
    """
    changes = [(0, "answer"), *switches]
    steps_of: dict[str, list[Step]] = {"answer": [], "reasoning": []}
    first = num_output_tokens - sum(step.emitted for step in steps)
    for step in steps:
        steps_of[next(part for at, part in reversed(changes) if at <= first)].append(step)
        first += step.emitted
    starts = [min(at, num_output_tokens) for at, _ in changes]  # the last may be of a token that was dropped
    tokens = dict.fromkeys(PARTS, 0)
    for (_, part), start, end in zip(changes, starts, [*starts[1:], num_output_tokens], strict=True):
        tokens[part] += end - start
    counts = {part: StepCounts.of(each, most) for part, each in steps_of.items()}
    return TextParts(part=changes[-1][1], steps=counts, tokens=tokens)


WHOLE = "0/1"  # the shard of a run that has no others
ONLY_SESSION = f"{WHOLE}-0"
_encode = json.JSONEncoder(separators=(",", ":"), default=vars).encode


def turn_id(conversation: str, turn: int) -> str:
    """The id of the request for a turn of the conversation with this id; its first turn, 1, has the id itself."""
    return conversation if turn == 1 else f"{conversation}/turn-{turn}"


_COPY = "\0"  # in no id of a row


def copy_id(request: str, number: int) -> str:
    """The id of a request for which the same is drawn as for ``request``."""
    return f"{request}{_COPY}{number}"


def drawn_as(request: str) -> str:
    """The inverse of ``copy_id``; the id itself of a request that is no copy. Samples of copies are samples still."""
    original, _, copy = request.partition(_COPY)
    return original + "".join(copy.partition("/")[1:])


def conversation_of(request: str, turn: int) -> str:
    """The id of the conversation whose ``turn`` this ``request`` asks; the inverse of ``turn_id``."""
    return request if turn == 1 else request.removesuffix(f"/turn-{turn}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRow:
    """One request that has ended; times are seconds since the session's engine was warm.

    ``steps`` is None where they were not kept; ``counts`` are theirs, and ``parts`` are of a text with reasoning. An
    answer ``is_empty`` without a character, where the row has it. ``asked`` is a digest of the row of the input, where
    that is known.
    """

    name: str
    session: str = ONLY_SESSION
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
    counts: StepCounts
    parts: TextParts | None
    steps: Sequence[Step] | None
    is_empty: bool = False
    asked: str = ""

    def to_json(self, *, with_steps: bool = True) -> dict[str, Any]:
        """The ``record`` of a row, which has the other fields itself; see ``of_row``."""
        own = {name: getattr(self, name) for name in Record.__struct_fields__}
        found: dict[str, Any] = msgspec.to_builtins(Record(**own))
        if with_steps and self.steps is not None:
            numbers, drafts, accepted, *_ = zip(*self.steps, strict=True) if self.steps else ((), (), ())
            found["steps"] = msgspec.to_builtins(_Steps(list(numbers), list(drafts), list(accepted)))
        return found

    @staticmethod
    def of_row(row: Mapping[str, Any]) -> "RequestRow":
        """From a row of ``completions.jsonl``; ``UserError`` for one of a version that kept no record in it.

        So it is for one that another program has damaged.
        """
        try:
            line, arrays = msgspec.convert(row, Line), (row.get("record") or {}).get("steps")
            steps = None if arrays is None else _steps(arrays, len(line.token_ids or ()))
        except ValueError as error:
            raise damaged(row.get("id"), error) from error
        return line.request(steps)

    def moved(self, seconds: float) -> Self:
        """The same of a run in which so many seconds came before what is here counted from 0."""
        return replace(
            self,
            arrival=self.arrival + seconds,
            first_token=None if self.first_token is None else self.first_token + seconds,
            ended=self.ended + seconds,
        )

    def numbered(self, numbers: Sequence[int]) -> Self:
        """The same of a run in which pass ``i`` has the number ``numbers[i]``."""
        return replace(
            self, steps=self.steps and [step._replace(number=numbers[step.number]) for step in self.steps]
        )

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts over steps with drafts; None without one."""
        steps = self.counts.num_steps
        return 1 + sum(self.counts.accepted) / steps if steps else None


def damaged(name: object, error: Exception) -> UserError:
    """What is said of a row that another program has damaged."""
    return UserError(
        f"completions.jsonl: the row of {name!r} is damaged ({type(error).__name__}: {first_line(error)}): remove that "
        "line, and run the same command again"
    )


# --- the form of a row --------------------------------------------------------------------------------


class Record(msgspec.Struct, omit_defaults=True):
    """``record`` of a row, but for its steps, which take longer to read than all else."""

    session: str
    arrival: float
    first_token: float | None
    ended: float
    num_cached_tokens: Count
    counts: StepCounts
    parts: TextParts | None = None
    num_turns: Count = 1
    asked: str = ""

    def __post_init__(self) -> None:
        """``ValueError`` for a session that no process has named, and for parts that do not add up."""
        int(self.session.rpartition("-")[2])
        if self.parts is not None:
            reasoning, answer = (self.parts.steps[part] for part in PARTS)
            if reasoning + answer != self.counts:
                raise ValueError(f"the parts of the text have {reasoning + answer}, the whole {self.counts}")


class _Steps(msgspec.Struct):
    numbers: list[int] = msgspec.field(name="pass")
    drafts: list[list[int]]
    accepted: list[int]


class Line(msgspec.Struct, kw_only=True):
    """What figures are made of in a row of ``completions.jsonl``; one without ``record`` is of an earlier version."""

    id: str
    sample: Count | None = None  # of several
    prompt: str | None = None
    text: str | None = None
    token_ids: list[int] | None = None  # none of a text that was only scored
    finish_reason: str = ""
    ended_by: str | None = None
    turn: Count = 1
    num_prompt_tokens: Count = 0
    category: str | None = None
    record: Record | None = None

    def request(self, steps: Sequence[Step] | None = None) -> RequestRow:
        """The request of the row; ``UserError`` for one without a record."""
        record = self.record
        require(
            record is not None,
            f"the row of {self.id!r} has no record, as in earlier versions: generate into a new directory",
        )
        return RequestRow(
            name=sample_id(self.id, self.sample),
            reason=self.ended_by or self.finish_reason,
            category=self.category,
            turn=self.turn,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=len(self.token_ids or ()),
            steps=steps,
            is_empty=self.text is not None and not self.text.strip(),
            **{name: getattr(record, name) for name in Record.__struct_fields__},
        )


def _steps(arrays: object, num_tokens: int) -> list[Step]:
    """The steps of a text; the last may have given less than it accepted, as the text ended within it."""
    each = msgspec.convert(arrays, _Steps)
    left, found = num_tokens - 1, []  # the first token is the prefill's
    for number, drafts, accepted in zip(each.numbers, each.drafts, each.accepted, strict=True):
        emitted = min(accepted + 1, left)
        found.append(Step(number, drafts, accepted, emitted))
        left -= emitted
    return found


@dataclass(frozen=True, kw_only=True)
class PassRow:
    """A pass of the engine: the rows it computed, and what came of them; ``number`` counts from 0.

    ``num_spec_tokens`` is K, the drafts per sequence (0 in a prefill). ``first_pass_rows`` are the rows of the drafter
    KV fill and ``first_pass_kept`` those of accepted tokens (the rest is padding of a padded drafter batch);
    ``loop_rows`` are the rows of the drafting passes.

    ``seconds`` are the device's, from the beginning of the pass to its end, without captures of CUDA graphs. Before
    that it had nothing to do for ``idle`` seconds; in at most ``idle_outside`` of them its caller, who prepares
    prompts and writes texts, had the host.
    """

    number: int
    kind: str  # "prefill" or "decode"
    time: float  # when its results were read
    seconds: float
    num_sequences: int
    num_spec_tokens: int
    target_rows: int
    first_pass_rows: int
    first_pass_kept: int
    loop_rows: int
    num_tokens: int = 0  # that became output
    num_drafting: int = 0  # sequences that had drafts
    num_accepted: int = 0  # drafts
    num_rejected: int = 0
    num_preempted: int = 0  # sequences that gave their pages back before it
    num_waiting: int = 0  # prompts that had not begun
    idle: float = 0.0
    idle_outside: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A CUDA graph for steps of ``num_sequences`` was captured, or not for lack of memory (not ``fits``)."""

    time: float
    what: str  # "step", or the name of a pass
    num_sequences: int
    seconds: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """The device had no memory for a pass; the run continues with these limits."""

    time: float
    max_batch_size: int
    max_prefill_tokens: int


EngineRow = PassRow | Captured | OutOfMemory


def moved(row: EngineRow, seconds: float) -> EngineRow:
    """As ``RequestRow.moved``."""
    return replace(row, time=row.time + seconds)


@dataclass(frozen=True, kw_only=True)
class Session:
    """A process begins to work on a run; the rows behind this one are its own, by its clock.

    ``name`` is ``SHARD-NUMBER``: shards run side by side, the sessions of one of them after each other.
    """

    name: str
    time: float  # when its first pass began
    machine: str = ""


def shard_of(session: str) -> str:
    """The shard that the session of this name is of, as in ``1/4``."""
    return session.rpartition("-")[0]


Row = EngineRow | Session
_KINDS: dict[str, type[Row]] = {
    "pass": PassRow,
    "session": Session,
    "capture": Captured,
    "out_of_memory": OutOfMemory,
}
_NOTHING = {each.name: 0 for each in fields(PassRow) if each.name not in ("number", "kind")}


def to_line(row: Row) -> str:
    """One JSON object whose first key is ``row``, the kind; no line break. Of a pass, what is 0 or None is left out."""
    kind = next(kind for kind, each in _KINDS.items() if isinstance(row, each))
    if isinstance(row, PassRow):
        values = {name: value for name, value in vars(row).items() if value or name == "number"}
    else:
        values = vars(row)
    return _encode({"row": kind, **values})


def from_line(line: str) -> Row:
    """The inverse of ``to_line``; ``UserError`` for an invalid line."""
    try:
        found = json.loads(line)
        kind = found.pop("row")
        if kind == "pass":
            found = _NOTHING | found
            found.pop("experts", None)  # of a mixture, in rows of earlier versions
        return _KINDS[kind](**found)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"not a row of passes.jsonl: {line[:80]!r} ({error})") from error


def read_passes(path: Path) -> Iterator[Row]:
    """The rows of a ``passes.jsonl`` in order, but for a last one that a kill, or a write at this moment, has cut."""
    for number, line in whole_lines(path):
        try:
            yield from_line(line.decode(errors="replace"))
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}: remove that line") from error


def require_present_version(directory: Path) -> None:
    """``UserError`` for a directory whose run an earlier version began."""
    require(
        not (directory / "events.jsonl").exists(),
        f"{str(directory)!r} holds a run of an earlier version, whose record (events.jsonl) this one does not read: "
        "name a new directory, or move this one away",
    )
