"""Linear layers in FP8 on NVIDIA GPUs: own kernels for few rows, torch's scaled GEMMs for many.

Measured on an H100 at the shapes of Llama-3.1-8B: up to 64 rows our tiles take 1.15 to 1.5 times what reading the
weight takes, and at 160 rows torch's GEMM with one scale is 1.2 to 1.7 times as fast as they are. On Hopper
``hopper_linear`` takes more than 64 rows where it is faster than torch: gate and up, and outputs of several scales.
``block_fp8`` takes those of blocks of 128x128.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from specgen.config import require
from specgen.ops import Map, block_fp8, measured_choices
from specgen.ops.experts import Activation
from specgen.ops.fp8 import block_scales
from specgen.ops.fp8_kernels import (
    Fp8Matrix,
    Fp8Rows,
    fp8_gated_linear,
    fp8_linear,
    rounded_rows,
)
from specgen.ops.hopper_linear import MOST_ROWS, MOST_ROWS_OF_SEVERAL_SCALES, fits, hopper_linear
from specgen.ops.jit_modules import runs_on
from specgen.ops.measured_choices import Fp8Tile
from specgen.ops.row_kernels import activate_and_mul
from specgen.ops.weight import GROUP, Weight

_MANY = 1 << 20  # blocks of rows: any number


def _any_rows(tiles: tuple[Fp8Tile, ...]) -> tuple[Fp8Tile, ...]:
    return tuple(replace(tile, row_blocks=_MANY) for tile in tiles)


def fp8_map(weight: Weight, dtype: torch.dtype) -> Map:
    """See ``Ops.linear``."""
    layer = _Layer.build(weight, dtype, measured_choices.FP8_LINEAR + _any_rows(measured_choices.FP8_MANY))
    return lambda x: layer.gemm(x)[0]


def fp8_parts(weight: Weight, dtype: torch.dtype) -> Map:
    """See ``Ops.linear_parts``."""
    tiles = measured_choices.FP8_LINEAR_PARTS + _any_rows(measured_choices.FP8_MANY)
    return _Layer.build(weight, dtype, tiles).gemm


def fp8_gated(weight: Weight, dtype: torch.dtype, out_scale: Tensor | None, activation: Activation) -> Map:
    """See ``Ops.gated_linear``; with an ``out_scale`` [1] the result is e4m3."""
    layer = _Layer.build(
        weight, dtype, measured_choices.FP8_GATED + _any_rows(measured_choices.FP8_GATED_MANY), halves=2
    )
    return lambda x: layer.gated(x, out_scale, activation)


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """A weight with the tiles that fit it, of which each output uses ``halves`` rows."""

    matrix: Fp8Matrix
    input_scale: Tensor | None  # [1], of static activations
    dtype: torch.dtype
    tiles: tuple[Fp8Tile, ...]
    runs: tuple[tuple[slice, Tensor], ...]  # outputs that share a scale: many rows take a fast GEMM of torch
    folded: Tensor | None  # [1, out]: the scales of outputs, times the static one of inputs
    hopper: bool  # whether ``hopper_linear`` runs it
    blocks: bool  # whether ``block_fp8_linear`` does

    @classmethod
    def build(
        cls, weight: Weight, dtype: torch.dtype, tiles: tuple[Fp8Tile, ...], halves: int = 1
    ) -> "_Layer":
        assert weight.scale is not None
        out, width = weight.data.shape
        grouped = weight.activations == "group"
        fitting = tuple(
            tile
            for tile in tiles
            if tile.fits(out // halves, width)
            and not (grouped and tile.block_in != GROUP)
            and not (weight.activations == "token" and tile.rounds)  # the largest of a row is known behind it
        )
        require(
            any(not tile.rounds and tile.row_blocks == _MANY for tile in fitting),
            f"a weight in FP8 is [{out}, {width}]: kernels for GPUs need multiples of {64 * halves} and 128, use "
            "--device cpu or plain weights (--draft-lm-head model, if it is a copy for drafts)",
        )
        static = weight.static_scale
        scale = block_scales(weight.scale) if grouped else weight.scale.flatten()
        torchs = dtype == torch.bfloat16 and not grouped  # what torch's GEMMs by row and output can do
        return cls(
            matrix=Fp8Matrix(data=weight.data, scale=scale.contiguous(), grouped=grouped, bias=weight.bias),
            input_scale=static,
            dtype=dtype,
            tiles=fitting,
            runs=() if static is None else _runs(scale),
            folded=(scale if static is None else scale * static)[None].contiguous() if torchs else None,
            hopper=dtype == torch.bfloat16
            and runs_on(weight.data.device)
            and not grouped
            and fits(out // halves, width, weight.data.dtype, gated=halves == 2),
            blocks=grouped
            and dtype == torch.bfloat16
            and weight.bias is None
            and block_fp8.can_run(weight.data.device, out, width),
        )

    def gemm(self, x: Tensor) -> Tensor:
        """[rows, in] -> [parts, rows, out]."""
        if self.blocks and x.shape[0] >= block_fp8.FEWEST_ROWS:
            return self._blocks(x)[None]
        if (
            self.hopper
            and len(self.runs) != 1
            and measured_choices.FP8_FEW_ROWS < x.shape[0] <= MOST_ROWS_OF_SEVERAL_SCALES
        ):
            return self._hopper(x)[None]
        if x.shape[0] <= measured_choices.FP8_FEW_ROWS or self.folded is None:
            tile = self._tile(x)
            return fp8_linear(self._rows(x, tile), self.matrix, self.dtype, tile)
        return self._many(self._rows(x))[None]

    def gated(self, x: Tensor, out_scale: Tensor | None, activation: Activation) -> Tensor:
        """[rows, in] -> activation(gate) * up [rows, I]."""
        if self.blocks and x.shape[0] >= block_fp8.FEWEST_ROWS:
            assert out_scale is None, "inputs of block FP8 are rounded in front of their GEMM"
            return activate_and_mul(activation, *self._blocks(x).chunk(2, -1))
        if self.hopper and measured_choices.FP8_FEW_ROWS < x.shape[0] <= MOST_ROWS:
            return self._hopper(x, activation, y_scale=out_scale)
        if x.shape[0] <= measured_choices.FP8_FEW_ROWS or self.folded is None:
            tile = self._tile(x)
            return fp8_gated_linear(self._rows(x, tile), self.matrix, self.dtype, tile, activation, out_scale)
        rows, half = self._rows(x), self.matrix.data.shape[0] // 2
        if [run.stop for run, _ in self.runs] == [half, 2 * half]:
            gate, up = (self._scaled(rows, run, scale) for run, scale in self.runs)
        else:
            gate, up = self._many(rows).chunk(2, -1)
        return activate_and_mul(activation, gate, up, out_scale)

    def _blocks(self, x: Tensor) -> Tensor:
        rows = rounded_rows(x, None, GROUP, multiple=block_fp8.ROWS)
        assert rows.scale is not None
        return block_fp8.block_fp8_linear(rows.data, rows.scale, self.matrix.data, self.matrix.scale)[
            : len(x)
        ]

    def _hopper(
        self, x: Tensor, activation: Activation | None = None, *, y_scale: Tensor | None = None
    ) -> Tensor:
        rows, matrix = self._rows(x), self.matrix
        scales = {"out_scale": matrix.scale, "x_scale": rows.scale, "y_scale": y_scale}
        return hopper_linear(rows.data, matrix.data, bias=matrix.bias, activation=activation, **scales)

    def _tile(self, x: Tensor) -> Fp8Tile:
        half = x.dtype != torch.float8_e4m3fn
        return next(tile for tile in self.tiles if x.shape[0] <= tile.most_rows and (half or not tile.rounds))

    def _rows(self, x: Tensor, tile: Fp8Tile | None = None) -> Fp8Rows:
        static = self.input_scale is not None
        if x.dtype == torch.float8_e4m3fn or (tile is not None and tile.rounds):
            return Fp8Rows(data=x, scale=self.input_scale, static=static)
        return rounded_rows(x, self.input_scale, GROUP if self.matrix.grouped else None)

    def _many(self, rows: Fp8Rows) -> Tensor:
        """GEMMs by torch: with one scale where there is one, else with a scale for each row and output."""
        if len(self.runs) == 1:
            return self._scaled(rows, *self.runs[0])
        scale = torch.ones(len(rows.data), 1, device=rows.data.device) if rows.static else rows.scale
        assert scale is not None
        assert self.folded is not None
        return self._torch(rows.data, self.matrix.data, scale, self.folded, self.matrix.bias)

    def _scaled(self, rows: Fp8Rows, run: slice, scale: Tensor) -> Tensor:
        assert rows.scale is not None
        bias = None if self.matrix.bias is None else self.matrix.bias[run]
        return self._torch(rows.data, self.matrix.data[run], rows.scale, scale, bias)

    def _torch(
        self, x: Tensor, matrix: Tensor, scale: Tensor, out_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        return torch._scaled_mm(
            x, matrix.t(), scale_a=scale, scale_b=out_scale, bias=bias, out_dtype=self.dtype
        )


def _runs(scale: Tensor) -> tuple[tuple[slice, Tensor], ...]:
    """Consecutive outputs of equal ``scale`` [out], such as those of q, k and v; none where they are many."""
    edges = (scale[1:] != scale[:-1]).nonzero().flatten().add(1).tolist()
    if len(edges) > 2:
        return ()
    return tuple((slice(*ends), scale[ends[0]].reshape(1)) for ends in pairwise((0, *edges, len(scale))))
