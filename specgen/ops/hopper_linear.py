"""GEMMs of some to some hundred rows on Hopper: ``hopper_linear.cu``, compiled by FlashInfer's means when needed.

Measured on an H100 at the shapes of Llama-3.1-8B, in microseconds at 160 rows, beside reading the weight and beside
cuBLAS: gate and up in bfloat16 91 (78, 100), in FP8 50 (39, 53); q, k and v in FP8 with three scales 15 (8, 20). The
other GEMMs of bfloat16, of few outputs, are no faster than cuBLAS's.
"""

import ctypes
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from specgen.ops.experts import Activation
from specgen.ops.jit_modules import Module, compiled, current_stream, num_sms, pointers, source_spec
from specgen.ops.measured_choices import FP8_FEW_ROWS, HOPPER

_SOURCE = Path(__file__).with_suffix(".cu")
_TILES: tuple[int, ...] = tuple(HOPPER["tiles"])
_OUT = 128  # rows of a weight that a block reads
Kind = Literal["bf16", "fp8"]
FEWEST_ROWS: int = HOPPER["fewest_rows"]
MOST_ROWS: int = HOPPER["most_rows"]
MOST_ROWS_OF_SEVERAL_SCALES: int = HOPPER["most_rows_of_several_scales"]
MOST_ROWS_OF_PARTS: int = HOPPER["most_rows_of_parts"]
_MOST_PARTS = 4
_GATED: dict[Activation | None, int] = {None: 0, "swish": 1, "gelu tanh": 2}


def fits(num_out: int, width: int, dtype: torch.dtype, *, gated: bool) -> bool:
    """Whether a weight of so many outputs and inputs consists of whole blocks."""
    return num_out % (_OUT // 2 if gated else _OUT) == 0 and width * dtype.itemsize % 128 == 0


def modules(kind: Kind) -> list[Module]:
    """What GEMMs with weights of this ``kind`` need compiled."""
    fewest = FEWEST_ROWS if kind == "bf16" else FP8_FEW_ROWS + 1
    return [
        Module(what=f"{kind} GEMMs of {rows} rows", spec=partial(_spec, kind, rows))
        for rows in _TILES
        if rows >= fewest
    ]


def hopper_linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    out_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    y_scale: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """``x`` [rows, in] through ``weight`` [out, in], both contiguous: [rows, out] in bfloat16; in any number of rows.

    With an ``activation`` the weight holds gate and up, the result is activation(gate) * up [rows, out / 2]; bfloat16
    does only that.
    In e4m3 ``out_scale`` is float32 [out], ``x_scale`` [1] or [rows, 1]. With a ``y_scale`` [1] the result is e4m3.
    """
    gated = activation is not None
    (num_rows, width), num_out = x.shape, weight.shape[0] // (2 if gated else 1)
    assert x.is_contiguous(), x.stride()
    assert weight.is_contiguous(), weight.stride()
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    assert fits(num_out, width, x.dtype, gated=gated), weight.shape
    dtype = torch.bfloat16 if y_scale is None else torch.float8_e4m3fn
    y = torch.empty(num_rows, num_out, dtype=dtype, device=x.device)
    blocks, num_steps = num_sms(x.device), width * x.element_size() // 128
    rows = _tile(max(num_rows, 1))
    tiles = weight.shape[0] // _OUT * -(-num_rows // rows)
    # In e4m3, two blocks a tile keep more of a GPU busy where there are few
    parts = 2 if not gated and 2 * tiles <= blocks and num_steps % 2 == 0 else 1
    static = x_scale is not None and x_scale.numel() == 1
    assert (x.dtype == torch.bfloat16) == (out_scale is None) == (x_scale is None), x.dtype
    # Sums of the tiles that two blocks share; those of several row tiles would read the weight at different times
    shares = tiles > blocks and num_rows <= rows
    begun = x.new_empty(blocks, rows * _OUT, dtype=torch.float32) if shares else None
    _call(
        (x, weight, bias, out_scale, x_scale, y_scale, y, begun),
        parts,
        static=static,
        activation=activation,
        sums=False,
    )
    return y


def hopper_linear_parts(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` [rows, in] through ``weight`` [out, in] in bfloat16: sums of parts in float32, [n, rows, out]."""
    (num_rows, width), num_out = x.shape, weight.shape[0]
    assert x.is_contiguous(), x.stride()
    assert weight.is_contiguous(), weight.stride()
    assert x.dtype == weight.dtype == torch.bfloat16, (x.dtype, weight.dtype)
    assert fits(num_out, width, x.dtype, gated=False), weight.shape
    tiles = num_out // _OUT * -(-num_rows // _tile(max(num_rows, 1)))
    num_steps, parts = width // 64, 1
    while 2 * parts * tiles <= num_sms(x.device) and num_steps % (2 * parts) == 0 and parts < _MOST_PARTS:
        parts *= 2
    y = torch.empty(parts, num_rows, num_out, dtype=torch.float32, device=x.device)
    _call((x, weight, bias, None, None, None, y, None), parts, static=False, activation=None, sums=True)
    return y


def _call(
    tensors: tuple[Tensor | None, ...], parts: int, *, static: bool, activation: Activation | None, sums: bool
) -> None:
    x, weight, y = tensors[0], tensors[1], tensors[6]
    assert x is not None
    assert weight is not None
    assert y is not None
    if not len(x):
        return
    kind: Kind = "bf16" if x.dtype == torch.bfloat16 else "fp8"
    sizes = [ctypes.c_int64(each) for each in (len(x), y.shape[-1], x.shape[1])]
    error = compiled(_spec, "hopper_linear", kind, _tile(len(x)))(
        *pointers(tensors),
        *sizes,
        *(num_sms(x.device), parts, int(static), _GATED[activation], int(sums)),
        current_stream(x.device),
    )
    assert error == 0, f"hopper_linear: error {error} at {list(x.shape)}, weight {list(weight.shape)}, {kind}"


def _tile(num_rows: int) -> int:
    """Rows of a tile that waste least of the last one."""
    tiles = -(-num_rows // _TILES[-1])
    return next(rows for rows in _TILES if rows * tiles >= num_rows)


def _spec(kind: Kind, rows: int) -> Any:  # noqa: ANN401
    """The ``JitSpec`` for tiles of ``rows``."""
    defines = {"ROWS": rows, "E4M3": int(kind == "fp8")}
    return source_spec("linear", _SOURCE, defines, {"wgmma.h": _wgmma_header(kind, rows)})


def _wgmma_header(kind: Kind, rows: int) -> str:
    """The GEMM with ``rows`` columns, whose accumulators are operands that must be listed one by one."""
    count = rows // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    shape, transposed = ("k16.f32.bf16.bf16", ", 0, 0") if kind == "bf16" else ("k32.f32.e4m3.e4m3", "")
    return "\n".join(
        (
            "#pragma once",
            "#include <stdint.h>",
            f"__device__ __forceinline__ void wgmma(float (&d)[{count}], uint64_t a, uint64_t b, int add) {{",
            f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"',
            f'    "wgmma.mma_async.sync.aligned.m64n{rows}{shape} "',
            f'    "{{{sums}}}, %{count}, %{count + 1}, p, 1, 1{transposed};\\n}}"',
            f'    : {operands} : "l"(a), "l"(b), "r"(add));',
            "}",
            "",
        )
    )
