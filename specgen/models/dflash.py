"""Heads that draft a block in one pass: DFlash and DFlash2 (Chen et al., 2026), DSpark (DeepSeek-AI, 2026).

Of the accepted rows such a head keeps keys and values alone, made of the target's features in every layer; the newest
token and masks attend to these, and in most layers to one another. See the papers, arXiv 2602.06036 and 2607.05147, and
z-lab/dflash on GitHub for DFlash2: convolutions over a block, and a choice among a few candidates for each draft.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.attention import Attend
from specgen.config import require, shown
from specgen.models.config_fields import Raw, architectures, count, flag, items, number, section
from specgen.models.config_keys import DFLASH, Keys
from specgen.models.layers import Attention, Block, Projection, load_norm
from specgen.models.loader import Loader
from specgen.models.model_config import (
    HeadConfig,
    LayerConfig,
    dtype_name,
    head_layer_settings,
    layer_windows,
)
from specgen.models.protocols import Head, OnePass, Target, embedding_of, output_of
from specgen.ops import Map, Norm, Ops, joined

MASK_TENSOR, MASK_ID_TENSOR = "mask_embedding", "mask_embedding.token_id"  # of a file beside the weights
_NESTED = "dflash_config"
_DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel", "Gemma4DSparkModel")
_IDS, _SPECULATORS_IDS = "target_layer_ids", "aux_hidden_state_layer_ids"
_SELECTOR = "candidate_selector."
# Names in some checkpoints, by their beginnings, and those that are used here
_SPELLINGS = {
    "midlayer.": "layers.0.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    f"{_SELECTOR}predecessor_codebook.weight": f"{_SELECTOR}predecessor_codebook",
    f"{_SELECTOR}successor_codebook.weight": f"{_SELECTOR}successor_codebook",
}
_SCALE = "input_embedding_scale"
_SCALED_BY_TARGET = (
    "the target's, scaled where that scales it, as in z-lab's own code; vLLM does not, so where acceptance is poor "
    f"set {_SCALE} to 1 in config.json"
)
_OWN_MEANING = ("is_causal", "final_logit_softcapping")  # keys that other models are refused for
# Settings of heads that compute otherwise, at the values that change nothing
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention_value_scale": (None, 1),
    **dict.fromkeys(("attention_sink_bias", "use_swa", "swa_window_size"), (None, False, 0)),
    "attention_mode": (None, "gqa", "mha"),
    "projector_type": (None, "dspark", "dflash"),
    **dict.fromkeys(
        ("dflash_query_causal", "log_snr_conditioning", "enable_qwen35_gated_q_proj"), (None, False)
    ),
    "speculators_model_type": (None, "dflash", "dspark", "dflash2"),
    "draft_ffn_type": (None, "dense"),
    **dict.fromkeys(("is_neox_style", "rope_is_neox_style"), (None, True)),
}
# How the rows of a block stand. anchor: the newest token and K - 1 masks, each of which predicts the next token;
# fill-in: the newest token and K masks, each of which predicts its own
BlockLayout = Literal["anchor", "fill-in"]
MarkovKind = Literal["vanilla", "gated", "rnn"]


def other_names(tensors: Set[str]) -> dict[str, str]:
    """The tensors of a head that are named otherwise than here, and their names here; none of other checkpoints.

    ``UserError`` where a checkpoint has a tensor by both names.
    """
    found = {
        name: standard + name.removeprefix(spelling)
        for spelling, standard in _SPELLINGS.items()
        for name in tensors
        if name.startswith(spelling)
    }
    if "hidden_norm.weight" not in tensors | set(found.values()):
        return {}
    for name, standard in found.items():
        require(
            standard not in tensors,
            f"{shown(name)} is {shown(standard)} in another spelling, and both are there: the checkpoint fits two "
            "readings, remove one",
        )
    return found


def require_trained_on(num_target_layers: int | None, config: Raw) -> None:
    """``UserError`` where a head's config names another number of its target's layers, if that is known."""
    trained = config.get("num_target_layers")
    require(
        trained in (None, num_target_layers) or num_target_layers is None,
        f"num_target_layers is {shown(trained)}, but the target has {num_target_layers} layers: use the target "
        "that the head was trained on",
    )


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(HeadConfig):
    """A DFlash head, or with ``markov_rank`` above 0 a DSpark head."""

    family: ClassVar[str] = "DFlash"
    refusal: ClassVar[str] = "no hidden_norm.weight: the checkpoint is not a DFlash or DSpark head"
    keys: ClassVar[Keys | None] = DFLASH
    ignored: ClassVar[Set[str]] = frozenset({"d2t", "t2d", "rotary_emb.inv_freq", MASK_ID_TENSOR})
    splits: ClassVar[bool] = False  # one pass reads it once a step; DFlash2 needs whole sums within a layer
    dialect: str
    block_size: int  # rows of a block as it was trained
    block_layout: BlockLayout
    mask_token_id: int
    causal_layers: tuple[bool, ...]
    markov_rank: int = 0
    markov_kind: MarkovKind = "vanilla"
    confidence: bool = False  # whether it has a confidence head
    confidence_reads_token: bool = False  # and whether that reads the token before as well
    own_mask: bool = False  # the mask token has an embedding of its own
    conv_taps: int = 0  # rows that a convolution of DFlash2 sums; 0: there are none
    conv_group: int = 1  # numbers of a row that share a weight which depends on the row
    num_candidates: int = 0  # of each draft, of DFlash2's selector; 0: there is none
    selector_rank: int = 0
    embedding_scale: float | None = None  # None: not said
    logit_scale: float = 1.0
    logit_cap: float | None = None  # logits are tanh(logits / cap) * cap

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.mask_token_id < self.vocab_size,
            f"the mask token is {self.mask_token_id}, outside the vocabulary of {self.vocab_size}: wrong config",
        )

    @staticmethod
    def recognizes(_: Raw, tensors: Set[str]) -> bool:
        """By the one tensor that EAGLE3 heads have in their first layer instead."""
        return "hidden_norm.weight" in tensors

    @property
    def title(self) -> str:
        kind = "DSpark" if self.markov_rank else "DFlash2" if self.num_candidates else "DFlash"
        return f"a {kind} head"

    @property
    def most_drafts(self) -> int:
        """Drafts of a block as it was trained."""
        return self.block_size - (self.block_layout == "fill-in")

    def pass_rows(self, num_drafts: int) -> int:
        return num_drafts + (self.block_layout == "fill-in")

    def causal(self, index: int) -> bool:
        return self.causal_layers[index]

    @classmethod
    def from_hf(cls, config: Raw, tensors: Set[str], num_target_layers: int | None) -> "DFlashConfig":
        """Read a head's ``config.json`` in any of its dialects; ``tensors`` are the names in its checkpoint."""
        layer = section(config, "transformer_layer_config") or config
        speculators = layer is not config
        if speculators:  # which has them in either place
            config = {**{name: layer[name] for name in _OWN_MEANING if name in layer}, **config}
        flags = _merged(config)
        for name, values in _NEUTRAL.items():
            require(
                flags.get(name) in values,
                f"{name} is {shown(flags.get(name))}: heads that compute with it are not built, use another",
            )
        require_trained_on(num_target_layers, flags)
        aux_layers, aux_rule = _aux_layers(flags, speculators)
        markov = flags.get("markov_rank") or 0
        require(
            type(markov) is int and markov >= 0, f"markov_rank is {shown(markov)}: it must be a whole number"
        )
        kind = flags.get("markov_head_type") or "vanilla"
        require(
            kind in get_args(MarkovKind),
            f"markov_head_type is {shown(kind)}: use {', '.join(get_args(MarkovKind))}",
        )
        confidence = any(name.startswith("confidence_head.") for name in tensors)
        require(
            confidence or not flag(flags, "enable_confidence_head"),
            "enable_confidence_head is true and there is no confidence_head.proj.weight: the checkpoint is incomplete",
        )
        token = flags.get("mask_token_id")
        require(
            type(token) is int and token >= 0,
            f"mask_token_id is {shown(token)}: add the id of the mask token that the head was trained with",
        )
        windows = layer_windows(layer) or (None,) * count(layer, "num_hidden_layers")
        return cls(
            dialect="speculators" if speculators else "DeepSpec" if _is_dspark(config) else "z-lab",
            draft_vocab_size=count({**layer, **config}, "draft_vocab_size", count(layer, "vocab_size")),
            target_hidden_size=count(config, "target_hidden_size", count(layer, "hidden_size")),
            aux_layers=aux_layers,
            aux_rule=aux_rule,
            own_embedding="embed_tokens.weight" in tensors,
            own_lm_head="lm_head.weight" in tensors,
            own_mask=MASK_TENSOR in tensors,
            reads_output=False,
            block_size=count(flags, "block_size"),
            block_layout=_block_layout(config, flags, speculators, markov),
            mask_token_id=cast(int, token),
            causal_layers=_causal_layers(config, flags, windows, speculators),
            markov_rank=markov,
            markov_kind=cast(MarkovKind, kind),
            confidence=confidence,
            confidence_reads_token=confidence and flag(flags, "confidence_head_with_markov"),
            dtype=dtype_name(config),
            **_second_version(flags, tensors),
            **cls.layers(
                {name: value for name, value in layer.items() if name not in _OWN_MEANING},
                {name for name in tensors if name.startswith("layers.")},  # a Markov head has biases too
            ),
        )

    @staticmethod
    def layers(config: Raw, tensors: Set[str]) -> dict[str, Any]:
        """The fields that are of its layers alone, from what ``config.json`` says of these."""
        return head_layer_settings(config, tensors)

    @property
    def takes_scaled(self) -> bool | None:
        """As z-lab's own code takes it, unless the file says a scale; engines give speculators' the table as it is."""
        if self.embedding_scale is not None or self.dialect == "speculators":
            return False
        return True if self.dialect == "z-lab" else None

    def facts(self) -> dict[str, str]:
        causal = [index for index, causal in enumerate(self.causal_layers) if causal]
        sees = "no layer" if not causal else "all layers" if all(self.causal_layers) else f"layers {causal}"
        ahead = any(self.window(index) and not causal for index, causal in enumerate(self.causal_layers))
        rows = (
            "a mask predicts its own token"
            if self.block_layout == "fill-in"
            else "each row predicts the next token"
        )
        markov = f"{self.markov_kind}, rank {self.markov_rank}" if self.markov_rank else "none"
        before = " and the token before" * self.confidence_reads_token
        cap = "" if self.logit_cap is None else f", capped at {self.logit_cap:g}"
        scale = 1.0 if self.embedding_scale is None else self.embedding_scale
        scaled = f"embeddings by {scale:g}, logits by {self.logit_scale:g}{cap}"
        is_scaled = (scale, self.logit_scale, self.logit_cap) != (1.0, 1.0, None)
        facts = {
            "dialect": self.dialect,
            "features": "the target's residual stream at the inputs of layers "
            + ", ".join(map(str, self.aux_layers)),
            "rule": self.aux_rule,
            "drafting": f"all drafts in one pass, with mask token {self.mask_token_id}"
            + ", which has an embedding of its own" * self.own_mask,
            "block": f"{self.block_size} rows, {self.most_drafts} drafts, {self.block_layout}: {rows}",
            "causal": sees + "; windows of the others reach as far ahead as back" * ahead,
            "Markov head": markov,
            "convolved": f"{self.conv_taps} rows, groups of {self.conv_group}" * (self.conv_taps > 0),
            "candidates": f"{self.num_candidates} a draft, rank {self.selector_rank}"
            * (self.num_candidates > 0),
            "scaled": scaled * is_scaled,
            "confidence": f"its own head, of the hidden state{before}"
            if self.confidence
            else "of the softmax",
        }
        shared = {"embedding": _SCALED_BY_TARGET} if self.takes_scaled and not self.own_embedding else {}
        return {name: text for name, text in facts.items() if text} | super().facts() | shared


