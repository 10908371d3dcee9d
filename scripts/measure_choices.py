"""Measure the dense tables of ``specgen/ops/measured_choices.toml`` on this GPU; for an H100 about five minutes.

    PYTHONPATH=. python scripts/measure_choices.py [--tables linear,block_fp8] [--seconds 300] [--write]

Each entry's tile is timed beside those one step from it, in captured graphs over weights that no cache holds, at the
shapes of Llama-3.1-8B and Qwen3-8B, or with most_outputs of narrower models, with results that are compared with
float32; run it again to go a step further. A tile that is wrong, differs between two runs or is not 2 % faster is not
taken. Then where one kernel takes over from another: block FP8 from our tiles, torch's scaled GEMM from
hopper_linear. Without --write it prints what it would change. Not here: experts (``tune_experts.py``),
linear_few_outputs, tiles of hopper_linear and what was measured within steps (its sums of parts, attention_unsplit).
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import choice_gemms as gemms
import torch
from choice_gemms import entry, fastest, first_faster, neighbours, rewritten
from torch import Tensor

from specgen.ops import bind_ops, block_fp8, measured_choices
from specgen.ops.measured_choices import Tile

FILE = Path(measured_choices.__file__).with_suffix(".toml")
_FEW, _ALL = 1 << 20, 1  # rows from which block_fp8 is taken: by none, by all
Change = tuple[dict[int, Tile], dict[str, int]]  # entries of a table by index, and its numbers


def compile_one(job: tuple[str, gemms.Format, Tile]) -> None:
    """In this process, into Triton's cache, on tensors as small as may be."""
    table, form, tile = job
    is_gated = "gated" in table
    weight = gemms.a_weight(form, (512, 1024), 0)
    try:
        gemms.by_tile(weight, gemms.inputs(tile.rows, 1024), tile, is_gated)
    except Exception as error:
        if "out of resource" not in str(error):
            print(table, entry(tile), str(error).splitlines()[0], flush=True)


def candidates(table: str) -> Iterator[tuple[int, Tile, list[Tile]]]:
    """Index and tile of each entry that is measured, with its candidates: those that are taken for a matrix."""
    for index, tile in enumerate(gemms.TABLES[table][0]):
        if gemms.shapes_of(table, tile):
            yield index, tile, neighbours(tile, gemms.fixed(table))


def measure_tiles(table: str, ends: float) -> Change:
    """The entries of ``table`` that should be others."""
    changed = {}
    for index, present, tiles in candidates(table):
        if time.monotonic() > ends:
            print(f"{table} {index}: no time left, stays")
            continue
        form, found = gemms.format_of(table, present), {}
        for tile in tiles:
            each = [gemms.time_tile(table, form, tile, shape) for shape in gemms.shapes_of(table, present)]
            found[tile] = [one.seconds for one in each]
            for reason in {one.why for one in each if one.why in ("WRONG", "differs between two runs")}:
                print(f"{table} {entry(tile)}: {reason}", flush=True)
        best = fastest(present, found)
        print(f"{table} {index} {form}: {described(present, found)}", flush=True)
        if best != present:
            print(f"{table} {index} {form}: {described(best, found)}  <- faster", flush=True)
            changed[index] = best
    return changed, {}


def described(tile: Tile, found: dict[Tile, list[float | None]]) -> str:
    times = ("-" if each is None else f"{1e6 * each:.1f}" for each in found[tile])
    return f"{entry(tile)} {' '.join(times)} us"


def ratios(
    few: Callable[[gemms.Shape], Callable[[int, Tensor], Tensor]],
    many: Callable[[gemms.Shape], Callable[[int, Tensor], Tensor]],
    form: gemms.Format,
    shapes: tuple[gemms.Shape, ...],
    all_rows: tuple[int, ...],
) -> dict[int, float]:
    """Seconds of ``many`` by those of ``few``, over all ``shapes``, by rows; what is not usable is infinitely slow."""
    found = {}
    for rows in all_rows:
        sums = []
        for kernel in (few, many):
            total = 0.0
            for shape in shapes:
                call, x = kernel(shape), gemms.inputs(rows, shape[1])
                one = gemms.timed(
                    lambda i, call=call, x=x: call(i, x), form, shape, rows, shape in gemms.GATE_UP
                )
                total += float("inf") if one.seconds is None else one.seconds
                if one.why:
                    print(f"{form} {shape} {rows} rows: {one.why}")
            sums.append(total)
        print(f"  {rows} rows: {1e6 * sums[0]:.1f} us, then {1e6 * sums[1]:.1f}", flush=True)
        found[rows] = sums[1] / sums[0] if sums[0] != float("inf") else 0.0
    return found


