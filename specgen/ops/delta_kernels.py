# mypy: allow-untyped-decorators
"""Triton kernels of Gated DeltaNet: a pass through the convolution and the recurrence, and what is kept of its inputs.

They do what ``attention/gated_delta.py`` says: a program holds its share of a state in registers, reads and writes it
once. A decode pass goes row by row; a row's inputs are on their way while the row in front of it is worked on, as a
load from memory takes longer than a row does. What a row writes at its key is kept, so that to take in an accepted row
is no second computation of it. A prefill takes in several rows at once.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgen.kv.kv_cache import StateCache
from specgen.ops.launch import PDL

TAPS = 4  # of the convolution; others go another way
_VALUES = 32  # columns of a state in a program
_FEW = 512  # programs: where there are fewer, each is cut in two
# of a thread by columns: the fewest that 128 keys need, as more programs run at once
_REGISTERS = {32: 200, 16: 128}
_ROWS = 4  # of a decode pass at once, in front of the states
_CHUNK = 16  # rows of a prefill at once
_CONVOLVED, _CHANNELS = 8, 256  # rows and channels behind the convolution in a program


@triton.jit
def _weights(
    conv: tl.tensor, channel: tl.tensor, inside: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    at = conv + channel * 4
    return (
        tl.load(at, inside, 0).to(tl.float32),
        tl.load(at + 1, inside, 0).to(tl.float32),
        tl.load(at + 2, inside, 0).to(tl.float32),
        tl.load(at + 3, inside, 0).to(tl.float32),
    )


@triton.jit
def _seen(
    old: tl.tensor,
    new: tl.tensor,
    strides: tl.tensor,
    index: tl.tensor,
    bounds: tl.tensor,
    inside: tl.tensor,
) -> tl.tensor:
    """Inputs of rows ``index``, of which the first are kept and those behind them ``new``; zeros outside ``bounds``."""
    least, num_old, num_all = bounds
    there = inside & (index >= least) & (index < num_all)
    is_old = there & (index < num_old)
    x = tl.load(old + index * strides[0], is_old, 0)
    return tl.where(is_old, x, tl.load(new + index * strides[1], there & (index >= num_old), 0))


@triton.jit
def _keep(
    old: tl.tensor,
    new: tl.tensor,
    strides: tl.tensor,
    first: tl.tensor,
    bounds: tl.tensor,
    inside: tl.tensor,
    KEPT: tl.constexpr,  # noqa: N803  a power of two, for all that are kept
) -> None:
    """Rows from ``first`` on in place of those that are kept."""
    place = tl.arange(0, KEPT)[:, None]
    x = _seen(old, new, strides, first + place, bounds, inside)
    tl.debug_barrier()  # all have read before any writes
    tl.store(old + place * strides[0], x, inside & (first + place < bounds[2]))


@triton.jit
def _convolved(
    old: tl.tensor,
    new: tl.tensor,
    strides: tl.tensor,
    index: tl.tensor,
    bounds: tl.tensor,
    weights: tl.tensor,
    inside: tl.tensor,
) -> tl.tensor:
    """Rows ``index`` behind the convolution and silu, rounded to the dtype of the inputs before and behind it."""
    total = tl.zeros((index.shape[0], inside.shape[1]), tl.float32)
    for tap in tl.static_range(4):
        row = _seen(old, new, strides, index + tap - 3, bounds, inside)
        total += row.to(tl.float32) * weights[tap]
    total = total.to(new.dtype.element_ty).to(tl.float32)
    return (total / (1 + tl.exp(-total))).to(new.dtype.element_ty).to(tl.float32)


@triton.jit
def _channel_rows(
    old: tl.tensor,
    new: tl.tensor,
    strides: tl.tensor,
    to: tl.tensor,
    bounds: tl.tensor,
    conv: tl.tensor,
    num_channels: int,
    scale: float,
    KEY_HEADS: tl.constexpr,  # noqa: N803
    KEY_DIM: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    KEPT: tl.constexpr,  # noqa: N803
) -> None:
    """``_rows_kernel`` of a head of queries or keys, or as many channels of values."""
    block = tl.program_id(1)
    _, num_old, num_all = bounds
    channel = (block * KEY_DIM + tl.arange(0, KEY_DIM))[None, :]
    inside, is_key = channel < num_channels, (block >= KEY_HEADS) & (block < 2 * KEY_HEADS)
    old, new, weights = old + channel, new + channel, _weights(conv, channel, inside)
    for begin in range(tl.where(is_key, 3, num_old), num_all, ROWS):  # of accepted rows only keys are of use
        index = begin + tl.arange(0, ROWS)[:, None]
        x = _convolved(old, new, strides, index, bounds, weights, inside)
        if block < 2 * KEY_HEADS:
            x *= tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None] * tl.where(is_key, 1.0, scale)
        at = tl.where(index < num_old, to[0], to[1]) + index * strides[0] + channel
        tl.store(at, x, inside & (index < num_all))
    _keep(old, new, strides, num_old - 3, bounds, inside, KEPT)


@triton.jit
def _gate_rows(
    old: tl.tensor,
    new: tl.tensor,
    strides: tl.tensor,
    to: tl.tensor,
    bounds: tl.tensor,
    rates: tl.tensor,
    VALUE_HEADS: tl.constexpr,  # noqa: N803
    GATES: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    KEPT: tl.constexpr,  # noqa: N803
) -> None:
    """``_rows_kernel`` of what is left of each head's state in front of a row, and the share that it writes."""
    _, num_old, num_all = bounds
    head = tl.arange(0, GATES)[None, :]
    inside = head < VALUE_HEADS
    rate, bias = tl.exp(tl.load(rates[0] + head, inside, 0)), tl.load(rates[1] + head, inside, 0)
    old_a, old_b, new_a, new_b = old + head, old + VALUE_HEADS + head, new[0] + head, new[1] + head
    for begin in range(3, num_all, ROWS):
        index = begin + tl.arange(0, ROWS)[:, None]
        x = _seen(old_a, new_a, strides, index, bounds, inside).to(tl.float32) + bias
        soft = tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20))))
        opening = _seen(old_b, new_b, strides, index, bounds, inside).to(tl.float32)
        at = tl.where(index < num_old, to[0], to[1]) + index * strides[0] + head
        tl.store(at, tl.exp(-rate * soft), inside & (index < num_all))
        tl.store(at + VALUE_HEADS, 1 / (1 + tl.exp(-opening)), inside & (index < num_all))
    _keep(old_a, new_a, strides, num_old - 3, bounds, inside, KEPT)
    _keep(old_b, new_b, strides, num_old - 3, bounds, inside, KEPT)


