# mypy: allow-untyped-decorators
"""Triton kernels of Gated DeltaNet: a pass through the convolution and the recurrence, and what is kept of its inputs.

They do what ``attention/gated_delta.py`` says, row by row: a program holds its share of a state in registers, reads and
writes it once, and never more than one row of inputs at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgen.kv.kv_cache import StateCache
from specgen.ops.launch import PDL

TAPS = 4  # of the convolution; others go another way
_VALUES = 32  # rows of a state in a program
_COLUMNS = 1024  # of a row's inputs in a program


@triton.jit
def _num_taken(
    starts: tl.tensor, positions: tl.tensor, sequence: tl.tensor, slot: tl.tensor, most: int
) -> tl.tensor:
    """Rows of the last decode pass that were accepted: those in front of where this pass starts."""
    start = tl.load(starts + sequence)
    taken = tl.minimum(tl.maximum(start - tl.load(positions + slot), 0), most)
    return tl.where(start == 0, 0, taken).to(tl.int32)


@triton.jit
def _tap(x: tl.tensor, one: tl.tensor, two: tl.tensor, three: tl.tensor, w: tl.tensor) -> tl.tensor:
    """The convolution of a row [n] behind three others, and silu, rounded to the dtype of the inputs in between."""
    w0, w1, w2, w3 = w
    total = (
        one.to(tl.float32) * w0 + two.to(tl.float32) * w1 + three.to(tl.float32) * w2 + x.to(tl.float32) * w3
    )
    total = total.to(x.dtype).to(tl.float32)
    return (total / (1 + tl.exp(-total))).to(x.dtype).to(tl.float32)


@triton.jit
def _weights(conv: tl.tensor, channel: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    at = conv + channel * 4
    return (
        tl.load(at).to(tl.float32),
        tl.load(at + 1).to(tl.float32),
        tl.load(at + 2).to(tl.float32),
        tl.load(at + 3).to(tl.float32),
    )


@triton.jit
def _row(row: tl.tensor, places: tl.tensor, there: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A row's inputs of a query, a key and values, at those ``places``; zeros where it is not ``there``."""
    q_at, k_at, v_at = places
    return (
        tl.load(row + q_at, (q_at >= 0) & there, 0),
        tl.load(row + k_at, (k_at >= 0) & there, 0),
        tl.load(row + v_at, (v_at >= 0) & there, 0),
    )


