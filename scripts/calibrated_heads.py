"""The weights of calibrated heads: EAGLE3 of any number of layers and EAGLE-1, token by token, P-EAGLE, DFlash, DSpark.

Of the first two every draft is the guess after the token before it, so the first i + 1 of them are right with accept^(i
+ 1). What the known text cannot show is whether attention to other positions is right: a row's answer depends on its
own token alone.

Attention. Keys and queries are the code c(t) alone (calibrated_codes.py), scaled: a token scores ``SELF_SCORE`` with
itself and about SELF_SCORE / sqrt(head_dim) with any other, so attention reads its own row.

EAGLE3. The value of the first layer is c(t) minus the code part of the incoming state h, and ``o_proj`` adds it to the
stream h: its code part is now c(t) whatever it was, and the rest is unchanged. h is ``fc`` of the features in the first
pass (random, of RMS 1) and the head's own state later (of RMS 1 again, as c(t) has RMS 1): one matrix cancels both.
Without it the second draft would depend on two codes. Each further layer negates the code: its value is -2 c(t).
``lm_head`` is like the target's, with the rows that unknown tokens need rotated among them, and the sign of the code.

EAGLE-1. ``lm_head`` is the target's, so here the head's own embedding has the rows of unknown tokens rotated. ``fc``
takes the code alone, negated, and scaled until it gives the target's logits without the rest of the embedding; the
layer negates it again. Its incoming state is but noise.

P-EAGLE: 2^n drafts in one pass of n layers.

Slot 1 eats the newest token, the others the mask token, whose embedding has no code: their answer has to come from
slot 1. Attention goes by distance alone. Keys are the same for every row; a query, rotated back by a distance d, scores
highest with the row d positions before its own. A row without a code looks ``2^i`` positions back in layer i (from 0)
with half of its query heads and at itself with the others, a row with a code always at itself; the mark of the code
(calibrated_codes.py) decides. So the code goes from slot 1 to slot 2 in the first layer, from both of these to slots 3
and 4 in the second, and so on: in slots beyond 2^n there is none, and their drafts are wrong.

``o_proj`` takes a code that it brings d slots further to the code of the token d places further in the text (C^d), for
the heads that look back. For the others it is such that a row that reads itself with all its heads gets its own code
once: I - C^d in the first layer, where the value is the embedding's code, and -C^d in the others, where it is that of
the stream, which stays. ``fc`` leaves the code part of the state empty.

So each slot drafts the guess after a token of the known text: slot 1 after the newest token, slot 2 after the true
token behind it, and so on. The first i + 1 drafts are right with accept^(i + 1), as with the other heads, for i < 2^n.

DSpark: as P-EAGLE, for the rows of its block. A row's stream is its embedding, so the newest token's has its code from
the beginning, and a mask that is given one looks like a token. Keys are a bias, the same for all rows and for the text,
whose rows no query finds: none is as near. The Markov head adds next to nothing.

DFlash: the newest token's row drafts nothing, so the first layer takes its code to the next row as it is, and n layers
know 2^(n - 1) drafts.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from calibrated_codes import Codes
from calibrated_cycle import Cycle
from calibrated_shapes import Shape
from calibrated_weights import LOGIT, NOISE, Named, Source, mlp
from torch import Tensor

SELF_SCORE = 40.0  # of a token with itself, before the softmax; others get e^-40 of its weight
Add = Callable[[Tensor], None]  # adds to a matrix what it is to compute


def eagle3_tensors(
    num_layers: int, shape: Shape, codes: Codes, cycle: Cycle, source: Source
) -> Iterator[Named]:
    """Every tensor of an EAGLE3 head; the embedding is the target's unless the head's stream is narrower."""
    features, first = 3 * shape.hidden_size, "midlayer." if num_layers == 1 else "layers.0."
    if shape.head_hidden_size:
        codes, shape = codes.narrowed(shape.head_hidden_size), shape.of_head
        table = codes.embedding
        yield Named(name="embed_tokens.weight", shape=tuple(table.shape), make=lambda: table)
    hidden = shape.hidden_size
    yield source.linear("fc.weight", hidden, features, 1.0)

    def put(weight: Tensor) -> None:
        add_code(shape, weight, 1.0)
        add_code(shape, weight, -1.0, start=hidden)

    for name in ("input_layernorm", "hidden_norm"):
        yield source.ones(f"{first}{name}.weight", hidden)
    yield from _own_row_layer(shape, first, 2 * hidden, 1.0, put, source)
    for index in range(1, num_layers):
        yield source.ones(f"layers.{index}.input_layernorm.weight", hidden)
        yield from _own_row_layer(shape, f"layers.{index}.", hidden, 1.0, _negate(shape), source)
    yield from vocabulary_tensors(shape, codes, cycle, source, sign=(-1.0) ** (num_layers - 1))


def eagle1_tensors(shape: Shape, codes: Codes, cycle: Cycle, source: Source) -> Iterator[Named]:
    """Every tensor of an EAGLE-1 head, its own embedding among them; ``lm_head`` is the target's."""
    hidden, scale = shape.hidden_size, shape.hidden_size / shape.kv_size
    table = (shape.vocab_size, hidden)
    yield Named(name="embed_tokens.weight", shape=table, make=lambda: _rotated(codes, cycle))
    yield source.shaped("fc.weight", hidden, 2 * hidden, lambda weight: add_code(shape, weight, -scale))
    yield from _own_row_layer(shape, "layers.0.", hidden, scale, _negate(shape), source)


