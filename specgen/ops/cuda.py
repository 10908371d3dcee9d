"""Kernels for NVIDIA GPUs of compute capability 9.0 and later."""

import warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.ops import Map, Ops
from specgen.ops.argmax import argmax
from specgen.ops.reference import gated, linear, one_part
from specgen.ops.rope import TritonRope
from specgen.ops.row_kernels import TritonEmbedBeside, TritonNorm, silu_and_mul
from specgen.ops.skinny import Tile, skinny_gated_linear, skinny_linear
from specgen.ops.weight import Weight

# By rising number of rows; more rows than the last one's go to cuBLAS. Measured at Llama-3.1-8B's shapes on an H100.
_TILES = (
    Tile(rows=16, block_out=64, block_in=128, stages=6, warps=4, ahead=1024),
    Tile(rows=64, block_out=64, block_in=128, stages=4, warps=8, ahead=512),
)
_PARTS_TILES = (
    Tile(rows=16, block_out=64, block_in=128, stages=6, warps=4, ahead=512, parts=2),
    Tile(rows=64, block_out=64, block_in=128, stages=4, warps=8, ahead=512, parts=2),
)
_GATED_TILES = (
    Tile(rows=16, block_out=128, block_in=128, stages=3, warps=8, ahead=512),
    Tile(rows=64, block_out=64, block_in=128, stages=4, warps=4, ahead=512),
    Tile(rows=128, block_out=64, block_in=128, stages=3, warps=8, ahead=0),
)


def cuda_ops(dtype: torch.dtype) -> Ops:
    """Triton kernels, and cuBLAS for matrices; in float32 all matrices are cuBLAS's, in full precision."""
    _prefer_cublaslt()
    half = dtype in (torch.bfloat16, torch.float16)
    return Ops(
        linear=_linear if half else linear,
        linear_parts=_linear_parts if half else (lambda weight: one_part(linear(weight))),
        gated_linear=_gated_linear if half else (lambda weight: gated(linear(weight), silu_and_mul)),
        rms_norm=TritonNorm,
        embed_beside=TritonEmbedBeside,
        argmax=argmax,
        rope=TritonRope,
    )


def _prefer_cublaslt() -> None:
    """For the whole process: its choice of kernels is 2 to 3 % faster at 128 to 160 rows and no worse elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the setting is experimental
        torch.backends.cuda.preferred_blas_library("cublaslt")


def _linear(weight: Weight) -> Map:
    matrix = weight.matrix
    tiles = _fitting(_TILES, *matrix.shape)

    def product(x: Tensor) -> Tensor:
        tile = _tile(tiles, x.shape[0])
        return F.linear(x, matrix) if tile is None else skinny_linear(x, matrix, tile)[0]

    return product


def _linear_parts(weight: Weight) -> Map:
    matrix = weight.matrix
    tiles = _fitting(_PARTS_TILES, *matrix.shape)

    def product(x: Tensor) -> Tensor:
        tile = _tile(tiles, x.shape[0])
        return F.linear(x, matrix)[None] if tile is None else skinny_linear(x, matrix, tile)

    return product


def _gated_linear(weight: Weight) -> Map:
    matrix = weight.matrix
    tiles = _fitting(_GATED_TILES, matrix.shape[0] // 2, matrix.shape[1])

    def product(x: Tensor) -> Tensor:
        tile = _tile(tiles, x.shape[0])
        if tile is None:
            return silu_and_mul(F.linear(x, matrix))
        return skinny_gated_linear(x, matrix, tile)

    return product


def _fitting(tiles: tuple[Tile, ...], num_out: int, width: int) -> tuple[Tile, ...]:
    return tuple(tile for tile in tiles if tile.fits(num_out, width))


def _tile(tiles: tuple[Tile, ...], num_rows: int) -> Tile | None:
    return next((tile for tile in tiles if 0 < num_rows <= tile.rows), None)
