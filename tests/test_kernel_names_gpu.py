"""On a GPU: the kernels that a backend names are those that the profiler sees."""

from collections.abc import Iterable

import pytest
import torch
from bench.kernels import Cell, Query
from torch.profiler import ProfilerActivity, profile

from specgen.attention import Attend, Backend, Gpu, Heads, LayerAttention, Rows, Use
from specgen.attention.flashinfer_paged import FlashInferBackend
from specgen.attention.hopper import OWN, UNSPLIT, HopperBackend
from specgen.attention.trtllm import TrtllmBackend
from specgen.kv.layout import Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs an NVIDIA GPU of capability 9.0",
    ),
]
CUDA = torch.device("cuda")
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
SEEN = {  # in names of kernels on the device, and in none of the other kernels'
    OWN: "hopper_decode",
    UNSPLIT: "BatchPrefillWithPagedKVCacheKernel",
    "FlashInfer FA2": "BatchPrefillWithPagedKVCacheKernel",
    "FlashInfer FA3": "PrefillWithKVCacheKernel",
    "XQA": "kernel_mha",
}


def attention_kernels(names: Iterable[str]) -> set[str]:
    """What of ``SEEN`` is in ``names``; FA3's name is a part of FA2's."""
    found = set()
    for name in names:
        hits = [part for part in set(SEEN.values()) if part in name]
        found |= {max(hits, key=len)} if hits else set()
    return found


def ran(backend: Backend, cell: Cell, layout: Layout) -> set[str]:
    """The kernels of attention in one pass."""
    cache, qkv, rope = cell.cache(), cell.rows(layout), cell.rope()
    attend, layer = Attend(backend, cache, layout, rope), LayerAttention(index=0, scale=0.1)
    attend(layer, qkv)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        Attend(backend, cache, layout, rope)(layer, qkv)
        torch.cuda.synchronize()
    return attention_kernels(event.name for event in trace.events() if event.device_type.name == "CUDA")


@pytest.mark.parametrize("backend", [HopperBackend, TrtllmBackend, FlashInferBackend])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(BF16, BF16), (BF16, FP8), (FP16, FP16)], ids=str)
def test_the_kernels_named_are_those_that_run(
    backend: type[Backend], dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    made, named = backend(CUDA), set[str]()
    heads = Heads(
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=64,
        max_query_len=5,
    )
    passes: list[tuple[Rows, int, int]] = [(1, 1, 1), (5, 5, 1), (5, 5, 40), ("ragged", 5, 8)]
    for rows, longest, num_sequences in passes:
        cell = Cell(num_seqs=num_sequences, max_seq_len=300, heads=heads, device=CUDA)
        query = Query(name="", shortest=1 if rows == "ragged" else longest, longest=longest)
        layout = query.layout(cell, cell.block_tables())
        use = Use(
            heads=heads, windowed=(False,), query_lens=(longest,), prefills=True, num_sequences=num_sequences
        )
        name = made.kernel(Gpu.of(CUDA), use, rows, num_sequences)
        assert ran(made, cell, layout) == {SEEN[name]}, (rows, num_sequences, name)
        named.add(name)
    cell = Cell(num_seqs=2, max_seq_len=300, heads=heads, device=CUDA)
    layout = Layout.ragged(cell.block_tables(), [0, 0], [40, 300], 64)
    assert ran(made, cell, layout) == {SEEN[made.kernel(Gpu.of(CUDA), use, "prefill", 2)]}
    if backend is TrtllmBackend:
        assert named == {"XQA"}, "nothing but FlashInfer's trtllm API decodes"
    if backend is HopperBackend:
        assert named == {BF16: {OWN, "XQA"}, FP8: {"XQA"}, FP16: {UNSPLIT, "XQA"}}[kv_dtype]
