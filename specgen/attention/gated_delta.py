"""Gated DeltaNet (Yang et al., 2024) over the sequences of a pass: a short convolution, then a gated delta rule.

A value head's state S [key_dim, value_dim] is updated row by row: it decays by ``exp(g)``, and what it then holds for
the row's key moves towards the row's value by the share ``beta``; a row reads S behind its own update. Several rows are
taken in together, in the chunkwise form of that paper.

A decode pass does not know which of its rows will be accepted. It keeps their inputs, and the next pass begins with
those that were: all rows of a sequence in front of where that pass starts (``StateCache``).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specgen.kv.kv_cache import StateCache
from specgen.kv.layout import Layout

_CHUNK = 64  # rows of a prompt that are taken in together
_EPS = 1e-6  # of the norm of queries and keys: added to the sum of squares


@dataclass(frozen=True, kw_only=True)
class DeltaLayer:
    """A layer's convolution, and the recurrence behind it: all that is known of the layer here."""

    index: int  # of its state in the cache
    conv: Tensor  # [channels, taps] of queries, keys and values of all heads; the last tap is the row's own
    log_rate: Tensor  # [Hv] float32: g = -exp(log_rate) * softplus(a + rate_bias)
    rate_bias: Tensor  # [Hv] float32
    num_key_heads: int
    key_dim: int
    value_dim: int


class _Rows(NamedTuple):
    """Rows of B sequences behind the convolution, in float32."""

    q: Tensor  # [B, Hv, n, key_dim]
    k: Tensor  # [B, Hv, n, key_dim]
    v: Tensor  # [B, Hv, n, value_dim]
    beta: Tensor  # [B, Hv, n]
    g: Tensor  # [B, Hv, n]

    def only(self, counts: Tensor) -> "_Rows":
        """``counts`` [B]: the rows behind the first so many leave a state as it is, whatever they hold."""
        rows = torch.arange(self.beta.shape[2], device=counts.device)
        there = (rows < counts[:, None])[:, None]
        q, k, v = (torch.where(there[..., None], each, 0) for each in self[:3])
        return _Rows(q, k, v, torch.where(there, self.beta, 0), torch.where(there, self.g, 0))


def recur(
    cache: StateCache, layout: Layout, layer: DeltaLayer, mixed: Tensor, a: Tensor, b: Tensor
) -> Tensor:
    """The rows of a pass into the state of each sequence; see ``Attend.recur``."""
    assert layout.state_slots is not None, "sequences without slots have no state"
    if mixed.is_cuda:
        from specgen.ops import delta_kernels

        if delta_kernels.serves(cache, layer.conv.shape[1], mixed.dtype):
            return delta_kernels.recur(
                cache,
                layer.index,
                (layer.conv, layer.log_rate, layer.rate_bias),
                (mixed, a, b),
                (layout.state_slots, layout.starts, layout.first_rows, layout.query_lens),
                None if layout.host is None else layout.kv_lens,
                layout.max_query_len,
                layer.num_key_heads,
            )
    return _recur(cache, layout, layer, torch.cat((mixed, a, b), -1))


def _recur(cache: StateCache, layout: Layout, layer: DeltaLayer, rows: Tensor) -> Tensor:
    """``rows`` [rows, row_width] in plain torch."""
    assert layout.state_slots is not None
    index, slots = layer.index, layout.state_slots
    begins = layout.starts == 0  # whatever the slot held was another sequence's
    states = torch.where(begins[:, None, None, None], 0, cache.states[index, slots])
    kept = torch.where(begins[:, None, None], 0, cache.rows[index, slots])
    if layout.host is not None:
        return _prefill(cache, layout, layer, states, kept, rows)
    num_taken = torch.where(begins, 0, layout.starts - cache.positions[index, slots])
    states, before = _accepted(layer, states, kept, num_taken)
    padded = rows[layout.rows_of(layout.max_query_len)]  # [B, most rows, row_width]
    out, _ = _chunk(states, _convolved(layer, before, padded))
    cache.states[index, slots] = states
    cache.rows[index, slots, : before.shape[1] + padded.shape[1]] = torch.cat((before, padded), 1)
    cache.positions[index, slots] = layout.starts
    every = out.transpose(1, 2).flatten(0, 1).to(rows.dtype)  # [B * most rows, Hv, value_dim]
    return every if layout.uniform_q is not None else every[layout.padded]


