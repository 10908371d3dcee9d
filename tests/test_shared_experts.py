"""A shared expert is one more of a mixture's experts, or runs beside them: the same numbers, and what is counted."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specgen.attention.sdpa import SdpaBackend
from specgen.checkpoints.checkpoint import load_target, open_checkpoint
from specgen.models import mlp
from specgen.models.llama import Llama
from specgen.models.mlp import Mixture
from specgen.ops import measured_choices
from specgen.ops.experts import choice
from specgen.ops.weight import OUTPUTS, Weight
from tests.families import ids_of, loaded, paged_logits, right_logits
from tests.marks import mostly_slow
from tests.test_families import MIXTURE
from tests.tiny_checkpoints import change_tensors
from tests.tiny_fp8 import quantize
from tests.tiny_hybrids import write_hybrid
from tests.tiny_latents import write_latent
from tests.tiny_llama4 import write_llama4
from tests.tiny_mixtures import in_one_tensor, write_qwen3_moe

CPU = torch.device("cpu")
Write = Callable[[Path], object]
NEXT = "Qwen3NextForCausalLM"


def in_fp8(path: Path, write: Write, form: str) -> None:
    write(path)
    quantize(path, form, spread=1.0)


def in_one(path: Path) -> None:
    write_hybrid(path, MIXTURE)
    in_one_tensor(path)


def shared_alone_plain(path: Path) -> None:
    """Experts in FP8, and the shared one as it was."""
    write_hybrid(path, NEXT, std=0.08)
    plain = {
        name: x for name, x in load_file(path / "model.safetensors").items() if ".shared_expert." in name
    }
    quantize(path, "dynamic")
    scales = (name for name in load_file(path / "model.safetensors") if ".shared_expert." in name)
    change_tensors(path, dict.fromkeys(name for name in scales if "scale" in name) | plain)


def gate_in_fp8(path: Path) -> None:
    write_hybrid(path, NEXT, std=0.08)
    quantize(path, "dynamic")
    gates = {}
    for name, x in load_file(path / "model.safetensors").items():
        if name.endswith("shared_expert_gate.weight"):
            scale = x.abs().amax(1, keepdim=True) / 448
            gates |= {name: (x / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale.bfloat16()}
    change_tensors(path, gates)


def mixtures(model: Llama) -> list[Mixture]:
    return [block.mlp for block in model.blocks if isinstance(block.mlp, Mixture)]


# how many experts more there are, by checkpoint
FOLDED: dict[str, tuple[Write, int]] = {
    "qwen3-next": (partial(write_hybrid, architecture=NEXT), 1),
    "qwen3.5-moe": (partial(write_hybrid, architecture=MIXTURE), 1),
    "experts in one tensor": (in_one, 1),
    "two": (partial(write_hybrid, architecture=NEXT, shared_expert_intermediate_size=64), 2),
    "glm": (write_latent, 1),
    "glm with two": (partial(write_latent, n_shared_experts=2), 2),
    "deepseek": (partial(write_latent, family="deepseek"), 1),
    **{
        form: (partial(in_fp8, write=partial(write_hybrid, architecture=NEXT, std=0.08), form=form), 1)
        for form in ("block", "dynamic", "modelopt")
    },
    "glm in blocks": (partial(in_fp8, write=partial(write_latent, std=0.08), form="block"), 1),
    "gate in FP8": (gate_in_fp8, 1),
    "none": (write_qwen3_moe, 0),
}
BESIDE: dict[str, Write] = {
    "other width": partial(write_hybrid, architecture=NEXT, shared_expert_intermediate_size=24),
    "other format": shared_alone_plain,
    # parts of a row would have scales of their own
    "two in FP8": partial(in_fp8, write=partial(write_latent, n_shared_experts=2, std=0.08), form="dynamic"),
    "weighed inputs": write_llama4,
}


@torch.inference_mode()
@pytest.mark.parametrize("name", FOLDED)
def test_a_shared_expert_is_one_more_that_all_rows_choose(tmp_path: Path, name: str) -> None:
    write, count = FOLDED[name]
    write(tmp_path)
    model = loaded(tmp_path)
    config = model.config.mixture
    x, every = torch.randn(9, model.config.hidden_size), range(config.num_experts, config.num_experts + count)
    for mixture in mixtures(model):
        assert mixture.beside is None
        ids, weights = mixture.choice(mixture.router(x))
        assert ids.shape == weights.shape == (9, config.num_chosen + count)
        assert ids[:, : config.num_chosen].max() < config.num_experts
        assert ids[:, config.num_chosen :].tolist() == [[*every]] * 9


@torch.inference_mode()
@pytest.mark.parametrize("name", mostly_slow(FOLDED, "qwen3-next", "two", "glm", "block", "modelopt"))
def test_that_gives_the_numbers_of_one_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    FOLDED[name][0](tmp_path)
    model = loaded(tmp_path)
    monkeypatch.setattr(mlp, "_alike", lambda *args: False)
    apart = loaded(tmp_path)
    for mine, theirs in zip(mixtures(model), mixtures(apart), strict=True):
        x = torch.randn(40, model.config.hidden_size)
        assert (theirs.beside is None) == (name == "none")
        parts, right = mine(x), theirs(x)
        routed, same = (each.choice(each.router(x))[0][:, : each.num_chosen] for each in (mine, theirs))
        assert torch.equal(routed, same)
        whole, expected = (torch.cat(each).sum(0) for each in (parts, right))
        torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("name", BESIDE)
def test_what_is_not_like_the_experts_runs_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    BESIDE[name](tmp_path)
    model = loaded(tmp_path)
    for mixture in mixtures(model):
        assert mixture.beside is not None
        _, weights = mixture.choice(mixture.router(torch.randn(5, model.config.hidden_size)))
        gated = model.config.mixture.shared_gate
        assert weights.shape[1] == model.config.mixture.num_chosen + gated


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gate_counts_as_in_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    """Its logit and the sigmoid of it are rounded; what is behind the gate's row in the matrix is not read."""
    write_hybrid(tmp_path, MIXTURE)
    model = load_target(open_checkpoint(str(tmp_path)), dtype, CPU)
    tensors, x = load_file(tmp_path / "model.safetensors"), torch.randn(33, 64).to(dtype)
    assert isinstance(model, Llama)
    for layer, mixture in enumerate(mixtures(model)):
        gate = tensors[f"model.layers.{layer}.mlp.shared_expert_gate.weight"].to(dtype)
        parts = mixture.router(x)
        assert parts.shape == (1, 33, 32)
        assert not parts[..., 7:].any()
        weights = mixture.choice(parts)[1][:, 2:]
        # of a GEMM of other widths
        torch.testing.assert_close(
            weights, torch.sigmoid(x @ gate.T), rtol=0, atol=1e-6 if dtype.itemsize > 2 else 4e-3
        )
        parts[..., 7:] = torch.inf
        assert torch.equal(mixture.choice(parts)[1][:, 2:], weights)


