"""Breaks a decode step down: milliseconds by part and kernel, with the lower bound of each part.

A replayed graph keeps no names of what was captured, but it runs its kernels in order. So a mark is captured as an
empty kernel before and after each pass, and the work up to the next mark belongs to one part, whatever the kernels
are called. On a CPU, where a call returns when its work is done, a mark is a timestamp.
"""

import re
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated

import torch
import typer
from bound import (
    StepBytes,
    Work,
    copy_bandwidth,
    matrix_flops,
    shown_bandwidth,
)
from programs import OUTPUT, DeviceSpeed, program_of, publish
from torch.profiler import ProfilerActivity, profile

from specgen.cli.main import main
from specgen.cli.options import AS_JSON, ON_A_DEVICE, Only, repeating, with_options
from specgen.cli.progress_bar import QUIET
from specgen.config import EngineConfig, counts, option, require
from specgen.config.errors import DeviceLost
from specgen.device import synchronize
from specgen.engine.choices import attention_note, resolve, target_kv_dtype
from specgen.engine.loading import Models, load_models, open_checkpoints
from specgen.engine.warm_engine import WarmEngine
from specgen.experiments.output import BenchTable, Plot
from specgen.experiments.plans import conditions, free_memory, kv_bytes, make_prompts
from specgen.experiments.tune_job import RANDOM, Workload
from specgen.record.record_rows import EngineRow, PassRow, RequestRow
from specgen.report import display
from specgen.report.table import Column, Row, Table

MARK = "mark"
WORK = "work"  # of the host, of which no more is known
_MARK_KERNEL = "spin_kernel"  # only in the name of the kernel of torch.cuda._sleep


@dataclass(frozen=True, kw_only=True)
class Span:
    """A kernel or other work on the device, or a mark; times in microseconds."""

    name: str
    start: float
    end: float


class HostMarker:
    """Marks by the host's clock; everything between two marks is work."""

    def __init__(self) -> None:
        self._open = False
        self._times: list[float] = []

    def start(self) -> None:
        self._open = True
        self.mark()

    def mark(self) -> None:
        if self._open:
            self._times.append(1e6 * time.perf_counter())

    def stop(self) -> None:
        self.mark()
        self._open = False

    def spans(self) -> list[Span]:
        work = [Span(name=WORK, start=start, end=end) for start, end in pairwise(self._times)]
        return work + [Span(name=MARK, start=moment, end=moment) for moment in self._times[1:-1]]


class DeviceMarker:
    """Marks as empty kernels in the trace of torch's profiler, which also sees replayed graphs."""

    def __init__(self) -> None:
        # the first start takes seconds, and graphs captured before it may not be seen
        with profile(activities=[ProfilerActivity.CUDA]):
            pass
        self._profiler = profile(activities=[ProfilerActivity.CUDA], acc_events=True)

    def start(self) -> None:
        self._profiler.start()

    def mark(self) -> None:
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        self._profiler.stop()

    def spans(self) -> list[Span]:
        return [
            Span(
                name=MARK if _MARK_KERNEL in event.name else event.name,
                start=event.time_range.start,
                end=event.time_range.end,
            )
            for event in self._profiler.events()  # type: ignore[no-untyped-call]
            if event.device_type.name == "CUDA"
        ]


Marker = HostMarker | DeviceMarker  # records marks and the work between them, from ``start`` to ``stop``


class Window:
    """Runs ``marker`` for ``num_steps`` decode steps of ``batch`` sequences, after ``skipped`` of them.

    ``update`` gets every row of the engine.
    """

    def __init__(self, batch: int, marker: Marker, *, skipped: int, num_steps: int) -> None:
        self._batch = batch
        self._marker = marker
        self._first, self._last = skipped, skipped + num_steps
        self._seen = 0

    @property
    def complete(self) -> bool:
        return self._seen >= self._last

    def update(self, row: EngineRow) -> None:
        if not isinstance(row, PassRow) or row.kind != "decode" or row.num_sequences < self._batch:
            return
        self._seen += 1
        if self._seen == self._first:
            synchronize()  # starting takes a while: work in flight would fall before that gap
            self._marker.start()
        if self._seen == self._last:
            synchronize()
            self._marker.stop()


