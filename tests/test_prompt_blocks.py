"""Short prompts in blocks: every row once, where it belongs, and the same texts as ragged prefills give."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from specgen.config import SamplingParams
from specgen.core import graphs, packing
from specgen.core.graphs import Runner
from specgen.core.packing import BLOCK, PromptBlocks, block_layout
from specgen.core.sequence import Request
from specgen.engine import choices
from specgen.kv.layout import Layout
from tests.engines import Pair, generate
from tests.marks import mostly_slow

CPU = torch.device("cpu")


def ragged(starts: list[int], lens: list[int], page_size: int = 16) -> Layout:
    counts = [-(-(start + length) // page_size) for start, length in zip(starts, lens, strict=True)]
    width, first = max(counts), 1
    tables = torch.zeros(len(starts), width, dtype=torch.int32)
    for row, count in zip(tables, counts, strict=True):
        row[:count] = torch.arange(first, first + count)
        first += count
    return Layout.ragged(tables, starts, lens, page_size)


def test_every_row_has_its_position_page_and_token() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        number = rng.randint(1, 6)
        starts = [rng.choice([0, 0, 7, 16, 48]) for _ in range(number)]
        lens = [rng.randint(1, 100) for _ in range(number)]
        layout = ragged(starts, lens)
        blocks = PromptBlocks.of(layout)
        whole = block_layout(blocks.starts, blocks.tables, layout.page_size)
        assert whole.chained
        assert blocks.size[0] in (4, 8, 12, 16, 24, 32, 48, 64)
        assert torch.equal(whole.positions[blocks.rows], layout.positions)
        assert torch.equal(whole.slots[blocks.rows], layout.slots)
        assert len(set(blocks.rows.tolist())) == layout.num_rows
        ids = torch.arange(1, layout.num_rows + 1)
        spread = blocks.spread(ids)
        assert torch.equal(spread[blocks.rows], ids)
        assert int((spread != 0).sum()) == layout.num_rows
        padding = torch.ones(whole.num_rows, dtype=torch.bool)
        padding[blocks.rows] = False
        written = set(layout.slots.tolist())
        assert not written & {slot for slot in whole.slots[padding].tolist() if slot >= layout.page_size}
        assert blocks.tables[0].shape[1] * layout.page_size >= int(whole.positions.max()) + 1


def test_many_rows_are_no_blocks() -> None:
    assert PromptBlocks.of(ragged([0], [64 * BLOCK])) is not None
    assert PromptBlocks.of(ragged([0], [64 * BLOCK + 1])) is None
    assert PromptBlocks.of(ragged([0] * 65, [1] * 65)) is None


class Capturing(Runner):
    """Runs eagerly what a graph would replay, with its inputs copied to where they stay."""

    captures = True
    made: ClassVar[list["Capturing"]] = []

    def __init__(self) -> None:
        self.made.append(self)
        self.kept: dict[graphs.Key, tuple[Tensor, ...]] = {}

    def prompts(self, key: graphs.Key, function: Callable[..., Any], *inputs: Tensor) -> Any:
        kept = self.kept.setdefault(key, tuple(torch.full_like(each, -1) for each in inputs))
        for mine, given in zip(kept, inputs, strict=True):
            mine.copy_(given)
        return function(*kept)


def texts(pair: Pair, **changes: Any) -> dict[str, tuple[int, ...]]:
    lens, sampling = (1, 5, 15, 16, 17, 31, 40, 64, 70, 33), SamplingParams(max_tokens=6, ignore_eos=True)
    requests = [
        Request(id=str(length), prompt_token_ids=tuple(range(3, 3 + length)), sampling=sampling)
        for length in lens
    ]
    return generate(pair, requests, **{"max_batch_size": 4, "num_spec_tokens": 3} | changes).texts


@pytest.mark.parametrize(
    "changed",
    mostly_slow([{}, {"max_prefill_tokens": 24}, {"num_spec_tokens": 0}, {"max_batch_size": 3}], {}),
)
def test_texts_are_those_of_ragged_prefills(
    random_pair: Pair, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = texts(random_pair, **changed)
    monkeypatch.setattr(Capturing, "made", [])
    monkeypatch.setitem(choices.RUNNERS, "off", Capturing)
    assert texts(random_pair, **changed) == plain
    assert any(runner.kept for runner in Capturing.made)


def test_blocks_that_begin_one_off_are_noticed(random_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = texts(random_pair)
    monkeypatch.setitem(choices.RUNNERS, "off", Capturing)
    right = PromptBlocks.of.__func__  # type: ignore[attr-defined]

    def wrong(kind: type[PromptBlocks], layout: Layout) -> PromptBlocks | None:
        blocks = right(kind, layout)
        return blocks and replace(blocks, starts=blocks.starts + (blocks.starts > 0).long())

    monkeypatch.setattr(packing.PromptBlocks, "of", classmethod(wrong))
    assert texts(random_pair) != plain
