"""Acceptance in the reasoning of texts and in their answers apart."""

from collections.abc import Mapping
from typing import Any

from specgen.record.counts import PARTS, StepCounts
from specgen.report.acceptance import RequestSum, Speculation


class PartSum:
    """Sums over requests by part; what has no part is answer."""

    def __init__(self, num_spec_tokens: int) -> None:
        self._num_spec_tokens = num_spec_tokens
        self._sums = {part: RequestSum(num_spec_tokens) for part in PARTS}
        self._has_reasoning = False

    def add(
        self,
        counts: StepCounts,
        parts: Mapping[str, Any] | None,
        num_tokens: int,
        conversation: str = "",
        num_turns_left: int = 0,
    ) -> None:
        """Add one request, of whose steps ``counts`` has all and ``parts`` those by part, if it has reasoning.

        The last two are as in ``RequestSum.add``.
        """
        if parts is None:
            self._sums["answer"].add(counts, num_tokens, conversation, num_turns_left)
            return
        self._has_reasoning = True
        for part, tokens in parts["tokens"].items():
            if tokens:
                steps = StepCounts.of_row(parts["steps"][part], self._num_spec_tokens)
                self._sums[part].add(steps, tokens, conversation, num_turns_left)

    def result(self) -> Mapping[str, Speculation]:
        """Reasoning, then answer; together they are all steps. Empty where no text has reasoning."""
        return {part: total.result() for part, total in self._sums.items()} if self._has_reasoning else {}
