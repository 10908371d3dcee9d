"""Calibrated mixtures have the known text in ``transformers``, and tokens choose their experts as asked."""

import json
import sys
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated_codes import Codes
from calibrated_cycle import Cycle
from calibrated_mixtures import common_share
from calibrated_shapes import MIXTURES
from calibrated_weights import RESIDUAL, Source, target_tensors
from make_calibrated_pair import HeadKind, chosen_cycle, chosen_layer, chosen_shape, main, write_pair
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from specgen.config import SamplingParams
from specgen.core.sequence import Request
from tests.engines import generate, load_pair
from tests.marks import mostly_slow
from tests.reference_heads import DenseTarget, reference_head
from tests.test_calibrated_pair import check_drafts

pytestmark = pytest.mark.scripts

TINY = {"tiny-gpt-oss": "mxfp4", "tiny-qwen3-moe": "bf16", "tiny-glm": "bf16", "tiny-qwen3.5-moe": "bf16"}
K = 4
PAIRS = [*TINY.items(), ("tiny-gpt-oss", "bf16")]


@dataclass(frozen=True, kw_only=True)
class Written:
    """A pair on disk."""

    path: Path
    cycle: Cycle
    shape: Any

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            self.path / "target", dtype=dtype, attn_implementation="eager"
        )


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def written(name: str, overlap: float, experts: str | None = None) -> Written:
        path = tmp_path_factory.mktemp("mixture")
        shape = chosen_shape(name, None, experts)
        cycle = chosen_cycle(shape, 0.75, 3)
        heads = [HeadKind.find("eagle3"), HeadKind.find("peagle-2")]
        write_pair(path, shape, cycle, Source("cpu", 3), heads, chosen_layer(shape, overlap))
        return Written(path=path, cycle=cycle, shape=shape)

    return written


