"""The running batch on the device: one row per sequence, at addresses that stay, so that a captured step finds them."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specgen.config import MAX_LOGIT_BIASES
from specgen.core.sequence import Sequence
from specgen.decoding.automaton_tables import Tables
from specgen.decoding.outcome import DraftState, StateColumn
from specgen.decoding.sampling import SamplingBatch, SamplingForm
from specgen.device import on_device

ROW_BYTES = 20 * MAX_LOGIT_BIASES  # at least, of a row: its logit biases, an id, a number and a position each


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What a step reads, and where it leaves the state of the next. Padding rows stay as they are."""

    state: DraftState
    block_tables: Tensor  # [B, max_pages] int32; page 0 where a sequence has none
    windowed_tables: Tensor | None  # see ``Layout``
    state_slots: Tensor  # [B] int64; 0 in padding rows
    sampling: SamplingBatch
    active: Tensor  # [B] bool; False in padding rows

    @property
    def num_rows(self) -> int:
        return self.active.shape[0]

    def advance(self, state: DraftState) -> None:
        """Put ``state`` in place of the old one, on the device alone, where no memory is needed for it."""
        for old, new in zip(self.state.tensors(), state.tensors(), strict=True):
            torch.where(self.active.view(-1, *[1] * (old.dim() - 1)), new, old, out=old)


