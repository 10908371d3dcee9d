"""Gemma 4 beside what every family does alike: features, configs, FP8, what an engine asks, planted errors."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bound import KVBytes
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from specgen.attention import Attend
from specgen.attention.sdpa import SdpaBackend
from specgen.checkpoints.checkpoint import open_checkpoint, target_config
from specgen.checkpoints.inspect_checkpoint import describe
from specgen.config import EngineConfig
from specgen.engine.choices import attention_uses, choose_attention
from specgen.engine.loading import open_checkpoints
from specgen.engine.memory_plan import memory_plans
from specgen.kv.kv_cache import KVCache
from specgen.models import gemma4, model_config
from specgen.models.gemma4 import Gemma4Config
from specgen.ops.experts import ACTIVATIONS, Routing
from tests.commands import refused
from tests.dense import DenseAttend
from tests.families import ids_of, loaded, of_transformers, paged_logits
from tests.marks import mostly_slow
from tests.test_families import GEMMA4S
from tests.tiny_checkpoints import change_tensors, write_dflash_head
from tests.tiny_gemma4 import WINDOW, as_on_the_hub, change_text, write_gemma4

CPU = torch.device("cpu")


@torch.inference_mode()
def test_features_are_streams_behind_layers(tmp_path: Path) -> None:
    """Of the embedding as it is scaled; the last one is in front of the final norm."""
    ids = ids_of(write_gemma4(tmp_path, "e2b"))
    reference, model = of_transformers(tmp_path), loaded(tmp_path)
    states = reference(ids[None], output_hidden_states=True).hidden_states
    _, features = model.forward(ids, DenseAttend(model), (0, 6))
    first, last = features.chunk(2, -1)
    torch.testing.assert_close(first, states[0][0], atol=2e-4, rtol=0)
    torch.testing.assert_close(reference.model.norm(last), states[6][0], atol=2e-4, rtol=0)


# ---- configs and tensors


@pytest.mark.parametrize("name", ["31b", "e2b", "12b-wrapped"])
def test_both_spellings_of_shapes_are_read_alike(tmp_path: Path, name: str) -> None:
    config = write_gemma4(tmp_path, **GEMMA4S[name])
    found = [target_config(open_checkpoint(str(tmp_path)))]
    as_on_the_hub(tmp_path)
    found.append(target_config(open_checkpoint(str(tmp_path))))
    assert found[0] == found[1]
    assert config.global_kv_heads == ((2 if name == "e2b" else 1), 16)


def test_heads_of_keys_in_global_layers_count_only_where_these_are_values(tmp_path: Path) -> None:
    """As in ``transformers``."""
    write_gemma4(tmp_path)
    as_on_the_hub(tmp_path)
    change_text(tmp_path, attention_k_eq_v=False)
    assert gemma4_config(tmp_path).global_kv_heads == (2, 16)


def gemma4_config(path: Path) -> Gemma4Config:
    found = target_config(open_checkpoint(str(path)))
    assert isinstance(found, Gemma4Config)
    return found


def test_images_bidirectional_alone_change_nothing(tmp_path: Path) -> None:
    write_gemma4(tmp_path)
    before = gemma4_config(tmp_path)
    change_text(tmp_path, use_bidirectional_attention="vision")
    assert gemma4_config(tmp_path) == before


@torch.inference_mode()
def test_tensors_of_layers_that_see_others_are_not_read(tmp_path: Path) -> None:
    """Published checkpoints have them, those that ``transformers`` saves have not; and the vision part."""
    ids = ids_of(write_gemma4(tmp_path, "e2b"))
    before = paged_logits(loaded(tmp_path), ids, SdpaBackend, [len(ids)])
    noise: dict[str, Tensor | None] = {
        f"model.layers.5.self_attn.{name}.weight": torch.randn(32, 64)
        for name in ("k_proj", "v_proj", "k_norm")
    }
    change_tensors(tmp_path, noise | {"model.vision_tower.patch.weight": torch.randn(3)})
    assert torch.equal(paged_logits(loaded(tmp_path), ids, SdpaBackend, [len(ids)]), before)
    text = " ".join(describe(str(tmp_path)).to_text().split())
    assert "vision 1 tensors of the part for images and sounds are not loaded" in text
    change_tensors(tmp_path, {"model.layers.0.self_attn.x_proj.weight": torch.randn(3)})
    with refused("has an unknown tensor"):
        loaded(tmp_path)


def test_scales_of_a_cache_are_those_of_the_layer_that_stores(tmp_path: Path) -> None:
    write_gemma4(tmp_path, "e2b")
    scales = {1: 0.5, 2: 0.25, 4: 3.0}  # the last is of a layer that stores nothing
    change_tensors(
        tmp_path,
        {f"model.layers.{layer}.self_attn.k_scale": torch.tensor(each) for layer, each in scales.items()},
    )
    found = [block.attention.layer for block in loaded(tmp_path).layers.blocks]
    assert [layer.k_scale for layer in found] == [1.0, 0.5, 0.25, 0.5, 0.5, 0.25]
    assert [layer.stores for layer in found] == [True] * 3 + [False] * 3


@pytest.mark.parametrize("form", mostly_slow(["dynamic", "static", "block"], "dynamic"))
def test_linear_layers_may_be_in_fp8(tmp_path: Path, form: str) -> None:
    from tests.test_fp8 import PROMPTS, agrees, logits
    from tests.tiny_fp8 import quantize

    write_gemma4(tmp_path, hidden_size=128, intermediate_size=256, num_attention_heads=16, std=0.05)
    plain = logits(loaded(tmp_path))
    quantize(tmp_path, form, spread=1.0)
    right, got = fp8_by_formulas(tmp_path, form)(PROMPTS).logits, logits(loaded(tmp_path))
    assert agrees(got, right)
    assert (got - plain).abs().max() > 1e-2


def fp8_by_formulas(path: Path, form: str) -> Any:
    """``transformers``' model, whose linear layers are by the formulas."""
    import json

    import transformers

    from tests.tiny_fp8 import CONFIGS, Fp8Linear

    settings = json.loads((path / "config.json").read_text())
    del settings["quantization_config"]
    config = transformers.Gemma4TextConfig(**settings)
    config._attn_implementation = "eager"
    model, tensors = transformers.Gemma4ForCausalLM(config).eval(), load_file(path / "model.safetensors")
    plain = {
        name: each for name, each in tensors.items() if each.dtype.itemsize > 1 and "weight_scale" not in name
    }
    model.load_state_dict(plain, strict=False)
    model.tie_weights()
    for name in [name.removesuffix(".weight") for name, each in tensors.items() if each.dtype.itemsize == 1]:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Fp8Linear(tensors, name, CONFIGS[form][1]))
    return model


