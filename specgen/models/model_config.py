"""The ``config.json`` of a target or a head, validated and under one set of names."""

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from specgen.attention import LatentDims
from specgen.config import require, shown
from specgen.kv.kv_cache import KVSpec, StateSpec
from specgen.models.config_fields import (
    LARGEST_COUNT,
    Raw,
    architectures,
    by_layer,
    count,
    flag,
    items,
    number,
)
from specgen.models.config_keys import HEADS, Keys, refuse_values
from specgen.models.fp8_config import Fp8Config, fp8_config
from specgen.models.rotary import RopeConfig, latent_scale
from specgen.ops.experts import MXFP4_BLOCK, Activation, Weighing
from specgen.ops.weight import GROUP


@dataclass(frozen=True, kw_only=True)
class LatentConfig(LatentDims):
    """Latent attention as a model has it."""

    query_rank: int | None  # of the queries' own latent, which is not stored; None: they have none
    scale: float  # of q . k
    interleaved: bool  # rotary pairs are neighbours in the checkpoint, not halves

    def __post_init__(self) -> None:
        require(
            self.rope_dim % 2 == 0, f"qk_rope_head_dim is {self.rope_dim}: rotary positions need an even one"
        )

    @classmethod
    def from_hf(cls, config: Raw) -> "LatentConfig":
        """Read the fields that DeepSeek-V3 and its relatives have."""
        require(
            not flag(config, "attention_bias"),
            "attention_bias is true: latent attention with biases is not supported, use another checkpoint",
        )
        nope, rope = count(config, "qk_nope_head_dim"), count(config, "qk_rope_head_dim")
        return cls(
            rank=count(config, "kv_lora_rank"),
            nope_dim=nope,
            rope_dim=rope,
            value_dim=count(config, "v_head_dim"),
            query_rank=None if config.get("q_lora_rank") is None else count(config, "q_lora_rank"),
            scale=(nope + rope) ** -0.5 * latent_scale(config) ** 2,
            interleaved=flag({"rope_interleave": True, **config}, "rope_interleave"),
        )

    def __str__(self) -> str:
        queries = "" if self.query_rank is None else f", queries from {self.query_rank}"
        return (
            f"latent: {self.rank} + {self.rope_dim} numbers a position for all heads{queries}; keys {self.nope_dim} + "
            f"{self.rope_dim}, values {self.value_dim} wide"
        )


@dataclass(frozen=True, kw_only=True)
class SigmoidWeights:
    """Weights of DeepSeek-V3 and its relatives; see ``SigmoidRouting`` in ``ops/experts.py``."""

    num_groups: int
    num_chosen_groups: int
    normalized: bool
    scale: float

    def check(self, num_experts: int, num_chosen: int) -> None:
        """``UserError`` where so many cannot be chosen."""
        size, rest = divmod(num_experts, self.num_groups)
        fits = rest == 0 and self.num_chosen_groups <= self.num_groups and (self.num_groups == 1 or size >= 2)
        require(
            fits and num_chosen <= self.num_chosen_groups * size,
            f"n_group is {self.num_groups} and topk_group {self.num_chosen_groups} for {num_chosen} of {num_experts} "
            "experts: config.json is wrong",
        )

    def __str__(self) -> str:
        groups = f" from {self.num_chosen_groups} of {self.num_groups} groups" * (self.num_groups > 1)
        sums = ", divided by their sum" * self.normalized
        return f"the choice{groups} with a bias; weights by sigmoid{sums}, times {self.scale:g}"


