"""Latent attention and its mixtures against ``transformers``, with planted errors; the commands on such a target."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specgen.attention import expansion
from specgen.attention.hopper import HopperBackend
from specgen.attention.sdpa import SdpaBackend
from specgen.checkpoints.checkpoint import load_target, open_checkpoint
from specgen.checkpoints.inspect_checkpoint import describe
from specgen.config import EngineConfig, UserError
from specgen.engine.choices import choose_attention, resolve
from specgen.engine.loading import open_checkpoints
from specgen.engine.memory_plan import memory_plans
from specgen.kv.layout import HostLens, Layout
from specgen.models import layers, mlp
from specgen.models.families import family_of
from specgen.models.model_config import LatentConfig, SigmoidWeights
from specgen.ops.experts import SigmoidRouting
from specgen.ops.fp8 import block_scales
from specgen.ops.reference import torch_ops
from specgen.ops.weight import Weight
from tests import fake_flashinfer
from tests.commands import printed, rows, write_rows
from tests.families import ids_of, loaded, paged_logits
from tests.test_families import RAGGED, deepseek
from tests.tiny_checkpoints import change_tensors
from tests.tiny_fp8 import matrix, quantize
from tests.tiny_latents import write_latent
from tests.tiny_mixtures import change, read
from tests.tiny_tokenizers import write_byte_level


@torch.inference_mode()
def test_both_forms_agree_on_every_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of(write_latent(tmp_path))
    model = loaded(tmp_path)
    found = dict[bool, Tensor]()
    for expand in (True, False):

        def of(layout: Layout, expand: bool = expand) -> tuple[Tensor, HostLens] | None:
            known = Layout.ragged(
                layout.block_tables, layout.starts.tolist(), layout.query_lens.tolist(), layout.page_size
            )
            return expansion(replace(known, num_rows=10_000)) if expand else None

        monkeypatch.setattr("specgen.attention.expansion", of)
        found[expand] = paged_logits(model, ids, SdpaBackend, RAGGED)
    torch.testing.assert_close(found[True], found[False], atol=1e-4, rtol=0)


def test_the_kernels_of_gpus_give_the_logits_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model as wide as they are built for, through what stands for FlashInfer on a CPU."""
    widths = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256}
    ids = ids_of(write_latent(tmp_path, hidden_size=32, num_hidden_layers=2, **widths))
    model, pieces = loaded(tmp_path), [70, 5, 5, len(ids) - 88, 8]
    right = paged_logits(model, ids, SdpaBackend, pieces)
    fake_flashinfer.install(monkeypatch, major=9, num_sms=6)
    torch.testing.assert_close(paged_logits(model, ids, HopperBackend, pieces), right, atol=1e-4, rtol=0)


def test_a_prefill_is_expanded_unless_most_of_its_positions_were_computed_before() -> None:
    tables = torch.arange(12, dtype=torch.int32).view(2, 6).flip(0)
    prefill = expansion(Layout.ragged(tables, [0, 5], [7, 1], 4))
    assert prefill[0].tolist() == [24, 25, 26, 27, 28, 29, 30, 0, 1, 2, 3, 4, 5]
    assert expansion(Layout.ragged(tables, [8, 5], [7, 1], 4)) is None
    assert expansion(Layout.uniform(tables, torch.tensor([0, 0]), 3, 4)) is None


@torch.inference_mode()
@pytest.mark.parametrize(("groups", "best"), [(1, 1), (4, 2)])
def test_routers_equal_transformers(groups: int, best: int) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=64, n_routed_experts=32, num_experts_per_tok=5, n_group=groups, topk_group=best
    )
    reference: Any = DeepseekV3TopkRouter(config)
    reference.weight.normal_(0.0, 0.3)
    reference.e_score_correction_bias.normal_(0.0, 0.3)
    logits, weights, ids = reference(torch.randn(200, 64))
    routing = SigmoidRouting(
        num_chosen=5,
        bias=reference.e_score_correction_bias,
        num_groups=groups,
        num_chosen_groups=best,
        normalized=True,
        scale=config.routed_scaling_factor,
    )
    got_ids, got_weights = torch_ops().sigmoid_choice(routing)(logits[None])
    order, got_order = ids.argsort(-1), got_ids.argsort(-1)
    assert torch.equal(got_ids.gather(-1, got_order), ids.gather(-1, order))
    torch.testing.assert_close(
        got_weights.gather(-1, got_order), weights.gather(-1, order), atol=1e-6, rtol=0
    )


