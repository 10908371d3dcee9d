"""Heads that draft a block in one pass: DFlash (Chen et al., 2026) and DSpark (DeepSeek-AI, 2026), published formats.

Of the accepted rows such a head keeps keys and values alone, made of the target's features in every layer; the newest
token and masks attend to these, and in most layers to one another. See the papers, arXiv 2602.06036 and 2607.05147.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.attention import Attend
from specgen.config import require, shown
from specgen.models.config_fields import Raw, architectures, count, flag, items, section
from specgen.models.layers import Attention, Block, Loader, Projection
from specgen.models.model_config import (
    HeadConfig,
    LayerConfig,
    dtype_name,
    head_biases,
    layer_settings,
    layer_windows,
)
from specgen.models.protocols import Head, OnePass, Target
from specgen.ops import Map, Norm, Ops

NOT_DFLASH = "no hidden_norm.weight: the checkpoint is not a DFlash or DSpark head"
DFLASH_IGNORED = frozenset({"d2t", "t2d", "rotary_emb.inv_freq"})
_NESTED = "dflash_config"
_DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel")
_IDS, _SPECULATORS_IDS = "target_layer_ids", "aux_hidden_state_layer_ids"
# Parts of later heads on the same layers, by what their tensors' names contain, and settings that belong to such heads
_NOT_BUILT = {"_conv.": "DFlash2's convolutions", "candidate_selector.": "DFlash2's candidate selector"}
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("input_embedding_scale", "output_multiplier", "attention_value_scale"), (None, 1)),
    **dict.fromkeys(
        ("final_logit_softcapping", "attention_sink_bias", "use_swa", "swa_window_size"), (None, False, 0)
    ),
    "attention_mode": (None, "gqa", "mha"),
    "projector_type": (None, "dspark"),
    **dict.fromkeys(
        ("dflash_query_causal", "log_snr_conditioning", "enable_qwen35_gated_q_proj"), (None, False)
    ),
    "speculators_model_type": (None, "dflash", "dspark"),
}
# How the rows of a block stand. anchor: the newest token and K - 1 masks, each of which predicts the next token;
# fill-in: the newest token and K masks, each of which predicts its own
BlockLayout = Literal["anchor", "fill-in"]
MarkovKind = Literal["vanilla", "gated", "rnn"]


def is_dflash(config: Raw, tensors: Set[str]) -> bool:
    """By the one tensor that EAGLE3 heads have in their first layer instead."""
    del config
    return "hidden_norm.weight" in tensors


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(HeadConfig):
    """A DFlash head, or with ``markov_rank`` above 0 a DSpark head."""

    family: ClassVar[str] = "DFlash"
    dialect: str
    block_size: int  # rows of a block as it was trained
    block_layout: BlockLayout
    mask_token_id: int
    causal_layers: tuple[bool, ...]
    markov_rank: int = 0
    markov_kind: MarkovKind = "vanilla"
    confidence: bool = (
        False  # whether it has a confidence head, and whether that reads the token before as well
    )
    confidence_reads_token: bool = False
    own_lm_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.mask_token_id < self.vocab_size,
            f"the mask token is {self.mask_token_id}, outside the vocabulary of {self.vocab_size}: wrong config",
        )
        for index, causal in enumerate(self.causal_layers):
            require(
                causal or self.window(index) is None,
                f"layer {index} has a window and is not causal: blocks that look ahead need full attention, use "
                "another head",
            )

    @property
    def title(self) -> str:
        return "a DSpark head" if self.markov_rank else "a DFlash head"

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
        for part, what in _NOT_BUILT.items():
            require(
                not any(part in name for name in tensors),
                f"the head has {what}, which are not built: use another",
            )
        layer = section(config, "transformer_layer_config") or config
        speculators = layer is not config
        flags = _merged(config)
        for name, values in _NEUTRAL.items():
            require(
                flags.get(name) in values,
                f"{name} is {shown(flags.get(name))}: heads that compute with it are not built, use another",
            )
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
        num_layers, windows = count(layer, "num_hidden_layers"), layer_windows(layer)
        return cls(
            dialect="speculators" if speculators else "DeepSpec" if _is_dspark(config) else "z-lab",
            draft_vocab_size=count({**layer, **config}, "draft_vocab_size", count(layer, "vocab_size")),
            target_hidden_size=count(config, "target_hidden_size", count(layer, "hidden_size")),
            num_layers=num_layers,
            aux_layers=aux_layers,
            aux_rule=aux_rule,
            own_embedding="embed_tokens.weight" in tensors,
            own_lm_head="lm_head.weight" in tensors,
            reads_output=False,
            block_size=count(flags, "block_size"),
            block_layout=_block_layout(config, flags, speculators),
            mask_token_id=cast(int, token),
            causal_layers=_causal_layers(config, flags, windows or (None,) * num_layers, speculators),
            markov_rank=markov,
            markov_kind=cast(MarkovKind, kind),
            confidence=confidence,
            confidence_reads_token=confidence and flag(flags, "confidence_head_with_markov"),
            qk_norm=any(name.endswith("self_attn.q_norm.weight") for name in tensors),
            windows=windows,
            dtype=dtype_name(config),
            **head_biases(
                layer, {name for name in tensors if name.startswith("layers.")}
            ),  # a Markov head has some too
            **layer_settings({name: value for name, value in layer.items() if name != "is_causal"}),
        )

    def facts(self) -> dict[str, str]:
        causal = [index for index, causal in enumerate(self.causal_layers) if causal]
        sees = "no layer" if not causal else "all layers" if all(self.causal_layers) else f"layers {causal}"
        rows = (
            "a mask predicts its own token"
            if self.block_layout == "fill-in"
            else "each row predicts the next token"
        )
        markov = f"{self.markov_kind}, rank {self.markov_rank}" if self.markov_rank else "none"
        before = " and the token before" * self.confidence_reads_token
        return {
            "dialect": self.dialect,
            "features": "the target's residual stream at the inputs of layers "
            + ", ".join(map(str, self.aux_layers)),
            "rule": self.aux_rule,
            "drafting": f"all drafts in one pass, with mask token {self.mask_token_id}",
            "block": f"{self.block_size} rows, {self.most_drafts} drafts, {self.block_layout}: {rows}",
            "causal": sees,
            "Markov head": markov,
            "confidence": f"its own head, of the hidden state{before}"
            if self.confidence
            else "of the softmax",
            "output": "its own output weights" if self.own_lm_head else "the target's output weights",
            **super().facts(),
        }


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


def _block_layout(config: Raw, flags: Raw, speculators: bool) -> BlockLayout:
    """DeepSpec's architectures have anchors, also where they are DFlash; speculators say it; others fill in."""
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
class DFlashHead(Head):
    """See the module."""

    config: DFlashConfig
    embedding: Tensor  # [V, H]; the target's unless the checkpoint has its own
    fc: Map  # [rows, num_features * Ht] -> [rows, H]
    hidden_norm: Norm
    context: Projection  # keys of all layers, then values of all: [rows, H] -> [rows, 2 * L * Hkv, D]
    blocks: tuple[Block, ...]
    norms: tuple[Norm, ...]  # of the inputs of each block, and the final one
    lm_head: Map | None  # [n, H] -> [n, Vd]; None: the target's
    target: Target

    @classmethod
    def build(
        cls, config: DFlashConfig, load: Loader, target: Target, draft_to_target: Tensor, ops: Ops
    ) -> "DFlashHead":
        """Load every tensor of the head; embedding and output weights are the target's unless it has its own."""
        hidden, table, eps = config.hidden_size, target.embedding, config.rms_norm_eps
        if config.own_embedding:
            table = load("embed_tokens.weight", (config.vocab_size, hidden))
        prefixes = [f"layers.{index}." for index in range(config.num_layers)]

        def norm(name: str) -> Norm:
            return ops.rms_norm(load(f"{name}.weight", (hidden,)), eps)

        num_features = len(config.aux_layers)
        return cls(
            config=config,
            embedding=table,
            fc=ops.linear(load.linear({"fc": hidden}, num_features * config.target_hidden_size)),
            hidden_norm=norm("hidden_norm"),
            context=_context(config, prefixes, load, ops),
            blocks=tuple(
                Block.build(config, index, prefix, load, ops, hidden) for index, prefix in enumerate(prefixes)
            ),
            norms=tuple(
                norm(name) for name in (*(f"{prefix}input_layernorm" for prefix in prefixes), "norm")
            ),
            lm_head=ops.linear(load.linear({"lm_head": config.draft_vocab_size}, hidden))
            if config.own_lm_head
            else None,
            target=target,
            one_pass=OnePass(
                mask_token_id=config.mask_token_id, first=0, num_extra=int(config.block_layout == "fill-in")
            ),
            markov=Markov.build(config, load, ops),
            **cls.common(config, draft_to_target, ops),
        )

    def fuse(self, features: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(features))

    def write_kv(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> None:
        """Of each layer, made of the features alone: neither tokens nor the layers before matter."""
        del token_ids
        heads = self.context(hidden).view(len(hidden), 2, len(self.blocks), -1, self.config.head_dim)
        for block, layer in zip(self.blocks, heads.unbind(2), strict=True):
            assert isinstance(block.attention, Attention)
            attend.write_kv(block.attention.layer, layer.flatten(1, 2))

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """A block; no state goes in but the cache."""
        del hidden
        stream = F.embedding(token_ids, self.embedding)
        normed = self.norms[0](stream)
        for block, norm in zip(self.blocks, self.norms[1:], strict=True):
            stream, normed = norm.add(*block(stream, normed, attend))
        return stream, normed

    def logits(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden) if self.lm_head is None else self.lm_head(hidden)


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
        num_normed=num_keys,
        num_heads=2 * num_keys,
    )
