"""A run of many requests, watched by another process: constant memory, and a status at any time."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

NUM_REQUESTS = 2_000
OPTIONS = ["--device", "cpu", "--max-new-tokens", "4", "--ignore-eos", "--kv-memory", "8MiB"]
PAGE = os.sysconf("SC_PAGE_SIZE")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("long run"),  # one for all
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc"),
]


@dataclass(frozen=True, kw_only=True)
class Look:
    """The state of the run at one moment, seen from outside."""

    num_done: int
    eta_seconds: float | None
    num_rows: int  # of completions.jsonl, seen after the status
    num_pass_bytes: int
    memory: int  # resident bytes


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> list[Look]:
    """Samples of one run of the CLI, from its first finished request to its last."""
    path = tmp_path_factory.mktemp("long")
    with (path / "prompts.jsonl").open("w") as prompts:
        for n in range(NUM_REQUESTS):
            text = f"Tom has {n} apples and buys {n % 7 + 2} bags{' of apples' * (n % 5)}."
            prompts.write(json.dumps({"id": f"p{n}", "prompt": text}) + "\n")
    command = [sys.executable, "-c", "from specgen.cli.main import main; main()", "generate", *OPTIONS]
    given = ["--dataset", str(path / "prompts.jsonl"), "--output", str(path / "run")]
    with subprocess.Popen(
        [*command, *given], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        seen = list(watch(process, path / "run"))
    assert process.returncode == 0
    return seen


def watch(process: "subprocess.Popen[bytes]", output: Path) -> Iterator[Look]:
    """A sample every few hundredths of a second; a status that is not complete JSON is an error."""
    while process.poll() is None:
        time.sleep(0.03)
        status = json.loads((output / "status.json").read_text()) if (output / "status.json").exists() else {}
        if status.get("state") == "running" and status["done"] > 0:
            yield Look(
                num_done=status["done"],
                eta_seconds=status["eta_seconds"],
                num_rows=(output / "completions.jsonl").read_bytes().count(b"\n"),
                num_pass_bytes=(output / "passes.jsonl").stat().st_size,
                memory=int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * PAGE,
            )


def quarter(looks: list[Look], number: int) -> list[Look]:
    """The samples of quarter ``number`` (0 to 3) of the requests."""
    return [look for look in looks if 4 * look.num_done // NUM_REQUESTS == number]


def test_memory_does_not_grow(looks: list[Look]) -> None:
    """Measured growth is 0.1 to 0.9 %; 2 % is 8 kB for each of the thousand requests."""
    warm, late = (median(look.memory for look in quarter(looks, number)) for number in (1, 3))
    assert late < 1.02 * warm


def test_files_grow_during_the_run(looks: list[Look]) -> None:
    for number in range(3):
        before, after = quarter(looks, number)[0], quarter(looks, number + 1)[0]
        assert after.num_rows - before.num_rows > NUM_REQUESTS // 8
        assert after.num_pass_bytes - before.num_pass_bytes > 20 * NUM_REQUESTS // 8
    assert all(look.num_rows >= look.num_done for look in looks), "no request is counted before it is kept"


def test_the_status_estimates_the_remaining_time(looks: list[Look]) -> None:
    known = [look for look in looks if look.eta_seconds is not None]
    left = [quarter(known, number)[0].eta_seconds for number in range(4)]
    assert left[3] < min(left[1], left[2])  # what the first were slow for may be over, or begin later
    assert looks[-1].eta_seconds < left[1] / 3
