"""The assistants of Gemma 4 (2026): heads without keys and values, which read those of the target's last layers.

All K passes of a step have one row a sequence, at one position; what differs is the token, and the state fed back.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.attention import Attend, LayerAttention
from specgen.config import require, shown
from specgen.kv.layout import Layout
from specgen.models.config_fields import Raw, architectures, count, flag
from specgen.models.config_keys import GEMMA4_ASSISTANT, Keys
from specgen.models.gemma4 import Gemma4, Gemma4Config, Gemma4Layers, Gemma4Stack, head_layers
from specgen.models.loader import Loader
from specgen.models.model_config import HeadConfig, TargetConfig
from specgen.models.protocols import Head, Target
from specgen.models.rotary import rope_of
from specgen.ops import Map, Ops, Rope, Store

_TABLE = "model.embed_tokens"
TOKEN_ORDERING = "masked_embedding.token_ordering"
# Where a row stands, from the newest position that is stored: transformers, which is Google's own code, rotates queries
# for the token that is drafted from, whose keys are not there yet, and lets them see a window and this many more
# behind it. vLLM and SGLang take 0. Scores are of distances, so each differs by a position; a pair's acceptance tells.
AHEAD = 1


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(Gemma4Layers, HeadConfig):
    """An assistant, whose layers have queries alone."""

    family: ClassVar[str] = "Gemma 4 assistant"
    refusal: ClassVar[str] = "no pre_projection.weight: the checkpoint is not an assistant of Gemma 4 either"
    keys: ClassVar[Keys | None] = GEMMA4_ASSISTANT
    # read as the vocabulary map; tied
    ignored: ClassVar[Set[str]] = frozenset({TOKEN_ORDERING, "lm_head.weight"})
    reads_target_kv: ClassVar[bool] = True
    sees_behind: ClassVar[int] = 1 + AHEAD  # its row is one before, and its window is so much longer
    num_centroids: int  # of groups of tokens; 0: all tokens have logits
    num_chosen: int  # of these, whose tokens alone have logits

    @staticmethod
    def recognizes(config: Raw, tensors: Set[str]) -> bool:
        """By the architecture's name, or by the tensors that no other head has."""
        named = any(name.startswith("Gemma4") and "Assistant" in name for name in architectures(config))
        return named or {"pre_projection.weight", "post_projection.weight"} <= tensors

    @property
    def title(self) -> str:
        return "an assistant of Gemma 4"

    @property
    def embedding_size(self) -> int:
        return self.target_hidden_size

    @property
    def takes_scaled(self) -> bool:
        return True

    def num_shares(self, count: int) -> int:
        return count  # as of what it reads

    @property
    def output_share(self) -> float:
        """Of the output weights, what a draft reads."""
        return self.num_chosen / self.num_centroids if self.num_centroids else 1.0

    @classmethod
    def from_hf(cls, config: Raw, tensors: Set[str], _: int | None) -> "AssistantConfig":
        """Read an assistant's ``config.json``; it depends on no number of layers."""
        layers, ordered = head_layers(config), flag(config, "use_ordered_embeddings")
        require(
            flag({"tie_word_embeddings": True, **config}, "tie_word_embeddings"),
            "tie_word_embeddings is false: only assistants whose output weights are their embed_tokens are supported",
        )
        require(
            not flag(config.get("text_config") or {}, "use_double_wide_mlp"),
            "use_double_wide_mlp is true: an assistant's MLPs are intermediate_size wide, config.json is wrong",
        )
        centroids = count(config, "num_centroids", 2048) if ordered else 0
        vocab_size = layers["vocab_size"]
        require(
            not centroids or vocab_size % centroids == 0,
            f"num_centroids is {centroids}, which does not divide a vocabulary of {vocab_size}: config.json is wrong",
        )
        chosen = count(config, "centroid_intermediate_top_k", 32) if ordered else 0
        require(
            chosen <= centroids,
            f"centroid_intermediate_top_k is {chosen} of {centroids} centroids: config.json is wrong",
        )
        return cls(
            **layers | {"num_shared": layers["num_layers"]},
            draft_vocab_size=vocab_size,
            target_hidden_size=count(config, "backbone_hidden_size"),
            aux_rule="an assistant reads the last hidden state alone",
            own_embedding=False,
            own_lm_head=True,
            reads_output=True,
            num_centroids=centroids,
            num_chosen=chosen,
        )

    def misfits(self, target: TargetConfig) -> tuple[str, ...]:
        if self.fp8_output and self.num_centroids:
            return (
                f"draft-lm-head is fp8, but a draft reads only {self.output_share:.1%} of its output weights: "
                "leave it out",
            )
        if not isinstance(target, Gemma4Config):
            return (
                f"it reads what layers of a Gemma 4 store, and the target is a {target.architecture}: use its own",
            )
        for index in range(self.num_layers):
            windowed = self.window(index) is not None
            if windowed not in (window is not None for window in target.windows):
                kind = "a window" if windowed else "no window"
                return (f"its layer {index} has {kind} and no layer of the target has: use its own target",)
            theirs = target.last_stored(windowed)
            for what, ours, other in (
                ("heads and width of keys", self.kv_heads(index), target.kv_heads(theirs)),
                ("the window", self.window(index), target.window(theirs)),
                ("the rotation", str(self.rope_of(index)), str(target.rope_of(theirs))),
            ):
                if ours != other:
                    return (
                        f"{what} of its layer {index}: {shown(ours)}, of the target's layer {theirs}, which it reads: "
                        f"{shown(other)}; use its own target",
                    )
        return ()

    def facts(self) -> dict[str, str]:
        size = self.num_chosen * self.vocab_size // max(self.num_centroids, 1)
        groups = f"of {size:,} tokens: the {self.num_chosen} most likely of {self.num_centroids} groups"
        return {
            "features": "the target's last hidden state, behind its final norm",
            "drafting": f"a pass for each draft, all at {AHEAD} behind the newest position that the target has stored",
            **super().facts(),
            "embedding": "the target's, scaled as there",
            "output": "its own output weights" + f", {groups}" * (self.num_centroids > 0),
            "shared KV": "keys and values are those of the target's last layers that store some",
        }


