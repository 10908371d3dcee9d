"""Experts in FP8: Qwen3-MoE in the published layouts against the formulas, planted errors, bytes, refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specgen.checkpoints.checkpoint import build_target, open_checkpoint, target_config
from specgen.checkpoints.tensor_reader import TensorReader
from specgen.config import SamplingParams, UserError
from specgen.models.expert_counts import ExpertSize
from specgen.ops import fp8
from specgen.ops.experts import Experts, Gating, grouped_experts
from specgen.ops.fp8 import dequantised, rounded
from specgen.ops.weight import Weight
from tests.engines import generate, load_pair, random_requests
from tests.test_fp8 import agrees, expected, furthest, load, logits, next_rows_scales, unrounded_inputs
from tests.tiny_checkpoints import write_head
from tests.tiny_fp8 import E4M3, quantize
from tests.tiny_mixtures import read, write_qwen3_moe

FORMS = ("dynamic", "block", "compressed-block", "static", "modelopt", "autofp8")
WIDTHS: dict[str, int] = {"hidden_size": 192, "moe_intermediate_size": 160, "head_dim": 48}  # no whole blocks


def write(path: Path, form: str, **changes: Any) -> Path:
    write_qwen3_moe(path, **{"num_hidden_layers": 2, **WIDTHS} | changes)
    quantize(path, form, spread=1.0)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_formulas(tmp_path: Path, form: str) -> None:
    path = write(tmp_path, form)
    right = expected(path, form)
    assert right.std() > 0.5
    assert agrees(logits(load(path)), right)


def swapped_gate_and_up(patch: pytest.MonkeyPatch) -> None:
    right = TensorReader._scales

    def scales(reader: TensorReader, names: list[str], shape: tuple[int, int]) -> dict[str, Tensor]:
        found = list(right(reader, names, shape).values())
        if "gate_proj" in names[0] and len(names) > 2:
            found[::2], found[1::2] = found[1::2], found[::2]
        return dict(zip(names, found, strict=True))

    patch.setattr(TensorReader, "_scales", scales)


def next_experts_scales(patch: pytest.MonkeyPatch) -> None:
    right = TensorReader._scales

    def scales(reader: TensorReader, names: list[str], shape: tuple[int, int]) -> dict[str, Tensor]:
        found = list(right(reader, names, shape).values())
        return dict(zip(names, [*found[1:], found[0]], strict=True))

    patch.setattr(TensorReader, "_scales", scales)


def unrounded_in_experts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("specgen.ops.experts.rounding", lambda weight: Tensor.float)


ERRORS = {
    "next-rows-scales": next_rows_scales,
    "next-experts-scales": next_experts_scales,
    "swapped-gate-and-up": swapped_gate_and_up,
    "unrounded": unrounded_inputs,
    "unrounded-in-experts": unrounded_in_experts,
}


def test_planted_errors_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "block")
    right = expected(path, "block")
    for name, plant in ERRORS.items():
        with monkeypatch.context() as patch:
            plant(patch)
            assert furthest(logits(load(path)), right)[0] > 5e-3, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activations", ["token", "group"])
def test_gemms_of_experts_are_rounded_once(activations: Any, dtype: torch.dtype) -> None:
    noise = torch.Generator().manual_seed(1)

    def stacked(out: int, width: int) -> Weight:
        columns = -(-width // 128) if activations == "group" else 1
        return Weight(
            data=torch.randn(4, out, width, generator=noise).to(E4M3),
            scale=torch.rand(4, out, columns, generator=noise) * 0.2 + 0.05,
            format="fp8",
            activations=activations,
        )

    experts = Experts(gate_up=stacked(2 * 160, 192), down=stacked(192, 160), gating=Gating())
    x = torch.randn(9, 192, generator=noise).to(dtype)
    ids = torch.stack([torch.randperm(4, generator=noise)[:2] for _ in x])
    weights = torch.rand(9, 2, generator=noise).to(dtype)
    got = grouped_experts(experts)(x, ids, weights)[0]
    assert got.dtype == dtype

    def gemm(row: Tensor, weight: Weight, expert: int) -> Tensor:
        return (rounded(row, weight).double() @ dequantised(weight)[expert].double().T).to(dtype)

    for row, chosen, scores, out in zip(x, ids.tolist(), weights, got, strict=True):
        halves = [gemm(row[None], experts.gate_up, e).chunk(2, -1) for e in chosen]
        each = [gemm(Gating()(*half), experts.down, e) for half, e in zip(halves, chosen, strict=True)]
        right = (torch.cat(each) * scores[:, None]).sum(0)
        torch.testing.assert_close(
            out, right, atol=1e-3 * float(right.abs().max()), rtol=2 * torch.finfo(dtype).eps
        )


@pytest.mark.parametrize("form", ["dynamic", "block"])
def test_bytes_of_experts_are_those_of_their_tensors(tmp_path: Path, form: str) -> None:
    checkpoint = open_checkpoint(str(write(tmp_path, form)))
    config = target_config(checkpoint)
    reader = TensorReader(checkpoint=checkpoint, dtype=torch.bfloat16, device=torch.device("meta"))
    build_target(config, reader)
    size = ExpertSize.of(config, 2)
    assert size is not None
    assert size.total_bytes == sum(count for name, count in reader.taken.items() if ".experts." in name)
    assert config.fp8 is not None
    plain = ExpertSize.of(replace(config, fp8=replace(config.fp8, ignored=("re:.*mlp.experts.*",))), 2)
    assert plain is not None
    assert plain.num_bytes == 2 * 3 * 192 * 160


def test_gate_and_up_of_an_expert_have_one_input_scale(tmp_path: Path) -> None:
    tensors = load_file(write(tmp_path, "modelopt") / "model.safetensors")
    tensors["model.layers.1.mlp.experts.3.up_proj.input_scale"] *= 2
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"1.mlp.experts.3.gate_proj, .*3.up_proj have the same inputs, but diff"
    ):
        load(tmp_path)


def test_greedy_texts_with_a_drafter_are_those_of_plain_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With inputs as they are; see the dense targets for what rounding them does."""
    write(tmp_path / "target", "block", eos_token_id=0)
    write_head(tmp_path / "drafter", read(tmp_path / "target"), aux_layer_ids=[0, 1, 2], qk_norm=True)
    monkeypatch.setattr(fp8, "rounding", lambda weight: Tensor.float)
    unrounded_in_experts(monkeypatch)
    pair, requests = load_pair(tmp_path), random_requests(6, 128, SamplingParams(max_tokens=16))
    plain, drafted = (generate(pair, requests, num_spec_tokens=k) for k in (0, 3))
    assert drafted.texts == plain.texts
