"""A target in shares of several ranks: logits and argmax tokens of the whole, what is read, planted errors."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specgen.checkpoints.checkpoint import (
    build_head,
    build_target,
    drafter_config,
    load_drafter,
    load_target,
    mtp_part,
    open_checkpoint,
    target_config,
)
from specgen.checkpoints.tensor_reader import Checkpoint, TensorReader
from specgen.device import SINGLE_RANK, Ranks
from specgen.models.llama import Llama
from specgen.models.protocols import no_target
from specgen.ops import bind_ops, experts, fp8
from specgen.ops.reference import RmsNorm
from specgen.ops.weight import Weight
from tests.commands import refused
from tests.dense import DenseAttend
from tests.marks import mostly_slow
from tests.rank_threads import ThreadRanks, together
from tests.tiny_checkpoints import (
    change_json,
    change_tensors,
    write_dflash_head,
    write_eagle1_head,
    write_head,
    write_target,
)
from tests.tiny_fp8 import quantize
from tests.tiny_gemma4 import write_gemma4
from tests.tiny_hybrids import write_hybrid
from tests.tiny_latents import write_latent
from tests.tiny_llama4 import write_eagle_llama4, write_llama4
from tests.tiny_mixtures import in_one_tensor, packed_in_mxfp4, write_gpt_oss, write_qwen3_moe

CPU, META = torch.device("cpu"), torch.device("meta")
PROMPTS = torch.randint(0, 127, (8, 4), generator=torch.Generator().manual_seed(3))


def in_fp8(path: Path, form: str, *, output_layer: bool = False, **settings: Any) -> None:
    write_target(path, **{"num_layers": 2, "std": 0.08, **settings})
    quantize(path, form, spread=1.0, output_layer=output_layer)


def stacked(path: Path) -> None:
    write_qwen3_moe(path)
    in_one_tensor(path)


def experts_in_fp8(path: Path, form: str) -> None:
    widths = {"hidden_size": 128, "head_dim": 128, "num_hidden_layers": 2, "moe_intermediate_size": 512}
    write_qwen3_moe(path, **widths, num_key_value_heads=4)
    quantize(path, form, spread=1.0)


def gemma4_in_fp8(path: Path, form: str) -> None:
    widths = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
    heads = {
        "head_dim": 128,
        "global_head_dim": 256,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
    }
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    write_gemma4(path, std=0.05, num_hidden_layers=3, layer_types=kinds, **widths, **heads)
    quantize(path, form, spread=1.0)


def in_mxfp4(path: Path) -> None:
    write_gpt_oss(path, intermediate_size=128)
    packed_in_mxfp4(path)


def latents_in_blocks(path: Path) -> None:
    widths = {
        "moe_intermediate_size": 512,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "n_routed_experts": 4,
    }
    heads = {"qk_rope_head_dim": 128, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_experts_per_tok": 2}
    write_latent(path, "deepseek", std=0.08, topk_group=1, n_group=2, **widths, **heads)
    quantize(path, "block", spread=1.0)


def called_tied(path: Path, write: Callable[[Path], object] = write_target) -> None:
    """Output weights of its own beside a config that ties them to the embedding."""
    write(path)
    change_json(path / "config.json", tie_word_embeddings=True)


def in_fp8_with_vectors(path: Path) -> None:
    """The scales of channels as [out] instead of [out, 1]."""
    in_fp8(path, "dynamic", head_dim=32)
    stored = load_file(path / "model.safetensors")
    change_tensors(path, {name: x.flatten() for name, x in stored.items() if name.endswith("weight_scale")})


BLOCKS = {"hidden_size": 256, "head_dim": 128, "num_heads": 4, "num_kv_heads": 2}
TARGETS: dict[str, Callable[[Path], object]] = {
    "llama": write_target,
    "biases": partial(write_target, biases=True),
    "tied": partial(write_target, tied=True),
    "called tied": called_tied,
    "called tied, output layer in FP8": partial(
        called_tied, write=partial(in_fp8, form="modelopt", output_layer=True)
    ),
    "vocabulary that is not divided evenly": partial(write_target, vocab_size=127),
    "qwen2": partial(write_target, family="qwen2"),
    "qwen3": partial(write_target, family="qwen3"),
    "one KV head": partial(write_target, num_kv_heads=1),
    "many shards": partial(write_target, max_shard_size="50KB"),
    "qwen3-moe": write_qwen3_moe,
    "qwen3-moe in one tensor": stacked,
    "qwen3-moe in modelopt's FP8": partial(experts_in_fp8, form="modelopt"),
    "gpt-oss": write_gpt_oss,
    "gpt-oss in MXFP4": in_mxfp4,
    "modelopt": partial(in_fp8, form="modelopt"),
    "a scale per channel": partial(in_fp8, form="dynamic", head_dim=32),
    "a vector of scales": in_fp8_with_vectors,
    "experts with a scale per channel": partial(experts_in_fp8, form="dynamic"),
    "experts in blocks": partial(experts_in_fp8, form="block"),
    "blocks": partial(in_fp8, form="block", **BLOCKS),
    "hybrid": write_hybrid,
    "vision-language hybrid": partial(write_hybrid, architecture="Qwen3_5MoeForConditionalGeneration"),
    "hybrid by key head": partial(write_hybrid, architecture="Qwen3NextForCausalLM", attention_bias=True),
    "llama4": write_llama4,
    "gemma4 31b": write_gemma4,
    "gemma4 e2b": partial(write_gemma4, size="e2b"),
    "gemma4 12b": partial(write_gemma4, size="12b"),
    "gemma4 with experts": partial(write_gemma4, size="26b", moe_intermediate_size=32),
    "gemma4 in FP8": partial(gemma4_in_fp8, form="dynamic"),
    "gemma4 in blocks": partial(gemma4_in_fp8, form="block"),
    "llama4 with dense layers": partial(
        write_llama4, architecture="Llama4ForConditionalGeneration", interleave_moe_layer_step=2
    ),
    "latents": write_latent,
    "latents and groups": partial(write_latent, family="deepseek", q_lora_rank=None),
    "latents in blocks": latents_in_blocks,
    "blocks of two heads": partial(
        in_fp8, form="block", **{**BLOCKS, "head_dim": 64, "num_heads": 8, "num_kv_heads": 8}
    ),
    "blocks of compressed-tensors": partial(in_fp8, form="compressed-block", **BLOCKS),
    "output layer with a scale": partial(in_fp8, form="modelopt", output_layer=True),
    "output layer with scales per token": partial(in_fp8, form="dynamic", head_dim=32, output_layer=True),
    "output layer in blocks": partial(in_fp8, form="block", output_layer=True, vocab_size=16_500, **BLOCKS),
}


@torch.inference_mode()
def run(model: Llama) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of each prompt [prompts, tokens, V], the argmax ids by shares and their logits."""
    found = []
    for ids in PROMPTS:
        hidden, features = model.forward(ids, DenseAttend(model), (0, 1, 2))
        assert features.shape[-1] == 3 * model.config.hidden_size
        share = model.vocabulary.share(hidden)
        found.append((model.vocabulary.whole(share), *model.vocabulary.argmax(share)))
    logits, ids, values = map(torch.stack, zip(*found, strict=True))
    return logits, ids, values


