"""On an NVIDIA GPU: the kernels equal the reference, bit for bit where the arithmetic is the same."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from specgen.kv.layout import Layout
from specgen.ops import Ops, Sandwich, bind_ops
from specgen.ops.experts import ACTIVATIONS, Routing, Weighing
from specgen.ops.reference import activate_and_mul, torch_ops
from specgen.ops.weight import Weight
from tests.marks import in_turn, on_gpu

pytestmark = on_gpu()
CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS = [0, 1, 5, 16, 17, 40, 64, 65, 200, 8192]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=CUDA) * scale).to(dtype)


def fast(dtype: torch.dtype) -> Ops:
    return bind_ops(CUDA, dtype)


def assert_close_to_one_rounding(got: Tensor, expected: Tensor) -> None:
    """Equal except for a last bit here and there, where a sum in another order rounds differently."""
    torch.testing.assert_close(got, expected, rtol=0.016 if got.dtype == torch.bfloat16 else 2e-3, atol=1e-5)
    allowed = 1 if got.dtype == torch.float32 else 0.01
    assert (got != expected).sum() <= allowed * got.numel()


@in_turn("dtype", DTYPES)
@in_turn("rows", ROWS)
@in_turn(("size", "casts_last"), [(64, False), (2880, True), (4096, False), (12288, False)])
def test_rms_norm(rows: int, size: int, casts_last: bool, dtype: torch.dtype) -> None:
    rows = min(rows, 300) if size > 4096 else rows
    weight, stream = random(size, dtype=dtype), random(rows, size, dtype=dtype, scale=3)
    delta, wide = random(1, rows, size, dtype=dtype), random(rows, 2 * size, dtype=dtype)
    mine, plain = (ops.rms_norm(weight, 1e-5, casts_last) for ops in (fast(dtype), torch_ops()))
    assert_close_to_one_rounding(mine(stream), plain(stream))
    kept = stream.clone()
    for x in (stream, wide[:, size:]):  # also strided rows
        got, expected = mine.add(x, delta), plain.add(x, delta)
        assert torch.equal(got[0], expected[0])
        assert_close_to_one_rounding(got[1], expected[1])
    assert torch.equal(stream, kept)
    parts = random(4, rows, size, dtype=torch.float32)
    got, expected = mine.add(stream, parts), plain.add(stream, parts.sum(0, keepdim=True).to(dtype))
    assert_close_to_one_rounding(got[0], expected[0])


@in_turn("dtype", DTYPES)
@in_turn(("rows", "heads", "normed", "size"), [
    (7, 40, 40, 128), (1, 40, 36, 128), (160, 40, 36, 128), (5, 20, 18, 256), (3, 5, 3, 64), (9, 3, 3, 4096),
])  # fmt: skip
def test_rms_norm_of_the_first_heads(
    rows: int, heads: int, normed: int, size: int, dtype: torch.dtype
) -> None:
    weight, wide = random(normed, size, dtype=dtype), random(rows, heads + 8, size, dtype=dtype)
    for x in (wide[:, :heads], wide[:, :heads].contiguous()):
        got, expected = (ops.rms_norm(weight, 1e-6)(x) for ops in (fast(dtype), torch_ops()))
        assert got.is_contiguous()
        assert_close_to_one_rounding(got, expected)
        assert torch.equal(got[:, normed:], x[:, normed:])


@in_turn("dtype", DTYPES)
def test_norms_that_round_last_take_float32_weights(dtype: torch.dtype) -> None:
    weight, heads = random(20, 256, dtype=torch.float32), random(7, 28, 256, dtype=dtype)[:, :20]
    stream, delta = heads[:, 0].contiguous(), random(1, 7, 256, dtype=dtype)
    mine, plain = (ops.rms_norm(weight, 1e-6, True) for ops in (fast(dtype), torch_ops()))
    assert mine(heads).dtype == dtype
    assert_close_to_one_rounding(mine(heads), plain(heads))
    mine, plain = (ops.rms_norm(weight[0], 1e-6, True) for ops in (fast(dtype), torch_ops()))
    assert_close_to_one_rounding(mine.add(stream, delta)[1], plain.add(stream, delta)[1])


@in_turn("dtype", DTYPES)
@in_turn("rows", [0, 1, 5, 300])
@in_turn(("size", "parts", "more", "scaled", "before"), [
    (3840, 1, 0, False, 1), (3840, 4, 0, True, 1), (2816, 2, 8, True, 1), (2816, 1, 0, False, 3), (64, 1, 0, False, 0),
])  # fmt: skip
def test_sandwich(
    size: int, parts: int, more: int, scaled: bool, before: int, rows: int, dtype: torch.dtype
) -> None:
    weight = random(3, size, dtype=dtype)
    norms = Sandwich(
        within=(weight[1], weight[2]) if more else None,
        behind=weight[0],
        scale=random(1, dtype=dtype) if scaled else None,
        before=random(before, size, dtype=torch.float32 if before > 1 else dtype),
        eps=1e-6,
    )
    stream = random(rows, 2 * size, dtype=dtype, scale=3)[:, size:]
    added = [random(count, rows, size, dtype=dtype) for count in (parts, more) if count]
    # sums of one part, or of parts whose sum is exact
    added = [each if len(each) == 1 else (each.float() * 4).round() / 4 for each in added]
    got, expected = (ops.sandwich(norms)(stream, *added) for ops in (fast(dtype), torch_ops()))
    for mine, plain in zip(got, expected, strict=True):
        assert mine.shape == plain.shape
        tolerance = {torch.bfloat16: 0.03, torch.float16: 4e-3, torch.float32: 1e-5}[dtype]
        torch.testing.assert_close(mine, plain, rtol=tolerance, atol=tolerance)
        assert (mine != plain).sum() <= (1 if dtype == torch.float32 else 0.1) * mine.numel()


@in_turn("dtype", DTYPES)
@in_turn("casts_last", [False, True])
@in_turn("rows", [0, 1, 5, 300])
def test_embed_norm_concat(rows: int, casts_last: bool, dtype: torch.dtype) -> None:
    table = random(999, 4096, dtype=dtype)
    weights = random(2, 4096, dtype=torch.float32 if casts_last else dtype)
    ids, hidden = torch.randint(999, (rows,), device=CUDA), random(rows, 4096, dtype=dtype, scale=9)
    got, expected = (
        ops.embed_norm_concat(table, weights[0], weights[1], 1e-5, casts_last)(ids, hidden)
        for ops in (fast(dtype), torch_ops())
    )
    assert_close_to_one_rounding(got, expected)


@in_turn("dtype", DTYPES)
@in_turn("heads", [48, 3])
@in_turn("rows", [0, 1, 5, 300])
def test_gated_norm(rows: int, heads: int, dtype: torch.dtype) -> None:
    weight, x = random(128, dtype=dtype), random(rows, heads, 128, dtype=dtype, scale=3)
    gate = random(rows, 40 + heads * 128, dtype=dtype, scale=3)[:, 40:].view(rows, heads, 128)
    got, expected = (ops.gated_norm(weight, 1e-6)(x, gate) for ops in (fast(dtype), torch_ops()))
    assert_close_to_one_rounding(got, expected)


@in_turn("dtype", DTYPES)
@in_turn("width", [1, 1500])
@in_turn("rows", [0, 1, 5, 300])
def test_sigmoid_gated(rows: int, width: int, dtype: torch.dtype) -> None:
    x, gate = (
        random(2, rows, 1500, dtype=dtype, scale=3),
        random(rows, 40 + width, dtype=dtype, scale=3)[:, 40:],
    )
    got, expected = (ops.sigmoid_gated(x, gate) for ops in (fast(dtype), torch_ops()))
    assert_close_to_one_rounding(got, expected)


@in_turn("dtype", DTYPES)
@in_turn(("parts", "width"), [(1, 256), (9, 1500)])
@in_turn("rows", [0, 1, 5, 300])
def test_gelu_gated(rows: int, parts: int, width: int, dtype: torch.dtype) -> None:
    gate = random(parts, rows, width, dtype=dtype if parts == 1 else torch.float32, scale=3)
    x = random(rows, 40 + width, dtype=dtype, scale=3)[:, 40:]
    got, expected = (ops.gelu_gated(gate, x) for ops in (fast(dtype), torch_ops()))
    # torch's 1 + tanh has few digits left far below 0, where the sigmoid has all
    torch.testing.assert_close(got, expected, rtol=0.016 if dtype == torch.bfloat16 else 2e-3, atol=1e-3)


@in_turn("dtype", DTYPES)
@in_turn("rows", ROWS)
@in_turn("biased", [False, True])
@in_turn("shape", [(6144, 4096), (4096, 14336), (96, 64), (32000, 512), (5120, 2880), (32, 2880)])
def test_linear(rows: int, shape: tuple[int, int], biased: bool, dtype: torch.dtype) -> None:
    rows = min(rows, 200) if shape[0] > 10_000 else rows
    weight, x = random(*shape, dtype=dtype, scale=shape[1] ** -0.5), random(rows, shape[1], dtype=dtype)
    bias = random(shape[0], dtype=dtype) if biased else None
    exact, stored = x.double() @ weight.double().T, Weight(data=weight, bias=bias)
    exact = exact if bias is None else exact + bias.double()
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 3e-5}[dtype]
    for got, expected in (
        (fast(dtype).linear(stored)(x), exact),
        (fast(dtype).linear_parts(stored)(x).sum(0), exact),
        *(
            (fast(dtype).gated_linear(stored, activation=each)(x), activate_and_mul(each, exact))
            for each in ACTIVATIONS
        ),
    ):
        assert got.shape == expected.shape
        assert (got - expected).norm() <= tolerance * expected.norm()
        if rows:  # every element, not only the mean
            least = 4 * tolerance * float(expected.std())
            torch.testing.assert_close(got.double(), expected, rtol=2 * tolerance, atol=least)


@in_turn("dtype", DTYPES)
@in_turn("rows", [0, 1, 5, 300])
@in_turn(("num_experts", "k"), [(32, 4), (128, 8), (60, 3), (8, 1)])
@in_turn("weighing", get_args(Weighing))
@in_turn(("num_shared", "gated"), [(0, False), (1, True), (2, True), (1, False)])
def test_choice_of_experts(
    num_experts: int, k: int, rows: int, weighing: Weighing, num_shared: int, gated: bool, dtype: torch.dtype
) -> None:
    """Also where a gate's logit and zeros are behind those of the experts, the zeros better than most."""
    scales = torch.rand(num_experts, device=CUDA) if weighing in ("softmax", "normalized") else None
    routing = Routing(
        num_experts=num_experts,
        num_chosen=k,
        weighing=weighing,
        num_shared=num_shared,
        gated=gated,
        scales=scales,
    )
    # distinct and exact in every dtype, so that no choice hangs on how a tie is broken
    logits = (
        torch.stack([torch.randperm(num_experts, device=CUDA) - 20.0 for _ in range(rows or 1)])[:rows] / 8
    )
    if gated:
        gate = torch.randint(-24, 24, (rows, 1), device=CUDA) / 8
        logits = torch.cat((logits, gate, torch.zeros(rows, 31, device=CUDA)), 1)
    split = torch.randint(-8, 8, (9, *logits.shape), device=CUDA).float()
    split[0] += logits - split.sum(0)
    expected = torch_ops().choice(routing)(logits.to(dtype)[None])
    for parts in (logits.to(dtype)[None], split):
        ids, weights = fast(dtype).choice(routing)(parts)
        assert torch.equal(ids, expected[0])
        assert (ids[:, k:] == torch.arange(num_experts, num_experts + num_shared, device=CUDA)).all()
        torch.testing.assert_close(
            weights, expected[1], rtol=0.01 if dtype == torch.bfloat16 else 2e-3, atol=1e-6
        )