def test_routers_keep_their_precision_in_half_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded, a bias or logits would choose other experts."""
    routings, real = list[SigmoidRouting](), SigmoidRouting
    monkeypatch.setattr(mlp, "SigmoidRouting", lambda **given: routings.append(real(**given)) or routings[-1])
    write_latent(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    model = load_target(checkpoint, torch.bfloat16, torch.device("cpu"))
    stored = checkpoint.read("model.layers.1.mlp.gate.e_score_correction_bias")
    assert torch.equal(routings[0].bias, stored)
    mixture = next(block.mlp for block in model.blocks if isinstance(block.mlp, mlp.Mixture))
    assert mixture.router(torch.ones(1, 64, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_position_takes_its_latent_and_rotated_key(tmp_path: Path) -> None:
    config = write_latent(tmp_path)
    assert config.kv_spec.bytes_per_token(2) == 3 * (24 + 8) * 2


def test_architectures_that_are_not_built_say_what_is_missing() -> None:
    for name, missing in {"DeepseekV4ForCausalLM": "sparse attention"}.items():
        with pytest.raises(UserError, match=missing):
            family_of({"architectures": [name]})


def test_the_dense_layers_of_a_published_config(tmp_path: Path) -> None:
    """Which has first_k_dense_replace and not the names that ``transformers`` writes."""
    write_latent(tmp_path)
    change(tmp_path, {}, first_k_dense_replace=2, mlp_layer_types=None, norm_topk_prob=None)
    found = read(tmp_path).mixture
    assert found.layers == (False, False, True)
    assert found.weights == SigmoidWeights(num_groups=1, num_chosen_groups=1, normalized=True, scale=1.8)


@torch.inference_mode()
def test_block_fp8_weights_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a DeepSeek-V3: with unrounded inputs the logits are those of dequantised weights, in both forms."""
    deepseek(tmp_path / "fp8", hidden_size=160, moe_intermediate_size=136, num_mtp=1, std=0.06)
    quantize(tmp_path / "fp8", "block", spread=1.0)
    shutil.copytree(tmp_path / "fp8", tmp_path / "plain")
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    layers = {name.removesuffix(".weight_scale_inv") for name in stored if name.endswith("_scale_inv")}
    assert {name.rsplit(".", 1)[-1] for name in layers} >= {
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "q_b_proj",
        "eh_proj",
    }
    plain: dict[str, Tensor | None] = {f"{name}.weight_scale_inv": None for name in layers}
    plain |= {f"{name}.weight": matrix(stored, name) for name in layers}
    change(tmp_path / "plain", plain, quantization_config=None)
    ids = ids_of(read(tmp_path / "plain"))[:40]
    right = paged_logits(loaded(tmp_path / "plain"), ids, SdpaBackend, [30, 10])
    rounded = paged_logits(loaded(tmp_path / "fp8"), ids, SdpaBackend, [30, 10])
    monkeypatch.setattr("specgen.ops.fp8.through_e4m3", lambda x, scale: (x / scale).clamp(-448, 448) * scale)
    unrounded = paged_logits(loaded(tmp_path / "fp8"), ids, SdpaBackend, [30, 10])
    torch.testing.assert_close(unrounded, right, atol=1e-4, rtol=0)
    assert 1e-3 < (rounded - right).norm() / right.norm() < 0.3


@pytest.mark.parametrize(("nope", "heads"), [(128, 128), (192, 20)], ids=["deepseek-v3", "glm-4.7-flash"])
def test_at_published_widths_the_order_of_rotary_pairs_mixes_no_blocks(nope: int, heads: int) -> None:
    """Kernels for block FP8 keep a row of scales for each 128 outputs."""
    raw = {"kv_lora_rank": 512, "qk_nope_head_dim": nope, "qk_rope_head_dim": 64, "v_head_dim": 128}
    config = LatentConfig.from_hf(raw)
    queries = [*layers._of_queries(config, heads)]
    stored = layers._halves(config, config.rank)
    for order in (queries, [*range(768), *(768 + row for row in stored)]):
        assert sorted(order) == [*range(len(order))] != order
        scale = torch.arange(len(order)).div(128, rounding_mode="floor")[:, None].float()
        weight = Weight(data=torch.empty(len(order), 1), scale=scale).reordered(order)
        assert torch.equal(block_scales(weight.scale), scale[::128])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latents") / "target"
    write_latent(path, vocab_size=352, num_mtp=1, seed=3)
    write_byte_level(path)
    return path


