"""The weights of a calibrated P-EAGLE head: 2^n drafts in one pass of n layers.

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
"""

from collections.abc import Iterator

import torch
from calibrated_codes import Codes
from calibrated_cycle import Cycle
from calibrated_heads import Add, add_code, attention_tensors, vocabulary_tensors
from calibrated_shapes import Shape
from calibrated_weights import Named, Source, mlp
from torch import Tensor

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

    def output(weight: Tensor) -> None:
        forward = codes.forward(distance)
        own = (torch.eye(shape.kv_size, device=forward.device) if first else 0.0) - forward
        columns = weight.view(shape.hidden_size, shape.num_kv_heads, 2, -1, shape.head_dim)
        for head in range(shape.num_kv_heads):
            part = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
            for role, matrix in enumerate((own, forward)):
                share = matrix[part, part] / columns.shape[3]
                columns[part, head, role] += share[:, None].to(weight.dtype)

    return {
        "q_proj": queries,
        "k_proj": keys,
        "v_proj": lambda weight: add_code(shape, weight, norm),
        "o_proj": output,
    }


def _query(shape: Shape, distance: int) -> Tensor:
    """``[D]``: with a mark as input, scores ``SCORE`` with the key ``distance`` positions before, less with others."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    speeds = shape.rope_theta**-exponents
    used = speeds > SLOWEST
    length = (SCORE * shape.head_dim**0.5 / used.sum()) ** 0.5 / shape.mark
    angles = -distance * speeds
    return torch.cat((angles.cos() * used, angles.sin() * used)) * length
