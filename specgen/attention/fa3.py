"""FlashInfer's FlashAttention 3 for prefill on Hopper, by kernels of its templates that this package compiles."""

import ctypes
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specgen.attention import Heads, Kernel, LatentDims, LayerAttention
from specgen.attention.planning import PassLens, offsets
from specgen.kv.layout import HostLens
from specgen.ops.jit_modules import Module, compiled, current_stream, num_sms, pointers, source_spec

_SOURCE = Path(__file__).with_name("fa3_prefill.cu")
LATE = Path(__file__).with_name("late.cuh")
# Headers of CUTLASS that FlashInfer's FA3 includes and of which it uses nothing, or some declarations. A compiler that
# finds these first is done sooner: on a CPU, nvcc 13.0 and FlashInfer 0.6.18, a file of FA3's takes 129 s as FlashInfer
# compiles it and 76 s with these and without instructions of sizes that it does not use
# (``CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED``). The kernels are the same to the instruction for every size of heads, with
# windows and with sinks.
_DECLARATIONS = """#pragma once
#include "cutlass/detail/dependent_false.hpp"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/collective/collective_builder_decl.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cute/atom/mma_atom.hpp"
#include "cutlass/gemm/collective/builders/sm90_common.inl"
#include "cutlass/arch/memory_sm80.h"
"""
HEADERS = {  # text by name: whole GEMMs, their epilogues and what tests them
    "cutlass/gemm/collective/collective_builder.hpp": _DECLARATIONS,
    **dict.fromkeys(
        [
            "cutlass/epilogue/collective/collective_builder.hpp",
            "cutlass/epilogue/collective/default_epilogue.hpp",
            "cutlass/epilogue/thread/linear_combination.h",
            "cutlass/gemm/device/gemm_grouped.h",
            "cutlass/gemm/device/gemm_universal_adapter.h",
            "cutlass/gemm/group_array_problem_shape.hpp",
            "cutlass/gemm/kernel/default_gemm_grouped.h",
            "cutlass/gemm/kernel/gemm_universal.hpp",
            "cutlass/util/command_line.h",
            "cutlass/util/distribution.h",
            "cutlass/util/host_tensor.h",
            "cutlass/util/packed_stride.hpp",
            "cutlass/util/reference/device/gemm.h",
            "cutlass/util/reference/device/tensor_compare.h",
            "cutlass/util/reference/device/tensor_fill.h",
            "cutlass/util/tensor_view_io.h",
        ],
        "#pragma once\n",
    ),
}


class _Shape(NamedTuple):
    """What a kernel is compiled for."""

    paged: bool  # else keys lie one sequence behind the other
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    windowed: bool = False
    sinks: bool = False


def paged_module(heads: Heads, *, windowed: bool) -> Module:
    """What prefills over pages need compiled."""
    shape = _Shape(
        paged=True,
        key_dim=heads.head_dim,
        value_dim=heads.head_dim,
        dtype=heads.dtype,
        windowed=windowed,
        sinks=heads.sinks,
    )
    what = f"FA3, heads of {heads.head_dim}" + (", sinks" if heads.sinks else "")
    return Module(what=what + (", windows" if windowed else ""), spec=partial(_spec, shape), longest=True)


def expanded_module(latent: LatentDims, dtype: torch.dtype) -> Module:
    """What prefills of latents need compiled."""
    shape = _Shape(paged=False, key_dim=latent.key_dim, value_dim=latent.value_dim, dtype=dtype)
    what = f"FA3, keys of {latent.key_dim} and values of {latent.value_dim}"
    return Module(what=what, spec=partial(_spec, shape), longest=True)