# ---- what an engine asks


def test_the_cache_has_what_layers_store(tmp_path: Path) -> None:
    config = write_gemma4(tmp_path, "e2b")
    assert config.kv_spec.layers == ((2, 8), (2, 8), (2, 16))
    assert config.kv_spec.bytes_per_token(2) == 2 * 2 * (2 * 16 + 32)
    assert [config.cache_index(layer) for layer in range(6)] == [0, 1, 2, 1, 1, 2]
    # all layers read, of those with a window no more than it
    assert KVBytes.of(config, 2).at(100) == 2 * 2 * (4 * 16 * WINDOW + 2 * 32 * 100)
    (plan,) = memory_plans(str(tmp_path), None, 16 << 30)
    assert plan.kv_bytes_per_token == 2 * 2 * (2 * 16 + 32)


def test_pages_of_every_shape_are_cleared(tmp_path: Path) -> None:
    spec = write_gemma4(tmp_path, "e2b").kv_spec
    cache = KVCache(spec=spec, num_pages=3, page_size=4, dtype=torch.float32, device=CPU)
    assert [cache.pages(layer)[0].shape for layer in range(3)] == [(3, 4, *heads) for heads in spec.layers]
    for number in range(6):  # of planes, none of which is another
        cache.pages(number // 2)[number % 2].fill_(number + 1)
    cache.clear(torch.tensor([1]))
    for number in range(6):
        plane = cache.pages(number // 2)[number % 2]
        assert [page.unique().tolist() for page in plane] == [[number + 1], [0], [number + 1]]


def test_each_shape_of_heads_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a backend without heads of 512 says so, and not a kernel of it."""
    write_gemma4(tmp_path, "12b", head_dim=64, global_head_dim=512)
    config = EngineConfig(
        model=str(tmp_path),
        drafter=None,
        num_spec_tokens=0,
        dtype="float32",
        device="cpu",
        kv_dtype="model",
        page_size=16,
    )
    checkpoints = open_checkpoints(config)
    shapes = [
        (use.heads.num_kv_heads, use.heads.head_dim, use.windowed)
        for use in attention_uses(config, checkpoints)
    ]
    assert shapes == [(2, 64, (True,)), (1, 512, (False,))]
    limited = replace(SdpaBackend.capabilities, head_dims=(64, 128, 256))
    monkeypatch.setattr(SdpaBackend, "capabilities", limited)
    with refused("attention 'sdpa' does not support heads of 512 elements: use"):
        choose_attention(config, checkpoints)


def test_ranks_share_both_kinds_of_heads(tmp_path: Path) -> None:
    config = write_gemma4(tmp_path)
    shares = [config.shared(count) for count in (2, 4)]
    assert [(each.num_heads, each.num_kv_heads, each.global_kv_heads) for each in shares] == [
        (2, 1, (1, 16)),
        (1, 1, (1, 16)),
    ]
    with refused("tensor-parallel is 3, which does not divide this model's heads and widths"):
        config.shared(3)
    with refused("tensor-parallel is 4"):
        replace(config, global_kv_heads=(6, 16)).shared(4)


def test_heads_of_which_nobody_says_the_scale_need_an_embedding(tmp_path: Path) -> None:
    config = write_gemma4(tmp_path / "target")
    write_dflash_head(tmp_path / "own", config, "DeepSpec", own=True)
    write_dflash_head(tmp_path / "shared", config, "DeepSpec")
    fits = describe(str(tmp_path / "target"), str(tmp_path / "own"))
    assert fits.misfits == ()
    (reason,) = describe(str(tmp_path / "target"), str(tmp_path / "shared")).misfits
    assert "the head has no embedding, and whether it takes the target's, which is scaled" in reason


# ---- planted errors: each must change logits


def _values_through_the_norm_of_keys(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(torch, "ones_like", lambda like: like)


def _values_rotated(plant: pytest.MonkeyPatch) -> None:
    real = Attend._rotation

    def rotation(self: Attend, rope: Any) -> Any:
        store, rotating = real(self, rope)

        def other(qkv: Tensor, keys: Tensor, values: Tensor, *scales: float) -> Tensor:
            q = store(qkv, keys, values, *scales)
            values.copy_(keys) if keys.shape[2] else None
            return q

        return other, rotating

    plant.setattr(Attend, "_rotation", rotation)


def _own_rope(plant: pytest.MonkeyPatch) -> None:
    real = Attend._rotation
    plant.setattr(
        Attend, "_rotation", lambda self, rope: real(self, None) if rope is None else real(self, rope)
    )
    plant.setattr(gemma4, "inverse_frequencies", lambda rope, width, device: torch.full((width // 2,), 0.1))


def _first_quarter(plant: pytest.MonkeyPatch) -> None:
    """Of a head, and not the first quarter of its pairs."""
    real = gemma4.inverse_frequencies
    plant.setattr(
        gemma4, "inverse_frequencies", lambda rope, width, device: real(rope, width, device)[: width // 8]
    )


def _unscaled(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(gemma4, "root_of", lambda width, dtype: 1.0)


def _window_off_by_one(plant: pytest.MonkeyPatch) -> None:
    real = model_config.layer_windows
    plant.setattr(
        model_config, "layer_windows", lambda config: tuple(each and each + 1 for each in real(config))
    )


def _another_source(plant: pytest.MonkeyPatch) -> None:
    real = Gemma4Config.source
    plant.setattr(
        Gemma4Config,
        "source",
        lambda self, layer: max(real(self, layer) - 1, 0) if layer == 4 else real(self, layer),
    )


def _no_cap(plant: pytest.MonkeyPatch) -> None:
    plant.setattr("specgen.models.llama.Vocabulary.capped", lambda self, cap: self)


def _routed_behind_a_norm(plant: pytest.MonkeyPatch) -> None:
    real = gemma4.Mixture.__call__
    plant.setattr(gemma4.Mixture, "__call__", lambda self, x, routed: real(self, x))


def _swish(plant: pytest.MonkeyPatch) -> None:
    plant.setitem(ACTIVATIONS, "gelu tanh", F.silu)  # type: ignore[misc]


def _no_weights_of_experts(plant: pytest.MonkeyPatch) -> None:
    plant.setattr("specgen.models.mlp.Routing", lambda **fields: Routing(**fields | {"scales": None}))


def _inputs_behind_the_scale(plant: pytest.MonkeyPatch) -> None:
    real = gemma4.LayerInput.__call__
    plant.setattr(gemma4.LayerInput, "__call__", lambda self, x, own: real(self, x, own.roll(1, 0)))


PLANTED: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "values normed as keys": ("31b", _values_through_the_norm_of_keys),
    "values rotated": ("31b", _values_rotated),
    "another rotation": ("31b", _own_rope),
    "first quarter of a head": ("31b", _first_quarter),
    "embedding not scaled": ("31b", _unscaled),
    "window off by one": ("12b", _window_off_by_one),
    "another layer's keys": ("e2b", _another_source),
    "no cap": ("31b", _no_cap),
    "routed behind a weighted norm": ("26b", _routed_behind_a_norm),
    "MLP with swish": ("31b", _swish),
    "MLP and experts with swish": ("26b", _swish),
    "experts weigh as they are": ("26b", _no_weights_of_experts),
    "inputs of another token": ("e2b", _inputs_behind_the_scale),
}


@pytest.mark.parametrize(
    "name", mostly_slow(PLANTED, "values rotated", "window off by one", "another layer's keys")
)
def test_planted_errors_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    size, plant_it = PLANTED[name]
    ids = ids_of(write_gemma4(tmp_path, size))
    right = paged_logits(loaded(tmp_path), ids, SdpaBackend, [len(ids)])
    plant_it(monkeypatch)
    assert (paged_logits(loaded(tmp_path), ids, SdpaBackend, [len(ids)]) - right).abs().max() > 1e-2
