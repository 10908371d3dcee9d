"""Rotary parameters in every form that a config.json has them in: logits as those of ``transformers``."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.attention.sdpa import SdpaBackend
from specgen.checkpoints.checkpoint import drafter_config, open_checkpoint, target_config
from specgen.checkpoints.inspect_checkpoint import describe
from specgen.models.model_config import TargetConfig
from specgen.models.rotary import Llama3Scaling, RopeConfig, YarnScaling, inverse_frequencies
from tests.families import ids_of, loaded, paged_logits, right_logits
from tests.marks import mostly_slow
from tests.tiny_checkpoints import write_head, write_target
from tests.tiny_gemma4 import write_gemma4
from tests.tiny_hybrids import write_hybrid
from tests.tiny_latents import write_latent
from tests.tiny_llama4 import write_llama4
from tests.tiny_mixtures import write_gpt_oss, write_qwen3_moe

DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
OF_GPT_OSS = {"rope_type": "default", "rope_theta": 150_000.0}  # what it is where nothing says it
OF_LLAMA4 = {"rope_type": "default", "rope_theta": 500_000.0}  # likewise
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"type": "linear", "factor": 2.0}
FAMILIES: dict[str, Callable[[Path], TargetConfig]] = {
    "llama": lambda path: write_target(path, num_layers=2),
    "qwen2": lambda path: write_target(path, "qwen2", num_layers=2, head_dim=None),
    "qwen3": lambda path: write_target(path, "qwen3", num_layers=2),
    "qwen3-moe": lambda path: write_qwen3_moe(path, num_hidden_layers=2),
    "gpt-oss": lambda path: write_gpt_oss(path, num_hidden_layers=2, rope_parameters=OF_GPT_OSS),
    "deepseek": lambda path: write_latent(path, "deepseek", rope_parameters=DEFAULT),
    "glm": write_latent,
    "qwen3-next": lambda path: write_hybrid(path, "Qwen3NextForCausalLM"),
    "qwen3.5": write_hybrid,
    "qwen3.5-moe": lambda path: write_hybrid(path, "Qwen3_5MoeForCausalLM"),
    "llama4": lambda path: write_llama4(path, num_hidden_layers=4, rope_parameters=OF_LLAMA4),
}
# Which have rotations by kind of layer, and no other form of them
BY_KIND: dict[str, Callable[[Path], TargetConfig]] = {
    "gemma4": lambda path: write_gemma4(path, "26b", hidden_size_per_layer_input=8, num_kv_shared_layers=3),
    "gemma4-unified": lambda path: write_gemma4(path, "12b"),
}
# Beside the rope_parameters of FAMILIES
BESIDE: dict[str, dict[str, Any]] = {
    "yarn": {"rope_scaling": YARN},
    "llama3": {"rope_scaling": LLAMA3},
    "linear": {"rope_scaling": LINEAR},
    "old-name": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "original-at-the-top": {"rope_scaling": YARN, "original_max_position_embeddings": 32},
    "original-missing": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "factor-null": {"rope_scaling": YARN | {"factor": None}},
    "own-theta": {"rope_scaling": YARN | {"rope_theta": 500.0}},
    "theta-at-the-top": {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default"}},
    "theta-twice": {"rope_theta": 500.0},
    "attention-factor": {"rope_scaling": YARN | {"attention_factor": 1.5}},
    "mscale": {"rope_scaling": YARN | {"mscale": 0.9, "mscale_all_dim": 0.5}},
    "mscale-of-llama3": {"rope_scaling": LLAMA3 | {"mscale_all_dim": 0.5}},
    "truncate-null": {"rope_scaling": YARN | {"truncate": None}},
    "empty": {"rope_scaling": {}},
    "scaling-off": {"rope_parameters": YARN | {"rope_theta": 10_000.0}, "rope_scaling": DEFAULT},
    "in-parameters": {"rope_parameters": LINEAR | {"rope_theta": 10_000.0}},
    "original-at-the-top-of-llama3": {
        "rope_parameters": LLAMA3 | {"rope_theta": 10_000.0},
        "original_max_position_embeddings": 32,
    },
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, path in paths.items():
        FAMILIES[family](path)
    return paths


def _beside(path: Path, target: Path, changes: dict[str, Any]) -> None:
    """The target in ``path`` with its config changed; its weights are links."""
    config = json.loads((target / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").hardlink_to(target / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "name"),
    mostly_slow(
        product(FAMILIES, BESIDE),
        *(("deepseek", name) for name in BESIDE),
        *product(("llama", "qwen3-moe", "gpt-oss", "llama4"), ("yarn", "llama3")),
    ),
)
def test_logits_equal_transformers(tmp_path: Path, written: dict[str, Path], family: str, name: str) -> None:
    _beside(tmp_path, written[family], BESIDE[name])
    model = loaded(tmp_path)
    ids = ids_of(model.config)
    expected = right_logits(tmp_path, ids)
    torch.testing.assert_close(paged_logits(model, ids, SdpaBackend, [len(ids)]), expected, atol=2e-4, rtol=0)


def test_all_forms_but_three_change_the_logits(tmp_path: Path, written: dict[str, Path]) -> None:
    """Otherwise the test above could pass with all of them ignored on both sides."""
    found: dict[str, Tensor] = {}
    for name, changes in {"plain": {}, **BESIDE}.items():
        (tmp_path / name).mkdir()
        _beside(tmp_path / name, written["deepseek"], changes)
        model = loaded(tmp_path / name)
        found[name] = paged_logits(model, ids_of(model.config), SdpaBackend, [len(ids_of(model.config))])
    same = {name for name in BESIDE if (found[name] - found["plain"]).abs().max() < 1e-3}
    assert same == {"theta-twice", "empty", "scaling-off"}
    assert torch.equal(found["yarn"], found["old-name"])


@pytest.mark.parametrize("dialect", ["eagle", "speculators"])
def test_heads_are_read_alike(tmp_path: Path, written: dict[str, Path], dialect: Any) -> None:
    target = target_config(open_checkpoint(str(written["llama"])))
    write_head(tmp_path, target, dialect)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    layer = config.get("transformer_layer_config", config)
    layer |= {"rope_parameters": DEFAULT, "rope_scaling": YARN, "original_max_position_embeddings": 32}
    file.write_text(json.dumps(config))
    rope = drafter_config(open_checkpoint(str(tmp_path)), 2).rope
    assert (rope.yarn.factor, rope.yarn.original_max_positions) == (4.0, 32)


def test_inspect_prints_the_scaling(tmp_path: Path, written: dict[str, Path]) -> None:
    _beside(tmp_path, written["llama"], {"rope_scaling": YARN})
    text = " ".join(describe(str(tmp_path)).to_text().split())
    assert "not read" not in text
    assert "rotary base 10,000, YaRN scaling by 4 from 64 positions (rounded bounds), cos and sin" in text


def test_inspect_knows_the_base_of_a_family(tmp_path: Path, written: dict[str, Path]) -> None:
    _beside(tmp_path, written["gpt-oss"], {"rope_scaling": YARN})
    assert "rotary      base 150,000, YaRN" in describe(str(tmp_path)).to_text()


def test_the_scaling_in_words() -> None:
    common = {"max_position_embeddings": 256}
    texts = {
        "base 10,000, no scaling": {},
        "base 500, linear scaling by 2": {"rope_theta": 500, "rope_scaling": LINEAR},
        "base 10,000, llama3 scaling by 8 from 64 positions": {"rope_scaling": LLAMA3},
    }
    for text, config in texts.items():
        assert str(RopeConfig.from_hf(common | config)) == text
    yarn = RopeConfig.from_hf(common | {"rope_scaling": YARN | {"factor": None}}).yarn
    assert yarn == YarnScaling(
        factor=4.0,
        beta_fast=32.0,
        beta_slow=1.0,
        original_max_positions=64,
        truncate=True,
        concentration=yarn.concentration,
    )


def test_a_frequency_at_both_of_equal_factors_is_kept() -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_positions=8)
    rope = RopeConfig(theta=(8 / (2 * torch.pi)) ** 2, llama3=scaling)
    first, second = inverse_frequencies(rope, 4, torch.device("cpu")).tolist()
    assert first == 1.0
    assert second == pytest.approx(2 * torch.pi / 8)  # 1 turn in 8 positions
