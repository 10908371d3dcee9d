"""Checkpoints of mixtures: spellings of configs and tensors, what is loaded and in which form, what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bound import ExpertSize, StepBytes
from safetensors.torch import load_file
from torch import Tensor

from specgen.attention.sdpa import SdpaBackend
from specgen.checkpoints.checkpoint import load_target, open_checkpoint
from specgen.checkpoints.inspect_checkpoint import describe
from specgen.config import EngineConfig, UserError
from specgen.engine import choices
from specgen.models.llama import Llama
from tests.commands import refused
from tests.dense import DenseAttend
from tests.engines import load_pair
from tests.tiny_checkpoints import write_head
from tests.tiny_mixtures import change, in_one_tensor, packed_in_mxfp4, read, write_gpt_oss, write_qwen3_moe

CPU, META = torch.device("cpu"), torch.device("meta")


@torch.inference_mode()
def logits(path: Path) -> Tensor:
    model = load_target(open_checkpoint(str(path)), torch.float32, CPU)
    assert isinstance(model, Llama)
    return model.logits(model.forward(torch.arange(20), DenseAttend(model))[0])


def test_both_spellings_of_a_qwen3_moe_are_the_same_model(tmp_path: Path) -> None:
    """As on the hub and with a tensor for all experts: gate before up, rows by output."""
    config, before = write_qwen3_moe(tmp_path, num_experts=5), logits(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["num_local_experts"] == 5, "transformers 5 renames it"
    change(tmp_path, {}, num_local_experts=None, num_experts=5, experts_per_token=2, num_experts_per_tok=None)
    assert read(tmp_path) == config

    in_one_tensor(tmp_path)
    assert torch.equal(logits(tmp_path), before)


@pytest.mark.parametrize("write", [write_gpt_oss, write_qwen3_moe], ids=["gpt-oss", "qwen3-moe"])
def test_experts_are_read_from_shards(tmp_path: Path, write: Any) -> None:
    import transformers

    write(tmp_path / "whole")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    of_a_layer = "model.layers.0.mlp.experts."
    tensors = open_checkpoint(str(tmp_path / "shards")).tensors
    assert len({info.file for name, info in tensors.items() if name.startswith(of_a_layer)}) > 1
    assert torch.equal(logits(tmp_path / "shards"), logits(tmp_path / "whole"))


def test_what_a_gpt_oss_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    import transformers

    write_gpt_oss(tmp_path, num_hidden_layers=3)
    gone = ("attention_bias", "layer_types", "rope_parameters", "sliding_window", "rms_norm_eps")
    change(tmp_path, {}, **dict.fromkeys((*gone, "swiglu_limit", "swiglu_alpha")))
    config, expected = read(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.windows == (128, None, 128)
    assert expected.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, False)
    assert (config.rms_norm_eps, expected.rms_norm_eps) == (1e-5, 1e-5)
    assert config.rope.theta == expected.rope_parameters["rope_theta"]
    assert (config.mixture.limit, config.mixture.alpha) == (expected.swiglu_limit, expected.swiglu_alpha)
    assert {
        name: getattr(config.rope.yarn, name) for name in ("factor", "beta_fast", "beta_slow", "truncate")
    } == {name: expected.rope_parameters[name] for name in ("factor", "beta_fast", "beta_slow", "truncate")}
    original = expected.rope_parameters["original_max_position_embeddings"]
    assert config.rope.yarn.original_max_positions == original


@pytest.mark.parametrize("write", [write_gpt_oss, write_qwen3_moe], ids=["gpt-oss", "qwen3-moe"])
def test_bytes_are_counted_without_reading_weights(tmp_path: Path, write: Any) -> None:
    write_head(tmp_path / "drafter", write(tmp_path / "target"))
    pair = load_pair(tmp_path)
    stored = load_file(tmp_path / "target" / "model.safetensors")
    whole = sum(t.nbytes for t in stored.values()) - stored["model.embed_tokens.weight"].nbytes
    read = StepBytes.of(pair.models)
    assert read.target + read.experts.total_bytes == whole


def test_experts_are_not_all_in_memory_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tensors of one expert each, none outlives its copy into the layer's."""
    from weakref import ref

    from specgen.checkpoints import tensor_reader

    write_qwen3_moe(tmp_path)
    alive, read_all = list[Any](), tensor_reader.read_tensors
    most = 0

    def spy(infos: Any) -> Any:
        nonlocal most
        for name, tensor in read_all(infos):
            alive.extend([ref(tensor)] * (".experts." in name))
            most = max(most, sum(each() is not None for each in alive))
            yield name, tensor
            del tensor

    monkeypatch.setattr(tensor_reader, "read_tensors", spy)
    load_target(open_checkpoint(str(tmp_path)), torch.float32, CPU)
    assert len(alive) == 6 * 6 * 3
    assert most <= 2


def is_refused(path: Path, message: str) -> None:
    with refused(message):
        load_target(open_checkpoint(str(path)), torch.float32, CPU)


def test_configs_that_do_not_fit_the_tensors_are_refused_by_name(tmp_path: Path) -> None:
    for write, changes, message in (
        (write_qwen3_moe, {"moe_intermediate_size": 16}, "gate_proj.weight has shape"),
        (write_qwen3_moe, {"mlp_only_layers": [2]}, "no tensor 'model.layers.2.mlp.gate_proj.weight'"),
        (write_qwen3_moe, {"num_local_experts": 7}, "no tensor 'model.layers.0.mlp.gate.weight'|has shape"),
        (write_gpt_oss, {"quantization_config": {"quant_method": "mxfp4"}}, "gate_up_proj_blocks'"),
    ):
        write(tmp_path)
        change(tmp_path, {}, **changes)
        is_refused(tmp_path, message)