def test_experts_differ_whatever_the_logits() -> None:
    logits = torch.zeros(4, 32, device=CUDA)
    logits[1], logits[2], logits[3, ::2] = torch.nan, -torch.inf, torch.nan
    routing = Routing(num_experts=32, num_chosen=4, weighing="softmax of chosen")
    ids, _ = fast(torch.bfloat16).choice(routing)(logits.to(torch.bfloat16)[None])
    assert ids[0].tolist() == [0, 1, 2, 3]  # of equal ones the first
    assert all(len(set(row)) == 4 and set(row) <= set(range(32)) for row in ids.tolist())


def layouts(page_size: int) -> dict[str, Layout]:
    tables = torch.randperm(60, device=CUDA, dtype=torch.int32).view(6, 10)
    starts = torch.tensor([0, 3, 17, 9 * page_size, 10 * page_size - 2, 100], device=CUDA)
    lens = torch.tensor([2, 1, 5, 3, 1, 4], device=CUDA)
    ragged = Layout.ragged(tables, starts.tolist(), lens.tolist(), page_size)
    return {
        "one": Layout.uniform(tables, starts, 1, page_size),
        "past the last page": Layout.uniform(tables, starts, 5, page_size),
        "columns of a wider table": Layout.uniform(tables[:, :9], starts, 3, page_size),
        "ragged": ragged,
        "packed": ragged.leading(lens.clamp(max=3), 30)[1],
    }