def _second_version(flags: Raw, tensors: Set[str]) -> dict[str, Any]:
    """The settings that DFlash2 has in addition, whose parts are found by their tensors, and scales."""
    cap = flags.get("final_logit_softcapping")
    found: dict[str, Any] = {
        "embedding_scale": None if flags.get(_SCALE) is None else number(flags, _SCALE),
        "logit_scale": number(flags, "output_multiplier", 1.0),
        "logit_cap": number(flags, "final_logit_softcapping") if cap else None,
    }
    convolved, selects = (any(part in name for name in tensors) for part in ("_conv.", _SELECTOR))
    require(
        convolved == selects,
        "the head has one part of DFlash2's, convolutions or a candidate selector, and not the other: it is incomplete",
    )
    if selects:
        found |= {
            "conv_taps": count(flags, "conv_kernel_size"),
            "conv_group": count(flags, "conv_group_size"),
            "num_candidates": count(flags, "selector_top_k"),
            "selector_rank": count(flags, "selector_rank"),
        }
    require(
        selects or flags.get("speculators_model_type") != "dflash2",
        "speculators_model_type is 'dflash2' and there is no candidate selector: the checkpoint is incomplete",
    )
    return found


def _is_dspark(config: Raw) -> bool:
    return any(name in _DSPARK for name in architectures(config))


