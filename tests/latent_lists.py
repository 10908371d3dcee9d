"""Work lists of absorbed latent attention, made one entry after another, and what FlashInfer's kernel does with one.

The names are those of the sections in ``latent_plan.cu``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specgen.attention.latent_decode import RANK, Shape

TILE = 64  # positions
PARTS_PER_TILE = 16
BY_ITEM = ("first_row", "first_page", "partial", "rows", "kv_len", "first_packed", "kv_begin", "kv_end")
BY_BLOCK = ("merged_begin", "merged_end", "parts_begin", "parts_end", "parts_stride")
SECTIONS = (*BY_ITEM, "first_item", *BY_BLOCK)  # in their order; what follows is the device's own

List = dict[str, list[int]]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Those of a sequence that attend in a pass."""

    first: int
    start: int  # positions before them
    count: int


def work_list(
    sequences: Sequence[Rows], shape: Shape, num_heads: int, *, table_stride: int, room: int
) -> List:
    """What ``latent_plan.cu`` is to write: all entries that have a meaning."""
    groups = []
    for index, rows in enumerate(sequences):
        count = min(rows.count, room - rows.start)
        for skipped in range(0, max(count, 0), shape.group_rows):
            here = min(shape.group_rows, count - skipped)
            kv_len = rows.start + skipped + here
            groups.append((rows.first + skipped, here, kv_len, index * table_stride))
    tiles = [-(-kv_len // TILE) for _, _, kv_len, _ in groups]
    share = max(-(-sum(tiles) // shape.num_clusters), 1)
    while share * share * PARTS_PER_TILE < max(tiles, default=0):
        share += 1

    found: List = {name: [] for name in SECTIONS}
    items: list[list[dict[str, int]]] = [[] for _ in range(shape.num_clusters)]
    line, slot, room_of_part = 0, 0, TILE * shape.cluster
    for (first_row, rows, kv_len, page), length in zip(groups, tiles, strict=True):
        borders = [at for at in range(line + 1, line + length) if at % share == 0]
        for low, high in zip([line, *borders], [*borders, line + length], strict=True):
            items[low // share].append(
                {
                    "first_row": first_row,
                    "first_page": page,
                    "partial": slot * room_of_part if borders else -1,
                    "rows": rows,
                    "kv_len": kv_len,
                    "first_packed": 0,
                    "kv_begin": (low - line) * TILE,
                    "kv_end": min((high - line) * TILE, kv_len),
                }
            )
            slot += bool(borders)
        blocks, packed, end = len(borders) * shape.cluster, rows * num_heads, slot * room_of_part
        for block in range(blocks):
            chunk = -(-packed // blocks)
            low, high = min(block * chunk, packed), min((block + 1) * chunk, packed)
            found["merged_begin"].append(first_row * num_heads + low)
            found["merged_end"].append(first_row * num_heads + high)
            found["parts_begin"].append(end - (len(borders) + 1) * room_of_part + low)
            found["parts_end"].append(end)
            found["parts_stride"].append(room_of_part)
        line += length
    found["first_item"] = [0]
    for cluster in items:
        for item in cluster:
            for name, value in item.items():
                found[name].append(value)
        found["first_item"].append(len(found["rows"]))
    idle = shape.num_clusters * shape.cluster - len(found["merged_begin"])
    for name in BY_BLOCK:
        found[name] += [1 if name == "parts_stride" else 0] * idle
    return found


def attend(
    work: List, shape: Shape, q: Tensor, latents: Tensor, pages_of: Tensor, out: Tensor, scale: float
) -> None:
    """As the kernel: its clusters' items, then the merging of parts.

    ``q`` is [rows, heads, width], ``latents`` [pages, page_size, width], ``pages_of`` the flat block tables and ``out``
    [rows, heads, rank]. Reads no page and writes no row that the list does not name; what is written twice is an error.
    """
    num_heads, page_size = q.shape[1], latents.shape[1]
    num_parts = max(work["parts_end"], default=0)
    parts = torch.full((num_parts, RANK), torch.nan, dtype=torch.float32)
    sums = torch.full((num_parts,), torch.nan, dtype=torch.float32)
    final, written = out.view(-1, RANK), torch.zeros(len(q) * num_heads, dtype=torch.bool)
    assert work["first_item"][-1] == len(work["rows"])
    for item in range(len(work["rows"])):
        first, page, part, rows, kv_len, skipped, begin, end = (work[name][item] for name in BY_ITEM)
        assert rows * num_heads <= TILE * shape.cluster
        assert skipped == 0
        assert begin % TILE == 0
        positions = torch.arange(begin, end)
        keys = latents[pages_of[page + positions // page_size].long(), positions % page_size].float()
        scores = q[first : first + rows].float() @ keys.T * scale  # [rows, heads, n]
        last = kv_len - rows + torch.arange(rows)
        scores = scores.masked_fill(positions > last[:, None, None], float("-inf"))
        total = scores.logsumexp(-1).flatten()
        values = scores.softmax(-1).nan_to_num() @ keys[:, :RANK]
        where = slice(part, part + rows * num_heads)
        if part < 0:
            where = slice(first * num_heads, (first + rows) * num_heads)
            assert not written[where].any()
            written[where] = True
        (final if part < 0 else parts)[where] = values.flatten(0, 1).to(out.dtype).to(final.dtype)
        if part >= 0:
            assert sums[where].isnan().all(), "two items have one place"
            sums[where] = total
    for begin, end, low, high, stride in zip(*(work[name] for name in BY_BLOCK), strict=True):
        for row in range(end - begin):
            each = torch.arange(low + row, high, stride)
            weights = sums[each].softmax(0)
            assert not written[begin + row]
            written[begin + row] = True
            final[begin + row] = (weights[:, None] * parts[each]).sum(0).to(out.dtype)


def latent_decode(
    q: Tensor,
    keys: Tensor,
    tables: Tensor,
    out: Tensor,
    work: Tensor,
    parts: Tensor,
    sums: Tensor,
    sizes: Sequence[int],
    scale: Any,
    stream: None,
) -> int:
    """As that of ``latent_decode.cu``."""
    cluster, num_clusters, num_heads, page_size, *strides_and_starts = sizes
    assert (num_heads, page_size) == (q.shape[1], keys.shape[1])
    assert strides_and_starts[:4] == [*q.stride()[:2], *keys.stride()[:2]]
    assert out.shape == (*q.shape[:2], RANK)
    sections = {name: work[start:] for name, start in zip(SECTIONS, strides_and_starts[4:], strict=True)}
    first_item = sections["first_item"][: num_clusters + 1].tolist()
    lens = dict.fromkeys(BY_ITEM, first_item[-1]) | dict.fromkeys(BY_BLOCK, num_clusters * cluster)
    found = {name: sections[name][:count].tolist() for name, count in lens.items()}
    assert max(found["parts_end"]) <= len(parts) == len(sums)
    shape = Shape(cluster=cluster, num_clusters=num_clusters, group_rows=0, groups=0)
    attend(found | {"first_item": first_item}, shape, q, keys[:, :, 0], tables.flatten(), out, scale.value)
    return 0
