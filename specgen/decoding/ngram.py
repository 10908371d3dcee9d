"""N-gram drafts: where the last tokens of a text occurred in it before, what followed them is proposed again.

Prompt lookup decoding (Saxena, 2023), with the search on the device and in shapes that depend on no length: nothing
waits for the host, and a step stays one CUDA graph. There is no head and no checkpoint.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specgen.decoding.answer_pool import AnswerPool
from specgen.decoding.outcome import (
    NO_DRAFT,
    Drafts,
    DraftState,
    Outcome,
    PaddedBatch,
    StateColumn,
    no_drafts,
)
from specgen.decoding.sampling import SamplingBatch

_STORED = torch.int32  # NGRAM_BYTES wide
_BEFORE = -1  # in place of tokens before the first; no text has it
_FORCED = 0.97  # confidence in drafts that constraints force: a level that no share of few last tokens is in
_AT_ONCE = 1 << 22  # positions searched at once, which bounds the memory of a search to some 100 MiB


class NgramDrafter:
    """Copies drafts from the text of the same sequence: prompt and output, without the very first token.

    With a ``pool``, from answers that have ended where they have more of the last tokens.

    The texts lie in pages like a KV cache, with the page numbers of the target's: the slot of position p holds the
    token at p + 1, which is what a page of the prefix cache is known by. So shared prefixes, preemption and rejected
    rows need nothing of their own.
    """

    aux_layers: tuple[int, ...] = ()
    reads_output = False
    state_columns: tuple[StateColumn, ...] = ()

    def __init__(
        self,
        *,
        longest: int,
        num_pages: int,
        page_size: int,
        device: torch.device,
        ends: Sequence[int] = (),
        pool: AnswerPool | None = None,
    ) -> None:
        """``longest`` is N, the most last tokens that are looked up; ``num_pages`` counts page 0 too.

        Nothing is drafted behind one of ``ends``, the tokens that end a text: prompts hold them between messages.
        """
        self._longest = longest
        self.pool = pool
        self._ends = torch.tensor([*ends, NO_DRAFT], dtype=torch.int64, device=device)
        self._texts = torch.zeros(num_pages, page_size, dtype=_STORED, device=device)

    def observe(self, outcome: Outcome) -> tuple[DraftState, int]:
        """Write down what follows every row; of rejected rows it lies behind the end of the text."""
        given = PaddedBatch().prepare(outcome)
        self._texts.view(-1).index_copy_(0, given.layout.slots, given.tokens.to(_STORED))
        return given.state(), 0

    def propose(
        self,
        state: DraftState,
        num_drafts: int,
        block_tables: Tensor,
        sampling: SamplingBatch,
        windowed_tables: Tensor | None = None,
    ) -> Drafts:
        """K drafts for every sequence whose last token occurred before, or as far as an end; none for the others.

        With constraints, as far as they are allowed, and what is forced: see ``SamplingBatch.fitting``.
        """
        if num_drafts == 0:
            return no_drafts(state.tokens)
        width = block_tables.shape[1] * self._texts.shape[1]
        rows = max(1, _AT_ONCE // width)
        found = [
            self._search(self._texts[tables].flatten(1), lengths, num_drafts)
            for tables, lengths in zip(
                torch.split(block_tables, rows), torch.split(state.positions, rows), strict=True
            )
        ]
        drafts, sure = (torch.cat(each) for each in zip(*found, strict=True))
        confidence = sure[:, None].expand_as(drafts)
        if sampling.form.constrained:
            drafts, forced = sampling.fitting(drafts)
            confidence = torch.where(forced, _FORCED, confidence)
        is_end = (drafts[..., None] == self._ends).any(-1).long()
        drafts = drafts.masked_fill(is_end.cumsum(1) > is_end, NO_DRAFT)
        confidence = torch.where(drafts == NO_DRAFT, -1, confidence)
        return Drafts(tokens=drafts, probs=None, confidence=confidence)

    def _search(self, texts: Tensor, lengths: Tensor, num_drafts: int) -> tuple[Tensor, Tensor]:
        """Drafts ``[B, K]`` as of ``lookup``, and how sure they are, ``[B]``."""
        drafts, matched = lookup(texts, lengths, self._longest, num_drafts)
        sure = matched / self._longest
        if self.pool is None:
            return drafts, sure
        learnt, also_matched, share = self.pool.lookup(texts, lengths, num_drafts)
        better = also_matched > matched
        return torch.where(better[:, None], learnt, drafts), torch.where(better, share, sure)

    def draft_rows(self, num_drafts: int) -> int:
        return 0

    def clear(self, pages: Tensor) -> None:
        """Nothing: no id is NaN, and what lies behind the end of a text is never looked at."""


def lookup(texts: Tensor, lengths: Tensor, longest: int, num_drafts: int) -> tuple[Tensor, Tensor]:
    """Drafts ``[B, K]`` behind the first ``lengths`` ``[B]`` (at least 1) tokens of ``texts`` ``[B, L]`` int32.

    They follow the latest earlier occurrence of the most last tokens, at most ``longest`` (N). Where that overlaps the
    end, the text repeats itself and the drafts go on repeating it. NO_DRAFT where not even the last token occurred.
    Also says how many last tokens occurred there, ``[B]``.
    """
    size = texts.shape[1]
    places = torch.arange(size, dtype=torch.int32, device=texts.device)
    last = lengths[:, None] - 1
    padded = F.pad(texts, (longest - 1, 0), value=_BEFORE)
    alike = places < last  # [B, L]: whether the tokens that end there are the last ones, as far as compared
    matched = torch.zeros_like(texts)  # how many are
    for back in range(longest):
        start = longest - 1 - back
        alike = alike & (padded[:, start : start + size] == padded.gather(1, last + start))
        matched += alike
    best = (matched * size + places).amax(1, keepdim=True)  # most tokens first, then the latest
    end, found = best % size, best >= size
    behind = torch.arange(num_drafts, device=texts.device) % (last - end).clamp(min=1)
    drafts = texts.gather(1, torch.where(found, end + 1 + behind, 0))
    return torch.where(found, drafts.to(torch.int64), NO_DRAFT), (best // size).squeeze(1)
