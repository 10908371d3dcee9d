"""What happened, as rows of two tables: requests (in ``completions.jsonl``) and passes (``passes.jsonl``).

The engine hands out both, and every figure is a function of them. Times are seconds since its engine was warm.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from specgen.config import CONFIDENCE_LEVELS, UserError, first_line, require
from specgen.record.files import whole_lines

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


class StepCounts:
    """The verify steps of a request, or of several, by draft position: lists of ``[K]``, the histogram ``[K + 1]``.

    ``level_reached`` and ``level_accepted`` are by level of confidence (see ``config.CONFIDENCE_LEVELS``), of drafts
    behind accepted ones; ``unverified`` counts the drafts that the target was not asked about.
    """

    def __init__(self, num_spec_tokens: int) -> None:
        self.drafted = [0] * num_spec_tokens
        self.reached = [0] * num_spec_tokens
        self.accepted = [0] * num_spec_tokens
        self.histogram = [0] * (num_spec_tokens + 1)
        self.without_drafts = self.unverified = 0
        self.level_reached = [0] * len(CONFIDENCE_LEVELS)
        self.level_accepted = [0] * len(CONFIDENCE_LEVELS)

    @classmethod
    def of(cls, steps: Iterable[Step], num_spec_tokens: int) -> Self:
        """The counts of ``steps``; ``UserError`` for one that cannot belong to a run with this K."""
        counts, most, steps = cls(num_spec_tokens), num_spec_tokens, list(steps)
        for step in steps:
            if not step.levels:  # most steps of most runs, and a text has hundreds
                continue
            verified = len(step.drafts)
            counts.unverified += max(len(step.levels) - verified, 0)
            for level in step.levels[: min(step.accepted + 1, verified)]:
                counts.level_reached[level] += 1
            for level in step.levels[: step.accepted]:
                counts.level_accepted[level] += 1
        pairs = zip([len(step.drafts) for step in steps], [step.accepted for step in steps], strict=True)
        for (drafted, accepted), number in Counter(pairs).items():
            require(drafted <= most, f"a step has {drafted} drafts but K is {most}: give the run's K")
            require(
                0 <= accepted <= drafted,
                f"a step accepted {accepted} of {drafted} drafts: the rows are corrupt, run again",
            )
            if drafted == 0:
                counts.without_drafts += number
                continue
            for position in range(drafted):
                counts.drafted[position] += number
                counts.reached[position] += number * (accepted >= position)
                counts.accepted[position] += number * (accepted > position)
            counts.histogram[accepted] += number
        return counts

    def __add__(self, other: "StepCounts") -> "StepCounts":
        """The counts of both, as of one run."""
        found = StepCounts(len(self.drafted))
        for name in ("drafted", "reached", "accepted", "histogram", "level_reached", "level_accepted"):
            pairs = zip(getattr(self, name), getattr(other, name), strict=True)
            setattr(found, name, [ours + theirs for ours, theirs in pairs])
        found.without_drafts = self.without_drafts + other.without_drafts
        found.unverified = self.unverified + other.unverified
        return found

    @classmethod
    def of_row(cls, row: Mapping[str, Any], num_spec_tokens: int) -> Self:
        """The counts whose ``vars`` are ``row``, of at most K drafts; ``UserError`` where they are of more."""
        most = len(row["drafted"])
        require(
            most <= num_spec_tokens, f"a step has {most} drafts but K is {num_spec_tokens}: give the run's K"
        )
        counts, more = cls(num_spec_tokens), [0] * (num_spec_tokens - most)
        for name, value in row.items():
            by_position = name in ("drafted", "reached", "accepted", "histogram")
            setattr(counts, name, value + more if by_position else value)
        return counts

    @property
    def num_steps(self) -> int:
        """Steps with drafts."""
        return sum(self.histogram)


def count_parts(
    switches: Sequence[tuple[int, str]],
    steps: Sequence[Step],
    num_output_tokens: int,
    most: int,
) -> dict[str, Any]:
    """The steps and tokens of one text by part: a step belongs to the part of its first token.

    ``switches`` has the output token from which on the text is of a part, an answer before the first;
    other tokens than those of ``steps``, which have at most ``most`` drafts, came before them. ``part`` is the last.
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
    counts = {part: vars(StepCounts.of(each, most)) for part, each in steps_of.items()}
    return {"part": changes[-1][1], "steps": counts, "tokens": tokens}


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
    """The inverse of ``copy_id``; the id itself of a request that is no copy."""
    return request.partition(_COPY)[0]


def conversation_of(request: str, turn: int) -> str:
    """The id of the conversation whose ``turn`` this ``request`` asks; the inverse of ``turn_id``."""
    return request if turn == 1 else request.removesuffix(f"/turn-{turn}")


