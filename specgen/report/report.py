"""The report of a run, also of an unfinished one: a pure function of its rows."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from specgen.config import UserError, require
from specgen.config.json_fields import load_json
from specgen.record import columns
from specgen.record.columns import NO_CATEGORY, Array, Run
from specgen.record.files import Rows
from specgen.record.progress import WORKING
from specgen.record.record_rows import Row, read_passes, require_present_version
from specgen.record.results import is_gone
from specgen.report.acceptance import Acceptance, Speculation, figures
from specgen.report.display import count, several
from specgen.report.timings import LatencyStats, PassSums, StepStats, WallTime, latencies

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
    # texts without an answer, by finish reason
    ended_in_reasoning: Mapping[str, int] = field(default_factory=dict)
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
        """A sentence on requests that failed in one of the run and its baseline alone; empty without one."""
        plain = self.baseline
        ours_alone = (
            0 if plain is None or plain.num_requests is None else plain.num_requests - plain.num_compared
        )
        failed = [
            f"{several(number, 'request')} failed in {where}"
            for number, where in ((self.num_plain_errors, "plain decoding"), (ours_alone, "the run alone"))
            if number > 0
        ]
        return f"{' and '.join(failed)}, so the two runs did different work" if failed else ""

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


def report_of(run: Run, passes: Iterable[Row], *, num_errors: int = 0) -> Report:
    """The report of a run's columns and, in one pass over them, of its ``passes``.

    ``num_errors`` requests failed, which are in no other number.
    """
    sums = PassSums()
    sums.clock.add_requests(run)
    sums.add(passes)
    found, in_reasoning = Acceptance(run).speculation(), run.in_reasoning
    ttft, tpot = latencies(run)
    return Report(
        **vars(found),
        num_spec_tokens=run.counts.num_spec_tokens,
        categories=_breakdown(run, "category"),
        turns=_breakdown(run, "turn"),
        parts={}
        if run.reasoning is None
        # which of them has the prefill's token is not known
        else {part: replace(each, tokens_per_step=None) for part, each in _breakdown(run, "part").items()},
        ended_in_reasoning=_reasons(run, run.reason[in_reasoning]),
        num_prompt_tokens=int(run.num_prompt_tokens.sum()),
        num_cached_tokens=int(run.num_cached_tokens.sum()),
        finish_reasons=_reasons(run, run.reason),
        num_errors=num_errors,
        num_unfinished=0,
        num_preemptions=sums.num_preempted,
        num_lost_tokens=max(sums.num_tokens - found.total_num_output_tokens, 0),
        wall_seconds=sums.clock.seconds,
        ttft_seconds=ttft,
        tpot_seconds=tpot,
        steps=sums.steps(),
        wall=None if sums.clock.sharded else sums.wall(sums.clock.seconds),
        num_empty=int((run.is_empty & ~in_reasoning).sum()),
    )


def _reasons(run: Run, codes: Array) -> dict[str, int]:
    """How often each reason is among ``codes``."""
    return dict(sorted((run.reasons[code], number) for code, number in Counter(codes.tolist()).items()))


def _breakdown(run: Run, by: str) -> dict[str, Speculation]:
    """One entry per group, ordered by label but for parts; empty for a single group, which repeats the total."""
    groups = figures(run, by)
    labels = groups if by == "part" else sorted(groups)
    return {label: groups[label].speculation() for label in labels} if len(groups) > 1 else {}


def report_categories(run: Run) -> dict[str, Report]:
    """The report of each category alone; passes, shared by categories, are in none.

    The time of a category is from its first request to its last, so its speed means something only where categories
    ran one after the other.
    """
    return {
        label: report_of(group, ()) for label, group in run.by("category").items() if label != NO_CATEGORY
    }


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
        columns.read(directory, record["engine"]["num_spec_tokens"]),
        read_passes(passes),
        num_errors=len(Rows(directory / "errors.jsonl")),
    )
    expected = status.get("total") or None
    left = 0 if expected is None else max(0, expected - report.num_requests - report.num_errors)
    state = status.get("state", "stopped")
    return replace(report, state=state, num_expected=expected, num_unfinished=left), record


def requests_of(directory: Path, report: Report) -> Run:
    """The requests in ``directory``, whose ``report`` it is; none where its rows were removed.

    ``UserError`` where it is finished and has some of them alone, as after a copy that was broken off.
    """
    found = columns.read(directory, report.num_spec_tokens)
    require(
        report.state is not None or len(found) in (0, report.num_requests),
        f"{directory / 'completions.jsonl'} has {count(len(found))} of the {several(report.num_requests, 'request')} "
        "that its report is of: copy the directory as it was left",
    )
    return found


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
    if found.get("state") == _FINISHED and not (directory / "report.json").exists():
        return {**found, "state": "its report.json is missing"}
    return found
