"""Time every candidate tile of the experts' kernels on this GPU, for ``specgen/ops/measured_choices.toml``.

    python scripts/bench/tune_experts.py [--shapes gpt-oss-20b] [--rows 1,5]
    python scripts/bench/tune_experts.py --shapes qwen3-30b-a3b-fp8,qwen3-30b-a3b-fp8-dynamic

Prints for each shape and number of rows the fastest tiles of both GEMMs, as (block_out, block_in, stages, warps),
for each number of rows of a block, and what the pass takes with the best of them.
"""

import argparse
import multiprocessing
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bound import copy_bandwidth
from experts import SHAPES, ExpertShape, Routes, expert_bytes, touched
from layer_timing import num_layers, time_layers

from specgen.ops.expert_kernels import LoadedExperts, down, find_blocks, gate_up
from specgen.ops.measured_choices import ExpertTile, ExpertTiles

Sizes = tuple[int | str, ...]  # block_out, block_in, stages, warps, and "rounds" of a tile that does
CUDA, DTYPE = torch.device("cuda", 0), torch.bfloat16
Candidates = dict[int, tuple[tuple[Sizes, ...], ...]]  # by rows of a block: for gate and up, and for down
_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def _candidates(name: str) -> Candidates:
    return {
        int(rows): tuple(tuple(map(tuple, each[gemm])) for gemm in ("gate_up", "down"))
        for rows, each in _TABLE[name].items()
    }


PLAIN, MXFP4, FP8 = (_candidates(name) for name in ("plain", "mxfp4", "fp8"))


def tile(sizes: Sizes) -> ExpertTile:
    block_out, block_in, stages, warps = map(int, sizes[:4])
    return ExpertTile(
        block_out=block_out, block_in=block_in, stages=stages, warps=warps, rounds="rounds" in sizes
    )


def candidates(shape: ExpertShape, rows: int) -> Iterator[tuple[int, tuple[Sizes, ...], tuple[Sizes, ...]]]:
    """Blocks neither far smaller than the mean number of an expert's rows nor far larger."""
    mean = rows * shape.k / shape.num_experts
    for block_rows, (gates, downs) in (MXFP4 if shape.mxfp4 else FP8 if shape.fp8 else PLAIN).items():
        if (mean <= 1.5 * block_rows or block_rows == 256) and block_rows <= max(16, 4 * mean):
            if shape.fp8 == "group":
                gates, downs = (each + tuple((*one, "rounds") for one in each) for each in (gates, downs))
            yield block_rows, gates, downs


def compile_one(job: tuple[str, int, int, Sizes, bool]) -> str:
    """Compile one candidate in this process, on tensors as small as may be; what it failed with."""
    name, rows, block_rows, sizes, is_gate = job
    shape = SHAPES[name]
    small = ExpertShape(
        num_experts=shape.num_experts, hidden=128, inner=128, k=shape.k, gating=shape.gating,
        biases=shape.biases, mxfp4=shape.mxfp4, fp8=shape.fp8,
    )  # fmt: skip
    try:
        loaded = LoadedExperts.of(small.layer(0, DTYPE, CUDA))
        ids, weights = small.routes(rows, 0, DTYPE, CUDA)
        blocks = find_blocks(ids, small.num_experts, block_rows)
        if is_gate:
            x = torch.zeros(rows, 128, dtype=DTYPE, device=CUDA)
            gate_up(x, loaded.gate_up, loaded.gating, blocks, block_rows, tile(sizes))
        else:
            gated = torch.zeros(rows * small.k, 128, dtype=DTYPE, device=CUDA)
            down(gated, loaded.down, weights, blocks, block_rows, tile(sizes))
        torch.cuda.synchronize()
    except Exception as error:  # a candidate that needs more than the GPU has
        return f"{job}: {str(error).splitlines()[0]}"
    return ""