def load(path: Path, ranks: Ranks = SINGLE_RANK) -> Llama:
    return load_target(open_checkpoint(str(path)), torch.float32, CPU, ranks)


def in_parts(size: int, hidden: int) -> Callable[[Weight], Callable[[Tensor], Tensor]]:
    """Of inputs as wide as heads or an MLP each rank knows its own part, and rounds it by the largest of that."""
    right = fp8.rounding

    def rounding(weight: Weight) -> Callable[[Tensor], Tensor]:
        rounds = right(weight)
        if weight.activations != "token" or weight.data.shape[-1] == hidden:
            return rounds
        return lambda x: torch.cat([rounds(part) for part in x.chunk(size, -1)], -1)

    return rounding


def agrees(path: Path, size: int) -> bool:
    """Whether all ranks have the logits of one process, to 1e-4 of the largest, and the same bits as each other.

    In FP8 most prompts: a sum in another order may round an input to the other one of two values of e4m3.
    """
    with pytest.MonkeyPatch.context() as patch:
        rounding = in_parts(size, target_config(open_checkpoint(str(path))).hidden_size)
        patch.setattr(fp8, "rounding", rounding)
        patch.setattr(experts, "rounding", rounding)
        model = load(path)
        logits, ids, _ = run(model)
    found = together(size, lambda ranks: run(load(path, ranks)))
    assert all(torch.equal(mine, first) for each in found for mine, first in zip(each, found[0], strict=True))
    apart = (found[0][0] - logits).abs().flatten(1).amax(1).sort().values / logits.abs().max()
    if model.config.fp8 is not None:
        return bool(apart.median() < 1e-4 and apart[-1] < 0.1)
    return bool(apart[-1] < 1e-4) and torch.equal(found[0][1], ids)


