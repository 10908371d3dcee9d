"""Mixtures of experts against ``transformers``: logits, routers, MXFP4, greedy texts with every kind of drafter."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.checkpoints.inspect_checkpoint import describe
from specgen.config import SamplingParams
from specgen.core.sequence import Request
from specgen.engine.page_budget import PageBudget
from specgen.models.model_config import TargetConfig
from specgen.models.rotary import RopeConfig, inverse_frequencies
from specgen.ops import experts as experts_ops
from specgen.ops.experts import Experts, Gating, Routing, from_mxfp4, grouped_experts
from specgen.ops.reference import torch_ops
from specgen.ops.weight import Weight
from tests.dense import DenseAttend
from tests.engines import Pair, generate, load_pair, page_bytes, random_requests
from tests.families import ids_of, loaded, right_logits
from tests.marks import mostly_slow
from tests.reference_heads import DenseTarget, reference_head
from tests.test_families import MIXTURES, mxfp4
from tests.test_heads import wrong_drafts
from tests.tiny_checkpoints import write_eagle1_head, write_head
from tests.tiny_mixtures import WINDOW, YARN, write_gpt_oss, write_qwen3_moe

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


VOCAB = 8  # so small that random heads are often right
GREEDY = SamplingParams(max_tokens=2 * WINDOW, ignore_eos=True)
eagle3 = partial(write_head, draft_vocab_size=None)

PAIRS: dict[str, tuple[Callable[..., TargetConfig], Callable[[Path, TargetConfig], None]]] = {
    "gpt-oss-eagle3": (
        write_gpt_oss,
        partial(write_head, dialect="speculators", norm_before_residual=True, draft_vocab_size=6, seed=3),
    ),
    "gpt-oss-boundary": (
        write_gpt_oss,
        partial(eagle3, aux_layer_ids=[2, 5, 6], aux_at="eagle_config", norm_before_fc=True, seed=2),
    ),
    "mxfp4-nested": (mxfp4, partial(eagle3, aux_layer_ids=[1, 2, 4], aux_at="eagle_config", seed=2)),
    "gpt-oss-eagle-1": (write_gpt_oss, partial(write_eagle1_head, seed=1)),
    "mxfp4-last-state": (mxfp4, partial(eagle3, reads_output=True, seed=1)),
    "gpt-oss-windows": (write_gpt_oss, partial(eagle3, num_layers=2, windows=[5, None], seed=1)),
    "qwen3-moe-eagle3": (write_qwen3_moe, partial(eagle3, qk_norm=True, seed=4)),
    "qwen3-moe-eagle-1": (write_qwen3_moe, partial(write_eagle1_head, seed=1)),
}


def requests() -> list[Request]:
    """Prompts shorter and longer than the window; the last three share their first pages."""
    alone = random_requests(6, VOCAB, GREEDY, lengths=(2, 3 * WINDOW))
    prefix = tuple(7 - i % 5 for i in range(13))
    ends = [(3,), (4, 4, 7), (7, 6, 5, 4, 3)]
    shared = [Request(id=f"s{i}", prompt_token_ids=prefix + e, sampling=GREEDY) for i, e in enumerate(ends)]
    return alone + shared


PARAMS = [
    pytest.param(
        name, marks=[pytest.mark.xdist_group(name), *([] if name == "mxfp4-nested" else [pytest.mark.slow])]
    )
    for name in PAIRS
]

with_some_pairs = pytest.mark.parametrize(
    "pair",
    [
        pytest.param(name, marks=pytest.mark.xdist_group(name))
        for name in ("gpt-oss-eagle3", "gpt-oss-windows", "mxfp4-nested", "qwen3-moe-eagle3")
    ],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module", params=PARAMS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp(request.param)
    target, head = PAIRS[request.param]
    head(path / "drafter", target(path / "target", vocab_size=VOCAB, eos_token_id=0))
    return load_pair(path)


@pytest.fixture(scope="module")
def reference(pair: Pair) -> DenseTarget:
    return DenseTarget(pair.path / "target")


@pytest.fixture(scope="module")
def texts(reference: DenseTarget) -> dict[str, tuple[int, ...]]:
    return {r.id: reference.greedy(r.prompt_token_ids, r.sampling.max_tokens) for r in requests()}


def test_target_and_head_fit(pair: Pair) -> None:
    description = describe(str(pair.path / "target"), str(pair.path / "drafter"))
    assert description.misfits == ()
    assert "Target and head fit" in description.to_text()


@pytest.mark.parametrize("drafter", ["head", "ngram"])
def test_greedy_text_equals_transformers(pair: Pair, texts: dict[str, tuple[int, ...]], drafter: str) -> None:
    changes: dict[str, Any] = {} if drafter == "head" else {"drafter": "ngram"}
    accepted = set[int]()
    for k, batch in ((1, "non-padded"), (3, "padded"), (4, "non-padded")):
        outputs = generate(pair, requests(), num_spec_tokens=k, drafter_batch=batch, **changes)
        assert outputs.texts == texts, (k, batch)
        accepted |= set(outputs.accepted)
    assert accepted >= {0, 1, 2}, "drafts must be right and wrong"


@pytest.mark.slow
@with_some_pairs
def test_no_setting_changes_a_text(pair: Pair, texts: dict[str, tuple[int, ...]]) -> None:
    plain = generate(pair, requests(), num_spec_tokens=0)
    assert plain.texts == texts
    some = requests()[5:]
    expected = {r.id: texts[r.id] for r in some}
    for changes in (
        {"max_batch_size": 1},
        {"max_batch_size": 1, "num_spec_tokens": 0},
        {"max_prefill_tokens": 3, "prefix_cache": False, "drafter_batch": "non-padded"},
        {"attention": "sdpa-static", "max_prefill_tokens": 5, "page_size": 16},
    ):
        outputs = generate(pair, some, **changes)
        assert outputs.texts == expected, changes
        cached = outputs.any_cached
        assert cached == ("prefix_cache" not in changes and "page_size" not in changes), changes


@pytest.mark.slow
@with_some_pairs
def test_preemption_changes_no_text(
    pair: Pair,
    texts: dict[str, tuple[int, ...]],
    device_like: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = 24 * page_bytes(pair)
    monkeypatch.setattr(PageBudget, "windowed", lambda self, pages: pages)  # those of other layers run short
    device_like()
    for batch in ("padded", "non-padded"):
        tight = generate(pair, requests(), num_spec_tokens=4, drafter_batch=batch, kv_memory=memory)
        assert tight.num_preempted > 0
        assert tight.texts == texts


def test_every_draft_equals_the_reference(pair: Pair, reference: DenseTarget) -> None:
    """So the features that a head reads are those of the right layers."""
    outputs = generate(pair, requests(), num_spec_tokens=4)
    dense = reference_head(pair.path / "drafter", reference)
    assert list(wrong_drafts(outputs, dense)) == []
