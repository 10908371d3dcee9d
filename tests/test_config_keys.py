"""Every key that ``transformers`` knows of a supported config is read, held to some values, or has no effect."""

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.attention.sdpa import SdpaBackend
from specgen.checkpoints.checkpoint import drafter_config, open_checkpoint, target_config
from specgen.checkpoints.inspect_checkpoint import describe
from specgen.config import EngineConfig, UserError
from specgen.engine.loading import load_models, open_checkpoints
from specgen.models.config_keys import (
    _ONLY,
    GENERATION,
    HEADS,
    NO_EFFECT,
    generation_defaults,
    listed,
    unread_keys,
)
from specgen.models.families import FAMILIES
from specgen.models.model_config import TargetConfig, layer_settings
from tests.commands import refused
from tests.families import ids_of, loaded, paged_logits, right_logits
from tests.forked import write_pair
from tests.marks import mostly_slow
from tests.test_rope_config import BY_KIND, DEFAULT
from tests.test_rope_config import FAMILIES as ONE_ROTATION
from tests.tiny_checkpoints import change_json, write_head, write_target
from tests.tiny_latents import write_latent
from tests.tiny_mixtures import change

WRITERS = {**ONE_ROTATION, **BY_KIND}
# Those of vision-language models are the same families
OF_TEXT = [name for name in FAMILIES if name.endswith("ForCausalLM")]
OF_GENERATION = ("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache")
OF_GENERATION += ("output_attentions", "output_hidden_states", "transformers_version", "cache_implementation")
# What the others are refused for
OF_LLAMA4 = {"attention_chunk_size", "attn_temperature_tuning", "no_rope_layers"}
OF_GEMMA4 = {
    "hidden_activation",
    "per_layer_config",
    "final_logit_softcapping",
    "use_bidirectional_attention",
}
OF_FAMILY = {"Llama4": OF_LLAMA4, "Gemma4": OF_GEMMA4}
# Of keys that are read: values that must be read as something else, or be refused
OTHER: dict[str, Any] = {
    "architectures": ["BertModel"],
    "attention_bias": True,
    "attention_k_eq_v": False,
    "attn_temperature_tuning": False,
    "compression_config": {"quant_method": "awq"},
    "decoder_sparse_step": 2,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "eos_token_id": 3,
    "first_k_dense_replace": 2,
    "full_attention_interval": 2,
    "head_dim": 32,
    "interleave_moe_layer_step": 2,
    "linear_num_key_heads": 1,
    "layer_types": ["chunked_attention"] * 2,
    "max_window_layers": "none",
    "mlp_bias": True,
    "mlp_layer_types": ["sparse"] * 3,
    "mlp_only_layers": [0],
    "moe_layers": [0],
    "no_rope_layer_interval": 2,
    "no_rope_layers": [0, 1, 1, 1],
    "norm_topk_prob": None,  # is false
    "num_experts": 7,  # beside num_local_experts, as which transformers saves it
    "num_kv_shared_layers": 2,
    "original_max_position_embeddings": 8,
    "partial_rotary_factor": 0.5,
    "per_layer_config": {"2": {"head_dim": 32}, "5": {"head_dim": 32}},
    "q_lora_rank": None,
    "quantization_config": {"quant_method": "awq"},
    "rope_interleave": None,  # is false
    "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
    "rope_theta": 77.0,
    "sliding_window": 4,
    "torch_dtype": "bfloat16",
    "use_bidirectional_attention": "all",
    "use_double_wide_mlp": True,
    "use_qk_norm": False,
    "use_sliding_window": True,
}
# As published configs of Gemma 4 say what ``transformers`` now saves by layer
_GLOBAL = {"per_layer_config": None, "global_head_dim": 16, "num_global_key_value_heads": 1}
# What must stand beside a key for it to matter
WITH: dict[str, dict[str, Any]] = {
    "max_window_layers": {"layer_types": None},
    "first_k_dense_replace": {"mlp_layer_types": None},
    "global_head_dim": _GLOBAL,
    "num_global_key_value_heads": _GLOBAL,
    "interleave_moe_layer_step": {"moe_layers": None},
    "no_rope_layer_interval": {"no_rope_layers": None, "layer_types": None},
    "no_rope_layers": {"layer_types": None},
    "full_attention_interval": {"layer_types": None, "full_attention_interval": 4},
    "original_max_position_embeddings": {
        "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    },
    "partial_rotary_factor": {"rope_parameters": {"rope_type": "default"}},
    "rope_theta": {"rope_parameters": {"rope_type": "default"}},
    "sliding_window": _GLOBAL
    | {"use_sliding_window": True, "layer_types": None, "max_window_layers": 0, "num_kv_shared_layers": 0},
    "torch_dtype": {"dtype": None},
    "use_sliding_window": {"layer_types": None, "sliding_window": 4, "max_window_layers": 0},
}
# Of keys without effect: other values, which transformers takes
HARMLESS: dict[str, Any] = {
    "attention_dropout": 0.5,
    "bos_token_id": 7,
    "chunk_size_feed_forward": 2,
    "id2label": {"0": "a"},
    "initializer_range": 0.7,
    "is_decoder": False,
    "add_cross_attention": True,
    "label2id": {"a": 0},
    "num_nextn_predict_layers": 3,
    "num_mtp_layers": 3,
    "output_hidden_states": True,
    "output_router_logits": True,
    "pad_token_id": 9,
    "pretraining_tp": 2,
    "problem_type": "regression",
    "qk_head_dim": 3,
    "router_aux_loss_coef": 0.5,
    "router_jitter_noise": 0.5,
    "tie_last_hidden_states": True,
    "transformers_version": "4.0.0",
    "use_cache": False,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny target of every family, by its architecture."""
    found = {}
    for name, write in WRITERS.items():
        path = tmp_path_factory.mktemp(name)
        found[write(path).architecture] = path
    assert found.keys() == set(OF_TEXT)
    return found


def _raw(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "config.json").read_text()))


def _read(raw: Mapping[str, Any], architecture: str) -> TargetConfig:
    return FAMILIES[architecture].config(raw)


def _tried(raw: Mapping[str, Any], architecture: str) -> tuple[str, TargetConfig | None]:
    """Why it is refused, or what it is read as."""
    try:
        return "", _read(raw, architecture)
    except UserError as error:
        return str(error), None


def _class(architecture: str) -> Any:
    import transformers

    return getattr(transformers, architecture).config_class


def _of_class(architecture: str) -> set[str]:
    config_class = _class(architecture)
    known = {field.name for field in fields(config_class)}
    return known | set(config_class().to_dict()) | set(config_class.attribute_map)


@pytest.mark.parametrize("architecture", OF_TEXT)
def test_every_key_of_transformers_is_on_a_list(architecture: str) -> None:
    keys = FAMILIES[architecture].keys
    known = keys.read | keys.only.keys() | keys.aliases.keys() | _ONLY.keys() | NO_EFFECT.keys() | GENERATION
    assert _of_class(architecture) - known == set(), (
        "read it, refuse it, or say in config_keys.py why it has no effect"
    )


def test_a_vision_language_model_is_of_the_family_of_its_text_part() -> None:
    for name in FAMILIES.keys() - set(OF_TEXT):
        assert FAMILIES[name] is FAMILIES[name.replace("ForConditionalGeneration", "ForCausalLM")]
        outer = _class(name)().to_dict().keys() - {"text_config"}
        assert outer - FAMILIES[name].keys.read - NO_EFFECT.keys() - _ONLY.keys() == set()


def test_no_key_is_on_two_lists() -> None:
    lists = [set(_ONLY), set(NO_EFFECT), set(GENERATION)]
    for index, each in enumerate(lists):
        assert not any(each & other for other in lists[:index])
    for name, family in FAMILIES.items():
        own = next((own for family, own in OF_FAMILY.items() if name.startswith(family)), set())
        assert own <= set(_ONLY) & family.keys.read
        assert not family.keys.read & (
            set(_ONLY) - own
            | family.keys.only.keys()
            | GENERATION
            | family.keys.aliases.keys() - {"head_dim"}
        )
        assert family.keys.defaults.keys() | set(family.keys.aliases.values()) <= family.keys.read


@pytest.mark.parametrize("architecture", OF_TEXT)
def test_every_key_that_is_read_matters(written: dict[str, Path], architecture: str) -> None:
    for name in sorted(FAMILIES[architecture].keys.read):
        raw = _raw(written[architecture]) | WITH.get(name, {})
        raw = {key: value for key, value in raw.items() if value is not None or key == name}
        other = OTHER[name] if name in OTHER else raw[name] * 2
        before = _read(raw, architecture)
        other = not before.o_bias if name == "attention_bias" else other
        other = not before.tied_embeddings if name == "tie_word_embeddings" else other
        refused, after = _tried(raw | {name: other}, architecture)
        assert refused or after != before, name


@pytest.mark.parametrize("architecture", OF_TEXT)
def test_what_a_file_leaves_out_is_as_in_transformers(written: dict[str, Path], architecture: str) -> None:
    """Read from what the class of ``transformers`` makes of it, or refused as missing."""
    raw, config_class = _raw(written[architecture]), _class(architecture)
    for name in sorted(raw.keys() - {"architectures", "dtype"}):
        aliases = {alias for alias, of in FAMILIES[architecture].keys.aliases.items() if of == name}
        rest = {key: value for key, value in raw.items() if key not in (name, *aliases)}
        refused, found = _tried(rest, architecture)
        if refused:
            missing = any(f"has no {each}: " in refused for each in (name, name.replace("local_", "")))
            # of a default that fits no small model, or not the layers that others are named beside
            fixed = ("num_key_value_heads", "layer_types", "vocab_size_per_layer_input")
            assert missing or name in fixed, refused
            continue
        completed = config_class.from_dict(rest).to_dict() | {"architectures": [architecture]}
        if name == "eos_token_id":  # which generate reads in the file, not in the class
            completed["eos_token_id"] = None
        refused, expected = _tried(completed | {"dtype": raw["dtype"]}, architecture)
        assert refused == ""
        assert found == expected, name


def _logits_of_transformers(path: Path, tmp_path: Path, changes: dict[str, Any]) -> Tensor:
    tmp_path.mkdir()
    (tmp_path / "config.json").write_text(json.dumps(_raw(path) | changes))
    (tmp_path / "model.safetensors").hardlink_to(path / "model.safetensors")
    return right_logits(tmp_path, torch.arange(24))


@pytest.mark.parametrize("architecture", mostly_slow(OF_TEXT, "LlamaForCausalLM"))
def test_what_is_without_effect_here_is_so_in_transformers(
    tmp_path: Path, written: dict[str, Path], architecture: str
) -> None:
    path = written[architecture]
    plain = _logits_of_transformers(path, tmp_path / "plain", {})
    assert (
        _logits_of_transformers(path, tmp_path / "is_causal", {"is_causal": False}) - plain
    ).abs().max() > 0.01
    names = (_of_class(architecture) | HARMLESS.keys()) & NO_EFFECT.keys() - FAMILIES[architecture].keys.read
    names -= {"_name_or_path", "model_type", "return_dict", "output_attentions"}  # how it is called
    assert names <= HARMLESS.keys()
    raw = _raw(path)
    for name in sorted(names):
        assert _read(raw | {name: HARMLESS[name]}, architecture) == _read(raw, architecture)
        assert torch.equal(_logits_of_transformers(path, tmp_path / name, {name: HARMLESS[name]}), plain), (
            name
        )


@pytest.mark.parametrize("name", _ONLY)
def test_values_that_would_change_results_are_refused(written: dict[str, Path], name: str) -> None:
    others: dict[str, Any] = {
        "hidden_act": "gelu",
        "is_causal": False,
        "per_layer_config": {"0": {"head_dim": 8}},
    }
    for architecture, path in written.items():
        if name in FAMILIES[architecture].keys.read:
            continue
        for other in (
            others.get(name, 7),
            *([None] if name == "is_causal" else []),
        ):  # null is not causal there
            with refused(f"^{name} is .*: only .* is supported, "):
                _read(_raw(path) | {name: other}, architecture)
    head = {"hidden_size": 64, "num_attention_heads": 4, name: others.get(name, 7)}
    with pytest.raises(UserError, match=f"^{name} is "):
        layer_settings(head)


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        ("Qwen2ForCausalLM", "attention_bias"),
        ("Qwen3ForCausalLM", "mlp_bias"),
        ("LlamaForCausalLM", "norm_topk_prob"),
    ],
)
def test_keys_of_other_families_are_not_read(written: dict[str, Path], architecture: str, key: str) -> None:
    raw = _raw(written[architecture])
    assert _read(raw | {key: True}, architecture) == _read(raw, architecture)
    assert unread_keys(raw | {key: True}, FAMILIES[architecture].keys) == (key,)


def test_a_window_that_no_layer_has_is_accepted(written: dict[str, Path]) -> None:
    """As where ``max_window_layers`` is beyond the last, or Qwen's switch is off."""
    for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        raw = _raw(written[name]) | {"layer_types": None, "sliding_window": 4}
        assert _read(raw, name) == _read(_raw(written[name]), name)
        assert _read(raw | {"use_sliding_window": True, "max_window_layers": 2}, name) == _read(raw, name)


def _as_in_transformers(path: Path) -> TargetConfig:
    model = loaded(path)
    ids = ids_of(model.config)
    torch.testing.assert_close(
        paged_logits(model, ids, SdpaBackend, [len(ids)]), right_logits(path, ids), atol=2e-4, rtol=0
    )
    return model.config


@pytest.mark.parametrize("dense", [3, 5])
def test_a_deepseek_may_have_no_experts(tmp_path: Path, dense: int) -> None:
    write_latent(tmp_path, "deepseek", first_k_dense_replace=dense, rope_parameters=DEFAULT)
    config = _as_in_transformers(tmp_path)
    assert config.mixture is None
    assert "experts" not in describe(str(tmp_path)).to_text()


@pytest.mark.parametrize(("family", "layers"), [("glm", (False, True, True)), ("deepseek", (False,) * 3)])
def test_which_layers_have_experts_may_be_left_out(
    tmp_path: Path, family: Any, layers: tuple[bool, ...]
) -> None:
    extra = {"first_k_dense_replace": 3} if family == "deepseek" else {}
    write_latent(tmp_path, family, rope_parameters=DEFAULT, **extra)
    change(tmp_path, {}, mlp_layer_types=None, first_k_dense_replace=None)
    config = _as_in_transformers(tmp_path)
    assert (config.mixture.layers if config.mixture else (False,) * 3) == layers


def test_null_booleans_are_false_as_in_transformers(tmp_path: Path) -> None:
    write_latent(tmp_path, "deepseek", rope_parameters=DEFAULT)
    change_json(tmp_path / "config.json", norm_topk_prob=None, rope_interleave=None)
    config = _as_in_transformers(tmp_path)
    assert not config.latent.interleaved


# ---- what nothing reads


def test_keys_that_nothing_reads_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By ``inspect`` and where weights are loaded, of target and head; those that say nothing are not."""
    write_pair(tmp_path)
    paths = [str(tmp_path / name) for name in ("target", "head")]
    config = EngineConfig(
        model=paths[0], drafter=paths[1], device="cpu", dtype="float32", attention="sdpa", num_spec_tokens=1
    )
    assert "not read" not in describe(*paths).to_text()
    load_models(config, open_checkpoints(config))
    assert "nothing reads" not in caplog.text
    change_json(
        tmp_path / "target" / "config.json", norm_gain=2, attention_sink=False, softer=None, temperature=0.5
    )
    harmless = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}
    change_json(tmp_path / "target" / "config.json", **harmless)
    late = {"use_aux_hidden_state": True, "fusion": "late"}
    change_json(tmp_path / "head" / "config.json", head_gain=3, eagle_config=late)
    text = describe(*paths).to_text()
    assert "not read    attention_sink, norm_gain\n" in text
    assert "not read    fusion, head_gain\n" in text
    load_models(config, open_checkpoints(config))
    for path, keys in zip(paths, ("attention_sink, norm_gain", "fusion, head_gain"), strict=True):
        assert f"{path}: nothing reads {keys} in config.json: results are those without them" in caplog.text


def test_parameters_of_another_kind_of_scaling_are_named() -> None:
    common = {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "yarn", "factor": 2, "nothing": None},
    }
    assert unread_keys(common, HEADS) == ()
    assert unread_keys(common | {"rope_scaling": {"factor": 8.0}}, HEADS) == ("rope_scaling.factor",)
    yarn = {"type": "yarn", "factor": 4.0, "attn_factor": 2.0, "low_freq_factor": 1.0}
    expected = ("rope_scaling.attn_factor", "rope_scaling.low_freq_factor")
    assert unread_keys({"transformer_layer_config": common | {"rope_scaling": yarn}}, HEADS) == expected


@pytest.mark.parametrize("key", ["is_neox_style", "rope_is_neox_style"])
def test_rotated_numbers_that_are_neighbours_are_refused(tmp_path: Path, key: str) -> None:
    """Of targets and heads: as halves they would give other logits, or drafts that are rarely accepted."""
    write_pair(tmp_path)
    for part, reader in (("target", target_config), ("head", partial(drafter_config, num_target_layers=3))):
        change_json(tmp_path / part / "config.json", **{key: True})
        reader(open_checkpoint(str(tmp_path / part)))
        change_json(tmp_path / part / "config.json", **{key: False})
        with pytest.raises(UserError, match=f"{key} is False: only True is supported, rotated numbers"):
            reader(open_checkpoint(str(tmp_path / part)))


def test_names_of_keys_are_printed_on_one_short_line() -> None:
    assert listed(("a", "b")) == "a, b"
    assert listed(("\x1b[2J\n",)) == repr("\x1b[2J\n")
    assert len(listed(tuple("x" * 10_000 + str(i) for i in range(10_000)))) < 2_000
    assert listed(tuple("abcdefghijklmn")).endswith(", l and 2 more")


@pytest.mark.parametrize("dialect", ["eagle", "speculators"])
def test_heads_as_their_libraries_save_them_have_nothing_unread(tmp_path: Path, dialect: Any) -> None:
    write_head(
        tmp_path / "head", write_target(tmp_path / "target"), dialect, fc_norm=True, aux_layer_ids=[1, 2, 4]
    )
    assert unread_keys(open_checkpoint(str(tmp_path / "head")).config, HEADS) == ()


def test_defaults_of_generation_in_config_json_count_without_a_file_of_their_own(tmp_path: Path) -> None:
    """As for ``transformers``, whose list of them this is."""
    import transformers

    assert (
        transformers.GenerationConfig().to_dict().keys() - {*OF_GENERATION, "_from_model_config"}
        == GENERATION
    )
    write_target(tmp_path, num_layers=1)
    change_json(tmp_path / "config.json", temperature=0.6, top_k=None, eos_token_id=3)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    checkpoint = open_checkpoint(str(tmp_path))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert checkpoint.generation == generation_defaults(checkpoint.config) == {"temperature": 0.6}
    assert model.generation_config.temperature == 0.6
    assert target_config(checkpoint).eos_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.9}))
    assert open_checkpoint(str(tmp_path)).generation == {"top_p": 0.9}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.generation_config.temperature in (None, 1.0)
