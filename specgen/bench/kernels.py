"""The kernel table: a layer's attention on each backend, by sequences, context and rows a sequence.

The shape of the table is that of vLLM's PR 19825 (``benchmarks/kernels/benchmark_trtllm_decode_attention.py``), whose
``speedup_percent`` is 1 - 1 / speedup. Other than there, no two sequences share pages, passes of several rows are timed
too, launches are not in the times, and every result is checked.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from specgen import display
from specgen.attention import Backend, Heads
from specgen.attention.flashinfer_paged import FlashInferBackend
from specgen.attention.sdpa import SdpaBackend, StaticSdpaBackend
from specgen.attention.trtllm import TrtllmBackend
from specgen.bench.decode_pass import Cell, Query, queries
from specgen.bench.device_speed import copy_bandwidth
from specgen.bench.environment import environment, free_memory
from specgen.bench.kernel_table import empty_table, measured_row, ordered
from specgen.bench.output import BenchTable
from specgen.bench.timing import COLD_BYTES, MOST_LAYERS, Call, Timing, time_layers
from specgen.config import require
from specgen.kv.kv_cache import KVCache
from specgen.models.layers import LayerAttention
from specgen.report.table import Row

_TIMED: dict[str, tuple[type[Backend], ...]] = {
    "cuda": (TrtllmBackend, FlashInferBackend),
    "cpu": (SdpaBackend,),
}
_CHECKS: dict[str, type[Backend]] = {"cuda": SdpaBackend, "cpu": StaticSdpaBackend}  # of one that is alone
# Largest relative error of a row between two kernels that both round to the dtype
_TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 6e-3, torch.float32: 1e-4}
_KERNELS = {
    "trtllm": "XQA or, on compute capability 10.x, trtllm-gen; FA2 unsplit where passes of several rows fill the GPU",
    "flashinfer": "FA2 over pages, as the wrapper's decode with tensor cores",
    "sdpa": "PyTorch's scaled_dot_product_attention over gathered pages",
}
_CPU_BYTES = 256 << 20
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class KernelJob:
    """What is to be timed; ``UserError`` for what makes no sense."""

    heads: Heads
    num_seqs: tuple[int, ...]
    max_seq_lens: tuple[int, ...]
    num_spec_tokens: int
    repeats: int
    device: torch.device

    def __post_init__(self) -> None:
        heads, shortest = self.heads, min(self.max_seq_lens)
        require(
            heads.num_heads % heads.num_kv_heads == 0,
            f"num-heads is {heads.num_heads} for {heads.num_kv_heads} KV heads: use a multiple",
        )
        require(self.repeats >= 2, f"repeats is {self.repeats}: a deviation needs at least 2")
        require(self.num_spec_tokens >= 0, f"num-spec-tokens is {self.num_spec_tokens}: use 0 or more")
        require(
            shortest >= heads.max_query_len,
            f"max-seq-lens has {shortest}, too short for {heads.max_query_len} rows: use a longer one",
        )

    def cells(self) -> Iterator[Cell]:
        """Every combination, the shortest context first."""
        for length, number in product(sorted(self.max_seq_lens), sorted(self.num_seqs)):
            yield Cell(num_seqs=number, max_seq_len=length, heads=self.heads, device=self.device)


@dataclass(frozen=True, kw_only=True)
class TimedBackends:
    """The backends that are timed against each other, or one and what it is checked against."""

    timed: tuple[Backend, ...]
    check: Backend | None  # where one is alone

    @property
    def names(self) -> tuple[str, ...]:
        """Of those that are timed."""
        return tuple(backend.name for backend in self.timed)


def measure(job: KernelJob) -> Iterator[BenchTable]:
    """The table as it grows: one for each combination, the last one whole. ``UserError`` if no backend can run."""
    if job.device.index:
        torch.cuda.set_device(job.device)  # for kernels that run on whatever is the current one
    contest, notes = _contest(job)
    bandwidth = copy_bandwidth(str(job.device))
    empty = empty_table(_head(job, contest, bandwidth), contest.names, job.num_spec_tokens)
    table = replace(empty, notes=notes)
    free_memory()
    for cell in job.cells():
        if cell.bytes_stored > (room := _room(job.device)):
            table = replace(table, notes=(*table.notes, _too_large(cell, room)))
        else:
            rows, wrong = _measure_cell(job, contest, cell, bandwidth)
            table = replace(table, rows=ordered([*table.rows, *rows]), notes=(*table.notes, *wrong))
        free_memory()
        yield table


def _contest(job: KernelJob) -> tuple[TimedBackends, tuple[str, ...]]:
    """Who can run, and why others cannot."""
    kind = job.device.type
    refusals = {each.name: each.capabilities.refusal(job.device, job.heads) for each in _TIMED[kind]}
    reasons = [f"{name} {reason}" for name, reason in refusals.items() if reason]
    able = [each for each in _TIMED[kind] if not refusals[each.name]]
    require(bool(able), f"no kernel of the table runs: {'; '.join(reasons)}")
    check = _CHECKS[kind](job.device) if len(able) == 1 else None
    timed = tuple(backend(job.device) for backend in able)
    return TimedBackends(timed=timed, check=check), tuple(f"not timed: {reason}" for reason in reasons)


def _room(device: torch.device) -> int:
    """Bytes for caches; the rest is for what a pass computes."""
    return _CPU_BYTES if device.type == "cpu" else int(0.9 * torch.cuda.mem_get_info(device)[0])


def _too_large(cell: Cell, room: int) -> str:
    return (
        f"not measured: {cell.num_seqs} sequences of up to {cell.max_seq_len} take {cell.bytes_stored / _GIB:.2f} GiB "
        f"of KV, and there is room for {room / _GIB:.2f}"
    )


def _head(job: KernelJob, contest: TimedBackends, bandwidth: float) -> Row:
    heads, spread = job.heads, COLD_BYTES[job.device.type] >> 20
    against = contest.check.name if contest.check else contest.names[0]
    timed = "wall time of calls" if job.device.type == "cpu" else "time on the GPU of calls in one CUDA graph"
    return {
        **environment(str(job.device)),
        "shape": f"{heads.num_heads} heads, {heads.num_kv_heads} KV heads of {heads.head_dim}, "
        f"{str(heads.dtype).removeprefix('torch.')}, pages of {heads.page_size} anywhere in a pool",
        "values": f"random; lengths are drawn from {heads.max_query_len} to max_seq_len, the last is max_seq_len",
        "time": f"{timed} that go over up to {MOST_LAYERS} layers, {spread} MiB of KV or more, so that no cache "
        "holds them; without the plan of a pass",
        "kernels": "; ".join(f"{name}: {_KERNELS[name]}" for name in contest.names),
        "repeats": job.repeats,
        "bound": f"bytes of KV over the bandwidth of a copy, {bandwidth / 1e12:.3f} TB/s",
        "difference": f"largest relative error of a row, {contest.names[-1]} against {against}",
    }


# --- one combination ------------------------------------------------------------------------------


@torch.inference_mode()
def _measure_cell(
    job: KernelJob, contest: TimedBackends, cell: Cell, bandwidth: float
) -> tuple[list[Row], list[str]]:
    """A row for each kind of query, and what was wrong."""
    cache, tables = cell.cache(), cell.block_tables()
    rows: list[Row] = []
    wrong: list[str] = []
    for query in queries(job.num_spec_tokens):
        timings, difference = _measure_query(job, contest, cell, query, cache, tables)
        if difference <= _TOLERANCES[cell.heads.dtype]:  # NaN is not
            rows.append(
                measured_row(cell, query, contest.names, timings, difference, cell.bytes_read / bandwidth)
            )
        else:
            wrong.append(
                f"not in the table: {cell.num_seqs} sequences of up to {cell.max_seq_len}, query {query.name}: "
                f"results differ by {display.percent(difference)}"
            )
    return rows, wrong


def _measure_query(
    job: KernelJob, contest: TimedBackends, cell: Cell, query: Query, cache: KVCache, tables: Tensor
) -> tuple[list[Timing], float]:
    """The times of each backend, and how far their results are apart."""
    layout = query.layout(cell, tables)
    q = cell.rows(layout)

    def planned(backend: Backend) -> Call:
        kernel = backend.plan(layout)

        def call(index: int) -> Tensor:
            layer = LayerAttention(index=index, scale=cell.heads.head_dim**-0.5)
            return kernel(layer, q, *cache.pages(index))

        return call

    timings = [
        time_layers(planned(backend), cell.num_layers, job.repeats, job.device) for backend in contest.timed
    ]
    outputs = [timing.output for timing in timings]
    if contest.check is not None:
        outputs.append(planned(contest.check)(cell.num_layers - 1))
    return timings, relative_error(*outputs)


def relative_error(output: Tensor, expected: Tensor) -> float:
    """The largest error of a row, over the length of that row of ``expected``; both ``[rows, width]``."""
    apart = (output.float() - expected.float()).norm(dim=1)
    return float((apart / expected.float().norm(dim=1)).max())
