"""Expanded latent attention on Hopper: FlashInfer's FA3 kernel over keys and values that are in no pages."""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specgen.attention import ExpandedKernel
from specgen.attention.host_plan import HostPlan
from specgen.attention.workspaces import MIB
from specgen.kv.layout import HostLens
from specgen.models.attend import LayerAttention
from specgen.models.model_config import LatentConfig
from specgen.ops.jit_modules import Module

WIDTHS = ((256, 256), (192, 128))  # of keys and values: those of GLM-4.7-Flash and DeepSeek-V3


def module(latent: LatentConfig, dtype: torch.dtype) -> Module:
    """What the prefills of such a model need compiled."""
    return Module(
        what=f"FA3, keys of {latent.key_dim} and values of {latent.value_dim}",
        spec=partial(_spec, latent.key_dim, latent.value_dim, dtype),
    )


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """What a plan depends on beside the lengths."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    scale: float


class LatentPrefill:
    """FlashInfer's wrapper, with a plan a pass: layers take it in turn. Calls of one object must be on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inner: Any = None
        self._planned: HostPlan[tuple[object, _Planned]] = HostPlan()

    def plan(self, host: HostLens) -> ExpandedKernel:
        """For sequences of these lengths."""
        this = object()
        first_rows, first_keys = (
            torch.tensor([*accumulate(lens, initial=0)], dtype=torch.int32)
            for lens in (host.query_lens, host.kv_lens)
        )

        def kernel(layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            heads = _Planned(
                num_heads=q.shape[1],
                key_dim=keys.shape[2],
                value_dim=values.shape[2],
                dtype=q.dtype,
                scale=layer.scale,
            )
            self._planned.renew((this, heads), lambda: self._plan(first_rows, first_keys, heads))
            out = q.new_empty(len(q), heads.num_heads, heads.value_dim)
            self._inner.run(q, keys, values, out=out)
            return out.view(len(q), -1)

        return kernel

    def _plan(self, first_rows: Tensor, first_keys: Tensor, heads: _Planned) -> None:
        if self._inner is None:
            from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

            scratch = torch.empty(MIB, dtype=torch.uint8, device=self._device)  # FA3 splits no sequence
            self._inner = BatchPrefillWithRaggedKVCacheWrapper(scratch, "NHD", backend="fa3")
        self._inner.plan(
            first_rows,
            first_keys,
            heads.num_heads,
            heads.num_heads,
            heads.key_dim,
            heads.value_dim,
            causal=True,
            sm_scale=heads.scale,
            q_data_type=heads.dtype,
            kv_data_type=heads.dtype,
        )


def _spec(key_dim: int, value_dim: int, dtype: torch.dtype) -> Any:  # noqa: ANN401
    from flashinfer.jit.attention import gen_batch_prefill_module

    types, no_rotation = (dtype, dtype, dtype, torch.int32), 0
    # of the flags: no windows, no cap on logits, no products in half precision
    return gen_batch_prefill_module("fa3", *types, key_dim, value_dim, no_rotation, False, False, False)