def eagle_llama4_tensors(shape: Shape, codes: Codes, cycle: Cycle, source: Source) -> Iterator[Named]:
    """The same of an EAGLE head of a Llama-4, whose norms leave a code alone that is as long as the whole stream."""
    hidden, scale = shape.hidden_size, (shape.hidden_size / shape.kv_size) ** 0.5
    table = (shape.vocab_size, hidden)
    yield Named(name="embed_tokens.weight", shape=table, make=lambda: _rotated(codes, cycle))
    yield source.shaped("fc.weight", hidden, 2 * hidden, lambda weight: add_code(shape, weight, -scale))
    yield source.ones("layers.0.input_layernorm.weight", hidden)
    for named in _own_row_layer(shape, "layers.0.", hidden, scale, _negate(shape), source):
        yield replace(named, name=named.name.replace(".mlp.", ".feed_forward."))
    yield source.ones("norm.weight", hidden)


def vocabulary_tensors(
    shape: Shape, codes: Codes, cycle: Cycle, source: Source, sign: float = 1.0
) -> Iterator[Named]:
    """The final norm, ``lm_head`` and the maps between the vocabularies; ``sign`` is that of the code in the state."""
    yield source.ones("norm.weight", shape.hidden_size)
    kept = torch.tensor(sorted(cycle.tokens), device=source.device)
    yield Named(
        name="lm_head.weight",
        shape=(shape.draft_vocab_size, shape.hidden_size),
        make=lambda: _head_lm_head(shape, codes, cycle, kept, sign),
    )
    yield Named(name="d2t", shape=kept.shape, make=lambda: kept - torch.arange(len(kept), device=kept.device))
    mask = torch.zeros(shape.vocab_size, dtype=torch.bool, device=source.device)
    yield Named(name="t2d", shape=mask.shape, make=lambda: mask.index_fill(0, kept, True))


def attention_tensors(
    shape: Shape, prefix: str, width: int, adds: dict[str, Add], source: Source
) -> Iterator[Named]:
    """The four projections of a layer, whose q, k and v take inputs ``width`` wide; ``adds`` by their names."""
    sizes = {
        "q_proj": (shape.q_size, width),
        "k_proj": (shape.kv_size, width),
        "v_proj": (shape.kv_size, width),
        "o_proj": (shape.hidden_size, shape.q_size),
    }
    for name, size in sizes.items():
        yield source.shaped(f"{prefix}self_attn.{name}.weight", *size, adds[name])


def add_code(shape: Shape, weight: Tensor, gain: float, start: int = 0) -> None:
    """Add ``gain`` times the code, which is at the inputs from ``start`` on, to the first outputs."""
    rows = torch.arange(shape.kv_size, device=weight.device)
    weight[rows, start + rows] += gain


def _own_row_layer(
    shape: Shape, prefix: str, width: int, scale: float, values: Add, source: Source
) -> Iterator[Named]:
    """A layer without its input norms; its attention reads the own row, by a code ``scale`` times as long."""
    # q . k / sqrt(D) of a token with itself is gain^2 * D / sqrt(D)
    gain = (SELF_SCORE / shape.head_dim**0.5) ** 0.5 / scale

    def queries(weight: Tensor) -> None:
        rows = torch.arange(shape.q_size, device=weight.device)
        weight[rows, _code_of_query(shape, rows)] += gain

    def output(weight: Tensor) -> None:
        """The mean over the query heads that read the same value."""
        columns = torch.arange(shape.q_size, device=weight.device)
        weight[_code_of_query(shape, columns), columns] += shape.num_kv_heads / shape.num_heads

    adds: dict[str, Add] = {
        "q_proj": queries,
        "k_proj": lambda weight: add_code(shape, weight, gain),
        "v_proj": values,
        "o_proj": output,
    }
    yield source.ones(f"{prefix}post_attention_layernorm.weight", shape.hidden_size)
    yield from attention_tensors(shape, prefix, width, adds, source)
    yield from mlp(shape, prefix, source)


def _negate(shape: Shape) -> Add:
    return lambda weight: add_code(shape, weight, -2.0)