def _not_counted(real: Any) -> Any:
    return lambda routing: (
        lambda parts: (
            (found := real(routing)(parts))[0],
            torch.cat((found[1][:, :-1], torch.ones_like(found[1][:, -1:])), 1),
        )
    )


def _of_another_row(real: Any) -> Any:
    return lambda routing: (
        lambda parts: (
            (found := real(routing)(parts))[0],
            torch.cat((found[1][:, :-1], found[1][:, -1:].roll(1, 0)), 1),
        )
    )


def _not_chosen(real: Any) -> Any:
    return lambda routing: real(replace(routing, num_shared=0))


def _an_expert_before(real: Any) -> Any:
    return lambda routing: (
        lambda parts: (
            (found := real(routing)(parts))[0] - (found[0] >= routing.num_experts).long(),
            found[1],
        )
    )


@torch.inference_mode()
@pytest.mark.parametrize("plant", [_not_counted, _of_another_row, _not_chosen, _an_expert_before])
def test_planted_errors_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Any], Any]
) -> None:
    ids = ids_of(write_hybrid(tmp_path, NEXT))
    expected = right_logits(tmp_path, ids)
    planted = plant(choice)
    monkeypatch.setattr("specgen.ops.reference.choice", planted)
    got = paged_logits(loaded(tmp_path), ids, SdpaBackend, [len(ids)])
    assert (got - expected).abs().max() > 1e-2


def test_experts_are_held_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hybrid(tmp_path, MIXTURE)
    real, parts = Weight.stacked, list[weakref.ref[Tensor]]()

    def stacked(weights: Sequence[Weight]) -> Weight:
        parts.extend(weakref.ref(each.data) for each in weights)
        alive = [part for part in parts if part() is not None]
        assert len(alive) <= 4, "of a layer, the two matrices of its experts and of its shared one"
        return real(weights)

    monkeypatch.setattr(Weight, "stacked", stacked)
    model = loaded(tmp_path)
    assert len(parts) == 4 * len(mixtures(model))
    assert all(part() is None for part in parts)


def test_the_gate_of_published_routers_goes_through_the_tiles_of_routers() -> None:
    for num_experts, hidden in ((256, 2048), (512, 2048), (512, 4096)):
        num_out = -(-(num_experts + 1) // OUTPUTS) * OUTPUTS
        assert num_out <= measured_choices.FEW_OUTPUTS
        for rows in (1, 16, 17, 64, 1024):
            fitting = (tile for tile in measured_choices.LINEAR_FEW_OUTPUTS if tile.fits(num_out, hidden))
            assert any(rows <= tile.most_rows for tile in fitting), (num_out, rows)
    assert all(OUTPUTS % tile.block_out == 0 for tile in measured_choices.LINEAR_FEW_OUTPUTS)
