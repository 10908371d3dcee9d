"""The kernels of a forward pass, as one bundle that is bound once by device and dtype. May import kv."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specgen.kv.layout import Layout
from specgen.ops.weight import Weight

Map = Callable[[Tensor], Tensor]  # rows to rows
Pair = Callable[[Tensor, Tensor], Tensor]

# Takes one layer's projections [rows, Hq + 2 * Hkv, D] and its pages, keys and values, each
# [num_pages, page_size, Hkv, D]; stores the rotated keys and the values in them, returns the rotated q [rows, Hq, D],
# contiguous because not every attention kernel looks at strides.
Store = Callable[[Tensor, Tensor, Tensor], Tensor]
Rope = Callable[[Layout], Store]  # planned once a pass


class Norm(Protocol):
    """RMSNorm over the last dimension, statistics in float32."""

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, ..., N] -> the same shape."""
        ...

    def add(self, stream: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
        """``stream`` [rows, N] plus ``parts`` [n, rows, N] (see ``Ops.linear_parts``), and the norm of it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Ops:
    """What a model is made of; every implementation rounds where ``transformers`` rounds.

    Each takes what is known when weights are loaded, prepares it once, and returns what is called in a pass.
    """

    linear: Callable[[Weight], Map]  # [out, in]: [rows, in] -> [rows, out]
    linear_parts: Callable[[Weight], Map]  # the same as terms [n, rows, out], which Norm.add adds up
    gated_linear: Callable[[Weight], Map]  # gate and up [2 * I, in]: [rows, in] -> silu(gate) * up [rows, I]
    rms_norm: Callable[[Tensor, float], Norm]  # weight [..., N] and eps
    # Table [V, N], two weights [N] and eps: token ids [rows] and x [rows, N] -> the normed embeddings and the
    # normed x side by side, [rows, 2 * N].
    embed_beside: Callable[[Tensor, Tensor, Tensor, float], Pair]
    argmax: Map  # [..., V] -> [...] int64: the first maximum
    rope: Callable[[Tensor], Rope]  # radians a position [D / 2], for half-split pairs; see Store


def bind_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """The fastest kernels for weights of ``dtype`` on ``device``."""
    from specgen.ops.reference import torch_ops

    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9:
        from specgen.ops.cuda import cuda_ops

        return cuda_ops(dtype)
    if device.type == "cpu" and dtype == torch.float32 and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        from specgen.ops.cpu import cpu_float32_ops

        return cpu_float32_ops()
    return torch_ops()