def attend_paged(lengths: PassLens) -> Kernel:
    """Attention over pages; rows behind those of ``lengths`` are zeros."""
    tiles = _Tiles(lengths.query_lens, lengths.kv_lens, lengths.first_pages)

    def kernel(layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        assert keys.stride() == values.stride(), "a position lies in the same place of its two pages"
        out = torch.zeros_like(q) if lengths.num_rows < len(q) else torch.empty_like(q)
        _run(tiles, layer, (q, keys, values, out), lengths.pages)
        return out.view(len(q), -1)

    return kernel


def attend_expanded(host: HostLens) -> Kernel:
    """See ``Backend.expanded``."""
    query_lens, kv_lens = torch.tensor(host.query_lens), torch.tensor(host.kv_lens)
    tiles = _Tiles(query_lens, kv_lens, offsets(kv_lens))

    def kernel(layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = q.new_empty(len(q), q.shape[1], values.shape[2])
        _run(tiles, layer, (q, keys, values, out), None)
        return out.view(len(q), -1)

    return kernel


class _Tiles:
    """Lists of the tiles of a pass by block, made on the host: one for all layers with as many heads."""

    def __init__(self, query_lens: Tensor, kv_lens: Tensor, first_keys: Tensor) -> None:
        """``first_keys``: where the keys of a sequence begin, or its pages; int32 ``[B + 1]``."""
        self.first_rows = offsets(query_lens)
        self._query_lens, self._sequences = query_lens, (self.first_rows, first_keys, kv_lens.to(torch.int32))
        self._lists: dict[tuple[int, int], tuple[int, Tensor]] = {}

    def of(self, shape: _Shape, num_heads: int, device: torch.device) -> tuple[int, Tensor]:
        """How many there are, and the list on the device."""
        rows = 192 if shape.value_dim == 64 else 128  # of a tile
        if (num_heads, rows) not in self._lists:
            num_tiles = num_heads * int((-(-self._query_lens // rows)).sum())
            num_blocks = num_sms(device)
            size, pinned = num_blocks + 1 + 7 * num_tiles, device.type == "cuda"
            listed = torch.empty(size, dtype=torch.int32, pin_memory=pinned)
            counts = (len(self._query_lens), num_heads, num_blocks, num_tiles)
            plan = compiled(_spec, "fa3_prefill_plan", shape)
            error = plan(*pointers([*self._sequences, listed]), *map(ctypes.c_int, counts))
            assert error == 0, (shape, counts)
            self._lists[num_heads, rows] = num_tiles, listed.to(device, non_blocking=True)
        return self._lists[num_heads, rows]


def _run(
    tiles: _Tiles, layer: LayerAttention, tensors: tuple[Tensor, Tensor, Tensor, Tensor], pages: Tensor | None
) -> None:
    """Attention of queries, keys, values into the last of ``tensors``; without ``pages`` keys lie as one."""
    q, keys, values, out = tensors
    assert q.dtype == keys.dtype == values.dtype, (q.dtype, keys.dtype, values.dtype)
    assert all(each.stride(-1) == 1 for each in tensors), "the numbers of a head lie side by side"
    shape = _Shape(
        paged=pages is not None,
        key_dim=q.shape[-1],
        value_dim=values.shape[-1],
        dtype=q.dtype,
        windowed=layer.window is not None,
        sinks=layer.sinks is not None,
    )
    num_heads, num_blocks = q.shape[1], num_sms(q.device)
    num_tiles, listed = tiles.of(shape, num_heads, q.device)
    page, page_size = (keys.stride(0), keys.shape[1]) if shape.paged else (0, 0)
    sizes = [num_blocks, num_tiles, int(tiles.first_rows[-1]), num_heads, keys.shape[-2], len(keys)]
    sizes += [page_size, layer.window_left, *q.stride()[:2], *out.stride()[:2]]
    sizes += [*keys.stride()[-3:-1], page, *values.stride()[-3:-1], page]
    error = compiled(_spec, "fa3_prefill", shape)(
        *pointers([*tensors, pages, listed, layer.sinks]),
        (ctypes.c_int64 * len(sizes))(*sizes),
        ctypes.c_double(layer.scale),
        current_stream(q.device),
    )
    assert error == 0, f"fa3_prefill: error {error} at {shape}, {sizes}"


def _spec(shape: _Shape, **more: int) -> Any:  # noqa: ANN401
    """The ``JitSpec`` for ``shape``; ``more`` macros are a test's."""
    defines = {
        "PAGED": shape.paged,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "HALF": shape.dtype == torch.float16,
        "WINDOWED": shape.windowed,
    }
    variant = "using Variant = StandardAttention;\n"
    if shape.sinks:
        from flashinfer.jit.attention.variants import attention_sink_decl

        variant = attention_sink_decl["fa3"] + "using Variant = AttentionSink;\n"
    values = {macro: int(value) for macro, value in defines.items()} | more
    headers = {"variant.h": variant, LATE.name: LATE.read_text(), **HEADERS}
    return source_spec("fa3_prefill", _SOURCE, values, headers)
