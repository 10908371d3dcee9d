"""Synthetic weights as slow as real ones, whose text and drafts are known in advance.

Target. All projections are random; those that write to the residual stream are so small that the stream stays the
embedding e(t) of its own token t. The row of ``lm_head`` for the token after t is e(t), and random embeddings are
nearly orthogonal: of 128,256 of width 4,096 no other reaches a tenth of the right logit.

Head. Every stretch of ``head_dim`` numbers of an embedding has the same norm, so RMSNorm leaves it alone. The first
``num_kv_heads * head_dim`` of its numbers, c(t), are all that grouped values can carry: the code. Keys and queries
are c(t) alone, scaled: a token scores ``SELF_SCORE`` with itself, and about SELF_SCORE / sqrt(head_dim) with any other,
so attention reads its own row. There the value is c(t) minus the code part of the incoming state h, and ``o_proj``
adds it to the stream h: its code part is now c(t) whatever it was, and the rest is unchanged. h is ``fc`` of the
features in the first pass (random, of RMS 1) and the head's own state later (of RMS 1 again, as c(t) has RMS 1): one
matrix cancels both. Without it the second draft would depend on two codes.
The head's ``lm_head`` is like the target's, with the rows that unknown tokens need rotated among them.

So every draft is the guess after the draft before it, and the first i + 1 of them are right with accept^(i+1). What the
known text cannot show is whether attention to other positions is right: a row's answer depends on its own token alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from calibrated_cycle import Cycle
from calibrated_shapes import Shape
from torch import Tensor

SELF_SCORE = 40.0  # of a token with itself, before the softmax; others get e^-40 of its weight
LOGIT = 30.0  # of the right token; the others' are near 0, so sampling at temperature 1 gives the same text
RESIDUAL = 0.005  # RMS of the output of a random block; the stream has RMS 1
NOISE = 0.02  # RMS of the random part of a calibrated matrix's output; multiplying zeros would be faster
DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Named:
    """A tensor of a checkpoint, made on demand."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


