# mypy: allow-untyped-decorators
"""Look-ups in the automata of constraints: what a step of small models would spend in dozens of small kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgen.ops.launch import PDL

_CHUNK = 2048  # tokens of a program


@triton.jit
def _walk_kernel(
    classes: tl.tensor,
    successors: tl.tensor,
    automata: tl.tensor,
    states: tl.tensor,
    tokens: tl.tensor,
    out: tl.tensor,
    num_tokens: int,
    num_steps: int,
    automata_stride: int,
    states_stride: int,
    row_stride: int,
    token_stride: int,
) -> None:
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    gdc_wait()
    kinds = classes + tl.load(automata + row * automata_stride) * num_tokens
    state = tl.load(states + row * states_stride)
    at = out + row * (num_steps + 1)
    tl.store(at, state)
    for step in range(num_steps):
        token = tl.load(tokens + row * row_stride + step * token_stride)
        after = tl.load(successors + state + tl.load(kinds + tl.maximum(token, 0)))
        state = tl.where((after < 0) | (token < 0), state, after.to(tl.int64))
        tl.store(at + step + 1, state)


def walk(classes: Tensor, successors: Tensor, automata: Tensor, states: Tensor, tokens: Tensor) -> Tensor:
    """See ``Ops.walk``."""
    rows, num_steps = tokens.shape
    out = states.new_empty(rows, num_steps + 1)
    strides = (automata.stride(0), states.stride(0), *tokens.stride())
    args = (classes, successors, automata, states, tokens, out, classes.shape[1], num_steps)
    if rows:
        _walk_kernel[(rows,)](*args, *strides, num_warps=1, **PDL)
    return out


@triton.jit
def _mask_kernel(
    logits: tl.tensor,
    out: tl.tensor,
    classes: tl.tensor,
    successors: tl.tensor,
    automata: tl.tensor,
    states: tl.tensor,
    ids: tl.tensor,
    least: float,
    size: int,
    num_tokens: int,
    num_rows: int,
    automata_stride: int,
    sequence_stride: int,
    row_stride: int,
    state_stride: int,
    state_row_stride: int,
    CHUNK: tl.constexpr,  # noqa: N803
) -> None:
    gdc_launch_dependents()
    place = tl.program_id(0).to(tl.int64)
    sequence, row = place // num_rows, place % num_rows
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = columns < size
    tokens = columns
    if ids is not None:
        tokens = tl.load(ids + columns, inside, 0)
    gdc_wait()
    kinds = classes + tl.load(automata + sequence * automata_stride) * num_tokens
    state = tl.load(states + sequence * state_stride + row * state_row_stride)
    after = tl.load(successors + state + tl.load(kinds + tokens, inside, 0), inside, 0)
    values = tl.load(logits + sequence * sequence_stride + row * row_stride + columns, inside, 0)
    tl.store(
        out + place * size + columns,
        tl.where(after < 0, tl.full([CHUNK], least, values.dtype), values),
        inside,
    )


def mask(
    logits: Tensor,
    classes: Tensor,
    successors: Tensor,
    automata: Tensor,
    states: Tensor,
    least: float,
    ids: Tensor | None,
) -> Tensor:
    """See ``Ops.mask``."""
    assert logits.stride(2) == 1, logits.stride()
    sequences, num_rows, size = logits.shape
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    strides = (automata.stride(0), *logits.stride()[:2], *states.stride())
    args = (logits, out, classes, successors, automata, states, ids, least, size, classes.shape[1], num_rows)
    if sequences:
        grid = (sequences * num_rows, triton.cdiv(size, _CHUNK))
        _mask_kernel[grid](*args, *strides, CHUNK=_CHUNK, num_warps=4, **PDL)
    return out