def _merged(config: Raw) -> dict[str, Any]:
    """The settings of the top level and of ``dflash_config``; ``UserError`` where the two say different things."""
    nested = section(config, _NESTED)
    for name, value in nested.items():
        require(
            config.get(name) in (None, value),
            f"{name} is {shown(config.get(name))}, and {shown(value)} in {_NESTED}: the file fits two "
            "readings, remove one",
        )
    return {**config, **nested}


def _aux_layers(flags: Raw, speculators: bool) -> tuple[tuple[int, ...], str]:
    """The layers whose inputs are the features, and the rule that gave them."""
    outputs, inputs = items(flags, _IDS), items(flags, _SPECULATORS_IDS)
    for name, ids in ((_IDS, outputs), (_SPECULATORS_IDS, inputs)):
        require(
            all(type(i) is int for i in ids) and ids == sorted(set(ids)),
            f"{name} is {shown(ids)}: it must be a list of ascending layer numbers",
        )
    found = tuple(i + 1 for i in outputs)
    require(
        not outputs or not inputs or found == tuple(inputs),
        f"{_IDS} {outputs} are layer outputs and {_SPECULATORS_IDS} {inputs} layer inputs, which are not the same: the "
        "file fits two readings, remove one",
    )
    require(
        bool(outputs or inputs),
        f"config.json has neither {_IDS} nor {_SPECULATORS_IDS}: add the layers that the head was trained on",
    )
    require(
        bool(inputs) or not speculators,
        f"config.json is speculators' and has {_IDS} {outputs}, which are another format's layer outputs: name inputs "
        f"as {_SPECULATORS_IDS}",
    )
    if inputs:
        return tuple(inputs), f"{_SPECULATORS_IDS} {inputs} are layer inputs (the speculators format)"
    return found, f"{_IDS} {outputs} are layer outputs, so 1 is added"


