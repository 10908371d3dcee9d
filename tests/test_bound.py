"""The least that a step reads: experts that rows touch by chance."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bound import ExpertSize, KVBytes, Seen, StepBytes
from calibrated_cycle import Cycle
from calibrated_mixtures import MixtureLayers
from calibrated_shapes import MIXTURES
from calibrated_shapes import Mixture as MixtureShape
from calibrated_weights import Source, target_tensors

from tests.engines import config_of, load_pair, loaded
from tests.timed_engines import write_tiny

KV = KVBytes(layers=((3, Seen()),))
SIZE = ExpertSize(num_layers=2, num_experts=8, num_chosen=2, num_values=100, num_bytes=50)


def mixture_of(shape: MixtureShape, *, mxfp4: bool, biases: bool) -> Any:
    return SimpleNamespace(
        num_experts=shape.num_experts,
        num_chosen=shape.num_chosen,
        width=shape.expert_size,
        layers=(True,) * shape.num_layers,
        mxfp4=mxfp4,
        biases=biases,
    )


@pytest.mark.parametrize(
    ("name", "mxfp4", "biases"), [("gpt-oss-20b", True, True), ("qwen3-30b-a3b", False, False)]
)
def test_the_bytes_of_experts_are_those_of_their_tensors(name: str, mxfp4: bool, biases: bool) -> None:
    shape = MIXTURES[name]
    mixture: Any = mixture_of(shape, mxfp4=mxfp4, biases=biases)
    config: Any = SimpleNamespace(mixture=mixture, fp8=None, hidden_size=shape.hidden_size)
    layer, cycle = MixtureLayers(shape=shape, common=0.0), Cycle(tokens=(1, 2), unknown=(), accept=1.0)
    tensors = target_tensors(shape, torch.empty(0), cycle.succ, Source("cpu", 0), layer)
    experts = [each for each in tensors if ".mlp.experts." in each.name]
    total = sum(torch.Size(each.shape).numel() * each.dtype.itemsize for each in experts)
    size = ExpertSize.of(config, 2)
    assert size.total_bytes == total


def test_experts_are_no_part_of_what_every_pass_reads(tmp_path: Path, monkeypatch) -> None:
    models = loaded(config_of(load_pair(write_tiny(tmp_path, num_layers=7))))
    whole = StepBytes.of(models)
    monkeypatch.setattr(ExpertSize, "of", lambda config, width: SIZE)
    without = StepBytes.of(models)
    assert whole.target - without.target == 2 * 8 * 50
    assert (whole.experts, without.experts) == (None, SIZE)


def test_a_step_reads_the_experts_that_its_rows_touch() -> None:
    sizes = StepBytes(target=1000, target_kv=KV, logits=14, bytes_per_value=2, experts=SIZE)
    assert sizes.step(0, 1, 10) == pytest.approx(1000 + 30 + 2 * 2 * 50)
    by_chance = 8 * (1 - 0.75**6)
    assert sizes.step(2, 2, 10) == pytest.approx(1000 + 60 + 2 * by_chance * 50)
    verify = sizes.parts(2, 2, 10)["verify"]
    assert verify.flops == 6 * (2 * 1000 / 2 + 2 * 100 * 2 * 2)


def test_experts_are_touched_as_often_as_by_random_routing() -> None:
    size = ExpertSize(num_layers=1, num_experts=128, num_chosen=8, num_values=1, num_bytes=1)
    draws = torch.rand(2000, 5, 128, generator=torch.Generator().manual_seed(0)).topk(8).indices.flatten(1)
    drawn = torch.zeros(2000, 128).scatter_(1, draws, 1).sum(1).mean()
    assert size.touched(1) == pytest.approx(8)
    assert size.touched(5) == pytest.approx(drawn.item(), rel=0.01)
    assert size.touched(10_000) == pytest.approx(128)