@triton.jit
def _rows_kernel(
    mixed: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    mixed_stride: int,
    gate_stride: int,
    kept: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    first_rows: tl.tensor,
    lens: tl.tensor,
    conv: tl.tensor,
    log_rate: tl.tensor,
    rate_bias: tl.tensor,
    inputs: tl.tensor,
    taken: tl.tensor,
    num_channels: int,
    row_width: int,
    most: int,
    scale: float,
    KEY_HEADS: tl.constexpr,  # noqa: N803
    VALUE_HEADS: tl.constexpr,  # noqa: N803
    KEY_DIM: tl.constexpr,  # noqa: N803
    GATES: tl.constexpr,  # noqa: N803  a power of two, for all value heads
    ROWS: tl.constexpr,  # noqa: N803  at once
    KEPT: tl.constexpr,  # noqa: N803
) -> None:
    """What the states of a decode pass take in, and what it keeps: a program for each sequence and block of columns.

    The rows of a sequence are three that the convolution looks back at, accepted ones of the last pass, and its own.
    """
    gdc_wait()
    gdc_launch_dependents()  # not earlier: the next kernel does not wait for what is in front of this one
    sequence = tl.program_id(0).to(tl.int64)
    slot, start = tl.load(slots + sequence), tl.load(starts + sequence)
    first, num_rows = tl.load(first_rows + sequence), tl.load(lens + sequence).to(tl.int32)
    num_taken = tl.minimum(tl.maximum(start - tl.load(positions + slot), 0), most)
    num_taken = tl.where(start > 0, num_taken, 0).to(tl.int32)  # of padding rows it may be anything
    tl.store(taken + sequence, num_taken, tl.program_id(1) == 0)
    num_old = 3 + num_taken
    old, new = kept + slot * (most + 3) * row_width, first - num_old
    bounds = tl.where(start > 0, 0, 3), num_old, num_old + num_rows
    again, fresh = sequence * most - 3, tl.num_programs(0) * most + new
    to = inputs + again * row_width, inputs + fresh * row_width
    if tl.program_id(1) * KEY_DIM < num_channels:
        _channel_rows(
            *(old, mixed + new * mixed_stride, (row_width, mixed_stride), to, bounds),
            *(conv, num_channels, scale, KEY_HEADS, KEY_DIM, ROWS, KEPT),
        )
    else:
        gates = a + new * gate_stride, b + new * gate_stride
        to = to[0] + num_channels, to[1] + num_channels
        rates = log_rate, rate_bias
        _gate_rows(
            *(old + num_channels, gates, (row_width, gate_stride), to, bounds, rates),
            *(VALUE_HEADS, GATES, ROWS, KEPT),
        )


