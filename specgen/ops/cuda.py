"""Kernels for NVIDIA GPUs of compute capability 9.0 and later."""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.ops import Ops
from specgen.ops.argmax import argmax
from specgen.ops.reference import Linear, one_part
from specgen.ops.rope import TritonRope
from specgen.ops.row_kernels import TritonEmbedBeside, TritonNorm, silu_and_mul
from specgen.ops.skinny import Tile, skinny_gated_linear, skinny_linear

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
        linear=_SkinnyLinear.prepare if half else Linear,
        linear_parts=_LinearParts.prepare if half else (lambda weight: one_part(Linear(weight))),
        gated_linear=_SkinnyGatedLinear.prepare if half else _GatedLinear,
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


@dataclass(frozen=True)
class _GatedLinear:
    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return silu_and_mul(F.linear(x, self.weight))


@dataclass(frozen=True, kw_only=True)
class _SkinnyLinear:
    weight: Tensor
    tiles: tuple[Tile, ...]

    @classmethod
    def prepare(cls, weight: Tensor) -> "_SkinnyLinear":
        return cls(weight=weight, tiles=_fitting(_TILES, *weight.shape))

    def __call__(self, x: Tensor) -> Tensor:
        tile = _tile(self.tiles, x.shape[0])
        return F.linear(x, self.weight) if tile is None else skinny_linear(x, self.weight, tile)[0]


@dataclass(frozen=True, kw_only=True)
class _LinearParts:
    weight: Tensor
    tiles: tuple[Tile, ...]

    @classmethod
    def prepare(cls, weight: Tensor) -> "_LinearParts":
        return cls(weight=weight, tiles=_fitting(_PARTS_TILES, *weight.shape))

    def __call__(self, x: Tensor) -> Tensor:
        tile = _tile(self.tiles, x.shape[0])
        return F.linear(x, self.weight)[None] if tile is None else skinny_linear(x, self.weight, tile)


@dataclass(frozen=True, kw_only=True)
class _SkinnyGatedLinear:
    weight: Tensor
    tiles: tuple[Tile, ...]

    @classmethod
    def prepare(cls, weight: Tensor) -> "_SkinnyGatedLinear":
        return cls(weight=weight, tiles=_fitting(_GATED_TILES, weight.shape[0] // 2, weight.shape[1]))

    def __call__(self, x: Tensor) -> Tensor:
        tile = _tile(self.tiles, x.shape[0])
        if tile is None:
            return silu_and_mul(F.linear(x, self.weight))
        return skinny_gated_linear(x, self.weight, tile)


def _fitting(tiles: tuple[Tile, ...], num_out: int, width: int) -> tuple[Tile, ...]:
    return tuple(tile for tile in tiles if tile.fits(num_out, width))


def _tile(tiles: tuple[Tile, ...], num_rows: int) -> Tile | None:
    return next((tile for tile in tiles if 0 < num_rows <= tile.rows), None)
