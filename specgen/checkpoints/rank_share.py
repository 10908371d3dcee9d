"""Which part of each tensor a rank reads: Megatron-LM's split (Shoeybi et al., 2019), as one table of names.

Projections into heads and into the inner width of an MLP or an expert are split by output, those back by input, so that
a layer needs one sum over ranks behind its attention and one behind its MLP. A target's ``lm_head`` is split by output
as well. All else - embedding, norms, routers, what makes and stores the latents of latent attention, what a draft head
has around its layers - every rank has whole.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specgen.config import require
from specgen.device import Ranks
from specgen.models.fp8_config import Fp8Config
from specgen.models.llama import most_rows, rows_of
from specgen.models.model_config import Fused

# Of a dimension, the ranges that are read, one behind the other.
Ranges = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The stored shape of a tensor, and what of it a rank reads: ``ranges`` of the dimension ``dim``."""

    stored: tuple[int, ...]
    dim: int
    ranges: Ranges

    def of(self, tensor: Any) -> Tensor:  # noqa: ANN401  a tensor, or one in a file
        """The part of it; of a file nothing else is read."""
        parts = [tensor[(*[slice(None)] * self.dim, each)] for each in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """How tensors of some names are split: the dimension, and whether it is two halves, each split (gate and up)."""

    names: str  # a regular expression for the end of the name
    dim: int
    halves: bool = False


_KV = re.compile(r"\.(k|v)_proj\.(weight|bias)$")
_LM_HEAD = "lm_head.weight"
_DELTA = re.compile(r"\.linear_attn\.(in_proj_qkv|conv1d)\.weight$")  # queries, keys and values of all heads
_RULES = (
    _Rule(names=r"\.(q|q_b|kv_b|gate|up)_proj\.(weight|bias)$", dim=0),
    _Rule(names=r"\.self_attn\.sinks$", dim=0),
    _Rule(names=r"\.(o|down|out)_proj\.weight$", dim=1),
    # of a Gated DeltaNet: heads, or key heads each with its value heads
    _Rule(names=r"\.linear_attn\.(in_proj_(z|a|b|qkvz|ba)\.weight|A_log|dt_bias)$", dim=0),
    # all experts of a layer in one tensor, packed
    _Rule(names=r"\.experts\.gate_up_proj_(blocks|scales|bias)$", dim=1),
    _Rule(names=r"\.experts\.down_proj_(blocks|scales)$", dim=2),
)
_GATE_UP, _DOWN = r"\.experts\.gate_up_proj$", r"\.experts\.down_proj$"
_FUSED: dict[Fused, tuple[_Rule, _Rule]] = {  # the same, plain
    "out, in": (_Rule(names=_GATE_UP, dim=1, halves=True), _Rule(names=_DOWN, dim=2)),
    "in, out": (_Rule(names=_GATE_UP, dim=2, halves=True), _Rule(names=_DOWN, dim=1)),
    "in, out alternating": (_Rule(names=_GATE_UP, dim=2), _Rule(names=_DOWN, dim=1)),
}
# Added once to the sum over ranks: by the first of them.
_ONCE = re.compile(r"\.(o|down)_proj(\.bias|_bias)$")


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What a rank reads of a model with ``num_kv_heads`` and ``vocab_size``, whose layers ask for its share alone."""

    ranks: Ranks
    num_kv_heads: int
    vocab_size: int | None  # None: ``lm_head`` is whole on every rank
    fused_experts: Fused
    fp8: Fp8Config | None  # of the linear layers that are stored in it
    delta_keys: int = 0  # numbers of all key heads of a Gated DeltaNet
    # by layer, of those that have not as many
    other_kv_heads: Mapping[int, int] = field(default_factory=dict)

    def cut(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """Of the tensor ``name``, of which a layer wants ``shape``; None: all of it.

        Scales of a weight in FP8 are split as the weight is. ``UserError`` where a rank's part of ``lm_head`` would
        begin inside of what shares one.
        """
        layer, _, last = name.rpartition(".")
        if self.fp8 is None or last != self.fp8.scale_name:
            return self._cut(name, shape)
        if self.fp8.weights == "tensor":
            return None
        found = self._cut(f"{layer}.weight", shape, self.fp8.rows_per_scale)
        inputs_alike = self.fp8.weights == "channel"
        return None if inputs_alike and found is not None and found.dim == 1 else found

    def _cut(self, name: str, shape: tuple[int, ...], unit: int = 1) -> Cut | None:
        """``cut`` of a tensor that has one for each ``unit`` of a weight's rows and columns."""
        if _KV.search(name):
            layer = re.search(r"\blayers\.(\d+)\.", name)
            number = self.other_kv_heads.get(int(layer[1])) if layer else None
            return self._of_kv(shape, number or self.num_kv_heads)
        if name == _LM_HEAD:
            return None if self.vocab_size is None else self._of_vocabulary(self.vocab_size, shape, unit)
        if _DELTA.search(name):
            keys = self.delta_keys // self.ranks.size // unit
            return self._split(shape, 0, (keys, keys, shape[0] - 2 * keys))
        rules = (*_RULES, *_FUSED[self.fused_experts])
        rule = next((rule for rule in rules if re.search(rule.names, name)), None)
        if rule is None or rule.dim >= len(shape):
            return None
        count = 2 if rule.halves else 1
        return self._split(shape, rule.dim, (shape[rule.dim] // count,) * count)

    def drops(self, name: str) -> bool:
        """Whether another rank adds this bias."""
        return self.ranks.rank > 0 and _ONCE.search(name) is not None

    def _split(self, shape: tuple[int, ...], dim: int, sizes: Sequence[int]) -> Cut:
        """Parts that lie one behind the other, of each of which every rank has an equal share of ``sizes``."""
        size, rank = self.ranks.size, self.ranks.rank
        before = accumulate(sizes, initial=0)
        starts = (size * all_before + rank * each for all_before, each in zip(before, sizes, strict=False))
        stored = (*shape[:dim], shape[dim] * size, *shape[dim + 1 :])
        ranges = (slice(start, start + each) for start, each in zip(starts, sizes, strict=True))
        return Cut(stored=stored, dim=dim, ranges=tuple(ranges))

    def _of_kv(self, shape: tuple[int, ...], count: int) -> Cut:
        """Of ``count`` heads of keys and values: where there are fewer than ranks, several ranks have the same one."""
        size = self.ranks.size
        heads = max(count // size, 1)  # of a rank
        start = self.ranks.rank * count // size * shape[0] // heads
        stored = (shape[0] * count // heads, *shape[1:])
        return Cut(stored=stored, dim=0, ranges=(slice(start, start + shape[0]),))

    def _of_vocabulary(self, vocab_size: int, shape: tuple[int, ...], unit: int) -> Cut:
        rows = rows_of(vocab_size, self.ranks.rank, self.ranks.size)
        require(
            most_rows(vocab_size, self.ranks.size) % unit == 0,  # the same on every rank
            f"lm_head is in FP8 with a scale for each {unit} tokens, which {self.ranks.size} ranks do not share "
            "evenly: use a smaller --tensor-parallel",
        )
        ends = slice(rows.start // unit, -(-rows.stop // unit))
        return Cut(stored=(-(-vocab_size // unit), *shape[1:]), dim=0, ranges=(ends,))