def measure_block_fp8() -> Change:
    """From which row on DeepGEMM's kernel is faster than our tiles, rounding and gate included."""
    shapes = (*gemms.QKV, *gemms.PARTS, *gemms.GATE_UP)
    ops, before = bind_ops(gemms.CUDA, gemms.DTYPE), block_fp8.FEWEST_ROWS
    layers = {
        shape: [
            (ops.gated_linear if shape in gemms.GATE_UP else ops.linear)(weight)
            for weight in gemms.weights("group", shape)
        ]
        for shape in shapes
    }

    def from_rows(fewest: int) -> Callable[[gemms.Shape], Callable[[int, Tensor], Tensor]]:
        def kernel(shape: gemms.Shape) -> Callable[[int, Tensor], Tensor]:
            def call(i: int, x: Tensor) -> Tensor:
                block_fp8.FEWEST_ROWS = fewest
                return layers[shape][i](x)

            return call

        return kernel

    try:
        taken = ratios(from_rows(_FEW), from_rows(_ALL), "group", shapes, (16, 17, 33, 49, 65, 81, 129))
    finally:
        block_fp8.FEWEST_ROWS = before
    first = first_faster(taken)
    return {}, {} if first in (None, before) else {"fewest_rows": int(first)}


def measure_hopper() -> Change:
    """To which number of rows hopper_linear is faster than torch's scaled GEMM, for outputs of several scales."""
    from specgen.ops import fp8_cuda  # needs Triton

    shapes, all_rows = gemms.QKV, (193, 257, 321, 385, 449, 513)

    tiles = measured_choices.FP8_LINEAR + fp8_cuda._any_rows(measured_choices.FP8_MANY)
    layers = {
        shape: [fp8_cuda._Layer.build(each, gemms.DTYPE, tiles) for each in gemms.weights("scales", shape)]
        for shape in shapes
    }

    def hopper(shape: gemms.Shape) -> Callable[[int, Tensor], Tensor]:
        return lambda i, x: layers[shape][i]._hopper(x)

    def torchs(shape: gemms.Shape) -> Callable[[int, Tensor], Tensor]:
        return lambda i, x: layers[shape][i]._many(layers[shape][i]._rows(x))

    first = first_faster(ratios(hopper, torchs, "scales", shapes, all_rows))
    most = (first or all_rows[-1] + 1) - 1
    present = measured_choices.HOPPER["most_rows_of_several_scales"]
    return {}, {} if most == present else {"most_rows_of_several_scales": most}


def machine() -> str:
    import triton

    name = torch.cuda.get_device_name(gemms.CUDA)
    return f"{name}; scripts/measure_choices.py; torch {torch.__version__}, Triton {triton.__version__}"


def measure(table: str, ends: float) -> Change:
    measured = {"block_fp8": measure_block_fp8, "hopper": measure_hopper}
    return measured[table]() if table in measured else measure_tiles(table, ends)


@torch.inference_mode()
def main() -> None:
    known = (*gemms.TABLES, "block_fp8", "hopper")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", default=",".join(("block_fp8", "hopper", *gemms.TABLES)))
    parser.add_argument("--seconds", type=float, default=300, help="tables that are not begun by then stay")
    parser.add_argument("--write", action="store_true", help=f"rewrite {FILE.name}")
    given = parser.parse_args()
    tables, ends = given.tables.split(","), time.monotonic() + given.seconds
    if unknown := [table for table in tables if table not in known]:
        parser.error(f"unknown tables {', '.join(unknown)}: use some of {', '.join(known)}")
    jobs = [
        (table, gemms.format_of(table, present), tile)
        for table in tables
        if table in gemms.TABLES
        for _, present, tiles in candidates(table)
        for tile in tiles
    ]
    if jobs:
        with multiprocessing.get_context("spawn").Pool(12) as pool:
            pool.map(compile_one, jobs, chunksize=4)
        print(f"{len(jobs)} candidates, {ends - time.monotonic():.0f} s left", flush=True)
    text = FILE.read_text("utf-8")
    for table in tables:
        if time.monotonic() > ends:
            print(f"{table}: no time left, stays")
            continue
        tiles, numbers = measure(table, ends)
        gemms.weights.cache_clear()
        gemms.reference.cache_clear()
        torch.cuda.empty_cache()
        for what in (*map(entry, tiles.values()), *(f"{name} = {value}" for name, value in numbers.items())):
            print(f"[{table}] {what}", flush=True)
        if tiles or numbers:
            text = rewritten(text, table, tiles, numbers, machine())
            if given.write:
                FILE.write_text(text, "utf-8")  # at once: what follows may take long


if __name__ == "__main__":
    main()
