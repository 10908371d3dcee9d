"""The weights of calibrated mixtures of experts: which experts a token chooses is known, as its text is.

What experts and attention add to the stream is as small as in dense pairs (calibrated_weights.py), so the text does
not depend on it, but all of it is read and computed. It says nothing of whether experts compute the right thing.

Routers. The text is cut into passages of ``Shape.passage_size`` tokens, whose tokens share the last ``head_dim``
numbers of their embeddings (calibrated_codes.py). A router adds two independent scores for each expert: one from these
numbers, which all tokens of a passage have in common, and one from the random numbers that only the token itself has.
Their directions are orthogonal and equally long for all experts, so every expert is chosen equally often. How much of
the score is common decides how alike the tokens of a passage choose (``common_share``). A wrong draft is a token a few
places ahead (``Cycle.draw``), so the rows of a verify step are mostly of one passage, accepted or not. Attention and
experts leave the passage's numbers alone, so that the choices of deep layers are not blurred by what earlier ones have
added. The bias of a router with latent attention, which counts for the choice alone, is small but not zero.

The MTP layer of GLM-4.7-Flash. ``eh_proj`` takes the embedding, whose norm leaves it alone, as it is, and of the hidden
state but noise: so the stream is the embedding of the token that it drafts after, in every pass, and its own output
weights are the target's with the rows that unknown tokens need rotated among them. Its state behind the norm is that
embedding too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from calibrated_codes import Codes
from calibrated_cycle import Cycle
from calibrated_shapes import GptOssShape, LatentShape, Llama4Shape, Mixture
from calibrated_weights import NOISE, RESIDUAL, Named, Source, attention, mlp, output_weights
from torch import Tensor

SPREAD = 1.0  # standard deviation of a router's logits over tokens
SINK, BIAS = 1.0, 0.1  # RMS of sinks and of the biases inside a block
BLOCK = 32  # MXFP4 values that share a scale
CODE_RMS = (
    68.5 / 8
) ** 0.5  # of the values of 4-bit codes, all equally likely: 0, .5, 1, 1.5, 2, 3, 4, 6, and negative
_PAIRS, _HALVINGS = 4096, 24


def common_share(num_experts: int, num_chosen: int, overlap: float) -> float:
    """The part of the variance of a router's logits that the tokens of a passage have in common.

    Two tokens that choose k of E experts independently have k / E of their choices in common on average; with
    ``overlap`` F (0 to 1) they have F + (1 - F) * k / E of them. ``ValueError`` outside that range.
    """
    if not 0 <= overlap <= 1:
        raise ValueError(f"expert-overlap is {overlap}: use a share from 0 to 1")
    if overlap in (0, 1):
        return overlap
    drawn = torch.randn(3, _PAIRS, num_experts, generator=torch.Generator().manual_seed(0))
    wanted = overlap + (1 - overlap) * num_chosen / num_experts
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        scores = middle**0.5 * drawn[0] + (1 - middle) ** 0.5 * drawn[1:]
        chosen = torch.zeros_like(scores).scatter_(-1, scores.topk(num_chosen).indices, 1.0)
        if chosen.prod(0).sum(-1).mean() / num_chosen < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclass(frozen=True, kw_only=True)
class MixtureLayers:
    """Makes the layers of a mixture in which a router's logits have ``common`` of their variance from the passage."""

    shape: Mixture
    common: float  # see common_share

    def __call__(self, prefix: str, source: Source) -> Iterator[Named]:
        """Every tensor of the layer whose names begin with ``prefix``."""
        gpt_oss = isinstance(self.shape, GptOssShape)
        yield source.ones(prefix + "input_layernorm.weight", self.shape.hidden_size)
        for named in attention(self.shape, prefix, source):
            yield self._quiet(named, 0) if "o_proj" in named.name else named
        if gpt_oss:
            yield from self._attention_biases(prefix + "self_attn.", source)
        yield source.ones(prefix + "post_attention_layernorm.weight", self.shape.hidden_size)
        yield self._router(prefix + ("mlp.router.weight" if gpt_oss else "mlp.gate.weight"), source)
        yield from (self._gpt_oss_experts if gpt_oss else self._single_experts)(prefix + "mlp.", source)

    def _router(self, name: str, source: Source) -> Named:
        shape = self.shape
        start, middle, end = shape.own_bounds

        def make() -> Tensor:
            weight = torch.zeros(shape.num_experts, shape.hidden_size, device=source.device)
            for first, last in ((start, middle), (middle, end)):  # a token has numbers in one of these alone
                if first < last:
                    share = (1 - self.common) * (last - first) / (end - start)
                    directions = source.orthogonal(shape.num_experts, last - first)
                    weight[:, first:last] = share**0.5 * directions
            weight[:, end:] = self.common**0.5 * source.orthogonal(shape.num_experts, shape.head_dim)
            return weight.mul_(SPREAD).bfloat16()

        return Named(name=name, shape=(shape.num_experts, shape.hidden_size), make=make)

    def _attention_biases(self, prefix: str, source: Source) -> Iterator[Named]:
        shape = self.shape
        for name, size in (("q", shape.q_size), ("k", shape.kv_size), ("v", shape.kv_size)):
            yield source.noise(f"{prefix}{name}_proj.bias", (size,), BIAS)
        yield self._quiet(source.noise(f"{prefix}o_proj.bias", (shape.hidden_size,), RESIDUAL), 0)
        yield source.noise(f"{prefix}sinks", (shape.num_heads,), SINK)

    def _single_experts(self, prefix: str, source: Source) -> Iterator[Named]:
        """A tensor for each matrix of each expert."""
        hidden, inner = self.shape.hidden_size, self.shape.expert_size
        for expert in range(self.shape.num_experts):
            name = f"{prefix}experts.{expert}."
            yield source.linear(name + "gate_proj.weight", inner, hidden, 1.0)
            yield source.linear(name + "up_proj.weight", inner, hidden, 1.0)
            yield self._quiet(source.linear(name + "down_proj.weight", hidden, inner, RESIDUAL), 0)

    def _stacked_experts(self, prefix: str, source: Source) -> Iterator[Named]:
        """``[E, 2 I, H]``, gate before up, and ``[E, H, I]``."""
        count, hidden, inner = self.shape.num_experts, self.shape.hidden_size, self.shape.expert_size
        yield source.noise(prefix + "experts.gate_up_proj", (count, 2 * inner, hidden), hidden**-0.5)
        down = source.noise(prefix + "experts.down_proj", (count, hidden, inner), RESIDUAL / inner**0.5)
        yield self._quiet(down, 1)

    def _gpt_oss_experts(self, prefix: str, source: Source) -> Iterator[Named]:
        """The rows of gate and up alternate; without MXFP4 matrices are stored as ``[E, in, out]``."""
        shape = self.shape
        assert isinstance(shape, GptOssShape)
        hidden, inner, experts = shape.hidden_size, shape.expert_size, shape.num_experts
        yield source.noise(prefix + "router.bias", (experts,), 0.01 * SPREAD)
        prefix += "experts."
        yield source.noise(prefix + "gate_up_proj_bias", (experts, 2 * inner), BIAS)
        yield self._quiet(source.noise(prefix + "down_proj_bias", (experts, hidden), RESIDUAL), 1)
        sizes = {"gate_up_proj": (2 * inner, hidden, 1.0), "down_proj": (hidden, inner, RESIDUAL)}
        for name, (rows, width, rms) in sizes.items():
            std = rms / width**0.5
            if shape.quantized:
                blocks, scales = _mxfp4(prefix + name, (experts, rows, width), std, source)
                yield blocks
                yield self._quiet(scales, 1) if name == "down_proj" else scales
            else:
                matrix = source.noise(prefix + name, (experts, width, rows), std)
                yield self._quiet(matrix, 2) if name == "down_proj" else matrix

    def _quiet(self, named: Named, axis: int) -> Named:
        """``named`` with the part of its outputs (along ``axis``) smaller that is added to the passage's numbers.

        Not zero, which is faster to multiply, but too small to change a bfloat16 of the stream.
        """

        def make() -> Tensor:
            values = named.make()
            part = values.narrow(axis, values.shape[axis] - self.shape.head_dim, self.shape.head_dim)
            if values.dtype == torch.uint8:  # exponents of 2
                part.sub_(6)
            else:
                part.mul_(NOISE)
            return values

        return replace(named, make=make)