# the part after each mark of a step
AFTER_MARKS = ("draft loop", "engine", "verify", "accept", "KV fill", "engine")
# KV fill: the drafter's; engine: between steps and passes
PARTS = ("draft loop", "verify", "accept", "KV fill", "engine")


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """A kernel in one part of a step."""

    part: str
    name: str  # without its parameters
    seconds: float  # a step
    calls: float  # a step


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step by part, in order of ``PARTS``, and ``idle``; they add up to the whole step."""

    parts: dict[str, float]
    idle: float
    kernels: tuple[KernelTime, ...] = ()  # which add up to the parts, the longest first; of a GPU

    @property
    def total(self) -> float:
        return sum(self.parts.values()) + self.idle


def split(spans: Sequence[Span], num_steps: int) -> StepTime:
    """The mean time of ``num_steps`` steps by part. ``RuntimeError`` if marks are missing.

    Overlapping work counts once, for what began first; marks count as idle.
    """
    num_marks = sum(span.name == MARK for span in spans)
    expected = num_steps * len(AFTER_MARKS)
    if num_marks != expected:
        raise RuntimeError(f"the profiler saw {num_marks} of {expected} marks: its trace is incomplete")
    parts = dict.fromkeys(PARTS, 0.0)
    times, calls = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    reached = first = min(span.start for span in spans)
    part = "engine"
    after_marks = iter(AFTER_MARKS * num_steps)
    # a mark sorts before work with the same start
    for span in sorted(spans, key=lambda span: (span.start, span.name != MARK)):
        if span.name == MARK:
            part = next(after_marks)
        else:
            alone = max(span.end - max(span.start, reached), 0.0)
            reached = max(reached, span.end)
            parts[part] += alone
            kernel = part, _kernel(span.name)
            times[kernel] += alone  # type: ignore[assignment]
            calls[kernel] += 1
    length = max(span.end for span in spans) - first
    scale = 1e-6 / num_steps
    return StepTime(
        parts={name: scale * passed for name, passed in parts.items()},
        idle=scale * (length - sum(parts.values())),
        kernels=tuple(
            KernelTime(part=part, name=name, seconds=scale * time, calls=calls[part, name] / num_steps)
            for (part, name), time in times.most_common()
            if name != WORK
        ),
    )


def _kernel(name: str) -> str:
    """A kernel's ``name`` without its return type, template arguments and parameters."""
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split("[<(]", plain)[0].strip()


# --- the job --------------------------------------------------------------------------------------


_SKIPPED, _STEPS = 8, 32  # decode steps before the window, and in it
_MORE = 12  # steps of text after the window, as sequences prefilled first are ahead of the others
Step = tuple[
    int, StepTime, Mapping[str, Work]
]  # the mean one of a batch size, and the least work of its parts


@dataclass(frozen=True, kw_only=True)
class StepJob:
    """One run of the script: steps of ``engine`` at each of ``batch_sizes``; without drafts, plain ones."""

    engine: EngineConfig
    batch_sizes: tuple[int, ...]
    prompt_tokens: int

    def __post_init__(self) -> None:
        require(
            not self.engine.draft_length.auto,
            f"num-spec-tokens is {self.engine.draft_length}: a step is explained for a number from 0 to 16",
        )

    @property
    def workload(self) -> Workload:
        """Texts long enough for every step to have the whole batch, even if all drafts are accepted."""
        steps = _SKIPPED + _STEPS + _MORE
        return Workload(
            dataset=RANDOM,
            prompt_tokens=self.prompt_tokens,
            max_new_tokens=steps * (self.engine.draft_length.most + 1),
        )


