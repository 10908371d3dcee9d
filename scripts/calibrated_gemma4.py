"""The weights of calibrated Gemma 4s, and of the assistants that draft for them.

Projections are random as in the other shapes. What a block adds to the stream is as large as the weight of the norm
behind it, which is what is small here; norms of queries divide by the root of their width, as attention does elsewhere.
Layers double and halve the stream in turn; inputs of their own, which are random, add little. The embedding is stored
divided by what the model multiplies it by, and output weights are apart from it; published ones are one table, of
which a pass reads as much. Logits are near the cap or near 0, so capped ones are in the same order. The router's own
norm and scale leave rows of RMS 1 as they are (calibrated_mixtures.py).

An assistant's ``pre_projection`` takes as many numbers of the embedding as it is wide, and of the hidden state but
noise; its layers attend to the target's keys and add little. So the stream is a part of the embedding of the token
before, in every pass, and the rows of ``embed_tokens``, its output weights, are those parts, with the rows that
unknown tokens need rotated among them. What it shows of its attention is speed: another text is not seen in drafts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from calibrated_codes import Codes
from calibrated_cycle import Cycle
from calibrated_mixtures import MixtureLayers
from calibrated_shapes import Gemma4MixtureShape, Gemma4Shape
from calibrated_weights import DTYPE, LOGIT, RESIDUAL, Named, Source, attention, mlp, output_weights
from torch import Tensor

SCALARS = 0.5, 2.0  # of even layers and of odd ones
BEHIND = (
    "post_attention_layernorm.weight",
    "post_feedforward_layernorm.weight",
)  # of what is added to the stream
_KEYS = ("k_proj.weight", "v_proj.weight", "k_norm.weight")  # of layers that see another's


def gemma4_layer(shape: Gemma4Shape, prefix: str, source: Source) -> Iterator[Named]:
    """Every tensor of a layer but for experts."""
    index, hidden = int(prefix.split(".")[2]), shape.hidden_size
    for name in ("input_layernorm.weight", "pre_feedforward_layernorm.weight"):
        yield source.ones(prefix + name, hidden)
    for name in BEHIND:
        yield source.constant(prefix + name, hidden, RESIDUAL)
    yield source.constant(prefix + "layer_scalar", 1, SCALARS[index % 2])
    own, left_out = shape.of_layer(index), () if shape.stores(index) else _KEYS
    if shape.keys_are_values and shape.sees_all(index):
        left_out += ("v_proj.weight",)
    for named in attention(own, prefix, source):
        if named.name.endswith("q_norm.weight"):
            yield source.constant(named.name, own.head_dim, own.head_dim**-0.5)
        elif not named.name.endswith(left_out):
            yield named
    yield from mlp(own, prefix, source)
    if width := shape.layer_inputs:
        yield source.linear(prefix + "per_layer_input_gate.weight", width, hidden, 1.0)
        yield source.linear(prefix + "per_layer_projection.weight", hidden, width, 1.0)
        yield source.constant(prefix + "post_per_layer_input_norm.weight", hidden, RESIDUAL)


def layer_inputs(shape: Gemma4Shape, source: Source) -> Iterator[Named]:
    """What the layers' own inputs are made of, where they have some."""
    if width := shape.layer_inputs:
        every = shape.num_layers * width
        yield source.noise("model.embed_tokens_per_layer.weight", (shape.vocab_size, every), width**-0.5)
        yield source.linear("model.per_layer_model_projection.weight", every, shape.hidden_size, 1.0)
        yield source.ones("model.per_layer_projection_norm.weight", width)


@dataclass(frozen=True, kw_only=True)
class Gemma4MixtureLayers(MixtureLayers):
    """Makes the layers of a Gemma 4 with experts beside the MLP."""

    shape: Gemma4MixtureShape

    def __call__(self, prefix: str, source: Source) -> Iterator[Named]:
        shape, hidden = self.shape, self.shape.hidden_size
        for named in gemma4_layer(shape, prefix, source):
            yield self._quiet(named, 0) if named.name.endswith(BEHIND) else named
        for name in (
            "post_feedforward_layernorm_1",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_2",
        ):
            yield source.ones(f"{prefix}{name}.weight", hidden)
        yield source.constant(prefix + "router.scale", hidden, hidden**0.5)
        yield source.ones(prefix + "router.per_expert_scale", shape.num_experts)
        yield self._router(prefix + "router.proj.weight", source)
        yield from self._stacked_experts(prefix, source)


def assistant_tensors(shape: Gemma4Shape, codes: Codes, cycle: Cycle, source: Source) -> Iterator[Named]:
    """Every tensor of an assistant."""
    own, hidden = shape.of_assistant, shape.hidden_size
    width = own.hidden_size

    def take(weight: Tensor) -> None:
        rows = torch.arange(width, device=weight.device)
        weight[rows, rows] += 1.0

    yield source.shaped("pre_projection.weight", width, 2 * hidden, take)
    for index in range(own.num_layers):
        yield from gemma4_layer(own, f"model.layers.{index}.", source)
    yield source.ones("model.norm.weight", width)
    yield source.linear("post_projection.weight", hidden, width, 1.0)
    yield Named(
        name="model.embed_tokens.weight",
        shape=(shape.vocab_size, width),
        make=lambda: output_weights(own, codes.narrowed(width).embedding, cycle.guess, source),
    )
    if shape.num_centroids:
        yield from _groups(shape, codes.narrowed(width).embedding, cycle, source)


def _groups(shape: Gemma4Shape, embedding: Tensor, cycle: Cycle, source: Source) -> Iterator[Named]:
    """The tokens of each group, few of which are of the text, and as its centroid the mean of their output weights."""
    number = shape.num_centroids
    before = {after: token for token, after in cycle.guess.items()}
    of_text = [cycle.tokens[group::number] for group in range(number)]

    def order() -> Tensor:
        others, size = iter(sorted(set(range(shape.vocab_size)) - before.keys())), shape.vocab_size // number
        groups = [[*known, *islice(others, size - len(known))] for known in of_text]
        return torch.tensor(groups, device=source.device).flatten()

    def centroids() -> Tensor:
        rows = [embedding[[before[token] for token in known]].float().mean(0) for known in of_text]
        return (torch.stack(rows) * (LOGIT / shape.assistant_size)).to(DTYPE)

    name = "masked_embedding."
    yield Named(name=name + "token_ordering", shape=(shape.vocab_size,), make=order, dtype=torch.int64)
    yield Named(name=name + "centroids.weight", shape=(number, shape.assistant_size), make=centroids)