def _code_of_query(shape: Shape, rows: Tensor) -> Tensor:
    """The index in the code of each of the ``rows`` of the query heads."""
    group = shape.num_heads // shape.num_kv_heads
    return rows // shape.head_dim // group * shape.head_dim + rows % shape.head_dim


def _head_lm_head(shape: Shape, codes: Codes, cycle: Cycle, kept: Tensor, sign: float) -> Tensor:
    """``[Vd, H]`` for the target ids ``kept`` [Vd]: each row is the embedding of the token that drafts it."""
    guessed_by = {guess: token for token, guess in cycle.guess.items()}
    drafted_by = [guessed_by[token] for token in kept.tolist()]
    rows = codes.embedding[torch.tensor(drafted_by, device=kept.device)] * (sign * LOGIT / shape.kv_size)
    rows[:, shape.kv_size :] *= NOISE  # only the code part of a state depends on the token
    if codes.probabilities:
        said = torch.tensor([codes.probabilities[token] for token in drafted_by], device=kept.device)
        # of the other rows, whose logits are normal: the log of the sum of their exponentials
        logits, others = said.logit(), math.log(len(kept))
        for _ in range(4):  # logits decide how far the others' spread
            spread = ((logits + others).square().mean() / (2 * shape.kv_size)).item()
            others = math.log(len(kept)) + spread
        rows *= ((logits + others) / LOGIT)[:, None]
    return rows


def _rotated(codes: Codes, cycle: Cycle) -> Tensor:
    """``[V, H]``: the target's embedding, where a token has the row of the one that its guess follows."""
    before = {follower: token for token, follower in cycle.succ.items()}
    guesses = cycle.guess
    table = codes.embedding.clone()
    tokens = torch.tensor(cycle.unknown, dtype=torch.int64, device=table.device)
    rows = torch.tensor(
        [before[guesses[token]] for token in cycle.unknown], dtype=torch.int64, device=table.device
    )
    table[tokens] = codes.embedding[rows]
    return table


SCORE = 300.0  # of the row at the right distance, before the softmax; its neighbours get about 0.9 of it
NUM_FEATURES = 3
SLOWEST = 0.05  # radians per position: slower rotary pairs tell no distance from the next


def peagle_tensors(
    num_layers: int, shape: Shape, codes: Codes, cycle: Cycle, source: Source
) -> Iterator[Named]:
    """Every tensor of the head but the embedding, which it shares with the target."""
    hidden = shape.hidden_size
    fc_size = (hidden, NUM_FEATURES * hidden)
    yield source.shaped("fc.weight", *fc_size, _fc(shape))
    yield Named(name="mask_hidden", shape=(1, fc_size[1]), make=lambda: _mask_hidden(shape, source))
    for index in range(num_layers):
        prefix, first = f"layers.{index}.", index == 0
        norms = ("input_layernorm", "post_attention_layernorm", *(("hidden_norm",) if first else ()))
        for name in norms:
            yield source.ones(f"{prefix}{name}.weight", hidden)
        adds = _adds(shape, codes, 2**index, first)
        yield from attention_tensors(shape, prefix, hidden * (2 if first else 1), adds, source)
        yield from mlp(shape, prefix, source)
    yield from vocabulary_tensors(shape, codes, cycle, source)


NUM_BLOCK_FEATURES = 5
MARKOV_RANK = 256


