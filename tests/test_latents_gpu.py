"""On an H100 or H200: the kernels of latent attention equal torch in float32, and so does a captured pass.

About a minute, once FlashInfer's modules are compiled.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, product

import pytest
import torch
from torch import Tensor

from specgen.attention import LatentLayer, LayerAttention, SdpaExpanded, latent_decode
from specgen.attention.fa3 import attend_expanded
from specgen.attention.latent_decode import RANK, ROPE_DIM, LatentDecode, Shape
from specgen.attention.sdpa import SdpaBackend
from specgen.kv.layout import HostLens, Layout
from specgen.ops import bind_ops
from specgen.ops.experts import SigmoidRouting
from specgen.ops.jit_modules import num_sms
from specgen.ops.reference import torch_ops
from specgen.ops.weight import Weight
from tests.latent_lists import SECTIONS, Rows, work_list
from tests.marks import in_turn, on_gpu

CUDA = torch.device("cuda")
pytestmark = on_gpu(hopper=True)
BF16, WIDTH = torch.bfloat16, RANK + ROPE_DIM
LAYER = LayerAttention(index=0, scale=256**-0.5, value_dim=RANK)
LENS = [
    *([0], [1], [59], [63], [64], [65], [300], [1000], [9000]),
    [700, 3, 129, 64, 0, 511],
    [5000, 17],
    [9000, *[50] * 9],
    [200] * 70,
    [1000] * 128,
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def decode() -> LatentDecode:
    return LatentDecode(CUDA)


def tables_of(lens: Sequence[int], page_size: int) -> tuple[Tensor, int]:
    """Block tables with pages in any order, and the number of pages."""
    counts = [-(-length // page_size) for length in lens]
    order = torch.randperm(sum(counts)).add(1).int()
    tables = torch.zeros(len(lens), max(counts) + 2, dtype=torch.int32)
    for row, (count, first) in enumerate(zip(counts, accumulate(counts, initial=0), strict=False)):
        tables[row, :count] = order[first : first + count]
    return tables.to(CUDA), sum(counts) + 1


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, device=CUDA).mul(0.5).to(BF16)


def exact(layout: Layout, q: Tensor, pages: Tensor) -> Tensor:
    wide = pages.float()
    return SdpaBackend(CUDA).plan(layout)(LAYER, q.float(), wide, wide)


def check(decode: LatentDecode, layout: Layout, num_heads: int, num_pages: int, rows: int) -> None:
    q, pages = numbers(layout.num_rows, num_heads, WIDTH), numbers(num_pages, layout.page_size, 1, WIDTH)
    got = decode.plan(layout)(LAYER, q, pages, pages)
    torch.testing.assert_close(got[:rows].float(), exact(layout, q, pages)[:rows], rtol=0.02, atol=0.02)
    assert not got[rows:].any()
    assert torch.equal(decode.plan(layout)(LAYER, q, pages, pages), got), "the same from run to run"


@in_turn("query_len", [1, 2, 3, 4, 5, 7, 8, 16])
@in_turn("num_heads", [10, 16, 20, 64, 128])
def test_decode_passes_of_all_lengths(decode: LatentDecode, num_heads: int, query_len: int) -> None:
    for lens, page_size in product(LENS, (16, 64)):
        tables, num_pages = tables_of([length + query_len for length in lens], page_size)
        layout = Layout.uniform(tables, torch.tensor(lens, device=CUDA), query_len, page_size)
        check(decode, layout, num_heads, num_pages, layout.num_rows)


def test_decode_passes_where_some_warps_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late in front of their products: what lies in shared memory waits for them."""
    monkeypatch.setattr(latent_decode, "_spec", partial(latent_decode._spec, LATE=1))
    decode = LatentDecode(CUDA)
    for _, query_len, lens in product(range(3), (1, 5), LENS):
        tables, num_pages = tables_of([length + query_len for length in lens], 64)
        layout = Layout.uniform(tables, torch.tensor(lens, device=CUDA), query_len, 64)
        check(decode, layout, 20, num_pages, layout.num_rows)


def test_rows_of_any_number_and_the_end_of_a_long_prompt(decode: LatentDecode) -> None:
    tables, num_pages = tables_of([10, 400, 900, 130], 32)
    drafts = Layout.uniform(tables, torch.tensor([5, 390, 895, 120], device=CUDA), 5, 32)
    _, kept = drafts.leading(torch.tensor([1, 5, 0, 3], device=CUDA), 14)
    check(decode, kept, 20, num_pages, 9)
    check(decode, Layout.ragged(tables[1:3], [100, 890], [300, 3], 32), 20, num_pages, 303)


