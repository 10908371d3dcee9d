"""The reference kernels in plain torch, for any device and dtype, and sums over ranks of a share of a model."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.device import Ranks
from specgen.kv.layout import Layout
from specgen.ops import Map, Norm, Ops, Pair, Rope, Sandwich, SandwichNorm, Store, joined
from specgen.ops.experts import ACTIVATIONS, Activation, choice, grouped_experts, sigmoid_choice
from specgen.ops.fp8 import fp8_linear, plain_matrix
from specgen.ops.weight import Weight


def torch_ops() -> Ops:
    """The implementation that the others are tested against."""
    return Ops(
        linear=linear,
        linear_parts=lambda weight: one_part(linear(weight)),
        gated_linear=gated_linear,
        linear_float32=linear_float32,
        experts=grouped_experts,
        choice=choice,
        sigmoid_choice=sigmoid_choice,
        rms_norm=RmsNorm,
        sandwich=sandwich,
        embed_norm_concat=embed_norm_concat,
        gated_norm=gated_norm,
        sigmoid_gated=lambda x, gate: x * gate.sigmoid(),
        gelu_gated=lambda gate, x: ACTIVATIONS["gelu tanh"](whole(gate).to(x.dtype)) * x,
        largest=largest,
        most_likely=most_likely,
        walk=walk,
        mask=mask,
        rope=rope,
    )


def largest(x: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See ``Largest``."""
    # of bfloat16 on a CPU torch's argmax takes five times as long
    index = (x.float() if x.is_cpu else x).argmax(-1)
    return index if ids is None else ids[index], x.gather(-1, index[..., None]).squeeze(-1)


