"""The reference backend: PyTorch's scaled dot product attention over gathered pages, on any device."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specgen.attention import Capabilities, Kernel
from specgen.layout import Layout

# Sequences whose page counts differ by no more than this factor share one dense call.
_PADDING = 1.25


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Sequences with one query length and nearly one KV length: one dense attention call."""

    rows: Tensor | slice  # [g * q] rows of the pass, sequence by sequence
    pages: Tensor  # [g * p] pages, sequence by sequence
    mask: Tensor  # [g, 1, q, p * page_size], 0 where the row may look, -inf elsewhere
    size: int  # g

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q ``[rows, num_heads, head_dim]`` -> ``[g * q, num_heads * head_dim]``."""
        g, (num_heads, head_dim) = self.size, q.shape[1:]
        num_kv_heads = keys.shape[2]
        # Query heads that share a KV head become query rows, so that K and V are not repeated.
        q = q[self.rows].view(g, -1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        query_len, share = q.shape[1], q.shape[3]
        q = q.permute(0, 2, 3, 1, 4).reshape(g, num_kv_heads, share * query_len, head_dim)
        mask = self.mask.to(q.dtype).repeat(1, 1, share, 1)
        out = F.scaled_dot_product_attention(q, self._gather(keys), self._gather(values), attn_mask=mask)
        out = out.view(g, num_kv_heads, share, query_len, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(g * query_len, num_heads * head_dim)

    def _gather(self, pages: Tensor) -> Tensor:
        """The group's positions as a dense ``[g, num_kv_heads, p * page_size, head_dim]``."""
        gathered = pages.flatten(1).index_select(0, self.pages)
        return gathered.view(self.size, -1, *pages.shape[2:]).transpose(1, 2)


class SdpaBackend:
    """Groups sequences of like shape, gathers their pages and calls ``scaled_dot_product_attention`` on each group."""

    name = "sdpa"
    capabilities = Capabilities(
        devices=("cpu", "cuda"), ragged_q=True, uniform_q_max=None, needs_host_lens=True, graphs=False
    )

    def plan(self, layout: Layout) -> Kernel:
        """See ``Backend.plan``."""
        groups = _group(layout)
        if len(groups) == 1 and isinstance(groups[0].rows, slice):
            return groups[0].attend

        def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
            for group in groups:
                out[group.rows] = group.attend(q, keys, values)
            return out

        return attend


def _group(layout: Layout) -> list[_Group]:
    """Split the sequences of ``layout`` into groups of one query length and like page counts."""
    query_lens, kv_lens = layout.query_lens.tolist(), layout.kv_lens.tolist()
    num_pages = [-(-length // layout.page_size) for length in kv_lens]
    order = sorted(range(len(query_lens)), key=lambda b: (query_lens[b], num_pages[b]))
    groups: list[list[int]] = []
    for b in order:
        first = groups[-1][0] if groups else None
        if (
            first is not None
            and query_lens[first] == query_lens[b]
            and num_pages[b] <= _PADDING * num_pages[first] + 1
        ):
            groups[-1].append(b)
        else:
            groups.append([b])
    return [
        _make_group(layout, members, query_lens[members[0]], num_pages[members[-1]]) for members in groups
    ]


def _make_group(layout: Layout, members: list[int], query_len: int, num_pages: int) -> _Group:
    device = layout.starts.device
    if len(members) == layout.num_sequences and layout.num_rows == len(members) * query_len:
        members = sorted(members)
        rows: Tensor | slice = slice(None)
    else:
        offsets = torch.arange(query_len, device=device)
        rows = (layout.first_rows[members][:, None] + offsets).flatten()
    index = torch.tensor(members, device=device)
    positions = layout.positions[rows].view(len(members), 1, query_len, 1)
    visible = torch.arange(num_pages * layout.page_size, device=device) <= positions
    return _Group(
        rows=rows,
        pages=layout.block_tables[index, :num_pages].flatten(),
        mask=torch.zeros(visible.shape, device=device).masked_fill_(~visible, float("-inf")),
        size=len(members),
    )
