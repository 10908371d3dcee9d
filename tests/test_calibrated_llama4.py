"""Calibrated Llama-4s have the known text in ``transformers`` and in the engine, and their heads draft as asked."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated_codes import Codes
from calibrated_cycle import Cycle
from calibrated_shapes import SHAPES, Llama4Shape
from calibrated_weights import Source, target_tensors
from make_calibrated_pair import HeadKind, chosen_cycle, chosen_layer, chosen_shape, write_pair
from transformers import AutoConfig, AutoModelForCausalLM

from specgen.config import SamplingParams
from specgen.core.sequence import Request
from tests.engines import Pair, generate, load_pair
from tests.marks import mostly_slow
from tests.test_calibrated_pair import check_drafts

pytestmark = pytest.mark.scripts

WEIGHTS = ("bf16", "fp8", "fp8-block")
K = 4


@dataclass(frozen=True, kw_only=True)
class Written:
    """A pair on disk."""

    path: Path
    cycle: Cycle

    def load(self, drafter: str) -> Pair:
        return load_pair(self.path, drafter=drafter)


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def written(weights: str = "bf16") -> Written:
        path, shape = tmp_path_factory.mktemp("llama4"), chosen_shape("tiny-llama4", None, None)
        cycle = chosen_cycle(shape, 0.75, 3)
        heads = [HeadKind.find("eagle3"), HeadKind.find("eagle-llama4")]
        write_pair(path, shape, cycle, Source("cpu", 3), heads, chosen_layer(shape, 0.5, weights))
        return Written(path=path, cycle=cycle)

    return written


@pytest.mark.parametrize(
    ("weights", "layers", "gigabytes"), [("bf16", 48, 215.5), ("bf16", 8, 39.4), ("fp8-block", 8, 21.8)]
)
def test_full_size_pairs_take_the_bytes_of_the_published_model(
    weights: str, layers: int, gigabytes: float
) -> None:
    shape = chosen_shape("llama-4-scout", layers, None)
    layer, cycle = chosen_layer(shape, None, weights), Cycle(tokens=(1, 2), unknown=(), accept=1.0)
    assert layer is not None
    nothing = Codes(embedding=torch.empty(0), turns=torch.zeros(0))
    found = list(target_tensors(shape, nothing.embedding, cycle, Source("cpu", 0), layer))
    size = sum(torch.Size(each.shape).numel() * each.dtype.itemsize for each in found)
    assert size / 1e9 == pytest.approx(gigabytes, abs=0.1)
    assert (weights, layers) != ("bf16", 48) or len(found) == 579


def test_the_config_is_that_of_the_published_model(tmp_path: Path) -> None:
    shape = SHAPES["llama-4-scout"]
    assert isinstance(shape, Llama4Shape)
    (tmp_path / "config.json").write_text(json.dumps(shape.target_config()))
    config: Any = AutoConfig.from_pretrained(tmp_path)
    assert type(config).__name__ == "Llama4TextConfig"
    assert config.layer_types == (["chunked_attention"] * 3 + ["full_attention"]) * 12
    assert config.moe_layers == list(range(48))
    assert (config.num_local_experts, config.num_experts_per_tok, config.attention_chunk_size) == (
        16,
        1,
        8192,
    )
    widths = (config.hidden_size, config.intermediate_size, config.intermediate_size_mlp)
    assert widths == (5120, 8192, 16384)
    assert (config.vocab_size, config.use_qk_norm, config.floor_scale) == (202048, True, 8192)


def test_transformers_finds_every_tensor_and_generates_the_known_text(write) -> None:
    pair = write()
    model, found = AutoModelForCausalLM.from_pretrained(
        pair.path / "target", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(found.values()), found
    with torch.no_grad():
        logits = model(torch.tensor([pair.cycle.tokens])).logits[0]
    assert logits.argmax(-1).tolist() == list(pair.cycle.succ.values())


@pytest.mark.parametrize(
    ("head", "weights", "batch"),
    mostly_slow(
        [
            (head, weights, batch)
            for head in ("eagle3", "eagle-llama4")
            for weights in WEIGHTS
            for batch in ("padded", "non-padded")
        ],
        ("eagle-llama4", "bf16", "padded"),
        ("eagle3", "fp8", "non-padded"),
    ),
)
def test_heads_draft_the_guesses_in_the_known_text(write, head: str, weights: str, batch: str) -> None:
    pair = write(weights)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    asked = [
        Request(id=str(i), prompt_token_ids=pair.cycle.slice(61 * i, 40 + 5 * i), sampling=sampling)
        for i in range(8)
    ]
    outputs = generate(pair.load(head), asked, num_spec_tokens=K, drafter_batch=batch)
    assert outputs.texts == {each.id: pair.cycle.after(each.prompt_token_ids[-1], 40) for each in asked}
    check_drafts("eagle3" if head == "eagle3" else "eagle1", asked, outputs, pair.cycle)
    assert set(outputs.accepted) == set(range(K + 1))


def test_an_eagle_head_of_a_llama4_needs_one() -> None:
    with pytest.raises(ValueError, match="the shape no Llama-4: use --shape llama-4-scout"):
        HeadKind.find("eagle-llama4").config(SHAPES["tiny"])