@torch.no_grad()
def choices_of(model: Any, text: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """The argmax successor of each token [n], and the experts that it chooses in every layer, [n, k] each."""
    chosen: list[Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith((".gate", ".router"))]
    handles = [
        router.register_forward_hook(lambda _module, _inputs, outputs: chosen.append(outputs[2]))
        for router in routers
    ]
    logits = model(torch.tensor([text])).logits[0]
    for handle in handles:
        handle.remove()
    return logits.argmax(-1), chosen


def in_common(chosen: Tensor, num_experts: int, distance: int) -> Tensor:
    """The share of each token's experts that the token ``distance`` places further chooses too."""
    marks = torch.zeros(len(chosen), num_experts).scatter_(1, chosen, 1.0)
    return (marks[:-distance] * marks[distance:]).sum(1) / chosen.shape[1]


@pytest.mark.parametrize(
    ("name", "experts", "dtype"),
    mostly_slow(
        ((*pair, dtype) for pair in PAIRS for dtype in (torch.float32, torch.bfloat16)),
        ("tiny-gpt-oss", "mxfp4", torch.float32),
    ),
)
def test_transformers_generates_the_known_text(write, name: str, experts: str, dtype: torch.dtype) -> None:
    pair = write(name, 0.5, experts if "gpt" in name else None)
    greedy, _ = choices_of(pair.model(dtype), pair.cycle.tokens)
    assert greedy.tolist() == list(pair.cycle.succ.values())


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", TINY)
def test_tokens_of_a_passage_choose_alike_as_asked(write, name: str, overlap: float) -> None:
    """Layers independently of each other, and all experts equally often."""
    pair = write(name, overlap)
    shape = pair.shape
    _, chosen = choices_of(pair.model(), pair.cycle.tokens)
    by_chance = shape.num_chosen / shape.num_experts
    inside = torch.arange(len(pair.cycle.tokens) - 1) % shape.passage_size != shape.passage_size - 1
    assert len(chosen) == shape.num_layers - getattr(shape, "num_dense", 0)
    far = [in_common(ids, shape.num_experts, 5 * shape.passage_size).mean() for ids in chosen]
    assert torch.stack(far).mean() == pytest.approx(by_chance, abs=0.03)  # few passages: 0.03 in each layer
    for ids in chosen:
        near = in_common(ids, shape.num_experts, 1)[inside].mean()
        assert near == pytest.approx(overlap + (1 - overlap) * by_chance, abs=0.04)
        counts = torch.bincount(ids.flatten(), minlength=shape.num_experts).float()
        if overlap == 0:  # drawing alone gives 0.06 and 0.08
            assert counts.std() / counts.mean() < 0.15
            assert 0.6 < counts.min() / counts.mean() < counts.max() / counts.mean() < 1.5
    first, second = (torch.zeros(len(ids), shape.num_experts).scatter_(1, ids, 1.0) for ids in chosen[:2])
    same = (first * second).sum(1).mean() / shape.num_chosen
    assert overlap < 1 or same == pytest.approx(by_chance, abs=0.08)


@pytest.mark.parametrize(
    ("name", "head"), mostly_slow(product(TINY, ("eagle3", "peagle-2")), ("tiny-gpt-oss", "eagle3"))
)
def test_heads_draft_the_guesses(write, name: str, head: str) -> None:
    pair = write(name, 0.5)
    texts = [pair.cycle.slice(97 * i, 24) for i in range(16)]
    newest = [pair.cycle.succ[text[-1]] for text in texts]
    dense = reference_head(pair.path / head, DenseTarget(pair.path / "target"))
    drafts = [dense.drafts((*text, token), K) for text, token in zip(texts, newest, strict=True)]
    guesses = pair.cycle.guesses if head == "eagle3" else pair.cycle.parallel_guesses
    assert drafts == [guesses(token, K) for token in newest]


def test_sinks_biases_and_windows_are_there(write) -> None:
    pair = write("tiny-gpt-oss", 0.5)
    tensors = load_file(pair.path / "target" / "model.safetensors")
    config = json.loads((pair.path / "target" / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 4
    for name in ("self_attn.sinks", "self_attn.q_proj.bias", "mlp.router.bias", "mlp.experts.down_proj_bias"):
        assert tensors[f"model.layers.3.{name}"].float().std() > 0
    scales = tensors["model.layers.3.mlp.experts.gate_up_proj_scales"]
    blocks = tensors["model.layers.3.mlp.experts.gate_up_proj_blocks"]
    assert blocks.shape == (*scales.shape, 16)
    assert len(scales.unique()) == 2
    assert len(blocks.unique()) == 256


@pytest.mark.parametrize(("name", "experts"), mostly_slow(PAIRS, ("tiny-gpt-oss", "mxfp4")))
def test_experts_add_little_to_the_stream(write, name: str, experts: str) -> None:
    pair = write(name, 0.5, experts if "gpt" in name else None)
    block = pair.model().model.layers[3].mlp.experts
    hidden, inner = pair.shape.hidden_size, pair.shape.expert_size
    down = block.down_proj if "gpt" not in name else block.down_proj.transpose(1, 2)  # [E, H, I]
    heard, quiet = down.split((hidden - pair.shape.head_dim, pair.shape.head_dim), 1)
    assert 0.6 < block.gate_up_proj.std() * hidden**0.5 < 1.6
    assert 0.6 < heard.std() * inner**0.5 / RESIDUAL < 1.6
    assert 0 < quiet.std() < heard.std() / 30


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_tensors_have_the_shapes_of_the_config(name: str) -> None:
    shape = MIXTURES[name]
    cycle = Cycle.draw(shape.num_plain_tokens, shape.draft_vocab_size, 0.75, seed=0)
    assert not set(cycle.tokens) & {shape.bos_token_id, *shape.eos_token_ids}
    layer, source = chosen_layer(shape, 0.5), Source("cpu", 0)
    codes = Codes(embedding=torch.empty(0), turns=torch.zeros(shape.kv_size // 2))
    for named in target_tensors(replace(shape, num_layers=2), codes.embedding, cycle, source, layer):
        small = torch.Size(named.shape).numel() <= 1 << 21
        if small and "lm_head" not in named.name and "embed" not in named.name:
            made = named.make()
            assert (made.shape, made.dtype) == (named.shape, named.dtype), named.name


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("gpt-oss-20b", 13.8), ("qwen3-30b-a3b", 61.1), ("glm-4.7-flash", 59.9)]
)
def test_full_size_pairs_take_the_bytes_of_the_published_models(name: str, gigabytes: float) -> None:
    shape = MIXTURES[name]
    cycle = Cycle(tokens=(1, 2), unknown=(), accept=1.0)
    layer = chosen_layer(shape, 0.0)
    tensors = target_tensors(shape, torch.empty(0), cycle, Source("cpu", 0), layer)
    total = sum(torch.Size(named.shape).numel() * named.dtype.itemsize for named in tensors)
    assert total / 1e9 == pytest.approx(gigabytes, abs=0.1)


def test_the_rows_of_a_verify_step_choose_alike_where_drafts_are_wrong_too(write) -> None:
    pair = write("tiny-qwen3-moe", 1.0)
    places = {token: place for place, token in enumerate(pair.cycle.tokens)}
    size, wrong = len(places), 0
    ahead = []
    for token in pair.cycle.tokens:
        drafts = pair.cycle.guesses(token, K)
        if pair.cycle.accepted(token, drafts) < K:
            wrong += 1
            ahead.append((places[drafts[-1]] - places[token]) % size)
    assert wrong / size == pytest.approx(1 - 0.75**K, abs=0.05)
    assert sum(distance <= pair.shape.passage_size for distance in ahead) / len(ahead) > 0.9


def test_fewer_layers_and_bf16_experts_can_be_asked_for(tmp_path: Path, monkeypatch) -> None:
    options = ["--shape", "tiny-gpt-oss", "--layers", "7", "--experts", "bf16", "--expert-overlap", "1"]
    monkeypatch.setattr(sys, "argv", ["make", str(tmp_path / "pair"), "--device", "cpu", *options])
    main()
    target = tmp_path / "pair" / "target"
    config = json.loads((target / "config.json").read_text())
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 7
    assert "quantization_config" not in config
    tensors = load_file(target / "model.safetensors")
    assert tensors["model.layers.6.mlp.experts.down_proj"].dtype == torch.bfloat16
    assert "model.layers.7.self_attn.sinks" not in tensors


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "scale"), [("fp8", "weight_scale"), ("fp8-block", "weight_scale_inv")])
def test_a_mixture_in_fp8_generates_the_known_text(tmp_path: Path, weights: str, scale: str) -> None:
    """And chooses its experts as it would in bfloat16: what experts leave alone stays so."""
    shape = chosen_shape("tiny-qwen3-moe", None, None)
    cycle, layer = chosen_cycle(shape, 0.75, 3), chosen_layer(shape, 0.5, weights)
    write_pair(tmp_path, shape, cycle, Source("cpu", 3), layer=layer)
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    name = "model.layers.3.mlp.experts.2.down_proj"
    matrix = tensors[f"{name}.weight"].float() * tensors[f"{name}.{scale}"].flatten()[0]
    heard, quiet = matrix.split((shape.hidden_size - shape.head_dim, shape.head_dim))
    assert 0.6 < heard.std() * shape.expert_size**0.5 / RESIDUAL < 1.6
    assert 0 < quiet.std() < heard.std() / 30
    pair, count = load_pair(tmp_path), 24
    request = Request(
        id="0", prompt_token_ids=cycle.tokens[:5], sampling=SamplingParams(max_tokens=count, ignore_eos=True)
    )
    found = generate(pair, [request], num_spec_tokens=K).texts["0"]
    assert found == cycle.tokens[5 : 5 + count]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bf16", "fp8-block"])
def test_an_mtp_layer_drafts_the_guesses(tmp_path: Path, weights: str) -> None:
    """Each after the draft before it, and as the checkpoint of one model."""
    shape = chosen_shape("tiny-glm", None, None)
    cycle, layer = chosen_cycle(shape, 0.75, 3), chosen_layer(shape, 0.5, weights)
    write_pair(tmp_path, shape, cycle, Source("cpu", 3), [], layer)
    assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == ["target"]
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [
        Request(id=str(i), prompt_token_ids=cycle.slice(61 * i, 4 + i), sampling=sampling) for i in range(8)
    ]
    outputs = generate(load_pair(tmp_path, drafter="mtp"), requests, num_spec_tokens=K)
    for request in requests:
        assert outputs.texts[request.id] == cycle.after(request.prompt_token_ids[-1], 40)
    check_drafts("mtp", requests, outputs, cycle)


@pytest.mark.slow
def test_the_common_share_grows_with_the_overlap() -> None:
    shares = [common_share(128, 8, overlap) for overlap in (0, 0.25, 0.5, 0.75, 1)]
    assert shares[0] == 0
    assert shares[-1] == 1
    assert shares == sorted(set(shares))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: common_share(32, 4, 1.5), "from 0 to 1"),
        (lambda: chosen_shape("gpt-oss-20b", 3, None), "at least 7"),
        (lambda: chosen_shape("qwen3-30b-a3b", None, "mxfp4"), "none in that format"),
        (lambda: chosen_layer(chosen_shape("tiny", None, None), 0.5), "is dense"),
        (lambda: chosen_layer(MIXTURES["gpt-oss-20b"], 0.5, "fp8-block"), "of gpt_oss are not in FP8"),
    ],
)
def test_impossible_mixtures_are_refused(call, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        call()
