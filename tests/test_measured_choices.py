"""Measured choices of tiles: the table, and how it is measured and rewritten."""

import tomllib
from pathlib import Path

import choice_gemms
import measure_choices
import pytest
from choice_gemms import entry, fastest, first_faster, neighbours, rewritten

from specgen.ops import measured_choices
from specgen.ops.measured_choices import ExpertTiles, Fp8Tile, Tile

TABLES = measured_choices._TABLES

DENSE = {
    name: getattr(measured_choices, name)
    for name in (
        *("LINEAR", "LINEAR_PARTS", "LINEAR_FEW_OUTPUTS"),
        *("GATED", "FP8_LINEAR", "FP8_LINEAR_PARTS", "FP8_GATED"),
    )
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
        (measured_choices.GATED, (8192, 2048), 1, 128, 4),
        (measured_choices.LINEAR, (12288, 4096), 64, 128, 4),
        (measured_choices.FP8_LINEAR, (4096, 4096), 33, 256, 4),
    ],
)
def test_matrices_take_the_tiles_that_they_were_measured_with(
    tiles: tuple[Tile, ...], matrix: tuple[int, int], rows: int, block_in: int, stages: int
) -> None:
    found = taken(tiles, rows, matrix)
    assert (found.block_in, found.stages) == (block_in, stages)


def test_more_rows_go_to_other_kernels() -> None:
    assert taken(measured_choices.LINEAR, 65, (4096, 4096)) is None
    assert taken(measured_choices.LINEAR, 17, (16384, 4096)) is None
    assert taken(measured_choices.LINEAR, 16, (16384, 4096)) is not None
    assert measured_choices.FP8_LINEAR[-1].most_rows == measured_choices.FP8_FEW_ROWS, (
        "every number of rows has a kernel"
    )
    assert measured_choices.HOPPER["fewest_rows"] <= measured_choices.LINEAR[-1].most_rows + 1
    assert measured_choices.HOPPER["most_rows"] == max(measured_choices.HOPPER["tiles"])


def test_an_entry_is_measured_at_matrices_for_which_it_is_taken() -> None:
    sizes = {
        table: [choice_gemms.shapes_of(table, tile) for tile in tiles]
        for table, (tiles, _) in choice_gemms.TABLES.items()
    }
    assert sizes["linear"][:4] == [((1344, 2048),), choice_gemms.QKV, (), (*choice_gemms.QKV, (1344, 2048))]
    assert sizes["gated"][:4] == [((3072, 2048),), ((6144, 1024),), ((16384, 2048),), choice_gemms.GATE_UP]
    nowhere = {
        (table, index) for table, each in sizes.items() for index, found in enumerate(each) if not found
    }
    assert nowhere == {  # for matrices that earlier entries do not fit
        *(("linear", 2), ("linear", 4), ("fp8_linear_parts", 4), ("fp8_many", 1), ("fp8_gated_many", 1))
    }


def test_kernels_hold_no_tables_of_their_own() -> None:
    folder = Path(measured_choices.__file__).parent
    assert [file.name for file in folder.glob("*.py") if "stages=4" in file.read_text()] == []


TEXT = Path(measured_choices.__file__).with_suffix(".toml").read_text("utf-8")
HERE = Tile(rows=16, block_out=64, block_in=128, stages=6, warps=4, prefetch_bytes=1024)
OTHER = Tile(rows=16, block_out=64, block_in=128, stages=8, warps=4, prefetch_bytes=1024)


def test_neighbours_differ_in_one_size() -> None:
    found = neighbours(HERE)
    assert found[0] == HERE
    assert len(set(found)) == len(found)
    assert OTHER in found
    for tile in found[1:]:
        sizes = ("rows", "block_out", "block_in", "stages", "warps", "prefetch_bytes", "parts")
        assert sum(getattr(tile, name) != getattr(HERE, name) for name in sizes) == 1
    assert {tile.block_in for tile in neighbours(HERE, fixed=["block_in"])} == {128}


def test_the_fastest_is_so_over_all_shapes() -> None:
    assert fastest(HERE, {HERE: [10.0, 10.0], OTHER: [8.0, 10.0]}) == OTHER
    assert fastest(HERE, {HERE: [10.0, 1.0], OTHER: [9.0, 2.0]}) == HERE, "a ratio counts, not seconds"
    assert fastest(HERE, {HERE: [10.0], OTHER: [9.9]}) == HERE, "within the noise"
    assert fastest(HERE, {HERE: [10.0, 10.0], OTHER: [1.0, None]}) == HERE, "wrong for a shape"
    assert fastest(HERE, {HERE: [10.0, None], OTHER: [11.0, 11.0]}) == OTHER, "the present one is wrong"
    assert fastest(HERE, {HERE: [None], OTHER: [None]}) == HERE
    assert fastest(HERE, {}) == HERE