@in_turn(("query_len", "num_heads"), [(1, 20), (5, 20), (8, 20), (4, 128)])
def test_the_work_list_is_the_one_that_is_wanted(
    decode: LatentDecode, query_len: int, num_heads: int
) -> None:
    for lens in LENS:
        tables, _ = tables_of([length + query_len for length in lens], 64)
        layout = Layout.uniform(tables, torch.tensor(lens, device=CUDA), query_len, 64)
        shape = Shape.of(query_len, num_heads, num_sms(CUDA))
        width = tables.shape[1]
        rows = [Rows(first=i * query_len, start=n, count=query_len) for i, n in enumerate(lens)]
        expected = work_list(rows, shape, num_heads, table_stride=width, room=width * 64)
        work, _ = decode._work_list(layout, num_heads)
        for name, section in zip(SECTIONS, work.cpu().split(shape.sections(len(lens))), strict=False):
            assert section[: len(expected[name])].tolist() == expected[name], name


@in_turn("query_len", [1, 5, 8])
def test_a_graph_is_right_for_other_lengths_and_pages(decode: LatentDecode, query_len: int) -> None:
    tables = torch.zeros(4, 200, dtype=torch.int32, device=CUDA)
    starts, q = torch.zeros(4, dtype=torch.int64, device=CUDA), numbers(4 * query_len, 20, WIDTH)
    pages = numbers(500, 64, 1, WIDTH)
    layout = Layout.uniform(tables, starts, query_len, 64)
    decode.plan(layout)(LAYER, q, pages, pages)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel = decode.plan(layout)
        out = [kernel(LAYER, q, pages, pages).clone() for _ in range(2)]  # of two layers
    for lens in ([3, 900, 64, 250], [9000, 1, 63, 7000], [0, 0, 0, 0], [59, 60, 61, 62], [3, 900, 64, 250]):
        mine, _ = tables_of([length + query_len for length in lens], 64)
        tables.zero_()
        tables[:, : mine.shape[1]] = mine
        starts.copy_(torch.tensor(lens))
        graph.replay()
        expected = exact(Layout.uniform(mine, torch.tensor(lens, device=CUDA), query_len, 64), q, pages)
        for each in out:
            torch.testing.assert_close(each.float(), expected, rtol=0.02, atol=0.02)


def test_rows_past_a_table_are_zeros(decode: LatentDecode) -> None:
    tables, num_pages = tables_of([16, 80], 16)
    short = tables[:, :5].contiguous()
    layout = Layout.uniform(
        short, torch.tensor([9, 78], device=CUDA), 4, 16
    )  # room for two of the second's rows
    q, pages = numbers(8, 20, WIDTH), numbers(num_pages, 16, 1, WIDTH)
    got = decode.plan(layout)(LAYER, q, pages, pages)
    fitting = Layout.ragged(short, [9, 78], [4, 2], 16)
    torch.testing.assert_close(got[:6].float(), exact(fitting, q[:6], pages), rtol=0.02, atol=0.02)
    assert not got[6:].any()


@in_turn(("key_dim", "value_dim", "num_heads"), [(256, 256, 20), (192, 128, 16)])
def test_expanded_prefills(key_dim: int, value_dim: int, num_heads: int) -> None:
    """Values lie behind keys without positions, as a GEMM leaves them."""
    for starts, lens in (
        ((0,), (1,)),
        ((0, 0, 0), (17, 300, 64)),
        ((0, 40, 100), (700, 50, 128)),
        ((0,), (3000,)),
    ):
        host = HostLens(starts=starts, query_lens=lens)
        count = sum(host.kv_lens)
        q, keys = numbers(sum(lens), num_heads, key_dim), numbers(count, num_heads, key_dim)
        values = numbers(count, num_heads, 128 + value_dim)[..., 128:]
        layer = LayerAttention(index=0, scale=key_dim**-0.5)
        kernel, expected = (
            attend_expanded(host),
            SdpaExpanded(host)(layer, q.float(), keys.float(), values.float()),
        )
        for _ in range(2):  # layers share a plan
            got = kernel(layer, q, keys, values)
            torch.testing.assert_close(got.float(), expected, rtol=0.02, atol=0.02)


