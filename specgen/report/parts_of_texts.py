"""Acceptance in the reasoning of texts and in their answers apart."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from specgen.events import Verified
from specgen.report.acceptance import RequestSum, Speculation, StepCounts

PARTS = ("reasoning", "answer")


class PartCounts:
    """The verify steps of one request by part: a step belongs to the part of its first token.

    ``earlier`` has the steps before the first change of part, which are of the answer.
    """

    def __init__(self, earlier: StepCounts) -> None:
        self.part = "answer"
        self.steps = {"answer": deepcopy(earlier), "reasoning": StepCounts(len(earlier.drafted))}
        self._switches = [(0, "answer")]  # output token, and the part from there on

    def switch(self, part: str, at: int) -> None:
        """From output token ``at`` on the text is ``part``."""
        self.part = part
        self._switches.append((at, part))

    def add(self, step: Verified, first: int) -> None:
        """Count a step whose first token is output token ``first``."""
        part = next(part for at, part in reversed(self._switches) if at <= first)
        self.steps[part].add(step)

    def sums(self, num_tokens: int) -> dict[str, Any]:
        """All counts of a text with ``num_tokens``, for ``PartSum``; ``part`` is the one that it ended in."""
        steps = {part: counts.sums() for part, counts in self.steps.items()}
        return {"part": self.part, "steps": steps, "tokens": self._num_tokens(num_tokens)}

    def _num_tokens(self, total: int) -> dict[str, int]:
        """Output tokens by part of a text with ``total``; the last change may be of a step that was not recorded."""
        starts = [min(at, total) for at, _ in self._switches]
        counts = dict.fromkeys(PARTS, 0)
        for (_, part), start, end in zip(self._switches, starts, [*starts[1:], total], strict=True):
            counts[part] += end - start
        return counts


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
                steps = StepCounts.of_sums(parts["steps"][part], self._num_spec_tokens)
                self._sums[part].add(steps, tokens, conversation, num_turns_left)

    def result(self) -> Mapping[str, Speculation]:
        """Reasoning, then answer; together they are all steps. Empty where no text has reasoning."""
        return {part: total.result() for part, total in self._sums.items()} if self._has_reasoning else {}
