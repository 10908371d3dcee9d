"""EAGLE heads: EAGLE3, and EAGLE-1 (Li et al., 2024), which is EAGLE-2's too: published formats, and how they draft."""

from collections.abc import Container, Set
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.attention import Attend
from specgen.config import UserError, require, shown
from specgen.models.config_fields import Raw, architectures, count, flag, section
from specgen.models.layers import HeadLayers, load_norm
from specgen.models.loader import Loader
from specgen.models.model_config import HeadConfig, dtype_name, head_layer_settings
from specgen.models.protocols import Head, OnePass, Target, embedding_of, output_of
from specgen.ops import Map, Norm, Ops, Pair, joined

_ROTARY = [f"{prefix}rotary_emb.inv_freq" for prefix in ("", "midlayer.self_attn.", "layers.0.self_attn.")]
_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # in vLLM's order
_AUX_KEY = "eagle_aux_hidden_state_layer_ids"
_NORMS = {
    "norm_before_fc": "one over the concatenated features",
    "fc_norm": "one for each feature",
    "norm_before_residual": "before the residual",
    "norm_output": "of the hidden state fed back",
    "qk_norm": "of q and k",
}


def tensor_prefixes(tensors: Container[str], num_layers: int) -> tuple[str, list[str]]:
    """The prefix of all tensor names of a checkpoint, and those of its layers.

    The first layer is ``midlayer.*`` (EAGLE, SpecForge) or ``layers.0.*`` (speculators); before all names there may be
    ``model.``.
    """
    for root in ("", "model."):
        for layer in ("midlayer.", "layers.0."):
            if f"{root}{layer}hidden_norm.weight" in tensors:
                return root, [root + layer, *(f"{root}layers.{index}." for index in range(1, num_layers))]
    raise UserError(Eagle3Config.refusal)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """An EAGLE3 head; its first layer reads the embedding beside the hidden state."""

    family: ClassVar[str] = "EAGLE3"
    refusal: ClassVar[str] = (
        "no midlayer.hidden_norm.weight or layers.0.hidden_norm.weight: the checkpoint is not an EAGLE3 head"
    )
    # d2t and t2d are read separately, by the vocabulary map
    ignored: ClassVar[Set[str]] = frozenset(
        {"d2t", "t2d", "verifier_lm_head.weight", "verifier_norm.weight", *_ROTARY}
    )
    dialect: Literal["eagle", "speculators"]
    norm_before_residual: bool  # the residual is taken after hidden_norm
    norm_before_fc: bool  # one norm over the concatenated features
    fc_norm: bool  # a norm for each feature
    norm_output: bool  # the hidden state fed back is normed (EAGLE 3.1)
    mask_token_id: int | None  # of the slots behind the first in P-EAGLE, which drafts K tokens in one pass

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not (self.norm_before_fc and self.fc_norm),
            "norm_before_fc and fc_norm are both true: a head has one of them, or none",
        )
        require(
            not (self.reads_output and (self.norm_before_fc or self.fc_norm)),
            "use_aux_hidden_state is false, so there are no features for norm_before_fc or fc_norm: wrong config",
        )
        require(
            not self.reads_output or self.target_hidden_size == self.hidden_size,
            f"use_aux_hidden_state is false, so the target's hidden state goes in as it is: it is "
            f"{self.target_hidden_size} wide, the head {self.hidden_size}",
        )
        require(
            self.mask_token_id is None or self.mask_token_id < self.vocab_size,
            f"the mask token is {self.mask_token_id}, outside the vocabulary of {self.vocab_size}: wrong config",
        )

    @staticmethod
    def recognizes(config: Raw, tensors: Set[str]) -> bool:
        """By the architecture's name, or by the tensor that only EAGLE3 heads have."""
        named = "eagle3" in " ".join(architectures(config)).lower()
        return named or any(name.endswith("hidden_norm.weight") for name in tensors)

    def pass_rows(self, num_drafts: int) -> int:
        return 1 if self.mask_token_id is None else num_drafts

    @property
    def title(self) -> str:
        return super().title if self.mask_token_id is None else "a P-EAGLE head"

    @property
    def takes_scaled(self) -> bool:
        """Either is the same: a norm comes first."""
        return False

    @property
    def num_features(self) -> int:
        """How many of the target's hidden states are fused; three by default."""
        return 1 if self.reads_output else len(self.aux_layers) or 3

    @classmethod
    def from_hf(cls, config: Raw, tensors: Set[str], num_target_layers: int | None) -> "Eagle3Config":
        """Read a head's ``config.json``.

        Only ``tensors``, the names in its checkpoint, tell whether it has q/k norms and its own embedding;
        the default aux layers depend on ``num_target_layers``.
        """
        kind = config.get("speculators_model_type", "eagle3")
        require(
            kind in ("eagle3", "peagle"),
            f"the head is of type {shown(kind)}: only eagle3 and peagle are supported",
        )
        layer = section(config, "transformer_layer_config") or config
        nested = section(config, "eagle_config")
        flags = {**nested, **config}
        # for vLLM it is an option of the engine, and SpecForge's configs say nothing
        parallel = flag(flags, "parallel_drafting") or any(name.endswith("mask_hidden") for name in tensors)
        parallel |= kind == "peagle"
        reads_output = not flag(flags, "use_aux_hidden_state", True)
        require(
            layer is config or parallel or flags.get("norm_before_residual") is not None,
            "config.json does not say norm_before_residual, which speculators then takes as false and vLLM as true: "
            "add it as the head was trained",
        )
        aux_layers, aux_rule = _aux_layers(config.get(_AUX_KEY), nested.get(_AUX_KEY), num_target_layers)
        if reads_output:
            aux_layers, aux_rule = (), "use_aux_hidden_state is false: no layer's input is read"
        return cls(
            dialect="eagle" if layer is config else "speculators",
            draft_vocab_size=count({**layer, **config}, "draft_vocab_size", count(layer, "vocab_size")),
            target_hidden_size=count(config, "target_hidden_size", count(layer, "hidden_size")),
            aux_layers=aux_layers,
            aux_rule=aux_rule,
            norm_before_residual=flag(flags, "norm_before_residual"),
            norm_before_fc=flag(flags, "norm_before_fc"),
            fc_norm=flag(flags, "fc_norm"),
            norm_output=flag(flags, "norm_output"),
            mask_token_id=_mask_token(flags) if parallel else None,
            own_embedding=any(name.endswith("embed_tokens.weight") for name in tensors),
            own_lm_head=True,
            reads_output=reads_output,
            dtype=dtype_name(config),
            **head_layer_settings(layer, tensors),
        )

    def facts(self) -> dict[str, str]:
        inputs = ", ".join(map(str, self.aux_layers)) or "2, L//2, L-3"
        norms = [f"{name} ({meaning})" for name, meaning in _NORMS.items() if getattr(self, name)]
        one_pass = f"all drafts in one pass (P-EAGLE), with mask token {self.mask_token_id}"
        return {
            "dialect": "EAGLE, SpecForge" if self.dialect == "eagle" else "speculators",
            "features": "the target's last hidden state, behind its final norm"
            if self.reads_output
            else f"the target's residual stream at the inputs of layers {inputs}",
            "rule": self.aux_rule,
            "norms": ", ".join(norms) or "those of the original EAGLE3",
            **({} if self.mask_token_id is None else {"drafting": one_pass}),
            **super().facts(),
        }


