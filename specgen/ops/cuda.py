"""Kernels for NVIDIA GPUs of compute capability 9.0 and later."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from specgen.config import require
from specgen.ops import Map, Ops, automaton_kernels, measured_choices
from specgen.ops.expert_kernels import few_rows_experts
from specgen.ops.experts import Activation, Experts, ExpertsMap, grouped_experts
from specgen.ops.fp8_cuda import fp8_gated, fp8_map, fp8_parts
from specgen.ops.hopper_linear import (
    FEWEST_ROWS,
    MOST_ROWS,
    MOST_ROWS_OF_PARTS,
    fits,
    hopper_linear,
    hopper_linear_parts,
)
from specgen.ops.jit_modules import runs_on
from specgen.ops.measured_choices import Tile
from specgen.ops.reference import linear, linear_float32, one_part
from specgen.ops.rope import TritonRope
from specgen.ops.router_kernel import fused_choice, fused_sigmoid_choice
from specgen.ops.row_kernels import (
    TritonEmbedNormConcat,
    TritonGatedNorm,
    TritonNorm,
    activate_and_mul,
    largest,
    most_likely,
    sandwich,
    sigmoid_gated,
    sum_parts,
)
from specgen.ops.skinny import skinny_gated_linear, skinny_linear
from specgen.ops.weight import Weight

_HALF = (torch.bfloat16, torch.float16)


def cuda_ops(dtype: torch.dtype) -> Ops:
    """Triton kernels, with cuBLAS for many rows; in float32 GEMMs are in full precision, most of them cuBLAS's."""
    _prefer_cublaslt()
    return Ops(
        linear=partial(_linear, dtype),
        linear_parts=partial(_linear_parts, dtype),
        gated_linear=partial(_gated_linear, dtype),
        linear_float32=partial(_linear_float32, dtype),
        experts=partial(_experts, dtype),
        choice=partial(fused_choice, dtype),
        sigmoid_choice=partial(fused_sigmoid_choice, dtype),
        rms_norm=TritonNorm,
        sandwich=sandwich,
        embed_norm_concat=TritonEmbedNormConcat,
        gated_norm=TritonGatedNorm,
        sigmoid_gated=sigmoid_gated,
        gelu_gated=partial(activate_and_mul, "gelu tanh"),
        largest=largest,
        most_likely=most_likely,
        walk=automaton_kernels.walk,
        mask=automaton_kernels.mask,
        rope=TritonRope,
    )