QUICK = (
    *("llama", "qwen3-moe", "hybrid", "hybrid by key head", "llama4", "gemma4 e2b", "gemma4 with experts"),
    *("gpt-oss in MXFP4", "latents", "a scale per channel", "blocks"),
)
NARROW = ("qwen3-moe", "hybrid", "llama4", "with experts")  # experts are 32 wide, or there are two key heads
# What four ranks cut otherwise than two do.
QUICK_IN_FOUR = ("one KV head", "vocabulary that is not divided evenly")


def sizes(target: str, at: int) -> tuple[int, ...]:
    """Groups of ranks: two or four by turns, where four are possible."""
    if any(each in target for each in NARROW):
        return (2,)
    return (2, 4) if target in (*QUICK, *QUICK_IN_FOUR) else ((2, 4)[at % 2],)


@pytest.mark.parametrize(
    ("target", "size"),
    mostly_slow(
        [(target, size) for at, target in enumerate(TARGETS) for size in sizes(target, at)],
        *((target, 2) for target in QUICK),
        *((target, 4) for target in QUICK_IN_FOUR),
    ),
)
def test_shares_together_are_the_whole(tmp_path: Path, target: str, size: int) -> None:
    TARGETS[target](tmp_path)
    assert agrees(tmp_path, size)


HEADS: dict[str, Callable[..., object]] = {
    "EAGLE3": write_head,
    "two layers with biases": partial(
        write_head, num_layers=2, biases=True, qk_norm=True, draft_vocab_size=None
    ),
    "P-EAGLE": partial(
        write_head, dialect="speculators", mask_token=("mask_token_id", 6), own_embedding=True
    ),
    "EAGLE of Llama-4": partial(write_eagle_llama4, own_lm_head=True),
    "EAGLE-1": write_eagle1_head,
    "DFlash": write_dflash_head,
    "MTP of latents and experts": partial(write_latent, num_mtp=1),
    "MTP of a hybrid": partial(write_hybrid, mtp=True),
}
WHOLE = ("EAGLE-1", "DFlash")  # on every rank


def written_pair(path: Path, kind: str) -> tuple[Checkpoint, Checkpoint]:
    """A target and a head for it, which may be its MTP layer."""
    target, head = path / "target", path / "head"
    if "MTP" in kind:
        HEADS[kind](target)
        checkpoint = open_checkpoint(str(target))
        return checkpoint, mtp_part(checkpoint)
    write_target(target, num_kv_heads=4)
    checkpoint = open_checkpoint(str(target))
    HEADS[kind](head, target_config(checkpoint))
    return checkpoint, open_checkpoint(str(head))


@torch.inference_mode()
def drafted(target: Checkpoint, head: Checkpoint, ranks: Ranks) -> Tensor:
    """Logits of five rows and of three more behind them."""
    model = load_drafter(head, load_target(target, torch.float32, CPU, ranks))
    width = max(model.config.target_hidden_size * (1 if model.config.reads_output else 3), 1)
    alike = torch.Generator().manual_seed(5)  # of this thread alone
    hidden, attend = model.fuse(torch.randn(8, width, generator=alike)), DenseAttend(model)
    ids = torch.arange(3, 11)
    rows = [model.forward(ids[part], hidden[part], attend)[1] for part in (slice(0, 5), slice(5, 8))]
    return model.logits(torch.cat(rows))


@pytest.mark.parametrize("kind", [kind for kind in HEADS if kind != "DFlash"])
def test_a_head_in_shares_drafts_as_the_whole(tmp_path: Path, kind: str) -> None:
    pair = written_pair(tmp_path, kind)
    whole = drafted(*pair, SINGLE_RANK)
    found = together(2, lambda ranks: drafted(*pair, ranks))
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], whole, atol=1e-5 * float(whole.abs().max()), rtol=0)


