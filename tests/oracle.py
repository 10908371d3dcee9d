"""A drafter that knows texts, so that steps accept any number of drafts."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from specgen.core.sequence import Request
from specgen.decoding.drafting import NoDrafter
from specgen.decoding.outcome import Drafts, DraftState
from specgen.decoding.sampling import SamplingBatch


class Oracle(NoDrafter):
    """Drafts what follows a token at its position in one of the texts; every third position's draft is wrong."""

    def __init__(
        self, requests: Iterable[Request], texts: Mapping[str, tuple[int, ...]], vocab_size: int
    ) -> None:
        self._vocab_size = vocab_size
        self._follows: dict[tuple[int, int], tuple[int, ...]] = {}
        for each in requests:
            text = each.prompt_token_ids + texts[each.id]
            for position in range(len(each.prompt_token_ids), len(text)):
                self._follows[position, text[position]] = text[position + 1 :]

    def propose(
        self, state: DraftState, num_drafts: int, block_tables: Tensor, sampling: SamplingBatch
    ) -> Drafts:
        rows = []
        for position, token in zip(state.positions.tolist(), state.tokens.tolist(), strict=True):
            known = [*self._follows.get((position, token), ()), *[0] * num_drafts][:num_drafts]
            wrong = [(position + 1 + index) * 7 % 5 == 3 for index in range(num_drafts)]
            rows.append(
                [(each + 1) % self._vocab_size if no else each for each, no in zip(known, wrong, strict=True)]
            )
        tokens = torch.tensor(rows, dtype=torch.int64).view(len(rows), num_drafts)
        return Drafts(tokens=tokens, probs=None, confidence=torch.full(tokens.shape, 0.7))