def most_likely(x: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See ``MostLikely``."""
    index, value = largest(x, ids)
    return index, (value.float() - x.float().logsumexp(-1)).exp()


def walk(classes: Tensor, successors: Tensor, automata: Tensor, states: Tensor, tokens: Tensor) -> Tensor:
    """See ``Ops.walk``."""
    found = [states]
    for each in tokens.unbind(1):
        after = successors.index_select(0, found[-1] + classes[automata, each.clamp(min=0)])
        found.append(torch.where((after < 0) | (each < 0), found[-1], after))
    return torch.stack(found, 1)


def mask(
    logits: Tensor,
    classes: Tensor,
    successors: Tensor,
    automata: Tensor,
    states: Tensor,
    least: float,
    ids: Tensor | None,
) -> Tensor:
    """See ``Ops.mask``."""
    kinds = classes[automata]
    places = states[:, :, None].to(torch.int32) + (kinds if ids is None else kinds[:, ids])[:, None]
    after = successors.index_select(0, places.flatten()).view(places.shape)
    return logits.masked_fill(after < 0, least)


def linear(weight: Weight) -> Map:
    """See ``Ops.linear``."""
    if weight.format == "fp8":
        return fp8_linear(weight, linear)
    matrix, bias = weight.matrix, weight.bias
    return lambda x: F.linear(x, matrix, bias)


def linear_float32(weight: Weight) -> Map:
    """See ``Ops.linear_float32``."""
    matrix = plain_matrix(weight, torch.float32)
    bias = None if weight.bias is None else weight.bias.float()
    return lambda x: F.linear(x.float(), matrix, bias)[None]


def whole(parts: Tensor) -> Tensor:
    """The sum of ``parts`` [n, rows, out]; see ``Ops.linear_parts``."""
    return parts[0] if len(parts) == 1 else parts.sum(0)


def one_part(linear: Map) -> Map:
    """``linear`` in the form of ``Ops.linear_parts``."""
    return lambda x: linear(x)[None]


def gated_linear(weight: Weight, out_scale: Tensor | None = None, activation: Activation = "swish") -> Map:
    """See ``Ops.gated_linear``; whoever reads the result rounds it."""
    del out_scale
    return gated(linear(weight), activation)


def gated(linear: Map, activation: Activation) -> Map:
    """``linear`` to gate and up in the form of ``Ops.gated_linear``."""
    return lambda x: activate_and_mul(activation, linear(x))


def activate_and_mul(activation: Activation, gate_up: Tensor) -> Tensor:
    """[rows, 2 * I] -> [rows, I]; the gate is the first half."""
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[activation](gate).mul_(up)


@dataclass(frozen=True)
class RmsNorm:
    weight: Tensor
    eps: float
    casts_last: bool = False
    out_scale: Tensor | None = None  # whoever reads the result rounds it

    def __call__(self, x: Tensor) -> Tensor:
        return heads_normed(self._normed, self.weight, x)

    def add(self, stream: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        total = stream + whole(joined(parts))
        return total, self(total)

    def _normed(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(x.dtype) if self.casts_last else scaled.to(x.dtype) * self.weight


def sandwich(norms: Sandwich) -> SandwichNorm:
    """See ``Ops.sandwich``."""

    def norm(weight: Tensor, x: Tensor) -> Tensor:
        return RmsNorm(weight, norms.eps, casts_last=True)(x)

    def forward(stream: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        each = [whole(part).to(stream.dtype) for part in parts]
        if norms.within is not None:
            each = [torch.add(*(norm(*pair) for pair in zip(norms.within, each, strict=True)))]
        (delta,) = each
        total = stream + norm(norms.behind, delta)
        if norms.scale is not None:
            total = total * norms.scale
        if not len(norms.before):
            return total, total.new_empty(0, *total.shape)
        return total, torch.stack([norm(weight, total) for weight in norms.before])

    return forward


def heads_normed(norm: Map, weight: Tensor, x: Tensor) -> Tensor:
    """``norm`` of ``x``, or of as many of its heads as there are weights; see ``Norm``."""
    count = len(weight)
    if weight.dim() == 1 or count == x.shape[1]:
        return norm(x)
    return torch.cat((norm(x[:, :count]), x[:, count:]), 1)


def embed_norm_concat(
    table: Tensor, embed_weight: Tensor, weight: Tensor, eps: float, casts_last: bool
) -> Pair:
    """See ``Ops.embed_norm_concat``."""
    embed_norm, norm = (RmsNorm(each, eps, casts_last) for each in (embed_weight, weight))
    return lambda token_ids, x: torch.cat((embed_norm(F.embedding(token_ids, table)), norm(x)), -1)


def gated_norm(weight: Tensor, eps: float) -> Pair:
    """See ``Ops.gated_norm``."""
    norm = RmsNorm(weight, eps)
    return lambda x, gate: (norm(x).float() * F.silu(gate.float())).to(x.dtype)


def rope(frequencies: Tensor, scale: float = 1.0) -> Rope:
    """See ``Ops.rope``."""

    def plan(layout: Layout) -> Store:
        angles = layout.positions[:, None, None] * frequencies  # [rows, 1, R / 2]
        cos, sin = angles.cos() * scale, angles.sin() * scale
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return _Store(cos=cos, sin=sin, slots=layout.slots)

    return plan


@dataclass(frozen=True, kw_only=True)
class _Store:
    cos: Tensor  # [rows, 1, R]
    sin: Tensor  # the first half negated
    slots: Tensor  # [rows]

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, k_scale: float = 1.0, v_scale: float = 1.0
    ) -> Tensor:
        num_kv_heads = keys.shape[2]
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        assert qkv.is_contiguous(), "the kernels read no strides"
        qk, v = qkv.tensor_split((num_heads + num_kv_heads,), 1)
        qk = self._rotated(qk)
        for pages, rows, scale in ((keys, qk[:, num_heads:], k_scale), (values, v, v_scale)):
            _put(pages.flatten(0, 1), self.slots, rows, scale)
        return qk[:, :num_heads].contiguous()

    def latents(self, latent: Tensor, key: Tensor, pages: Tensor, q: Tensor, out: Tensor) -> None:
        stored = torch.cat((latent[:, None], self._rotated(key[:, None])), -1)
        _put(pages.flatten(0, 1), self.slots, stored, 1.0)
        out.copy_(self._rotated(q))

    def _rotated(self, x: Tensor) -> Tensor:
        cos, sin, width = self.cos.to(x.dtype), self.sin.to(x.dtype), self.cos.shape[-1]
        if width == x.shape[-1]:
            return rotate(x, cos, sin)
        return torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), -1)


def _put(pages: Tensor, slots: Tensor, rows: Tensor, scale: float) -> None:
    """Store ``rows`` in ``pages`` at ``slots``; values beyond the range of an 8-bit page saturate, NaN stays NaN."""
    if pages.dtype.itemsize == 1:  # torch's index_copy_ has no 8-bit floats
        largest = torch.finfo(pages.dtype).max
        # by a number, torch multiplies with its reciprocal
        divisor = torch.full((), scale, device=rows.device)
        rows = (rows.float() / divisor).clamp(-largest, largest).to(pages.dtype).view(torch.uint8)
        pages = pages.view(torch.uint8)
    pages.index_copy_(0, slots, rows.to(pages.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate half-split pairs of ``x`` [rows, heads, D] by [rows, 1, D], the first half of ``sin`` negated."""
    # Rolling by half a head swaps the two halves.
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def ranked(ops: Ops, ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Ops:
    """``ops``, whose norms add the parts of all ``ranks``; by one kernel where there is one."""
    if ranks.size == 1:
        return ops
    fuse: Callable[[Norm, Ranks], Norm] | None = None
    if device.type == "cuda":
        from specgen.ops.fused_sum import FusedNorm, can_fuse

        fuse = FusedNorm.build if can_fuse(ranks, device, dtype) else None

    def rms_norm(
        weight: Tensor, eps: float, casts_last: bool = False, out_scale: Tensor | None = None
    ) -> Norm:
        norm = ops.rms_norm(weight, eps, casts_last, out_scale)
        if fuse is None or weight.dim() > 1:
            return RankedNorm(norm=norm, ranks=ranks)
        return fuse(norm, ranks)

    def ranked_sandwich(norms: Sandwich) -> SandwichNorm:
        own = ops.sandwich(norms)
        if not norms.sums:
            return own
        return lambda stream, *parts: own(stream, *(_summed(each, ranks, stream.dtype) for each in parts))

    return replace(ops, rms_norm=rms_norm, sandwich=ranked_sandwich, ranks=ranks)


def _summed(parts: Tensor, ranks: Ranks, dtype: torch.dtype) -> Tensor:
    """The sum of the ``parts`` of every rank, as one."""
    mine = parts[0] if len(parts) == 1 else parts.sum(0, dtype=torch.float32)
    return ranks.sum(mine.to(dtype))[None]


@dataclass(frozen=True, kw_only=True)
class RankedNorm:
    """A norm whose ``add`` sums the parts of every rank first, in the dtype of the stream."""

    norm: Norm
    ranks: Ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def add(self, stream: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm.add(stream, _summed(joined(parts), self.ranks, stream.dtype))