@pytest.mark.parametrize("kind", HEADS)
def test_a_rank_reads_its_share_of_a_head(tmp_path: Path, kind: str) -> None:
    """Of the layers; norms, embedding and output weights are whole, and so is a head that cannot be shared."""
    target, head = written_pair(tmp_path, kind)
    config, taken = drafter_config(head, target_config(target).num_layers), []
    for size in (1, 2, 3):
        ranks = Ranks(size=size)
        reader = TensorReader(checkpoint=head, dtype=torch.float32, device=META, ranks=ranks)
        assert build_head(config, reader, no_target(), torch.empty(0, device=META)).config == config.shared(
            size
        )
        taken.append(dict(reader.taken))
    whole, share, of_three = taken
    split = {name for name in whole if share[name] != whole[name]}
    assert all(2 * share[name] == whole[name] for name in split)
    assert of_three == whole, "three ranks do not divide its heads"
    expected = re.compile(r"(\b(q|k|v|o|gate|up|down|q_b|kv_b)_proj\.weight|_proj\.bias)$")
    once = {name for name in whole if name.endswith(("o_proj.bias", "down_proj.bias"))}
    assert split == (set() if kind in WHOLE else {each for each in whole if expected.search(each)} - once)


OF_HEADS = ("q_b_proj.weight", "kv_b_proj.weight", "o_proj.weight")


@pytest.mark.parametrize(
    ("write", "size", "part", "split", "number"),
    [
        (
            partial(write_target, num_kv_heads=4, vocab_size=1024),
            4,
            "",
            ("_proj.weight", "lm_head.weight"),
            43,
        ),
        (write_latent, 2, ".self_attn.", OF_HEADS, 9),  # latents are made on every rank
    ],
    ids=["heads", "latents"],
)
def test_a_rank_reads_its_share_alone(
    tmp_path: Path, write: Callable[[Path], object], size: int, part: str, split: tuple[str, ...], number: int
) -> None:
    write(tmp_path)
    checkpoint, taken = open_checkpoint(str(tmp_path)), []
    for ranks in (SINGLE_RANK, ThreadRanks(rank=size - 1, size=size, group=object())):  # type: ignore[arg-type]
        reader = TensorReader(checkpoint=checkpoint, dtype=torch.float32, device=CPU, ranks=ranks)
        model = build_target(target_config(checkpoint), reader)
        taken.append({name: count for name, count in reader.taken.items() if part in name})
        if part:
            assert model.config.kv_spec.bytes_per_token(2) == 3 * (24 + 8) * 2
    whole, share = taken
    assert sum(name.endswith(split) for name in whole) == number
    for name in whole:
        assert share[name] * (size if name.endswith(split) else 1) == whole[name], name