@triton.jit
def _written(state: tl.tensor, k: tl.tensor, error: tl.tensor, decay: tl.tensor) -> tl.tensor:
    """A state [keys, values] behind a row, rounded so that a replay gives what the row itself gave, bit for bit."""
    return tl.fma(k[:, None], error[None, :], state * decay)


@triton.jit
def _replayed(
    state: tl.tensor,
    row: tl.tensor,
    error_at: tl.tensor,
    k_at: tl.tensor,
    gate: tl.tensor,
    num_taken: tl.tensor,
    row_width: int,
    STRIDE: tl.constexpr,  # noqa: N803  from what a row wrote to that of the next one
) -> tl.tensor:
    """The state behind the accepted rows of the last decode pass."""
    next_k, next_decay, next_error = tl.load(row + k_at), tl.load(row + gate), tl.load(error_at)
    for index in range(num_taken):
        k, decay, error = next_k, next_decay, next_error
        row += row_width
        error_at += STRIDE
        there = index + 1 < num_taken
        next_k, next_decay = tl.load(row + k_at, there, 0), tl.load(row + gate, there, 0)
        next_error = tl.load(error_at, there, 0)
        state = _written(state, k, error, decay)
    return state


@triton.jit
def _recur_kernel(
    inputs: tl.tensor,
    states: tl.tensor,
    errors: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    first_rows: tl.tensor,
    lens: tl.tensor,
    out: tl.tensor,
    taken: tl.tensor,
    num_channels: int,
    row_width: int,
    most: int,
    KEY_HEADS: tl.constexpr,  # noqa: N803
    VALUE_HEADS: tl.constexpr,  # noqa: N803
    KEY_DIM: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    VALUES: tl.constexpr,  # noqa: N803
) -> None:
    """A decode pass: a program for each sequence, value head and share of its values."""
    gdc_launch_dependents()
    sequence, head = (tl.program_id(0) // VALUE_HEADS).to(tl.int64), tl.program_id(0) % VALUE_HEADS
    key, value = tl.arange(0, KEY_DIM), tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    slot, start = tl.load(slots + sequence), tl.load(starts + sequence)
    first, num_rows = tl.load(first_rows + sequence), tl.load(lens + sequence).to(tl.int32)
    at = states + (slot * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    at += key[:, None] * VALUE_DIM + value[None, :]
    state = tl.load(at, start > 0, 0)
    error_at = errors + (slot * most * VALUE_HEADS + head) * VALUE_DIM + value
    q_at = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    k_at, v_at = KEY_HEADS * KEY_DIM + q_at, 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    gate = num_channels + head
    gdc_wait()
    row, num_taken = inputs + sequence * most * row_width, tl.load(taken + sequence)
    state = _replayed(state, row, error_at, k_at, gate, num_taken, row_width, VALUE_HEADS * VALUE_DIM)
    tl.store(at, state)
    tl.store(positions + slot, start, (head == 0) & (tl.program_id(1) == 0))
    tl.debug_barrier()  # all have read what rows wrote before any writes
    row = inputs + (tl.num_programs(0) // VALUE_HEADS * most + first) * row_width
    next_q, next_k, next_v = tl.load(row + q_at), tl.load(row + k_at), tl.load(row + v_at)
    next_decay, next_beta = tl.load(row + gate), tl.load(row + gate + VALUE_HEADS)
    to = out + (first * VALUE_HEADS + head) * VALUE_DIM + value
    for index in range(num_rows):
        q, k, v, decay, beta = next_q, next_k, next_v, next_decay, next_beta
        row += row_width
        there = index + 1 < num_rows
        next_q, next_k = tl.load(row + q_at, there, 0), tl.load(row + k_at, there, 0)
        next_v = tl.load(row + v_at, there, 0)
        next_decay, next_beta = tl.load(row + gate, there, 0), tl.load(row + gate + VALUE_HEADS, there, 0)
        error = (v - decay * tl.sum(state * k[:, None], 0)) * beta
        read = decay * tl.sum(state * q[:, None], 0) + tl.sum(q * k) * error
        tl.store(to, read.to(out.dtype.element_ty))
        tl.store(error_at, error)
        to += VALUE_HEADS * VALUE_DIM
        error_at += VALUE_HEADS * VALUE_DIM
        if there:  # else nothing reads it
            state = _written(state, k, error, decay)


@triton.jit
def _convolve_kernel(
    mixed: tl.tensor,
    mixed_stride: int,
    kept: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    first_rows: tl.tensor,
    lens: tl.tensor,
    conv: tl.tensor,
    out: tl.tensor,
    num_channels: int,
    row_width: int,
    most: int,
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """The convolution of a prefill: a program for each sequence, some of its rows, and a block of channels."""
    gdc_launch_dependents()
    sequence, index = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = (tl.program_id(2) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = channel < num_channels
    gdc_wait()
    slot, goes_on = tl.load(slots + sequence), tl.load(starts + sequence) > 0
    first, num_rows = tl.load(first_rows + sequence), tl.load(lens + sequence).to(tl.int32)
    if tl.program_id(1) * ROWS >= num_rows:
        return
    old, new = kept + slot * (most + 3) * row_width + channel, mixed + (first - 3) * mixed_stride + channel
    bounds, weights = (tl.where(goes_on, 0, 3), 3, num_rows + 3), _weights(conv, channel, inside)
    activated = _convolved(old, new, (row_width, mixed_stride), index + 3, bounds, weights, inside)
    to = out + (first + index) * num_channels + channel
    tl.store(to, activated.to(out.dtype.element_ty), inside & (index < num_rows))


@triton.jit
def _inverse(lower: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:  # noqa: N803
    """Of the identity plus ``lower`` [ROWS, ROWS], which has nothing on its diagonal and above: row by row."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    for index in tl.static_range(1, ROWS):
        factors = tl.sum(tl.where(row == index, lower, 0.0), 0)
        inverse -= tl.where(row == index, tl.sum(factors[:, None] * inverse, 0)[None, :], 0.0)
    return inverse


@triton.jit
def _recur_chunks_kernel(
    inputs: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    gate_stride: int,
    states: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    first_rows: tl.tensor,
    lens: tl.tensor,
    log_rate: tl.tensor,
    rate_bias: tl.tensor,
    out: tl.tensor,
    num_channels: int,
    scale: float,
    KEY_HEADS: tl.constexpr,  # noqa: N803
    VALUE_HEADS: tl.constexpr,  # noqa: N803
    KEY_DIM: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    VALUES: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803  of products with the state and between rows
) -> None:
    """A prefill, behind the convolution: a program as of ``_recur_kernel``, which takes ROWS rows in at once.

    The formulas are those of ``_chunk`` in ``attention/gated_delta.py``.
    """
    gdc_launch_dependents()
    sequence, head = (tl.program_id(0) // VALUE_HEADS).to(tl.int64), tl.program_id(0) % VALUE_HEADS
    key, value = tl.arange(0, KEY_DIM), tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    q_at = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    k_at, v_at = KEY_HEADS * KEY_DIM + q_at, 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    rate, bias = tl.exp(tl.load(log_rate + head)), tl.load(rate_bias + head)
    index = tl.arange(0, ROWS)
    gdc_wait()
    slot, goes_on = tl.load(slots + sequence), tl.load(starts + sequence) > 0
    first, num_rows = tl.load(first_rows + sequence), tl.load(lens + sequence).to(tl.int32)
    at = states + ((slot * VALUE_HEADS + head) * KEY_DIM + key[:, None]) * VALUE_DIM + value[None, :]
    state = tl.where(goes_on, tl.load(at), 0.0)
    for begin in range(0, num_rows, ROWS):
        there, number = begin + index < num_rows, first + begin + index
        row = inputs + number[:, None] * num_channels
        q = tl.load(row + q_at[None, :], there[:, None], 0).to(tl.float32)
        k = tl.load(row + k_at[None, :], there[:, None], 0).to(tl.float32)
        v = tl.load(row + v_at[None, :], there[:, None], 0).to(tl.float32)
        raised = tl.load(a + number * gate_stride + head, there, 0).to(tl.float32) + bias
        opening = tl.load(b + number * gate_stride + head, there, 0).to(tl.float32)
        soft = tl.where(raised > 20, raised, tl.log(1 + tl.exp(tl.minimum(raised, 20))))
        beta = tl.where(there, 1 / (1 + tl.exp(-opening)), 0)
        since = tl.cumsum(tl.where(there, -rate * soft, 0), 0)  # the begin of these rows
        q *= tl.rsqrt(tl.sum(q * q, 1) + 1e-6)[:, None] * scale
        k *= tl.rsqrt(tl.sum(k * k, 1) + 1e-6)[:, None]
        lower = index[:, None] >= index[None, :]
        decay = tl.where(lower, tl.exp(tl.where(lower, since[:, None] - since[None, :], 0)), 0)
        kept, turned = tl.exp(since)[:, None], tl.trans(k)
        system = beta[:, None] * tl.dot(k, turned, input_precision=PRECISION) * decay
        system = tl.where(index[:, None] > index[None, :], system, 0)
        right = beta[:, None] * (v - kept * tl.dot(k, state, input_precision=PRECISION))
        written = tl.dot(_inverse(system, ROWS), right, input_precision="ieee")
        between = tl.dot(q, turned, input_precision=PRECISION) * decay
        read = kept * tl.dot(q, state, input_precision=PRECISION)
        read += tl.dot(between, written, input_precision=PRECISION)
        to = out + (number[:, None] * VALUE_HEADS + head) * VALUE_DIM + value[None, :]
        tl.store(to, read.to(out.dtype.element_ty), there[:, None])
        end = tl.sum(tl.where(index == ROWS - 1, since, 0))
        left = tl.trans(k * tl.exp(end - since)[:, None])
        state = tl.exp(end) * state + tl.dot(left, written, input_precision=PRECISION)
    tl.store(at, state)


@triton.jit
def _keep_kernel(
    mixed: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    mixed_stride: int,
    gate_stride: int,
    kept: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    first_rows: tl.tensor,
    lens: tl.tensor,
    ends: tl.tensor,
    num_channels: int,
    row_width: int,
    most: int,
    VALUE_HEADS: tl.constexpr,  # noqa: N803
    GATES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """The last three rows of a prefill, or those looked back at: a program for each sequence and block of columns."""
    gdc_launch_dependents()
    sequence, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    gdc_wait()
    slot, goes_on = tl.load(slots + sequence), tl.load(starts + sequence) > 0
    first, num_rows = tl.load(first_rows + sequence), tl.load(lens + sequence).to(tl.int32)
    old, new = kept + slot * (most + 3) * row_width, first - 3
    bounds = tl.where(goes_on, 0, 3), 3, num_rows + 3
    if block * BLOCK < num_channels:
        channel = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
        new_row, strides = mixed + new * mixed_stride + channel, (row_width, mixed_stride)
        _keep(old + channel, new_row, strides, num_rows, bounds, channel < num_channels, 4)
    else:
        head = tl.arange(0, GATES)[None, :]
        old_gate, gate, steps = old + num_channels + head, new * gate_stride + head, (row_width, gate_stride)
        _keep(old_gate, a + gate, steps, num_rows, bounds, head < VALUE_HEADS, 4)
        _keep(old_gate + VALUE_HEADS, b + gate, steps, num_rows, bounds, head < VALUE_HEADS, 4)
    tl.store(positions + slot, tl.load(ends + sequence), block == 0)


def recur(
    cache: StateCache,
    index: int,
    weights: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    places: tuple[Tensor, Tensor, Tensor, Tensor],
    ends: Tensor | None,
    longest: int,
    num_key_heads: int,
) -> Tensor:
    """What rows read [rows, Hv, value_dim]; the states of layer ``index`` are brought up to date.

    ``weights`` are those of the convolution, log_rate and rate_bias; ``inputs`` mixed, a and b, the latter two of one
    stride; ``places`` slots, starts, first rows and lengths [B] of the sequences, int64. With ``ends`` [B], where the
    sequences end, it is a prefill: all rows are taken in. No sequence has more than ``longest`` rows.
    """
    mixed = inputs[0]
    _, num_heads, key_dim, value_dim = cache.states[index].shape
    assert weights[0].is_contiguous()
    assert inputs[1].stride() == inputs[2].stride()
    out = mixed.new_empty(len(mixed), num_heads, value_dim)
    heads = {
        "KEY_HEADS": num_key_heads,
        "VALUE_HEADS": num_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
    }
    if ends is None:
        _decode(cache, index, weights, inputs, places, out, heads)
    else:
        _prefill(cache, index, weights, inputs, (*places, ends), out, heads, longest)
    return out


def _sizes(cache: StateCache, weights: tuple[Tensor, Tensor, Tensor]) -> tuple[int, int, int]:
    """Channels, numbers of a row's inputs, and the most rows of a decode pass."""
    return len(weights[0]), cache.rows.shape[3], cache.errors.shape[2]


def _decode(
    cache: StateCache,
    index: int,
    weights: tuple[Tensor, Tensor, Tensor],
    rows: tuple[Tensor, Tensor, Tensor],
    places: tuple[Tensor, ...],
    out: Tensor,
    heads: Mapping[str, int],
) -> None:
    mixed, a, b = rows
    positions, num_sequences = cache.positions[index], len(places[0])
    num_channels, row_width, most = sizes = _sizes(cache, weights)
    _, num_heads, key_dim, value_dim = cache.states[index].shape
    inputs = out.new_empty(num_sequences * most + len(mixed), row_width, dtype=torch.float32)
    taken = torch.empty(num_sequences, dtype=torch.int32, device=out.device)
    _rows_kernel[num_sequences, triton.cdiv(num_channels, key_dim) + 1](
        *(mixed, a, b, mixed.stride(0), a.stride(0), cache.rows[index], positions, *places, *weights),
        *(inputs, taken, *sizes, key_dim**-0.5),
        **{name: heads[name] for name in ("KEY_HEADS", "VALUE_HEADS", "KEY_DIM")},
        GATES=triton.next_power_of_2(num_heads),
        ROWS=min(triton.next_power_of_2(most), _ROWS),
        KEPT=triton.next_power_of_2(most + 3),
        num_warps=1 if most == 1 else 2,
        **PDL,
    )
    values = _VALUES if num_sequences * num_heads * (value_dim // _VALUES) >= _FEW else _VALUES // 2
    _recur_kernel[num_sequences * num_heads, value_dim // values](
        *(inputs, cache.states[index], cache.errors[index], positions, *places, out, taken, *sizes),
        **heads,
        VALUES=values,
        num_warps=1,  # so that sums over keys stay within a warp
        maxnreg=_REGISTERS[values],
        **PDL,
    )


def _prefill(
    cache: StateCache,
    index: int,
    weights: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    places: tuple[Tensor, ...],  # and the ends of the sequences
    out: Tensor,
    heads: Mapping[str, int],
    longest: int,
) -> None:
    (mixed, a, b), (conv, *rates), (*places_alone, _) = inputs, weights, places
    kept, num_sequences, sizes = cache.rows[index], len(places[0]), _sizes(cache, weights)
    _, num_heads, key_dim, value_dim = cache.states[index].shape
    convolved = mixed.new_empty(len(mixed), len(conv))
    grid = num_sequences, triton.cdiv(longest, _CONVOLVED), triton.cdiv(len(conv), _CHANNELS)
    _convolve_kernel[grid](
        *(mixed, mixed.stride(0), kept, *places_alone, conv, convolved, *sizes),
        ROWS=_CONVOLVED,
        BLOCK=_CHANNELS,
        num_warps=4,
        **PDL,
    )
    _recur_chunks_kernel[num_sequences * num_heads, value_dim // _VALUES](
        *(convolved, a, b, a.stride(0), cache.states[index], *places_alone, *rates, out),
        *(len(conv), key_dim**-0.5),
        **heads,
        VALUES=_VALUES,
        ROWS=_CHUNK,
        PRECISION="ieee" if mixed.dtype == torch.float32 else "tf32",
        num_warps=4,
        **PDL,
    )
    _keep_kernel[num_sequences, triton.cdiv(len(conv), _CHANNELS) + 1](
        *(mixed, a, b, mixed.stride(0), a.stride(0), kept, cache.positions[index], *places, *sizes),
        VALUE_HEADS=num_heads,
        GATES=triton.next_power_of_2(num_heads),
        BLOCK=_CHANNELS,
        num_warps=4,
        **PDL,
    )


def serves(cache: StateCache, num_taps: int, dtype: torch.dtype) -> bool:
    """Whether the kernels take these: whole blocks of a state, rows of one number format, and a GPU with ``PDL``."""
    _, _, _, key_dim, value_dim = cache.states.shape
    return (
        torch.cuda.get_device_capability(cache.states.device)[0] >= 9
        and num_taps == TAPS
        and value_dim % _VALUES == 0
        and key_dim >= 16
        and key_dim.bit_count() == 1
        and cache.rows.dtype == dtype
    )