def _block_layout(config: Raw, flags: Raw, speculators: bool, markov: int) -> BlockLayout:
    """DeepSpec's architectures have anchors, also where they are DFlash; speculators say it; others fill in."""
    require(
        not markov or speculators or _is_dspark(config) or flags.get("sample_from_anchor") is not None,
        f"architectures is {shown(architectures(config))}, with a Markov head, and sample_from_anchor is not there: "
        "add it to config.json, true where the newest token's row gives the first draft",
    )
    anchor = flag(flags, "sample_from_anchor", _is_dspark(config) and not speculators)
    return "anchor" if anchor else "fill-in"


def _causal_layers(
    config: Raw, flags: Raw, windows: tuple[int | None, ...], speculators: bool
) -> tuple[bool, ...]:
    """Whether a row of a block sees those before it alone, by layer: one setting for all, else layers with a window."""
    said = {
        "is_causal": config.get("is_causal"),
        f"{_NESTED}.causal": section(config, _NESTED).get("causal"),
    }
    for name, value in said.items():
        require(
            value is None or isinstance(value, bool), f"{name} is {shown(value)}: it must be true or false"
        )
    given = next((bool(value) for value in said.values() if value is not None), None)
    if given is not None:
        return (given,) * len(windows)
    ahead = speculators and flag(flags, "sliding_window_non_causal", True)
    return tuple(window is not None and not ahead for window in windows)