def test_nothing_but_the_share_is_read_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of the size of a whole one is made, not even for a moment."""
    import safetensors

    write_target(tmp_path)
    read, opened = set[str](), safetensors.safe_open

    class Watched:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.handle = opened(*args, **kwargs)

        def __enter__(self) -> "Watched":
            self.handle.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.handle.__exit__(*error)

        def get_tensor(self, name: str) -> Tensor:
            read.add(name)
            tensor: Tensor = self.handle.get_tensor(name)
            return tensor

        def __getattr__(self, name: str) -> object:
            return getattr(self.handle, name)

    monkeypatch.setattr(safetensors, "safe_open", Watched)
    load(tmp_path, ThreadRanks(rank=1, size=2, group=object()))  # type: ignore[arg-type]
    assert "model.embed_tokens.weight" in read
    assert not [name for name in read if name.endswith("_proj.weight") or name == "lm_head.weight"]


@pytest.mark.slow
def test_pickles_are_read_in_shares(tmp_path: Path) -> None:
    write_target(tmp_path)
    file = tmp_path / "model.safetensors"
    torch.save(load_file(file), tmp_path / "pytorch_model.bin")
    file.unlink()
    assert agrees(tmp_path, 2)


@pytest.mark.parametrize(
    ("target", "size", "fitting"),
    [
        ("llama", 3, "1, 2, 4"),
        ("llama", 8, "1, 2, 4"),
        ("one KV head", 8, "1, 2, 4"),
        ("gpt-oss", 8, "1, 2, 4"),
        ("blocks", 8, "1, 2, 4"),
        ("hybrid", 4, "1, 2"),
    ],
)
def test_shares_that_would_not_be_equal_are_refused(
    tmp_path: Path, target: str, size: int, fitting: str
) -> None:
    TARGETS[target](tmp_path)
    with refused(rf"tensor-parallel is {size}, which .* use one of {fitting}$"):
        target_config(open_checkpoint(str(tmp_path))).shared(size)


def test_a_vocabulary_of_too_few_tokens_is_refused(tmp_path: Path) -> None:
    write_target(tmp_path, vocab_size=15)
    with refused("a vocabulary of 15 tokens cannot be shared by 4 ranks: use a smaller"):
        load(tmp_path, ThreadRanks(rank=0, size=4, group=object()))  # type: ignore[arg-type]


def test_an_output_layer_in_blocks_that_ranks_would_divide_is_refused(tmp_path: Path) -> None:
    in_fp8(tmp_path, "block", output_layer=True, **BLOCKS)
    for rank in range(2):  # all say so, also the one that is asked before the others start
        with refused("lm_head is in FP8 with a scale for each 128 tokens, which 2 ranks"):
            load(tmp_path, ThreadRanks(rank=rank, size=2, group=object()))  # type: ignore[arg-type]


def test_a_tensor_of_another_shape_is_named_with_that_of_the_whole(tmp_path: Path) -> None:
    write_target(tmp_path)
    config = target_config(open_checkpoint(str(tmp_path)))
    reader = TensorReader(
        checkpoint=open_checkpoint(str(tmp_path)),
        dtype=torch.float32,
        device=CPU,
        ranks=ThreadRanks(rank=0, size=2, group=object()),  # type: ignore[arg-type]
    )
    wider = config.__class__(**{**vars(config), "intermediate_size": 256})
    with refused(r"gate_proj.weight has shape \[128, 64\], but .* asks for \[256, 64\]"):
        build_target(wider, reader)


def test_the_argmax_is_the_first_token_and_what_is_not_finite_is_seen(tmp_path: Path) -> None:
    write_target(tmp_path)
    logits = torch.randn(9, 128)
    logits[0, 5] = logits[0, 70] = 9.0  # in the shares of two ranks
    logits[1, 70] = logits[1, 71] = 9.0
    logits[2, 3], logits[3, 100] = torch.nan, torch.inf
    logits[4] = -torch.inf
    logits[5, 90] = torch.nan
    logits[5, 2] = torch.inf

    right = load(tmp_path).vocabulary.argmax(logits)

    def greedy(ranks: Ranks) -> tuple[Tensor, Tensor]:
        whole = load(tmp_path, ranks).vocabulary
        for mine, one in zip(whole.argmax(logits), right, strict=True):  # of all, which every rank has
            assert torch.equal(mine.nan_to_num(), one.nan_to_num())
        return whole.argmax(logits[:, whole.rows.start : whole.rows.stop])

    for ids, values in together(4, greedy):
        assert torch.equal(ids[:4], right[0][:4])
        assert torch.equal(ids[6:], right[0][6:])
        assert torch.equal(values.isfinite(), right[1].isfinite())
        assert torch.equal(values[:2], right[1][:2].double())
        assert values[2:6].isfinite().sum() == 0


def test_a_norm_adds_every_part_of_every_rank() -> None:
    """As of GEMMs that are split: in float32, rounded once before the ranks' sum."""
    stream, parts = torch.randn(5, 16).bfloat16(), torch.randn(2, 3, 5, 16)

    def add(ranks: Ranks) -> tuple[Tensor, Tensor]:
        norm = bind_ops(CPU, torch.bfloat16, ranks).rms_norm(torch.ones(16).bfloat16(), 1e-5)
        return norm.add(stream, parts[ranks.rank])

    total = stream + sum(each.sum(0).bfloat16() for each in parts)
    for found, normed in together(2, add):
        assert torch.equal(found, total)
        assert torch.equal(normed, RmsNorm(torch.ones(16).bfloat16(), 1e-5)(total))
