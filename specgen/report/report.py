"""The report of a run, also of an unfinished one: a pure function of its rows."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from specgen.config import UserError
from specgen.config.json_fields import load_json
from specgen.record.files import Rows
from specgen.record.progress import WORKING
from specgen.record.record_rows import (
    ONLY_SESSION,
    PARTS,
    Captured,
    OutOfMemory,
    PassRow,
    RequestRow,
    Row,
    Session,
    StepCounts,
    conversation_of,
    read_passes,
    require_present_version,
)
from specgen.record.results import is_gone, requests_in
from specgen.report.acceptance import RequestSum, Speculation
from specgen.report.display import count, several
from specgen.report.timings import (
    LatencyStats,
    StepStats,
    StepSum,
    WallClock,
    WallSum,
    WallTime,
    latency_stats,
)

DEFINITIONS = (
    ("mean acceptance length", "1 + accepted / drafts over verify steps with drafts; no prefill, no padding"),
    ("acceptance at token i", "steps that accepted more than i drafts / that drafted more than i (joint)"),
    ("conditional at token i", "the same among the steps that accepted all drafts before i"),
    ("[low, high]", "95 % interval, computed over conversations, not steps"),
)
RECEIVED_TERM = (
    "tokens per step",
    "that texts got: drafts accepted behind the end of a text, which the length counts as vLLM's does, are in no text",
)
_FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Comparison with plain decoding of the same requests; ``ratio`` above 1 means that the run is faster.

    ``ratio`` and ``identical`` are None of a run none of whose steps had drafts, which compares nothing.
    """

    output_tokens_per_second: float | None
    ratio: float | None
    identical: float | None  # share of the compared requests with equal texts
    num_compared: int
    num_requests: int | None = None  # that plain decoding answered; None of an older file
    sampled: bool = False  # whether there are sampled texts, which may differ


