"""The kernel bench: attention of one layer on each backend, by sequences, context and rows per sequence.

Each is timed as models call it, from q, k and v before their rotation.

The table follows vLLM's PR 19825 (``benchmarks/kernels/benchmark_trtllm_decode_attention.py``), whose
``speedup_percent`` is 1 - 1 / speedup. Unlike there, sequences share no pages, passes of several rows are timed too,
launches are not in the times, and every result is checked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
from bound import copy_bandwidth, shown_bandwidth
from layer_timing import COLD_BYTES, MOST_LAYERS, Call, Timing, num_layers, relative_error, time_layers
from programs import OUTPUT, program_of, publish
from torch import Tensor

from specgen.attention import Attend, Backend, Gpu, Heads, LatentDims, LayerAttention, Rows, Use
from specgen.attention.flashinfer_paged import FlashInferBackend
from specgen.attention.hopper import HopperBackend
from specgen.attention.sdpa import SdpaBackend, StaticSdpaBackend
from specgen.attention.trtllm import TrtllmBackend
from specgen.cli.main import main
from specgen.cli.options import AS_JSON, Only, repeating, with_options
from specgen.cli.progress_bar import QUIET
from specgen.config import EngineConfig, counts, option, require
from specgen.device import on_device
from specgen.engine.choices import DTYPES, FP8, choose_device, choose_dtype
from specgen.experiments.output import BenchTable, Plot, Value, selected
from specgen.experiments.plans import environment, free_memory
from specgen.kv.kv_cache import KVCache, KVSpec
from specgen.kv.layout import Layout
from specgen.ops import Rope, bind_ops
from specgen.report import display
from specgen.report.table import Column, Row


@dataclass(frozen=True, kw_only=True)
class Query:
    """The number of rows per sequence in a pass: random from ``shortest`` to ``longest``."""

    name: str
    shortest: int
    longest: int

    def layout(self, cell: "Cell", tables: Tensor) -> Layout:
        """The layout of a pass over the sequences of ``cell``; lengths are on the device only, as in decoding."""
        rng = Random(f"{self.name} {cell.num_seqs}")
        lens = [rng.randint(self.shortest, self.longest) for _ in cell.kv_lens]
        starts = [end - length for end, length in zip(cell.kv_lens, lens, strict=True)]
        first = on_device(starts, tables.device)
        if self.shortest == self.longest:
            return Layout.uniform(tables, first, self.longest, cell.heads.page_size)
        return Layout(
            block_tables=tables,
            starts=first,
            ragged_lens=on_device(lens, tables.device),
            num_rows=sum(lens),
            max_query_len=self.longest,
            page_size=cell.heads.page_size,
            uniform_q=None,
        )


def queries(num_spec_tokens: int) -> Iterator[Query]:
    """Plain decoding, and with drafts K + 1 rows per sequence (padded) and 1 to K + 1 (ragged)."""
    yield Query(name="1", shortest=1, longest=1)
    if longest := num_spec_tokens and num_spec_tokens + 1:
        yield Query(name=f"{longest} padded", shortest=longest, longest=longest)
        yield Query(name=f"1-{longest} ragged", shortest=1, longest=longest)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """``num_seqs`` sequences of random lengths up to ``max_seq_len``, which the last one has."""

    num_seqs: int
    max_seq_len: int
    heads: Heads
    device: torch.device

    @cached_property
    def kv_lens(self) -> tuple[int, ...]:
        """Positions of each sequence, the rows of the pass included; deterministic."""
        rng = Random(f"{self.num_seqs} {self.max_seq_len}")
        least = self.heads.max_query_len
        lens = (rng.randint(least, self.max_seq_len) for _ in range(self.num_seqs - 1))
        return (*lens, self.max_seq_len)

    @property
    def bytes_read(self) -> int:
        """Bytes of KV that one call reads."""
        return sum(self.kv_lens) * self._bytes_per_position

    @property
    def num_layers(self) -> int:
        return num_layers(self.bytes_read, self.device)

    @property
    def num_pages(self) -> int:
        return sum(self._page_counts)

    @property
    def bytes_stored(self) -> int:
        """Bytes of KV cache of all layers."""
        return self.num_layers * (self.num_pages + 1) * self.heads.page_size * self._bytes_per_position

    def block_tables(self) -> Tensor:
        """The pages of each sequence in random order, padded with 0: int32 ``[num_seqs, most pages]``."""
        pages = list(range(1, self.num_pages + 1))
        Random(self.num_pages).shuffle(pages)
        width = max(self._page_counts)
        rows = [[pages.pop() for _ in range(count)] + [0] * (width - count) for count in self._page_counts]
        return on_device(rows, self.device, torch.int32)

    def cache(self) -> KVCache:
        """A KV cache of normal random numbers."""
        cache = KVCache(
            spec=self._spec(self.num_layers),
            num_pages=self.num_pages + 1,
            page_size=self.heads.page_size,
            dtype=self.heads.kv_dtype,
            device=self.device,
        )
        for layer in range(self.num_layers):
            for values in cache.pages(layer):
                values.copy_(torch.randn(values.shape, device=self.device))  # no 8-bit float draws its own
        return cache

    def rows(self, layout: Layout) -> Tensor:
        """Heads of q, k and v of normal random numbers, ``[rows, num_heads + 2 * num_kv_heads, head_dim]``.

        Of latents those of absorbed queries alone.
        """
        others = 0 if self.heads.latent is not None else 2 * self.heads.num_kv_heads
        num_heads = self.heads.num_heads + others
        shape = (layout.num_rows, num_heads, self.heads.head_dim)
        return torch.randn(shape, dtype=self.heads.dtype, device=self.device)

    def rope(self) -> Rope:
        """Rotary embedding with theta 500,000, as Llama 3's."""
        exponents = torch.arange(0, self.heads.head_dim, 2, device=self.device) / self.heads.head_dim
        return bind_ops(self.device, self.heads.dtype).rope(5e5**-exponents)

    @property
    def _bytes_per_position(self) -> int:
        return self._spec(1).bytes_per_token(self.heads.kv_dtype.itemsize)

    def _spec(self, num_layers: int) -> KVSpec:
        heads = self.heads
        return KVSpec(
            num_planes=2 if heads.latent is None else 1,
            layers=((heads.num_kv_heads, heads.head_dim),) * num_layers,
        )

    @property
    def _page_counts(self) -> list[int]:
        return [-(-length // self.heads.page_size) for length in self.kv_lens]


_TIMED: dict[str, tuple[type[Backend], ...]] = {
    "cuda": (HopperBackend, TrtllmBackend, FlashInferBackend),
    "cpu": (SdpaBackend,),
}
_CHECKS: dict[str, type[Backend]] = {"cuda": SdpaBackend, "cpu": StaticSdpaBackend}  # of a single backend
# largest relative error of a row between two kernels that round to the dtype
_TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 6e-3, torch.float32: 1e-4}
LATENT = LatentDims(rank=512, nope_dim=192, rope_dim=64, value_dim=256)  # GLM-4.7-Flash's
_CPU_BYTES = 256 << 20
_GIB = 1 << 30


def timed_heads(
    num_heads: int | None,
    num_kv_heads: int | None,
    head_dim: int | None,
    *,
    latents: bool,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
    max_query_len: int,
) -> Heads:
    """Where a number is not given that of an 8B model, or with ``latents`` of GLM-4.7-Flash."""
    require(
        not latents or num_kv_heads is None is head_dim,
        "latents are for all heads: leave --num-kv-heads and --head-dim out",
    )
    return Heads(
        num_heads=num_heads or (20 if latents else 32),
        num_kv_heads=1 if latents else num_kv_heads or 8,
        head_dim=LATENT.width if latents else head_dim or 128,
        latent=LATENT if latents else None,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        max_query_len=max_query_len,
    )


@dataclass(frozen=True, kw_only=True)
class KernelJob:
    """One run of the script; ``UserError`` for invalid values."""

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
    table = BenchTable(
        name="kernels",
        title="Attention of one layer in a decode pass",
        conditions=_conditions(job, backends, bandwidth),
        columns=_columns(backends.names),
        rows=(),
        plots=tuple(_plots(backends.names, job.num_spec_tokens)),
        notes=notes,
        num_keys=3,
    )
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
    """The number formats of model and KV cache, for the table."""
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
        "bound": f"bytes of KV over the bandwidth of a copy, {shown_bandwidth(bandwidth)}",
        "difference": f"largest relative error of a row against {against}",
    }


