"""The start of a run on an NVIDIA GPU: weights arrive, and nothing is compiled but what was known to be needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specgen.checkpoints.tensor_reader import Upload, uploading
from tests.marks import on_gpu

pytestmark = on_gpu()


@pytest.mark.parametrize("stream", ["default", "own"])
def test_every_byte_arrives_while_the_gpu_is_at_work(stream: str) -> None:
    device = torch.device("cuda", 0)
    used = torch.cuda.default_stream(device) if stream == "default" else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    busy = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    with uploading(device) as upload, torch.cuda.stream(used):
        assert isinstance(upload, Upload)
        for size in (1, 1 << 20, (1 << 20) + 1, (16 << 20) + 3, 400_000_001):
            source = torch.randint(0, 256, (size,), dtype=torch.uint8)
            for _ in range(20):
                busy @ busy  # the copies wait behind it, while the host goes on
            target = torch.empty_like(source, device=device)
            upload.into(target, source, used)
            assert torch.equal(target.cpu(), source)


KNOWN = """
import sys
from specgen.config.bundled import data_directory
from specgen.config import DraftLength, EngineConfig, SamplingParams
from specgen.engine.choices import resolve
from specgen.engine.engine import Engine
from specgen.engine.loading import open_checkpoints
from specgen.engine.choices import needed_modules
pair = [str(data_directory() / "demo" / name) for name in ("target", "drafter")]
length = DraftLength(most=2, kind="auto")
asked = EngineConfig(model=pair[0], drafter=pair[1], num_spec_tokens=length, max_batch_size=64)
checkpoints = open_checkpoints(asked)
config = resolve(asked, checkpoints)
sampling = SamplingParams(max_tokens=20, temperature=0.7, top_p=0.9, ignore_eos=True)
known = {module.spec().name for module in needed_modules(config, checkpoints, sampling)}
engine = Engine(asked, expected=sampling)
assert len(list(engine.generate(["Tom has 3 apples."] * 70, sampling))) == 70
from flashinfer.jit.core import jit_spec_registry
print(config.attention, *sorted(set(jit_spec_registry.get_all_specs()) - known))
"""


def test_all_modules_that_a_run_used_were_known_before() -> None:
    done = subprocess.run([sys.executable, "-c", KNOWN], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["hopper"], "and modules that nobody knew of"


def test_the_second_start_measures_no_steps(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "specgen", "prepare", "--num-spec-tokens", "auto", "--max-batch-size", "8")
    ]

    def seconds() -> dict[str, float]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        done = subprocess.run([*command, "--quiet"], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return {line[:14].strip(): float(line[14:].split()[0]) for line in done.stdout.splitlines()}

    first, second = seconds(), seconds()
    assert second["step costs"] < min(1.5, first["step costs"])
    assert len(list((tmp_path / "specgen" / "step-costs").iterdir())) == 1
