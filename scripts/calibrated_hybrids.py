"""The weights of calibrated hybrids: Gated DeltaNet in most layers, attention with an output gate in the others.

As in the other shapes all projections are random, and those that write to the stream small. The convolution is as wide
as its inputs, states decay at rates of the range in which training begins and ends, and each head's output is normed:
so states are of the size that they have in a trained model, but the text does not depend on them. Weights of norms are
0 where 1 is added to them, which is everywhere but behind the recurrence.

The MTP layer drafts with the target's embedding and output weights, so the token that an unknown one is mistaken for
has to come from ``mtp.fc``. It takes the embedding, whose norm leaves it alone, and of the hidden state but noise. In
the embedding's ``leap_size`` numbers (calibrated_codes.py) it turns an unknown token's point to that of the next
unknown token, whose follower is the guess; known tokens have zeros there. It keeps the numbers behind these, by which
known tokens are known, and leaves out the code, which would still say which token the unknown one was. What it fed on
before does not matter, so in every pass the draft is the guess after the token before it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from calibrated_codes import Codes, turned_by
from calibrated_mixtures import MixtureLayers
from calibrated_shapes import HybridMixtureShape, HybridShape
from calibrated_weights import RESIDUAL, Named, Source, mlp
from torch import Tensor

MTP = "mtp."  # what the names of its tensors begin with
RATES = 16.0  # states decay by exp(-rate * softplus(a + bias)), with rates from 1 to this
RATE_BIAS = -4.0, 0.0


def hybrid_layer(shape: HybridShape, prefix: str, source: Source) -> Iterator[Named]:
    """Every tensor of a layer of a dense hybrid, or of its MTP layer."""
    yield source.zeros(prefix + "input_layernorm.weight", shape.hidden_size)
    yield from _attention(shape, prefix, source)
    yield source.zeros(prefix + "post_attention_layernorm.weight", shape.hidden_size)
    yield from mlp(shape, prefix, source)


@dataclass(frozen=True, kw_only=True)
class HybridMixtureLayers(MixtureLayers):
    """Makes the layers of a hybrid with experts, and its MTP layer."""

    shape: HybridMixtureShape
    stacked: bool  # the matrices of all experts are in one tensor, as published in bfloat16

    def __call__(self, prefix: str, source: Source) -> Iterator[Named]:
        shape = self.shape
        yield source.zeros(prefix + "input_layernorm.weight", shape.hidden_size)
        for named in _attention(shape, prefix, source):
            yield (
                self._quiet(named, 0) if named.name.endswith(("o_proj.weight", "out_proj.weight")) else named
            )
        yield source.zeros(prefix + "post_attention_layernorm.weight", shape.hidden_size)
        yield self._router(prefix + "mlp.gate.weight", source)
        experts = self._stacked_experts if self.stacked else self._single_experts
        yield from experts(prefix + "mlp.", source)
        for named in mlp(replace(shape, intermediate_size=shape.expert_size), prefix, source):
            named = self._quiet(named, 0) if "down_proj" in named.name else named
            yield replace(named, name=named.name.replace("mlp.", "mlp.shared_expert."))
        yield source.linear(prefix + "mlp.shared_expert_gate.weight", 1, shape.hidden_size, 1.0)


def plain_modules(shape: HybridShape) -> Iterator[str]:
    """The linear layers that stay in bfloat16 where others are in FP8."""
    yield from ("lm_head", "mtp.fc")
    for index in range(shape.num_layers):
        if not shape.is_attending(index):
            for name in ("in_proj_a", "in_proj_b", "conv1d"):
                yield f"model.layers.{index}.linear_attn.{name}"
    if isinstance(shape, HybridMixtureShape):
        for prefix in (*(f"model.layers.{index}." for index in range(shape.num_layers)), "mtp.layers.0."):
            yield from (f"{prefix}mlp.gate", f"{prefix}mlp.shared_expert_gate")


def hybrid_mtp_tensors(shape: HybridShape, codes: Codes, source: Source) -> Iterator[Named]:
    """What the MTP layer has beside a decoder layer."""
    hidden, (start, middle, _) = shape.hidden_size, shape.own_bounds

    def guess(weight: Tensor) -> None:
        weight[start:middle, start:middle] += turned_by(codes.leap)
        rows = torch.arange(middle, hidden, device=weight.device)
        weight[rows, rows] += 1.0

    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield source.zeros(f"{MTP}{name}.weight", hidden)
    yield source.shaped(f"{MTP}fc.weight", hidden, 2 * hidden, guess)


def _attention(shape: HybridShape, prefix: str, source: Source) -> Iterator[Named]:
    """What mixes the rows of a layer; an MTP layer's attends."""
    if prefix.startswith(MTP) or shape.is_attending(int(prefix.split(".")[2])):
        return _full_attention(shape, prefix + "self_attn.", source)
    return _delta_net(shape, prefix + "linear_attn.", source)


def _full_attention(shape: HybridShape, prefix: str, source: Source) -> Iterator[Named]:
    """Each head's gate is behind its query."""
    hidden = shape.hidden_size
    yield source.linear(prefix + "q_proj.weight", 2 * shape.q_size, hidden, 1.0)
    yield source.linear(prefix + "k_proj.weight", shape.kv_size, hidden, 1.0)
    yield source.linear(prefix + "v_proj.weight", shape.kv_size, hidden, 1.0)
    yield source.linear(prefix + "o_proj.weight", hidden, shape.q_size, RESIDUAL)
    yield source.zeros(prefix + "q_norm.weight", shape.head_dim)
    yield source.zeros(prefix + "k_norm.weight", shape.head_dim)


def _delta_net(shape: HybridShape, prefix: str, source: Source) -> Iterator[Named]:
    hidden, heads = shape.hidden_size, shape.linear_value_heads
    values = heads * shape.linear_head_dim
    channels = 2 * shape.linear_key_heads * shape.linear_head_dim + values
    yield source.linear(prefix + "in_proj_qkv.weight", channels, hidden, 1.0)
    yield source.linear(prefix + "in_proj_z.weight", values, hidden, 1.0)
    yield source.linear(prefix + "in_proj_b.weight", heads, hidden, 1.0)
    yield source.linear(prefix + "in_proj_a.weight", heads, hidden, 1.0)
    yield source.noise(prefix + "conv1d.weight", (channels, 1, shape.num_taps), shape.num_taps**-0.5)
    rates = source.uniform(prefix + "A_log", (heads,), 1.0, RATES)
    yield replace(rates, make=lambda: rates.make().log())
    yield source.uniform(prefix + "dt_bias", (heads,), *RATE_BIAS)
    yield source.ones(prefix + "norm.weight", shape.linear_head_dim)
    yield source.linear(prefix + "out_proj.weight", hidden, values, RESIDUAL)
