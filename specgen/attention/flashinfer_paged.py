"""FlashInfer's paged attention wrapper, for any mix of query lengths; the host plans every pass."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from specgen.attention import Backend, Capabilities, Gpu, Heads, Kernel, LayerAttention, Rows, Use
from specgen.attention.fa3 import attend_paged, paged_module
from specgen.attention.planning import PassLens, prefill_bytes
from specgen.kv.layout import Layout
from specgen.ops.jit_modules import Module, num_sms

FlashAttention = Literal["fa2", "fa3"]


@dataclass(frozen=True, kw_only=True)
class _PlanKey:
    """What a plan depends on beside the lengths."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    scale: float
    window_left: int
    sinks: bool


class FlashInferBackend(Backend):
    """FA2's or FA3's prefill kernel over pages; FlashInfer's tensor-core decode is FA2's as well.

    FA3 is for prefill on compute capability 9.0: there up to 1.8 times as fast from 500 rows per sequence on, but 2 to
    4 times as slow as FA2 where a sequence has few rows. An FP8 cache gets FA2 in any case.

    The kernel's work list is made on the host from the lengths of the pass, so a captured call is right only for the
    lengths it was planned with: graphs would need the wrapper's own mode for them (fixed buffers, one wrapper a
    batch size) and a plan between replays, which ``trtllm`` does without. Calls of one object must be on one stream.
    """

    name = "flashinfer"
    summary = "paged kernels for any mix of lengths"
    capabilities = Capabilities(
        devices=("cuda",),
        package="flashinfer",
        uniform_q_max=None,
        needs_host_lens=True,
        compute_majors=(8, 9, 10, 12),
        dtypes=(torch.bfloat16, torch.float16),
        kv_dtypes=(torch.bfloat16, torch.float16, torch.float8_e4m3fn),
        fp8_majors=(9, 10, 12),
        page_sizes=(16, 32, 64),
        head_dims=(64, 128, 256),
        sinks=True,
        latents=None,
    )

    def __init__(self, device: torch.device, kernels: FlashAttention = "fa2") -> None:
        self._device = device
        self._kernels = kernels
        self._num_sms = num_sms(device)
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[object, ...], _Wrapper] = {}

    @staticmethod
    def modules(gpu: Gpu, use: Use) -> list[Module]:
        return prefill_modules("fa2", use)

    @staticmethod
    def kernel(gpu: Gpu, use: Use, rows: Rows, num_sequences: int) -> str:
        return prefill_kernel("fa2", use.heads)

    def plan(self, layout: Layout) -> Kernel:
        """Without ``layout.host`` this waits for the device."""
        lengths = PassLens(layout)
        fa3 = attend_paged(lengths) if self._kernels == "fa3" else None

        def kernel(layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            if fa3 is not None and keys.dtype == q.dtype:
                return fa3(layer, q, keys, values)
            heads = _PlanKey(
                num_heads=q.shape[1],
                num_kv_heads=keys.shape[2],
                head_dim=q.shape[2],
                dtype=q.dtype,
                kv_dtype=keys.dtype,
                scale=layer.scale,
                window_left=layer.window_left,
                sinks=layer.sinks is not None,
            )
            wrapper = self._wrapper_for(heads)
            wrapper.plan(lengths, heads)
            out = torch.zeros_like(q) if lengths.num_rows < len(q) else torch.empty_like(q)
            rows = slice(lengths.num_rows)
            wrapper.run(q[rows], (keys, values), out[rows], layer.sinks, *layer.kv_scales(keys))
            return out.view(len(q), -1)

        return kernel

    def _wrapper_for(self, heads: _PlanKey) -> "_Wrapper":
        """The wrapper for the window of ``heads``, and for their sinks, made if there is none."""
        group = heads.num_heads // heads.num_kv_heads
        num_bytes = prefill_bytes(self._num_sms, group=group, head_dim=heads.head_dim)
        if self._workspace.numel() < num_bytes:
            for wrapper in self._wrappers.values():
                wrapper.wait()
            self._wrappers.clear()
            self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        sinks = _sink_variant(heads, windowed=heads.window_left >= 0) if heads.sinks else ()
        key = (heads.window_left, *sinks[:1])
        if key not in self._wrappers:
            self._wrappers[key] = _Wrapper(self._workspace, sinks)
        return self._wrappers[key]


def _fitting(kernels: FlashAttention, heads: Heads) -> FlashAttention:
    """Those that run ``heads``: FA3 wants one dtype."""
    return kernels if heads.kv_dtype == heads.dtype else "fa2"


def prefill_kernel(kernels: FlashAttention, heads: Heads) -> str:
    """The name of what ``FlashInferBackend`` runs."""
    return f"FlashInfer {_fitting(kernels, heads).upper()}"


def prefill_modules(kernels: FlashAttention, use: Use) -> list[Module]:
    """The modules that a pass of prefills needs for ``use``."""
    make = paged_module if _fitting(kernels, use.heads) == "fa3" else _fa2_module
    return [make(use.heads, windowed=windowed) for windowed in use.windowed]


def _fa2_module(heads: Heads, *, windowed: bool) -> Module:
    """What ``_Wrapper`` gets from FlashInfer."""
    what = f"FA2, heads of {heads.head_dim}" + (", FP8 KV" if heads.fp8_pages else "")
    what += (", sinks" if heads.sinks else "") + (", windows" if windowed else "")
    return Module(what=what, spec=partial(_spec, heads, windowed))


def _spec(heads: Heads, windowed: bool) -> Any:  # noqa: ANN401
    from flashinfer.jit import attention
    from flashinfer.jit.attention import modules

    if heads.sinks:
        _, arguments, keywords = _sink_variant(heads, windowed=windowed)
        return attention.gen_customize_batch_prefill_module("fa2", *arguments, **keywords)
    types = (heads.dtype, heads.kv_dtype, heads.dtype, torch.int32)
    dims, no_rotation = (heads.head_dim, heads.head_dim), 0
    # FlashInfer 0.7's wrapper takes a narrower module than that of the public function
    make = getattr(modules, "_gen_batch_prefill_primary_module", attention.gen_batch_prefill_module)
    # of the flags, that for windows; the others are a cap on logits and GEMMs in half precision
    return make("fa2", *types, *dims, no_rotation, windowed, False, False)


def _sink_variant(heads: "_PlanKey | Heads", *, windowed: bool) -> tuple[str, list[Any], dict[str, Any]]:
    """The name and the arguments of FlashInfer's FA2 kernel with sinks: the ordinary one takes them and ignores them.

    The name says all that the kernel is compiled for. That of FlashInfer's own wrapper lacks the size of a head, so
    two models of one process could get each other's kernel.
    """
    from flashinfer.jit.attention.variants import attention_sink_decl

    kinds = "_".join(str(dtype).removeprefix("torch.") for dtype in (heads.dtype, heads.kv_dtype))
    name = f"specgen_prefill_sink_{kinds}_{heads.head_dim}_{'window' if windowed else 'full'}_fa2"
    types = [heads.dtype, heads.kv_dtype, heads.dtype, torch.int32, heads.head_dim, heads.head_dim]
    parameters = [
        ["sink"],
        ["float"],
        ["sm_scale"],
        ["double"],
        "AttentionSink",
        attention_sink_decl["fa2"],
    ]
    return name, [name, *types, *parameters], {"use_sliding_window": windowed}


class _Wrapper:
    """FlashInfer's wrapper of FA2 for one window, with its own plan: layers of one pass take turns without new plans.

    Wrappers share the ``workspace`` of partial results, which no kernel needs after it has run.
    """

    def __init__(
        self,
        workspace: Tensor,
        sinks: tuple[str, list[Any], dict[str, Any]] | tuple[()],
    ) -> None:
        from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

        variant = {"jit_args": sinks[1], "jit_kwargs": sinks[2]} if sinks else {}
        self._inner: Any = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2", **variant)
        self._planned: tuple[PassLens, _PlanKey] | None = None
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until the copy of the last plan has left the pinned buffer that plans are written to."""
        self._copied.synchronize()

    def plan(self, lengths: PassLens, heads: _PlanKey) -> None:
        """Plan anew unless it is planned for just that; target and head may share a layout but not a plan."""
        if self._planned == (lengths, heads):
            return
        self.wait()
        self._inner.plan(
            lengths.first_rows,
            lengths.first_pages,
            lengths.pages,
            lengths.last_page_lens,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            lengths.page_size,
            causal=True,
            q_data_type=heads.dtype,
            kv_data_type=heads.kv_dtype,
            sm_scale=heads.scale,
            window_left=heads.window_left,
        )
        self._copied.record()
        self._planned = lengths, heads

    def run(
        self,
        q: Tensor,
        pages: tuple[Tensor, Tensor],
        out: Tensor,
        sinks: Tensor | None,
        k_scale: float,
        v_scale: float,
    ) -> None:
        """Attention as planned, of rows ``[n, num_heads, head_dim]`` over pages of keys and values."""
        assert self._planned is not None
        heads = self._planned[1]
        assert heads.sinks == (sinks is not None)
        # a variant's own scale replaces the wrapper's
        own = (sinks, heads.scale * k_scale) if heads.sinks else ()
        self._inner.run(q, pages, *own, out=out, k_scale=k_scale, v_scale=v_scale)
