"""Latent attention on Hopper by FlashInfer: absorbed, with a work list made on the device, and expanded (FA3)."""

import ctypes
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgen.attention import Heads, Kernel, LatentDims, LayerAttention, Rows, Use, refused
from specgen.attention.fa3 import LATE, expanded_module
from specgen.kv.layout import Layout
from specgen.ops.jit_modules import Module, compiled, current_stream, num_sms, pointers, source_spec

RANK, ROPE_DIM = 512, 64  # the kernel's; those of DeepSeek-V2 and its relatives
BLOCK_ROWS = 64  # rows times heads of one block
WIDTHS = ((256, 256), (192, 128))  # of keys and values: those of GLM-4.7-Flash and DeepSeek-V3
_SOURCE, _PLAN = (Path(__file__).with_name(name) for name in ("latent_decode.cu", "latent_plan.cu"))


def refuse_latents(device: torch.device, heads: Heads, latent: LatentDims) -> str | None:
    """Why FlashInfer's kernels for Hopper do not run these; see ``Capabilities.latents``."""
    major = torch.cuda.get_device_capability(device)[0]
    widths, dims = (latent.rank, latent.rope_dim), (latent.key_dim, latent.value_dim)
    reason = refused(
        *(
            (value, allowed, f"latent attention {what}", "--attention sdpa")
            for value, allowed, what in (
                (major, (9,), "on GPUs of compute capability {}.x"),
                (heads.dtype, (torch.bfloat16, torch.float16), "in {}"),
                (widths, ((RANK, ROPE_DIM),), "with latents and rotated keys of {}"),
                (dims, WIDTHS, "with keys and values of {}"),
            )
        )
    )
    most = 2 * BLOCK_ROWS
    if reason is None and heads.num_heads > most:
        return f"supports {most} heads of latent attention, not {heads.num_heads}: use --tensor-parallel"
    return reason


def latent_modules(use: Use) -> list[Module]:
    """The modules that latents need for ``use``."""
    latent, dtype = use.heads.latent, use.heads.dtype
    assert latent is not None
    decode = Module(what="latent attention", spec=partial(_spec, dtype))
    work_lists = Module(what="work lists of latent attention", spec=_plan_spec)
    return [decode, work_lists, *([expanded_module(latent, dtype)] if use.prefills else [])]


