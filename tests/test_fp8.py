"""Targets in FP8: their logits against the formulas of every published layout, planted errors, texts with drafts."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specgen.checkpoints.checkpoint import load_target, open_checkpoint
from specgen.checkpoints.tensor_reader import TensorReader
from specgen.config import SamplingParams, UserError
from specgen.config.bundled import data_directory
from specgen.experiments.divergence import Judge
from specgen.models.llama import Llama
from specgen.ops import fp8
from specgen.ops.weight import Weight
from tests.dense import DenseAttend
from tests.engines import bundled_requests, config_of, generate, load_pair
from tests.marks import mostly_slow
from tests.operations import Operations
from tests.tiny_checkpoints import write_target
from tests.tiny_fp8 import CONFIGS, E4M3, matrix, quantize, reference

CPU = torch.device("cpu")
PROMPTS = torch.randint(0, 128, (4, 8), generator=torch.Generator().manual_seed(3))


def write(path: Path, form: str, **settings: Any) -> Path:
    """A target whose widths are no multiples of a block, with square projections and rows of many magnitudes."""
    write_target(path, **{"num_layers": 2, "hidden_size": 192, "head_dim": 48, "std": 0.08} | settings)
    quantize(path, form, spread=1.0)
    return path


def load(path: Path, dtype: torch.dtype = torch.float32) -> Llama:
    return load_target(open_checkpoint(str(path)), dtype, CPU)


@torch.inference_mode()
def logits(model: Llama) -> Tensor:
    """Of each prompt, [prompts, tokens, V] float32."""
    found = [model.logits(model.forward(ids, DenseAttend(model))[0]) for ids in PROMPTS]
    return torch.stack(found).float()


@torch.inference_mode()
def expected(path: Path, form: str, **how: Any) -> Tensor:
    return reference(path, form, **how)(PROMPTS).logits


def furthest(got: Tensor, right: Tensor) -> Tensor:
    """The largest difference of logits in each prompt, sorted."""
    return (got - right).abs().nan_to_num(1e9).flatten(1).amax(1).sort().values


def agrees(got: Tensor, right: Tensor) -> bool:
    """To 1e-3 but for one prompt: an input half way between two values of e4m3 may be rounded to either."""
    apart = furthest(got, right)
    return bool(apart[-2] < 1e-3 and apart[-1] < 0.2)


@pytest.mark.parametrize("form", CONFIGS)
def test_logits_are_those_of_the_formulas(tmp_path: Path, form: str) -> None:
    path = write(tmp_path, form)
    right = expected(path, form)
    assert right.std() > 0.5
    assert agrees(logits(load(path)), right)


@pytest.mark.parametrize("form", CONFIGS)
def test_with_unrounded_inputs_logits_are_those_of_dequantized_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    def dequantized(tensors: dict[str, Tensor], layer: str, _: str) -> nn.Module:
        wide = matrix(tensors, layer)
        linear = nn.Linear(wide.shape[1], wide.shape[0], bias=False)
        linear.weight.data = wide
        return linear

    path = write(tmp_path, form)
    monkeypatch.setattr(fp8, "rounding", lambda weight: Tensor.float)
    right = expected(path, form, make=dequantized)
    assert furthest(logits(load(path)), right)[-1] < 1e-4


def next_rows_scales(patch: pytest.MonkeyPatch) -> None:
    right = TensorReader._scales
    patch.setattr(
        TensorReader,
        "_scales",
        lambda *args: {name: scale.roll(1, 0) for name, scale in right(*args).items()},
    )


def swapped_scales_of_q_and_k(patch: pytest.MonkeyPatch) -> None:
    right = TensorReader._scales

    def scales(reader: TensorReader, names: list[str], shape: tuple[int, int]) -> dict[str, Tensor]:
        swapped = {"q_proj": "k_proj", "k_proj": "q_proj"}
        pairs = {name: name[:-6] + swapped.get(name[-6:], name[-6:]) for name in names}
        found = right(reader, list(pairs.values()), shape)
        return {name: found[other] for name, other in pairs.items()}

    patch.setattr(TensorReader, "_scales", scales)


def unrounded_inputs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fp8, "through_e4m3", lambda x, scale: (x / scale).clamp(-448, 448) * scale)


def inputs_by_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fp8, "_by_group", fp8._by_token)


# with biases, else a factor of q is as good as one of k; and as many heads of k as of q
QWEN2: dict[str, Any] = {"family": "qwen2", "num_kv_heads": 4, "head_dim": None}
ERRORS = {
    "next-rows-scales": ("dynamic", next_rows_scales),
    "next-rows-scales-of-blocks": ("block", next_rows_scales),
    "swapped-scales-of-q-and-k": ("modelopt", swapped_scales_of_q_and_k),
    "unrounded-static": ("static", unrounded_inputs),
    "unrounded-tokens": ("dynamic", unrounded_inputs),
    "unrounded-groups": ("block", unrounded_inputs),
    "inputs-by-row": ("block", inputs_by_row),
}


@pytest.mark.parametrize(("form", "plant"), ERRORS.values(), ids=ERRORS)
def test_a_planted_error_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, plant: Any
) -> None:
    path = write(tmp_path, form, **QWEN2)
    right = expected(path, form)
    assert agrees(logits(load(path)), right)
    plant(monkeypatch)
    assert furthest(logits(load(path)), right)[0] > 5e-3


def test_transposed_blocks_are_seen(tmp_path: Path) -> None:
    path = write(tmp_path, "block")
    right = expected(path, "block")
    tensors = load_file(path / "model.safetensors")
    square = {name for name, value in tensors.items() if "_scale" in name and value.shape == (2, 2)}
    assert square
    save_file(tensors | {name: tensors[name].mT.contiguous() for name in square}, path / "model.safetensors")
    assert furthest(logits(load(path)), right)[0] > 5e-3
    _alter(path, "model.layers.0.mlp.gate_proj.weight_scale_inv", lambda scale: scale.mT.contiguous())
    with pytest.raises(
        UserError, match=r"weight_scale_inv has shape \[2, 3\], but config.json asks for \[3, 2\]"
    ):
        load(path)


class Casts(Operations):
    """Finds the largest magnitude that is cast to e4m3: before torch 2.13 what is beyond 448 became NaN."""

    largest = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (kwargs or {}).get("dtype") == E4M3:
            self.largest = max(self.largest, float(args[0].abs().max()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("activations", ["static", "token", "group"])
def test_inputs_are_clamped_before_they_are_rounded(activations: Any) -> None:
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(1)) * 10
    x[2], x[3, 7] = 0, 1e30
    weight = Weight(
        data=torch.ones(8, 200).to(E4M3),
        scale=torch.ones(8, 2),
        format="fp8",
        activations=activations,
        input_scale=torch.tensor(0.01) if activations == "static" else None,
    )
    with Casts() as casts:
        got = fp8.rounded(x, weight)
    assert 400 < casts.largest <= 448
    assert got.shape == x.shape
    assert got.isfinite().all()
    assert not got[2].any()
    if activations == "static":
        assert got.max() == pytest.approx(4.48)
    else:
        torch.testing.assert_close(got[:2], x[:2], rtol=2**-4, atol=0.1)


def _alter(path: Path, name: str, change: Any) -> None:
    """Replace a tensor; what ``change`` makes None is removed."""
    tensors = load_file(path / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file({key: value for key, value in tensors.items() if value is not None}, path / "model.safetensors")


@pytest.mark.parametrize("form", mostly_slow(["dynamic", "block"], "block"))
def test_greedy_texts_with_a_drafter_are_those_of_plain_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Identical but for the rounding of inputs, which ``verify`` bounds: it turns 1e-7 into the next value of e4m3."""
    shutil.copytree(data_directory() / "demo", tmp_path, dirs_exist_ok=True)
    quantize(tmp_path / "target", form)
    requests = bundled_requests(4, SamplingParams(max_tokens=24))
    pair = load_pair(tmp_path)
    judge = replace(Judge.of(config_of(pair), pair.models), token_text=str)
    assert judge.fp8
    plain, drafted = (generate(pair, requests, num_spec_tokens=k) for k in (0, 4))
    lengths = [step[1] for steps in drafted.verified.values() for step in steps]
    assert sum(lengths) / len(lengths) > 2
    for request in requests:
        name, prompt = request.id, request.prompt_token_ids
        found = judge.first_divergence(name, prompt, plain.texts[name], drafted.texts[name])
        assert found is None or found.explained

    monkeypatch.setattr(fp8, "rounding", lambda weight: Tensor.float)
    unrounded = load_pair(tmp_path)
    plain, drafted = (generate(unrounded, requests, num_spec_tokens=k) for k in (0, 4))
    assert drafted.texts == plain.texts