def _ahead(rope: Rope) -> Rope:
    """``rope`` of rows that stand ``AHEAD`` of those of their layout."""

    def planned(layout: Layout) -> Store:
        return rope(replace(layout, starts=layout.starts + AHEAD))

    return planned


@dataclass(frozen=True, kw_only=True)
class OrderedOutput:
    """Logits of the tokens in the groups whose centroids fit best, -inf of all others.

    Drafts are numbered group by group.
    """

    centroids: Map  # [n, H] -> [n, groups]
    num_chosen: int
    weight: Tensor  # [V, H], in the order of the drafts

    @classmethod
    def build(cls, config: AssistantConfig, order: Tensor, load: Loader, ops: Ops) -> "OrderedOutput":
        """``order`` [V] are the tokens of the embedding [V, H], group by group."""
        table = load(f"{_TABLE}.weight", (config.vocab_size, config.hidden_size))
        names = {"masked_embedding.centroids": config.num_centroids}
        return cls(
            centroids=ops.linear(load.linear(names, config.hidden_size)),
            num_chosen=config.num_chosen,
            weight=F.embedding(order.long(), table),
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V]."""
        fitting = self.centroids(hidden)
        best = fitting.topk(self.num_chosen, -1).indices  # [n, chosen]
        groups = self.weight.view(fitting.shape[1], -1, hidden.shape[1])
        found = groups[best].flatten(1, 2) @ hidden[:, :, None]  # [n, chosen * size, 1]
        size = groups.shape[1]
        nothing = hidden.new_full((len(hidden), len(groups), size), float("-inf"))
        places = best[:, :, None].expand(-1, -1, size)
        return nothing.scatter(1, places, found.view(len(hidden), -1, size)).flatten(1)


@dataclass(frozen=True, kw_only=True)
class AssistantHead(Head):
    """See the module."""

    config: AssistantConfig
    target: Target  # for its embedding
    enter: Map  # embedding and hidden state of the target concatenated, [rows, 2 * Ht] -> [rows, H]
    layers: Gemma4Stack
    leave: Map  # [rows, H] -> [rows, Ht]
    output: Callable[[Tensor], Tensor]  # [n, H] -> [n, V]

    @classmethod
    def build(
        cls, config: AssistantConfig, load: Loader, target: Target, draft_to_target: Tensor, ops: Ops
    ) -> "AssistantHead":
        """Load every tensor of the head; ``target`` is a Gemma 4."""
        hidden, wide, device = config.hidden_size, config.target_hidden_size, draft_to_target.device
        turned = _ahead(rope_of(config.global_rope, config.global_kv_heads[1], ops, device))
        common: dict[str, Any] = cls.common(config, draft_to_target, ops)
        layers = [_reading(config, index, cast(Gemma4, target), turned) for index in range(config.num_layers)]
        return cls(
            target=target,
            enter=ops.linear(load.linear({"pre_projection": hidden}, 2 * wide)),
            layers=Gemma4Stack.build(config, "model.", layers, load, ops),
            leave=ops.linear(load.linear({"post_projection": wide}, hidden)),
            output=OrderedOutput.build(config, draft_to_target, load, ops)
            if config.num_centroids
            else ops.linear(load.output(_TABLE, config.vocab_size, hidden)),
            **common | {"rope": _ahead(common["rope"])},
        )

    def write_kv(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> None:
        """Nothing: the target has stored all that is read."""

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        embedded = F.embedding(token_ids, self.target.embedding) * self.target.embedding_scale
        stream = self.enter(torch.cat((embedded, hidden), -1))
        _, normed = self.layers.last(stream, attend)
        return self.leave(normed), normed

    def logits(self, hidden: Tensor) -> Tensor:
        logits, cap = self.output(hidden), self.config.logit_cap
        return logits if cap is None else (logits / cap).tanh() * cap


def _reading(config: AssistantConfig, index: int, target: Gemma4, turned: Rope) -> LayerAttention:
    """What layer ``index`` reads of ``target``; ``turned`` is the rotation of layers without a window."""
    window = config.window(index)
    return replace(
        target.stored(window is not None),
        window=None if window is None else window + AHEAD,
        rope=turned if window is None else None,
        stores=False,
    )
