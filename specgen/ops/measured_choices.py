"""The measured choices: which tiles a GEMM takes for how many rows.

They are data, in ``measured_choices.toml`` beside this; each table says on which GPU and shapes it was measured.
Whoever reads a table takes its first entry that fits the weight and the number of rows.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How a GEMM is tiled: a program computes ``block_out`` outputs of ``rows`` rows, or a split-K part of them."""

    rows: int
    block_out: int
    block_in: int
    stages: int  # blocks of the weight in flight
    warps: int
    prefetch_bytes: int = 0  # of each weight row, loaded before the inputs are ready
    parts: int = 1  # into which K, the input dimension, is split
    row_blocks: int = 1  # at most; each reads the weight, which should be small for more than one
    most_outputs: int | None = None  # more are for a later entry, or another kernel

    @property
    def most_rows(self) -> int:
        return self.rows * self.row_blocks

    @property
    def leaves_room(self) -> bool:
        """Whether what follows may start beside it: attention, which loads KV meanwhile, or a norm of few rows."""
        return self.parts == 1 or self.rows <= 16

    def fits(self, num_out: int, width: int) -> bool:
        """Whether a matrix [num_out, width] consists of whole blocks, and not of too many."""
        whole = num_out % self.block_out == 0 and width % (self.parts * self.block_in) == 0
        return whole and (self.most_outputs is None or num_out <= self.most_outputs)


@dataclass(frozen=True, kw_only=True)
class Fp8Tile(Tile):
    """How a GEMM is tiled, in inputs of one byte.

    One that ``rounds`` reads activations in the model's dtype and rounds them on their way; others want them rounded.
    """

    rounds: bool = False


class ExpertTile(NamedTuple):
    """A program computes ``block_out`` outputs of a block of rows; of gate and of up as many each."""

    block_out: int
    block_in: int  # MXFP4, and FP8 by block: 128
    stages: int  # blocks of the weight in flight
    warps: int
    rounds: bool = False  # its inputs, of FP8 by block: no kernel has to do so in front of it


@dataclass(frozen=True, kw_only=True)
class ExpertTiles:
    """The two GEMMs for at most ``most`` rows per expert on average, in blocks of ``rows`` rows of an expert."""

    most: float
    rows: int
    gate_up: ExpertTile
    down: ExpertTile


T = TypeVar("T")
_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def _tiles(name: str, kind: type[T]) -> tuple[T, ...]:
    return tuple(msgspec.convert(entry, kind) for entry in _TABLES[name]["tiles"])


LINEAR, LINEAR_PARTS, LINEAR_FEW_OUTPUTS, GATED = (
    _tiles(name, Tile) for name in ("linear", "linear_parts", "linear_few_outputs", "gated")
)
FP8_LINEAR, FP8_LINEAR_PARTS, FP8_GATED, FP8_MANY, FP8_GATED_MANY = (
    _tiles(name, Fp8Tile)
    for name in ("fp8_linear", "fp8_linear_parts", "fp8_gated", "fp8_many", "fp8_gated_many")
)
EXPERTS_PLAIN, EXPERTS_MXFP4, EXPERTS_FP8, EXPERTS_FLOAT32 = (
    _tiles(f"experts_{name}", ExpertTiles) for name in ("plain", "mxfp4", "fp8", "float32")
)
FEW_OUTPUTS: int = _TABLES["linear_few_outputs"]["most_outputs"]
FP8_FEW_ROWS: int = _TABLES["fp8_linear"]["most_rows"]
BLOCK_FP8: dict[str, Any] = _TABLES["block_fp8"]
HOPPER: dict[str, Any] = _TABLES["hopper"]
UNSPLIT_ROWS: int = _TABLES["attention_unsplit"]["most_rows"]
