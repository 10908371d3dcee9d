"""The measured choices: every table can be read, holds what its kernel can run, and leaves no number of rows out."""

from pathlib import Path

import pytest

from specgen.ops import measured_choices
from specgen.ops.measured_choices import ExpertTiles, Tile

TABLES = measured_choices._TABLES
DENSE = {
    name: getattr(measured_choices, name)
    for name in ("LINEAR", "LINEAR_PARTS", "LINEAR_FEW_OUTPUTS", "GATED", "FP8_LINEAR", "FP8_GATED")
}
EXPERTS = {
    name: getattr(measured_choices, f"EXPERTS_{name}") for name in ("PLAIN", "MXFP4", "FP8", "FLOAT32")
}


def taken(tiles: tuple[Tile, ...], rows: int, matrix: tuple[int, int]) -> Tile | None:
    return next((tile for tile in tiles if rows <= tile.most_rows and tile.fits(*matrix)), None)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_says_what_it_is_and_on_what_it_was_measured(name: str) -> None:
    assert TABLES[name]["what"]
    assert TABLES[name]["measured"]


@pytest.mark.parametrize("tiles", DENSE.values(), ids=DENSE)
def test_rows_ascend_and_blocks_are_powers_of_two(tiles: tuple[Tile, ...]) -> None:
    """Behind a larger tile a smaller one would never be reached; Triton knows no other blocks."""
    assert [tile.most_rows for tile in tiles] == sorted(tile.most_rows for tile in tiles)
    for tile in tiles:
        assert all(size & (size - 1) == 0 for size in (tile.rows, tile.block_out, tile.block_in, tile.warps))


@pytest.mark.parametrize("tiles", EXPERTS.values(), ids=EXPERTS)
def test_experts_ascend_in_rows(tiles: tuple[ExpertTiles, ...]) -> None:
    assert [tile.most for tile in tiles] == sorted({tile.most for tile in tiles})
    assert [tile.rows for tile in tiles] == sorted(tile.rows for tile in tiles)


def test_block_fp8_has_blocks_of_one_scale() -> None:
    for tiles in measured_choices.EXPERTS_FP8:
        assert tiles.gate_up.block_in == tiles.down.block_in == 128
    assert {tile.block_in for tile in (*measured_choices.FP8_MANY, *measured_choices.FP8_GATED_MANY)} == {128}


@pytest.mark.parametrize(
    ("tiles", "matrix", "rows", "block_in", "stages"),
    [
        (measured_choices.LINEAR, (4096, 4096), 16, 128, 6),
        (measured_choices.LINEAR, (4096, 4096), 17, 128, 4),
        (measured_choices.LINEAR, (2880, 2880), 5, 64, 8),
        (measured_choices.GATED, (1536, 2048), 5, 256, 4),
        (measured_choices.GATED, (1536, 2048), 17, 128, 4),
        (measured_choices.LINEAR_FEW_OUTPUTS, (32, 2880), 40, 64, 5),
        (measured_choices.GATED, (14336, 4096), 128, 128, 3),
        (measured_choices.FP8_LINEAR, (4096, 4096), 33, 256, 4),
    ],
)
def test_matrices_take_the_tiles_that_they_were_measured_with(
    tiles: tuple[Tile, ...], matrix: tuple[int, int], rows: int, block_in: int, stages: int
) -> None:
    found = taken(tiles, rows, matrix)
    assert found is not None
    assert (found.block_in, found.stages) == (block_in, stages)


def test_more_rows_go_to_other_kernels() -> None:
    assert taken(measured_choices.LINEAR, 65, (4096, 4096)) is None
    assert measured_choices.FP8_LINEAR[-1].most_rows == measured_choices.FP8_FEW_ROWS, (
        "every number of rows has a kernel"
    )
    assert measured_choices.HOPPER["fewest_rows"] <= measured_choices.LINEAR[-1].most_rows + 1
    assert measured_choices.HOPPER["most_rows"] == max(measured_choices.HOPPER["tiles"])


def test_kernels_hold_no_tables_of_their_own() -> None:
    folder = Path(measured_choices.__file__).parent
    assert [file.name for file in folder.glob("*.py") if "stages=4" in file.read_text()] == []