def _prefer_cublaslt() -> None:
    """For the whole process: 2 to 3 % faster at 128 to 160 rows and no slower elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the setting is experimental
        torch.backends.cuda.preferred_blas_library("cublaslt")


def _linear(dtype: torch.dtype, weight: Weight) -> Map:
    if weight.format == "fp8":
        return fp8_map(weight, dtype)
    if dtype not in _HALF:
        return linear(weight)
    tiles = measured_choices.LINEAR
    if weight.matrix.shape[0] <= measured_choices.FEW_OUTPUTS:  # parts and a kernel for their sum are faster
        tiles = measured_choices.LINEAR_FEW_OUTPUTS + tiles

    def few(x: Tensor, matrix: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
        parts = skinny_linear(x, matrix, bias, tile)
        return parts[0] if tile.parts == 1 else sum_parts(parts, dtype)

    return _by_rows(tiles, weight, few, linear(weight))


def _linear_parts(dtype: torch.dtype, weight: Weight) -> Map:
    if weight.format == "fp8":
        return fp8_parts(weight, dtype)
    whole = one_part(linear(weight))
    if dtype not in _HALF:
        return whole
    matrix, bias = weight.matrix, weight.bias
    many = matrix.shape[0] > measured_choices.FEW_OUTPUTS
    tiles = measured_choices.LINEAR_PARTS if many else measured_choices.LINEAR_FEW_OUTPUTS
    few = _by_rows(tiles, weight, skinny_linear, whole)
    if (
        not many
        or dtype != torch.bfloat16
        or not runs_on(matrix.device)
        or not fits(matrix.shape[0], matrix.shape[1], dtype, gated=False)
    ):
        return few

    def gemm(x: Tensor) -> Tensor:
        if FEWEST_ROWS <= x.shape[0] <= MOST_ROWS_OF_PARTS:
            return hopper_linear_parts(x, matrix, bias)
        return few(x)

    return gemm


def _linear_float32(dtype: torch.dtype, weight: Weight) -> Map:
    exact = linear_float32(weight)
    if dtype not in _HALF or weight.format == "fp8":
        return exact
    tiles = tuple(tile for tile in measured_choices.LINEAR_FEW_OUTPUTS if tile.parts > 1)  # not rounded
    return _by_rows(tiles, weight, skinny_linear, exact)


def _gated_linear(
    dtype: torch.dtype, weight: Weight, out_scale: Tensor | None = None, activation: Activation = "swish"
) -> Map:
    if weight.format == "fp8":
        return fp8_gated(weight, dtype, out_scale, activation)
    together = linear(weight)

    def whole(x: Tensor) -> Tensor:
        return activate_and_mul(activation, *together(x).chunk(2, -1))

    if dtype not in _HALF:
        return whole
    skinny = partial(skinny_gated_linear, activation)
    few = _by_rows(measured_choices.GATED, weight, skinny, whole, halves=2)
    matrix, bias = weight.matrix, weight.bias
    out, width = matrix.shape
    if dtype != torch.bfloat16 or not runs_on(matrix.device) or not fits(out // 2, width, dtype, gated=True):
        return few

    def gemm(x: Tensor) -> Tensor:
        if FEWEST_ROWS <= x.shape[0] <= MOST_ROWS:
            return hopper_linear(x, matrix, bias=bias, activation=activation)
        return few(x)

    return gemm


def _experts(dtype: torch.dtype, experts: Experts) -> ExpertsMap:
    if experts.gate_up.format == "mxfp4":
        name = str(dtype).removeprefix("torch.")
        require(
            dtype == torch.bfloat16,
            f"experts in MXFP4 run in bfloat16 on a GPU, not {name}: use --dtype bfloat16",
        )
        return few_rows_experts(experts, measured_choices.EXPERTS_MXFP4)
    if "fp8" in (experts.gate_up.format, experts.down.format):
        few = dtype == torch.float32  # inputs fill the shared memory
        return few_rows_experts(
            experts, measured_choices.EXPERTS_FP8[:2] if few else measured_choices.EXPERTS_FP8
        )
    experts = replace(
        experts,
        gate_up=replace(experts.gate_up, data=experts.gate_up.data.contiguous()),
        down=replace(experts.down, data=experts.down.data.contiguous()),
    )  # a checkpoint may have them transposed
    if dtype == torch.bfloat16:
        return few_rows_experts(experts, measured_choices.EXPERTS_PLAIN, grouped_experts(experts))
    return few_rows_experts(
        experts,
        measured_choices.EXPERTS_FLOAT32 if dtype == torch.float32 else measured_choices.EXPERTS_PLAIN,
    )


def _by_rows(
    tiles: tuple[Tile, ...],
    weight: Weight,
    skinny: Callable[[Tensor, Tensor, Tensor | None, Tile], Tensor],
    cublas: Map,
    halves: int = 1,
) -> Map:
    """``skinny`` where a tile fits the weight, of which each output uses ``halves`` rows, and the number of rows."""
    matrix, bias = weight.matrix, weight.bias
    fitting = [tile for tile in tiles if tile.fits(matrix.shape[0] // halves, matrix.shape[1])]

    def gemm(x: Tensor) -> Tensor:
        tile = next((tile for tile in fitting if 0 < x.shape[0] <= tile.most_rows), None)
        return cublas(x) if tile is None else skinny(x, matrix, bias, tile)

    return gemm
