# mypy: allow-untyped-decorators
"""Triton kernels of Gated DeltaNet: a pass through the convolution and the recurrence, and what is kept of its inputs.

They do what ``attention/gated_delta.py`` says: a program holds its share of a state in registers, reads and writes it
once. A decode pass goes row by row; a row's inputs are on their way while the row in front of it is worked on, as a
load from memory takes longer than a row does. A prefill takes in several rows at once.
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
_CHUNK = 16  # rows of a prefill at once
_CONVOLVED, _CHANNELS = 8, 256  # rows and channels behind the convolution in a program
_COLUMNS = 128  # of a row's inputs in a program


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
def _gates(a: tl.tensor, b: tl.tensor, there: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    return tl.load(a, there, 0), tl.load(b, there, 0)


@triton.jit
def _unit(x: tl.tensor) -> tl.tensor:
    return x * tl.rsqrt(tl.sum(x * x) + 1e-6)


@triton.jit
def _decay(a: tl.tensor, rates: tl.tensor) -> tl.tensor:
    """What is left of a state in front of a row."""
    rate, bias = rates
    raised = a.to(tl.float32) + bias
    soft = tl.where(raised > 20, raised, tl.log(1 + tl.exp(tl.minimum(raised, 20))))
    return tl.exp(-rate * soft)


@triton.jit
def _written(state: tl.tensor, k: tl.tensor, error: tl.tensor) -> tl.tensor:
    """A decayed state [keys, values] behind a row: rounded once, so a replay is the update of the row bit for bit."""
    return tl.fma(k[:, None], error[None, :], state)


@triton.jit
def _replayed(
    state: tl.tensor,
    back: tl.tensor,
    k_at: tl.tensor,
    gate: int,
    row_width: int,
    weights: tl.tensor,
    rates: tl.tensor,
    error_at: tl.tensor,
    num_taken: tl.tensor,
    STRIDE: tl.constexpr,  # noqa: N803  from a row's errors to the next one's
) -> tl.tensor:
    """The state behind the first ``num_taken`` rows of the last decode pass, which kept what they wrote."""
    there = num_taken > 0
    one, two = tl.load(back + k_at, there, 0), tl.load(back + row_width + k_at, there, 0)
    back += 2 * row_width
    three = tl.load(back + k_at, there, 0)
    back += row_width
    next_row, next_a, next_error = (
        tl.load(back + k_at, there, 0),
        tl.load(back + gate, there, 0),
        tl.load(error_at, there, 0),
    )
    for index in range(num_taken):
        current, a, error = next_row, next_a, next_error
        back += row_width
        error_at += STRIDE
        there = index + 1 < num_taken
        next_row, next_a, next_error = (
            tl.load(back + k_at, there, 0),
            tl.load(back + gate, there, 0),
            tl.load(error_at, there, 0),
        )
        k = _unit(_tap(current, one, two, three, weights))
        state = _written(state * _decay(a, rates), k, error)
        one, two, three = two, three, current
    return state


@triton.jit
def _recur_kernel(
    mixed: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    mixed_stride: int,
    gate_stride: int,
    states: tl.tensor,
    errors: tl.tensor,
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
    taken: tl.tensor,
    num_channels: int,
    row_width: int,
    most: int,
    scale: float,
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
    q_at = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    k_at, v_at = KEY_HEADS * KEY_DIM + q_at, 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    places = q_at, k_at, v_at
    weights = _weights(conv, q_at), _weights(conv, k_at), _weights(conv, v_at)
    rates = tl.exp(tl.load(log_rate + head)), tl.load(rate_bias + head)
    gdc_wait()
    slot, goes_on = tl.load(slots + sequence), tl.load(starts + sequence) > 0
    first, num_rows = tl.load(first_rows + sequence), tl.load(lens + sequence).to(tl.int32)
    at = states + ((slot * VALUE_HEADS + head) * KEY_DIM + key[:, None]) * VALUE_DIM + value[None, :]
    state = tl.where(goes_on, tl.load(at), 0.0)
    num_taken = _num_taken(starts, positions, sequence, slot, most)
    tl.store(taken + sequence, num_taken, (head == 0) & (tl.program_id(1) == 0))
    back = kept + slot * (most + 3) * row_width
    error_at = errors + (slot * most * VALUE_HEADS + head) * VALUE_DIM + value
    state = _replayed(
        state,
        back,
        k_at,
        num_channels + head,
        row_width,
        weights[1],
        rates,
        error_at,
        num_taken,
        VALUE_HEADS * VALUE_DIM,
    )
    tl.store(at, state)
    tl.debug_barrier()  # all have read what rows wrote before any writes
    back += num_taken * row_width
    one, two = _row(back, places, goes_on), _row(back + row_width, places, goes_on)
    three = _row(back + 2 * row_width, places, goes_on)
    row, gate = mixed + first * mixed_stride, first * gate_stride + head
    next_row = _row(row, places, num_rows > 0)
    next_gates = _gates(a + gate, b + gate, num_rows > 0)
    to = out + (first * VALUE_HEADS + head) * VALUE_DIM + value
    for index in range(num_rows):
        current, gates = next_row, next_gates
        row += mixed_stride
        gate += gate_stride
        next_row = _row(row, places, index + 1 < num_rows)
        next_gates = _gates(a + gate, b + gate, index + 1 < num_rows)
        q = _unit(_tap(current[0], one[0], two[0], three[0], weights[0]))
        k = _unit(_tap(current[1], one[1], two[1], three[1], weights[1]))
        v = _tap(current[2], one[2], two[2], three[2], weights[2])
        state *= _decay(gates[0], rates)
        error = (v - tl.sum(state * k[:, None], 0)) / (1 + tl.exp(-gates[1].to(tl.float32)))
        state = _written(state, k, error)
        one, two, three = two, three, current
        tl.store(to, (tl.sum(state * q[:, None], 0) * scale).to(out.dtype.element_ty))
        tl.store(error_at, error)
        to += VALUE_HEADS * VALUE_DIM
        error_at += VALUE_HEADS * VALUE_DIM


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
    there = inside & (index < num_rows)
    back = kept + slot * (most + 3) * row_width + channel
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tap in tl.static_range(4):
        row = index + tap - 3
        old = tl.load(back + (row + 3) * row_width, there & (row < 0) & goes_on, 0)
        new = tl.load(mixed + (first + row) * mixed_stride + channel, there & (row >= 0), 0)
        weight = tl.load(conv + channel * 4 + tap, inside, 0).to(tl.float32)
        total += tl.where(row < 0, old, new).to(tl.float32) * weight
    total = total.to(mixed.dtype.element_ty).to(tl.float32)
    activated = (total / (1 + tl.exp(-total))).to(mixed.dtype.element_ty)
    tl.store(out + (first + index) * num_channels + channel, activated, there)


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
def _chunk_kernel(
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
    there: tl.tensor,
) -> tl.tensor:
    """``column`` of the inputs of each ``row`` that is ``there``: of the convolution, then those of a and b."""
    gate = column - num_channels
    is_a, is_b = (gate >= 0) & (gate < num_heads), (gate >= num_heads) & (gate < 2 * num_heads)
    found = tl.load(mixed + row * mixed_stride + column, (gate < 0) & there, 0)
    of_a = tl.load(a + row * gate_stride + gate, is_a & there, 0)
    of_b = tl.load(b + row * gate_stride + gate - num_heads, is_b & there, 0)
    return tl.where(is_a, of_a, tl.where(is_b, of_b, found))


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
    taken: tl.tensor,
    ends: tl.tensor,
    num_channels: int,
    row_width: int,
    most: int,
    num_heads: int,
    PREFILL: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803  a power of two, for all that are kept
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """A program for each sequence and block of columns: what a convolution looks back at, and rows of a decode pass."""
    gdc_launch_dependents()
    sequence, index = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = column < row_width
    gdc_wait()
    slot, goes_on = tl.load(slots + sequence), tl.load(starts + sequence) > 0
    first, num_rows = tl.load(first_rows + sequence), tl.load(lens + sequence).to(tl.int32)
    to = kept + slot * (most + 3) * row_width + column
    if PREFILL:  # the last three of those looked back at before and the rows
        place, num_kept = num_rows + index, 3
        row = place - 3
        is_new, is_old = (row >= 0) & (index < 3), row < 0
    else:  # three in front of the rows, and these
        place, num_kept = tl.load(taken + sequence) + index, 3 + num_rows
        row = index - 3
        is_new, is_old = (row >= 0) & (row < num_rows), row < 0
    old = tl.load(to + place * row_width, inside & is_old & goes_on, 0)
    number = first + tl.maximum(row, 0)
    new = _input(mixed, a, b, number, mixed_stride, gate_stride, column, num_channels, num_heads, is_new)
    tl.debug_barrier()  # all have read before any writes
    tl.store(to + index * row_width, tl.where(is_new, new, old), inside & (index < num_kept))
    tl.store(positions + slot, tl.load(ends + sequence), tl.program_id(1) == 0)


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
    mixed, a, b = inputs
    slots, starts, _, _ = places
    states, kept, positions = cache.states[index], cache.rows[index], cache.positions[index]
    _, num_heads, key_dim, value_dim = states.shape
    assert weights[0].is_contiguous()
    assert a.stride() == b.stride()
    out = mixed.new_empty(len(mixed), num_heads, value_dim)
    heads = {
        "KEY_HEADS": num_key_heads,
        "VALUE_HEADS": num_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
    }
    sizes = len(weights[0]), kept.shape[2], kept.shape[1] - TAPS + 1
    if ends is None:
        taken = torch.empty(len(slots), dtype=torch.int32, device=mixed.device)
        _decode(
            states,
            (cache.errors[index], kept, positions, *places),
            weights,
            inputs,
            (out, taken),
            sizes,
            heads,
        )
    else:
        taken = slots  # of no use
        _prefill(states, (kept, *places), weights, inputs, out, sizes, heads, longest)
    _keep_kernel[len(slots), triton.cdiv(kept.shape[2], _COLUMNS)](
        *(mixed, a, b, mixed.stride(0), a.stride(0), kept, positions, *places),
        *(taken, starts if ends is None else ends, *sizes, num_heads),
        PREFILL=ends is not None,
        ROWS=TAPS if ends is not None else triton.next_power_of_2(kept.shape[1]),
        BLOCK=_COLUMNS,
        num_warps=4,
        **PDL,
    )
    return out


def _decode(
    states: Tensor,
    memory: tuple[Tensor, ...],  # errors, what is kept, positions, and the places of the sequences
    weights: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],  # what rows read, and how many kept rows of each sequence were accepted
    sizes: tuple[int, int, int],
    heads: Mapping[str, int],
) -> None:
    mixed, a, b = inputs
    _, num_heads, key_dim, value_dim = states.shape
    num_programs = len(outputs[1]) * num_heads
    values = _VALUES if num_programs * (value_dim // _VALUES) >= _FEW else _VALUES // 2
    _recur_kernel[num_programs, value_dim // values](
        *(mixed, a, b, mixed.stride(0), a.stride(0), states, *memory, *weights, *outputs),
        *(*sizes, key_dim**-0.5),
        **heads,
        VALUES=values,
        num_warps=1,  # so that sums over keys stay within a warp
        **PDL,
    )


def _prefill(
    states: Tensor,
    memory: tuple[Tensor, ...],  # what is kept, and the places of the sequences
    weights: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    sizes: tuple[int, int, int],
    heads: Mapping[str, int],
    longest: int,
) -> None:
    (mixed, a, b), (conv, *rates), (_, *places) = inputs, weights, memory
    _, num_heads, key_dim, value_dim = states.shape
    num_sequences, convolved = len(places[0]), mixed.new_empty(len(mixed), len(conv))
    grid = num_sequences, triton.cdiv(longest, _CONVOLVED), triton.cdiv(len(conv), _CHANNELS)
    _convolve_kernel[grid](
        *(mixed, mixed.stride(0), *memory, conv, convolved, *sizes),
        ROWS=_CONVOLVED,
        BLOCK=_CHANNELS,
        num_warps=4,
        **PDL,
    )
    _chunk_kernel[num_sequences * num_heads, value_dim // _VALUES](
        *(convolved, a, b, a.stride(0), states, *places, *rates, out, len(conv), key_dim**-0.5),
        **heads,
        VALUES=_VALUES,
        ROWS=_CHUNK,
        PRECISION="ieee" if mixed.dtype == torch.float32 else "tf32",
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
