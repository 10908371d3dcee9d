"""On compute capability 9.0 the kernel measured fastest for each kind of pass, one of specgen's own first."""

from dataclasses import replace

import torch
from torch import Tensor

from specgen.attention import Backend, ExpandedKernel, Gpu, Kernel, RotatingKernel, Rows, Use
from specgen.attention.flashinfer_paged import latent_kernel, latent_modules, prefill_modules
from specgen.attention.hopper_decode import HopperDecode, module, serves
from specgen.attention.latent_decode import LATENTS, LatentDecode, list_module
from specgen.attention.latent_prefill import LatentPrefill
from specgen.attention.trtllm import TrtllmBackend, xqa_module
from specgen.attention.unsplit import UnsplitDecode
from specgen.attention.workspaces import num_sms
from specgen.kv.layout import HostLens, Layout
from specgen.models.layers import LayerAttention
from specgen.ops import Rope
from specgen.ops.jit_modules import Module
from specgen.ops.measured_choices import UNSPLIT_ROWS

OWN, UNSPLIT = "specgen hopper_decode", "FlashInfer FA2 without splits"


class HopperBackend(Backend):
    """Decode passes on ``hopper_decode`` where it serves, else on XQA or FA2; all else as ``TrtllmBackend``.

    Passes of several rows that ``hopper_decode`` does not serve and that fill the GPU with a block per sequence and KV
    head go to FlashInfer's FA2 kernel: it takes 83 us against XQA's 92 for 128 sequences of 5 rows and 300 positions,
    and 24.5 against 28.3 for 32 (32 heads, 8 KV heads of 128, bfloat16, H100).

    Latents are attended to by FlashInfer's FA3 kernel, with a work list that the device makes.
    """

    name = "hopper"
    summary = "the kernel measured fastest for each pass, none of which needs a plan on the host"
    capabilities = replace(TrtllmBackend.capabilities, compute_majors=(9,), fp8_majors=(9,), latents=LATENTS)

    def __init__(self, device: torch.device) -> None:
        self._trtllm = TrtllmBackend(device)
        self._num_sms = num_sms(device)
        self._unsplit = UnsplitDecode(device)
        self._latents, self._expanded = LatentDecode(device), LatentPrefill(device)

    @staticmethod
    def modules(gpu: Gpu, use: Use) -> list[Module]:
        heads = use.heads
        if heads.latent is not None:
            return [*latent_modules(use), list_module()]
        found, decoding = prefill_modules("fa3", use) if use.prefills else [], list[Module]()
        chosen = {rows: HopperBackend.kernel(gpu, use, rows, use.num_sequences) for rows in use.query_lens}
        for rows, kernel in chosen.items():
            if kernel == OWN:
                found.append(module(rows, heads.num_heads // heads.num_kv_heads, heads.head_dim))
            else:  # XQA where fewer sequences are left
                decoding += [xqa_module(heads, rows, windowed) for windowed in use.windowed]
        return [*found, *decoding, *(prefill_modules("fa2", use) if UNSPLIT in chosen.values() else [])]

    @staticmethod
    def kernel(gpu: Gpu, use: Use, rows: Rows, num_sequences: int) -> str:
        heads = use.heads
        if heads.latent is not None:
            return latent_kernel(rows)
        if isinstance(rows, int):
            group = heads.num_heads // heads.num_kv_heads
            if not use.chained and serves(rows, group, heads.head_dim, heads.dtype, heads.kv_dtype):
                return OWN
            fills = _unsplits(gpu.num_sms, num_sequences * heads.num_kv_heads, rows, group)
            if fills and not heads.sinks and heads.kv_dtype == heads.dtype:
                return UNSPLIT
        return TrtllmBackend.kernel(gpu, use, rows, num_sequences)

    def plan(self, layout: Layout) -> Kernel:
        xqa, query_len = self._trtllm.plan(layout), layout.uniform_q
        if layout.host is not None or query_len is None:
            return xqa
        unsplit = self._unsplit.plan(layout)

        def kernel(layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            num_kv_heads = keys.shape[2]
            blocks, group = layout.num_sequences * num_kv_heads, q.shape[1] // num_kv_heads
            # FA2 takes no sinks, and leaves out the scales of FP8 pages
            plain = layer.sinks is None and keys.dtype == q.dtype
            fa2 = plain and _unsplits(self._num_sms, blocks, query_len, group)
            return (unsplit if fa2 else xqa)(layer, q, keys, values)

        return kernel

    def absorbed(self, layout: Layout) -> Kernel:
        return self._latents.plan(layout)

    def expanded(self, host: HostLens) -> ExpandedKernel:
        return self._expanded.plan(host)

    def rotating(self, layout: Layout, rope: Rope) -> RotatingKernel | None:
        if layout.uniform_q is None or layout.host is not None or layout.chained:
            return None
        from specgen.ops.rope import TritonRope

        return HopperDecode(layout=layout, rope=rope) if isinstance(rope, TritonRope) else None


def _unsplits(num_sms: int, num_blocks: int, query_len: int, group: int) -> bool:
    """Whether a block for each sequence and KV head keeps every SM busy, and holds its rows of ``group`` heads."""
    return query_len > 1 and num_blocks > num_sms and query_len * group <= UNSPLIT_ROWS
