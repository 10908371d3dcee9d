"""The output layer of a target: logits of the whole vocabulary, or of the rows of it that a rank has."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from specgen.config import require
from specgen.device import Ranks
from specgen.models.model_config import TargetConfig
from specgen.models.take import Take
from specgen.ops import Largest, Map, Ops
from specgen.ops.weight import Weight

_ALIGNED = 128  # rows that kernels take at once, or that share a scale in FP8


def rows_of(vocab_size: int, ranks: Ranks) -> range:
    """The tokens whose logits a rank computes; the last one may have fewer. ``UserError`` for too few tokens."""
    require(
        vocab_size >= ranks.size**2,
        f"a vocabulary of {vocab_size} tokens cannot be shared by {ranks.size} ranks: use a smaller --tensor-parallel",
    )
    each = most_rows(vocab_size, ranks.size)
    return range(min(ranks.rank * each, vocab_size), min((ranks.rank + 1) * each, vocab_size))


def most_rows(vocab_size: int, num_ranks: int) -> int:
    """Of a rank; all but the last have as many."""
    each = -(-vocab_size // num_ranks)
    return -(-each // _ALIGNED) * _ALIGNED if each >= 32 * _ALIGNED else each


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """``lm_head``, split over the ranks by token."""

    lm_head: Map  # [n, H] -> [n, len(rows)]
    largest: Largest  # of logits
    size: int  # V
    rows: range  # that this rank has
    ranks: Ranks

    @classmethod
    def build(cls, config: TargetConfig, embedding: Tensor, take: Take, ops: Ops) -> "Vocabulary":
        """Load ``lm_head``; if it is tied, it is the rows of ``embedding`` [V, H]."""
        ranks = ops.ranks
        rows = rows_of(config.vocab_size, ranks)
        if config.tied_embeddings:
            weight = Weight(data=embedding[rows.start : rows.stop])
        else:
            weight = take.linear({"lm_head": len(rows)}, config.hidden_size)
        return cls(
            lm_head=ops.linear(weight), largest=ops.largest, size=config.vocab_size, rows=rows, ranks=ranks
        )

    def share(self, hidden: Tensor) -> Tensor:
        """This rank's logits [n, len(rows)] of hidden states [n, H]."""
        return self.lm_head(hidden)

    def whole(self, share: Tensor) -> Tensor:
        """Logits [..., V] from every rank's [..., len(rows)]."""
        if self.ranks.size == 1:
            return share
        most = most_rows(self.size, self.ranks.size)
        parts = self.ranks.gather(pad(share, (0, most - share.shape[-1])))
        return parts.movedim(0, -2).flatten(-2)[..., : self.size].contiguous()

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The first maximum of each row, and its logit: not finite where the row has NaN or an infinite maximum.

        ``logits`` are whole, [..., V], or a share of every rank, [..., len(rows)].
        """
        ids, value = self.largest(logits)
        if logits.shape[-1] == self.size:
            return ids, value
        value = torch.where(value.isnan(), torch.inf, value)
        # ids and float32 are exact in float64
        found = self.ranks.gather(torch.stack((value.double(), (ids + self.rows.start).double())))
        values, tokens = found.movedim(0, -1)  # [..., ranks] each
        first, value = self.largest(values.contiguous())  # of equal ones the lowest rank's, so the lowest id
        return tokens.gather(-1, first[..., None]).squeeze(-1).long(), value
