"""On two NVIDIA GPUs of one host: sums over ranks in one kernel, and runs whose model is shared by both."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import step
from torch import multiprocessing

from specgen.device import Ranks
from specgen.engine.rank_group import Place, join
from specgen.engine.worker_group import TIMEOUT
from specgen.ops import bind_ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
SIZE = 4096


def each_rank(rank: int, port: int, failed: "multiprocessing.Queue[str]") -> None:
    """Raises nothing: the other rank would wait."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, 2, is_master=rank == 0) if rank == 0 else None
    place = Place(rank=rank, size=2, device=f"cuda:{rank}", port=port, timeout=TIMEOUT, num_threads=1)
    ranks = join(place, lambda: None, store)
    for check in (sums, as_alone, replays, other_rows):
        try:
            check(ranks)
        except Exception as error:
            failed.put(f"rank {rank}: {check.__name__}: {type(error).__name__}: {error}")
    torch.cuda.synchronize()


def inputs(ranks: Ranks, rows: int, num_parts: int, seed: int, size: int = SIZE) -> tuple[torch.Tensor, ...]:
    """The same stream on each rank, and every rank's parts [ranks, n, rows, N]."""
    torch.manual_seed(seed)
    stream = torch.randn(rows, size, device="cuda").bfloat16()
    dtype = torch.bfloat16 if num_parts == 1 else torch.float32
    return stream, torch.randn(ranks.size, num_parts, rows, size, device="cuda").to(dtype)