# --- one combination ------------------------------------------------------------------------------


@torch.inference_mode()
def _measure_cell(
    job: KernelJob, backends: TimedBackends, cell: Cell, bandwidth: float
) -> tuple[Sequence[Row], list[str]]:
    """One row per kind of query, and a note per wrong result."""
    cache, tables = cell.cache(), cell.block_tables()
    rows: list[Row] = []
    wrong: list[str] = []
    bound = cell.bytes_read / bandwidth
    for query in queries(job.num_spec_tokens):
        timings, difference = _measure_query(job, backends, cell, query, cache, tables)
        if difference <= _TOLERANCES[cell.heads.dtype]:  # NaN is not
            row: dict[str, Value] = {
                "num_seqs": cell.num_seqs,
                "max_seq_len": cell.max_seq_len,
                "query": query.name,
                "bound": 1e6 * bound,
                "difference": difference,
                "kernels": ", ".join(_kernels(backends, cell, query)),
            }
            for name, timing in zip(backends.names, timings, strict=True):
                row |= {f"{name}_mean": 1e6 * timing.mean, f"{name}_std": 1e6 * timing.std}
                row |= {
                    f"{name}_speedup": timings[-1].mean / timing.mean,
                    f"{name}_over_bound": timing.mean / bound,
                }
            rows.append(row)
        else:
            wrong.append(
                f"not in the table: {cell.num_seqs} sequences of up to {cell.max_seq_len}, query {query.name}: "
                f"results differ by {display.percent(difference)}"
            )
    return selected(_columns(backends.names), rows), wrong


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


