"""Measured choices: the tile that times decide on, the row from which another kernel takes over, the rewritten file."""

import tomllib
from pathlib import Path

import choice_gemms
import measure_choices
import pytest
from choice_gemms import entry, fastest, first_faster, neighbours, rewritten

from specgen.ops import measured_choices
from specgen.ops.measured_choices import Fp8Tile, Tile

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