def _mxfp4(name: str, shape: tuple[int, int, int], std: float, source: Source) -> tuple[Named, Named]:
    """Blocks ``[E, out, in / 32, 16]`` of random codes, two in a byte, and their scales, both uint8.

    A scale s multiplies by 2 ** (s - 127); here it is one of two neighbours, so that values have about this ``std``.
    """
    experts, rows, width = shape
    lower = int(torch.tensor(std / CODE_RMS).log2().floor()) + 127
    blocks, scales = (experts, rows, width // BLOCK, BLOCK // 2), (experts, rows, width // BLOCK)
    return (
        source.uint8(f"{name}_blocks", blocks, 0, 256),
        source.uint8(f"{name}_scales", scales, lower, lower + 2),
    )


CHOICE_BIAS = 0.001  # RMS, of the scores' 0.2


@dataclass(frozen=True, kw_only=True)
class LatentLayers(MixtureLayers):
    """Makes the layers of such a target; the first ones have an MLP."""

    shape: LatentShape

    def __call__(self, prefix: str, source: Source) -> Iterator[Named]:
        shape, index = self.shape, int(prefix.split(".")[2])
        yield source.ones(prefix + "input_layernorm.weight", shape.hidden_size)
        yield from self._attention(prefix + "self_attn.", source)
        yield source.ones(prefix + "post_attention_layernorm.weight", shape.hidden_size)
        if index < shape.num_dense:
            yield from self._mlp(prefix, shape.intermediate_size, source)
            return
        yield self._router(prefix + "mlp.gate.weight", source)
        bias = source.noise(prefix + "mlp.gate.e_score_correction_bias", (shape.num_experts,), CHOICE_BIAS)
        yield replace(bias, make=lambda: bias.make().float(), dtype=torch.float32)
        yield from self._single_experts(prefix + "mlp.", source)
        for named in self._mlp(prefix, shape.expert_size, source):
            yield replace(named, name=named.name.replace("mlp.", "mlp.shared_experts."))

    def _attention(self, prefix: str, source: Source) -> Iterator[Named]:
        shape = self.shape
        hidden, rank, heads = shape.hidden_size, shape.kv_rank, shape.num_heads
        yield source.linear(prefix + "q_a_proj.weight", shape.query_rank, hidden, 1.0)
        yield source.ones(prefix + "q_a_layernorm.weight", shape.query_rank)
        keys = shape.nope_dim + shape.rope_dim
        yield source.linear(prefix + "q_b_proj.weight", heads * keys, shape.query_rank, 1.0)
        yield source.linear(prefix + "kv_a_proj_with_mqa.weight", rank + shape.rope_dim, hidden, 1.0)
        yield source.ones(prefix + "kv_a_layernorm.weight", rank)
        yield source.linear(
            prefix + "kv_b_proj.weight", heads * (shape.nope_dim + shape.value_dim), rank, 1.0
        )
        out = source.linear(prefix + "o_proj.weight", hidden, heads * shape.value_dim, RESIDUAL)
        yield self._quiet(out, 0)

    def _mlp(self, prefix: str, inner: int, source: Source) -> Iterator[Named]:
        for named in mlp(replace(self.shape, intermediate_size=inner), prefix, source):
            yield self._quiet(named, 0) if "down_proj" in named.name else named


@dataclass(frozen=True, kw_only=True)
class Llama4Layers(MixtureLayers):
    """Makes the layers of a Llama-4; norms of q and k have no weights there."""

    shape: Llama4Shape
    stacked: bool  # the matrices of all experts are in one tensor, as published in bfloat16

    def __call__(self, prefix: str, source: Source) -> Iterator[Named]:
        shape = self.shape
        yield source.ones(prefix + "input_layernorm.weight", shape.hidden_size)
        for named in attention(shape, prefix, source):
            yield self._quiet(named, 0) if "o_proj" in named.name else named
        yield source.ones(prefix + "post_attention_layernorm.weight", shape.hidden_size)
        yield self._router(prefix + "feed_forward.router.weight", source)
        yield from (self._transposed_experts if self.stacked else self._single_experts)(
            prefix + "feed_forward.", source
        )
        for named in mlp(replace(shape, intermediate_size=shape.expert_size), prefix, source):
            named = self._quiet(named, 0) if "down_proj" in named.name else named
            yield replace(named, name=named.name.replace("mlp.", "feed_forward.shared_expert."))

    def _transposed_experts(self, prefix: str, source: Source) -> Iterator[Named]:
        """``[E, H, 2 I]``, gate before up, and ``[E, I, H]``."""
        count, hidden, inner = self.shape.num_experts, self.shape.hidden_size, self.shape.expert_size
        yield source.noise(prefix + "experts.gate_up_proj", (count, hidden, 2 * inner), hidden**-0.5)
        down = source.noise(prefix + "experts.down_proj", (count, inner, hidden), RESIDUAL / inner**0.5)
        yield self._quiet(down, 2)


def mtp_tensors(shape: LatentShape, codes: Codes, cycle: Cycle, source: Source) -> Iterator[Named]:
    """What the MTP layer has beside a decoder layer; its embedding is the target's, stored again as published."""
    prefix, hidden = f"model.layers.{shape.num_layers}.", shape.hidden_size
    table = (shape.vocab_size, hidden)

    def keep(weight: Tensor) -> None:
        rows = torch.arange(hidden, device=weight.device)
        weight[rows, rows] += 1.0

    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield source.ones(f"{prefix}{name}.weight", hidden)
    yield source.shaped(f"{prefix}eh_proj.weight", hidden, 2 * hidden, keep)
    yield Named(name=f"{prefix}embed_tokens.weight", shape=table, make=codes.embedding.clone)
    yield Named(
        name=f"{prefix}shared_head.head.weight",
        shape=table,
        make=lambda: output_weights(shape, codes.embedding, cycle.guess, source),
    )
