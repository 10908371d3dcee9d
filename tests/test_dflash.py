"""How DFlash and DSpark heads in their published dialects are read, and what is refused; drafts: test_heads.py."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specgen.checkpoints.checkpoint import open_checkpoint
from specgen.checkpoints.fingerprint import fingerprint
from specgen.checkpoints.inspect_checkpoint import describe
from specgen.core import step
from specgen.decoding.confidence import levels
from specgen.models.dflash import DFlashConfig, DFlashHead
from specgen.models.families import head_family_of, unread
from specgen.record.record_rows import PassRow
from tests.commands import refused
from tests.engines import generate, load_pair, random_requests
from tests.test_heads import GREEDY
from tests.tiny_checkpoints import write_dflash_head, write_head, write_target

NAMES = frozenset(
    {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.q_norm.weight"}
    | {f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"}
)
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 5,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "max_window_layers": 5,
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "dtype": "bfloat16",
}
IDS, SHIFTED = [1, 9, 17, 25, 33], (2, 10, 18, 26, 34)
FULL, SLIDING = "full_attention", "sliding_attention"
Z_LAB = QWEN3_8B | {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": IDS},
    "layer_types": 5 * [FULL],
}
NESTED = Z_LAB | {
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": IDS, "block_size": 16},
    "layer_types": [*4 * [SLIDING], FULL],
    "sliding_window": 2048,
    "use_sliding_window": True,
}
del NESTED["block_size"]
DEEPSPEC = QWEN3_8B | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "mask_token_id": 151669,
    "target_layer_ids": IDS,
    "num_anchors": 512,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
SPECFORGE = QWEN3_8B | {
    "architectures": ["DSparkDraftModel"],
    "block_size": 16,
    "dflash_config": {
        "projector_type": "dspark",
        "markov_rank": 256,
        "markov_head_type": "gated",
        "mask_token_id": 151669,
        "target_layer_ids": IDS,
    },
}
SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "transformer_layer_config": QWEN3_8B | {"layer_types": [*4 * [SLIDING], FULL], "sliding_window": 2048},
    "block_size": 16,
    "mask_token_id": 151669,
    "aux_hidden_state_layer_ids": list(SHIFTED),
    "draft_vocab_size": 32000,
    "sliding_window_non_causal": False,
}
CONFIDENCE = {"confidence_head.proj.weight", "confidence_head.proj.bias"}


def read(config: Mapping[str, Any], *more: str) -> DFlashConfig:
    """As a head with these tensors beside the usual ones; every key is read."""
    names = NAMES | set(more)
    found = head_family_of(config, names).config(config, names, 36)
    assert unread(config, names) == ()
    assert isinstance(found, DFlashConfig)
    return found


@pytest.mark.parametrize(
    ("config", "more", "dialect", "layout", "drafts", "causal", "markov"),
    [
        (Z_LAB, (), "z-lab", "fill-in", 15, 5 * (False,), 0),
        (NESTED, (), "z-lab", "fill-in", 15, (*4 * (True,), False), 0),
        (DEEPSPEC, CONFIDENCE, "DeepSpec", "anchor", 7, 5 * (False,), 256),
        (
            DEEPSPEC | {"markov_rank": 0, "enable_confidence_head": False},
            (),
            "DeepSpec",
            "anchor",
            7,
            5 * (False,),
            0,
        ),
        (SPECFORGE, (), "DeepSpec", "anchor", 16, 5 * (False,), 256),
        (SPECULATORS, (), "speculators", "fill-in", 15, (*4 * (True,), False), 0),
        (
            SPECULATORS | {"sample_from_anchor": True},
            (),
            "speculators",
            "anchor",
            16,
            (*4 * (True,), False),
            0,
        ),
    ],
    ids=["z-lab", "nested", "dspark", "deepspec-dflash", "specforge", "speculators", "speculators-anchors"],
)
def test_published_dialects(
    config: Mapping[str, Any],
    more: tuple[str, ...],
    dialect: str,
    layout: str,
    drafts: int,
    causal: tuple[bool, ...],
    markov: int,
) -> None:
    found = read(config, *more)
    assert found.aux_layers == SHIFTED, "the inputs of the layers behind those named, or speculators' inputs"
    assert (found.dialect, found.block_layout, found.most_drafts) == (dialect, layout, drafts)
    assert (found.causal_layers, found.markov_rank, found.mask_token_id) == (causal, markov, 151669)
    assert found.confidence == (more == CONFIDENCE)
    assert found.pass_rows(4) == (4 if layout == "anchor" else 5)
    assert found.qk_norm
    assert found.title == ("a DSpark head" if markov else "a DFlash head")


@pytest.mark.parametrize(
    ("changes", "nested", "causal"),
    [
        ({"is_causal": True}, {"causal": False}, True),
        ({"is_causal": None}, {"causal": True}, True),
        ({}, {"causal": True}, True),
        ({"is_causal": False}, {}, False),
    ],
)
def test_one_setting_for_all_layers_comes_before_windows(
    changes: dict[str, Any], nested: dict[str, Any], causal: bool
) -> None:
    config = Z_LAB | changes | {"dflash_config": Z_LAB["dflash_config"] | nested}
    assert read(config).causal_layers == 5 * (causal,)


def test_speculators_may_set_it_beside_the_layers_or_with_them() -> None:
    """As they do with the cap of logits."""
    own = {"is_causal": True, "final_logit_softcapping": 5.0}
    layer = SPECULATORS["transformer_layer_config"] | own
    found = read(SPECULATORS | {"transformer_layer_config": layer})
    assert (found.causal_layers, found.logit_cap) == (5 * (True,), 5.0)
    assert found == read(SPECULATORS | own)
    other = SPECULATORS | {"transformer_layer_config": layer, "is_causal": False}
    assert read(other).causal_layers == 5 * (False,)


def test_a_markov_head_of_an_unknown_architecture_has_to_say_how_its_rows_stand() -> None:
    config = SPECFORGE | {"architectures": ["OtherDSparkModel"]}
    with refused(r"'OtherDSparkModel'.* add it to config.json"):
        read(config)
    for anchor, layout in ((True, "anchor"), (False, "fill-in")):
        assert read(config | {"sample_from_anchor": anchor}).block_layout == layout


PARTS = ("candidate_selector.predecessor_codebook", "layers.0.mlp_conv.base_kernel")


def test_the_second_version() -> None:
    block = {"conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": 256, "selector_top_k": 16}
    scales = {"final_logit_softcapping": 20.0, "output_multiplier": 0.196, "input_embedding_scale": 2.0}
    config = Z_LAB | {"architectures": ["DFlash2DraftModel"], "is_causal": False}
    config |= {"dflash_config": Z_LAB["dflash_config"] | block | scales}
    found = read(config, *PARTS)
    assert found.title == "a DFlash2 head"
    assert (found.conv_taps, found.conv_group) == (2, 16)
    assert (found.num_candidates, found.selector_rank) == (16, 256)
    assert (found.logit_cap, found.logit_scale, found.embedding_scale) == (20.0, 0.196, 2.0)
    assert found.facts()["scaled"] == "embeddings by 2, logits by 0.196, capped at 20"


def test_the_second_version_as_speculators_write_it() -> None:
    """All layers have windows that look ahead; settings of experts are those of a class that can have some."""
    layer = SPECULATORS["transformer_layer_config"] | {"layer_types": 5 * [SLIDING], "sliding_window": 2048}
    experts = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
    config = SPECULATORS | {
        "architectures": ["DFlash2DraftModel"],
        "speculators_model_type": "dflash2",
        "transformer_layer_config": layer | {"use_sliding_window": True},
        "sliding_window_non_causal": True,
        "draft_vocab_size": 151936,
        "block_size": 8,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
        "draft_ffn_type": "dense",
        "moe_experts_implementation": "grouped_mm",
        **experts,
    }
    found = read(config, *PARTS)
    assert (found.title, found.dialect, found.block_layout) == ("a DFlash2 head", "speculators", "fill-in")
    assert (found.conv_taps, found.conv_group, found.most_drafts) == (2, 16, 7)
    assert (found.num_candidates, found.selector_rank) == (16, 256)
    assert (found.causal_layers, found.windows) == (5 * (False,), 5 * (2048,))
    with refused("draft_ffn_type is 'moe'"):
        read(config | {"draft_ffn_type": "moe"}, *PARTS)
    with refused("no candidate selector: the checkpoint is incomplete"):
        read(config)


SPELLINGS = {
    "layers.0.": "midlayer.",
    "fc.": "encoder.fc.",
    "hidden_norm.": "encoder.output_norm_enc.",
    "candidate_selector.predecessor_codebook": "candidate_selector.predecessor_codebook.weight",
}


def test_other_spellings_of_tensors_are_the_same_head(tmp_path: Path) -> None:
    write_dflash_head(
        tmp_path / "drafter", write_target(tmp_path / "target", vocab_size=8), second=(2, 8, 3), num_layers=1
    )
    file, runs = tmp_path / "drafter" / "model.safetensors", []
    tensors = load_file(file)
    for spellings in ({}, SPELLINGS):
        for usual, other in spellings.items():
            renamed = {name: name.replace(usual, other) for name in tensors if name.startswith(usual)}
            tensors = {renamed.get(name, name): tensor for name, tensor in tensors.items()}
            assert renamed
        save_file(tensors, file)
        runs.append(generate(load_pair(tmp_path), random_requests(3, 8, GREEDY), num_spec_tokens=3).verified)
    assert runs[0] == runs[1]
    assert "midlayer.mlp.up_proj.weight" in tensors
    save_file(tensors | {"fc.weight": tensors["encoder.fc.weight"].clone()}, file)
    with refused(r"'encoder.fc.weight' is 'fc.weight' in another spelling, and both"):
        open_checkpoint(str(tmp_path / "drafter"))


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "two readings": ({"target_layer_ids": SHIFTED}, (), "the file fits two readings"),
    "two kinds of ids": (
        {"aux_hidden_state_layer_ids": IDS},
        (),
        "layer outputs and aux_hidden_state_layer_ids",
    ),
    "no mask": ({"dflash_config": {"target_layer_ids": IDS}}, (), "mask_token_id is None"),
    "no ids": ({"dflash_config": {"mask_token_id": 1}}, (), "neither target_layer_ids nor"),
    "no block": ({"block_size": None}, (), "config.json has no block_size"),
    "descending": (
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [9, 1]}},
        (),
        "ascending layer numbers",
    ),
    "mask outside": (
        {"dflash_config": {"mask_token_id": 151936, "target_layer_ids": IDS}},
        (),
        "outside the vocab",
    ),
    "projector": ({"projector_type": "domino"}, (), "projector_type is 'domino'"),
    "Markov kind": ({"markov_head_type": "gru"}, (), "markov_head_type is 'gru'"),
    "Markov rank": ({"markov_rank": -1}, (), "markov_rank is -1"),
    "no confidence head": ({"enable_confidence_head": True}, (), "no confidence_head.proj.weight"),
    "convolutions alone": ({}, ("layers.0.attention_conv.base_kernel",), "one part of DFlash2's"),
    "a selector alone": ({}, ("candidate_selector.predecessor_codebook",), "one part of DFlash2's"),
    "values scaled": ({"attention_value_scale": 2.0}, (), "attention_value_scale is 2.0"),
    "of another type": ({"speculators_model_type": "eagle3"}, (), "speculators_model_type is 'eagle3'"),
    "not a switch": ({"is_causal": "yes"}, (), "is_causal is 'yes'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    changes, more, reason = REFUSED[name]
    with refused(reason):
        read(Z_LAB | changes, *more)


def test_windows_of_speculators_are_not_causal_unless_it_says_so() -> None:
    config = {name: value for name, value in SPECULATORS.items() if name != "sliding_window_non_causal"}
    found = read(config)
    assert found.windows == (*4 * (2048,), None)
    assert found.causal_layers == 5 * (False,)
    assert found.facts()["causal"] == "no layer; windows of the others reach as far ahead as back"
    assert read(SPECULATORS).facts()["causal"] == "layers [0, 1, 2, 3]"


def test_speculators_name_inputs() -> None:
    config = {name: value for name, value in SPECULATORS.items() if name != "aux_hidden_state_layer_ids"}
    with refused("is speculators' and has target_layer_ids"):
        read(config | {"target_layer_ids": IDS})


OWN = torch.arange(64.0)
MASK_FILES: dict[str, tuple[object, str]] = {
    "a vector": (OWN, ""),
    "a row of a table": (OWN.view(1, 1, -1).bfloat16(), ""),
    "by name": ({"embedding": OWN}, ""),
    "with its id": ({"embedding": OWN[None], "mask_token_id": 6}, ""),
    "several rows": (OWN.view(2, 32), r"has shape \[2, 32\], but config.json asks for \[64\]"),
    "of another width": (OWN[:-1], r"has shape \[63\], but config.json asks for \[64\]"),
    "one number": (OWN[0], r"has shape \[\], but config.json asks for \[64\]"),
    "other names": ({"embedding": OWN, "bias": OWN}, r"holds \['bias', 'embedding'\]: only a tensor"),
    "no embedding": ({"mask_token_id": 6}, "only a tensor, or embedding and mask_token_id, is supported"),
    "of another token": ({"embedding": OWN, "mask_token_id": 5}, "is of token 5 and mask_token_id 6"),
    "no id": ({"embedding": OWN, "mask_token_id": None}, "mask_token_id is None, not a number"),
    "no tensor": ("mask", "'mask_embedding' is str, not a named tensor"),
    "no numbers": (OWN * torch.nan, "mask_embedding holds NaN or Inf"),
    "tables of ids": (OWN.long(), "mask_embedding is stored as int64"),
}


@pytest.mark.parametrize("name", MASK_FILES)
def test_an_embedding_of_the_mask_beside_the_weights(tmp_path: Path, name: str) -> None:
    held, refusal = MASK_FILES[name]
    write_dflash_head(tmp_path / "drafter", write_target(tmp_path / "target", vocab_size=8))
    torch.save(held, tmp_path / "drafter" / "mask_embedding.pt")
    if refusal:
        with refused(refusal):
            load_pair(tmp_path)
        return
    head = load_pair(tmp_path).models.head
    assert isinstance(head, DFlashHead)
    assert head.mask_embedding is not None
    assert torch.equal(head.mask_embedding, OWN)
    assert (
        describe(str(tmp_path / "drafter")).parts[0].facts()["drafting"].endswith("an embedding of its own")
    )


def test_the_embedding_of_the_mask_belongs_to_the_checkpoint(tmp_path: Path) -> None:
    target, path = write_target(tmp_path / "target", vocab_size=8), tmp_path / "drafter"
    write_dflash_head(path, target, mask_embedding=True)
    first = fingerprint(open_checkpoint(str(path)))
    torch.save(OWN, path / "mask_embedding.pt")
    assert fingerprint(open_checkpoint(str(path))) != first
    write_dflash_head(path, target, changed={"mask_embedding": OWN})
    with refused(r"mask_embedding is in mask_embedding\.pt and in the weights"):
        open_checkpoint(str(path))


def test_other_heads_with_an_embedding_of_the_mask_are_refused(tmp_path: Path) -> None:
    write_head(tmp_path / "drafter", write_target(tmp_path / "target", vocab_size=8), draft_vocab_size=None)
    torch.save(OWN, tmp_path / "drafter" / "mask_embedding.pt")
    with refused("an unknown tensor, 'mask_embedding'"):
        load_pair(tmp_path)


def test_inspect_says_how_it_was_understood(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", vocab_size=8)
    write_dflash_head(
        tmp_path / "drafter", target, "DeepSpec", own=True, markov=("gated", 5), confidence=True
    )
    (part,) = describe(str(tmp_path / "drafter")).parts
    facts = part.facts()
    assert facts["dialect"] == "DeepSpec"
    assert facts["features"] == "the target's residual stream at the inputs of layers 1, 3, 5"
    assert facts["block"] == "6 rows, 6 drafts, anchor: each row predicts the next token"
    assert facts["causal"] == "no layer"
    assert facts["Markov head"] == "gated, rank 5"
    assert facts["confidence"] == "its own head, of the hidden state and the token before"


def test_more_drafts_than_it_was_trained_for_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_dflash_head(tmp_path / "drafter", write_target(tmp_path / "target", vocab_size=8), block_size=4)
    pair = load_pair(tmp_path)
    for k, said in ((3, False), (4, True)):
        with caplog.at_level(logging.WARNING):
            generate(pair, random_requests(2, 8, GREEDY), num_spec_tokens=k)
        assert ("was trained to draft 3 tokens" in caplog.text) == said, k


@pytest.mark.parametrize(("dialect", "rows"), [("z-lab", 4), ("DeepSpec", 3)])
def test_rows_of_a_block_are_counted(tmp_path: Path, dialect: Any, rows: int) -> None:
    write_dflash_head(tmp_path / "drafter", write_target(tmp_path / "target", vocab_size=8), dialect)
    outputs = generate(load_pair(tmp_path), random_requests(1, 8, GREEDY), num_spec_tokens=3)
    steps = [each for each in outputs.passes if isinstance(each, PassRow) and each.kind == "decode"]
    assert {each.loop_rows for each in steps} == {rows}


def test_the_confidence_head_says_how_sure_drafts_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of weights that give .5 for each draft; the softmax would say something else."""
    target = write_target(tmp_path / "target", vocab_size=8)
    zeros = {"confidence_head.proj.weight": torch.zeros(1, 69), "confidence_head.proj.bias": torch.zeros(1)}
    seen: dict[str, set[float]] = {}
    for name, changed in (("said", zeros), ("not said", {})):
        path = tmp_path / name
        path.mkdir()
        (path / "target").symlink_to(tmp_path / "target")
        settings = {"own": True, "markov": ("vanilla", 5), "confidence": True, "changed": changed}
        write_dflash_head(path / "drafter", target, "DeepSpec", **settings)
        found = seen[name] = set()

        def levels_of(confidence: Tensor, begins: Tensor, found: set[float] = found) -> Tensor:
            found.update(confidence.flatten().tolist())
            return levels(confidence, begins)

        monkeypatch.setattr(step, "levels", levels_of)
        generate(load_pair(path), random_requests(3, 8, GREEDY), num_spec_tokens=3)
    assert seen["said"] == {0.5}
    assert len(seen["not said"]) > 9


def test_a_head_of_a_target_with_other_layers_is_refused() -> None:
    for config in (Z_LAB, NESTED, SPECULATORS):
        DFlashConfig.from_hf(config, NAMES, 36)
    with refused("num_target_layers is 36, but the target has 94 layers: use the target that"):
        DFlashConfig.from_hf(Z_LAB, NAMES, 94)


@pytest.mark.parametrize("markov", [None, ("vanilla", 4)])
def test_output_weights_of_another_vocabulary_are_refused(
    tmp_path: Path, markov: tuple[str, int] | None
) -> None:
    target = write_target(tmp_path / "target", num_layers=6)
    expected = (
        "the head has no output weights and drafts 48 tokens from states 64 wide, but the target's are for"
    )
    for changed in ({}, {"lm_head.weight": None}):
        head = tmp_path / f"head {len(changed)}"
        write_dflash_head(head, target, "DeepSpec", draft_vocab_size=48, markov=markov, changed=changed)
        reasons = describe(str(tmp_path / "target"), str(head)).misfits
        assert [reason[: len(expected)] for reason in reasons] == [expected] * len(changed)