def _mask_token(flags: Raw) -> int:
    given = next((key for key in _MASK_KEYS if flags.get(key) is not None), None)
    require(
        given is not None,
        f"the head drafts in parallel (P-EAGLE), but config.json has none of {', '.join(_MASK_KEYS)}: add the id of "
        "the mask token that it was trained with",
    )
    token = flags[str(given)]
    require(type(token) is int and token >= 0, f"{given} is {shown(token)}: it must be a token id")
    return int(token)


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers of a target whose inputs EAGLE3 heads read unless they say otherwise."""
    return 2, num_layers // 2, num_layers - 3


def _aux_layers(top: object, nested: object, num_layers: int | None) -> tuple[tuple[int, ...], str]:
    """The layers whose inputs are the features, and the rule that gave them.

    Ids at the top level are vLLM's and speculators' (inputs). Ids in ``eagle_config`` are SpecForge's and NVIDIA's
    (outputs), except that some heads write the default inputs there (sgl-project/sglang#25454), and others inputs of
    which the last is the stream behind the last layer (sgl-project/sglang#32334).
    """
    default = () if num_layers is None else default_aux_layers(num_layers)
    if top:
        ids = _ids(top)
        rule = f"{_AUX_KEY} {list(ids)} are layer inputs (the speculators and vLLM format)"
        if ids == tuple(i - 1 for i in default):
            rule += "; read as layer outputs they would be the default: if acceptance is poor, add 1 to each"
        return ids, rule
    if nested:
        ids = _ids(nested)
        if ids == default:
            return ids, f"eagle_config.{_AUX_KEY} {list(ids)} are the default layer inputs"
        if num_layers in ids:
            reason = f"because a target of {num_layers} layers has no output of layer {num_layers}"
            return ids, f"eagle_config.{_AUX_KEY} {list(ids)} are layer inputs, {reason}"
        outputs = f"eagle_config.{_AUX_KEY} {list(ids)} are layer outputs (the SpecForge and NVIDIA format)"
        return tuple(i + 1 for i in ids), f"{outputs}, so 1 is added"
    return default, "no ids given: the default layer inputs 2, L//2, L-3 of a target of L layers"


def _ids(value: object) -> tuple[int, ...]:
    plain = isinstance(value, list) and all(type(i) is int for i in value)
    require(plain, f"{_AUX_KEY} is {shown(value)}: it must be a list of layer numbers")
    assert isinstance(value, list)
    ids = tuple(value)
    require(
        list(ids) == sorted(ids),
        f"{_AUX_KEY} is {shown(value)}: the layers must ascend, because others take them in that order",
    )
    return ids


@dataclass(frozen=True, kw_only=True)
class Eagle3Head(Head):
    """An EAGLE3 head in any of its formats; its first layer reads the embedding beside the hidden state."""

    config: Eagle3Config
    embedding: Tensor  # [V, H]; the target's unless the checkpoint has its own
    feature_norm: Norm | None  # over [rows, num_feature_norms, N]
    num_feature_norms: int  # 1: over all features concatenated
    fc: Map | None  # [rows, num_features * Ht] -> [rows, H]; None: the one feature is the hidden state
    inputs: Pair  # ids [rows] and hidden [rows, H] -> both normed, concatenated [rows, 2 * H]
    layers: HeadLayers
    norm: Norm
    lm_head: Map  # [n, H] -> [n, Vd]

    @classmethod
    def build(
        cls, config: Eagle3Config, load: Loader, target: Target, draft_to_target: Tensor, ops: Ops
    ) -> "Eagle3Head":
        """Load every tensor of the head; the embedding is the target's unless the head has its own."""
        root, prefixes = tensor_prefixes(load, config.num_layers)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        table = embedding_of(config, load, target, root)

        def vector(name: str) -> Tensor:
            return load(name, (hidden,))

        head = cls(
            embedding=table,
            feature_norm=_feature_norm(config, root, load, ops),
            num_feature_norms=config.num_features if config.fc_norm else 1,
            fc=_fc(config, root, load, ops),
            inputs=ops.embed_norm_concat(
                table,
                vector(prefixes[0] + "input_layernorm.weight"),
                vector(prefixes[0] + "hidden_norm.weight"),
                eps,
                False,
            ),
            layers=HeadLayers.build(config, prefixes, 2 * hidden, load, ops),
            norm=load_norm(config, f"{root}norm", hidden, load, ops),
            lm_head=output_of(config, load, target, ops),
            **cls.common(config, draft_to_target, ops),
        )
        if config.mask_token_id is None:
            return head
        features = load.flat(root + "mask_hidden", config.num_features * config.target_hidden_size)
        masks = OnePass(mask_token_id=config.mask_token_id, first=-1, hidden=head.fuse(features[None]))
        return replace(head, one_pass=masks)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [rows, num_features * Ht] as hidden states for ``forward``, [rows, H]."""
        if self.feature_norm is not None:
            grouped = features.view(features.shape[0], self.num_feature_norms, -1)
            features = self.feature_norm(grouped).flatten(1)
        return features if self.fc is None else self.fc(features)

    def write_kv(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> None:
        self.layers.write_kv(*self._enter(token_ids, hidden), attend)

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        stream, normed = self.norm.add(*self.layers(*self._enter(token_ids, hidden), attend))
        return normed if self.config.norm_output else stream, normed

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def _enter(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream [rows, H] that enters the first layer, and the inputs of its attention [rows, 2 * H]."""
        inputs = self.inputs(token_ids, hidden)
        return inputs[:, self.config.hidden_size :] if self.config.norm_before_residual else hidden, inputs


def _feature_norm(config: Eagle3Config, root: str, load: Loader, ops: Ops) -> Norm | None:
    count, width = config.num_features, config.target_hidden_size
    if config.norm_before_fc:
        return load_norm(config, f"{root}input_norm", count * width, load, ops)
    if config.fc_norm:
        weights = [load(f"{root}fc_norm.{index}.weight", (width,)) for index in range(count)]
        return ops.rms_norm(torch.stack(weights), config.rms_norm_eps)
    return None


def _fc(config: Eagle3Config, root: str, load: Loader, ops: Ops) -> Map | None:
    width = config.num_features * config.target_hidden_size
    if not config.reads_output:
        return ops.linear(load.linear({root + "fc": config.hidden_size}, width))
    if root + "fc.weight" in load:  # of no use then, and of another shape it would be of another kind of head
        load.linear({root + "fc": config.hidden_size}, width)
    return None


@dataclass(frozen=True, kw_only=True)
class Eagle1Config(HeadConfig):
    family: ClassVar[str] = "EAGLE-1"
    refusal: ClassVar[str] = (
        "no fc.weight and layers.0.self_attn.q_proj.weight: the checkpoint is not an EAGLE-1 head either"
    )
    ignored: ClassVar[Set[str]] = frozenset({"rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq"})
    splits: ClassVar[bool] = False  # no norm behind the last layer, which would sum over ranks
    fc_bias: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.draft_vocab_size == self.vocab_size,
            f"draft_vocab_size is {self.draft_vocab_size} of {self.vocab_size}: an EAGLE-1 head drafts the target's "
            "whole vocabulary",
        )

    @staticmethod
    def recognizes(config: Raw, tensors: Set[str]) -> bool:
        """By its tensors: a config says Llama or Qwen2, and nothing of a head."""
        named = {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= tensors
        return named and not Eagle3Config.recognizes(config, tensors)

    @classmethod
    def from_hf(cls, config: Raw, tensors: Set[str], _: int | None) -> "Eagle1Config":
        """Read a head's ``config.json``; its biases and embedding are found in ``tensors`` alone."""
        return cls(
            draft_vocab_size=count(config, "draft_vocab_size", count(config, "vocab_size")),
            target_hidden_size=count(config, "hidden_size"),
            aux_rule="an EAGLE-1 head reads the last hidden state alone",
            own_embedding="embed_tokens.weight" in tensors,
            own_lm_head=False,
            reads_output=True,
            fc_bias="fc.bias" in tensors,
            dtype=dtype_name(config),
            **head_layer_settings(config, tensors),
        )

    def facts(self) -> dict[str, str]:
        return {
            "features": "the target's last hidden state, behind its final norm",
            "norms": "none of the inputs, none at the end",
            "fc": "with a bias" if self.fc_bias else "without a bias",
            **super().facts(),
        }


@dataclass(frozen=True, kw_only=True)
class Eagle1Head(Head):
    """Layers of the target's kind over the embedding beside the hidden state; neither norm in front nor behind.

    Those of a Llama-4 have both.
    """

    embedding: Tensor  # [V, H]; the target's unless the checkpoint has its own
    fc: Map  # embedding and hidden state concatenated [rows, 2 * H] -> [rows, H]
    input_norm: Norm | None
    layers: HeadLayers
    norm: Norm | None
    lm_head: Map  # [n, H] -> [n, Vd]; the target's unless the checkpoint has its own

    @classmethod
    def build(
        cls, config: HeadConfig, load: Loader, target: Target, draft_to_target: Tensor, ops: Ops
    ) -> "Eagle1Head":
        """Load every tensor of the head; ``config`` is an ``Eagle1Config``."""
        assert isinstance(config, Eagle1Config)
        hidden = config.hidden_size
        prefixes = [f"layers.{index}." for index in range(config.num_layers)]
        return cls(
            embedding=embedding_of(config, load, target),
            fc=ops.linear(load.linear({"fc": hidden}, 2 * hidden, bias=config.fc_bias)),
            input_norm=None,
            layers=HeadLayers.build(config, prefixes, hidden, load, ops),
            norm=None,
            lm_head=output_of(config, load, target, ops),
            **cls.common(config, draft_to_target, ops),
        )

    def write_kv(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> None:
        self.layers.write_kv(*self._enter(token_ids, hidden), attend)

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """See ``Head.forward``; what ``logits`` takes is fed back."""
        stream, *parts = self.layers(*self._enter(token_ids, hidden), attend)
        if self.norm is None:
            found = (stream + joined(parts).sum(0)).to(stream.dtype)
        else:
            _, found = self.norm.add(stream, *parts)
        return found, found

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def _enter(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream, and what the first attention reads, [rows, H] each."""
        stream = self.fc(torch.cat((F.embedding(token_ids, self.embedding), hidden), -1))
        return stream, stream if self.input_norm is None else self.input_norm(stream)
