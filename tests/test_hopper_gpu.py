"""On an H100 or H200: GEMMs in bfloat16, and decode attention against rotation, storing and float32 attention.

GEMMs in FP8 are in test_fp8_gpu.py. 80 s, compiled.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from specgen.attention import LayerAttention, hopper
from specgen.attention.hopper import HopperDecode, block_heads, new_arrivals
from specgen.kv.layout import Layout
from specgen.ops import bind_ops
from specgen.ops.experts import ACTIVATIONS, Activation
from specgen.ops.hopper_linear import FEWEST_ROWS, MOST_ROWS, hopper_linear, hopper_linear_parts
from specgen.ops.reference import activate_and_mul
from specgen.ops.weight import Weight
from tests.marks import in_turn, on_gpu

CUDA = torch.device("cuda")


pytestmark = on_gpu(hopper=True)
BF16 = torch.bfloat16


ROWS = [1, 6, 16, 17, 32, 40, 48, 63, 64, 65, 96, 97, 127, 128, 160, 161, 191, 192, 193, 400]


def inputs(rows: int, half: int, width: int, *, bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    torch.manual_seed(0)
    x = torch.randn(rows, width, device=CUDA).to(BF16)
    weight = (torch.randn(2 * half, width, device=CUDA) / width**0.5).to(BF16)
    return x, weight, torch.randn(2 * half, device=CUDA).to(BF16) if bias else None


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation = "swish") -> Tensor:
    return activate_and_mul(
        activation, x.double() @ weight.double().T + (0 if bias is None else bias.double())
    )


@in_turn("rows", ROWS)
@in_turn(
    ("half", "width", "bias"),
    [(64, 64, False), (192, 1024, True), (8512, 192, True), (20032, 64, False), (14336, 4096, False)],
)
@in_turn("activation", ACTIVATIONS)
def test_gate_and_up(activation: Activation, half: int, width: int, bias: bool, rows: int) -> None:
    """Every row, output and block of inputs; the same from run to run, also while graphs replay.

    With more tiles than multiprocessors, each of which has a share of their steps along K: pieces of one to all.
    """
    x, weight, add = inputs(rows, half, width, bias=bias)
    exact = expected(x, weight, add, activation)
    y = hopper_linear(x, weight, bias=add, activation=activation)
    assert (y.double() - exact).norm() < 0.006 * exact.norm()
    torch.testing.assert_close(y.double(), exact, rtol=0.03, atol=0.01 * float(exact.abs().max()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [hopper_linear(x, weight, bias=add, activation=activation) for _ in range(3)]
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(each, y) for each in captured)


@in_turn("rows", ROWS)
@in_turn(
    ("out", "width", "bias"), [(128, 64, True), (384, 1024, True), (4096, 4096, False), (4096, 14336, False)]
)
def test_sums_of_parts(out: int, width: int, bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, width, device=CUDA).to(BF16)
    weight = (torch.randn(out, width, device=CUDA) / width**0.5).to(BF16)
    add = torch.randn(out, device=CUDA).to(BF16) if bias else None
    exact = x.double() @ weight.double().T + (0 if add is None else add.double())
    parts = hopper_linear_parts(x, weight, add)
    assert parts.shape[1:] == (rows, out)
    assert len(parts) in (1, 2, 4)
    torch.testing.assert_close(parts.double().sum(0), exact, rtol=1e-4, atol=2e-4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [hopper_linear_parts(x, weight, add) for _ in range(3)]
    graph.replay()
    assert all(torch.equal(each, parts) for each in captured)


def test_models_use_it_between_few_and_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def counted(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        used.append(len(x))
        return hopper_linear(x, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("specgen.ops.cuda.hopper_linear", counted)
    gated = bind_ops(CUDA, BF16).gated_linear(Weight(data=inputs(1, 256, 512, bias=False)[1]))
    for rows in (FEWEST_ROWS - 1, FEWEST_ROWS, MOST_ROWS, MOST_ROWS + 1):
        x, weight, _ = inputs(rows, 256, 512, bias=False)
        exact = expected(x, weight, None)
        assert (gated(x).double() - exact).norm() < 0.006 * exact.norm()
    assert used == [FEWEST_ROWS, MOST_ROWS]


def test_what_is_not_a_number_stays_in_its_row() -> None:
    x, weight, _ = inputs(160, 256, 512, bias=False)
    x[7, 3] = float("nan")
    y = hopper_linear(x, weight, activation="swish")
    assert y[7].isnan().all()
    assert y[:7].isfinite().all()
    assert y[8:].isfinite().all()


LENS = [
    *([0], [1], [15], [16], [17], [63], [64], [65], [300], [1000]),
    [700, 3, 129, 64, 0, 511],
    [5000, 17],
    [9000, *[50] * 9],
    [200] * 70,
]


SHAPES = [(32, 8, 128), (8, 1, 128), (14, 2, 64), (64, 8, 64), (24, 4, 256), (16, 2, 256)]
WIDE = SHAPES[4]


@dataclass(frozen=True, kw_only=True)
class World:
    """Pages whose slots that no earlier pass has written are NaN, and the heads of the next pass."""

    qkv: Tensor
    keys: Tensor
    values: Tensor
    layout: Layout
    rope: object
    arrivals: Tensor

    @classmethod
    def of(
        cls,
        lens: list[int],
        query_len: int,
        shape: tuple[int, int, int],
        page_size: int,
        rotary_dim: int | None = None,
    ) -> "World":
        """Heads of 256 have 64 numbers that are rotated, unless another number is asked for; all of others are."""
        from specgen.ops.rope import TritonRope

        num_heads, num_kv_heads, head_dim = shape
        rotary_dim = rotary_dim or (64 if head_dim == 256 else head_dim)
        generator = torch.Generator(CUDA).manual_seed(sum(lens) + query_len)
        counts = [-(-(length + query_len) // page_size) for length in lens]
        num_pages = sum(counts) + 1
        pool = torch.randn(
            num_pages, 2, page_size, num_kv_heads, head_dim, device=CUDA, generator=generator
        ).to(BF16)
        pool[0] = torch.nan
        order = torch.randperm(num_pages - 1, device=CUDA, generator=generator).int() + 1
        tables = torch.zeros(len(lens), max(counts) + 3, dtype=torch.int32, device=CUDA)
        for row, (count, length) in enumerate(zip(counts, lens, strict=True)):
            pages, order = order[:count], order[count:]
            tables[row, :count] = pages
            for plane in pool.unbind(1):
                slots = plane[pages].flatten(0, 1)
                slots[length:] = torch.nan
                plane[pages] = slots.view(count, *plane.shape[1:])
        rows = len(lens) * query_len
        heads = num_heads + 2 * num_kv_heads
        frequencies = 5e5 ** (-torch.arange(0, rotary_dim, 2, device=CUDA) / rotary_dim)
        return cls(
            qkv=torch.randn(rows, heads, head_dim, device=CUDA, generator=generator).to(BF16),
            keys=pool[:, 0],
            values=pool[:, 1],
            layout=Layout.uniform(tables, torch.tensor(lens, device=CUDA), query_len, page_size),
            rope=TritonRope(frequencies, 1.2),
            arrivals=new_arrivals(CUDA),
        )

    def expected(self, layer: LayerAttention) -> tuple[Tensor, Tensor, Tensor]:
        """What is attended to in float32, and the pages behind the pass but for page 0."""
        keys, values = self.keys.clone(), self.values.clone()
        q = self.rope(self.layout)(self.qkv, keys, values)  # type: ignore[operator]
        query_len, group = self.layout.uniform_q or 0, q.shape[1] // keys.shape[2]
        out = []
        for row, start in enumerate(self.layout.starts.tolist()):
            pages = self.layout.block_tables[row].long()
            length = start + query_len
            k, v = (
                each[pages].flatten(0, 1)[:length].float().repeat_interleave(group, 1)
                for each in (keys, values)
            )
            logits = torch.einsum("qhd,lhd->hql", q[row * query_len : (row + 1) * query_len].float(), k)
            position = torch.arange(length, device=CUDA)
            own = position[start:, None]
            seen = (own - position).abs() < (layer.window or length)
            if layer.causal:
                seen &= position <= own
            logits = (logits * layer.scale).masked_fill(~seen, -torch.inf)
            if layer.sinks is not None:
                logits = torch.cat((logits, layer.sinks[:, None, None].expand(-1, query_len, 1)), -1)
            out.append(torch.einsum("hql,lhd->qhd", logits.softmax(-1)[..., :length], v))
        return torch.cat(out).flatten(1), keys[1:], values[1:]

    def kernel(self, layout: Layout) -> HopperDecode:
        return HopperDecode(layout=layout, rope=self.rope, arrivals=self.arrivals)  # type: ignore[arg-type]

    def attend(self, layer: LayerAttention) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = self.keys.clone(), self.values.clone()
        kernel = self.kernel(self.layout)
        assert kernel.fits(layer, self.qkv, keys)
        return kernel(layer, self.qkv, keys, values), keys[1:], values[1:]


def layer_of(
    shape: tuple[int, int, int], window: int | None = None, *, sinks: bool = False
) -> LayerAttention:
    torch.manual_seed(0)
    return LayerAttention(
        index=0,
        scale=shape[2] ** -0.5,
        window=window,
        sinks=torch.randn(shape[0], device=CUDA) if sinks else None,
    )


def check(world: World, layer: LayerAttention) -> None:
    exact, keys, values = world.expected(layer)
    out, new_keys, new_values = world.attend(layer)
    torch.testing.assert_close(out.float(), exact, rtol=0.02, atol=0.02)
    assert torch.equal(new_keys.view(torch.int16), keys.view(torch.int16))
    assert torch.equal(new_values.view(torch.int16), values.view(torch.int16))
    assert torch.equal(world.attend(layer)[0], out), "the same from run to run"
    assert not world.arrivals.any()


def cases() -> Iterator[tuple[tuple[int, int, int], int]]:
    for shape, query_len in product(SHAPES, (1, 2, 4, 5, 8, 16)):
        if block_heads(query_len, shape[0] // shape[1], shape[2]):
            yield shape, query_len


@in_turn(("shape", "query_len"), list(cases()))
def test_all_lengths_windows_and_sinks(shape: tuple[int, int, int], query_len: int) -> None:
    for lens, page_size in product(LENS, (16, 64)):
        world = World.of(lens, query_len, shape, page_size)
        for window, sinks in ((None, False), (128, True), (7, False)):
            check(world, layer_of(shape, window, sinks=sinks))


@in_turn(("shape", "query_len"), [each for each in cases() if each[1] in (2, 8, 16)])
def test_rows_that_see_those_behind_them(shape: tuple[int, int, int], query_len: int) -> None:
    for lens in LENS:
        for window, sinks in ((None, False), (128, True), (7, False), (1, False)):
            layer = replace(layer_of(shape, window, sinks=sinks), causal=False)
            check(World.of(lens, query_len, shape, 64), layer)


@in_turn(("shape", "query_len"), [each for each in cases() if each[1] in (2, 5, 8, 16)])
def test_sequences_with_fewer_rows(shape: tuple[int, int, int], query_len: int) -> None:
    for lens, (window, sinks) in product(LENS, ((None, False), (128, True))):
        world, layer = World.of(lens, query_len, shape, 64), layer_of(shape, window, sinks=sinks)
        exact, _, _ = world.expected(layer)
        counts = torch.tensor([1 + 3 * row % query_len for row in range(len(lens))], device=CUDA)
        layout = replace(
            world.layout, uniform_q=None, ragged_lens=counts, num_rows=int(counts.sum()), full=True
        )
        rows = layout.padded
        keys, values = world.keys.clone(), world.values.clone()
        out = world.kernel(layout)(layer, world.qkv[rows], keys, values)
        torch.testing.assert_close(out.float(), exact[rows], rtol=0.02, atol=0.02)
        written, values_too = world.keys.clone(), world.values.clone()
        world.rope(layout)(world.qkv[rows], written, values_too)  # type: ignore[operator]
        assert torch.equal(keys[1:].view(torch.int16), written[1:].view(torch.int16))
        assert torch.equal(values[1:].view(torch.int16), values_too[1:].view(torch.int16))


@in_turn("rotary_dim", [16, 112, 128, 240, 256])
def test_any_part_of_wide_heads_is_rotated(rotary_dim: int) -> None:
    for lens, query_len in product(LENS[-5:], (1, 5, 16)):
        check(World.of(lens, query_len, WIDE, 64, rotary_dim), layer_of(WIDE))


@in_turn("shape", [SHAPES[0], WIDE])
@in_turn("size", [1, 2, 4, 8])
@in_turn("shares", [1, 2, 9, 60, 1000])
def test_any_shares_and_clusters(
    shares: int, size: int, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "clusters_at_once", lambda *_: shape[1] * shares)
    monkeypatch.setattr(hopper, "cluster_size", lambda *_: size)
    monkeypatch.setattr(hopper, "_LEAST_OF_CLUSTERS", 16)
    monkeypatch.setattr(hopper, "_LEAST_SHARE", 16)
    for lens, query_len in product([*LENS, [31, *range(0, 1300, 5)]], (1, 5, 8)):
        check(World.of(lens, query_len, shape, 64), layer_of(shape))


@in_turn("shape", [SHAPES[0], WIDE])
def test_a_graph_is_right_for_other_lengths(shape: tuple[int, int, int]) -> None:
    """Lengths and tables are read on the device: what was captured for the one is replayed for the other."""
    layer = layer_of(shape)
    first, second = (World.of(lens, 5, shape, 64) for lens in ([3, 900, 64, 250], [2000, 1, 63, 700]))
    width = max(each.layout.block_tables.shape[1] for each in (first, second))
    tables = torch.zeros(4, width, dtype=torch.int32, device=CUDA)
    pages = max(len(each.keys) for each in (first, second))
    keys, values = (torch.zeros(pages, *first.keys.shape[1:], dtype=BF16, device=CUDA) for _ in "kv")
    starts, qkv = torch.zeros_like(first.layout.starts), torch.zeros_like(first.qkv)
    kernel = first.kernel(Layout.uniform(tables, starts, 5, 64))
    kernel(layer, qkv, keys, values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(layer, qkv, keys, values)
    for world in (first, second, first):
        tables.zero_()
        tables[:, : world.layout.block_tables.shape[1]] = world.layout.block_tables
        starts.copy_(world.layout.starts)
        qkv.copy_(world.qkv)
        for mine, its in ((keys, world.keys), (values, world.values)):
            mine[: len(its)] = its
        graph.replay()
        torch.testing.assert_close(out.float(), world.expected(layer)[0], rtol=0.02, atol=0.02)


def test_rows_past_a_table_go_to_page_0() -> None:
    """As drafts behind a sequence's last page do; nothing else is written."""
    world = World.of([60, 10], 5, (32, 8, 128), 64)
    world.layout.block_tables[0, 1:] = 0
    tables = world.layout.block_tables[:, :1]
    short = Layout.uniform(tables, world.layout.starts, 5, 64)
    keys, values = world.keys.clone(), world.values.clone()
    world.kernel(short)(layer_of(SHAPES[0]), world.qkv, keys, values)
    page = int(tables[0, 0])
    assert not keys[page, 60:64].isnan().any()
    others = [each for each in range(1, len(keys)) if each not in tables.flatten().tolist()]
    assert torch.equal(keys[others].view(torch.int16), world.keys[others].view(torch.int16))


@in_turn("shape", [SHAPES[0], WIDE])
def test_a_window_off_by_one_is_detected(shape: tuple[int, int, int]) -> None:
    world = World.of([300], 5, shape, 64)
    exact = world.expected(layer_of(shape, 8))[0]
    out = world.attend(layer_of(shape, 9))[0]
    assert (out.float() - exact).abs().max() > 0.2