def _absorbed(backend: Backend, latent: LatentDims, cache: KVCache, layout: Layout, q: Tensor) -> Call:
    """The attention of layers that keep latents, without the GEMMs around it."""
    kernel = backend.absorbed(layout)

    def call(index: int) -> Tensor:
        (pages,) = cache.pages(index)
        return kernel(
            LayerAttention(index=index, scale=latent.key_dim**-0.5, value_dim=latent.rank), q, pages, pages
        )

    return call


def _columns(names: Sequence[str]) -> tuple[Column, ...]:
    times = [
        Column(name=f"{name}_{what}", unit="us", show=display.plain)
        for name in names
        for what in ("mean", "std")
    ]
    return (
        *(Column(name=name) for name in ("num_seqs", "max_seq_len", "query")),
        *times,
        *(Column(name=f"{name}_speedup", show=display.ratio) for name in names[:-1]),
        Column(name="bound", unit="us"),
        *(Column(name=f"{name}_over_bound", show=display.ratio) for name in names),
        Column(name="difference", show=display.percent),
        Column(name="kernels"),
    )


def _plots(names: Sequence[str], num_spec_tokens: int) -> Iterator[Plot]:
    """Per kind of query the speedups over the last backend, and the first backend over its bound."""
    shown = {f"{name}_speedup": f"{name} against {names[-1]}" for name in names[:-1]}
    shown[f"{names[0]}_over_bound"] = f"{names[0]} over the memory bound"
    for y, what in shown.items():
        for query in queries(num_spec_tokens):
            title = f"{what}, query {query.name}"
            yield Plot(title=title, x="num_seqs", y=y, series="max_seq_len", where={"query": (query.name,)})


def ordered(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows grouped by kind of query, each in the order measured."""
    kinds = list(dict.fromkeys(row["query"] for row in rows))
    return tuple(sorted(rows, key=lambda row: kinds.index(row["query"])))


# --- the command ----------------------------------------------------------------------------------


_SIZES = {
    "cuda": ("1,4,8,16,32,64,128,256", "1024,2048,4096,8192,16384,32768,65536,131072"),
    "cpu": ("1,4", "128,256"),
}


@with_options
def kernels(
    *,
    ctx: typer.Context,
    num_seqs: str | None = option(
        None, "Table", "Sequences per pass, comma-separated.", shown="1,4,8,16,32,64,128,256; on a CPU 1,4"
    ),
    max_seq_lens: str | None = option(
        None,
        "Table",
        "Longest contexts, comma-separated; those that do not fit in memory are left out.",
        shown="1024 to 131072 in powers of two; on a CPU 128,256",
    ),
    num_heads: int | None = option(
        None, "Table", "Query heads.", least=1, shown="32; with --latents 20, GLM-4.7-Flash's"
    ),
    num_kv_heads: int | None = option(None, "Table", "Key and value heads.", least=1, shown="8"),
    head_dim: int | None = option(None, "Table", "Elements per head.", least=1, shown="128"),
    latents: bool = option(
        False,
        "Table",
        "Latents of 512 + 64 numbers instead of keys and values (DeepSeek-V3, GLM-4.7-Flash): absorbed attention "
        "alone.",
    ),
    num_spec_tokens: int = option(4, "Table", "Drafts, K: passes of K+1 rows are timed too."),
    page_size: int = option(64, "Table", "Tokens per page.", least=1),
    engine: Annotated[EngineConfig, Only("dtype kv_dtype device")],
    repeats: int = option(20, "Table", "Measurements per number."),
    output: Path | None = OUTPUT,
    as_json: bool = AS_JSON,
    quiet: bool = QUIET,
) -> None:
    """Time attention alone: hopper, trtllm and FlashInfer's wrapper, by sequences, context and rows per sequence.

    Without options on a GPU: the table of vLLM's PR 19825 for the heads of an 8B model, and for K = 4.
    """
    device = choose_device(engine.device)
    dtype = DTYPES[choose_dtype(engine.dtype, device)]
    defaults = _SIZES[device.type]
    job = KernelJob(
        heads=timed_heads(
            num_heads,
            num_kv_heads,
            head_dim,
            latents=latents,
            dtype=dtype,
            kv_dtype=FP8 if engine.kv_dtype == "fp8" else dtype,
            page_size=page_size,
            max_query_len=num_spec_tokens + 1,
        ),
        num_seqs=counts("num-seqs", num_seqs or defaults[0]),
        max_seq_lens=counts("max-seq-lens", max_seq_lens or defaults[1]),
        num_spec_tokens=num_spec_tokens,
        repeats=repeats,
        device=device,
    )
    publish("kernels", measure(job), output, as_json, repeating(ctx), quiet)


app = program_of(kernels)

if __name__ == "__main__":
    main(app, "python scripts/bench/kernels.py")
