"""Mixtures of experts against ``transformers``: routers, norms, rotations, MXFP4, and where they round."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.models.model_config import TargetConfig
from specgen.models.rotary import RopeConfig, inverse_frequencies
from specgen.ops import experts as experts_ops
from specgen.ops.experts import Experts, Gating, Routing, from_mxfp4, grouped_experts
from specgen.ops.reference import torch_ops
from specgen.ops.weight import Weight
from tests.dense import DenseAttend
from tests.families import ids_of, loaded, right_logits
from tests.marks import mostly_slow
from tests.test_families import MIXTURES
from tests.tiny_mixtures import YARN

CPU = torch.device("cpu")


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["softmax", "normalized", "softmax of chosen"])
def test_routers_equal_transformers_bit_for_bit(dtype: torch.dtype, kind: Any) -> None:
    from transformers import GptOssConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "num_experts_per_tok": 4}
    reference: Any = GptOssTopKRouter(GptOssConfig(num_local_experts=32, **sizes))
    if kind != "softmax of chosen":
        normalized = kind == "normalized"
        reference = Qwen3MoeTopKRouter(Qwen3MoeConfig(num_experts=32, norm_topk_prob=normalized, **sizes))
    for parameter in reference.parameters():
        parameter.data.normal_(0.0, 0.3)
    reference, x = reference.to(dtype), torch.randn(200, 64).to(dtype)
    logits, weights, ids = reference(x)
    got_ids, got_weights = torch_ops().choice(Routing(num_experts=32, num_chosen=4, weighing=kind))(
        logits[None]
    )
    assert torch.equal(got_ids, ids)
    assert got_weights.dtype == dtype
    assert torch.equal(got_weights, weights)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_norm_that_rounds_last_equals_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm

    torch.manual_seed(0)
    x, weight = torch.randn(90, 64).to(dtype) * 3, torch.randn(64).to(dtype)
    reference = GptOssRMSNorm(64, eps=1e-5)
    reference.weight.data = weight.float()  # transformers keeps it so
    last, first = (torch_ops().rms_norm(weight, 1e-5, casts_last)(x) for casts_last in (True, False))
    assert torch.equal(last, reference(x))
    assert torch.equal(first, last) == (dtype == torch.float32)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"truncate": True},
        {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096},
        {"attention_factor": 1.25},
        {"mscale": 0.7, "mscale_all_dim": 1.1},
        {"mscale": 0.7},
        {"factor": 1.0},
        {"factor": 0.5},
        {"beta_slow": 1e-9},
        {"beta_fast": 1e4},
        {"truncate": True, "beta_slow": 11.76, "beta_fast": 20.0},  # both bounds are 0
        {"truncate": None, "beta_slow": None, "beta_fast": None},
        {"beta_slow": None, "beta_fast": None, "original_max_position_embeddings": 4096},
    ],
    ids=str,
)
def test_yarn_equals_transformers(changes: dict[str, Any]) -> None:
    from transformers import GptOssConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {name: value for name, value in (YARN | changes).items() if value is not None}
    config = GptOssConfig(head_dim=64, rope_parameters=parameters)
    expected, concentration = ROPE_INIT_FUNCTIONS["yarn"](config, CPU)
    rope = RopeConfig.from_hf({"rope_parameters": parameters})
    torch.testing.assert_close(inverse_frequencies(rope, 64, CPU), expected, rtol=1e-6, atol=0)
    assert rope.concentration == pytest.approx(concentration, rel=1e-9)
    old = {"rope_theta": YARN["rope_theta"], "rope_scaling": parameters}
    assert RopeConfig.from_hf(old) == rope


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mxfp4_equals_transformers_for_every_byte_and_scale(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    data = torch.arange(256, dtype=torch.uint8).repeat(2, 16).view(2, 16, 16, 16)
    for scales in (range(256 - 3), range(126, 131)):  # no larger ones: an infinity times 0
        some = torch.tensor(scales, dtype=torch.uint8).repeat(512)[: 2 * 16 * 16].view(2, 16, 16)
        weight = Weight(data=data.flatten(2), scale=some, format="mxfp4")
        expected = convert_moe_packed_tensors(data, some, dtype=dtype).mT
        got = from_mxfp4(weight, dtype)
        assert got.data.dtype == dtype
        assert torch.equal(got.data, expected)
    assert weight.num_bytes == 2 * 16 * 16 * (16 + 1)


@torch.inference_mode()
def test_grouped_experts_keep_no_packed_weights_on_a_cpu_and_no_plain_ones_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[torch.dtype] = []
    real = from_mxfp4
    monkeypatch.setattr(experts_ops, "from_mxfp4", lambda w, dtype: calls.append(dtype) or real(w, dtype))
    for device, before, after in (("cpu", 2, 2), ("meta", 0, 2)):

        def packed(out: int, num_in: int, device: str = device) -> Weight:
            return Weight(
                data=torch.zeros(4, out, num_in // 2, dtype=torch.uint8, device=device),
                scale=torch.zeros(4, out, num_in // 32, dtype=torch.uint8, device=device),
                bias=torch.zeros(4, out, dtype=torch.bfloat16, device=device),
                format="mxfp4",
            )

        calls.clear()
        forward = grouped_experts(
            Experts(gate_up=packed(64, 64), down=packed(64, 32), gating=Gating(limit=7.0))
        )
        assert calls == [torch.bfloat16] * before
        if device == "cpu":
            x, ids = torch.ones(3, 64, dtype=torch.bfloat16), torch.tensor([[0, 1], [3, 1], [2, 0]])
            for _ in range(2):
                forward(x, ids, torch.ones(3, 2, dtype=torch.bfloat16))
            assert len(calls) == after


def rounded_differently(path: Path, ids: Tensor) -> float:
    """The share of logits in bfloat16 that differ from those of ``transformers``."""
    model, expected = loaded(path, torch.bfloat16), right_logits(path, ids, torch.bfloat16).float()
    with torch.inference_mode():
        got = model.logits(model.forward(ids, DenseAttend(model))[0])
    return float(((got - expected).abs() > 1e-5).float().mean())


@pytest.mark.parametrize("name", mostly_slow(["qwen3-moe", "gpt-oss", "mxfp4"], "qwen3-moe", "mxfp4"))
def test_half_precision_rounds_where_transformers_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ids = ids_of(MIXTURES[name](tmp_path))[:60]
    assert rounded_differently(tmp_path, ids) < 0.01
    read = TargetConfig.from_hf

    def misread(*given: Any, **named: Any) -> TargetConfig:
        return replace(read(*given, **named), norm_casts_last=name == "qwen3-moe")

    monkeypatch.setattr(TargetConfig, "from_hf", misread)
    assert rounded_differently(tmp_path, ids) > 0.5, "it would not be seen"
