"""A LoRA adapter merged at load: the weights are W + scale * B A rounded once, and the texts those of PEFT's merge."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.errors
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specgen.checkpoints.checkpoint import load_target, open_checkpoint
from specgen.checkpoints.fingerprint import files_of, fingerprint
from specgen.checkpoints.lora import with_lora
from specgen.checkpoints.rank_share import Cut
from specgen.checkpoints.tensor_reader import TensorReader
from specgen.checkpoints.weight_files import read_tensor
from specgen.config import EngineConfig, SamplingParams
from specgen.engine.engine import Engine
from specgen.engine.loading import open_checkpoints
from tests.commands import printed, refused, write_rows
from tests.tiny_checkpoints import change_json, write_target
from tests.tiny_llama4 import write_llama4
from tests.tiny_mixtures import packed_in_mxfp4, write_gpt_oss, write_qwen3_moe
from tests.tiny_tokenizers import write_byte_level

CPU = torch.device("cpu")
Q0 = "model.layers.0.self_attn.q_proj"
ATTENTION = ("self_attn.q_proj", "self_attn.v_proj")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora") / "target"
    write_target(path, num_layers=3, vocab_size=320)
    write_byte_level(path)
    return path


def write_adapter(path: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """An adapter of rank 4 with ``tensors`` by their names in the model."""
    path.mkdir(parents=True)
    plain = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(plain | config))
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, path / "adapter_model.safetensors")
    return path


def pair_of(module: str, shape: tuple[int, ...], rank: int = 4, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed + len(module))
    a, b = torch.randn(rank, shape[1], generator=generator), torch.randn(shape[0], rank, generator=generator)
    return {f"{module}.lora_A.weight": a * 0.2, f"{module}.lora_B.weight": b * 0.2}


def attention_of(target: Path, layers: int = 3, rank: int = 4) -> dict[str, Tensor]:
    infos, found = open_checkpoint(str(target)).tensors, dict[str, Tensor]()
    for name in (f"model.layers.{i}.{module}" for i in range(layers) for module in ATTENTION):
        found |= pair_of(name, infos[f"{name}.weight"].shape, rank)
    return found


def merged(target: Path, adapter: Path, name: str) -> Tensor:
    checkpoint = with_lora(open_checkpoint(str(target)), str(adapter))
    return read_tensor(name, checkpoint.tensors[name])


def test_a_weight_is_that_and_the_scaled_product(target: Path, tmp_path: Path) -> None:
    """Rank and alpha by pattern, the scale of rank-stabilised LoRA, embedding, output layer and a whole weight."""
    infos, stored = open_checkpoint(str(target)).tensors, load_file(target / "model.safetensors")
    table, norm = "model.embed_tokens", torch.arange(64.0)
    wide = pair_of("model.layers.1.self_attn.q_proj", (64, 64), 6)
    given = attention_of(target) | wide | pair_of("lm_head", infos["lm_head.weight"].shape)
    a, b = torch.randn(4, 320) * 0.2, torch.randn(64, 4) * 0.2
    given |= {f"{table}.lora_embedding_A": a, f"{table}.lora_embedding_B": b, "model.norm.weight": norm}
    settings: dict[str, Any] = {
        "rank_pattern": {"layers.1.self_attn.q_proj": 6},
        "alpha_pattern": {r".*\.v_proj": 3},
        "target_modules": r".*(q_proj|v_proj|lm_head|embed_tokens)",
        "modules_to_save": ["norm"],
    }
    for name, root in (("plain", False), ("stable", True)):
        path = write_adapter(tmp_path / name, given, use_rslora=root, **settings)
        for module, rank, alpha in (
            ("model.layers.0.self_attn.q_proj", 4, 8),
            ("model.layers.1.self_attn.q_proj", 6, 8),
            ("model.layers.2.self_attn.v_proj", 4, 3),
            ("lm_head", 4, 8),
        ):
            scale = alpha / (math.sqrt(rank) if root else rank)
            change = given[f"{module}.lora_B.weight"] @ given[f"{module}.lora_A.weight"]
            expected = stored[f"{module}.weight"] + scale * change
            assert torch.allclose(merged(target, path, f"{module}.weight"), expected, atol=1e-6), module
        expected = stored[f"{table}.weight"] + (4 if root else 2) * (b @ a).T
        assert torch.allclose(merged(target, path, f"{table}.weight"), expected, atol=1e-6)
        assert torch.equal(merged(target, path, "model.norm.weight"), norm)
        other = "model.layers.0.self_attn.k_proj.weight"
        assert torch.equal(merged(target, path, other), stored[other])


def read(target: Path, adapter: Path, dtype: torch.dtype) -> TensorReader:
    checkpoint = with_lora(open_checkpoint(str(target)), str(adapter))
    return TensorReader(checkpoint=checkpoint, dtype=dtype, device=CPU)


def test_it_is_rounded_once(target: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter", attention_of(target))
    found, exact = (
        read(target, path, dtype)(f"{Q0}.weight", (64, 64)) for dtype in (torch.bfloat16, torch.float32)
    )
    assert torch.equal(found, exact.to(torch.bfloat16))
    plain = load_file(target / "model.safetensors")[f"{Q0}.weight"]
    twice = plain.to(torch.bfloat16) + (exact - plain).to(torch.bfloat16)
    assert not torch.equal(found, twice)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_has_its_share_of_the_change(target: Path, tmp_path: Path, dim: int) -> None:
    path = write_adapter(tmp_path / "adapter", attention_of(target))
    info = with_lora(open_checkpoint(str(target)), str(path)).tensors[f"{Q0}.weight"]
    cut = Cut(stored=info.shape, dim=dim, ranges=(slice(8, 16), slice(40, 44)))
    part = read_tensor(f"{Q0}.weight", replace(info, cut=cut))
    assert torch.equal(part, cut.of(merged(target, path, f"{Q0}.weight")))


# --- texts -----------------------------------------------------------------------------------------


def texts_of(target: Path, lora: Path | None) -> dict[str, tuple[int, ...]]:
    lora_name = None if lora is None else str(lora)
    config = EngineConfig(
        model=str(target), lora=lora_name, drafter="ngram:2", num_spec_tokens=3, device="cpu", page_size=4
    )
    with Engine(config) as engine:
        prompts = [f"Tom has {n} bags" for n in range(5)]
        return {
            o.id: o.token_ids
            for o in engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
        }


def greedy(model: Any, target: Path) -> dict[str, tuple[int, ...]]:
    from specgen.text.tokenizer import load_tokenizer

    tokenizer, found = load_tokenizer(str(target)), {}
    for n in range(5):
        ids = torch.tensor([tokenizer.encode_text(f"Tom has {n} bags")])
        for _ in range(12):
            with torch.inference_mode():
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
        found[str(n)] = tuple(ids[0, -12:].tolist())
    return found


def test_texts_are_those_of_the_merged_weights(target: Path, tmp_path: Path) -> None:
    import transformers

    given = attention_of(target)
    path = write_adapter(tmp_path / "adapter", given)
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    plain = greedy(model, target)
    for name, weight in model.named_parameters():
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in given:
            weight.data += 2 * given[f"{module}.lora_B.weight"] @ given[f"{module}.lora_A.weight"]
    assert texts_of(target, path) == greedy(model, target) != plain
    assert texts_of(target, None) == plain


KINDS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "o_proj"]},
    "all linear": {"target_modules": "all-linear", "use_rslora": True},
    "patterns": {
        "target_modules": r".*\.(q_proj|down_proj)",
        "rank_pattern": {"down_proj": 5},
        "alpha_pattern": {r"layers\.1\..*": 7},
    },
    "tables": {"target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    "saved": {"target_modules": ["gate_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_merge_and_unload(target: Path, tmp_path: Path, kind: str) -> None:
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **KINDS[kind]))
    generator = torch.Generator().manual_seed(1)
    for name, weight in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            weight.data += 0.15 * torch.randn(weight.shape, generator=generator)
    adapted.save_pretrained(tmp_path / "adapter")
    found = texts_of(target, tmp_path / "adapter")
    assert found == greedy(adapted.merge_and_unload(), target)
    assert found != texts_of(target, None)


def test_experts_that_are_layers_of_their_own_are_changed(tmp_path: Path) -> None:
    write_qwen3_moe(tmp_path / "target")
    module = "model.layers.0.mlp.experts.1.up_proj"
    checkpoint = open_checkpoint(str(tmp_path / "target"))
    shape = checkpoint.tensors[f"{module}.weight"].shape
    path = write_adapter(tmp_path / "adapter", pair_of(module, shape), target_modules=["up_proj"])
    names = [[f"model.layers.0.mlp.experts.{n}.up_proj" for n in range(2)]]
    before, after = (
        TensorReader(checkpoint=each, dtype=torch.float32, device=CPU)
        .stacked(names, (shape[0], shape[1]))
        .data
        for each in (checkpoint, with_lora(checkpoint, str(path)))
    )
    (plain, one), (same, changed) = before.view(2, *shape), after.view(2, *shape)
    assert torch.equal(plain, same)
    assert not torch.equal(one, changed)


def test_weights_that_are_read_by_other_names_are_changed(tmp_path: Path) -> None:
    write_llama4(tmp_path / "target")
    module = "model.layers.0.feed_forward.shared_expert.up_proj"
    stored = load_file(tmp_path / "target" / "model.safetensors")[f"{module}.weight"]
    given = pair_of(module, (32, 64))
    path = write_adapter(tmp_path / "adapter", given, target_modules=["up_proj"])
    change = given[f"{module}.lora_B.weight"] @ given[f"{module}.lora_A.weight"]
    found = merged(tmp_path / "target", path, "model.layers.0.mlp.shared_experts.up_proj.weight")
    assert torch.allclose(found, stored + 2 * change, atol=1e-6)


# --- runs ------------------------------------------------------------------------------------------


def test_an_adapter_is_part_of_a_run(target: Path, tmp_path: Path) -> None:
    one, other = (write_adapter(tmp_path / name, attention_of(target, n)) for name, n in (("a", 3), ("b", 2)))
    data = write_rows(tmp_path / "rows.jsonl", [{"id": "x", "prompt": "Tom has"}])
    command = ["generate", "--model", target, "--num-spec-tokens", 0, "--device", "cpu", "--dataset", data]
    command += ["--max-new-tokens", 4, "--output", tmp_path / "run"]
    printed(*command, "--lora", one)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["settings"]["LoRA"] == f"{one} changes q_proj (3), v_proj (3)"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= manifest["files"]["model"].keys()
    for another in (["--lora", other], []):
        with refused("holds a run that differs in .*files of the model: .*adapter_model.safetensors"):
            printed(*command, *another)
    kept = (one / "adapter_config.json").read_text()
    change_json(one / "adapter_config.json", lora_alpha=4)
    with refused(f"was made by other files of {target} and {one}: name"):
        printed("features", tmp_path / "run", "--device", "cpu", "--output", tmp_path / "states")
    (one / "adapter_config.json").write_text(kept)
    one.rename(tmp_path / "moved")
    printed(*command, "--lora", tmp_path / "moved")  # the same content
    ask = ("features", tmp_path / "run", "--device", "cpu", "--output", tmp_path / "states")
    with refused(f"{one}"):
        printed(*ask)
    printed(*ask, "--lora", tmp_path / "moved")
    found = printed("inspect", target, "--lora", tmp_path / "moved")
    assert "changes q_proj (3), v_proj (3)" in " ".join(found.split())
    scored = write_rows(tmp_path / "s.jsonl", [{"prompt": "Tom", "completion": " has"}])
    score = ("score", "--model", target, "--device", "cpu", "--dataset", scored)
    text, plain = (json.loads(printed(*score, *more)) for more in (("--lora", other), ()))
    assert text["scores"][0]["logprob"] != plain["scores"][0]["logprob"]


@pytest.mark.slow
def test_arms_have_the_adapter(target: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter", attention_of(target))
    pair = ("--model", target, "--drafter", "ngram", "--device", "cpu", "--lora", path, "--json")
    few = ("--num-prompts", 1, "--max-new-tokens", 4, "--repeats", 1)
    tuned = json.loads(printed("tune", *pair, *few, "--batch", 1, "--k", 1))
    assert tuned["head"]["LoRA"] == f"{path} changes q_proj (3), v_proj (3)"
    printed("compare", *pair, *few[:-1], 0, "--output", tmp_path / "heads")
    manifests = [json.loads(each.read_text()) for each in (tmp_path / "heads").rglob("manifest.json")]
    assert [each["settings"]["LoRA"] for each in manifests] == [tuned["head"]["LoRA"]]


def test_a_checkpoint_is_opened_again_for_another_adapter(target: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter", attention_of(target))
    plain = EngineConfig(model=str(target), drafter=None, num_spec_tokens=0)
    changed = EngineConfig(model=str(target), lora=str(path), drafter=None, num_spec_tokens=0)
    opened = open_checkpoints(changed)
    assert open_checkpoints(changed, opened)["model"] is opened["model"]
    assert open_checkpoints(plain, opened)["model"].lora is None
    assert open_checkpoints(changed, open_checkpoints(plain))["model"].lora == str(path)
    assert fingerprint(opened["model"]) != fingerprint(open_checkpoints(plain)["model"])
    assert len(files_of(opened["model"])) == len(files_of(open_checkpoints(plain)["model"])) + 2
    assert "lora" not in plain.to_json()
    change_json(path / "adapter_config.json", lora_alpha=4)
    assert not opened["model"].is_unchanged()


# --- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "change", "reason"),
    [
        ({"peft_type": "IA3"}, dict, "peft_type is 'IA3': only LORA is merged"),
        ({"use_dora": True}, dict, "says use_dora True, which is not supported: merge it with PEFT"),
        ({"bias": "all"}, dict, "says bias 'all', which is not supported"),
        ({"init_lora_weights": "pissa"}, dict, "says init_lora_weights 'pissa', which is not supported"),
        ({"target_parameters": ["experts.down_proj"]}, dict, "says target_parameters .*not supported"),
        ({"layer_replication": [[0, 2]]}, dict, "says layer_replication .*not supported"),
        ({"something_new": 3}, dict, "says something_new 3, which is not supported"),
        ({"r": 0}, dict, "r is 0 in adapter_config.json: use a number of at least 1"),
        ({"lora_alpha": "8"}, dict, "lora_alpha is '8'"),
        ({"target_modules": None}, dict, "target_modules is None: use a list of names or a pattern"),
        ({"rank_pattern": "q_proj"}, dict, "rank_pattern is 'q_proj' in .*: use an object of patterns"),
        ({"alpha_pattern": {"q_proj": "3"}}, dict, "alpha_pattern is .*'3'.*: use an object of patterns"),
        ({"rank_pattern": {"(q_proj": 4}}, dict, r"has the pattern '.*\(q_proj.*', which is no regular"),
        (
            {"target_modules": "(.*"},
            dict,
            r"has the pattern '\(\.\*', which is no regular expression \(missing",
        ),
        ({"lora_alpha": 1e40}, dict, r"lora_B holds NaN or Inf, or both are too large at scale 2.5e\+39"),
        ({}, lambda t: {n: x.to(torch.int8) for n, x in t.items()}, r"has \[4, 64\] of I8 where the model"),
        ({"r": 5}, dict, r"has \[4, 64\] of float32 where the model .* ask for \[5, 64\] of floats"),
        (
            {"target_modules": ["v_proj"]},
            dict,
            "has tensors of '.*q_proj', which target_modules does not name",
        ),
        (
            {},
            lambda t: t | {"model.layers.9.mlp.lora_A.weight": torch.ones(4, 4)},
            "changes 'model.layers.9.mlp'",
        ),
        (
            {},
            lambda t: t | {f"{Q0}.lora_magnitude_vector": torch.ones(4)},
            "its tensor '.*magnitude_vector' is of no",
        ),
        (
            {},
            lambda t: {n: x for n, x in t.items() if "lora_B" not in n},
            "has no such tensor where the model",
        ),
        ({}, lambda t: {}, "has no tensor"),
        ({}, lambda t: t | {f"{Q0}.lora_A.weight": torch.full((4, 64), math.nan)}, "lora_B holds NaN or Inf"),
    ],
    ids=lambda each: each[:40] if isinstance(each, str) else "",
)
def test_what_is_not_merged_is_refused_by_name(
    target: Path,
    tmp_path: Path,
    config: dict[str, Any],
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    reason: str,
) -> None:
    path = write_adapter(tmp_path / "adapter", change(attention_of(target)), **config)
    with refused(reason):
        load_target(with_lora(open_checkpoint(str(target)), str(path)), torch.float32, CPU)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "without adapter_config.json: name the directory of a PEFT adapter"),
        ("nowhere", "'nowhere' is neither a directory nor a hub id of the form owner/name"),
        ("owner/adapter", r"'owner/adapter' is not a directory here and cannot be downloaded \(the hub"),
    ],
)
def test_an_adapter_that_is_nowhere_is_refused(
    target: Path, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(repo_id: str, **settings: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nand much more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with refused(reason):
        printed("inspect", target, "--lora", name or target)


def test_tied_tables_are_refused(tmp_path: Path) -> None:
    write_target(tmp_path / "target", num_layers=1, tied=True)
    a, b = torch.randn(4, 128), torch.randn(64, 4)
    name = "model.embed_tokens"
    given = {f"{name}.lora_embedding_A": a, f"{name}.lora_embedding_B": b}
    path = write_adapter(tmp_path / "adapter", given, target_modules=["embed_tokens"])
    with refused("changes model.embed_tokens.weight, and embedding and output layer are one weight"):
        with_lora(open_checkpoint(str(tmp_path / "target")), str(path))


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_target(target, num_layers=1)
    tensors = load_file(target / "model.safetensors")
    tensors[f"{Q0}.weight"] = tensors[f"{Q0}.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, target / "model.safetensors")
    path = write_adapter(tmp_path / "adapter", pair_of(Q0, (64, 64)))
    with refused(f"changes '{Q0}', which is in FP8: use the model in bfloat16"):
        with_lora(open_checkpoint(str(target)), str(path))
    write_gpt_oss(tmp_path / "mxfp4")
    packed_in_mxfp4(tmp_path / "mxfp4")
    module = "model.layers.0.mlp.experts"
    path = write_adapter(tmp_path / "experts", pair_of(module, (4, 4)), target_modules=["experts"])
    with refused(f"changes '{module}', which MXFP4 packs"):
        with_lora(open_checkpoint(str(tmp_path / "mxfp4")), str(path))


def test_a_weight_that_is_not_read_is_refused(target: Path, tmp_path: Path) -> None:
    """A tensor of the file that the model leaves out would be changed without effect."""
    path = write_adapter(tmp_path / "adapter", attention_of(target))
    checkpoint = with_lora(open_checkpoint(str(target)), str(path))
    changed = checkpoint.tensors[f"{Q0}.weight"]
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": replace(changed, shape=(8,))}
    with refused("inv_freq', which is not read for texts"):
        load_target(replace(checkpoint, tensors={**checkpoint.tensors, **extra}), torch.float32, CPU)
