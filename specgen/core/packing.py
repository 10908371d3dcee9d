"""Pieces of prompts, packed for one forward pass: their geometry and their tokens on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specgen.core.scheduler import Chunk
from specgen.device import on_device
from specgen.kv.layout import Layout


def chunk_layout(chunks: Sequence[Chunk], page_size: int, device: torch.device) -> Layout:
    """The ragged layout of ``chunks``, one sequence each."""
    width = max(len(chunk.sequence.pages) for chunk in chunks)
    tables = [chunk.sequence.pages + [0] * (width - len(chunk.sequence.pages)) for chunk in chunks]
    return Layout.ragged(
        on_device(tables, device, torch.int32),
        [chunk.start for chunk in chunks],
        [chunk.num_rows for chunk in chunks],
        page_size,
    )


def chunk_tokens(chunks: Sequence[Chunk], device: torch.device, *, shift: int) -> Tensor:
    """The chunks' tokens ``shift`` positions on, ``[rows]``; 0 stands for one that is not known yet."""
    rows: list[int] = []
    for chunk in chunks:
        start = chunk.start + shift
        known = chunk.sequence.tokens[start : start + chunk.num_rows]
        rows += known + [0] * (chunk.num_rows - len(known))
    return on_device(rows, device)