def _accepted(layer: DeltaLayer, states: Tensor, kept: Tensor, num_taken: Tensor) -> tuple[Tensor, Tensor]:
    """States [B, ...] behind the first ``num_taken`` [B] rows of the last decode pass, and what a convolution sees.

    ``kept`` are [B, taps - 1 + n, row_width], of which the last taps - 1 rows in front of what comes are returned.
    """
    back = layer.conv.shape[1] - 1
    num_taken = num_taken.clamp(0, kept.shape[1] - back)  # of padding rows it may be anything
    _, states = _chunk(states, _convolved(layer, kept[:, :back], kept[:, back:]).only(num_taken))
    index = num_taken[:, None] + torch.arange(back, device=kept.device)
    return states, kept.gather(1, index[..., None].expand(-1, -1, kept.shape[2]))


def _prefill(
    cache: StateCache, layout: Layout, layer: DeltaLayer, states: Tensor, kept: Tensor, rows: Tensor
) -> Tensor:
    """Pieces of prompts, all of which are taken in; what is behind a decode pass is never prefilled."""
    assert layout.host is not None
    assert layout.state_slots is not None
    back, slots = layer.conv.shape[1] - 1, layout.state_slots
    outs, ends = list[Tensor](), list[Tensor]()
    for number, piece in enumerate(torch.split_with_sizes(rows, layout.host.query_lens)):
        state, before = states[number : number + 1], kept[number : number + 1, :back]
        for some in torch.split(piece[None], _CHUNK, 1):
            out, state = _chunk(state, _convolved(layer, before, some))
            before = torch.cat((before, some), 1)[:, -back:]
            outs.append(out[0].transpose(0, 1))
        cache.states[layer.index, slots[number]] = state[0]
        ends.append(before)
    cache.rows[layer.index, slots, :back] = torch.cat(ends)
    cache.positions[layer.index, slots] = layout.kv_lens
    return torch.cat(outs).to(rows.dtype)


def _convolved(layer: DeltaLayer, before: Tensor, rows: Tensor) -> _Rows:
    """``rows`` [B, n, row_width] behind the convolution, which also sees ``before`` [B, taps - 1, row_width]."""
    channels, num_value_heads = len(layer.conv), len(layer.log_rate)
    inputs = torch.cat((before, rows), 1)[..., :channels].transpose(1, 2)
    mixed = F.silu(F.conv1d(inputs, layer.conv[:, None], groups=channels)).float()
    keys = layer.num_key_heads * layer.key_dim
    q, k, v = mixed.split_with_sizes((keys, keys, channels - 2 * keys), 1)
    num_sequences, n = len(rows), rows.shape[1]
    heads = (each.reshape(num_sequences, layer.num_key_heads, -1, n).mT for each in (q, k))
    q, k = (_unit(each).repeat_interleave(num_value_heads // layer.num_key_heads, 1) for each in heads)
    a, b = rows[..., channels:].float().transpose(1, 2).chunk(2, 1)
    g = -layer.log_rate.exp()[:, None] * F.softplus(a + layer.rate_bias[:, None])
    values = v.reshape(num_sequences, num_value_heads, -1, n).mT
    return _Rows(q * layer.key_dim**-0.5, k, values, b.sigmoid(), g)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _chunk(states: Tensor, rows: _Rows) -> tuple[Tensor, Tensor]:
    """What ``rows`` read [B, Hv, n, value_dim], and the states [B, Hv, key_dim, value_dim] behind the last one.

    With G the sums of g, row i writes d_i = beta_i (v_i - exp(G_i) S' k_i - sum over j < i of exp(G_i - G_j)
    (k_i . k_j) d_j), which is a triangular system.
    """
    q, k, v, beta, g = rows
    total = g.cumsum(-1)
    since = total[..., :, None] - total[..., None, :]
    n = g.shape[-1]
    lower = torch.ones(n, n, dtype=torch.bool, device=g.device).tril()
    decay = torch.where(
        lower, since, float("-inf")
    ).exp()  # in front of exp: above the diagonal it may overflow
    kept = total.exp()[..., None]
    system = beta[..., None] * (k @ k.mT) * decay  # the diagonal of which is not read
    right = beta[..., None] * (v - kept * (k @ states))
    written = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = kept * (q @ states) + (q @ k.mT * decay) @ written
    last = decay[..., -1, :, None]
    return out, total[..., -1, None, None].exp() * states + (last * k).mT @ written