def precompile(names: list[str], all_rows: list[int]) -> None:
    """Fill Triton's cache from many processes; name the candidates that failed."""
    jobs = {}
    for name in names:
        shape = SHAPES[name]
        for rows in all_rows:
            direct = 0 if rows > 16 else 1 if rows * shape.k <= shape.num_experts else 2
            for block_rows, gates, downs in candidates(shape, rows):
                for is_gate, each in ((True, gates), (False, downs)):
                    for sizes in each:
                        jobs.setdefault((name, block_rows, sizes, is_gate, direct), rows)
    listed = [(name, rows, block, sizes, gate) for (name, block, sizes, gate, _), rows in jobs.items()]
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        failed = [message for message in pool.map(compile_one, listed, chunksize=4) if message]
    for message in failed:
        print("cannot run", message)
    print(len(listed), "candidates", flush=True)


def tune(name: str, all_rows: list[int], bandwidth: float) -> None:
    shape = SHAPES[name]
    first = shape.layer(0, DTYPE, CUDA)
    size = expert_bytes(first)
    count = min(6, num_layers(min(all_rows) * shape.k * size, CUDA))
    layers = [LoadedExperts.of(first if i == 0 else shape.layer(i, DTYPE, CUDA)) for i in range(count)]
    del first
    for rows in all_rows:
        calls = num_layers(min(rows * shape.k, shape.num_experts) * size, CUDA)
        routes = [shape.routes(rows, i, DTYPE, CUDA) for i in range(calls)]
        bound = sum(len(touched(ids)) for ids, _ in routes) / calls * size / bandwidth
        print(f"{name} {rows} rows, bound {1e6 * bound:.1f} us", flush=True)
        for block_rows, gates, downs in candidates(shape, rows):
            tune_blocks(layers, routes, block_rows, gates, downs, bound)


def tune_blocks(
    layers: list[LoadedExperts],
    routes: list[Routes],
    block_rows: int,
    gates: tuple[Sizes, ...],
    downs: tuple[Sizes, ...],
    bound: float,
) -> None:
    """Print the fastest of ``gates`` and ``downs``, and the time of both with the routing."""
    first, (rows, k) = layers[0], routes[0][0].shape
    x = torch.randn(rows, first.gate_up.width, device=CUDA).to(DTYPE)
    gated = torch.randn(rows * k, first.down.width, device=CUDA).to(DTYPE)
    blocks = [find_blocks(ids, first.num_experts, block_rows) for ids, _ in routes]

    def run_gate(i: int, sizes: Sizes) -> torch.Tensor:
        layer = layers[i % len(layers)]
        return gate_up(x, layer.gate_up, layer.gating, blocks[i], block_rows, tile(sizes))

    def run_down(i: int, sizes: Sizes) -> torch.Tensor:
        layer, weights = layers[i % len(layers)], routes[i][1]
        return down(gated, layer.down, weights, blocks[i], block_rows, tile(sizes))

    best = [ranked(run, each, len(routes)) for run, each in ((run_gate, gates), (run_down, downs))]
    if not all(best):
        return
    tiles = ExpertTiles(most=0, rows=block_rows, gate_up=tile(best[0][0][1]), down=tile(best[1][0][1]))
    whole = time_layers(lambda i: layers[i % len(layers)](x, *routes[i], tiles), len(routes), 5, CUDA).mean
    print(f"  R={block_rows:3d} whole {1e6 * whole:6.1f} = {whole / bound:.2f}x", end="")
    for what, each in zip(("gate+up", "down"), best, strict=True):
        print(f" | {what}", *(f"{1e6 * t:.1f} {sizes}" for t, sizes in each[:3]), end="")
    print(flush=True)


def ranked(run, each: tuple[Sizes, ...], calls: int) -> list[tuple[float, Sizes]]:
    """Seconds of each candidate that runs, fastest first."""
    found = []
    for sizes in each:
        try:
            found.append((time_layers(lambda i, s=sizes: run(i, s), calls, 5, CUDA).mean, sizes))
        except Exception as error:
            if "out of resource" not in str(error):
                raise
    return sorted(found)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="qwen3-30b-a3b,gpt-oss-20b-bf16,gpt-oss-20b")
    parser.add_argument("--rows", default="1,5,8,32,40,64,128,160,320,640")
    given = parser.parse_args()
    names, all_rows = given.shapes.split(","), [int(rows) for rows in given.rows.split(",")]
    precompile(names, all_rows)
    bandwidth = copy_bandwidth(str(CUDA))
    print(f"copy {bandwidth / 1e12:.3f} TB/s")
    for name in names:
        tune(name, all_rows, bandwidth)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