def expected(
    stream: torch.Tensor, parts: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = stream.double() + parts.double().sum((0, 1))
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    return total, normed


def require_near(ranks: Ranks, got: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> None:
    for mine, exact in zip(got, right, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=0.02, atol=0.06)
        every = ranks.gather(mine.view(torch.uint8))
        assert torch.equal(every[0], every[1]), "ranks have other bits"


def norm_of(ranks: Ranks) -> tuple[Any, torch.Tensor]:
    from specgen.ops.fused_sum import FusedNorm

    torch.manual_seed(0)
    weight = (torch.rand(SIZE, device="cuda") + 0.5).bfloat16()
    norm = bind_ops(torch.device("cuda", ranks.rank), torch.bfloat16, ranks).rms_norm(weight, 1e-5)
    assert isinstance(norm, FusedNorm)
    return norm, weight


def sums(ranks: Ranks) -> None:
    norm, weight = norm_of(ranks)
    for seed, rows in enumerate((0, 1, 2, 3, 5, 32, 40, 160, 640, norm.boxes.most_rows, 2000)):
        for num_parts in (1, 2):
            stream, parts = inputs(ranks, rows, num_parts, seed)
            found = norm.add(stream, parts[ranks.rank])
            require_near(ranks, found, expected(stream, parts, weight))


def as_alone(ranks: Ranks) -> None:
    """To the bit what the norm alone makes of every rank's rows, also where it rounds to FP8 or weighs in float32."""
    device, scale = torch.device("cuda", ranks.rank), torch.tensor([0.02], device="cuda")
    forms = (
        (4096, torch.bfloat16, False, scale),
        (2880, torch.float32, True, None),
        (5120, torch.float32, False, scale),
    )
    for size, dtype, casts_last, out_scale in forms:
        torch.manual_seed(0)
        weight = (torch.rand(size, device="cuda") + 0.5).to(dtype)
        norm: Any = bind_ops(device, torch.bfloat16, ranks).rms_norm(weight, 1e-5, casts_last, out_scale)
        for seed, rows in enumerate((1, 5, 160, 700)):
            stream, parts = inputs(ranks, rows, 2, seed, size)
            found = norm.add(stream, parts[ranks.rank])
            right = norm.norm.add(stream, parts.sum(1).bfloat16())
            for mine, exact in zip(found, right, strict=True):
                assert torch.equal(mine.view(torch.uint8), exact.view(torch.uint8)), (size, dtype, rows)


def replays(ranks: Ranks) -> None:
    """Many sums in one graph, replayed with other inputs, between sums outside of it."""
    norm, weight = norm_of(ranks)
    stream, parts = inputs(ranks, 5, 1, 1)
    mine = parts[ranks.rank].clone()
    norm.add(stream, mine)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [norm.add(stream, mine) for _ in range(7)]
    for seed in range(20):
        given, every = inputs(ranks, 5, 1, seed)
        stream.copy_(given)
        mine.copy_(every[ranks.rank])
        graph.replay()
        for each in found:
            require_near(ranks, each, expected(given, every, weight))
        if seed % 3 == 0:
            require_near(ranks, norm.add(given, every[ranks.rank]), expected(given, every, weight))


def other_rows(ranks: Ranks) -> None:
    """Sums of few and of many rows by turns: each clears what another left."""
    norm, weight = norm_of(ranks)
    for seed in range(40):
        rows = (1, 900, 3, 160, 2, 1024)[seed % 6]
        stream, parts = inputs(ranks, rows, 1, seed)
        require_near(ranks, norm.add(stream, parts[ranks.rank]), expected(stream, parts, weight))


def test_sums_in_one_kernel() -> None:
    context = multiprocessing.get_context("spawn")
    failed = context.Queue()
    processes = [context.Process(target=each_rank, args=(rank, 29_517, failed)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(400)
        assert not process.is_alive(), "a rank waits for the other"
    assert failed.empty(), failed.get()
    assert [process.exitcode for process in processes] == [0, 0]


def generated(output: Path, *options: str) -> list[dict[str, object]]:
    code = "from specgen.cli.main import main; main()"
    command = ["generate", "--num-prompts", "24", "--max-batch-size", "8", "--output", str(output), *options]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ("2 x cuda" in done.stdout) == ("--tensor-parallel" in options)
    rows = [json.loads(row) for row in (output / "completions.jsonl").open()]
    return [{name: row[name] for name in ("id", "token_ids", "metrics")} for row in rows]


@pytest.mark.parametrize("decoding", ["padded", "non-padded"])
def test_texts_in_float32_are_those_of_one_gpu(tmp_path: Path, decoding: str) -> None:
    exact = ("--dtype", "float32", "--attention", "sdpa-static", "--drafter-batch", decoding)
    two = generated(tmp_path / "two", "--tensor-parallel", "2", *exact)
    assert two == generated(tmp_path / "one", *exact)


@pytest.mark.parametrize("graphs", ["step", "pass", "off"])
def test_texts_in_bfloat16_are_mostly_those_of_one_gpu(tmp_path: Path, graphs: str) -> None:
    two = generated(tmp_path / "two", "--tensor-parallel", "2", "--cuda-graphs", graphs)
    one = generated(tmp_path / "one", "--cuda-graphs", graphs)
    same = sum(mine["token_ids"] == other["token_ids"] for mine, other in zip(two, one, strict=True))
    assert same >= len(one) * 0.7, f"{same} of {len(one)}"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_run_goes_on_after_a_rank_has_died_or_hangs(tmp_path: Path, name: str) -> None:
    """Rank 0 then waits for it in a kernel, or polls; it goes on by itself, or ends and the same command goes on."""
    exact = ("--dtype", "float32", "--attention", "sdpa-static")
    code = "from specgen.cli.main import main; from specgen.engine import worker_group; "
    code += "worker_group.TIMEOUT, worker_group.GRACE = 25.0, 5.0; main()"
    output = tmp_path / "two"
    command = ["generate", "--num-prompts", "24", "--max-batch-size", "2", "--output", str(output), *exact]
    command = [sys.executable, "-c", code, *command, "--tensor-parallel", "2"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    rows = output / "completions.jsonl"
    while not (rows.exists() and rows.stat().st_size):
        assert running.poll() is None
        time.sleep(0.02)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    (worker,) = (int(each) for each in children if "worker" in Path(f"/proc/{each}/cmdline").read_text())
    os.kill(worker, signal.Signals[name])
    _, said = running.communicate(timeout=200)
    assert "rank 1 of 2 on cuda:1" in said
    if running.returncode:
        assert (running.returncode, said.count("run the command again to continue")) == (1, 1)
        subprocess.run(command, check=True, timeout=200)
    assert not Path(f"/proc/{worker}").exists()
    again = {row["id"]: row["token_ids"] for row in map(json.loads, rows.open())}
    alone = generated(tmp_path / "one", "--max-batch-size", "2", *exact)
    assert again == {row["id"]: row["token_ids"] for row in alone}


def test_a_step_of_two_gpus_is_explained() -> None:
    """Its marks are on one rank alone, and must not change what that rank runs: the other would wait without end."""
    command = [sys.executable, step.__file__, "--tensor-parallel=2", "--batch-sizes=1,4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    rows = json.loads(done.stdout)["rows"]
    assert {row["batch"] for row in rows if row["part"] == "step"} == {1, 4}
    assert all(row["time"] > 0 for row in rows if row["part"] in ("verify", "step"))