# What the plain matrices of all experts of a layer are like where a checkpoint has them in one tensor each: the order
# of their dimensions, and whether gate and up alternate in the first or are its halves
Fused = Literal["out, in", "in, out", "in, out alternating"]


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """The experts of a model: each token goes through the ``num_chosen`` that a router chooses in each layer."""

    num_experts: int
    num_chosen: int
    width: int  # of an expert's gate, and of its up
    layers: tuple[bool, ...]  # by layer: whether it is a mixture; the others have an MLP
    weights: Weighing | SigmoidWeights  # how a router's logits become weights
    router: str  # its name in a checkpoint, beside "experts"
    scales: str | None = None  # and that of what the weight of each expert is multiplied by
    biases: bool = False  # of router and experts
    fused: Fused = "out, in"
    mxfp4: bool = False
    shared_width: int = 0  # of the expert that all tokens go through; 0: there is none
    shared_gate: bool = False  # it counts by the sigmoid of a gate's logit
    beside_mlp: bool = False  # which these layers have too
    # see Gating
    activation: Activation = "swish"
    alpha: float = 1.0
    shift: float = 0.0
    limit: float | None = None

    def __post_init__(self) -> None:
        require(
            self.num_chosen <= self.num_experts,
            f"num_experts_per_tok is {self.num_chosen} of {self.num_experts} experts: config.json is wrong",
        )
        if isinstance(self.weights, SigmoidWeights):
            self.weights.check(self.num_experts, self.num_chosen)

    @property
    def multiple(self) -> int:
        """What GEMMs of experts ask of their widths: whole blocks of MXFP4, else 16 bytes in half precision."""
        return MXFP4_BLOCK if self.mxfp4 else 8

    @property
    def weighs_inputs(self) -> bool:
        """Whether a weight multiplies what goes into an expert, not what comes out of it."""
        return self.weights == "sigmoid"

    @property
    def num_like_experts(self) -> int:
        """As how many experts more the shared one can be computed, if its weights are stored as theirs; 0: as none."""
        count, rest = divmod(self.shared_width, self.width)
        return 0 if rest or self.weighs_inputs else count

    def shared(self, count: int) -> "MixtureConfig":
        """What one of ``count`` ranks has of it: a part of every expert."""
        return replace(self, width=self.width // count, shared_width=self.shared_width // count)

    def facts(self) -> dict[str, str]:
        """How it was understood: printed texts by label."""
        mixtures, total = sum(self.layers), len(self.layers)
        where = "all layers" if mixtures == total else f"{mixtures} of {total} layers"
        form = ", in MXFP4" if self.mxfp4 else ""
        limit = "" if self.limit is None else f", gate and up clamped at {self.limit:g}"
        gated = " and gated" * self.shared_gate
        shared = f"; beside one for all tokens, {self.shared_width} wide{gated}" if self.shared_width else ""
        weights = _WEIGHTS[self.weights] if isinstance(self.weights, str) else str(self.weights)
        return {
            "experts": f"{self.num_experts} in {where}, {self.width} wide{form}{limit}{shared}",
            "router": f"chooses {self.num_chosen} per token; {weights}",
        }


_WEIGHTS = {
    "softmax": "weights from the softmax over all",
    "normalized": "weights from the softmax over all, divided by their sum",
    "softmax of chosen": "weights from the softmax over the chosen",
    "sigmoid": "weights by sigmoid, of the expert's inputs",
}


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """The layers of a hybrid that have a Gated DeltaNet (Yang et al., 2024) in place of attention."""

    layers: tuple[bool, ...]  # by layer: whether it is one; the others attend
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int  # of the convolution

    def __post_init__(self) -> None:
        require(
            self.num_value_heads % self.num_key_heads == 0,
            f"{self.num_value_heads} linear value heads cannot share {self.num_key_heads} key heads: config.json is "
            "wrong",
        )

    def __str__(self) -> str:
        return (
            f"{self.layers.count(True)} of {len(self.layers)} layers keep a state in place of keys and values: "
            f"{self.num_value_heads} heads of {self.value_dim} x {self.key_dim}, {self.num_key_heads} key heads, "
            f"behind a convolution over {self.num_taps} positions"
        )

    def shared(self, count: int) -> "DeltaConfig":
        """What one of ``count`` ranks has of it: key heads, and the value heads that share them."""
        heads = self.num_key_heads // count, self.num_value_heads // count
        return replace(self, num_key_heads=heads[0], num_value_heads=heads[1])

    @property
    def num_channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The decoder layers and vocabulary of a target or a head."""

    interleaved: ClassVar[bool] = False  # rotary pairs are neighbours in the checkpoint, not halves of a head
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qk_norm: bool
    dtype: str  # of the weights, by the config
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()  # by layer: positions that a row sees, its own included; None: all
    sinks: bool = False  # of every layer's attention
    chunk: int = 0  # positions of one, of layers that attend in chunks; 0: none do
    query_gates: bool = False  # a head's output counts by the sigmoid of a gate, which q_proj makes too
    norm_casts_last: bool = False  # norms round behind the product with their weight
    norm_adds_one: bool = False  # to their weights
    mixture: MixtureConfig | None = None
    latent: LatentConfig | None = None  # of every layer's attention; None: it has its own keys and values
    delta: DeltaConfig | None = None  # of the layers that have a recurrent state; None: all attend
    fp8: Fp8Config | None = None  # of the linear layers that are stored in it; None: of none
    prefix: str = "model."  # of the names of a target's tensors, but for the output weights

    def __post_init__(self) -> None:
        share = self.rope.share
        require(
            share == 1 or (self.query_gates and share < 1),
            f"partial_rotary_factor is {share:g}: only fully rotary heads are supported",
        )
        require(
            self.rotary_dim > 0 and self.rotary_dim % 2 == 0,
            f"head_dim is {self.head_dim} and partial_rotary_factor {share:g}: rotary positions need an even number",
        )

    def window(self, index: int) -> int | None:
        """Positions that a row of layer ``index`` sees, its own included; None: all."""
        return self.windows[index] if self.windows else None

    def causal(self, index: int) -> bool:
        """Whether a row of layer ``index`` sees no row of its sequence behind it."""
        del index
        return True

    def mixture_of(self, index: int) -> MixtureConfig | None:
        """The experts of layer ``index``; None: it has an MLP."""
        return self.mixture if self.mixture is not None and self.mixture.layers[index] else None

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated."""
        return int(self.head_dim * self.rope.share) if self.latent is None else self.latent.rope_dim

    @property
    def kv_spec(self) -> KVSpec:
        """What the cache stores of layers that attend: keys and values of grouped-query attention, or latents."""
        # one shape for all equal layers: a config may claim millions
        shapes: dict[tuple[int, int], tuple[int, int]] = {}
        found = (self.kv_heads(layer) for layer in range(self.num_layers) if self.stores(layer))
        layers = tuple(shapes.setdefault(shape, shape) for shape in found)
        windows = tuple(each for layer, each in enumerate(self.windows) if self.stores(layer))
        return KVSpec(num_planes=2 if self.latent is None else 1, layers=layers, windows=windows)

    def kv_heads(self, layer: int) -> tuple[int, int]:
        """How many heads of keys ``layer`` attends to, and their width."""
        return (self.num_kv_heads, self.head_dim) if self.latent is None else (1, self.latent.width)

    @property
    def state_spec(self) -> StateSpec | None:
        """The recurrent states of a sequence; None: there are none."""
        delta = self.delta
        if delta is None:
            return None
        return StateSpec(
            num_layers=delta.layers.count(True),
            num_heads=delta.num_value_heads,
            key_dim=delta.key_dim,
            value_dim=delta.value_dim,
            num_channels=delta.num_channels,
            num_taps=delta.num_taps,
        )

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """Heads of keys and values and their width, of each kind of layer."""
        return ((self.num_kv_heads, self.head_dim),)

    def attends(self, layer: int) -> bool:
        """Whether ``layer`` has keys and values, and no recurrent state."""
        return self.delta is None or not self.delta.layers[layer]

    def stores(self, layer: int) -> bool:
        """Whether ``layer`` has keys and values of its own, and does not attend to those of another."""
        return self.attends(layer)

    @property
    def prompts_in_blocks(self) -> bool:
        """Whether pieces of one prompt may be laid out as sequences of one pass: each layer computes them as it does
        those of a decode pass, and none depends on the state behind another.
        """
        return self.latent is None and self.delta is None

    def cache_index(self, layer: int) -> int:
        """Of the keys and values of ``layer`` in the cache, or of its state: its number among those of its kind."""
        return sum(self.attends(before) == self.attends(layer) for before in range(layer))

    def shared(self, count: int) -> Self:
        """The layers of one of ``count`` ranks, as if they were a model's; ``UserError`` where they cannot be shared.

        Where there are fewer KV heads than ranks, each has one.
        """
        fitting = [each for each in (1, 2, 4, 8, 16) if self._can_share(each)]
        require(
            self._can_share(count),
            f"tensor-parallel is {count}, which does not divide this model's heads and widths, or the blocks of its "
            f"quantized weights, evenly: use one of {', '.join(map(str, fitting))}",
        )
        mixture, delta = self.mixture, self.delta
        return replace(
            self,
            num_heads=self.num_heads // count,
            num_kv_heads=max(self.num_kv_heads // count, 1),
            intermediate_size=self.intermediate_size // count,
            mixture=None if mixture is None else mixture.shared(count),
            delta=None if delta is None else delta.shared(count),
        )

    def _can_share(self, count: int) -> bool:
        """Whether ``count`` ranks have equal parts, with separate scales where blocks of a weight share one."""
        mixture, delta, shapes = self.mixture, self.delta, self.kv_shapes
        block = GROUP if self.fp8 is not None and self.fp8.weights == "block" else 1
        widths = [max(heads, count) * size for kv, size in shapes for heads in (self.num_heads, kv)]
        if self.latent is not None:  # kv_b_proj and o_proj; a head's own keys are always whole
            widths += [self.num_heads * (self.latent.nope_dim + self.latent.value_dim)]
            widths += [self.num_heads * self.latent.value_dim]
        if mixture is None or mixture.beside_mlp or not all(mixture.layers):
            widths.append(self.intermediate_size)
        heads = [self.num_heads]
        if delta is not None:
            widths += [delta.num_key_heads * delta.key_dim, delta.num_value_heads * delta.value_dim]
            heads.append(delta.num_key_heads)
        if mixture is not None:
            widths.append(mixture.shared_width)
        whole = all(width % (count * block) == 0 for width in widths)
        whole = whole and all(number % count == 0 for number in heads)
        experts = mixture is None or mixture.width % (count * max(block, mixture.multiple)) == 0
        stored = all(kv % count == 0 or count % kv == 0 for kv, _ in shapes)
        return count == 1 or (whole and experts and stored)

    def facts(self) -> dict[str, str]:
        """How the config was understood: printed texts by label."""
        dense = self.mixture is None or not all(self.mixture.layers)
        mlp = f", MLP {self.intermediate_size} wide" if dense else ""
        return {
            "layers": f"{self.num_layers}, {self.hidden_size} wide{mlp}",
            **({} if self.mixture is None else self.mixture.facts()),
            "attention": self._attention(),
            **({} if self.delta is None else {"recurrence": str(self.delta)}),
            "rotary": str(self.rope),
            **self._deviations(),
        }

    def _attention(self) -> str:
        if self.latent is not None:
            return f"{self.num_heads} heads, {self.latent}"
        gated = ", outputs gated" * self.query_gates
        return f"{self.num_heads} heads, {self.num_kv_heads} KV heads, {self.head_dim} wide each{gated}"

    def _deviations(self) -> dict[str, str]:
        """What layers of a Llama do not have."""
        biased = {"q, k and v": self.qkv_bias, "attention output": self.o_bias, "MLP": self.mlp_bias}
        biases = ", ".join(name for name, there in biased.items() if there)
        windows = ", ".join("all" if window is None else f"{window:,}" for window in self.windows)
        facts = {
            "biases": (biases, bool(biases)),
            "windows": (f"{windows} positions, by layer", any(self.windows)),
            "sinks": ("one per head, in the sum of the softmax alone", self.sinks),
            "quantized": (str(self.fp8), self.fp8 is not None),
            "norm": (
                f"rounded behind the product with its weight{' plus 1' * self.norm_adds_one}",
                self.norm_casts_last,
            ),
        }
        return {name: text for name, (text, there) in facts.items() if there}


@dataclass(frozen=True, kw_only=True)
class TargetConfig(LayerConfig):
    """A target of any family."""

    scaled_embedding: ClassVar[bool] = False  # the first layer's input is the embedding times a number
    architecture: str
    max_positions: int
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_hf(
        cls,
        config: Raw,
        *,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        windowed: bool = False,
        sinks: bool = False,
        query_gates: bool = False,
        norm_casts_last: bool = False,
        norm_adds_one: bool = False,
        mixture: MixtureConfig | None = None,
        latent: LatentConfig | None = None,
        delta: DeltaConfig | None = None,
    ) -> "TargetConfig":
        """Read the ``config.json`` of a Llama, or of a family that differs in what is given.

        ``windowed`` families have windows where ``layer_types`` says so. ``UserError`` names the first thing in the
        config that is not supported.
        """
        biased = flag(config, "attention_bias")
        if not windowed:
            _refuse_windows(config, count(config, "num_hidden_layers"))
        return cls(
            architecture=architectures(config)[0],
            num_layers=count(config, "num_hidden_layers"),
            max_positions=count(config, "max_position_embeddings"),
            tied_embeddings=flag(config, "tie_word_embeddings"),
            qk_norm=qk_norm,
            dtype=dtype_name(config),
            eos_token_ids=_eos_token_ids(config),
            qkv_bias=biased or qkv_bias,
            o_bias=biased,
            mlp_bias=flag(config, "mlp_bias"),
            windows=layer_windows(config) if windowed else (),
            sinks=sinks,
            query_gates=query_gates,
            norm_casts_last=norm_casts_last,
            norm_adds_one=norm_adds_one,
            mixture=mixture,
            latent=latent,
            delta=delta,
            **layer_settings(config),
        )

    def facts(self) -> dict[str, str]:
        tied = "tied to" if self.tied_embeddings else "separate from"
        return {
            "family": self.architecture + (", q and k normed" if self.qk_norm else ""),
            "vocabulary": f"{self.vocab_size:,} tokens; output weights {tied} the embedding",
            "context": f"{self.max_positions:,} tokens",
            "EOS tokens": ", ".join(map(str, self.eos_token_ids)) or "none",
            **super().facts(),
        }


@dataclass(frozen=True, kw_only=True)
class HeadConfig(LayerConfig):
    """A draft head of any family.

    ``aux_layers`` index the target's layer *inputs*: ``i`` is the residual stream that enters layer ``i``,
    and the target's number of layers is the stream after the last one; empty if it reads none, or the target is
    unknown and the head uses the default. ``aux_rule`` says how they were understood.
    """

    family: ClassVar[str]
    refusal: ClassVar[str]  # for a checkpoint that no family recognizes
    keys: ClassVar[Keys | None] = HEADS  # of its config.json; None: those of its target's family
    ignored: ClassVar[Set[str]] = frozenset()  # tensors in some checkpoints that no pass uses
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...] = ()
    aux_rule: str
    own_embedding: bool
    own_lm_head: bool
    reads_output: bool  # the one feature is the target's last hidden state, behind its final norm
    # drafts by a copy of its output layer, or the target's (``--draft-lm-head fp8``)
    fp8_output: bool = False
    takes_fp8: ClassVar[bool] = False
    splits: ClassVar[bool] = True  # over ranks, as the target's layers do
    is_model: ClassVar[bool] = False  # a target's: what the target accepts goes through all of it
    reads_target_kv: ClassVar[bool] = False  # and stores none: its rows all see what the target has stored
    sees_behind: ClassVar[int] = 0  # of that, positions behind the window of the target's own next row

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.fp8 is None or self.takes_fp8,
            "quantization_config is set: a head in FP8 is not supported, use a plain one",
        )

    @staticmethod
    def recognizes(config: Raw, tensors: Set[str]) -> bool:
        """Whether a checkpoint is of this family, by its ``config.json`` and the names of its tensors.

        False for all where a family is not known by them: a draft model is one that a target's family knows.
        """
        del config, tensors
        return False

    def num_shares(self, count: int) -> int:
        """Of how many of ``count`` ranks each has a share of the layers: all, or 1 where every rank has them whole."""
        return count if self.splits and self._can_share(count) else 1

    def shared(self, count: int) -> Self:
        return super().shared(self.num_shares(count))

    @property
    def most_drafts(self) -> int | None:
        """Drafts that it was trained to make in one pass; None: no number is known."""
        return None

    def pass_rows(self, num_drafts: int) -> int:
        """Rows per sequence of a pass that drafts, the last of which draft; 1: each draft has a pass of its own."""
        del num_drafts
        return 1

    @property
    def title(self) -> str:
        """What it is, with an article."""
        return f"an {self.family} head"

    @property
    def embedding_size(self) -> int:
        """Of a token's row in the table that its passes read."""
        return self.hidden_size

    @property
    def takes_scaled(self) -> bool | None:
        """Whether it takes the embedding of a target that scales it as that does, or as it is; None: not known."""
        return None

    @property
    def state_size(self) -> int:
        """Of the hidden state that its first pass takes."""
        return self.target_hidden_size if self.reads_output else self.hidden_size

    def over(self, target: "TargetConfig") -> Self:
        """The same for ``target``."""
        del target
        return self

    def misfits(self, target: "TargetConfig") -> tuple[str, ...]:
        """Why it cannot draft for ``target``, beside what any head's config says, with the remedy."""
        del target
        return ()

    def facts(self) -> dict[str, str]:
        share = self.draft_vocab_size / self.vocab_size
        return {
            "vocabulary": f"drafts {self.draft_vocab_size:,} of {self.vocab_size:,} tokens ({share:.1%})",
            "embedding": "its own" if self.own_embedding else "the target's",
            "output": "its own output weights" if self.own_lm_head else "the target's output weights",
            "target": f"{self.target_hidden_size} wide",
            **super().facts(),
        }


