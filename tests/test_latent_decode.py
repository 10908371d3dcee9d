"""Absorbed latent attention without a GPU: its work lists, and what the list makes of FlashInfer's kernel."""

import ctypes
import random
from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.attention import LayerAttention, latent_decode
from specgen.attention.latent_decode import RANK, ROPE_DIM, LatentDecode, Shape
from specgen.attention.sdpa import SdpaBackend
from specgen.kv.layout import Layout
from tests import fake_flashinfer, latent_lists
from tests.cuda_on_cpu import on_cpu
from tests.latent_lists import BY_ITEM, SECTIONS, TILE, Rows, work_list
from tests.marks import mostly_slow

CPU = torch.device("cpu")
LAYER = LayerAttention(index=0, scale=0.06, value_dim=RANK)


def of_device(
    sequences: list[Rows], lens: list[int] | int, shape: Shape, num_heads: int, **tables: int
) -> Tensor:
    """What the kernel writes for ``sequences``; their rows as ``lens`` give them."""
    ragged = isinstance(lens, list)
    columns = [torch.tensor([rows.start for rows in sequences])]
    columns += [torch.tensor(lens), torch.tensor([rows.first for rows in sequences])] if ragged else []
    longest = max(lens) if isinstance(lens, list) else lens
    work = torch.full((sum(shape.sections(len(sequences))) + 8,), -7, dtype=torch.int32)
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in columns] + [None] * (0 if ragged else 2)
    error = on_cpu(latent_decode._PLAN).latent_plan_run(
        *(
            *pointers,
            ctypes.c_void_p(work.data_ptr()),
            len(sequences),
            longest,
            shape.groups,
            shape.group_rows,
        ),
        *(num_heads, tables["table_stride"], tables["room"], shape.cluster, shape.num_clusters, None),
    )
    assert error == 0
    assert (work[-8:] == -7).all(), "it wrote behind its list"
    return work


@pytest.mark.parametrize("first", mostly_slow(range(0, 60, 5), 0))
def test_the_device_makes_the_list_that_is_wanted(first: int) -> None:
    for seed in range(first, first + 5):
        require_list_of(random.Random(seed), f"seed {seed}")