def explain(job: StepJob) -> Iterator[BenchTable]:
    """Yield the growing table after each batch size; one that fails is a note. ``UserError`` if nothing can run."""
    plain = job.engine.draft_length.most == 0
    engine = replace(job.engine, drafter=None) if plain else job.engine
    checkpoints = open_checkpoints(engine)
    config = resolve(engine, checkpoints)
    bandwidth = copy_bandwidth(config.device)
    free_memory()
    models = load_models(config, checkpoints)
    limit, sizes = models.target.config.max_positions, StepBytes.of(models, target_kv_dtype(config).itemsize)
    longest = job.prompt_tokens + job.workload.max_new_tokens
    require(longest <= limit, f"prompt-tokens is {job.prompt_tokens}: with {longest - limit} less, texts fit")
    device = DeviceSpeed(
        bytes_per_second=bandwidth, flops_per_second=matrix_flops(config.device, models.target.dtype)
    )
    k, notes = config.draft_length.most, list[str]()
    under = _conditions(job, config, models, device, attention_note(config, checkpoints))
    steps: list[Step] = []
    for batch in job.batch_sizes:
        try:
            step, found = _explained(job, replace(config, max_batch_size=batch), models, sizes, device)
        except DeviceLost:
            raise
        except Exception as error:  # one batch size must not cost the others
            notes.append(f"batch {batch} is not explained: {type(error).__name__}: {error}")
        else:
            steps.append(step)
            notes += found
        free_memory()
        yield replace(step_table(under, k, steps, device), notes=tuple(notes))


