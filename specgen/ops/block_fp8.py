"""GEMMs of block FP8 of many rows on Hopper: DeepGEMM's kernel, from the headers that FlashInfer installs.

FlashInfer's own function for it (``fp8_blockscale_gemm_sm90``) starts nvcc in the middle of a run, whenever a number of
rows asks for another tile, and keeps what comes out under a name without a version. So ``block_fp8.cu`` has the tiles
for one shape of a weight compiled as all kernels here are: in seconds, ahead, named after their source.

Of 128 inputs the tensor cores' sum leaves them, with fewer bits than float32, and is added in float32 times both
scales; inputs in order, whatever the tile, so a row's result depends on no other row. It is rounded once, to bfloat16.
"""

import ctypes
import logging
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgen.ops.jit_modules import Module, compiled, current_stream, num_sms, pointers, runs_on, source_spec
from specgen.ops.measured_choices import BLOCK_FP8
from specgen.ops.weight import GROUP

_SOURCE = Path(__file__).with_suffix(".cu")
ROWS = 128  # of a tile; one that is not full takes up to 1.6 times as long as a full one
_BLOCKS_OUT = (32, 48, 64, 80, 96, 112, 128)
_ROWS_OF_PAIRS = 1024  # from which two blocks share what they read of the inputs, as DeepGEMM chooses
FEWEST_ROWS: int = BLOCK_FP8["fewest_rows"]


def can_run(device: torch.device, num_out: int, width: int) -> bool:
    """Whether weights of this shape run here; where only FlashInfer's headers are missing a line says so."""
    return fits(num_out, width) and runs_on(device) and _headers() is not None


def fits(num_out: int, width: int) -> bool:
    """Whether a weight consists of whole blocks."""
    return num_out % GROUP == 0 and width % GROUP == 0


def module(num_out: int, width: int) -> Module:
    """What GEMMs with weights of this shape need compiled, where ``can_run``."""
    return Module(what=f"block FP8 GEMMs of {num_out} x {width}", spec=partial(_spec, num_out, width))


def block_fp8_linear(x: Tensor, x_scale: Tensor, weight: Tensor, w_scale: Tensor) -> Tensor:
    """``x`` [rows, in] through ``weight`` [out, in], both e4m3: [rows, out] in bfloat16, of whole tiles of ``ROWS``.

    Float32 scales: ``w_scale`` [out / 128, in / 128] and ``x_scale`` [rows, in / 128], of which a column is contiguous
    (``rounded_rows`` with ``ROWS`` as its multiple).
    """
    (num_rows, width), num_out = x.shape, weight.shape[0]
    assert num_rows % ROWS == 0, num_rows
    assert x.is_contiguous(), x.stride()
    assert weight.is_contiguous(), weight.stride()
    assert w_scale.is_contiguous(), w_scale.stride()
    assert w_scale.shape == (num_out // GROUP, width // GROUP), w_scale.shape
    assert x_scale.shape == (num_rows, width // GROUP), x_scale.shape
    assert x_scale.stride() == (1, num_rows), (x_scale.stride(), num_rows)
    y = torch.empty(num_rows, num_out, dtype=torch.bfloat16, device=x.device)
    if not num_rows:
        return y
    num_blocks = num_sms(x.device)
    block_out, pair = tile(num_rows, num_out, num_blocks)
    error = compiled(_spec, "block_fp8", num_out, width)(
        *pointers((x, x_scale, weight, w_scale, y)),
        ctypes.c_int64(num_rows),
        *(block_out, pair, num_blocks),
        current_stream(x.device),
    )
    assert error == 0, f"block_fp8: error {error} at {list(x.shape)}, weight {list(weight.shape)}"
    return y


def tile(num_rows: int, num_out: int, num_blocks: int) -> tuple[int, int]:
    """Outputs of a tile, and blocks that share rows: the fewest turns of all blocks, the last of them the fullest.

    As DeepGEMM chooses, from fewer candidates.
    """

    def cost(block_out: int) -> tuple[int, int, int]:
        tiles = -(-num_rows // ROWS) * -(-num_out // block_out)
        return -(-tiles // num_blocks), -((tiles - 1) % num_blocks), block_out

    best = min(_BLOCKS_OUT, key=cost)
    paired = best == 128 and num_out % 256 == 0 and num_rows >= _ROWS_OF_PAIRS and num_blocks % 2 == 0
    return best, 2 if paired else 1


@cache
def _headers() -> Path | None:
    from flashinfer.jit import env

    folder = Path(env.FLASHINFER_CSRC_DIR) / "nv_internal" / "tensorrt_llm"
    if (folder / "deep_gemm" / "fp8_gemm_impl.cuh").exists():
        return folder
    text = "GEMMs of block FP8 of many rows take a slower kernel: this FlashInfer has no DeepGEMM in %s"
    logging.getLogger("specgen").warning(text, folder)
    return None


def _spec(num_out: int, width: int) -> Any:  # noqa: ANN401
    """The ``JitSpec`` for weights of this shape."""
    folder = _headers()
    assert folder is not None
    return source_spec("block_fp8", _SOURCE, {"OUT": num_out, "WIDTH": width}, {}, [folder])
