"""Targets against ``transformers``, heads against dense references, kernels bit for bit."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from specgen.checkpoints.checkpoint import load_drafter, load_target, open_checkpoint
from specgen.checkpoints.inspect_checkpoint import describe
from specgen.models.llama import Llama
from specgen.models.model_config import TargetConfig
from specgen.ops.cpu import cpu_ops
from specgen.ops.reference import activate_and_mul, rotate, torch_ops
from specgen.ops.weight import Weight
from tests.dense import DenseAttend
from tests.tiny_checkpoints import change_json, write_head, write_target
from tests.tiny_fp8 import quantize

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Written:
    """A target on disk, loaded here and by ``transformers``."""

    path: Path
    config: TargetConfig
    model: Llama
    reference: Any


def _written(path: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Written:
    import transformers

    config = write_target(path, **settings)
    model = load_target(open_checkpoint(str(path)), dtype, CPU)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager"
    )
    return Written(path=path, config=config, model=model, reference=reference)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return _written(tmp_path_factory.mktemp("target"))


def _ids(config: TargetConfig, rows: int = 40) -> Tensor:
    return torch.randint(0, config.vocab_size, (rows,), generator=torch.Generator().manual_seed(3))


@torch.inference_mode()
def _logits(model: Llama, ids: Tensor) -> Tensor:
    hidden, _ = model.forward(ids, DenseAttend(model))
    return model.logits(hidden)


@pytest.mark.parametrize("kept", ["one file", "shards", "pickle"])
@pytest.mark.parametrize("output", ["own", "copy"])
def test_output_weights_in_the_file_win_over_a_tied_embedding(tmp_path: Path, kept: str, output: str) -> None:
    import transformers

    write_target(tmp_path, num_layers=2, max_shard_size="40KB" if kept == "shards" else "5GB")
    change_json(tmp_path / "config.json", tie_word_embeddings=True)
    file = max(tmp_path.glob("*.safetensors"))
    if output == "copy":
        stored = {name: x for each in tmp_path.glob("*.safetensors") for name, x in load_file(each).items()}
        save_file(load_file(file) | {"lm_head.weight": stored["model.embed_tokens.weight"]}, file)
    if kept == "pickle":
        torch.save(load_file(file), tmp_path / "pytorch_model.bin")
        file.unlink()
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    model = load_target(open_checkpoint(str(tmp_path)), torch.float32, CPU)
    assert model.config.tied_embeddings == (output == "copy")
    assert ("tied to" in describe(str(tmp_path)).to_text()) == model.config.tied_embeddings
    ids = _ids(model.config, 60)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    torch.testing.assert_close(_logits(model, ids), expected, atol=1e-4, rtol=0)


def test_output_weights_in_fp8_win_over_a_tied_embedding(tmp_path: Path) -> None:
    write_target(tmp_path, num_layers=2)
    quantize(tmp_path, "modelopt", spread=1.0, output_layer=True)
    found = []
    for tied in (False, True):
        change_json(tmp_path / "config.json", tie_word_embeddings=tied)
        model = load_target(open_checkpoint(str(tmp_path)), torch.float32, CPU)
        found.append(_logits(model, _ids(model.config)))
    assert torch.equal(*found)


def test_reference_kernels_give_the_same_logits(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.checkpoints.checkpoint.bind_ops", lambda *_: torch_ops())
    plain = load_target(open_checkpoint(str(written.path)), torch.float32, CPU)
    ids = _ids(written.config)
    torch.testing.assert_close(_logits(plain, ids), _logits(written.model, ids), atol=1e-5, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("aux_layers", [(2, 3, 5), (5, 0, 2), (1,), (3, 3, 4)], ids=str)
def test_features_are_layer_inputs_in_the_requested_order(
    written: Written, aux_layers: tuple[int, ...]
) -> None:
    ids = _ids(written.config)
    states = written.reference(ids[None], output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer][0] for layer in aux_layers], -1)
    _, features = written.model.forward(ids, DenseAttend(written.model), aux_layers)
    torch.testing.assert_close(features, expected, atol=2e-4, rtol=0)
    off_by_one = torch.cat([states[max(layer - 1, 0)][0] for layer in aux_layers], -1)
    assert (features - off_by_one).abs().max() > 0.1 or aux_layers == (0,)


@torch.inference_mode()
def test_the_last_layers_output_is_a_feature_before_the_final_norm(written: Written) -> None:
    ids, last = _ids(written.config), written.config.num_layers
    hidden, features = written.model.forward(ids, DenseAttend(written.model), (last,))
    normed = written.reference(ids[None], output_hidden_states=True).hidden_states[last][0]
    torch.testing.assert_close(hidden, normed, atol=1e-4, rtol=0)
    torch.testing.assert_close(written.reference.model.norm(features), normed, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_a_pass_keeps_only_the_streams_of_aux_layers(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All streams together would need as much memory as two KV caches."""
    kind = type(written.model.norms[-1])
    add, made, alive = kind.add, list[Any](), list[int]()

    def counted(self: Any, stream: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
        total, normed = add(self, stream, parts)
        made.append(ref(total))
        alive.append(sum(each() is not None for each in made))
        return total, normed

    monkeypatch.setattr(kind, "add", counted)
    ids = _ids(written.config)
    for aux_layers in ((), (1, 3), (0, 2, 4)):
        made.clear()
        alive.clear()
        written.model.forward(ids, DenseAttend(written.model), aux_layers)
        assert max(alive) <= len(aux_layers) + 2, "those, the one before and the newest"


def test_no_aux_layers_give_empty_features(written: Written) -> None:
    ids = _ids(written.config)
    hidden, features = written.model.forward(ids, DenseAttend(written.model))
    assert features.shape == (len(ids), 0)
    assert written.model.logits(hidden[:0]).shape == (0, written.config.vocab_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_half_precision_rounds_where_transformers_rounds(
    tmp_path: Path, dtype: torch.dtype, family: str
) -> None:
    written = _written(tmp_path, dtype, family=family)
    ids = _ids(written.config)
    with torch.inference_mode():
        expected = written.reference(ids[None]).logits[0].float()
    got = _logits(written.model, ids)
    assert got.dtype == dtype
    assert ((got - expected).abs() > 1e-5).float().mean() < 0.01, "different rounding changes most logits"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_reference_kernels_equal_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    torch.manual_seed(0)
    ops, x, weight = torch_ops(), torch.randn(9, 64).to(dtype) * 3, torch.randn(64).to(dtype)
    norm = LlamaRMSNorm(64, eps=1e-5)
    norm.weight.data = weight
    assert torch.equal(ops.rms_norm(weight, 1e-5)(x), norm(x))
    assert torch.equal(activate_and_mul("swish", x), F.silu(x[:, :32]) * x[:, 32:])
    heads, half = x.view(9, 4, 16), torch.randn(9, 8)
    cos, sin = (torch.cat((f, f), -1).to(dtype) for f in (half.cos(), half.sin()))
    expected, _ = apply_rotary_pos_emb(heads, heads, cos, sin, unsqueeze_dim=1)
    signed = torch.cat((-sin[:, :8], sin[:, 8:]), -1)
    assert torch.equal(rotate(heads, cos[:, None], signed[:, None]), expected)


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 33])
def test_cpu_kernels_equal_the_reference(
    rows: int, by_columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specgen.ops.cpu._has_fast_mkl", lambda: by_columns)
    monkeypatch.setattr("specgen.ops.cpu._LARGEST_BY_COLUMNS", 100_000)
    torch.manual_seed(0)
    fast, plain = cpu_ops(torch.float32), torch_ops()
    x = torch.randn(rows, 64)
    for shape in ((48, 64), (64, 64), (1100, 64), (9000, 64)):
        matrix = Weight(data=torch.randn(shape), bias=torch.randn(shape[0]))
        torch.testing.assert_close(fast.linear(matrix)(x), plain.linear(matrix)(x), rtol=1e-5, atol=1e-5)
        gated, expected = fast.gated_linear(matrix)(x), plain.gated_linear(matrix)(x)
        torch.testing.assert_close(gated, expected, rtol=1e-4, atol=1e-4)
    x, weight = x * torch.logspace(-6, 3, rows)[:, None], torch.randn(64)  # also rows where eps matters
    torch.testing.assert_close(fast.rms_norm(weight, 1e-5)(x), plain.rms_norm(weight, 1e-5)(x))
    delta = torch.randn(1, rows, 64)
    sums, expected = (ops.rms_norm(weight, 1e-5).add(x, delta) for ops in (fast, plain))
    torch.testing.assert_close(sums, expected)
    assert torch.equal(sums[0], x + delta[0])
    by_head = torch.randn(4, 16)
    heads = x.view(rows, 4, 16)
    torch.testing.assert_close(fast.rms_norm(by_head, 1e-6)(heads), plain.rms_norm(by_head, 1e-6)(heads))
    some, whole = (fast.rms_norm(weight, 1e-6)(heads) for weight in (by_head[:3], by_head))
    assert torch.equal(some[:, :3], whole[:, :3])
    assert torch.equal(some[:, 3:], heads[:, 3:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cpu_kernels_of_other_dtypes_round_as_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for rows in (1, 5, 33):
        x, bias = torch.randn(rows, 64).to(dtype), torch.randn(48).to(dtype)
        weight = Weight(data=torch.randn(48, 64).to(dtype), bias=bias)
        exact = x.double() @ weight.data.double().T + bias.double()
        for got in (cpu_ops(dtype).linear(weight)(x), cpu_ops(dtype).linear_parts(weight)(x)[0]):
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_is_the_first_of_equals_and_nan_before_all(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 3, 2, 3], [1, 5, math.nan, 7], [-math.inf, -math.inf, -1, -2]]).to(dtype)
    index, value = cpu_ops(dtype).largest(x)
    assert index.tolist() == [1, 2, 2]
    assert value.dtype == dtype
    assert not value[1].isfinite()


def test_joined_weights_are_concatenated_and_a_single_one_is_not_copied() -> None:
    q, k = Weight(data=torch.randn(6, 4)), Weight(data=torch.randn(2, 4).bfloat16())
    assert Weight.joined([q]) is q
    joined = Weight.joined([q, k])
    assert torch.equal(joined.matrix, torch.cat((q.data, k.data)))
    assert (q.num_bytes, k.num_bytes) == (6 * 4 * 4, 2 * 4 * 2)


def test_kernels_refuse_unknown_weight_formats() -> None:
    unknown: Any = {"data": torch.zeros(2, 2), "scale": torch.ones(2), "format": "int8"}
    weight = Weight(**unknown)
    assert weight.num_bytes == 4 * 4 + 2 * 4
    bundles, names = (torch_ops(), cpu_ops(torch.float32)), ("linear", "linear_parts", "gated_linear")
    prepared = [getattr(ops, name) for ops in bundles for name in names]
    for prepare in (*prepared, lambda weight: Weight.joined([weight, weight])):
        with pytest.raises(AssertionError, match="int8"):
            prepare(weight)


@torch.inference_mode()
def test_tensor_names_with_model_prefix_are_the_same_head(tmp_path: Path, written: Written) -> None:
    write_head(tmp_path / "plain", written.config, fc_norm=True, own_embedding=True)
    plain = open_checkpoint(str(tmp_path / "plain"))
    apart = ("lm_head.weight", "d2t", "t2d")
    moved = {f"model.{name}": plain.read(name) for name in plain.tensors if name not in apart}
    gone = dict.fromkeys(name for name in plain.tensors if name not in apart)
    write_head(tmp_path / "moved", written.config, fc_norm=True, own_embedding=True, changed=gone | moved)
    heads = [
        load_drafter(open_checkpoint(str(tmp_path / name)), written.model) for name in ("plain", "moved")
    ]
    features = torch.randn(4, 3 * written.config.hidden_size)
    assert torch.equal(heads[0].fuse(features), heads[1].fuse(features))
    assert torch.equal(heads[0].embedding, heads[1].embedding)
