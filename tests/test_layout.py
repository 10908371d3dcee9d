"""Positions and KV slots of rows."""

import torch

from specgen.kv.layout import Layout

TABLES = torch.tensor([[3, 1, 7], [5, 2, 9]], dtype=torch.int32)


def test_uniform_rows_cross_pages() -> None:
    layout = Layout.uniform(TABLES, torch.tensor([2, 7]), 3, page_size=4)
    assert layout.positions.tolist() == [2, 3, 4, 7, 8, 9]
    assert layout.slots.tolist() == [3 * 4 + 2, 3 * 4 + 3, 1 * 4, 2 * 4 + 3, 9 * 4, 9 * 4 + 1]
    assert layout.kv_lens.tolist() == [5, 10]
    assert layout.first_rows.tolist() == [0, 3]


def test_ragged_equals_uniform_where_lengths_are_equal() -> None:
    starts = torch.tensor([2, 7])
    uniform = Layout.uniform(TABLES, starts, 3, page_size=4)
    ragged = Layout.ragged(TABLES, [2, 7], [3, 3], page_size=4)
    assert torch.equal(uniform.positions, ragged.positions)
    assert torch.equal(uniform.slots, ragged.slots)


def test_ragged_rows() -> None:
    layout = Layout.ragged(TABLES, [0, 3], [4, 1], page_size=4)
    assert layout.positions.tolist() == [0, 1, 2, 3, 3]
    assert layout.slots.tolist() == [12, 13, 14, 15, 5 * 4 + 3]


def test_leading_rows_form_a_layout() -> None:
    layout = Layout.uniform(TABLES, torch.tensor([2, 7]), 3, page_size=4)
    rows, kept = layout.leading(torch.tensor([1, 3]), 4)
    assert rows.tolist() == [0, 3, 4, 5]
    expected = Layout.ragged(TABLES, [2, 7], [1, 3], page_size=4)
    assert torch.equal(kept.positions, expected.positions)
    assert torch.equal(kept.slots, expected.slots)
    assert kept.kv_lens.tolist() == [3, 10]


def test_padding_rows_write_to_page_0() -> None:
    layout = Layout.uniform(TABLES, torch.tensor([2, 7]), 3, page_size=4)
    rows, kept = layout.leading(torch.tensor([1, 2]), 6)
    assert rows.tolist()[:3] == [0, 3, 4]
    assert max(rows.tolist()) < layout.num_rows
    exact = layout.leading(torch.tensor([1, 2]), 3)[1]
    assert kept.slots.tolist()[:3] == exact.slots.tolist()
    assert all(slot < 4 for slot in kept.slots.tolist()[3:])


def test_rows_beyond_the_block_table_write_to_page_0() -> None:
    layout = Layout.uniform(TABLES, torch.tensor([0, 10]), 4, page_size=4)
    assert layout.slots.tolist()[4:] == [9 * 4 + 2, 9 * 4 + 3, 0, 1]
