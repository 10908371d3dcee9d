"""On an NVIDIA GPU: output layers in FP8 of many tokens, and drafts by them, as on a CPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specgen.ops import bind_ops
from specgen.ops.fp8 import dequantised, in_fp8, rounded
from specgen.ops.weight import Weight
from tests.engines import load_pair
from tests.marks import on_gpu
from tests.test_gpu import EXACT, MODES
from tests.test_gpu_heads import GREEDY, PAGED, run
from tests.tiny_checkpoints import write_dflash_head, write_head, write_target

pytestmark = on_gpu()


@torch.inference_mode()
@pytest.mark.parametrize("num_out", [128_256, 262_144])
def test_logits_of_many_tokens(num_out: int) -> None:
    """By the kernels of a few rows and of many; the copy is the one that a CPU makes.

    But for the last bit of a scale: by a number, torch multiplies with its reciprocal on a GPU.
    """
    matrix = torch.randn(num_out, 1024, dtype=torch.bfloat16) / 32
    here, copy = in_fp8(Weight(data=matrix)), in_fp8(Weight(data=matrix.cuda()))
    assert here.scale is not None
    assert copy.scale is not None
    torch.testing.assert_close(copy.scale.cpu(), here.scale, rtol=1e-6, atol=0)
    assert (here.data.view(torch.uint8) != copy.data.view(torch.uint8).cpu()).float().mean() < 1e-4
    linear, exact = bind_ops(torch.device("cuda"), torch.bfloat16).linear(copy), dequantised(copy).T
    for rows in (1, 5, 40, 100, 200):
        x = torch.randn(rows, 1024, dtype=torch.bfloat16, device="cuda")
        wanted = rounded(x, copy) @ exact
        assert (linear(x).float() - wanted).norm() < 6e-3 * wanted.norm(), rows


@pytest.mark.parametrize("write", [lambda *to: write_head(*to, draft_vocab_size=None), write_dflash_head])
def test_drafts_are_the_cpus_and_graph_modes_agree(tmp_path: Path, write: Callable[..., None]) -> None:
    """An output layer of the head, and the target's. Rounding may take a number to another one of e4m3."""
    write(tmp_path / "drafter", write_target(tmp_path / "target", hidden_size=256, head_dim=64))
    here = run(load_pair(tmp_path, fp8_output=True), GREEDY, "padded")
    there = load_pair(tmp_path, torch.float32, "cuda", fp8_output=True)
    for mode in MODES:
        found = run(there, GREEDY, "padded", cuda_graphs=mode, **EXACT)
        assert found.texts == here.texts, mode
        steps = [(mine[0][0], found.verified[name][0][0]) for name, mine in here.verified.items() if mine]
        assert len(steps) > 5
        assert sum(mine == theirs for mine, theirs in steps) > 0.8 * len(steps), mode
    pair = load_pair(tmp_path, torch.bfloat16, "cuda", fp8_output=True)
    assert sum(map(len, run(pair, GREEDY, "padded", **PAGED).verified.values())) > 50