class RunningBatch:
    """Rows of up to ``max_rows`` sequences. A free row is a padding row: position 1 of a sequence on page 0.

    What raises half way leaves undefined rows: ``reset``, and let all join again.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        table_width: int,
        num_tables: int = 1,
        state_columns: tuple[StateColumn, ...],
        device: torch.device,
        end_tokens: tuple[int, ...] = (),
        tables: Tables | None = None,
    ) -> None:
        def column(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(max_rows, *shape, dtype=dtype, device=device)

        self.sequences: list[Sequence] = []
        # of each row's pages, by table: how many in front were given back, and behind how many the table ends
        self._uploaded: list[list[tuple[int, int]]] = [[] for _ in range(num_tables)]
        self._form: SamplingForm | None = None  # not known since rows joined or left
        self._device = device
        self._end_tokens = end_tokens  # the model's
        self._state = DraftState(
            tokens=column(torch.int64),
            positions=column(torch.int64),
            columns=tuple(column(each.dtype, *each.shape) for each in state_columns),
        )
        self._tables = torch.zeros(num_tables, max_rows, table_width, dtype=torch.int32, device=device)
        self._active = column(torch.bool)
        self._slots = column(torch.int64)  # of recurrent states
        self._sampling = SamplingBatch(
            temperature=column(torch.float32),
            top_p=column(torch.float32),
            top_k=column(torch.int64),
            min_p=column(torch.float32),
            seeds=column(torch.int64),
            biased_ids=column(torch.int64, MAX_LOGIT_BIASES),
            biases=column(torch.float32, MAX_LOGIT_BIASES),
            biased_until=column(torch.int64, MAX_LOGIT_BIASES),
            penalties=column(torch.float32, 3),
            counts=column(torch.int32, 0),  # there is memory for them once a sequence has penalties
            automata=column(torch.int64),
            states=column(torch.int64),
            tables=tables,
            form=self.form,
        )
        self._num_used = max_rows  # the rows behind them are padding rows

    @property
    def tables(self) -> Tables | None:
        """Of the sequences' automata."""
        return self._sampling.tables

    @property
    def form(self) -> SamplingForm:
        """What all rows together ask of sampling."""
        if self._form is None:
            params = (sequence.request.sampling for sequence in self.sequences)
            self._form = SamplingForm.of(params, self._end_tokens)
        return self._form

    def reset(self) -> None:
        """Drop all rows, because none may be as it should be; the next ``arrange`` tells the device."""
        self.sequences, self._uploaded = [], [[] for _ in self._uploaded]
        self._num_used = len(self._active)

    def join(self, sequences: Items[Sequence], state: DraftState, sampling: SamplingBatch) -> None:
        """Add rows for ``sequences``, whose states and sampling parameters come in the same order."""
        first = len(self.sequences)
        rows = slice(first, first + len(sequences))
        self.sequences += sequences
        for uploaded in self._uploaded:
            uploaded += [(0, 0)] * len(sequences)
        if sampling.counts.shape[1] > self._sampling.counts.shape[1]:
            counts = sampling.counts.new_zeros(len(self._active), sampling.counts.shape[1])
            self._sampling = replace(self._sampling, counts=counts)
        joining = (*state.tensors(), *_tensors(sampling))
        for mine, theirs in zip(self._row_values(sampling.form), joining, strict=True):
            mine[rows] = theirs
        self._slots[rows] = on_device([sequence.state_slot for sequence in sequences], self._device)
        self._active[rows] = True
        self._form = None
        self._num_used = len(self.sequences)

    def arrange(self, sequences: list[Sequence]) -> None:
        """Keep the rows of ``sequences`` alone, which are in the batch and in its order."""
        if len(sequences) == self._num_used:
            return
        row_of = {id(sequence): row for row, sequence in enumerate(self.sequences)}
        rows = [row_of[id(sequence)] for sequence in sequences]
        kept = len(rows)
        if rows != list(range(kept)):
            index = on_device(rows, self._device)
            for column in (*self._row_values(self.form), *self._tables, self._slots):
                if column.numel():  # not all are in use
                    column[:kept] = column[index]
        self.sequences = list(sequences)
        self._uploaded = [[uploaded[row] for row in rows] for uploaded in self._uploaded]
        self._make_padding(slice(kept, self._num_used))
        self._form = None
        self._num_used = kept

    def columns(self, num_rows: int) -> Columns:
        """The first ``num_rows`` rows, padding rows among them, with the block tables brought up to date."""
        self._upload_pages()
        rows = slice(num_rows)
        return Columns(
            state=self._state.take(rows),
            block_tables=self._tables[0, rows],
            windowed_tables=self._tables[1, rows] if len(self._tables) > 1 else None,
            state_slots=self._slots[rows],
            sampling=self._sampling.take(rows).shaped(self.form),
            active=self._active[rows],
        )

    def _make_padding(self, rows: slice) -> None:
        for column in (
            *self._state.tensors(),
            *_tensors(self._sampling),
            *self._tables,
            self._slots,
            self._active,
        ):
            column[rows] = 0
        self._state.positions[rows] = 1  # the head begins at the position before
        self._sampling.top_p[rows] = 1  # 0 would leave nothing to draw from

    def _upload_pages(self) -> None:
        """The new ones, and 0 where a page went back: its next owner's numbers are not even read behind a mask."""
        new = list[tuple[int, int, int, int]]()
        for table, uploaded in enumerate(self._uploaded):
            lists = [sequence.page_lists[table] for sequence in self.sequences]
            for row, (pages, (first, end)) in enumerate(zip(lists, uploaded, strict=True)):
                if end == len(pages) and (first == end or pages[first]):
                    continue
                held = next((column for column in range(first, len(pages)) if pages[column]), len(pages))
                changed = (*range(first, min(held, end)), *range(max(held, end), len(pages)))
                new += [(table, row, column, pages[column]) for column in changed]
                uploaded[row] = held, len(pages)
        if new:
            tables, rows, columns, numbers = on_device(new, self._device).unbind(1)
            self._tables[tables, rows, columns] = numbers.to(torch.int32)

    def _row_values(self, form: SamplingForm) -> tuple[Tensor, ...]:
        """What rows of ``form`` hold; behind it they have zeros."""
        return (*self._state.tensors(), *_tensors(self._sampling.shaped(form)))


def _tensors(columns: SamplingBatch) -> tuple[Tensor, ...]:
    """Its columns, in the order of their fields."""
    return tuple(value for value in vars(columns).values() if isinstance(value, Tensor))
