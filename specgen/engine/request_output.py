"""What one request gave, and the rows that keep it."""

from dataclasses import asdict, dataclass
from typing import Any

from specgen.core.sequence import FinishReason, TokenLogprobs
from specgen.report.acceptance import RequestMetrics


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The answer to one turn of a prompt, or in ``error`` why there is none (``finish_reason`` is then ``error``).

    ``metrics`` says what the speculation was worth for this request; a failed one has none.
    """

    id: str
    prompt: str = ""  # as the model saw it, the chat template around it
    text: str = ""  # the answer
    reasoning: str | None = None  # before it; None where the text has none
    num_reasoning_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason
    turn: int = 1  # 1 for the first user turn
    num_prompt_tokens: int = 0
    category: str | None = None
    endpoint: str | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of each token id, where they were asked for

    def to_row(self) -> dict[str, Any]:
        """The row of ``completions.jsonl``; of a failed request that of ``errors.jsonl``. The id comes first."""
        labels = {"category": self.category, "endpoint": self.endpoint}
        given = {name: label for name, label in labels.items() if label is not None}
        if self.error is not None:
            return {"id": self.id, "error": self.error, "turn": self.turn, **given}
        assert self.metrics is not None
        reasoned = {"reasoning": self.reasoning, "num_reasoning_tokens": self.num_reasoning_tokens}
        return {
            "id": self.id,
            "prompt": self.prompt,
            **({} if self.reasoning is None else reasoned),
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "turn": self.turn,
            "num_prompt_tokens": self.num_prompt_tokens,
            **given,
            **({} if self.logprobs is None else {"logprobs": [asdict(each) for each in self.logprobs]}),
            "metrics": self.metrics.to_json(),
        }