def latent_kernel(rows: Rows) -> str:
    """The name of what attends to latents."""
    return "FlashInfer FA3" if rows == "prefill" else "FlashInfer FA3 MLA"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How the rows of a pass are shared out; see ``latent_plan.cu``."""

    cluster: int  # blocks that attend together
    num_clusters: int
    group_rows: int  # rows of a sequence that a cluster attends for at once, with all of their heads
    groups: int  # of a sequence, at most

    @classmethod
    def of(cls, query_len: int, num_heads: int, num_multiprocessors: int) -> "Shape":
        """For at most ``query_len`` rows of each sequence."""
        assert num_heads <= 2 * BLOCK_ROWS, num_heads
        cluster = 1 if query_len * num_heads <= BLOCK_ROWS else 2
        groups = -(-query_len // (cluster * BLOCK_ROWS // num_heads))
        return cls(
            cluster=cluster,
            num_clusters=num_multiprocessors // cluster,
            group_rows=-(-query_len // groups),
            groups=groups,
        )

    def sections(self, num_sequences: int) -> list[int]:
        """The numbers of int32 in the sections of the list, in their order; FlashInfer reads all but the last two."""
        groups = num_sequences * self.groups
        by_item, by_block = 8 * [groups + self.num_clusters], 5 * [self.num_clusters * self.cluster]
        return [*by_item, self.num_clusters + 1, *by_block, groups + 1, groups]


class LatentDecode:
    """FlashInfer's FA3 kernel of multi-head latent attention, for passes of any lengths.

    Its work list depends on lengths, which FlashInfer's own wrapper wants to know on the host. Here a small kernel
    makes the list on the device, once a pass, so a captured pass stays right when lengths and pages change.
    """

    def __init__(self, device: torch.device) -> None:
        self._num_sms = num_sms(device)
        self._parts: tuple[Tensor, Tensor] | None = None
        self._device = device

    def plan(self, layout: Layout) -> Kernel:
        """``layout`` may be captured once a pass of its shape has run."""
        tables = layout.block_tables
        assert layout.starts.is_contiguous(), layout.starts.stride()
        assert tables.dtype == torch.int32, tables.dtype
        assert tables.stride(1) == 1, tables.stride()
        lists, outs = dict[int, tuple[Tensor, Shape, list[int]]](), list[Tensor]()

        def kernel(layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            assert keys is values, "values are the first numbers of the keys"
            assert keys.shape[2:] == (1, RANK + ROPE_DIM), keys.shape
            assert (layer.value_dim, layer.window, layer.sinks) == (RANK, None, None), layer
            num_heads = q.shape[1]
            if num_heads not in lists:
                work, shape = self._work_list(layout, num_heads)
                starts = accumulate(shape.sections(layout.num_sequences)[:-3], initial=0)
                lists[num_heads] = work, shape, list(starts)
            if not outs:  # rows without a page, and padding rows, are not written
                outs.append(q.new_zeros(len(q), num_heads, RANK))
            assert q.stride(-1) == keys.stride(-1) == 1, "the numbers of a head lie side by side"
            work, shape, starts_of = lists[num_heads]
            parts, sums = self._workspace()
            sizes = [shape.cluster, shape.num_clusters, num_heads, layout.page_size]
            sizes += [*q.stride()[:2], *keys.stride()[:2], *starts_of]
            error = compiled(_spec, "latent_decode", q.dtype)(
                *pointers((q, keys, tables, outs[0], work, parts, sums)),
                (ctypes.c_int64 * len(sizes))(*sizes),
                ctypes.c_double(layer.scale),
                current_stream(self._device),
            )
            assert error == 0, f"latent_decode: error {error} for {layout.num_sequences} sequences, {shape}"
            return outs[0].view(len(q), -1)

        return kernel

    def _work_list(self, layout: Layout, num_heads: int) -> tuple[Tensor, Shape]:
        shape, count = Shape.of(layout.max_query_len, num_heads, self._num_sms), layout.num_sequences
        sections, tables = shape.sections(count), layout.block_tables
        work = torch.empty(sum(sections), dtype=torch.int32, device=self._device)
        uniform = layout.uniform_q is not None
        lens = (
            (layout.starts, None, None) if uniform else (layout.starts, layout.query_lens, layout.first_rows)
        )
        assert {each.dtype for each in lens if each is not None} == {torch.int64}
        error = compiled(_plan_spec, "latent_plan_run")(
            *pointers((*lens, work)),
            *(count, layout.max_query_len, shape.groups, shape.group_rows, num_heads),
            *(tables.stride(0), tables.shape[1] * layout.page_size, shape.cluster, shape.num_clusters),
            current_stream(self._device),
        )
        assert error == 0, f"latent_plan: error {error} for {count} sequences, {shape}"
        return work, shape

    def _workspace(self) -> tuple[Tensor, Tensor]:
        """Outputs of parts and their log-sum-exps: each border between shares ends a part and begins one."""
        if self._parts is None:
            assert not torch.cuda.is_current_stream_capturing(), "run a pass before one is captured"
            rows = 2 * self._num_sms * BLOCK_ROWS
            parts = torch.empty(rows, RANK, dtype=torch.float16, device=self._device)  # or bfloat16
            self._parts = parts, torch.empty(rows, dtype=torch.float32, device=self._device)
        return self._parts


def _spec(dtype: torch.dtype, **more: int) -> Any:  # noqa: ANN401
    """The ``JitSpec`` for numbers of ``dtype``; ``more`` macros are a test's."""
    defines = {"HALF": int(dtype == torch.float16), "RANK": RANK, "ROPE_DIM": ROPE_DIM}
    return source_spec("latent_decode", _SOURCE, defines | more, {LATE.name: LATE.read_text()})


def _plan_spec() -> Any:  # noqa: ANN401
    return source_spec("latent_plan", _PLAN, {}, {})
