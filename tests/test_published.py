"""Published checkpoints: what is read of their configs, and what weights, a cache and ranks take; no weights."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from bound import ExpertSize, KVBytes, Seen

from specgen.attention import Temperature
from specgen.checkpoints.checkpoint import (
    build_head,
    build_target,
    drafter_config,
    misfits,
    mtp_part,
    target_config,
)
from specgen.checkpoints.tensor_reader import Checkpoint, TensorReader
from specgen.config import EngineConfig
from specgen.device import Ranks
from specgen.engine.page_budget import PageBudget
from specgen.models.config_keys import unread_keys
from specgen.models.families import family_of, unread
from specgen.models.fp8_config import kv_scheme, with_modelopt
from specgen.models.protocols import no_target
from specgen.ops import reference
from tests.commands import refused
from tests.marks import mostly_slow
from tests.published import (
    AUTO,
    BLOCKS,
    DEEPSEEK,
    EAGLE_OF_LLAMA4,
    GEMMA4_TEXTS,
    GLM,
    GPT_OSS_20B,
    GPT_OSS_120B,
    LLAMA3_SCALING,
    MAVERICK,
    META,
    MODELOPT,
    QWEN3_5_35B,
    QWEN3_8,
    QWEN3_30B,
    QWEN3_235B,
    QWEN3_NEXT,
    SCOUT,
    assistant,
    checkpoint_of,
    deepspec,
    dense,
    dynamic,
    eagle3,
    eagle_of_llama4,
    gemma4,
    published,
    published_gemma4,
)


def reader_of(checkpoint: Checkpoint, rank: int = 0, size: int = 1) -> TensorReader:
    ranks = Ranks(rank=rank, size=size)
    return TensorReader(checkpoint=checkpoint, dtype=torch.bfloat16, device=META, ranks=ranks)


IN_FP8 = {"quantization_config": dynamic("re:.*self_attn", "re:.*router", "re:.*vision_model")}
EIGHT, SIXTEEN = (1, 2, 4, 8), (1, 2, 4, 8, 16)
# Its config, GB of weights, bytes of KV a token, both in bfloat16, and the numbers of ranks that can share it
TARGETS: dict[str, tuple[dict[str, Any], float, int, tuple[int, ...]]] = {
    "gpt-oss-20b": (GPT_OSS_20B, 13.76, 49_152, (1, 2)),
    "gpt-oss-120b": (GPT_OSS_120B, 65.25, 73_728, (1, 2)),
    "qwen3-30b-a3b": (QWEN3_30B, 61.06, 98_304, SIXTEEN),
    "qwen3-235b-a22b": (QWEN3_235B, 470.19, 192_512, SIXTEEN),
    "glm-4.7-flash": (GLM, 2 * 29.94, 47 * 1152, (1, 2, 4)),
    "deepseek-v3": (DEEPSEEK, 28.48, 5 * 1152, SIXTEEN),
    "qwen3.8-27b": (QWEN3_8, 2 * 26.9, 64 << 10, EIGHT),
    "qwen3.5-35b-a3b": (QWEN3_5_35B, 2 * 34.66, 20 << 10, SIXTEEN),
    "qwen3-next-80b": (QWEN3_NEXT, 2 * 79.67, 24 << 10, SIXTEEN),
    "scout": (SCOUT, 2 * 107.77, 192 << 10, EIGHT),
    "scout-fp8": (SCOUT | IN_FP8, 112.93, 192 << 10, EIGHT),
    "maverick": (MAVERICK, 2 * 400.71, 192 << 10, EIGHT),
    "maverick-fp8": (MAVERICK | IN_FP8, 406.09, 192 << 10, EIGHT),
}


@pytest.mark.parametrize(
    "name", mostly_slow(TARGETS, "gpt-oss-20b", "glm-4.7-flash", "deepseek-v3", "qwen3.8-27b", "scout")
)
def test_published_targets_are_complete(name: str) -> None:
    """With MTP layers where there are some; nothing of their configs is left unread."""
    raw, gigabytes, kv_bytes, ranks = TARGETS[name]
    checkpoint = published(raw)
    config = target_config(checkpoint)
    reader = reader_of(checkpoint)
    target = build_target(config, reader)
    assert sum(reader.taken.values()) / 1e9 == pytest.approx(gigabytes, rel=1e-3)
    assert config.kv_spec.bytes_per_token(2) == kv_bytes
    assert unread_keys(raw, family_of(raw).keys) == ()
    with refused(f"use one of {', '.join(map(str, ranks))}$"):
        config.shared(3)
    if config.latent is None and config.delta is None:
        return
    mtp = reader_of(mtp_part(checkpoint))
    head = drafter_config(mtp.checkpoint, config.num_layers)
    build_head(head, mtp, target, torch.empty(0, device=META))
    assert misfits(config, head) == ()
    assert mtp.taken.keys() == mtp.checkpoint.tensors.keys()
    assert head.kv_spec.bytes_per_token(2) == kv_bytes // len(config.kv_spec.layers)


def test_what_is_particular_is_read_as_published() -> None:
    def read(raw: dict[str, Any]) -> Any:
        return family_of(raw).config(raw)

    gpt_oss, deepseek, llama4 = read(GPT_OSS_20B), read(DEEPSEEK), read(SCOUT)
    assert gpt_oss.windows == (128, None) * 12
    facts = gpt_oss.facts()
    assert facts["experts"] == "32 in all layers, 2880 wide, in MXFP4, gate and up clamped at 7"
    assert facts["rotary"] == (
        "base 150,000, YaRN scaling by 32 from 4,096 positions (exact bounds), cos and sin times 1.347"
    )
    assert facts["biases"] == "q, k and v, attention output"
    assert deepseek.latent.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)  # 1 + 0.1 ln 40
    assert deepseek.facts()["rotary"].endswith("cos and sin times 1")
    assert deepseek.facts()["router"] == (
        "chooses 8 per token; the choice from 4 of 8 groups with a bias; weights by sigmoid, divided by their sum, "
        "times 2.5"
    )
    assert llama4.rotated == (True, True, True, False) * 12
    assert (llama4.chunk, llama4.temperature) == (8192, Temperature(floor=8192, scale=0.1))
    assert llama4.eos_token_ids == (200001, 200007, 200008)
    values = 3 * 5120 * 8192
    for raw, layers, num_bytes in (
        (SCOUT, 48, 2 * values),
        (MAVERICK | IN_FP8, 24, values + 4 * (2 * 8192 + 5120)),
    ):
        config = read(raw)
        assert sum(config.mixture.layers) == layers
        assert ExpertSize.of(config, 2).num_bytes == num_bytes
    for raw, mib in ((QWEN3_8, 144), (QWEN3_5_35B, 60), (QWEN3_NEXT, 72)):
        config = read(raw)
        spec = config.state_spec
        assert spec.num_layers * spec.num_heads * spec.key_dim * spec.value_dim * 4 == mib << 20
        assert config.rotary_dim == 64


# Tensors that a pass reads, parameters in billions, KiB of cache a token, and MiB that a row at 4,096 reads of it
GEMMA4S = {
    "E2B": (540, 4.63, 12 + 6, 14 + 56),
    "E4B": (665, 7.46, 40 + 16, 35 + 112),
    "12B": (666, 11.91, 320 + 16, 320 + 64),
    "26B": (657, 25.23, 200 + 20, 200 + 80),
    "31B": (832, 30.70, 800 + 80, 800 + 320),
}


@pytest.mark.parametrize("size", GEMMA4_TEXTS)
def test_published_gemma4s_are_complete(size: str) -> None:
    raw, checkpoint = gemma4(size), published_gemma4(size)
    reader = reader_of(checkpoint)
    config: Any = build_target(target_config(checkpoint), reader).config
    number, billions, kib, mib = GEMMA4S[size]
    assert len(reader.taken) == number
    assert sum(reader.taken.values()) / 2e9 == pytest.approx(billions, abs=0.01)
    assert config.kv_spec.bytes_per_token(2) == kib << 10
    assert KVBytes.of(config, 2).at(4096) == mib << 20
    engine = EngineConfig(
        model=size, drafter=None, num_spec_tokens=0, dtype="bfloat16", page_size=64, cuda_graphs="step"
    )
    budget = PageBudget(config=replace(engine, kv_dtype="model"), target=config, head=None)
    taken = budget.bytes_of(*budget.of_sequence(4096))
    storing = filter(config.stores, range(config.num_layers))
    seen = sum(4 * prod(config.kv_heads(layer)) * Seen.of(config, layer)(4096) for layer in storing)
    assert seen == mib << 20 or size.startswith("E"), "all others store"
    assert seen < taken < 1.12 * seen, "whole pages, and what a step writes"
    assert config.eos_token_ids == (1, 106, 50)
    assert config.windows[-1] is None
    assert unread_keys(raw, family_of(raw).keys) == ()
    first, sources = {"E2B": (15, (13, 14)), "E4B": (24, (22, 23))}.get(size, (config.num_layers, ()))
    for layer in range(config.num_layers):
        expected = layer if layer < first else sources[config.window(layer) is None]
        assert config.source(layer) == config.cache_index(layer) == expected
        wide = size == "E2B" and layer >= first
        assert config.mlp_width(layer) == config.intermediate_size * (1 + wide)


# ---- heads


def ids(*layers: int) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [*layers]}}


@pytest.mark.parametrize(
    ("target", "changes", "inputs"),
    [
        ("gpt-oss-20b", {}, (2, 12, 21)),
        ("gpt-oss-20b", ids(1, 11, 21), (2, 12, 22)),
        ("gpt-oss-120b", ids(24, 30, 36), (24, 30, 36)),
        ("gpt-oss-120b", ids(1, 17, 32), (2, 18, 33)),
        ("gpt-oss-120b", {"eagle_config": {"use_aux_hidden_state": False}}, ()),
        ("qwen3-30b-a3b", ids(1, 23, 44), (2, 24, 45)),
        ("scout", {"head_dim": 128, "num_attention_heads": 40, "intermediate_size": 32768}, (2, 24, 45)),
    ],
    ids=str,
)
def test_published_eagle3_heads_fit(target: str, changes: dict[str, Any], inputs: tuple[int, ...]) -> None:
    raw = TARGETS[target][0]
    config = family_of(raw).config(raw)
    head = drafter_config(checkpoint_of(*eagle3(raw, **changes)), config.num_layers)
    assert head.aux_layers == inputs
    assert misfits(config, head) == ()


# Of a Gemma 4: the head, how many tensors it has, its parameters in millions where they are published, its aux layers
HEADS: dict[str, tuple[str, Any, int, float | None, tuple[int, ...]]] = {
    "assistant-E4B": ("E4B", lambda: assistant("E4B", 256), 50, 78.5, ()),
    **{
        f"assistant-{size}": (size, lambda size=size: assistant(size, 1024), 48, millions, ())
        for size, millions in {"12B": 422.5, "26B": None, "31B": None}.items()
    },
    "eagle3": ("12B", lambda: deepspec("Eagle3"), 18, None, (6, 18, 30, 42, 47)),
    "dspark": ("12B", lambda: deepspec("DSpark"), 74, None, (6, 18, 30, 42, 47)),
}


@pytest.mark.parametrize("name", HEADS)
def test_published_heads_of_gemma4s_are_complete(name: str) -> None:
    size, head, number, millions, aux_layers = HEADS[name]
    raw, tensors = head()
    checkpoint = checkpoint_of(raw, tensors)
    config: Any = drafter_config(checkpoint, len(GEMMA4_TEXTS[size]["layer_types"]))
    build_head(config, reader_of(checkpoint), no_target(), torch.empty(0, device=META))
    assert len(checkpoint.tensors) == number
    floats = (prod(each.shape) for each in checkpoint.tensors.values() if each.dtype == "bfloat16")
    assert millions is None or sum(floats) / 1e6 == pytest.approx(millions, abs=0.5)
    if aux_layers:
        assert config.aux_layers == aux_layers
        assert config.kv_spec.layers == ((1, 512),) * config.num_layers
    else:
        assert config.kv_spec.bytes_per_token(2) == 0
    assert unread(raw, checkpoint.tensors.keys()) == ()
    assert misfits(target_config(published_gemma4(size)), config) == ()


@pytest.mark.parametrize("own", [False, True])
def test_the_published_eagle_head_of_llama4_fits(own: bool) -> None:
    target = target_config(published(SCOUT))
    reader = reader_of(checkpoint_of(*eagle_of_llama4(own=own)))
    config: Any = drafter_config(reader.checkpoint, 48)
    build_head(config, reader, build_target(target, reader_of(published(SCOUT))), torch.empty(0, device=META))
    assert misfits(target, config) == ()
    assert len(reader.taken) == len(reader.checkpoint.tensors) == 11 + 2 * own
    assert (config.chunk, config.own_embedding, config.own_lm_head) == (8192, own, own)
    assert [Seen.of(config, 0)(context) for context in (1, 8192, 8193)] == [1, 8192, 1]
    assert unread_keys(EAGLE_OF_LLAMA4, family_of(EAGLE_OF_LLAMA4).keys) == ()


# ---- in FP8

LLAMA_8B = {"family": "Llama", "hidden": 4096, "inner": 14336, "layers": 32, "heads": 32}
QWEN3 = {"family": "Qwen3", "vocab_size": 151936, "quantization_config": BLOCKS}
# the config, GB of weights, numbers of ranks
FP8_CHECKPOINTS: dict[str, tuple[dict[str, Any], float, tuple[int, ...]]] = {
    "nvidia/Llama-3.3-70B-Instruct-FP8": (
        with_modelopt(dense("Llama", 8192, 28672, 80, 64, rope_scaling=LLAMA3_SCALING), MODELOPT),
        *(72.68, SIXTEEN),
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic": (
        dense(**LLAMA_8B, rope_scaling=LLAMA3_SCALING, quantization_config=dynamic()),
        *(9.09, SIXTEEN),
    ),
    "neuralmagic/Meta-Llama-3-8B-Instruct-FP8": (
        dense(**LLAMA_8B, quantization_config=AUTO),
        *(9.09, SIXTEEN),
    ),
    "RedHatAI/Qwen2.5-7B-Instruct-FP8-dynamic": (
        dense("Qwen2", 3584, 18944, 28, 28, num_key_value_heads=4, vocab_size=152064)
        | {"quantization_config": dynamic()},
        *(8.71, (1, 2, 4)),
    ),
    "Qwen/Qwen3-0.6B-FP8": (
        dense(hidden=1024, inner=3072, layers=28, heads=16, tie_word_embeddings=True, **QWEN3),
        *(0.75, EIGHT),
    ),
    "Qwen/Qwen3-32B-FP8": (dense(hidden=5120, inner=25600, layers=64, heads=64, **QWEN3), 34.33, EIGHT),
    "Qwen/Qwen3-30B-A3B-FP8": (QWEN3_30B | {"quantization_config": BLOCKS}, 31.17, (1, 2)),
}


@pytest.mark.parametrize("name", mostly_slow(FP8_CHECKPOINTS, *[*FP8_CHECKPOINTS][1:5]))
def test_published_fp8_is_complete_for_every_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    raw, gigabytes, fitting = FP8_CHECKPOINTS[name]
    config, checkpoint = family_of(raw).config(raw), published(raw)
    assert kv_scheme(checkpoint.config) == ("FP8" if name.startswith("nvidia") else None)
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(reference, "fp8_linear", lambda weight, _: shapes.append(tuple(weight.data.shape)))
    for size in fitting:
        for rank in {0, size - 1}:
            reader = reader_of(checkpoint, rank, size)
            build_target(config, reader)
            assert size > 1 or sum(reader.taken.values()) / 1e9 == pytest.approx(gigabytes, abs=0.01)
    assert len(shapes) >= 2 * config.num_layers
    assert all(out % 64 == width % 128 == 0 for out, width in shapes)  # what kernels for GPUs take
    with refused(f"use one of {', '.join(map(str, fitting))}$"):
        config.shared(3)
