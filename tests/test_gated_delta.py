"""Gated DeltaNet over a pass: what any row reads is that of a recurrence, row by row, over the accepted rows alone."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from specgen.attention.gated_delta import DeltaLayer, recur
from specgen.kv.kv_cache import StateCache, StateSpec
from specgen.kv.layout import Layout

KEYS, VALUES = 2 * 16, 4 * 32  # of all heads
SPEC = StateSpec(
    num_layers=2, num_heads=4, key_dim=16, value_dim=32, num_channels=2 * KEYS + VALUES, num_taps=4
)
MOST = 5  # rows of a decode pass
INDEX = 1


ON_GPU = [pytest.param(each, marks=pytest.mark.gpu) for each in ("cuda", "cuda, as with many sequences")]


@pytest.fixture(autouse=True, params=["cpu", *ON_GPU])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything is made there."""
    name, _, many = request.param.partition(", ")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if many:
        monkeypatch.setattr("specgen.ops.delta_kernels._FEW", 0)
    with torch.device(name):
        torch.manual_seed(0)
        yield


@lru_cache
def layer_on(device: torch.device) -> DeltaLayer:
    del device  # where it is made
    return DeltaLayer(
        index=INDEX,
        conv=torch.randn(SPEC.num_channels, SPEC.num_taps),
        log_rate=torch.randn(SPEC.num_heads),
        rate_bias=torch.randn(SPEC.num_heads),
        num_key_heads=2,
        key_dim=SPEC.key_dim,
        value_dim=SPEC.value_dim,
    )


def layer_here() -> DeltaLayer:
    return layer_on(torch.get_default_device())


def new_cache(num_slots: int = 4, most: int = MOST) -> StateCache:
    cache = StateCache(
        spec=SPEC, num_slots=num_slots, step_rows=most, dtype=torch.float32, device=torch.get_default_device()
    )
    for tensor in (cache.states, cache.rows, cache.errors):  # what an earlier sequence left
        tensor.fill_(float("nan"))
    cache.positions.fill_(3)
    return cache