@in_turn("kind", ["one", "past the last page", "columns of a wider table", "ragged", "packed"])
@in_turn("heads", [(32, 8, 128, 128), (4, 4, 64, 64), (6, 1, 96, 96), (24, 4, 256, 64), (4, 2, 64, 48)])
@in_turn(
    ("dtype", "kv_dtype"), [*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.float8_e4m3fn)]
)
def test_rope_and_store(
    kind: str, heads: tuple[int, int, int, int], dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_dim, rotated = heads
    layout = layouts(16)[kind]
    qkv = random(layout.num_rows, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, scale=200)
    frequencies = 500_000.0 ** -(torch.arange(rotated // 2, device=CUDA) / (rotated // 2))
    scale, found = 1.3466 if head_dim == 64 else 1.0, []
    kv_scales = (0.37, 1.7) if kv_dtype.itemsize == 1 else (1.0, 1.0)  # many of these keys saturate
    qkv[:, -1, 5] = torch.nan  # of a value
    for ops in (fast(dtype), torch_ops()):
        storage = torch.zeros(2, 60, 16, num_kv_heads, head_dim, dtype=kv_dtype, device=CUDA)
        q = ops.rope(frequencies, scale)(layout)(qkv, storage[0], storage[1], *kv_scales)
        pages = storage.float().flatten(1, 2)[:, layout.slots.unique()]
        written = (
            layout.slots.unique(return_counts=True)[1] == 1
        )  # where two rows share a slot, either may win
        found.append((q.float(), pages[:, written]))
        untouched = storage.float().flatten(1, 2)
        untouched[:, layout.slots] = 0
        assert not untouched.any()
    assert found[0][1].isnan().any()
    assert found[0][1].isfinite().any()
    tolerance = 1e-3 if dtype == torch.float32 else 0  # sums of two products may be fused there
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance, equal_nan=True)


@in_turn("dtype", DTYPES)
@in_turn("shape", [(0, 9), (1, 128256), (2, 5, 32000), (300, 4096), (3, 1)])
def test_the_first_maximum(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = random(*shape, dtype=dtype).round()  # with many ties
    ids = torch.randperm(shape[-1], device=x.device)
    for names in (None, ids):
        index, value = fast(dtype).largest(x, names)
        assert torch.equal(index, x.argmax(-1) if names is None else ids[x.argmax(-1)])
        assert torch.equal(value, x.amax(-1).float())


@in_turn("dtype", DTYPES)
@in_turn("shape", [(0, 9), (1, 128256), (2, 5, 32000), (300, 4096), (3, 1)])
def test_the_probability_of_the_first_maximum(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = random(*shape, dtype=dtype, scale=3.0)
    ids = torch.randperm(shape[-1], device=x.device)
    index, probability = fast(dtype).most_likely(x, ids)
    assert torch.equal(index, ids[x.argmax(-1)])
    torch.testing.assert_close(probability, x.float().softmax(-1).amax(-1), rtol=1e-4, atol=1e-6)


@in_turn("dtype", DTYPES)
def test_the_maximum_is_nan_where_there_is_one(dtype: torch.dtype) -> None:
    x = random(4, 32000, dtype=dtype)
    x[1, 20000] = float("nan")
    x[2] = float("nan")
    x[3] = float("-inf")
    index, value = fast(dtype).largest(x)
    assert index[1:].tolist() == [20000, 0, 0]
    assert index[0] == x[0].argmax()
    assert value.isfinite().tolist() == [True, False, False, False]


def test_captured_kernels_read_new_inputs() -> None:
    """A kernel starts before its predecessor ends: it must wait before it reads what the predecessor writes."""
    dtype = torch.bfloat16
    ops, plain = fast(dtype), torch_ops()
    size, inner = 4096, 14336
    norm, gate, down = (
        random(size, dtype=dtype),
        Weight(data=random(2 * inner, size, dtype=dtype, scale=size**-0.5)),
        Weight(data=random(size, inner, dtype=dtype, scale=inner**-0.5)),
    )

    def chain(ops: Ops, x: Tensor) -> Tensor:
        first, gated, last = ops.rms_norm(norm, 1e-5), ops.gated_linear(gate), ops.linear_parts(down)
        normed = first(x)
        for _ in range(4):
            x, normed = first.add(x, last(gated(normed)))
        return normed

    x = random(5, size, dtype=dtype)
    chain(ops, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(ops, x)
    for _ in range(20):
        x.copy_(random(5, size, dtype=dtype))
        out.fill_(float("nan"))
        graph.replay()
        expected = chain(plain, x)
        assert (out - expected).float().norm() <= 0.02 * expected.float().norm()