def require_list_of(rng: random.Random, case: str) -> None:
    """The device's list of random sequences is the expected one."""
    num_heads, sms = rng.choice([1, 5, 10, 16, 20, 64, 128]), rng.choice([132, 114, 7, 4])
    count, query_len = rng.choice([1, 2, 3, 8, 70, 300, 1100]), rng.choice([1, 2, 3, 5, 7, 8, 16, 40])
    page_size, longest = rng.choice([16, 32, 64]), rng.choice([10, 70, 500, 5_000, 40_000])
    width = max(-(-(longest + query_len) // page_size) - rng.choice([0, 0, 1]), 1)  # or too few for all rows
    uniform = rng.random() < 0.5
    lens = [query_len if uniform else rng.randrange(query_len + 1) for _ in range(count)]
    lens[0] = query_len
    starts = [rng.choice([0, 63, longest, rng.randrange(longest)]) for _ in range(count)]
    sequences = [
        Rows(first=first, start=start, count=length)
        for first, start, length in zip(accumulate(lens, initial=0), starts, lens, strict=False)
    ]
    shape = Shape.of(query_len, num_heads, sms)
    tables = {"table_stride": width + rng.choice([0, 3]), "room": width * page_size}
    expected = work_list(sequences, shape, num_heads, **tables)
    sections = shape.sections(count)
    got = of_device(sequences, query_len if uniform else lens, shape, num_heads, **tables).split(
        [*sections, 8]
    )
    for name, section in zip(SECTIONS, got, strict=False):
        assert len(expected[name]) <= len(section), (case, name)
        assert section[: len(expected[name])].tolist() == expected[name], (case, name)
    assert max(expected["parts_end"]) <= 2 * sms * TILE, case  # the room for parts


def test_rows_are_shared_out_so_that_a_cluster_holds_them() -> None:
    for case in product((1, 3, 4, 5, 8, 33), (1, 5, 16, 20, 64, 100, 128)):
        query_len, num_heads = case
        shape = Shape.of(query_len, num_heads, 132)
        assert shape.group_rows * num_heads <= TILE * shape.cluster, case
        assert shape.group_rows * (shape.groups - 1) < query_len <= shape.group_rows * shape.groups, case
        assert shape.num_clusters * shape.cluster == 132, case
        assert (shape.cluster == 1) == (query_len * num_heads <= TILE), f"{case}: a block is enough"


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> LatentDecode:
    """On the CPU, with 12 multiprocessors."""
    fake_flashinfer.install(monkeypatch, major=9, num_sms=12)
    return LatentDecode(CPU)


def layouts() -> dict[str, Layout]:
    def uniform(starts: list[int], query_len: int, page_size: int = 16) -> Layout:
        width = -(-(max(starts) + query_len) // page_size)
        tables = torch.randperm(len(starts) * width).add(1).int().view(len(starts), width)
        return Layout.uniform(tables, torch.tensor(starts), query_len, page_size)

    drafts = uniform([5, 300, 64, 0], 5)
    _, kept = drafts.leading(torch.tensor([1, 5, 0, 3]), 14)
    _, few = uniform([61, 10, 10, 10, 10, 10], 5).leading(torch.tensor([5, 1, 1, 1, 1, 1]), 10)
    tables = torch.arange(1, 61).int().view(2, 30)
    return {
        "one row": uniform([0], 1),
        "one long": uniform([1500], 1),
        "long, rows in groups": uniform([1500, 63, 64, 122], 8),
        "drafts": drafts,
        "kept": kept,
        "kept, few on average": few,
        "many": uniform([*range(40, 100)], 3),
        "end of a long prompt": Layout.ragged(tables, [400, 70], [40, 9], 16),
    }


def random_pass(layout: Layout, num_heads: int) -> tuple[Tensor, Tensor]:
    """Pages and queries of ``layout``."""
    torch.manual_seed(num_heads)
    pages = torch.randn(1 + int(layout.block_tables.max()), layout.page_size, 1, RANK + ROPE_DIM)
    return pages, torch.randn(layout.num_rows, num_heads, RANK + ROPE_DIM)


def require_attends_as_torch(attend: Any, layout: Layout, q: Tensor, pages: Tensor, case: object) -> None:
    """``attend`` gives what torch gives in the rows of ``layout``, and zeros in its padding."""
    rows = int(layout.query_lens.sum())
    got, expected = attend(LAYER, q, pages, pages), SdpaBackend(CPU).plan(layout)(LAYER, q, pages, pages)
    torch.testing.assert_close(got[:rows], expected[:rows], atol=2e-5, rtol=0, msg=lambda m: f"{case}: {m}")
    assert not got[rows:].any(), case


@pytest.mark.parametrize("num_heads", mostly_slow([4, 20], 4))
def test_it_attends_as_torch_does(decode: LatentDecode, num_heads: int) -> None:
    for name, layout in layouts().items():
        pages, q = random_pass(layout, num_heads)
        kernel = decode.plan(layout)
        require_attends_as_torch(kernel, layout, q, pages, name)
        require_attends_as_torch(kernel, layout, 2 * q, pages, f"{name}, the next layer")


def test_rows_without_a_page_are_zeros_and_change_no_others(decode: LatentDecode) -> None:
    tables = torch.tensor([[3, 1], [2, 4]], dtype=torch.int32)
    pages, q = torch.randn(5, 16, 1, RANK + ROPE_DIM), torch.randn(8, 20, RANK + ROPE_DIM)
    layout = Layout.uniform(tables, torch.tensor([30, 9]), 4, 16)  # the first has room for two rows
    got = decode.plan(layout)(LAYER, q, pages, pages)
    short = Layout.ragged(tables, [30, 9], [2, 4], 16)
    expected = SdpaBackend(CPU).plan(short)(LAYER, q[[0, 1, 4, 5, 6, 7]], pages, pages)
    torch.testing.assert_close(got[[0, 1, 4, 5, 6, 7]], expected, atol=2e-5, rtol=0)
    assert not got[2:4].any()


def test_a_wrong_list_is_seen(decode: LatentDecode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is left out, a position too many, rows of another sequence."""
    layout = layouts()["drafts"]
    pages, q = torch.randn(200, 16, 1, RANK + ROPE_DIM), torch.randn(20, 20, RANK + ROPE_DIM)
    right, kernel = decode.plan(layout)(LAYER, q, pages, pages).clone(), latent_lists.latent_decode
    for name, change in {"kv_end": -1, "kv_len": 1, "first_page": 1, "parts_begin": 1}.items():

        def planted(*given: Any, change: int = change, name: str = name) -> int:
            work, sizes = given[4], given[7]
            of = dict(zip(SECTIONS, sizes[8:], strict=True))
            last_item = int(work[of["first_item"] + sizes[1]]) - 1
            work[of[name] + (last_item if name in BY_ITEM else 0)] += change
            return kernel(*given)

        monkeypatch.setattr(latent_lists, "latent_decode", planted)
        try:
            got = LatentDecode(CPU).plan(layout)(LAYER, q, pages, pages)
        except (AssertionError, IndexError):
            continue
        assert not torch.allclose(got, right, atol=1e-3), name


def test_the_kernel_takes_one_width_and_no_windows(decode: LatentDecode) -> None:
    layout = layouts()["one row"]
    pages, q = torch.zeros(9, 16, 1, 40), torch.zeros(1, 4, 40)
    with pytest.raises(AssertionError):
        decode.plan(layout)(LAYER, q, pages, pages)
    pages = torch.zeros(9, 16, 1, RANK + ROPE_DIM)
    with pytest.raises(AssertionError):
        decode.plan(layout)(SimpleNamespace(value_dim=RANK, window=7, sinks=None), q, pages, pages)  # type: ignore[arg-type]
