"""Breaks a decode step down: milliseconds by part, with the lower bound of each part."""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from specgen.bench.bound import (
    DeviceSpeed,
    StepBytes,
    copy_bandwidth,
    matrix_flops,
    mean_touched,
    touched_note,
)
from specgen.bench.environment import conditions, free_memory
from specgen.bench.marks import DeviceMarker, HostMarker, Marked, Marker, StepTime, Window, split
from specgen.bench.matrices import RANDOM, Workload
from specgen.bench.output import BenchTable
from specgen.bench.step_table import empty_table, step_rows, with_details
from specgen.bench.workload import kv_bytes, make_prompts
from specgen.config import EngineConfig, require
from specgen.config.errors import DeviceLost
from specgen.engine.choices import attention_note, resolve
from specgen.engine.loading import Models, load_models, open_checkpoints
from specgen.engine.number_formats import target_kv_dtype
from specgen.engine.warm_engine import WarmEngine
from specgen.record.record_rows import EngineRow, PassRow, RequestRow, Touched
from specgen.report.table import Row

_SKIPPED, _STEPS = 8, 32  # decode steps before the window, and in it
_MORE = 12  # steps of text after the window, as sequences prefilled first are ahead of the others


@dataclass(frozen=True, kw_only=True)
class StepJob:
    """One run of ``specgen bench step``: steps of ``engine`` at each of ``batch_sizes``; without drafts, plain ones."""

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


@dataclass(frozen=True, kw_only=True)
class Explained:
    """The steps of one batch size."""

    time: StepTime
    unobserved: float  # median seconds per step without the profiler
    context: float  # mean positions per sequence in the middle of the window
    touched: Touched | None  # of a mixture's experts, by steps of the whole batch


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
    attention = attention_note(config, checkpoints)
    table = empty_table(_conditions(job, config, models, device, attention), config.draft_length.most)
    for batch in job.batch_sizes:
        try:
            found = _explain(job, replace(config, max_batch_size=batch), models)
        except DeviceLost:
            raise
        except Exception as error:  # one batch size must not cost the others
            note = f"batch {batch} is not explained: {type(error).__name__}: {error}"
            table = replace(table, notes=(*table.notes, note))
        else:
            k, touched = config.draft_length.most, found.touched
            works = sizes.parts(k, batch, found.context, touched.experts if touched else None)
            rows = step_rows(batch, found.time, works, device)
            notes = _notes(batch, found, sizes, batch * (k + 1), bandwidth)
            table = replace(table, rows=(*table.rows, *rows), notes=(*table.notes, *notes))
            table = with_details(table, batch, found.time, works, device)
        free_memory()
        yield table


def _notes(batch: int, found: Explained, sizes: StepBytes, num_rows: int, bandwidth: float) -> Iterator[str]:
    yield (
        f"batch {batch}: {1e3 * found.time.total:.3f} ms per step while profiled, "
        f"{1e3 * found.unobserved:.3f} without, at {found.context:,.0f} positions per sequence"
    )
    if found.touched:
        yield f"batch {batch}: {touched_note(found.touched, sizes, num_rows, bandwidth)}"


def _explain(job: StepJob, config: EngineConfig, models: Models) -> Explained:
    batch = config.max_batch_size
    requests = make_prompts(job.workload, models, None, batch).requests
    config = replace(config, kv_memory=kv_bytes(config, models, requests))
    marker: Marker = HostMarker() if config.device == "cpu" else DeviceMarker()
    engine = WarmEngine(config, models, requests, lambda runner: Marked(runner, marker))
    engine.run().whole()
    unobserved = step_seconds(engine.run().whole().passes, batch)
    window = Window(batch, marker, skipped=_SKIPPED, num_steps=_STEPS)
    observed = engine.run(window.see).whole()
    require(window.complete, "the batch was never whole: use a smaller one, or shorter prompts")
    return Explained(
        time=split(marker.spans(), _STEPS),
        unobserved=statistics.median(unobserved),
        context=context_at(observed.requests, observed.passes, batch, _SKIPPED + _STEPS // 2),
        touched=mean_touched(observed.passes, batch),
    )


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
        "bound": f"bytes read over {device.bytes_per_second / 1e12:.3g} TB/s of a copy, or FLOPs over "
        f"{device.flops_per_second / 1e12:.3g} TFLOP/s of a large matrix product, whichever takes longer",
    }