def _explained(
    job: StepJob, config: EngineConfig, models: Models, sizes: StepBytes, device: DeviceSpeed
) -> tuple[Step, list[str]]:
    """The steps of one batch size, and what there is to say of them."""
    batch, k = config.max_batch_size, config.draft_length.most
    requests = make_prompts(job.workload, models, batch).requests
    config = replace(config, kv_memory=kv_bytes(config, models, requests))
    marker: Marker = HostMarker() if config.device == "cpu" else DeviceMarker()
    engine = WarmEngine(config, models, requests, marker.mark)
    engine.run().whole()
    unobserved = statistics.median(step_seconds(engine.run().whole().passes, batch))  # without the profiler
    window = Window(batch, marker, skipped=_SKIPPED, num_steps=_STEPS)
    observed = engine.run(window.update).whole()
    require(window.complete, "the batch was never whole: use a smaller one, or shorter prompts")
    time = split(marker.spans(), _STEPS)
    # in the middle of the window
    context = context_at(observed.requests, observed.passes, batch, _SKIPPED + _STEPS // 2)
    works = sizes.parts(k, batch, context)
    notes = [
        f"batch {batch}: {1e3 * time.total:.3f} ms per step while profiled, "
        f"{1e3 * unobserved:.3f} without, at {context:,.0f} positions per sequence"
    ]
    return (batch, time, works), notes


def step_seconds(rows: Iterable[EngineRow], batch: int) -> list[float]:
    """Seconds between the ends of consecutive decode steps of ``batch`` sequences."""
    passes = [row for row in rows if isinstance(row, PassRow)]
    return [
        after.time - before.time
        for before, after in pairwise(passes)
        if before.kind == after.kind == "decode" and before.num_sequences == after.num_sequences == batch
    ]


def context_at(
    requests: Iterable[RequestRow], rows: Iterable[EngineRow], batch: int, num_steps: int
) -> float:
    """Mean positions per sequence after ``num_steps`` decode steps of the whole batch, which all requests are."""
    whole = (
        row.number
        for row in rows
        if isinstance(row, PassRow) and row.kind == "decode" and row.num_sequences == batch
    )
    last = next(islice(whole, num_steps - 1, None))
    positions = 0
    for request in requests:
        positions += request.num_prompt_tokens + request.num_output_tokens
        positions -= sum(step.emitted for step in request.steps or () if step.number > last)
    return positions / batch


def _conditions(
    job: StepJob, config: EngineConfig, models: Models, device: DeviceSpeed, attention: str
) -> Row:
    where = (
        "the host's clock; engine is the host's work between steps"
        if config.device == "cpu"
        else "kernels by torch's profiler; six empty ones separate the parts, and their time is in idle"
    )
    return {
        **conditions(config, models),
        **({} if config.head is None else {"drafter batch": config.drafter_batch}),
        "attention": attention,
        "CUDA graphs": config.cuda_graphs,
        "prompts": f"{job.prompt_tokens} random tokens each, greedy",
        "time": f"mean of {_STEPS} steps of the whole batch, after {_SKIPPED}; {where}",
        "bound": f"bytes read over {shown_bandwidth(device.bytes_per_second)} of a copy, or FLOPs over "
        f"{device.flops_per_second / 1e12:.3g} TFLOP/s of a large GEMM, whichever takes longer",
    }


# --- the tables -----------------------------------------------------------------------------------


_COLUMNS = (
    Column(name="batch"),
    Column(name="part"),
    Column(name="time", unit="ms", show=display.thousandths),
    Column(name="share", show=display.percent),
    Column(name="bound", unit="ms", show=display.thousandths),
    Column(name="over_bound", show=display.ratio),
    Column(name="bound_by"),
    Column(name="excess", show=display.percent),
)
_BY_KERNEL = Table(
    title="By kernel",
    note="time a step that no earlier kernel overlaps; those of less than 0.5 % are left out",
    columns=(
        Column(name="batch"),
        Column(name="part"),
        Column(name="kernel"),
        Column(name="time", unit="us", show=display.rate),
        Column(name="calls", show=display.rate),
        Column(name="each", unit="us", show=display.plain),
        Column(name="share", show=display.percent),
    ),
    rows=(),
    num_keys=3,
)
_LEAST = 0.005  # of a step: kernels of less time are not shown
_PLOTS = (
    Plot(title="A step by part", x="batch", y="time", series="part"),
    Plot(title="Time over the bound", x="batch", y="over_bound", series="part"),
)


def step_table(
    conditions: Row, num_spec_tokens: int, steps: Sequence[Step], device: DeviceSpeed
) -> BenchTable:
    """The table of ``steps`` with K = ``num_spec_tokens``; with those of their kernels, if they are known."""
    kernels = tuple(row for batch, time, _ in steps for row in _kernel_rows(batch, time))
    kinds = tuple(row for step in steps for row in kind_rows(*step, device))
    details = (replace(_BY_KERNEL, rows=kernels), replace(_BY_KIND, rows=kinds))
    drafts = f"A decode step with {num_spec_tokens} drafts, by part"
    return BenchTable(
        name="step",
        title=drafts if num_spec_tokens else "A plain decode step",
        conditions=conditions,
        columns=_COLUMNS,
        rows=tuple(row for step in steps for row in step_rows(*step, device)),
        plots=_PLOTS,
        details=tuple(each for each in details if each.rows),
        num_keys=2,
    )


def step_rows(batch: int, time: StepTime, works: Mapping[str, Work], device: DeviceSpeed) -> list[Row]:
    """One row per part of ``time`` with its bound, then the idle time and the whole step.

    ``excess`` is the share of what the step takes beyond its bound: where there is most to gain.
    """
    total = time.total
    bounds = {name: device.seconds(work) for name, work in works.items()}
    times = {**{part: time.parts[part] for part in PARTS}, "idle": time.idle, "step": total}
    bounds["step"] = sum(bounds.values())

    def row(part: str, seconds: float) -> Row:
        bound, work = bounds.get(part) or None, works.get(part)  # 0: an assistant fills no KV cache
        return {
            "batch": batch,
            "part": part,
            "time": 1e3 * seconds,
            "share": seconds / total,
            "bound": None if bound is None else 1e3 * bound,
            "over_bound": None if bound is None else seconds / bound,
            "bound_by": device.limit(work) if work and bound else display.DASH,
            "excess": (seconds - (bound or 0.0)) / beyond if beyond > 0 else None,
        }

    beyond = total - bounds["step"]
    return [row(part, seconds) for part, seconds in times.items()]


KINDS = ("GEMM", "attention", "other")
_ATTENTION = re.compile(
    r"mha|xqa|mla|attention|(decode|prefill)with|hopper_decode|latent_plan|merge_?states|fmha|flash"
    r"|^_(attend|add)_kernel"  # of wide heads
    r"|^_(rows|recur|recur_chunks|keep|convolve)_kernel"  # of Gated DeltaNet
)
_GEMM = re.compile(
    r"gemm|gemv|nvjet|splitk|skinny|hopper_linear|^linear_kernel|xmma|cutlass|^_fp8|^_gate_up|^_down"
)
_BY_KIND = Table(
    title="By kind of kernel",
    note="GEMMs read the weights, attention the KV cache and states: the least that takes; kinds by name",
    columns=(
        Column(name="batch"),
        Column(name="part"),
        Column(name="kind"),
        Column(name="time", unit="us", show=display.rate),
        Column(name="bound", unit="us", show=display.rate),
        Column(name="over_bound", show=display.ratio),
        Column(name="bound_by"),
    ),
    rows=(),
    num_keys=3,
)


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name, without parameters."""
    name = kernel.lower()
    return "attention" if _ATTENTION.search(name) else "GEMM" if _GEMM.search(name) else "other"


def kind_rows(batch: int, time: StepTime, works: Mapping[str, Work], device: DeviceSpeed) -> list[Row]:
    """The time of each part's kernels by kind, with the bound of those that read weights or the KV cache.

    Parts without GEMMs, such as ``accept``, are left out.
    """
    times = Counter[tuple[str, str]]()
    for kernel in time.kernels:
        times[kernel.part, kind_of(kernel.name)] += kernel.seconds  # type: ignore[assignment]
    rows: list[Row] = []
    for part, work in works.items():
        # GEMMs read the weights, attention the KV cache and recurrent states
        split = {
            "GEMM": Work(num_bytes=work.num_bytes - work.cache_bytes, flops=work.flops),
            "attention": Work(num_bytes=work.cache_bytes, flops=0.0),
        }
        for kind in KINDS if work.flops else ():
            seconds, least = times[part, kind], split.get(kind)
            if not seconds:
                continue
            bound = device.seconds(least) if least else 0.0
            rows.append(
                {
                    "batch": batch,
                    "part": part,
                    "kind": kind,
                    "time": 1e6 * seconds,
                    "bound": 1e6 * bound if bound else None,
                    "over_bound": seconds / bound if bound else None,
                    "bound_by": device.limit(least) if least and bound else display.DASH,
                }
            )
    return rows


def _kernel_rows(batch: int, time: StepTime) -> list[Row]:
    return [
        {
            "batch": batch,
            "part": kernel.part,
            "kernel": kernel.name,
            "time": 1e6 * kernel.seconds,
            "calls": kernel.calls,
            "each": 1e6 * kernel.seconds / kernel.calls,
            "share": kernel.seconds / time.total,
        }
        for kernel in time.kernels
        if kernel.seconds >= _LEAST * time.total
    ]


# --- the command ----------------------------------------------------------------------------------


_STEP_K = option(4, "Speculation", "Draft tokens per step, K: 0 (plain decoding) to 16.")


@with_options
def step(
    *,
    ctx: typer.Context,
    batch_sizes: str = option("1,8,32", "Table", "Batch sizes, comma-separated."),
    prompt_tokens: int = option(256, "Table", "Random tokens per prompt."),
    engine: Annotated[
        EngineConfig,
        Only(
            f"model drafter num_spec_tokens drafter_batch draft_lm_head max_prefill_tokens {ON_A_DEVICE}",
            {"max_prefill_tokens": 8192, "num_spec_tokens": _STEP_K},
        ),
    ],
    output: Path | None = OUTPUT,
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Explain a decode step: milliseconds by part (draft loop, verify, accept, drafter KV fill, idle) and kernel, and
    lower bounds."""
    job = StepJob(
        engine=replace(engine, prefix_cache=False),
        batch_sizes=counts("batch-sizes", batch_sizes),
        prompt_tokens=prompt_tokens,
    )
    publish("step", explain(job), output, as_json, repeating(ctx), quiet)


app = program_of(step)

if __name__ == "__main__":
    main(app, "python scripts/bench/step.py")
