"""Products of 65 to some hundred rows on Hopper: ``hopper_linear.cu``, compiled by FlashInfer's means when needed.

Measured on an H100 at the shapes of Llama-3.1-8B, in microseconds at 160 rows, beside reading the weight and beside
cuBLAS: gate and up in bfloat16 87 (78, 100), in FP8 47 (39, 53); q, k and v in FP8 with three scales 15 (8, 20). The
other products of bfloat16, of few outputs, are no faster than cuBLAS's.
"""

import ctypes
import logging
import os
from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, Literal

import torch
from torch import Tensor

from specgen.ops.jit_modules import Module
from specgen.ops.measured_choices import HOPPER

_SOURCE = Path(__file__).with_suffix(".cu")
_TILES: tuple[int, ...] = tuple(HOPPER["tiles"])
_OUT = 128  # rows of a weight that a block reads
Kind = Literal["bf16", "fp8"]
FEWEST_ROWS: int = HOPPER["fewest_rows"]
MOST_ROWS: int = HOPPER["most_rows"]
MOST_ROWS_OF_SEVERAL_SCALES: int = HOPPER["most_rows_of_several_scales"]


def runs_on(device: torch.device) -> bool:
    """Whether it was built for ``device``, compute capability 9.0, and can be compiled; a line says where it cannot."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and _compiles()


@cache
def _compiles() -> bool:
    reason = _not_compiled()
    if reason is not None:
        text = "products of 65 and more rows go to cuBLAS, which is up to 13 %% slower: %s"
        logging.getLogger("specgen").warning(text, reason)
    return reason is None


def _not_compiled() -> str | None:
    """Why it cannot be compiled here; None: it can."""
    if find_spec("flashinfer") is None:
        return "flashinfer-python, which compiles kernels of our own, is not installed"
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        return "FLASHINFER_DISABLE_JIT is set"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    for tool in ("nvcc", "ninja"):
        if which(tool) is None and not (Path(home) / "bin" / tool).exists():
            return f"{tool} is not installed"
    return None


def fits(num_out: int, width: int, dtype: torch.dtype, *, gated: bool) -> bool:
    """Whether a weight of so many outputs and inputs consists of whole blocks."""
    return num_out % (_OUT // 2 if gated else _OUT) == 0 and width * dtype.itemsize % 128 == 0


def modules(kind: Kind) -> list[Module]:
    """What products with weights of this ``kind`` need compiled."""
    return [
        Module(what=f"{kind} products of {rows} rows", spec=partial(_spec, kind, rows)) for rows in _TILES
    ]


def hopper_linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    out_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    y_scale: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """``x`` [rows, in] through ``weight`` [out, in], both contiguous: [rows, out] in bfloat16; in any number of rows.

    ``gated``: the weight holds gate and up, the result is silu(gate) * up [rows, out / 2]; bfloat16 does only that.
    In e4m3 ``out_scale`` is float32 [out], ``x_scale`` [1] or [rows, 1]. With a ``y_scale`` [1] the result is e4m3.
    """
    (num_rows, width), num_out = x.shape, weight.shape[0] // (2 if gated else 1)
    assert x.is_contiguous(), x.stride()
    assert weight.is_contiguous(), weight.stride()
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    assert fits(num_out, width, x.dtype, gated=gated), weight.shape
    y = torch.empty(
        num_rows, num_out, dtype=torch.bfloat16 if y_scale is None else torch.float8_e4m3fn, device=x.device
    )
    if not num_rows:
        return y
    kind: Kind = "bf16" if x.dtype == torch.bfloat16 else "fp8"
    assert (kind == "bf16") == (out_scale is None) == (x_scale is None), x.dtype
    rows = _tile(num_rows)
    blocks, num_steps = _num_blocks(x.device), width * x.element_size() // 128
    tiles = weight.shape[0] // _OUT * -(-num_rows // rows)
    # In e4m3, two blocks a tile keep more of a GPU busy where there are few
    parts = 2 if not gated and 2 * tiles <= blocks and num_steps % 2 == 0 else 1
    tensors = (x, weight, bias, out_scale, x_scale, y_scale, y)
    pointers = [ctypes.c_void_p(None if each is None else each.data_ptr()) for each in tensors]
    sizes = [ctypes.c_int64(each) for each in (num_rows, num_out, width)]
    static = x_scale is not None and x_scale.numel() == 1
    numbers = (blocks, parts, int(static), int(gated))
    stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
    error = _function(kind, rows)(*pointers, *sizes, *numbers, stream)
    assert error == 0, f"hopper_linear: error {error} at {num_rows} rows, weight {list(weight.shape)}, {kind}"
    return y


def _tile(num_rows: int) -> int:
    """Rows of a tile that waste least of the last one."""
    tiles = -(-num_rows // _TILES[-1])
    return next(rows for rows in _TILES if rows * tiles >= num_rows)


@cache
def _num_blocks(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _function(kind: Kind, rows: int) -> Callable[..., int]:
    spec = _spec(kind, rows)
    spec.build(need_lock=True)
    function = ctypes.CDLL(str(spec.get_library_path())).hopper_linear
    function.restype = ctypes.c_int
    return function


def _spec(kind: Kind, rows: int) -> Any:  # noqa: ANN401
    """The ``JitSpec`` for tiles of ``rows``; named after the source, so that no other version's is taken for it."""
    from flashinfer.jit import env
    from flashinfer.jit.core import gen_jit_spec

    header = _wgmma_header(kind, rows)
    digest = sha256(_SOURCE.read_bytes() + header.encode()).hexdigest()[:12]
    name = f"specgen_linear_{kind}_{rows}_{digest}"
    folder = env.FLASHINFER_GEN_SRC_DIR / name
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "wgmma.h").exists():  # as a whole: another rank may read it
        mine = folder / f"wgmma.{os.getpid()}"
        mine.write_text(header)
        mine.replace(folder / "wgmma.h")
    flags = [f"-DROWS={rows}", f"-DE4M3={int(kind == 'fp8')}", "-gencode=arch=compute_90a,code=sm_90a"]
    return gen_jit_spec(name, [_SOURCE], extra_cuda_cflags=flags, extra_include_paths=[folder])


def _wgmma_header(kind: Kind, rows: int) -> str:
    """The product with ``rows`` columns, whose accumulators are operands that must be listed one by one."""
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
