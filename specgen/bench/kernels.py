"""The kernel bench: attention of one layer on each backend, by sequences, context and rows per sequence.

Each is timed as models call it, from q, k and v before their rotation.

The table follows vLLM's PR 19825 (``benchmarks/kernels/benchmark_trtllm_decode_attention.py``), whose
``speedup_percent`` is 1 - 1 / speedup. Unlike there, sequences share no pages, passes of several rows are timed too,
launches are not in the times, and every result is checked.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from specgen import display
from specgen.attention import Attend, Backend, Gpu, Heads, Rows, Use
from specgen.attention.flashinfer_paged import FlashInferBackend
from specgen.attention.hopper import HopperBackend
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
from specgen.kv.layout import Layout
from specgen.models.latent_config import LatentConfig
from specgen.models.layers import LayerAttention
from specgen.report.table import Row

_TIMED: dict[str, tuple[type[Backend], ...]] = {
    "cuda": (HopperBackend, TrtllmBackend, FlashInferBackend),
    "cpu": (SdpaBackend,),
}
_CHECKS: dict[str, type[Backend]] = {"cuda": SdpaBackend, "cpu": StaticSdpaBackend}  # of a single backend
# largest relative error of a row between two kernels that round to the dtype
_TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 6e-3, torch.float32: 1e-4}
LATENT = LatentConfig(  # GLM-4.7-Flash's
    rank=512,
    nope_dim=192,
    rope_dim=64,
    value_dim=256,
    query_rank=768,
    scale=256**-0.5,
    interleaved=True,
)
_CPU_BYTES = 256 << 20
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class KernelJob:
    """One run of ``specgen bench kernels``; ``UserError`` for invalid values."""

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
        """Every combination, shortest context first."""
        for length, number in product(sorted(self.max_seq_lens), sorted(self.num_seqs)):
            yield Cell(num_seqs=number, max_seq_len=length, heads=self.heads, device=self.device)


@dataclass(frozen=True, kw_only=True)
class TimedBackends:
    """The backends to time, whose results are compared; a single one is compared with ``check``."""

    timed: tuple[Backend, ...]
    check: Backend | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(backend.name for backend in self.timed)


def measure(job: KernelJob) -> Iterator[BenchTable]:
    """Yield the growing table after each combination. ``UserError`` if no backend can run."""
    if job.device.index:
        torch.cuda.set_device(job.device)  # some kernels run on the current device
    backends, notes = _backends(job)
    bandwidth = copy_bandwidth(str(job.device))
    empty = empty_table(_conditions(job, backends, bandwidth), backends.names, job.num_spec_tokens)
    table = replace(empty, notes=notes)
    free_memory()
    for cell in job.cells():
        if cell.bytes_stored > (room := _room(job.device)):
            table = replace(table, notes=(*table.notes, _too_large(cell, room)))
        else:
            rows, wrong = _measure_cell(job, backends, cell, bandwidth)
            table = replace(table, rows=ordered([*table.rows, *rows]), notes=(*table.notes, *wrong))
        free_memory()
        yield table


def _backends(job: KernelJob) -> tuple[TimedBackends, tuple[str, ...]]:
    """The backends that can run, and why others cannot."""
    kind = job.device.type
    refusals = {each.name: each.capabilities.refusal(job.device, job.heads) for each in _TIMED[kind]}
    reasons = [f"{name} {reason}" for name, reason in refusals.items() if reason]
    able = [each for each in _TIMED[kind] if not refusals[each.name]]
    require(bool(able), f"no kernel of the table runs: {'; '.join(reasons)}")
    check = _CHECKS[kind](job.device) if len(able) == 1 else None
    timed = tuple(backend(job.device) for backend in able)
    return TimedBackends(timed=timed, check=check), tuple(f"not timed: {reason}" for reason in reasons)


def _named(heads: Heads) -> str:
    """The number formats."""
    fp8 = " with an FP8 KV cache" if heads.kv_dtype.itemsize == 1 else ""
    return str(heads.dtype).removeprefix("torch.") + fp8


def _room(device: torch.device) -> int:
    """Bytes available for KV caches; the rest is for activations."""
    return _CPU_BYTES if device.type == "cpu" else int(0.9 * torch.cuda.mem_get_info(device)[0])


def _too_large(cell: Cell, room: int) -> str:
    return (
        f"not measured: {cell.num_seqs} sequences of up to {cell.max_seq_len} take {cell.bytes_stored / _GIB:.2f} GiB "
        f"of KV, and there is room for {room / _GIB:.2f}"
    )


def _conditions(job: KernelJob, backends: TimedBackends, bandwidth: float) -> Row:
    heads, cold = job.heads, COLD_BYTES[job.device.type] >> 20
    of_heads = f"{heads.num_kv_heads} KV heads of {heads.head_dim}"
    calls = "rotate q and k, store k and v and attend"
    if heads.latent is not None:
        of_heads, calls = f"latents of {heads.latent.rank} + {heads.latent.rope_dim}", "attend, absorbed"
    against = backends.check.name if backends.check else backends.names[0]
    timed = "wall time of calls" if job.device.type == "cpu" else "time on the GPU of calls in one CUDA graph"
    return {
        **environment(str(job.device)),
        "shape": f"{heads.num_heads} heads, {of_heads}, {_named(heads)}, pages of {heads.page_size} anywhere in a pool",
        "values": f"random; lengths from {heads.max_query_len} to max_seq_len, the last is max_seq_len",
        "time": f"{timed} that {calls}, over up to {MOST_LAYERS} layers, {cold} MiB of KV or more, so that no cache "
        "holds them; without planning",
        "kernels": f"of {', '.join(backends.names)}",
        "repeats": job.repeats,
        "bound": f"bytes of KV over the bandwidth of a copy, {bandwidth / 1e12:.3f} TB/s",
        "difference": f"largest relative error of a row against {against}",
    }


# --- one combination ------------------------------------------------------------------------------


@torch.inference_mode()
def _measure_cell(
    job: KernelJob, backends: TimedBackends, cell: Cell, bandwidth: float
) -> tuple[list[Row], list[str]]:
    """One row per kind of query, and a note per wrong result."""
    cache, tables = cell.cache(), cell.block_tables()
    rows: list[Row] = []
    wrong: list[str] = []
    for query in queries(job.num_spec_tokens):
        timings, difference = _measure_query(job, backends, cell, query, cache, tables)
        if difference <= _TOLERANCES[cell.heads.dtype]:  # NaN is not
            row = measured_row(cell, query, backends.names, timings, difference, cell.bytes_read / bandwidth)
            rows.append({**row, "kernels": ", ".join(_kernels(backends, cell, query))})
        else:
            wrong.append(
                f"not in the table: {cell.num_seqs} sequences of up to {cell.max_seq_len}, query {query.name}: "
                f"results differ by {display.percent(difference)}"
            )
    return rows, wrong


def _measure_query(
    job: KernelJob, backends: TimedBackends, cell: Cell, query: Query, cache: KVCache, tables: Tensor
) -> tuple[list[Timing], float]:
    """The times of each backend, and the relative error between their results."""
    layout = query.layout(cell, tables)
    qkv, rope = cell.rows(layout), cell.rope()

    def planned(backend: Backend) -> Call:
        if cell.heads.latent is not None:
            return _absorbed(backend, cell.heads.latent, cache, layout, qkv)
        attend = Attend(backend, cache, layout, rope)

        def call(index: int) -> Tensor:
            return attend(LayerAttention(index=index, scale=cell.heads.head_dim**-0.5), qkv)

        return call

    timings = [
        time_layers(planned(backend), cell.num_layers, job.repeats, job.device) for backend in backends.timed
    ]
    expected, *outputs = (timing.output for timing in timings)
    if backends.check is not None:
        outputs, expected = [expected], planned(backends.check)(cell.num_layers - 1)
    errors = [relative_error(output, expected) for output in outputs]
    return timings, float(torch.tensor(errors).max())  # Python's own may pass over NaN


def _kernels(backends: TimedBackends, cell: Cell, query: Query) -> Iterator[str]:
    """The name of what ran on each backend."""
    use = Use(
        heads=cell.heads,
        windowed=(False,),
        query_lens=(query.longest,),
        prefills=False,
        num_sequences=cell.num_seqs,
    )
    rows: Rows = query.longest if query.shortest == query.longest else "ragged"
    for backend in backends.timed:
        yield backend.kernel(Gpu.of(cell.device), use, rows, cell.num_seqs)


def _absorbed(backend: Backend, latent: LatentConfig, cache: KVCache, layout: Layout, q: Tensor) -> Call:
    """The attention of layers that keep latents, without the products around it."""
    kernel = backend.absorbed(layout)

    def call(index: int) -> Tensor:
        (pages,) = cache.pages(index)
        return kernel(LayerAttention(index=index, scale=latent.scale, value_dim=latent.rank), q, pages, pages)

    return call


def relative_error(output: Tensor, expected: Tensor) -> float:
    """The largest error of a row relative to the norm of that row of ``expected``; both ``[rows, width]``."""
    errors = (output.float() - expected.float()).norm(dim=1)
    return float((errors / expected.float().norm(dim=1)).max())