@pytest.mark.parametrize("mxfp4", [False, True])
@pytest.mark.parametrize(("width", "hidden"), [(60, 64), (64, 60)])
def test_experts_of_sizes_that_no_grouped_gemm_reads_are_refused(
    tmp_path: Path, width: int, hidden: int, mxfp4: bool
) -> None:
    sizes = (width - 16, hidden - 16) if mxfp4 else (width, hidden)
    write_gpt_oss(tmp_path, intermediate_size=sizes[0], hidden_size=sizes[1])
    if mxfp4:
        packed_in_mxfp4(tmp_path)
    is_refused(tmp_path, f"hidden_size is {sizes[1]} and an expert {sizes[0]} wide")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("self_attn.sinks", None, "no tensor 'model.layers.3.self_attn.sinks'"),
        ("self_attn.sinks", torch.zeros(5), "sinks has shape"),
        ("mlp.router.bias", None, "no tensor 'model.layers.3.mlp.router.bias'"),
        ("mlp.experts.down_proj_bias", None, "no tensor 'model.layers.3.mlp.experts.down_proj_bias'"),
        ("mlp.experts.down_proj_scales", None, "no tensor 'model.layers.3.mlp.experts.down_proj_scales'"),
        ("mlp.experts.down_proj_blocks", torch.zeros(6, 64, 1, 16), "stored as float32, not as bytes"),
        ("mlp.experts.down_proj_scales", torch.zeros(6, 64, 2, dtype=torch.uint8), "scales has shape"),
        ("self_attn.o_proj.weight", torch.zeros(64, 64, dtype=torch.uint8), "stored as uint8: quantized"),
        ("mlp.shared_expert.weight", torch.zeros(2), "has an unknown tensor, 'model.layers.3.mlp.shared"),
    ],
)
def test_wrong_tensors_of_gpt_oss_are_refused_by_name(
    tmp_path: Path, name: str, tensor: Tensor | None, message: str
) -> None:
    write_gpt_oss(tmp_path)
    packed_in_mxfp4(tmp_path)
    change(tmp_path, {f"model.layers.3.{name}": tensor})
    is_refused(tmp_path, message)


def test_inspect_says_what_a_gpt_oss_is(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)
    packed_in_mxfp4(tmp_path)
    text = describe(str(tmp_path)).to_text()
    for line in (
        "experts     6 in all layers, 32 wide, in MXFP4, gate and up clamped at 7\n",
        "router      chooses 2 per token; weights from the softmax over the chosen\n",
        "rotary      base 10,000, YaRN scaling by 4 from 64 positions (exact bounds), cos and sin",
        "windows     8, all, 8, all, 8, all positions, by layer\n",
        "sinks       one per head, in the sum of the softmax alone\n",
        "KV cache    1,536 bytes per token, 768 of them only of the last 8, which a window shows\n",
        "Complete and supported.",
    ):
        assert line in text
    (part,) = describe(str(tmp_path)).to_json()["checkpoints"]
    stored = load_file(tmp_path / "model.safetensors")
    assert part["num_bytes"] == sum(t.nbytes for t in stored.values())
    packed = sum(2 * t.numel() for name, t in stored.items() if name.endswith("_blocks"))
    assert part["num_parameters"] == packed + sum(
        t.numel() for t in stored.values() if t.dtype != torch.uint8
    )
    assert part["dtypes"] == ("mxfp4", "float32")
    assert part["mixture"]["num_experts"] == 6


def test_inspect_says_which_layers_are_mixtures(tmp_path: Path) -> None:
    write_qwen3_moe(tmp_path, mlp_only_layers=[0], norm_topk_prob=False)
    text = describe(str(tmp_path)).to_text()
    assert "layers      6, 64 wide, MLP 96 wide\n" in text
    assert "experts     6 in 5 of 6 layers, 32 wide\n" in text
    assert "router      chooses 2 per token; weights from the softmax over all\n" in text
    assert "full" not in text


def test_a_qwen3_moe_without_mixtures_is_dense(tmp_path: Path) -> None:
    config = write_qwen3_moe(tmp_path, decoder_sparse_step=7)
    assert config.mixture is None
    target = load_target(open_checkpoint(str(tmp_path)), torch.float32, CPU)
    assert ExpertSize.of(target.config, 4) is None
    assert "experts" not in describe(str(tmp_path)).to_text()
    assert logits(tmp_path).std() > 0.5


@pytest.mark.parametrize("name", ["sdpa", "sdpa-static", "flashinfer"])
def test_a_backend_without_sinks_refuses_a_model_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any
) -> None:
    write_gpt_oss(tmp_path / "sinks")
    write_qwen3_moe(tmp_path / "none")

    class Other(SdpaBackend):
        capabilities = replace(SdpaBackend.capabilities, sinks=False)

    monkeypatch.setitem(choices.BACKENDS, "flashinfer", Other)  # type: ignore[misc]
    monkeypatch.setitem(choices._AUTO, "cpu", ("flashinfer", "sdpa"))  # type: ignore[misc]
    for model, chosen in (("sinks", "sdpa"), ("none", "flashinfer")):
        path = str(tmp_path / model)
        config = EngineConfig(model=path, drafter="ngram", dtype="float32", kv_dtype="model", device="cpu")
        checkpoints = {"model": open_checkpoint(path)}
        assert choices.choose_attention(config, checkpoints)[0] == chosen
        asked = replace(config, attention=name)
        if name == "flashinfer" and model == "sinks":
            with pytest.raises(UserError, match="'flashinfer' does not support attention sinks: use --att"):
                choices.choose_attention(asked, checkpoints)
        else:
            assert choices.choose_attention(asked, checkpoints)[0] == name
