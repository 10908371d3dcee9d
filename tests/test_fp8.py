"""Targets in FP8: read in every published layout, their logits against the formats' formulas, planted errors, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specgen.checkpoints.checkpoint import load_target, open_checkpoint
from specgen.checkpoints.tensor_reader import TensorReader
from specgen.config import UserError
from specgen.models.llama import Llama
from specgen.ops import fp8
from tests.dense import DenseAttend
from tests.tiny_checkpoints import write_target
from tests.tiny_fp8 import CONFIGS, E4M3, matrix, quantize, reference

CPU = torch.device("cpu")
PROMPTS = torch.randint(0, 128, (4, 8), generator=torch.Generator().manual_seed(3))


def write(path: Path, form: str, **settings: Any) -> Path:
    """A target whose widths are no multiples of a block, with square projections and rows of many magnitudes."""
    write_target(path, num_layers=2, hidden_size=192, head_dim=48, std=0.08, **settings)
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
