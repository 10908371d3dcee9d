"""The kernels of a forward pass, chosen once by device and dtype. May import kv."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specgen.device import SINGLE_RANK, Ranks
from specgen.kv.layout import Layout
from specgen.ops.experts import Activation, Choice, Experts, ExpertsMap, Routing, SigmoidRouting
from specgen.ops.weight import Weight

Map = Callable[[Tensor], Tensor]  # rows to rows
Pair = Callable[[Tensor, Tensor], Tensor]


class Store(Protocol):
    """Rotates one layer's queries and keys, and writes keys and values to their pages."""

    def __call__(
        self, qkv: Tensor, keys: Tensor, values: Tensor, k_scale: float = 1.0, v_scale: float = 1.0
    ) -> Tensor:
        """Contiguous ``qkv`` [rows, Hq + 2 * Hkv, D] into pages of keys and of values, [num_pages, page_size, Hkv, D].

        Where Hkv is 0 there is q alone. Of each head the first numbers are rotated, two for each frequency; what is
        behind them stays as it is.

        8-bit pages take the float32 quotients by the scales, at most their largest number in size; other pages have
        no scales. Returns the rotated q [rows, Hq, D], contiguous because not every attention kernel reads strides.
        """
        ...

    def latents(self, latent: Tensor, key: Tensor, pages: Tensor, q: Tensor, out: Tensor) -> None:
        """The same of latent attention, of which only the last R numbers of a head are given and rotated.

        ``latent`` [rows, N] beside the rotated ``key`` [rows, R] go into ``pages`` [num_pages, page_size, 1, N + R],
        the rotated ``q`` [rows, Hq, R] goes into ``out``, which may be ``q`` itself. Rows and heads may be strided.
        """
        ...


Rope = Callable[[Layout], Store]  # planned once per pass


class Norm(Protocol):
    """RMSNorm over the last dimension, statistics in float32."""

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, ..., N] -> the same shape.

        A weight [n, N] is that of the first n heads of [rows, heads, N], one for each; the others stay as they are.
        """
        ...

    def add(self, stream: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        """``stream`` [rows, N] plus ``parts``, each [n, rows, N] (``Ops.linear_parts``), and the norm of the sum."""
        ...


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Partial sums [n, rows, out] of several GEMMs as those of one."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


class MakeNorm(Protocol):
    """Prepares a ``Norm`` from its weight [N] or [n, N] and eps."""

    def __call__(
        self, weight: Tensor, eps: float, casts_last: bool = False, out_scale: Tensor | None = None
    ) -> Norm:
        """``casts_last``: round behind the product with the weight (GPT-OSS), not before it; it may then be float32.

        ``out_scale``, float32 of one number: all that reads the result is a GEMM whose inputs are rounded to e4m3
        with that scale, and the result may be so already.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Sandwich:
    """The weights of norms around the sum of a residual stream and what a part of a layer returns; all cast last."""

    # [N] each: of both parts, where there are two, whose sum is normed
    within: tuple[Tensor, Tensor] | None = None
    behind: Tensor  # [N]: of what is added to the stream
    scale: Tensor | None = None  # [1]: what the sum is multiplied by
    before: Tensor  # [n, N]: of what reads that next
    eps: float
    sums: bool = True  # over ranks, each of which has a part of what is added