def units_of(prompts: Iterable[tuple[str, int]]) -> dict[str, str]:
    """Of conversations, each with a hash of its first prompt, those that share it with others: by each the first.

    Several samples of one prompt are as little independent as the turns of a conversation.
    """
    firsts, found = dict[int, str](), dict[str, str]()
    for conversation, prompt in prompts:
        first = firsts.setdefault(prompt, conversation)
        if first != conversation:
            found[first] = found[conversation] = first
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRow:
    """One request that has ended; times are seconds since the session's engine was warm.

    ``steps`` is None where they were not kept; ``counts`` are theirs, and ``parts`` as from ``count_parts`` where the
    text has reasoning. An answer ``is_empty`` without a character, where the row has it. ``unit`` is that of
    ``units_of``, where the conversation has one. ``asked`` is a digest of the row of the input, where that is known.
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
    counts: Mapping[str, Any]
    parts: Mapping[str, Any] | None
    steps: Sequence[Step] | None
    is_empty: bool = False
    unit: str = ""
    asked: str = ""

    def to_json(self, *, with_steps: bool = True) -> dict[str, Any]:
        """The ``record`` of a row, which has the other fields itself; see ``of_row``."""
        found: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("session", "arrival", "first_token", "ended", "num_cached_tokens", "counts")
        }
        if self.asked:
            found["asked"] = self.asked
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
    def of_row(cls, row: Mapping[str, Any], units: Mapping[str, str] | None = None) -> Self:
        """From a row of ``completions.jsonl``; ``UserError`` for one of a version that kept no record in it.

        So it is for one that another program has damaged.
        """
        require(
            "record" in row,
            f"the row of {row.get('id')!r} has no record, as in earlier versions: generate into a new directory",
        )
        try:
            return cls._of_row(row, row["record"], units or {})
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"completions.jsonl: the row of {row.get('id')!r} is damaged ({type(error).__name__}: "
                f"{first_line(error)}): remove that line, and run the same command again"
            ) from error

    @classmethod
    def _of_row(cls, row: Mapping[str, Any], record: Mapping[str, Any], units: Mapping[str, str]) -> Self:
        num_tokens, turn, parts = len(row["token_ids"]), row.get("turn", 1), record.get("parts")
        every = [record["counts"], *(() if parts is None else (parts["steps"][part] for part in PARTS))]
        for counts in every:
            _require_counts(counts)
        numbers = record["arrival"], record["ended"], record["num_cached_tokens"], row["num_prompt_tokens"]
        sum(numbers, record["first_token"] or 0.0)  # a TypeError of anything else
        int(record["session"].rpartition("-")[2])
        return cls(
            name=row["id"],
            session=record["session"],
            reason=row.get("ended_by", row["finish_reason"]),
            category=row.get("category"),
            turn=turn,
            num_turns=record.get("num_turns", 1),
            num_prompt_tokens=row["num_prompt_tokens"],
            num_cached_tokens=record["num_cached_tokens"],
            num_output_tokens=num_tokens,
            arrival=record["arrival"],
            first_token=record["first_token"],
            ended=record["ended"],
            counts=record["counts"],
            parts=parts,
            steps=_steps(record["steps"], num_tokens) if "steps" in record else None,
            is_empty="text" in row and not row["text"].strip(),
            unit=units.get(conversation_of(row["id"], turn), ""),
            asked=record.get("asked", ""),
        )

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
    def num_rejections(self) -> int:
        """Steps that rejected a draft."""
        return sum(step.accepted < len(step.drafts) for step in self.steps or ())

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts over steps with drafts; None without one."""
        steps = sum(self.counts["histogram"])
        return 1 + sum(self.counts["accepted"]) / steps if steps else None


def _require_counts(found: Mapping[str, Any]) -> None:
    """``ValueError``, or what a wrong type raises, unless ``found`` are counts as ``StepCounts.of_row`` takes them."""
    known = vars(StepCounts(len(found["drafted"])))
    for name in ("reached", "accepted", "histogram", *found):
        own, value = known[name], found[name]
        is_one = len(value) == len(own) and sum(value) >= 0 if isinstance(own, list) else int(value) == value
        if not is_one:
            raise ValueError(f"record.counts.{name} is {value}")


def _steps(arrays: Mapping[str, Any], num_tokens: int) -> list[Step]:
    """The steps of a text; the last may have given less than it accepted, as the text ended within it."""
    left, found = num_tokens - 1, []  # the first token is the prefill's
    for number, drafts, accepted in zip(
        *(arrays[name] for name in ("pass", "drafts", "accepted")), strict=True
    ):
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