@pytest.mark.parametrize(
    ("ratios", "first"),
    [
        ({48: 1.2, 65: 0.9, 96: 0.5}, 65),
        ({48: 0.8, 65: 1.1, 96: 0.5}, 96),
        ({48: 0.8, 65: 0.9}, 48),
        ({48: 0.8, 65: 1.1}, None),
        ({96: 0.5, 48: 1.2, 65: 0.9}, 65),
    ],
)
def test_a_kernel_takes_over_where_it_is_never_slower_again(
    ratios: dict[int, float], first: int | None
) -> None:
    assert first_faster(ratios) == first


def test_what_is_not_replaced_stays_as_it_is() -> None:
    new = rewritten(TEXT, "hopper", {}, {"fewest_rows": 49}, "a GPU")
    changed = [pair for pair in zip(TEXT.splitlines(), new.splitlines(), strict=True) if pair[0] != pair[1]]
    assert [line for _, line in changed] == [
        'measured = "a GPU"',
        "fewest_rows = 49  # in bfloat16; the tables above are for fewer, other GPUs and matrices, and float16",
    ]


def test_an_entry_is_replaced_in_its_table_alone() -> None:
    tile = Fp8Tile(rows=16, block_out=32, block_in=256, stages=5, warps=8, rounds=True)
    new = tomllib.loads(rewritten(TEXT, "fp8_gated", {0: tile}, {}, "a GPU"))
    old = tomllib.loads(TEXT)
    assert Fp8Tile(**new["fp8_gated"]["tiles"][0]) == tile
    assert new["fp8_gated"]["tiles"][1:] == old["fp8_gated"]["tiles"][1:]
    assert {name for name in old if new[name] != old[name]} == {"fp8_gated"}


def test_every_tile_can_be_written_and_read() -> None:
    for name, kind in (
        ("linear", Tile),
        ("linear_few_outputs", Tile),
        ("fp8_linear", Fp8Tile),
        ("fp8_many", Fp8Tile),
    ):
        for raw in tomllib.loads(TEXT)[name]["tiles"]:
            tile = kind(**raw)
            assert kind(**tomllib.loads(f"a = {entry(tile)}")["a"]) == tile


def test_what_a_table_does_not_hold_is_an_error() -> None:
    with pytest.raises(StopIteration):
        rewritten(TEXT, "linear", {}, {"most_rows": 3}, "a GPU")
    with pytest.raises(ValueError, match="nowhere"):
        rewritten(TEXT, "nowhere", {}, {}, "a GPU")


def fake(better: Tile, wrong: Tile | None = None):
    """Times of ``time_tile``: 10 us, or 5 of the tile that is better, all of which the script asked for."""

    def time_tile(table: str, form: str, tile: Tile, shape: tuple[int, int]) -> choice_gemms.Timed:
        if tile == wrong:
            return choice_gemms.Timed(seconds=None, why="WRONG")
        return choice_gemms.Timed(seconds=5e-6 if tile == better else 10e-6)

    return time_tile


def test_the_script_takes_what_is_faster_and_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choice_gemms, "time_tile", fake(OTHER))
    assert measure_choices.measure_tiles("linear", float("inf")) == ({1: OTHER}, {})
    assert "<- faster" in capsys.readouterr().out
    monkeypatch.setattr(choice_gemms, "time_tile", fake(OTHER, wrong=OTHER))
    assert measure_choices.measure_tiles("linear", float("inf")) == ({}, {})
    assert "WRONG" in capsys.readouterr().out


def test_without_time_nothing_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choice_gemms, "time_tile", fake(OTHER))
    assert measure_choices.measure_tiles("linear", 0.0) == ({}, {})
    assert "no time left, stays" in capsys.readouterr().out


@pytest.mark.parametrize("table", choice_gemms.TABLES)
def test_candidates_keep_what_belongs_to_the_weights(table: str) -> None:
    """Blocks of 128x128 have one scale a step; a tile that rounds takes other inputs."""
    entries = list(measure_choices.candidates(table))
    assert entries
    for _, present, tiles in entries:
        assert tiles[0] == present
        for tile in tiles:
            assert tile.rows == present.rows
            assert tile.parts == present.parts
            assert getattr(tile, "rounds", False) == getattr(present, "rounds", False)
            if table.startswith("fp8"):
                assert tile.block_in == present.block_in