class SandwichNorm(Protocol):
    """Of a ``Sandwich``."""

    def __call__(self, stream: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        """``stream`` [rows, N] and parts, each [p, rows, N] (``Ops.linear_parts``): the stream, normed [n, rows, N]."""
        ...


class MakeGated(Protocol):
    """Prepares gate and up [2 * I, in]: [rows, in] -> activation(gate) * up [rows, I]."""

    def __call__(
        self, weight: Weight, out_scale: Tensor | None = None, activation: Activation = "swish"
    ) -> Map:
        """See ``MakeNorm`` for ``out_scale``."""
        ...


class MakeRope(Protocol):
    """Prepares a ``Rope`` for half-split pairs; see ``Store``."""

    def __call__(self, frequencies: Tensor, scale: float = 1.0) -> Rope:
        """``frequencies``: radians per position [R / 2], where the first R numbers of a head are rotated.

        ``scale`` multiplies cos and sin before they are rounded.
        """
        ...


class Largest(Protocol):
    """The first maximum of each row."""

    def __call__(self, x: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of contiguous ``x`` [..., V]: its index, or that entry of ``ids`` [V], and its value; [...] each.

        NaN counts as infinite; the value is then not finite.
        """
        ...


class MostLikely(Protocol):
    """The most likely token of each row, and its probability."""

    def __call__(self, x: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As ``Largest``, with the softmax's value there in float32 in place of the logit; NaN where a row has NaN."""
        ...


@dataclass(frozen=True, kw_only=True)
class Ops:
    """The operations of a model; every implementation rounds where ``transformers`` rounds.

    Each takes its weights when they are loaded, prepares them once, and returns the function that a pass calls.
    """

    linear: Callable[[Weight], Map]  # [out, in]: [rows, in] -> [rows, out]
    # the same as split-K partial sums [n, rows, out], added in Norm.add
    linear_parts: Callable[[Weight], Map]
    linear_float32: Callable[[Weight], Map]  # the same in float32, of which nothing is rounded
    gated_linear: MakeGated
    experts: Callable[[Experts], ExpertsMap]
    choice: Callable[[Routing], Choice]
    sigmoid_choice: Callable[[SigmoidRouting], Choice]
    rms_norm: MakeNorm
    sandwich: Callable[[Sandwich], SandwichNorm]
    # Embedding table [V, N], two norm weights [N], eps and whether norms round last: token ids [rows] and x [rows, N]
    # -> the normed embeddings concatenated with the normed x, [rows, 2 * N].
    embed_norm_concat: Callable[[Tensor, Tensor, Tensor, float, bool], Pair]
    # Norm weight [N] and eps: x [rows, heads, N] and a gate like it, whose rows may be strided -> the normed x times
    # silu(gate), a product in float32.
    gated_norm: Callable[[Tensor, float], Pair]
    # x [..., rows, N] and a gate [rows, N] or [rows, 1], whose rows may be strided -> x * sigmoid(gate).
    sigmoid_gated: Pair
    # Partial sums of a gate [n, rows, N] (``linear_parts``) and x [rows, N], whose rows may be strided -> GELU, by its
    # approximation with tanh, of the gate times x.
    gelu_gated: Pair
    largest: Largest
    most_likely: MostLikely
    # Classes [automata, V] and successors [entries] of automata, which of them [B], their states [B] and tokens [B, n]
    # -> the states [B, n + 1] before and behind each token; a token that is not allowed, or below 0, changes none.
    walk: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    # Logits [B, n, Vd]; classes, successors and automata as above, states [B, n], a number, and the tokens ids [Vd] or
    # None for all of V -> new logits, with that number for tokens that are not allowed in the state of their row.
    mask: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, Tensor | None], Tensor]
    rope: MakeRope
    ranks: Ranks = SINGLE_RANK  # over which ``Norm.add`` sums parts, as layers that are split need it


def bind_ops(device: torch.device, dtype: torch.dtype, ranks: Ranks = SINGLE_RANK) -> Ops:
    """The fastest kernels for weights of ``dtype`` on ``device``; of several ``ranks``, for one's share of a model."""
    from specgen.ops.reference import ranked

    return ranked(_bind(device, dtype), ranks, device, dtype)


def _bind(device: torch.device, dtype: torch.dtype) -> Ops:
    from specgen.ops.reference import torch_ops

    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9:
        from specgen.ops.cuda import cuda_ops

        return cuda_ops(dtype)
    if device.type == "cpu":
        from specgen.ops.cpu import cpu_ops

        return cpu_ops(dtype)
    return torch_ops()