@dataclass(frozen=True, kw_only=True)
class Report(Speculation):
    """All statistics of one run; a breakdown is empty if there is only one category or turn.

    ``ttft_seconds`` is the time from submission to the first token; ``tpot_seconds`` the time from the first token to
    the end over the tokens after the first, for requests with at least two tokens. ``state`` and ``num_expected``, the
    requests of the whole run where that is known, are those of a run that is not finished (see ``load_so_far``).
    """

    num_spec_tokens: int
    categories: Mapping[str, Speculation]
    turns: Mapping[str, Speculation]
    # of reasoning and answer; empty where no text has reasoning
    parts: Mapping[str, Speculation] = field(default_factory=dict)
    ended_in_reasoning: Mapping[str, int] = field(
        default_factory=dict
    )  # texts without an answer, by finish reason
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    finish_reasons: Mapping[str, int]
    num_errors: int  # failed requests; they are in no other number
    num_unfinished: int  # of a run that is not finished: requests that have not ended
    num_preemptions: int
    num_lost_tokens: int = 0  # computed in vain, as the run stopped or the request failed
    wall_seconds: float  # from first to last; the sum if resumed, the slowest shard's if merged
    ttft_seconds: LatencyStats | None
    tpot_seconds: LatencyStats | None
    steps: Mapping[str, StepStats]  # by kind
    wall: WallTime | None = None  # where the wall time went; None for shards, which run side by side
    baseline: Baseline | None = None
    num_empty: int = 0  # texts without a character, but for those that ended while reasoning
    state: str | None = None
    num_expected: int | None = None
    busy: str = ""  # what else the machine did, where that makes speeds doubtful

    @property
    def output_tokens_per_second(self) -> float | None:
        return self.total_num_output_tokens / self.wall_seconds if self.wall_seconds > 0 else None

    @property
    def num_plain_errors(self) -> int:
        """Requests that the baseline has failed, which makes its speed one of other work."""
        return 0 if self.baseline is None else max(self.num_requests - self.baseline.num_compared, 0)

    @property
    def unlike_work(self) -> str:
        """What one of the run and its baseline alone has failed, so that their ratio is one of unlike work."""
        plain = self.baseline
        ours_alone = (
            0 if plain is None or plain.num_requests is None else plain.num_requests - plain.num_compared
        )
        failed = [
            f"{several(number, 'request')} failed in {where}"
            for number, where in ((self.num_plain_errors, "plain decoding"), (ours_alone, "the run alone"))
            if number > 0
        ]
        return f"{' and '.join(failed)}, which makes the ratio one of unlike work" if failed else ""

    @property
    def draft_lengths(self) -> Mapping[str, int]:
        """Decode steps by K, the most frequent first; empty if all had the same K."""
        lengths = self.steps["decode"].by_num_spec_tokens if "decode" in self.steps else {}
        return lengths if len(lengths) > 1 else {}

    @property
    def unfinished(self) -> str:
        """A sentence if the run is not finished, else empty."""
        if self.state is None:
            return ""
        of = "" if self.num_expected is None else f" of {count(self.num_expected)} requests"
        return (
            f"This run is not finished ({self.state}, {count(self.num_requests)}{of} done): these are the numbers of "
            "the requests that are done, and of all passes. The same command resumes it."
        )

    def rows(self) -> dict[str, int]:
        """Rows computed and wasted in decode steps; ``loop`` are the draft loop's rows in steps of both kinds."""
        names = ("target_rows", "target_rejected", "first_pass_rows", "first_pass_wasted")
        decode = self.steps.get("decode")
        rows = {name.removesuffix("_rows"): getattr(decode, name) if decode else 0 for name in names}
        return {**rows, "loop": sum(steps.loop_rows for steps in self.steps.values())}

    def status(self) -> dict[str, Any]:
        """What ``status.json`` says of a finished run."""
        return {
            "total": self.num_requests + self.num_errors,
            "done": self.num_requests,
            "failed": self.num_errors,
            "output_tokens": self.total_num_output_tokens,
            "output_tokens_per_second": self.output_tokens_per_second,
            "acceptance_length": self.mean_acceptance_length,
        }

    def with_baseline(self, baseline: "Report", same: Sequence[bool], *, sampled: bool = False) -> Self:
        """This report with ``baseline``; ``same`` says of each request of both whether its texts are equal.

        ``sampled`` is whether some of them are sampled.
        """
        ours, theirs = self.output_tokens_per_second, baseline.output_tokens_per_second
        drafted = self.num_drafts > 0
        comparison = Baseline(
            output_tokens_per_second=theirs,
            ratio=ours / theirs if drafted and ours is not None and theirs else None,
            identical=(sum(same) / len(same) if same else 0.0) if drafted else None,
            num_compared=len(same),
            num_requests=baseline.num_requests,
            sampled=sampled,
        )
        return replace(self, baseline=comparison)

    def to_json(self) -> dict[str, Any]:
        """The content of ``report.json``: counters at the top level, times in seconds, None without data."""
        found = asdict(self)
        of_unfinished = {name: found.pop(name) for name in ("state", "num_expected")}
        return {
            **found,
            "output_tokens_per_second": self.output_tokens_per_second,
            "rows": self.rows(),
            **({} if self.state is None else of_unfinished),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The inverse of ``to_json``; ``msgspec.ValidationError`` for anything else."""
        return msgspec.convert(document, cls)


class _Sums:
    def __init__(self, num_spec_tokens: int) -> None:
        self.num_spec_tokens = num_spec_tokens
        # by kind and label, such as ("turn", "1"); of texts without parts all is answer
        self.requests = defaultdict[tuple[str, str], RequestSum](lambda: RequestSum(num_spec_tokens))
        self.has_reasoning = False
        self.ended_in_reasoning: Counter[str] = Counter()
        self.num_prompt_tokens = self.num_cached_tokens = self.num_preemptions = self.num_empty = 0
        self.reasons: Counter[str] = Counter()
        self.num_made = 0  # tokens, of all passes
        self.clock = WallClock()
        self.ttft: list[float] = []
        self.tpot: list[float] = []
        self.steps: dict[str, StepSum] = {}
        self.wall = WallSum()

    def add_passes(self, passes: Iterable[Row]) -> None:
        """Add the rows of ``passes.jsonl``, in their order."""
        session = ONLY_SESSION
        for row in passes:
            match row:
                case Session():
                    session = row.name
                    self.clock.see(session, row.time)
                case PassRow():
                    self.clock.see(session, row.time)
                    self.num_preemptions += row.num_preempted
                    self.num_made += row.num_tokens
                    self.steps.setdefault(row.kind, StepSum()).add(row)
                    self.wall.add(row)
                case Captured():
                    self.clock.see(session, row.time)
                    self.wall.add(row)
                case OutOfMemory():
                    self.clock.see(session, row.time)

    def add_request(self, row: RequestRow) -> None:
        """Add one request that has ended, with no error."""
        self.clock.see(row.session, row.arrival, row.ended)
        self.reasons[row.reason] += 1
        if row.parts is not None and row.parts["part"] == "reasoning":
            self.ended_in_reasoning[row.reason] += 1
        else:
            self.num_empty += row.is_empty
        if row.first_token is not None:
            self.ttft.append(row.first_token - row.arrival)
            if row.num_output_tokens > 1:
                self.tpot.append((row.ended - row.first_token) / (row.num_output_tokens - 1))
        self.num_prompt_tokens += row.num_prompt_tokens
        self.num_cached_tokens += row.num_cached_tokens
        counts = StepCounts.of_row(row.counts, self.num_spec_tokens)
        num_tokens = row.num_output_tokens
        # of other samples of the prompt more may come until the end
        conversation, left = (
            row.unit or conversation_of(row.name, row.turn),
            row.num_turns - row.turn + bool(row.unit),
        )
        category = "(none)" if row.category is None else row.category
        # which has each conversation once
        self.requests["turn", str(row.turn)].add(counts, num_tokens, row.unit, bool(row.unit))
        for key in (("all", ""), ("category", category)):
            self.requests[key].add(counts, num_tokens, conversation, left)
        if row.parts is None:
            self.requests["part", "answer"].add(counts, num_tokens, conversation, left)
            return
        self.has_reasoning = True
        for part, tokens in row.parts["tokens"].items():
            if tokens:
                steps = StepCounts.of_row(row.parts["steps"][part], self.num_spec_tokens)
                self.requests["part", part].add(steps, tokens, conversation, left)

    def report(self, num_errors: int) -> Report:
        found = self.requests["all", ""].result()
        return Report(
            **vars(found),
            num_spec_tokens=self.num_spec_tokens,
            categories=self._breakdown("category"),
            turns=self._breakdown("turn"),
            parts={
                # which of them has the prefill's token is not known
                part: replace(self.requests["part", part].result(), tokens_per_step=None)
                for part in (PARTS if self.has_reasoning else ())
            },
            ended_in_reasoning=dict(sorted(self.ended_in_reasoning.items())),
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            finish_reasons=dict(sorted(self.reasons.items())),
            num_errors=num_errors,
            num_unfinished=0,
            num_preemptions=self.num_preemptions,
            num_lost_tokens=max(self.num_made - found.total_num_output_tokens, 0),
            wall_seconds=self.clock.seconds,
            ttft_seconds=latency_stats(self.ttft),
            tpot_seconds=latency_stats(self.tpot),
            steps={kind: steps.result() for kind, steps in sorted(self.steps.items())},
            wall=None if self.clock.sharded else self.wall.result(self.clock.seconds),
            num_empty=self.num_empty,
        )

    def _breakdown(self, kind: str) -> dict[str, Speculation]:
        """One entry per group, ordered by label; empty for a single group, which repeats the total."""
        labels = sorted(label for of, label in self.requests if of == kind)
        return {label: self.requests[kind, label].result() for label in labels} if len(labels) > 1 else {}


def report_of(
    requests: Iterable[RequestRow], passes: Iterable[Row], *, num_spec_tokens: int, num_errors: int = 0
) -> Report:
    """The report of a run with K = ``num_spec_tokens``, in one pass over each of its tables.

    ``requests`` have ended; those with the reason ``error`` are in ``num_errors`` and in no other number. Memory grows
    with the number of requests (two floats each) and K, not with the steps. ``UserError`` for rows of another K.
    """
    sums = _Sums(num_spec_tokens)
    sums.add_passes(passes)
    for row in requests:
        if row.reason == "error":
            num_errors += 1
        else:
            sums.add_request(row)
    return sums.report(num_errors)


def report_categories(requests: Iterable[RequestRow], *, num_spec_tokens: int) -> dict[str, Report]:
    """The report of each category alone; passes, shared by categories, are in none.

    The time of a category is from its first request to its last, so its speed means something only where categories
    ran one after the other.
    """
    found: dict[str, _Sums] = {}
    for row in requests:
        if row.category is not None:
            found.setdefault(row.category, _Sums(num_spec_tokens)).add_request(row)
    return {category: sums.report(0) for category, sums in found.items()}


def load(directory: Path) -> tuple[Report, dict[str, Any]]:
    """The report and ``manifest.json`` of a run's directory; ``UserError`` if either is invalid."""
    remedy = "give a directory that `specgen generate --output` has finished"
    path = directory / "report.json"
    document, manifest = load_json(path, remedy), load_json(directory / "manifest.json", remedy)
    try:
        return Report.from_json(document), manifest
    except msgspec.ValidationError as error:
        raise UserError(
            f"{path} is not the report of a run ({error}): generate into a new directory"
        ) from error


def read_run(directory: str | Path) -> Report:
    """The report of the run in ``directory``, also of one that is not finished: what `specgen report` prints of it.

    ``UserError`` where there is none.
    """
    return load_so_far(Path(directory))[0]


# --- runs that are not finished -----------------------------------------------------------------


def load_so_far(directory: Path) -> tuple[Report, dict[str, Any]]:
    """The report and ``manifest.json`` as by ``load``, of an unfinished run computed from its rows.

    Its ``state`` is that of ``status.json``, ``stopped`` without one.
    """
    status = status_of(directory)
    if is_finished(directory, status):
        return load(directory)
    manifest, passes = directory / "manifest.json", directory / "passes.jsonl"
    require_present_version(directory)
    if not manifest.exists() or not passes.exists():
        return load(directory)  # says what is missing
    record = load_json(manifest, "generate into a new directory")
    report = report_of(
        requests_in(Rows(directory / "completions.jsonl")),
        read_passes(passes),
        num_spec_tokens=record["engine"]["num_spec_tokens"],
        num_errors=len(Rows(directory / "errors.jsonl")),
    )
    expected = status.get("total") or None
    left = 0 if expected is None else max(0, expected - report.num_requests - report.num_errors)
    state = status.get("state", "stopped")
    return replace(report, state=state, num_expected=expected, num_unfinished=left), record


def is_finished(directory: Path, status: Mapping[str, Any]) -> bool:
    """Whether the run in ``directory``, whose ``status_of`` it is, has a report of all its requests."""
    return status.get("state", _FINISHED) == _FINISHED and (directory / "report.json").exists()


def status_of(directory: Path) -> dict[str, Any]:
    """``status.json``; empty without one, or where a power failure has emptied it.

    Of a run whose process was killed, which it could not write, ``state`` says so.
    """
    path = directory / "status.json"
    try:
        found = load_json(path, "run the same command again") if path.exists() else {}
    except UserError:
        return {"state": "lost"}
    at_work = found.get("state") in WORKING
    if at_work and is_gone(found.get("pid"), found.get("host"), directory):
        return {**found, "state": f"stopped: process {found['pid']} is gone"}
    return found