def expected(rows: Tensor) -> tuple[Tensor, Tensor]:
    """What each of ``rows`` [n, row_width] of a text reads [n, Hv, value_dim], and the last state, in float64."""
    rows, heads, layer = rows.double(), SPEC.num_heads, layer_here()
    mixed, a, b = rows.split([SPEC.num_channels, heads, heads], 1)
    state, outs = torch.zeros(heads, SPEC.value_dim, SPEC.key_dim, dtype=torch.float64), []
    for position in range(len(rows)):
        total = torch.zeros(SPEC.num_channels, dtype=torch.float64)
        for tap in range(SPEC.num_taps):
            back = position - (SPEC.num_taps - 1 - tap)
            if back >= 0:
                total += layer.conv[:, tap].double() * mixed[back]
        q, k, v = (total * total.sigmoid()).split([KEYS, KEYS, VALUES])
        q, k = (each.view(2, SPEC.key_dim).repeat_interleave(2, 0) for each in (q, k))
        q, k = (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        rate = layer.log_rate.double().exp() * torch.log1p((a[position] + layer.rate_bias).exp())
        state = state * (-rate).exp()[:, None, None]
        error = v.view(heads, SPEC.value_dim) - (state * k[:, None]).sum(2)
        state = state + (b[position].sigmoid()[:, None] * error)[..., None] * k[:, None]
        outs.append((state * q[:, None]).sum(2) * SPEC.key_dim**-0.5)
    return torch.stack(outs), state


def inputs(rows: Sequence[Tensor]) -> Sequence[Tensor]:
    """Those of the convolution, and two for each head."""
    return torch.cat(tuple(rows)).split([SPEC.num_channels, SPEC.num_heads, SPEC.num_heads], 1)


@dataclass
class Text:
    """A sequence in a slot, and its accepted rows so far."""

    slot: int
    rows: Tensor

    @property
    def length(self) -> int:
        return len(self.rows)


def fresh(slot: int) -> Text:
    return Text(slot=slot, rows=torch.empty(0, SPEC.row_width))


def prefill(
    cache: StateCache, texts: Sequence[Text], lens: Sequence[int], new: Sequence[Tensor] | None = None
) -> None:
    """A pass over so many ``new`` rows of each text, or drawn ones, which is checked."""
    new = new or [torch.randn(n, SPEC.row_width) for n in lens]
    tables = torch.zeros(len(texts), 1, dtype=torch.int32)
    layout = Layout.ragged(tables, [each.length for each in texts], lens, 16, [each.slot for each in texts])
    found = recur(cache, layout, layer_here(), *inputs(new)).split(list(lens))
    for text, rows, out in zip(texts, new, found, strict=True):
        text.rows = torch.cat((text.rows, rows))
        torch.testing.assert_close(out, expected(text.rows)[0][-len(rows) :].float(), rtol=1e-4, atol=1e-5)


def decode(
    cache: StateCache,
    texts: Sequence[Text],
    num_rows: int,
    accepted: Sequence[int],
    lens: Sequence[int] = (),
    new: Sequence[Tensor] | None = None,
) -> None:
    """A pass of ``num_rows`` rows a text, or ``lens``, of which the first ``accepted`` stay; all rows are checked."""
    tables = torch.zeros(len(texts), 1, dtype=torch.int32)
    starts = torch.tensor([each.length for each in texts])
    slots = torch.tensor([each.slot for each in texts])
    layout = Layout.uniform(tables, starts, num_rows, 16, slots)
    if lens:
        layout = replace(
            layout, uniform_q=None, ragged_lens=torch.tensor(lens), num_rows=sum(lens), full=True
        )
    new = new or [torch.randn(n, SPEC.row_width) for n in lens or [num_rows] * len(texts)]
    found = recur(cache, layout, layer_here(), *inputs(new)).split([len(rows) for rows in new])
    for text, rows, out, kept in zip(texts, new, found, accepted, strict=True):
        if text.slot:  # the others are padding
            right = expected(torch.cat((text.rows, rows)))[0][text.length :]
            torch.testing.assert_close(out, right.float(), rtol=1e-4, atol=1e-5)
        text.rows = torch.cat((text.rows, rows[:kept]))


def test_rows_read_the_state_of_accepted_rows_alone() -> None:
    cache, (first, second) = new_cache(), (fresh(1), fresh(3))
    prefill(cache, [first], [70])  # more than a chunk, which is 64
    prefill(cache, [first, second], [3, 1])
    decode(cache, [second, first], 4, [1, 4])
    decode(cache, [second, first], 1, [1, 1])
    decode(cache, [first, second], 5, [3, 2])
    decode(cache, [first], 2, [2])
    decode(cache, [second, first], 5, [5, 1])
    decode(cache, [second, first], 3, [3, 3], lens=[3, 1])
    decode(cache, [second, first], 5, [2, 1], lens=[4, 2])
    decode(cache, [second, first], 2, [1, 1])


@pytest.mark.parametrize("most", [1, 2, 5, 17])
def test_any_rows_are_taken_in_by_the_pass_behind_them(most: int) -> None:
    """Texts in slots of any order, each of which accepts another number of rows; one ends, and its slot is reused."""
    cache, texts, drawn = new_cache(6, most), [fresh(slot) for slot in (4, 1, 5)], random.Random(most)
    prefill(cache, texts, [2, 1, 4])
    for turn in range(6):
        drawn.shuffle(texts)
        num_rows = drawn.randint(1, most)
        decode(cache, texts, num_rows, [drawn.randint(1, num_rows) for _ in texts])
        if turn == 2:
            texts[0] = fresh(texts[0].slot)
            prefill(cache, texts[:1], [3])
    decode(cache, texts, most, [most] * 3)
    decode(cache, texts, most, [1] * 3)


def test_padding_rows_change_no_sequence() -> None:
    cache, text = new_cache(), fresh(2)
    cache.states[:, 0] = 0.0
    prefill(cache, [text], [9])
    for kept in (2, 1, 4):
        padding = Text(slot=0, rows=torch.randn(1, SPEC.row_width))
        decode(cache, [text, padding, padding], 4, [kept, 0, 0])


def test_a_slot_is_used_again_from_the_first_position_on() -> None:
    cache = new_cache()
    for _ in range(2):
        text = fresh(1)
        prefill(cache, [text], [5])
        decode(cache, [text], 4, [3])


def test_the_state_is_that_of_decoding_one_by_one() -> None:
    cache, text = new_cache(), fresh(1)
    prefill(cache, [text], [20])
    for kept in (4, 1, 3, 2):
        decode(cache, [text], 4, [kept])
        taken = text.length - kept  # the pass before them took these in
        state = expected(text.rows[:taken])[1]
        torch.testing.assert_close(cache.states[INDEX, 1], state.mT.float(), rtol=1e-5, atol=1e-5)
        assert int(cache.positions[INDEX, 1]) == taken


def test_a_state_does_not_depend_on_the_pass_that_took_a_row() -> None:
    """On a GPU bit for bit: what a row wrote is kept."""
    cache, (one, several) = new_cache(), (fresh(1), fresh(2))
    rows = torch.randn(20, SPEC.row_width)
    for text, lens in ((one, [1] * 14), (several, [4, 1, 5, 3, 1])):
        prefill(cache, [text], [6], [rows[:6]])
        for num_rows in lens:
            new = rows[text.length : text.length + num_rows]
            decode(cache, [text], num_rows, [num_rows], new=[new])
    assert one.length == several.length
    exact = {"rtol": 0, "atol": 0} if cache.states.is_cuda else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(cache.states[INDEX, 1], cache.states[INDEX, 2], **exact)


def test_other_layers_are_left_alone() -> None:
    cache, text = new_cache(), fresh(1)
    prefill(cache, [text], [5])
    decode(cache, [text], 4, [3])
    assert cache.states[0].isnan().all()
    assert cache.states[INDEX, 2:].isnan().all()
    assert cache.errors[0].isnan().all()
    assert cache.errors[INDEX, 2:].isnan().all()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_rejected_rows_may_hold_anything(value: float) -> None:
    cache, text = new_cache(), fresh(1)
    prefill(cache, [text], [9])
    decode(cache, [text], 5, [2])
    cache.rows[INDEX, 1, SPEC.num_taps - 1 + 2 :] = value
    cache.errors[INDEX, 1, 2:] = value
    decode(cache, [text], 5, [1])