@in_turn("dtype", [BF16, torch.float16, torch.float32])
@in_turn(("rank", "rope_dim", "num_heads"), [(512, 64, 20), (512, 64, 0), (24, 8, 3)])
def test_latents_are_stored_and_queries_turned(
    rank: int, rope_dim: int, num_heads: int, dtype: torch.dtype
) -> None:
    frequencies = 1e6 ** (-torch.arange(0, rope_dim, 2, device=CUDA) / rope_dim)
    tables, num_pages = tables_of([80, 33, 16], 16)
    for layout in (
        Layout.uniform(tables, torch.tensor([75, 28, 0], device=CUDA), 5, 16),
        Layout.ragged(tables, [70, 0, 3], [7, 33, 1], 16),
    ):
        rows = layout.num_rows
        entered = torch.randn(rows, 100 + rank + rope_dim, device=CUDA).to(dtype)
        latent, key = entered[:, 100 : 100 + rank], entered[:, 100 + rank :]
        heads = torch.randn(rows, num_heads, 40 + rope_dim, device=CUDA).to(dtype)
        found = []
        for ops in (bind_ops(CUDA, dtype), torch_ops()):
            pages = torch.zeros(num_pages, 16, 1, rank + rope_dim, device=CUDA, dtype=dtype)
            wide = torch.zeros(rows, num_heads, rank + rope_dim, device=CUDA, dtype=dtype)
            store = ops.rope(frequencies, 1.1)(layout)
            store.latents(latent, key, pages, heads[..., 40:], wide[..., rank:])
            mine = heads.clone()
            store.latents(latent, key, pages, mine[..., 40:], mine[..., 40:])
            assert torch.equal(mine[..., 40:], wide[..., rank:])
            assert torch.equal(mine[..., :40], heads[..., :40])
            assert not wide[..., :rank].any()
            found.append((pages[1:], wide))
        for got, expected in zip(*found, strict=True):
            torch.testing.assert_close(got, expected, rtol=0.016, atol=1e-5)


@in_turn("dtype", [BF16, torch.float16, torch.float32])
@in_turn("rows", [0, 1, 5, 64, 640])
@in_turn(("heads", "nope", "value"), [(20, 192, 256), (10, 192, 256), (128, 128, 128)])
def test_gemms_of_each_head(heads: int, nope: int, value: int, rows: int, dtype: torch.dtype) -> None:
    up = torch.randn(heads, nope + value, RANK, device=CUDA).to(dtype)
    layer = LatentLayer(expanded=LAYER, absorbed=LAYER, up=up, nope_dim=nope)
    q = torch.randn(rows, heads, nope + 64, device=CUDA).to(dtype)[..., :nope]
    attended = torch.randn(rows, heads, RANK, device=CUDA).to(dtype)
    wide = torch.zeros(rows, heads, WIDTH, device=CUDA, dtype=dtype)
    layer.absorb(q, wide[..., :RANK])
    assert not wide[..., RANK:].any()
    keys, values = up.double().tensor_split((nope,), 1)
    absorbed = torch.einsum("rhi,hio->rho", q.double(), keys)
    lifted = torch.einsum("rhi,hoi->rho", attended.double(), values)
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    for got, expected in ((wide[..., :RANK], absorbed), (layer.lift(attended), lifted)):
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance * 20)


@in_turn(
    ("experts", "groups", "best", "chosen"), [(64, 1, 1, 4), (256, 8, 4, 8), (40, 1, 1, 5), (48, 3, 2, 4)]
)
@in_turn("normalized", [True, False])
@in_turn("shared", [0, 1, 2])
def test_routers_of_sigmoids(
    experts: int, groups: int, best: int, chosen: int, normalized: bool, shared: int
) -> None:
    routing = SigmoidRouting(
        num_chosen=chosen,
        bias=torch.randn(experts, device=CUDA) * 0.3,
        num_groups=groups,
        num_chosen_groups=best,
        normalized=normalized,
        scale=1.8,
        num_shared=shared,
    )
    mine, plain = (ops.sigmoid_choice(routing) for ops in (bind_ops(CUDA, BF16), torch_ops()))
    for parts, rows in product((1, 8), (0, 1, 5, 640)):
        logits = torch.randn(parts, rows, experts, device=CUDA)
        (ids, weights), (expected_ids, expected) = mine(logits), plain(logits)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights.float(), expected, rtol=0.004, atol=1e-6)  # rounded once
    ids, _ = mine(torch.full((1, 3, experts), torch.nan, device=CUDA))
    assert all(len({*row[:chosen]}) == chosen and max(row[:chosen]) < experts for row in ids.tolist())
    assert all(row[chosen:] == [*range(experts, experts + shared)] for row in ids.tolist())


@in_turn("rows", [0, 1, 5, 64, 640, 2048])
@in_turn(("experts", "hidden"), [(64, 2048), (256, 7168), (8, 64)])
def test_logits_of_routers_are_not_rounded(experts: int, hidden: int, rows: int) -> None:
    weight = Weight(data=(torch.randn(experts, hidden, device=CUDA) * hidden**-0.5).to(BF16))
    x = numbers(rows, hidden)
    got = bind_ops(CUDA, BF16).linear_float32(weight)(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.sum(0), x.float() @ weight.data.float().T, rtol=1e-4, atol=1e-4)