class Source:
    """Random tensors on one device, the same for a seed and a device."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        """Of ``shape`` in bfloat16."""
        values = torch.empty(shape, dtype=DTYPE, device=self.device)
        return values.normal_(0.0, std, generator=self._generator)

    def linear(self, name: str, rows: int, width: int, rms: float) -> Named:
        """A projection ``[rows, width]`` that takes rows of RMS 1 to rows of RMS ``rms``."""
        shape = (rows, width)
        return Named(name=name, shape=shape, make=lambda: self.normal(shape, rms / width**0.5))

    def ones(self, name: str, width: int) -> Named:
        """The weight of a norm."""
        return Named(
            name=name, shape=(width,), make=lambda: torch.ones(width, dtype=DTYPE, device=self.device)
        )

    def codes(self, count: int, width: int, stretch: int) -> Tensor:
        """``[count, width]``, each ``stretch`` of a row with the norm sqrt(stretch)."""
        values = self.normal((count, width // stretch, stretch), 1.0)
        for part in values.split(1 << 14):  # a float32 copy of the whole would not fit beside a model
            norm = torch.linalg.vector_norm(part, dim=-1, keepdim=True, dtype=torch.float32)
            part.copy_(part / norm * stretch**0.5)
        return values.view(count, width)


def target_tensors(shape: Shape, embedding: Tensor, cycle: Cycle, source: Source) -> Iterator[Named]:
    """Every tensor of the target, ``embedding`` [V, H] among them."""
    table = (shape.vocab_size, shape.hidden_size)
    yield Named(name="model.embed_tokens.weight", shape=table, make=lambda: embedding)
    for index in range(shape.num_layers):
        yield from _target_layer(shape, f"model.layers.{index}.", source)
    yield source.ones("model.norm.weight", shape.hidden_size)
    yield Named(
        name="lm_head.weight", shape=table, make=lambda: target_lm_head(shape, embedding, cycle, source)
    )


def target_lm_head(shape: Shape, embedding: Tensor, cycle: Cycle, source: Source) -> Tensor:
    """``[V, H]``: the row of each token's follower in the cycle is the token's embedding; other rows are random."""
    rows = source.codes(shape.vocab_size, shape.hidden_size, shape.head_dim)
    before = torch.tensor(list(cycle.succ.keys()), device=source.device)
    after = torch.tensor(list(cycle.succ.values()), device=source.device)
    rows[after] = embedding[before]
    return rows.mul_(LOGIT / shape.hidden_size)


def head_tensors(shape: Shape, embedding: Tensor, cycle: Cycle, source: Source) -> Iterator[Named]:
    """Every tensor of the head but the embedding, which it shares with the target."""
    hidden, layer = shape.hidden_size, "midlayer."
    yield source.linear("fc.weight", hidden, 3 * hidden, 1.0)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        yield source.ones(f"{layer}{name}.weight", hidden)
    for name, make, size in (
        ("q_proj", _queries, (shape.q_size, 2 * hidden)),
        ("k_proj", _keys, (shape.kv_size, 2 * hidden)),
        ("v_proj", _values, (shape.kv_size, 2 * hidden)),
        ("o_proj", _output, (hidden, shape.q_size)),
    ):
        make_it = _bound(make, shape, source.linear("", *size, NOISE))
        yield Named(name=f"{layer}self_attn.{name}.weight", shape=size, make=make_it)
    yield from _mlp(shape, layer, source)
    yield source.ones("norm.weight", hidden)
    kept = torch.tensor(sorted(cycle.tokens), device=source.device)
    yield Named(
        name="lm_head.weight",
        shape=(shape.draft_vocab_size, hidden),
        make=lambda: head_lm_head(shape, embedding, cycle, kept),
    )
    yield Named(name="d2t", shape=kept.shape, make=lambda: kept - torch.arange(len(kept), device=kept.device))
    mask = torch.zeros(shape.vocab_size, dtype=torch.bool, device=source.device)
    yield Named(name="t2d", shape=mask.shape, make=lambda: mask.index_fill(0, kept, True))


def head_lm_head(shape: Shape, embedding: Tensor, cycle: Cycle, kept: Tensor) -> Tensor:
    """``[Vd, H]`` for the target ids ``kept`` [Vd]: each row is the embedding of the token that drafts it."""
    guessed_by = {guess: token for token, guess in cycle.guess.items()}
    tokens = torch.tensor([guessed_by[token] for token in kept.tolist()], device=kept.device)
    return embedding[tokens] * (LOGIT / shape.kv_size)  # only the code part of a state depends on the token


def _target_layer(shape: Shape, prefix: str, source: Source) -> Iterator[Named]:
    hidden, attention = shape.hidden_size, prefix + "self_attn."
    yield source.ones(prefix + "input_layernorm.weight", hidden)
    yield source.linear(attention + "q_proj.weight", shape.q_size, hidden, 1.0)
    yield source.linear(attention + "k_proj.weight", shape.kv_size, hidden, 1.0)
    yield source.linear(attention + "v_proj.weight", shape.kv_size, hidden, 1.0)
    yield source.linear(attention + "o_proj.weight", hidden, shape.q_size, RESIDUAL)
    if shape.qk_norm:
        yield source.ones(attention + "q_norm.weight", shape.head_dim)
        yield source.ones(attention + "k_norm.weight", shape.head_dim)
    yield source.ones(prefix + "post_attention_layernorm.weight", hidden)
    yield from _mlp(shape, prefix, source)


def _mlp(shape: Shape, prefix: str, source: Source) -> Iterator[Named]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    yield source.linear(prefix + "mlp.gate_proj.weight", inner, hidden, 1.0)
    yield source.linear(prefix + "mlp.up_proj.weight", inner, hidden, 1.0)
    yield source.linear(prefix + "mlp.down_proj.weight", hidden, inner, RESIDUAL)


def _bound(make: Callable[[Shape, Tensor], None], shape: Shape, noise: Named) -> Callable[[], Tensor]:
    def made() -> Tensor:
        weight = noise.make()
        make(shape, weight)
        return weight

    return made


def _queries(shape: Shape, weight: Tensor) -> None:
    """Each query head reads the part of the code that its key head reads."""
    rows = torch.arange(shape.q_size, device=weight.device)
    weight[rows, _code_of_query(shape, rows)] += _gain(shape)


def _keys(shape: Shape, weight: Tensor) -> None:
    rows = torch.arange(shape.kv_size, device=weight.device)
    weight[rows, rows] += _gain(shape)


def _values(shape: Shape, weight: Tensor) -> None:
    """The code of the token minus the code part of the state."""
    rows = torch.arange(shape.kv_size, device=weight.device)
    weight[rows, rows] += 1.0
    weight[rows, shape.hidden_size + rows] -= 1.0


def _output(shape: Shape, weight: Tensor) -> None:
    """The mean over the query heads that read the same value."""
    columns = torch.arange(shape.q_size, device=weight.device)
    weight[_code_of_query(shape, columns), columns] += shape.num_kv_heads / shape.num_heads


def _code_of_query(shape: Shape, rows: Tensor) -> Tensor:
    """The index in the code of each of the ``rows`` of the query heads."""
    group = shape.num_heads // shape.num_kv_heads
    return rows // shape.head_dim // group * shape.head_dim + rows % shape.head_dim


def _gain(shape: Shape) -> float:
    """Of queries and of keys: q . k / sqrt(D) of a token with itself is gain^2 * D / sqrt(D)."""
    return (SELF_SCORE / shape.head_dim**0.5) ** 0.5
