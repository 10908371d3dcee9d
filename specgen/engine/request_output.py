"""What one request gave, and the rows that keep it."""

from dataclasses import asdict, dataclass, field
from typing import Any

from specgen.core.sequence import FinishReason, TokenLogprobs
from specgen.record.record_rows import RequestRow
from specgen.report.acceptance import RequestMetrics


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The answer to one turn of a prompt, or in ``error`` why there is none (``finish_reason`` is then ``error``).

    ``id`` is the prompt's, for later turns ``ID/turn-2`` and so on; ``turn`` counts from 1. ``prompt`` is the text that
    the model saw, the chat template around it, and ``num_prompt_tokens`` its tokens. ``text`` is the answer without
    ``reasoning``, the part before it of ``num_reasoning_tokens``, which is None where there is none; ``token_ids`` are
    of both, with one entry of ``logprobs`` each where they were asked for. ``finish_reason`` is ``stop`` (end of text
    or a stop string), ``length`` (``max_tokens``, or where ``context_is_full`` the model's context) or ``error``.
    ``category`` and ``endpoint`` are the prompt's. ``metrics`` says how much speculative decoding
    helped this request, and ``record`` its times and every step; one that never ran has neither.
    """

    id: str
    prompt: str = ""
    text: str = ""
    reasoning: str | None = None
    num_reasoning_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason
    context_is_full: bool = (
        False  # where ``finish_reason`` is ``length``: it was the model's context, not max_tokens
    )
    turn: int = 1
    num_prompt_tokens: int = 0
    category: str | None = None
    endpoint: str | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    record: RequestRow | None = field(default=None, compare=False, repr=False)

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
            **({"ended_by": "context"} if self.context_is_full else {}),
            "turn": self.turn,
            "num_prompt_tokens": self.num_prompt_tokens,
            **given,
            **({} if self.logprobs is None else {"logprobs": [asdict(each) for each in self.logprobs]}),
            "metrics": self.metrics.to_json(),
        }
