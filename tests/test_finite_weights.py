"""Weights that are no numbers are found while they are read, by file and tensor, in every format."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specgen.checkpoints.checkpoint import load_drafter, load_target, open_checkpoint
from specgen.checkpoints.tensor_reader import is_finite
from specgen.config import UserError
from specgen.device import SINGLE_RANK, Ranks
from tests.commands import printed, refused, specgen
from tests.tiny_checkpoints import write_head, write_target
from tests.tiny_fp8 import quantize
from tests.tiny_mixtures import in_one_tensor, packed_in_mxfp4, write_gpt_oss, write_qwen3_moe
from tests.tiny_tokenizers import write_byte_level

CPU = torch.device("cpu")


def in_fp8(path: Path) -> None:
    write_target(path, num_layers=2)
    quantize(path, "modelopt", spread=1.0)


def in_mxfp4(path: Path) -> None:
    write_gpt_oss(path)
    packed_in_mxfp4(path)


def experts_in_one_tensor(path: Path) -> None:
    write_qwen3_moe(path)
    in_one_tensor(path)


small = partial(write_target, num_layers=2)
sharded = partial(write_target, num_layers=2, max_shard_size="40KB")
nan, inf = torch.nan, torch.inf
# what is written, the tensor, and a number of it as it is stored
DAMAGED: dict[str, tuple[Callable[[Path], object], str, float | int]] = {
    "embedding": (small, "model.embed_tokens.weight", nan),
    "matrix": (small, "model.layers.1.mlp.down_proj.weight", inf),
    "norm": (small, "model.norm.weight", nan),
    "output layer": (small, "lm_head.weight", -inf),
    "bias": (partial(small, biases=True), "model.layers.0.self_attn.q_proj.bias", nan),
    "shard": (sharded, "model.layers.1.self_attn.v_proj.weight", nan),
    "expert": (write_qwen3_moe, "model.layers.0.mlp.experts.1.up_proj.weight", nan),
    "router": (write_qwen3_moe, "model.layers.0.mlp.gate.weight", inf),
    "experts": (experts_in_one_tensor, "model.layers.0.mlp.experts.down_proj", nan),
    "fp8": (in_fp8, "model.layers.0.self_attn.k_proj.weight", 0x7F),
    "fp8, negative": (in_fp8, "model.layers.1.mlp.gate_proj.weight", 0xFF),
    "sinks": (write_gpt_oss, "model.layers.0.self_attn.sinks", nan),
    "mxfp4": (in_mxfp4, "model.layers.0.mlp.experts.down_proj_scales", 0xFF),
}


def damage(path: Path, name: str, value: float | int) -> Path:
    """Put ``value``, of fewer bits as they are stored, in the last place of the tensor; returns its file."""
    (file,) = (each for each in path.glob("*.safetensors") if name in load_file(each))
    stored = load_file(file)
    flat = stored[name].flatten()
    (flat.view(torch.uint8) if isinstance(value, int) else flat)[-1] = value
    stored[name] = flat.view(stored[name].shape)
    save_file(stored, file)
    return file


def load(path: Path, dtype: torch.dtype = torch.float32, ranks: Ranks = SINGLE_RANK) -> None:
    load_target(open_checkpoint(str(path)), dtype, CPU, ranks)


@pytest.mark.parametrize("case", DAMAGED)
def test_a_tensor_that_is_no_number_is_named_with_its_file(tmp_path: Path, case: str) -> None:
    write, name, value = DAMAGED[case]
    write(tmp_path)
    load(tmp_path)
    file = damage(tmp_path, name, value)
    with pytest.raises(UserError) as caught:
        load(tmp_path)
    assert str(caught.value).startswith(f"{file}: {name} holds NaN or Inf: download it again")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("at", [0, 77, -1])
def test_one_number_of_any_dtype_is_found(dtype: torch.dtype, value: float, at: int) -> None:
    tensor = torch.full((40, 300), torch.finfo(dtype).max, dtype=dtype)
    tensor[:, 0] = torch.finfo(dtype).min
    assert is_finite(tensor)
    tensor.view(-1)[at] = value
    assert not is_finite(tensor)
    assert not is_finite(tensor.T)


def test_all_patterns_of_fp8() -> None:
    patterns = torch.arange(256, dtype=torch.uint8)
    found = [
        byte for byte in range(256) if not is_finite(patterns[byte : byte + 1].view(torch.float8_e4m3fn))
    ]
    assert found == [0x7F, 0xFF]
    assert found == patterns[patterns.view(torch.float8_e4m3fn).float().isnan()].tolist()
    assert is_finite(torch.empty(0))


def test_numbers_too_large_for_the_dtype_are_not_the_files_fault(tmp_path: Path) -> None:
    small(tmp_path)
    file = damage(tmp_path, "model.norm.weight", 1e5)
    load(tmp_path, torch.bfloat16)
    with pytest.raises(UserError) as caught:
        load(tmp_path, torch.float16)
    reason = "model.norm.weight holds numbers too large for torch.float16: use --dtype bfloat16 or float32"
    assert str(caught.value) == f"{file}: {reason}"


@pytest.mark.parametrize(
    ("byte", "dtype"), [(253, torch.float32), (253, torch.bfloat16), (141, torch.float16)]
)
def test_scales_of_mxfp4_that_the_dtype_cannot_hold(tmp_path: Path, byte: int, dtype: torch.dtype) -> None:
    """6 x 2^125 and 6 x 2^13 are the largest numbers that it can."""
    in_mxfp4(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    damage(tmp_path, name, byte - 1)
    load(tmp_path, dtype)
    file = damage(tmp_path, name, byte)
    with refused(rf"^{file}: {name} holds scales too large for {dtype}: use --dtype bfloat16"):
        load(tmp_path, dtype)


def test_a_rank_looks_at_what_it_reads(tmp_path: Path) -> None:
    small(tmp_path)
    damage(tmp_path, "model.layers.0.mlp.up_proj.weight", nan)
    load(tmp_path, ranks=Ranks(rank=0, size=2))
    with refused(r"up_proj\.weight holds NaN"):
        load(tmp_path, ranks=Ranks(rank=1, size=2))


@pytest.mark.parametrize("name", ["fc.weight", "lm_head.weight", "midlayer.hidden_norm.weight"])
def test_a_head_too(tmp_path: Path, name: str) -> None:
    write_head(tmp_path / "head", write_target(tmp_path / "target", num_layers=6))
    target = load_target(open_checkpoint(str(tmp_path / "target")), torch.float32, CPU)
    file = damage(tmp_path / "head", name, nan)
    with refused(rf"^{file}: {name} holds NaN or Inf"):
        load_drafter(open_checkpoint(str(tmp_path / "head")), target)


def test_a_command_ends_before_its_first_row_and_inspect_says_what_it_does_not_see(tmp_path: Path) -> None:
    write_head(tmp_path / "head", write_target(tmp_path / "target", vocab_size=320))
    write_byte_level(tmp_path / "target")
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompt": "Tom"}) + "\n")
    damage(tmp_path / "target", "lm_head.weight", nan)
    names = ["--model", str(tmp_path / "target"), "--drafter", str(tmp_path / "head")]
    ended = specgen("generate", *names, "--dataset", str(tmp_path / "own.jsonl"), "--device", "cpu")
    assert isinstance(ended.exception, UserError)
    assert "lm_head.weight holds NaN or Inf" in str(ended.exception)
    shown = printed("inspect", str(tmp_path / "target"), str(tmp_path / "head"))
    assert "NaN in weights is not looked for here, but when they are loaded." in shown
