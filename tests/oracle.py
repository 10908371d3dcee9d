"""A drafter that knows texts, so that steps accept any number of drafts, and engines that it drafts for."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specgen.config import CONFIDENCE_LEVELS
from specgen.core.sequence import Request
from specgen.core.spec_length import FixedPlan, StepPlan
from specgen.decoding.drafting import NoDrafter
from specgen.decoding.outcome import Drafts, DraftState
from specgen.decoding.sampling import SamplingBatch
from tests.engines import Outputs, Pair, engine_of, generate


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
        self,
        state: DraftState,
        num_drafts: int,
        block_tables: Tensor,
        sampling: SamplingBatch,
        windowed_tables: Tensor | None = None,
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


@dataclass(frozen=True, kw_only=True)
class World:
    """A pair, requests, and their texts by a reference."""

    pair: Pair
    requests: list[Request]
    texts: dict[str, tuple[int, ...]]
    vocab_size: int

    def __post_init__(self) -> None:
        assert len(set(self.texts.values())) == len(self.texts)

    def oracle(self) -> Oracle:
        return Oracle(self.requests, self.texts, self.vocab_size)

    def generated(self, **settings: Any) -> Outputs:
        return generate(self.pair, self.requests, **{"num_spec_tokens": 4} | settings)

    def check_steps(self, settings: Mapping[str, Any]) -> None:
        """The oracle's steps accept every number of drafts, and no text changes."""
        outputs = self.generated(**settings)
        most = min(settings.get("num_spec_tokens", 4), 4)
        assert outputs.texts == self.texts
        assert set(outputs.accepted) >= set(range(most + 1)), Counter(outputs.accepted)

    def check_a_part(self) -> None:
        """Of the oracle's drafts may be verified."""
        engine = engine_of(self.pair, num_spec_tokens=4, max_batch_size=5)
        rising = tuple((level + 0.5) / len(CONFIDENCE_LEVELS) for level in range(len(CONFIDENCE_LEVELS)))
        engine.spec_length = FixedPlan(StepPlan(num_drafts=4, quarters=6, chances=(rising,) * 4))
        found = {each.request.id: each for each in engine.generate(self.requests)}
        assert {name: each.token_ids for name, each in found.items()} == self.texts
        lengths = {len(step.drafts) for each in found.values() for step in each.record.steps or ()}
        assert len(lengths) > 1, "every sequence had as many drafts"

    def check_preemption(self, **memory: int) -> None:
        outputs = self.generated(**memory)
        assert outputs.num_preempted >= 3
        assert outputs.texts == self.texts

    def cached_tokens(self) -> tuple[list[int], list[int]]:
        """Of the prompts of two runs with a prefix cache, the second of which finds what the first one left."""
        engine = engine_of(self.pair, num_spec_tokens=4, prefix_cache=True)

        def run() -> list[int]:
            found = list(engine.generate(self.requests))
            assert {each.request.id: each.token_ids for each in found} == self.texts
            return [each.record.num_cached_tokens for each in found]

        return run(), run()
