"""The reference backend: PyTorch's scaled dot product attention over gathered pages, on any device."""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specgen.attention import Backend, Capabilities, Gpu, Kernel, LayerAttention, Rows, Use
from specgen.kv.layout import Layout
from specgen.ops.jit_modules import Module

# Sequences share a dense call while padding them to the longest adds no more than this factor ...
_PADDING = 1.25
# ... and while their gathered keys and values stay in a CPU's cache (measured: half the time at 32 x 256).
_POSITIONS = 2048
_FEW_ROWS = 16  # of a sequence


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Sequences with one query length and nearly one KV length: one dense attention call."""

    rows: Tensor | slice  # [g * q] rows of the pass, sequence by sequence
    pages: Tensor | slice  # [g * p] pages, sequence by sequence; a slice where they follow one another
    positions: Tensor  # [g, q] of the rows
    size: int  # g
    _masks: dict[object, Tensor] = field(default_factory=dict, init=False)

    def attend(self, layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q ``[rows, num_heads, head_dim]`` -> ``[g * q, num_heads * value_dim]``."""
        num_heads, kv_heads, query_len = q.shape[1], keys.shape[2], self.positions.shape[1]
        # Heads that share keys as rows of one: as separate heads each would get a copy of latents, and few rows on a
        # CPU GEMMs of single rows, which take up to 17 times as long in bfloat16
        few = q.is_cpu and query_len <= _FEW_ROWS and layer.sinks is None
        heads = kv_heads if few or layer.value_dim is not None else num_heads
        shared = num_heads // heads
        k_scale, v_scale = layer.kv_scales(keys)
        dense_keys = self._gather(keys, q.dtype)
        mask = self._mask(layer, dense_keys.shape[2], q.dtype, shared)
        if layer.value_dim is not None:
            dense_values = dense_keys[..., : layer.value_dim]
        else:
            dense_values = self._gather(values, q.dtype)
        if layer.sinks is not None:  # a position more, with its own score for each head and a value of 0
            dense_keys, dense_values = F.pad(dense_keys, (0, 0, 0, 1)), F.pad(dense_values, (0, 0, 0, 1))
            sinks = layer.sinks.to(q.dtype).view(-1, 1, 1)
            mask = torch.cat(
                (mask.expand(-1, num_heads, -1, -1), sinks.expand(len(mask), -1, mask.shape[2], 1)), -1
            )
        out = F.scaled_dot_product_attention(
            q[self.rows].view(self.size, query_len, heads, shared, q.shape[-1]).transpose(1, 2).flatten(2, 3),
            dense_keys,
            dense_values,
            attn_mask=mask,
            scale=layer.scale * k_scale,
            enable_gqa=heads != kv_heads,
        )
        if v_scale != 1.0:
            out = out * v_scale
        return (
            out.view(self.size, heads, query_len, shared, out.shape[-1])
            .transpose(1, 2)
            .reshape(self.size * query_len, num_heads * out.shape[-1])
        )

    def _gather(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        """The group's positions as a dense ``[g, num_kv_heads, p * page_size, head_dim]`` of ``dtype``."""
        # torch gathers no 8-bit floats
        numbers = pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages
        if isinstance(self.pages, slice):
            gathered = numbers[self.pages]
        else:
            gathered = numbers.flatten(1).index_select(0, self.pages)
        gathered = gathered.view(pages.dtype).to(dtype)
        return gathered.view(self.size, -1, *pages.shape[2:]).transpose(1, 2)

    def _mask(self, layer: LayerAttention, num_positions: int, dtype: torch.dtype, shared: int) -> Tensor:
        """``[g, 1, q * shared, num_positions]``: 0 where the row may look, else -inf; made by the first layer.

        ``shared`` heads lie side by side as rows.
        """
        key = (layer.window, layer.causal, dtype, shared)
        if key not in self._masks:
            columns = torch.arange(num_positions, device=self.positions.device)
            rows = self.positions[:, None, :, None]
            hidden = columns > (rows if layer.causal else rows[:, :, -1:].expand_as(rows))
            if layer.window is not None:
                # of a padding row far behind all is hidden: it gives 0
                hidden |= columns <= rows - layer.window
                if not layer.causal:
                    hidden |= columns >= rows + layer.window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            mask = mask.masked_fill_(hidden, float("-inf"))[:, :, :, None]
            self._masks[key] = mask.expand(-1, -1, -1, shared, -1).flatten(2, 3)
        return self._masks[key]


class SdpaBackend(Backend):
    """Groups sequences of like shape, gathers their pages and calls ``scaled_dot_product_attention`` on each group."""

    name = "sdpa"
    summary = "PyTorch SDPA, which runs everywhere"
    capabilities = Capabilities(
        devices=("cpu", "cuda"),
        uniform_q_max=None,
        needs_host_lens=True,
        sinks=True,
    )

    def __init__(self, device: torch.device) -> None:
        # cuDNN plans anew for every new shape, and here nearly every step has one: a run took 6 times as long
        torch.backends.cuda.enable_cudnn_sdp(False)

    @staticmethod
    def modules(gpu: Gpu, use: Use) -> list[Module]:
        return []  # torch has them

    @staticmethod
    def kernel(gpu: Gpu, use: Use, rows: Rows, num_sequences: int) -> str:
        return "PyTorch SDPA"

    def plan(self, layout: Layout) -> Kernel:
        if layout.full and layout.host is None:
            return self._padded(layout)
        groups = _group(layout)
        if len(groups) == 1 and isinstance(groups[0].rows, slice):
            return groups[0].attend

        def attend(layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            # zeros in padding rows, which are of no group: what was NaN there would be stored, and leak through masks
            out = q.new_zeros(q.shape[0], q.shape[1] * (layer.value_dim or values.shape[-1]))
            for group in groups:
                out[group.rows] = group.attend(layer, q, keys, values)
            return out

        return attend

    def looking_ahead(self, layout: Layout) -> Kernel:
        return self.plan(layout)  # by the mask

    def _padded(self, layout: Layout) -> Kernel:
        """As if all sequences had as many rows: few more rows take less time than many more groups."""
        uniform = replace(layout, uniform_q=layout.max_query_len, ragged_lens=None, full=False)
        num_rows, rows = layout.num_sequences * layout.max_query_len, layout.padded
        attend = self.plan(replace(uniform, num_rows=num_rows))

        def kernel(layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            every = q.new_zeros(num_rows, *q.shape[1:]).index_copy_(0, rows, q)
            return attend(layer, every, keys, values)[rows]

        return kernel


class StaticSdpaBackend(SdpaBackend):
    """Every row over its sequence's whole block table, masked: shapes depend on no length, so the device never waits.

    What a captured step is held against in float32. Time and memory grow with the table, so only for short contexts.
    Prefills, whose lengths the host knows, are those of ``SdpaBackend``.
    """

    name = "sdpa-static"
    summary = "exact, and captured in graphs"
    capabilities = replace(SdpaBackend.capabilities, needs_host_lens=False)

    def plan(self, layout: Layout) -> Kernel:
        if layout.host is not None:
            return super().plan(layout)
        tables = layout.block_tables[layout.sequences]
        return _Group(
            rows=slice(None),
            pages=tables.flatten(),
            positions=layout.positions[:, None],
            size=layout.num_rows,
        ).attend

    def looking_ahead(self, layout: Layout) -> Kernel:
        return Backend.looking_ahead(self, layout)  # here a group is a row


def _group(layout: Layout) -> list[_Group]:
    """Split the sequences of ``layout`` into groups of one query length and like page counts."""
    query_lens = layout.query_lens.tolist()
    num_pages = [-(-length // layout.page_size) for length in layout.kv_lens.tolist()]
    groups: list[list[int]] = []
    for b in sorted(range(len(query_lens)), key=lambda b: (query_lens[b], num_pages[b])):
        if groups:
            first, positions = groups[-1][0], (len(groups[-1]) + 1) * num_pages[b] * layout.page_size
            alike = num_pages[b] <= _PADDING * num_pages[first] + 1
            if query_lens[b] == query_lens[first] and alike and positions <= _POSITIONS:
                groups[-1].append(b)
                continue
        groups.append([b])
    return [
        _make_group(layout, members, query_lens[members[0]], num_pages[members[-1]]) for members in groups
    ]


def _following(pages: Tensor) -> slice | None:
    """``pages`` as a slice where they follow one another, as those of a sequence that is alone do."""
    first, count = int(pages[0]) if len(pages) else 0, len(pages)
    following = torch.equal(pages, torch.arange(first, first + count, dtype=pages.dtype))
    return slice(first, first + count) if following else None


def _make_group(layout: Layout, members: list[int], query_len: int, num_pages: int) -> _Group:
    device = layout.starts.device
    rows: Tensor | slice = slice(None)
    if len(members) * query_len == layout.num_rows:  # there are no other rows
        members = sorted(members)
    else:
        offsets = torch.arange(query_len, device=device)
        rows = (layout.first_rows[members][:, None] + offsets).flatten()
    pages = layout.block_tables[members, :num_pages].flatten()
    view = _following(pages) if device.type == "cpu" else None  # a GPU would wait for the answer
    return _Group(
        rows=rows,
        pages=pages if view is None else view,
        positions=layout.positions[rows].view(len(members), query_len),
        size=len(members),
    )