def block_tensors(
    num_layers: int, dspark: bool, shape: Shape, codes: Codes, cycle: Cycle, source: Source
) -> Iterator[Named]:
    """Every tensor of a DFlash or DSpark head but the embedding, which it shares with the target."""
    hidden, vocab = shape.hidden_size, (shape.vocab_size, shape.draft_vocab_size)
    yield source.linear("fc.weight", hidden, NUM_BLOCK_FEATURES * hidden, 1.0)
    yield source.ones("hidden_norm.weight", hidden)
    for index in range(num_layers):
        prefix = f"layers.{index}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield source.ones(f"{prefix}{name}.weight", hidden)
        back, forward = (2**index, 2**index) if dspark else (max(1, 2**index // 2), 2**index // 2)
        yield from attention_tensors(shape, prefix, hidden, _block_adds(shape, codes, back, forward), source)
        yield from _block_biases(shape, prefix, back, source)
        yield from mlp(shape, prefix, source)
    if dspark:
        for name, rows in zip(("markov_w1", "markov_w2"), vocab, strict=True):
            yield source.noise(f"markov_head.{name}.weight", (rows, MARKOV_RANK), 1e-3)
    yield from vocabulary_tensors(shape, codes, cycle, source)


def _block_adds(shape: Shape, codes: Codes, back: int, forward: int) -> dict[str, Add]:
    """As ``_adds``, of rows ``back`` positions before whose code goes ``forward`` places further in the text."""
    here, there = (_query(shape, distance).to(codes.turns.device) for distance in (0, back))

    def queries(weight: Tensor) -> None:  # beside the bias: a row with a code looks at itself
        heads = weight.view(shape.num_kv_heads, 2, -1, shape.head_dim, weight.shape[1])
        heads[:, 1, :, :, 0] += here - there

    return {
        "q_proj": queries,
        "k_proj": lambda weight: None,
        "v_proj": lambda weight: add_code(shape, weight, 1.0),
        "o_proj": partial(_move_code, shape, codes, forward, 0.0),
    }


def _block_biases(shape: Shape, prefix: str, back: int, source: Source) -> Iterator[Named]:
    """Of queries, half of which look ``back``, and of keys, which are alike."""
    here, there = (shape.mark * _query(shape, distance).to(source.device) for distance in (0, back))
    queries = torch.empty(shape.num_kv_heads, 2, shape.q_size // shape.kv_size // 2, shape.head_dim)
    queries[:, 0], queries[:, 1] = here.cpu(), there.cpu()
    biases = {"q": queries.flatten(), "k": here.repeat(shape.num_kv_heads), "v": torch.zeros(shape.kv_size)}
    for name, bias in biases.items():
        made = bias.to(source.device, torch.bfloat16)
        yield Named(
            name=f"{prefix}self_attn.{name}_proj.bias", shape=tuple(made.shape), make=lambda made=made: made
        )


def _move_code(shape: Shape, codes: Codes, distance: int, own: float, weight: Tensor) -> None:
    """The code of what half of the heads saw goes ``distance`` places on; a row that saw itself adds ``own`` of it."""
    forward = codes.forward(distance)
    kept = own * torch.eye(shape.kv_size, device=forward.device) - forward
    columns = weight.view(shape.hidden_size, shape.num_kv_heads, 2, -1, shape.head_dim)
    for head in range(shape.num_kv_heads):
        part = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
        for role, matrix in enumerate((kept, forward)):
            share = matrix[part, part] / columns.shape[3]
            columns[part, head, role] += share[:, None].to(weight.dtype)


def _fc(shape: Shape) -> Add:
    """The mean of the features without their code: as all embeddings have one norm, so have all states (RMS 1).

    The first number behind the code is the mark of every row, also of those that the mask token takes.
    """
    start, hidden = shape.kv_size, shape.hidden_size
    gain = (hidden / (hidden - start)) ** 0.5

    def add(weight: Tensor) -> None:
        rows = torch.arange(start + 1, hidden, device=weight.device)
        weight[start, ::hidden] += 1 / NUM_FEATURES
        for feature in range(NUM_FEATURES):
            weight[rows, feature * hidden + rows] += gain / NUM_FEATURES

    return add


def _mask_hidden(shape: Shape, source: Source) -> Tensor:
    """``[1, features * H]``: like the features of a token, with a random embedding."""
    feature = source.stretches(1, shape.hidden_size, shape.head_dim)
    feature[:, 0] = shape.mark
    return feature.repeat(1, NUM_FEATURES)


def _adds(shape: Shape, codes: Codes, distance: int, first: bool) -> dict[str, Add]:
    """What the projections of a layer compute; only the ``first`` has the embedding before the stream in its input."""
    all_rows, coded = (shape.hidden_size if first else 0) + shape.kv_size, 0  # the inputs that hold the marks
    # From the second layer on, rows with a code have it in addition to a state of RMS 1: the norm divides by this.
    norm = 1.0 if first else (1 + shape.kv_size / shape.hidden_size) ** 0.5
    here, back = _query(shape, 0).to(codes.turns.device), _query(shape, distance).to(codes.turns.device)

    def queries(weight: Tensor) -> None:
        heads = weight.view(shape.num_kv_heads, 2, -1, shape.head_dim, weight.shape[1])
        heads[:, 0, :, :, all_rows] += here
        heads[:, 1, :, :, all_rows] += back
        heads[:, 1, :, :, coded] += here - back

    def keys(weight: Tensor) -> None:
        heads = weight.view(shape.num_kv_heads, shape.head_dim, -1)
        heads[:, :, all_rows] += here
        heads[:, :, coded] += here * (norm - 1)  # a row with a code has the key of one without

    return {
        "q_proj": queries,
        "k_proj": keys,
        "v_proj": lambda weight: add_code(shape, weight, norm),
        "o_proj": partial(_move_code, shape, codes, distance, float(first)),
    }


def _query(shape: Shape, distance: int) -> Tensor:
    """``[D]``: with a mark as input, scores ``SCORE`` with the key ``distance`` positions before, less with others."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    speeds = shape.rope_theta**-exponents
    used = speeds > SLOWEST
    length = (SCORE * shape.head_dim**0.5 / used.sum()) ** 0.5 / shape.mark
    angles = -distance * speeds
    return torch.cat((angles.cos() * used, angles.sin() * used)) * length
