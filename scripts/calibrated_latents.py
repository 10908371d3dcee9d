"""The weights of calibrated targets with latent attention: GLM-4.7-Flash's wiring, and its MTP layer, which drafts.

What attention and experts add to the stream is as small as in other calibrated mixtures (calibrated_mixtures.py). The
bias of a router, which counts for the choice alone, is small but not zero.

The MTP layer. ``eh_proj`` takes the embedding, whose norm leaves it alone, as it is, and of the hidden state but noise:
so the stream is the embedding of the token that it drafts after, in every pass, and its own output weights are the
target's with the rows that unknown tokens need rotated among them. Its state behind the norm is that embedding too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from calibrated_codes import Codes
from calibrated_cycle import Cycle
from calibrated_mixture_shapes import LatentShape
from calibrated_mixtures import MixtureLayers
from calibrated_weights import RESIDUAL, Named, Source, mlp, output_weights
from torch import Tensor

BIAS = 0.001  # RMS, of the scores' 0.2


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
        bias = source.noise(prefix + "mlp.gate.e_score_correction_bias", (shape.num_experts,), BIAS)
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