@triton.jit
def _updated(
    state: tl.tensor,
    row: tl.tensor,
    one: tl.tensor,
    two: tl.tensor,
    three: tl.tensor,
    weights: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    rates: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """The state [values, keys] behind a ``row`` that follows three others, and what the row reads there [values]."""
    rate, bias = rates
    q = _tap(row[0], one[0], two[0], three[0], weights[0])
    k = _tap(row[1], one[1], two[1], three[1], weights[1])
    v = _tap(row[2], one[2], two[2], three[2], weights[2])
    raised = a.to(tl.float32) + bias
    soft = tl.where(raised > 20, raised, tl.log(1 + tl.exp(tl.minimum(raised, 20))))
    beta = 1 / (1 + tl.exp(-b.to(tl.float32)))
    q *= tl.rsqrt(tl.sum(q * q) + 1e-6)
    k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
    state *= tl.exp(-rate * soft)
    error = (v - tl.sum(state * k[None, :], 1)) * beta
    state += error[:, None] * k[None, :]
    return state, tl.sum(state * q[None, :], 1)


@triton.jit(do_not_specialize=["num_channels", "row_width", "most"])
def _recur_kernel(
    mixed: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    mixed_stride: int,
    gate_stride: int,
    states: tl.tensor,
    kept: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    first_rows: tl.tensor,
    lens: tl.tensor,
    conv: tl.tensor,
    log_rate: tl.tensor,
    rate_bias: tl.tensor,
    out: tl.tensor,
    num_channels: int,
    row_width: int,
    most: int,
    scale: float,
    PREFILL: tl.constexpr,  # noqa: N803  all rows are taken in, and none of an earlier pass
    KEY_HEADS: tl.constexpr,  # noqa: N803
    VALUE_HEADS: tl.constexpr,  # noqa: N803
    KEY_DIM: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    VALUES: tl.constexpr,  # noqa: N803
) -> None:
    """A program for each sequence, value head and share of its values."""
    gdc_launch_dependents()
    sequence, head = (tl.program_id(0) // VALUE_HEADS).to(tl.int64), tl.program_id(0) % VALUE_HEADS
    key, value = tl.arange(0, KEY_DIM), tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    q_at = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    v_at = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    places = q_at, KEY_HEADS * KEY_DIM + q_at, v_at
    weights = _weights(conv, places[0]), _weights(conv, places[1]), _weights(conv, places[2])
    rates = tl.exp(tl.load(log_rate + head)), tl.load(rate_bias + head)
    gdc_wait()
    slot, goes_on = tl.load(slots + sequence), tl.load(starts + sequence) > 0
    first, num_rows = tl.load(first_rows + sequence), tl.load(lens + sequence).to(tl.int32)
    at = states + ((slot * VALUE_HEADS + head) * VALUE_DIM + value[:, None]) * KEY_DIM + key[None, :]
    state = tl.where(goes_on, tl.load(at), 0.0)
    back = kept + slot * (most + 3) * row_width
    one, two = _row(back, places, goes_on), _row(back + row_width, places, goes_on)
    back += 2 * row_width
    three = _row(back, places, goes_on)
    if not PREFILL:
        for _index in range(_num_taken(starts, positions, sequence, slot, most)):
            back += row_width
            row, gates = _row(back, places, goes_on), back + num_channels + head
            a_row, b_row = tl.load(gates), tl.load(gates + VALUE_HEADS)
            state, _ = _updated(state, row, one, two, three, weights, a_row, b_row, rates)
            one, two, three = two, three, row
        tl.store(at, state)
    for index in range(num_rows):
        number = first + index
        row, gates = _row(mixed + number * mixed_stride, places, number >= 0), number * gate_stride + head
        a_row, b_row = tl.load(a + gates), tl.load(b + gates)
        state, read = _updated(state, row, one, two, three, weights, a_row, b_row, rates)
        one, two, three = two, three, row
        to = out + (number * VALUE_HEADS + head) * VALUE_DIM + value
        tl.store(to, (read * scale).to(out.dtype.element_ty))
    if PREFILL:
        tl.store(at, state)


@triton.jit
def _input(
    mixed: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    row: tl.tensor,
    mixed_stride: int,
    gate_stride: int,
    column: tl.tensor,
    num_channels: int,
    num_heads: int,
) -> tl.tensor:
    """``column`` of a row's inputs: of the convolution, then those of a and b."""
    gate = column - num_channels
    is_a, is_b = (gate >= 0) & (gate < num_heads), (gate >= num_heads) & (gate < 2 * num_heads)
    found = tl.load(mixed + row * mixed_stride + column, gate < 0, 0)
    of_a = tl.load(a + row * gate_stride + gate, is_a, 0)
    of_b = tl.load(b + row * gate_stride + gate - num_heads, is_b, 0)
    return tl.where(is_a, of_a, tl.where(is_b, of_b, found))


@triton.jit(do_not_specialize=["num_channels", "row_width", "most"])
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
    num_channels: int,
    row_width: int,
    most: int,
    num_heads: int,
    PREFILL: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """A program for each sequence and block of columns: what a convolution looks back at, and rows of a decode pass."""
    gdc_launch_dependents()
    sequence = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < row_width
    gdc_wait()
    slot, begins = tl.load(slots + sequence), tl.load(starts + sequence) == 0
    first, num_rows = tl.load(first_rows + sequence), tl.load(lens + sequence).to(tl.int32)
    to = kept + slot * (most + 3) * row_width + column
    skipped = num_rows if PREFILL else _num_taken(starts, positions, sequence, slot, most)
    for index in range(3):  # from the first on, as a row is read in front of where it goes
        place = skipped + index
        old = tl.load(to + place * row_width, inside & (begins == 0) & ((place < 3) | (not PREFILL)), 0)
        if PREFILL:
            new = _input(
                mixed,
                a,
                b,
                first + tl.maximum(place - 3, 0),
                mixed_stride,
                gate_stride,
                column,
                num_channels,
                num_heads,
            )
            old = tl.where(place < 3, old, new)
        tl.store(to + index * row_width, old, inside)
    if not PREFILL:
        for index in range(num_rows):
            new = _input(
                mixed, a, b, first + index, mixed_stride, gate_stride, column, num_channels, num_heads
            )
            tl.store(to + (3 + index) * row_width, new, inside)


def recur(
    cache: StateCache,
    index: int,
    weights: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    places: tuple[Tensor, Tensor, Tensor, Tensor],
    ends: Tensor | None,
    num_key_heads: int,
) -> Tensor:
    """What rows read [rows, Hv, value_dim]; the states of layer ``index`` are brought up to date.

    ``weights`` are those of the convolution, log_rate and rate_bias; ``inputs`` mixed, a and b, the latter two of one
    stride; ``places`` slots, starts, first rows and lengths [B] of the sequences, int64. With ``ends`` [B], where the
    sequences end, all rows are taken in.
    """
    conv, log_rate, rate_bias = weights
    mixed, a, b = inputs
    slots, starts, _, _ = places
    states, kept, positions = cache.states[index], cache.rows[index], cache.positions[index]
    _, num_heads, value_dim, key_dim = states.shape
    assert conv.is_contiguous()
    assert a.stride() == b.stride()
    out = mixed.new_empty(len(mixed), num_heads, value_dim)
    sizes = len(conv), kept.shape[2], kept.shape[1] - TAPS + 1
    rows = mixed, a, b, mixed.stride(0), a.stride(0)
    _recur_kernel[len(slots) * num_heads, triton.cdiv(value_dim, _VALUES)](
        *rows,
        states,
        kept,
        positions,
        *places,
        conv,
        log_rate,
        rate_bias,
        out,
        *sizes,
        key_dim**-0.5,
        PREFILL=ends is not None,
        KEY_HEADS=num_key_heads,
        VALUE_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        VALUES=_VALUES,
        num_warps=4,
        **PDL,
    )
    _keep_kernel[len(slots), triton.cdiv(kept.shape[2], _COLUMNS)](
        *rows,
        kept,
        positions,
        *places,
        *sizes,
        num_heads,
        PREFILL=ends is not None,
        BLOCK=_COLUMNS,
        **PDL,
    )
    positions.index_copy_(0, slots, starts if ends is None else ends)
    return out


def serves(cache: StateCache, num_taps: int, dtype: torch.dtype) -> bool:
    """Whether the kernels take these: whole blocks of a state, rows of one number format, and a GPU with ``PDL``."""
    _, _, _, value_dim, key_dim = cache.states.shape
    return (
        torch.cuda.get_device_capability(cache.states.device)[0] >= 9
        and num_taps == TAPS
        and value_dim % _VALUES == 0
        and key_dim.bit_count() == 1
        and cache.rows.dtype == dtype
    )