@dataclass(frozen=True, kw_only=True)
class Markov:
    """What the token before a draft adds to its logits (DSpark), and the confidence head beside it."""

    rank: int
    kind: MarkovKind
    known: Tensor | None  # [V, rank] of the token before
    bias: Map | None  # [n, rank] -> [n, Vd]
    mix: Map | None  # of gated and rnn
    sure: Map | None  # [n, H] or [n, H + rank] -> [n, 1]
    sure_reads_token: bool

    @classmethod
    def build(cls, config: DFlashConfig, load: Loader, ops: Ops) -> "Markov | None":
        """None for a head that has neither."""
        rank, hidden = config.markov_rank, config.hidden_size
        if not rank and not config.confidence:
            return None
        mix = None
        if config.markov_kind == "gated" and rank:
            mix = ops.linear(load.linear({"markov_head.gate_proj": rank}, hidden + rank, bias=True))
        elif config.markov_kind == "rnn" and rank:
            mix = ops.linear(load.linear({"markov_head.joint_proj": 3 * rank}, 2 * rank + hidden, bias=True))
        sure_width = hidden + rank * config.confidence_reads_token
        return cls(
            rank=rank,
            kind=config.markov_kind,
            known=load("markov_head.markov_w1.weight", (config.vocab_size, rank)) if rank else None,
            bias=ops.linear(load.linear({"markov_head.markov_w2": config.draft_vocab_size}, rank))
            if rank
            else None,
            mix=mix,
            sure=ops.linear(load.linear({"confidence_head.proj": 1}, sure_width, bias=True))
            if config.confidence
            else None,
            sure_reads_token=config.confidence_reads_token,
        )

    def step(
        self, logits: Tensor, hidden: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Logits of one draft [B, Vd] with what is added, its confidence [B] if there is a head for it, the next state.

        ``hidden`` [B, H] is the draft's, ``before`` [B] the target's id of the token before it; ``state`` is None for
        the first draft.
        """
        known = None if self.known is None else F.embedding(before, self.known)
        sure = None
        if self.sure is not None:
            read = torch.cat((hidden, known), -1) if known is not None and self.sure_reads_token else hidden
            sure = self.sure(read)[:, 0].float().sigmoid()
        if known is None or self.bias is None:
            return logits, sure, state
        if self.kind == "gated":
            assert self.mix is not None
            known = self.mix(torch.cat((hidden, known), -1)).sigmoid() * known
        elif self.kind == "rnn":
            assert self.mix is not None
            state = torch.zeros_like(known) if state is None else state
            gate, candidate, out = self.mix(torch.cat((state, known, hidden), -1)).chunk(3, -1)
            gate = gate.sigmoid()
            state, known = gate * state + (1 - gate) * candidate.tanh(), out.tanh()
        return logits + self.bias(known), sure, state


@dataclass(frozen=True, kw_only=True)
class Selector:
    """Chooses among the most likely tokens of each draft by how well they follow the token before (DFlash2)."""

    num_candidates: int
    before: Tensor  # [V, rank] of the token before
    after: Tensor  # [V, rank] of a candidate
    project: Map  # [n, H] -> [n, rank]
    draft_to_target: Tensor  # [Vd]

    @classmethod
    def build(cls, config: DFlashConfig, load: Loader, draft_to_target: Tensor, ops: Ops) -> "Selector":
        shape = (config.vocab_size, config.selector_rank)
        projection = load.linear({f"{_SELECTOR}hidden_projection": config.selector_rank}, config.hidden_size)
        return cls(
            num_candidates=min(config.num_candidates, config.draft_vocab_size),
            before=load(f"{_SELECTOR}predecessor_codebook", shape),
            after=load(f"{_SELECTOR}successor_codebook", shape),
            project=ops.linear(projection),
            draft_to_target=draft_to_target,
        )

    def step(
        self, logits: Tensor, hidden: Tensor, before: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As of ``Markov``: scores of the candidates in float32, -inf of all other tokens."""
        first, ids = logits.topk(self.num_candidates, -1)  # [B, n]
        mixed = F.embedding(before, self.before).float() * self.project(hidden).float()  # [B, rank]
        follows = F.embedding(self.draft_to_target[ids], self.after).float()  # [B, n, rank]
        scores = first.float() + (mixed[:, None] * follows).sum(-1)
        nothing = torch.full_like(logits, float("-inf"), dtype=torch.float32)
        return nothing.scatter(-1, ids, scores), None, state


@dataclass(frozen=True, kw_only=True)
class BlockConv:
    """Convolutions over the rows of a block, one before and one behind a part of a layer (DFlash2).

    A row becomes a sum over itself and rows before it in its block; the weight of each number is its own, plus one of
    its group that depends on the row as it was before the part.
    """

    base: Tensor  # [2, taps, groups, H / groups]: before and behind
    project: Map  # [rows, H] -> [rows, 2 * taps * groups]

    @classmethod
    def build(cls, config: DFlashConfig, prefix: str, load: Loader, ops: Ops) -> "BlockConv":
        hidden, taps, group = config.hidden_size, config.conv_taps, config.conv_group
        require(
            hidden % group == 0,
            f"conv_group_size is {group}, which does not divide a width of {hidden}: config.json is wrong",
        )
        weights = load.linear({f"{prefix}kernel_projection": 2 * taps * (hidden // group)}, hidden)
        base = load(f"{prefix}base_kernel", (2, taps, hidden))
        return cls(base=base.view(2, taps, -1, group), project=ops.linear(weights))

    def around(self, part: Callable[[Tensor], Tensor], x: Tensor, num_rows: int) -> Tensor:
        """``part`` ([rows, H] -> [parts, rows, H]) between the two, for blocks of ``num_rows``: [1, rows, H]."""
        own = self.project(x).view(-1, num_rows, *self.base.shape[:3], 1)
        out = part(self._sum(x, own[:, :, 0], self.base[0])).sum(0).to(x.dtype)
        return self._sum(out, own[:, :, 1], self.base[1])[None]

    def _sum(self, x: Tensor, own: Tensor, base: Tensor) -> Tensor:
        """``own`` is [blocks, rows, taps, groups, 1], ``base`` [taps, groups, H / groups]."""
        blocks = x.view(*own.shape[:2], *base.shape[1:])
        total = (base[0] + own[:, :, 0]) * blocks
        for back in range(1, len(base)):
            earlier = F.pad(blocks, (0, 0, 0, 0, back, 0))[:, : blocks.shape[1]]
            total = total + (base[back] + own[:, :, back]) * earlier
        return total.view_as(x)


@dataclass(frozen=True, kw_only=True)
class DFlashHead(Head):
    """See the module."""

    config: DFlashConfig
    embedding: Tensor  # [V, H]; the target's unless the checkpoint has its own
    embedding_scale: float
    mask_embedding: Tensor | None  # [H]; None: that of the mask token's id
    fc: Map  # [rows, num_features * Ht] -> [rows, H]
    hidden_norm: Norm
    context: Projection  # keys of all layers, then values of all: [rows, H] -> [rows, 2 * L * Hkv, D]
    blocks: tuple[Block, ...]
    convs: tuple[tuple[BlockConv, BlockConv], ...]  # around attention and MLP of each block, or none
    norms: tuple[Norm, ...]  # of the inputs of each block, and the final one
    lm_head: Map  # [n, H] -> [n, Vd]; the target's unless the checkpoint has its own

    @classmethod
    def build(
        cls, config: DFlashConfig, load: Loader, target: Target, draft_to_target: Tensor, ops: Ops
    ) -> "DFlashHead":
        """Load every tensor of the head; embedding and output weights are the target's unless it has its own."""
        hidden = config.hidden_size
        prefixes = [f"layers.{index}." for index in range(config.num_layers)]
        norm = partial(load_norm, config, size=hidden, load=load, ops=ops)
        return cls(
            context=_context(config, prefixes, load, ops),
            blocks=tuple(
                Block.build(config, index, prefix, load, ops, hidden) for index, prefix in enumerate(prefixes)
            ),
            convs=tuple(
                (
                    BlockConv.build(config, f"{prefix}attention_conv.", load, ops),
                    BlockConv.build(config, f"{prefix}mlp_conv.", load, ops),
                )
                for prefix in (prefixes if config.conv_taps else ())
            ),
            norms=tuple(
                norm(name) for name in (*(f"{prefix}input_layernorm" for prefix in prefixes), "norm")
            ),
            **cls.around(config, load, target, draft_to_target, ops),
        )

    @staticmethod
    def around(
        config: DFlashConfig, load: Loader, target: Target, draft_to_target: Tensor, ops: Ops
    ) -> dict[str, Any]:
        """The fields of all but its layers."""
        hidden = config.hidden_size
        scale = target.embedding_scale if config.takes_scaled and not config.own_embedding else 1.0
        return {
            "embedding": embedding_of(config, load, target),
            "embedding_scale": scale if config.embedding_scale is None else config.embedding_scale,
            "mask_embedding": load(MASK_TENSOR, (hidden,)) if config.own_mask else None,
            "fc": ops.linear(load.linear({"fc": hidden}, len(config.aux_layers) * config.target_hidden_size)),
            "hidden_norm": load_norm(config, "hidden_norm", hidden, load, ops),
            "lm_head": output_of(config, load, target, ops),
            "one_pass": OnePass(mask_token_id=config.mask_token_id, first=0),
            "markov": Selector.build(config, load, draft_to_target, ops)
            if config.num_candidates
            else Markov.build(config, load, ops),
            **Head.common(config, draft_to_target, ops),
        }

    def fuse(self, features: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(features))

    def write_kv(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> None:
        """Of each layer, made of the features alone: neither tokens nor the layers before matter."""
        del token_ids
        heads = self.context(hidden).view(len(hidden), 2, len(self.blocks), -1, self.config.head_dim)
        for block, layer in zip(self.blocks, heads.unbind(2), strict=True):
            assert isinstance(block.attention, Attention)
            attend.write_kv(block.attention.layer, layer.flatten(1, 2).contiguous())

    def embed(self, token_ids: Tensor) -> Tensor:
        """The rows of a block, [rows] -> [rows, H]."""
        stream = F.embedding(token_ids, self.embedding)
        if self.mask_embedding is not None:
            is_mask = token_ids[:, None] == self.config.mask_token_id
            stream = torch.where(is_mask, self.mask_embedding, stream)
        return stream if self.embedding_scale == 1.0 else stream * self.embedding_scale

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """A block; no state goes in but the cache."""
        del hidden
        stream = self.embed(token_ids)
        normed = self.norms[0](stream)
        for index, (block, norm) in enumerate(zip(self.blocks, self.norms[1:], strict=True)):
            if not self.convs:
                stream, normed = norm.add(*block(stream, normed, attend))
                continue
            first, second = self.convs[index]
            attention = partial(block.attention, attend=attend)
            stream, normed = block.post_norm.add(stream, first.around(attention, normed, attend.uniform_q))
            changed = second.around(partial(_whole, block.mlp), normed, attend.uniform_q)
            stream, normed = norm.add(stream, changed)
        return stream, normed

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head(hidden)
        scale, cap = self.config.logit_scale, self.config.logit_cap
        if scale != 1.0:
            logits = logits * scale
        return logits if cap is None else (logits / cap).tanh() * cap


def _whole(mlp: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> Tensor:
    return joined(mlp(x))


def _context(config: LayerConfig, prefixes: list[str], load: Loader, ops: Ops) -> Projection:
    """The keys and values of all layers as one matrix."""
    size, norm = config.num_kv_heads * config.head_dim, None
    names = [f"{prefix}self_attn.{which}_proj" for which in "kv" for prefix in prefixes]
    weight = load.linear(dict.fromkeys(names, size), config.hidden_size, bias=config.qkv_bias)
    num_keys = len(prefixes) * config.num_kv_heads
    if config.qk_norm:
        weights = [load(f"{prefix}self_attn.k_norm.weight", (config.head_dim,)) for prefix in prefixes]
        norm = ops.rms_norm(
            torch.stack(weights).repeat_interleave(config.num_kv_heads, 0), config.rms_norm_eps
        )
    return Projection(
        linear=ops.linear(weight),
        input_scale=weight.static_scale,
        norm=norm,
        num_heads=2 * num_keys,
        head_dim=config.head_dim,
    )