def layer_settings(config: Raw) -> dict[str, Any]:
    """The settings that the layers of targets and heads have in common."""
    refuse_values(config)
    hidden_size, num_heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    num_kv_heads = count(config, "num_key_value_heads", num_heads)
    head_dim = count(config, "head_dim", hidden_size // num_heads)
    require(
        num_heads % num_kv_heads == 0,
        f"{num_heads} attention heads cannot share {num_kv_heads} KV heads: config.json is wrong",
    )
    require(head_dim % 2 == 0, f"head_dim is {head_dim}: rotary positions need an even one")
    return {
        "vocab_size": count(config, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": count(config, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": number(config, "rms_norm_eps", 1e-6),
        "rope": RopeConfig.from_hf(config),
        "fp8": fp8_config(config),
    }


def _refuse_windows(config: Raw, num_layers: int) -> None:
    """For families whose windows are not built: ``layer_types`` decides, without it ``sliding_window``."""
    window = config.get("sliding_window") if flag(config, "use_sliding_window", True) else None
    kinds, first = items(config, "layer_types"), config.get("max_window_layers") or 0
    require(type(first) is int, f"max_window_layers is {shown(first)}: it must be a number of layers")
    require(
        len(kinds) in (0, num_layers),
        f"layer_types names {len(kinds)} layers, num_hidden_layers {num_layers}: config.json is wrong",
    )
    for kind in kinds:
        require(
            kind == "full_attention",
            f"layer_types has {shown(kind)}: a target of this family needs full attention in all layers",
        )
    require(
        bool(kinds) or window is None or first >= num_layers,
        f"sliding_window is {shown(window)} and in use: a target of this family needs full attention in all layers",
    )


def layer_windows(config: Raw) -> tuple[int | None, ...]:
    """The window of each layer; none where the config names no kinds of layers."""
    windowed = by_layer(config, "layer_types", {"full_attention": False, "sliding_attention": True})
    window = config.get("sliding_window")
    require(
        bool(windowed) or not (window and config.get("use_sliding_window", True)),
        f"sliding_window is {shown(window)} and no layer_types say of which layers: add them, as the model was trained",
    )
    return tuple(count(config, "sliding_window") if each else None for each in windowed)


def head_layer_settings(config: Raw, tensors: Set[str]) -> dict[str, Any]:
    """The settings of a head's layers, which are a Llama's or Qwen's; ``tensors`` are the names in its checkpoint.

    Published configs often do not say which linear layers have a bias, so the tensors do.
    """

    def any_of(*names: str) -> bool:
        return any(tensor.endswith(tuple(f"{name}.bias" for name in names)) for tensor in tensors)

    for name, tensor in (("attention_bias", "q_proj"), ("qkv_bias", "q_proj"), ("mlp_bias", "gate_proj")):
        require(
            not flag(config, name) or any_of(tensor),
            f"{name} is true, but there is no {tensor}.bias: the checkpoint is incomplete",
        )
    return {
        "num_layers": count(config, "num_hidden_layers"),
        "windows": layer_windows(config),
        "qk_norm": any(name.endswith("self_attn.q_norm.weight") for name in tensors),
        "qkv_bias": any_of("q_proj", "k_proj", "v_proj"),
        "o_bias": any_of("o_proj"),
        "mlp_bias": any_of("gate_proj", "up_proj", "down_proj"),
        **layer_settings(config),
    }


def dtype_name(config: Raw) -> str:
    """The dtype of the weights, by the config."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def _eos_token_ids(config: Raw) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    plain = all(type(i) is int and 0 <= i < LARGEST_COUNT for i in ids)
    require(plain, f"eos_token_id is {shown(value)}: it must be a token id, or a list of them")
    return tuple(ids)