def test_generate_drafts_with_the_target_s_own_layers_and_changes_no_text(
    target: Path, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    write_rows(data, ({"prompt": text} for text in ("Tom has", "Stop here", "5 bags of")))
    texts = {}
    for name, options in (
        ("mtp", ["--drafter", "mtp", "--num-spec-tokens", 3]),
        ("plain", ["--num-spec-tokens", 0]),
    ):
        out = tmp_path / name
        asked = ["--model", target, *options, "--dataset", data, "--max-new-tokens", 12, "--ignore-eos"]
        printed("generate", *asked, "--output", out)
        texts[name] = [row["token_ids"] for row in rows(out / "completions.jsonl")]
    assert texts["mtp"] == texts["plain"]
    assert json.loads((tmp_path / "mtp" / "report.json").read_text())["num_draft_tokens"] > 0


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_two_ranks_draft_and_generate_as_one(target: Path, tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2):
        asked = [
            *("--model", target, "--drafter", "mtp", "--num-prompts"),
            *(6, "--max-new-tokens", 12, "--ignore-eos"),
        ]
        out = tmp_path / str(ranks)
        printed("generate", *asked, "--device", "cpu", "--tensor-parallel", ranks, "--output", out)
        numbers = json.loads((out / "report.json").read_text())
        tokens = [row["token_ids"] for row in rows(out / "completions.jsonl")]
        found.append((tokens, numbers["num_draft_tokens"], numbers["num_accepted_tokens"]))
    assert found[0] == found[1]


@pytest.mark.slow
def test_verify_finds_no_difference(target: Path) -> None:
    printed("verify", "--model", target, "--drafter", "mtp", "--max-new-tokens", 8, "--num-prompts", 2)


def test_inspect_says_what_there_is(target: Path) -> None:
    alone = describe(str(target))
    assert alone.misfits == ()
    text = " ".join(alone.to_text().split())
    assert "MTP 1 layer, used by --drafter mtp" in text
    assert (
        "attention 4 heads, latent: 24 + 8 numbers a position for all heads, queries from 32; keys 12 + 8, values 20 "
        "wide" in text
    )
    assert "8 in 2 of 3 layers, 32 wide; beside one for all tokens, 32 wide" in text
    assert f"KV cache {3 * 32 * 4:,} bytes per token" in text
    pair = describe(str(target), "mtp")
    assert pair.misfits == ()
    assert [part["kind"] for part in pair.to_json()["checkpoints"]] == ["target", "head"]
    assert json.loads(json.dumps(pair.to_json()))["kv_bytes_per_token"] == 4 * 32 * 4
    text = " ".join(pair.to_text().split())
    assert "the target's MTP layer features" in text
    assert "fed back the hidden state behind shared_head.norm" in text


def test_inspect_refuses_mtp_without_a_target(target: Path) -> None:
    with pytest.raises(UserError, match="mtp is part of a target's checkpoint"):
        describe("mtp")


def test_a_missing_part_of_an_mtp_layer_is_named(target: Path, tmp_path: Path) -> None:
    shutil.copytree(target, tmp_path, dirs_exist_ok=True)
    change_tensors(tmp_path, {"model.layers.3.hnorm.weight": None})
    found = describe(str(tmp_path), "mtp")
    assert any("has no tensor 'model.layers.3.hnorm.weight'" in reason for reason in found.misfits)


def config(target: Path, **changes: object) -> EngineConfig:
    asked = EngineConfig(model=str(target), drafter="mtp", device="cpu")
    return replace(resolve(asked, open_checkpoints(asked)), **changes)  # type: ignore[arg-type]


def test_a_gpu_takes_other_widths_with_torch_alone(
    target: Path, monkeypatch: pytest.MonkeyPatch, flashinfer_installed: None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    asked = config(target, device="cuda", attention="auto", dtype="bfloat16")
    name, why = choose_attention(asked, open_checkpoints(asked))
    assert name == "sdpa"
    assert "hopper does not support latent attention with latents and rotated keys of 24 + 8" in why
    assert "trtllm does not support latent attention;" in why
    asked = config(target, device="cuda", attention="hopper", dtype="bfloat16")
    with pytest.raises(UserError, match=r"rotated keys of 24 \+ 8: use --attention sdpa$"):
        choose_attention(asked, open_checkpoints(asked))


def test_what_holds_no_latents_is_refused_on_a_cpu_too(target: Path) -> None:
    asked = config(target, kv_dtype="fp8")
    with pytest.raises(UserError, match="does not support latents in FP8: use --kv-dtype model"):
        choose_attention(asked, open_checkpoints(asked))


def test_the_plan_of_a_gpu_s_memory_has_a_latent_a_token(target: Path) -> None:
    plain, *_, most = memory_plans(str(target), "mtp", 4 << 30)
    layer = (24 + 8) * 2  # bytes: a latent and a rotated key
    assert (plain.kv_bytes_per_token, most.kv_bytes_per_token) == (3 * layer, 4 * layer)
    assert plain.weights + plain.workspace + plain.passes + plain.kv_cache == int(0.9 * (4 << 30))
    assert 0 < plain.passes < most.passes
