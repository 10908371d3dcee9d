"""The decoder of Llama and its relatives over packed rows, its output layer, and the names of its tensors."""

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.attention import Attend
from specgen.config import require
from specgen.models.layers import Block, load_norm
from specgen.models.loader import Loader
from specgen.models.model_config import TargetConfig
from specgen.models.rotary import rope_of
from specgen.ops import Map, Norm, Ops, Rope
from specgen.ops.fp8 import in_fp8
from specgen.ops.weight import Weight

_ALIGNED = 128  # rows that kernels take at once, or that share a scale in FP8


def rows_of(vocab_size: int, rank: int, num_ranks: int) -> range:
    """The tokens whose logits ``rank`` computes; the last one may have fewer. ``UserError`` for too few tokens."""
    require(
        vocab_size >= num_ranks**2,
        f"a vocabulary of {vocab_size} tokens cannot be shared by {num_ranks} ranks: use a smaller --tensor-parallel",
    )
    each = most_rows(vocab_size, num_ranks)
    return range(min(rank * each, vocab_size), min((rank + 1) * each, vocab_size))


def most_rows(vocab_size: int, num_ranks: int) -> int:
    """Of a rank; all but the last have as many."""
    each = -(-vocab_size // num_ranks)
    return -(-each // _ALIGNED) * _ALIGNED if each >= 32 * _ALIGNED else each


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """``lm_head``, split over the ranks by token."""

    lm_head: Map  # [n, H] -> [n, len(rows)]
    weight: Weight  # that of ``lm_head``; on a GPU the one that it reads
    cap: float | None = None  # of the logits, by tanh
    size: int  # V
    rows: range  # that this rank has
    ops: Ops

    @classmethod
    def build(cls, config: TargetConfig, embedding: Tensor, load: Loader, ops: Ops) -> "Vocabulary":
        """Load ``lm_head``; if it is tied, it is the rows of ``embedding`` [V, H]."""
        rows = rows_of(config.vocab_size, ops.ranks.rank, ops.ranks.size)
        tied = embedding[rows.start : rows.stop] if config.tied_embeddings else None
        weight = load.output("lm_head", len(rows), config.hidden_size, tied)
        return cls(lm_head=ops.linear(weight), weight=weight, size=config.vocab_size, rows=rows, ops=ops)

    def capped(self, cap: float | None) -> "Vocabulary":
        """The same with logits between ``-cap`` and ``cap``, by tanh."""
        return replace(self, cap=cap)

    def in_fp8(self) -> "Vocabulary":
        """The same by a copy of the weight in FP8, for drafts; itself where the weight is in FP8."""
        copy = in_fp8(self.weight)
        return self if copy is self.weight else replace(self, lm_head=self.ops.linear(copy), weight=copy)

    def share(self, hidden: Tensor) -> Tensor:
        """This rank's logits [n, len(rows)] of hidden states [n, H]."""
        logits = self.lm_head(hidden)
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap

    def whole(self, share: Tensor) -> Tensor:
        """Logits [..., V] from every rank's [..., len(rows)]."""
        ranks = self.ops.ranks
        if ranks.size == 1:
            return share
        most = most_rows(self.size, ranks.size)
        parts = ranks.gather(F.pad(share, (0, most - share.shape[-1])))
        return parts.movedim(0, -2).flatten(-2)[..., : self.size].contiguous()

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The first maximum of each row, and its logit: not finite where the row has NaN or an infinite maximum.

        ``logits`` are whole, [..., V], or a share of every rank, [..., len(rows)].
        """
        ids, value = self.ops.largest(logits)
        if logits.shape[-1] == self.size:
            return ids, value
        value = torch.where(value.isnan(), torch.inf, value)
        # ids and float32 are exact in float64
        found = self.ops.ranks.gather(torch.stack((value.double(), (ids + self.rows.start).double())))
        values, tokens = found.movedim(0, -1)  # [..., ranks] each
        # of equal ones the lowest rank's, so the lowest id
        first, value = self.ops.largest(values.contiguous())
        return tokens.gather(-1, first[..., None]).squeeze(-1).long(), value


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """What all targets have around their layers."""

    embedding: Tensor  # [V, H]
    vocabulary: Vocabulary
    rope: Rope  # of layers with a window, where these have another

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [n, V] in the model's dtype, from hidden states [n, H] that ``forward`` returned."""
        return self.vocabulary.whole(self.vocabulary.share(hidden))


@dataclass(frozen=True, kw_only=True)
class Llama(LanguageModel):
    """A target of any family of the table: how they differ (norms of q and k, mixtures, ...) is data of its layers."""

    embedding_scale: ClassVar[float] = 1.0  # of what enters the first layer
    config: TargetConfig
    blocks: tuple[Block, ...]
    norms: tuple[Norm, ...]  # of the inputs of each block, and the final one

    @classmethod
    def build(cls, config: TargetConfig, load: Loader, ops: Ops) -> "Llama":
        """Load every tensor of the model by its name in a Hugging Face checkpoint."""
        vocab_size, hidden_size, root = config.vocab_size, config.hidden_size, config.prefix
        embedding = load(f"{root}embed_tokens.weight", (vocab_size, hidden_size))
        blocks = tuple(
            Block.build(config, index, f"{root}layers.{index}.", load, ops, hidden_size)
            for index in range(config.num_layers)
        )
        norms = {
            f"{root}layers.{index}.input_layernorm": block.attention.input_scale
            for index, block in enumerate(blocks)
        }
        return cls(
            config=config,
            embedding=embedding,
            blocks=blocks,
            norms=tuple(
                load_norm(config, name, hidden_size, load, ops, scale)
                for name, scale in [*norms.items(), (f"{root}norm", None)]
            ),
            vocabulary=Vocabulary.build(config, embedding, load, ops),
            rope=rope_of(config.rope, config.rotary_dim, ops, embedding.device),
        )

    def forward(
        self, token_ids: Tensor, attend: Attend, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """One pass over ``token_ids`` [rows]; ``attend`` knows their positions.

        Returns the hidden states after the final norm, [rows, H], and the residual stream at the inputs of
        ``aux_layers``, concatenated in the order given, [rows, len(aux_layers) * H].
        """
        stream = F.embedding(token_ids, self.embedding)
        normed = self.norms[0](stream)
        inputs = {0: stream} if 0 in aux_layers else {}  # no other stream outlives its layer
        for index, (block, norm) in enumerate(zip(self.blocks, self.norms[1:], strict=True), start=1):
            # not block(...), during which this frame would hold on to the stream before it
            stream, normed = block.post_norm.add(stream, block.attention(normed, attend))
            stream, normed = norm.add(stream, *block.mlp(normed))
            if index in aux_layers:
                inputs[index] = stream
        features = [inputs[index] for index in aux_layers]
        return normed, torch.cat(features, -1) if features else stream[:, :0]


def ignored_tensors(config: TargetConfig, names: Set[str]) -> Set[str]:
    """Tensors in some checkpoints that no pass uses: rotary tables, and a copy of a tied head."""
    del names
    root = config.prefix
    tables = {f"{root}layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(config.num_layers)}
    tied = {"lm_head.weight"} if config.tied_embeddings else set()
    return tables | tied | {f"{root}rotary_emb.inv_freq"}


# what names begin with; the second in vision-language models
OF_TEXT = ("model.", "model.language_model.")
EMBEDDINGS = tuple(f"{prefix}embed_tokens.weight" for prefix in OF_TEXT)


def text_prefix(names: Set[str]) -> str:
    """What the names of a target's tensors begin with, by those of a checkpoint."""
    return next(
        (prefix for prefix, name in zip(OF_TEXT, EMBEDDINGS, strict=True) if name in names), OF_TEXT[0]
    )


_VISUAL = (
    *("model.visual.", "vision_model.", "multi_modal_projector."),
    *("model.vision_tower.", "model.vision_embedder.", "model.embed_vision."),  # of Gemma 4, also of audio
    *("model.audio_tower.", "model.embed_audio."),
)


def visual_tensors(names: Set[str]) -> Set[str]:
    """Of the part for images and sounds, which is not built."""
    return {name for name in names if name.startswith(_VISUAL)}
