"""One repeat of an arm: the figures of one run of the workload, as values that a file can keep."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from statistics import fmean
from typing import Any

from specgen import display
from specgen.bench.bound import StepBytes, mean_step_bytes
from specgen.bench.experts_read import mean_touched
from specgen.bench.known_text import KnownText
from specgen.engine.warm_engine import Run
from specgen.events import Captured, Event, Finished, OutOfMemory, Prefilled, Touched, Verified
from specgen.report.timings import LatencyStats, latency_stats
from specgen.report.wall_time import WallTime


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What every repeat is compared with: the bound of its steps, and the known text of a calibrated pair."""

    sizes: StepBytes
    bytes_per_second: float
    flops_per_second: float  # of a large matrix product
    known: KnownText | None

    @property
    def conditions(self) -> dict[str, str]:
        """For the table's conditions."""
        bound = f"bytes that a decode step must read over {self.bytes_per_second / 1e12:.3g} TB/s of a copy"
        found = {
            "bound": bound,
            "x_plain_bound": "x_plain if steps took their bound: what drafts would give by bytes",
        }
        if self.sizes.experts is not None:
            found["experts"] = (
                f"of the {self.sizes.experts.num_experts} of a layer, touched by a decode step; means over layers and "
                "steps; experts_plain: by the rows of the newest tokens alone, as by a plain step; experts_read: the "
                "bytes of those touched over that bandwidth"
            )
        if self.known is not None:
            made_for = f"the pair's head knows {display.percent(self.known.accept)} of it"
            found["wrong_tokens"] = f"of all repeats, against the pair's known text; {made_for}"
        return found


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """One run of the workload; times are in seconds."""

    seconds: float  # of generate, prefill included
    num_tokens: int  # in all texts
    acceptance_length: float | None  # mean over verify steps; None without drafts
    acceptance: tuple[float | None, ...]  # [K]: joint rates by position
    ttft: LatencyStats | None
    tpot: LatencyStats | None
    itl: LatencyStats | None
    step_seconds: float | None  # mean of a decode step
    mean_sequences: float | None  # in a decode step
    step_bytes: float | None  # that a decode step must read, the mean; a table says how fast
    touched: Touched | None  # of a mixture's experts, mean over decode steps
    texts: Mapping[str, str]  # digest of the token ids by request
    num_wrong: int | None  # tokens that differ from the known text
    disturbances: tuple[str, ...]  # captures and shortages within the measured time
    wall: WallTime | None = None  # where ``seconds`` went; none in rounds of earlier versions
    prefill_passes: int = 0
    prefill_flops: float = 0.0  # of all prompts' matrix products
    tokens_per_step: float | None = None  # that a sequence gets in a decode step, the mean

    @classmethod
    def of(cls, run: Run, yardstick: Yardstick) -> "Repeat":
        completions, events, report = run.completions.values(), run.events, run.report
        steps, prefill = report.steps.get("decode"), report.steps.get("prefill")
        emitted = [1 + event.accepted for event in events if isinstance(event, Verified)]
        return cls(
            seconds=run.seconds,
            num_tokens=sum(len(completion.token_ids) for completion in completions),
            acceptance_length=report.speculation.mean_acceptance_length,
            acceptance=tuple(position.rate for position in report.speculation.acceptance),
            ttft=report.ttft_seconds,
            tpot=report.tpot_seconds,
            itl=latency_stats(list(inter_token_seconds(events))),
            step_seconds=steps.mean_seconds if steps else None,
            mean_sequences=steps.mean_sequences if steps else None,
            step_bytes=mean_step_bytes(events, yardstick.sizes),
            touched=mean_touched(events),
            texts={completion.request.id: digest(completion.token_ids) for completion in completions},
            num_wrong=None if yardstick.known is None else yardstick.known.num_wrong(completions),
            disturbances=tuple(_disturbances(events)),
            wall=report.wall.of_whole(run.seconds) if report.wall else None,
            prefill_passes=prefill.num_steps if prefill else 0,
            prefill_flops=yardstick.sizes.prefill_flops(prefill.target_rows) if prefill else 0.0,
            tokens_per_step=fmean(emitted) if emitted else None,
        )

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the wall time."""
        return self.num_tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        """For ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Repeat":
        """The repeat that ``to_json`` was of."""
        kinds = dict.fromkeys(("ttft", "tpot", "itl"), LatencyStats) | {"touched": Touched, "wall": WallTime}
        parts = {name: row.get(name) and kind(**row[name]) for name, kind in kinds.items()}
        lists = {name: tuple(row[name]) for name in ("acceptance", "disturbances")}
        return cls(**{**row, **parts, **lists})


def digest(token_ids: Sequence[int]) -> str:
    """Equal for equal tokens, and for no others but by a chance of 2^-64."""
    return blake2b(" ".join(map(str, token_ids)).encode(), digest_size=8).hexdigest()


def inter_token_seconds(events: Iterable[Event]) -> Iterator[float]:
    """Inter-token latencies (ITL): the times between consecutive steps that emit tokens of a request.

    As in vLLM's serving benchmark, a step is one gap however many tokens it emits.
    """
    latest: dict[str, float] = {}
    for event in events:
        if isinstance(event, Finished):
            latest.pop(event.sequence, None)
        elif isinstance(event, Prefilled | Verified) and event.emitted:
            if event.sequence in latest:
                yield event.time - latest[event.sequence]
            latest[event.sequence] = event.time


def _disturbances(events: Iterable[Event]) -> Iterable[str]:
    late = sum(isinstance(event, Captured) for event in events)
    if late:
        yield f"{late} CUDA graphs were captured in the measured time"
    for event in events:
        if isinstance(event, OutOfMemory):
            yield f"out of memory, so it ran with a batch of {event.max_batch_size}"
