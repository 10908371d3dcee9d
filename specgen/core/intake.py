"""Requests that enter: what can never run is refused with the reason, the rest becomes sequences."""

from collections.abc import Sequence as Items
from typing import Protocol

from specgen.core.journal import Journal
from specgen.core.scheduler import Scheduler
from specgen.core.sequence import Completion, PartFinder, Request, Sequence, StopFinder
from specgen.decoding.sampling import request_seed
from specgen.models.model_config import TargetConfig


class Followers(Protocol):
    """Makes what follows the text of one request as it is generated."""

    def stop_finder(self, stops: Items[str], prompt: Items[int]) -> StopFinder:
        """The detector of the strings ``stops`` after ``prompt``."""
        ...

    def part_finder(self, prompt: Items[int]) -> PartFinder | None:
        """The detector of the parts of the text after ``prompt``; None where texts have one part."""
        ...


class Intake:
    """Checks requests against the model and the cache, and queues them."""

    def __init__(
        self,
        *,
        config: TargetConfig,
        scheduler: Scheduler,
        journal: Journal,
        followers: Followers,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._journal = journal
        self._followers = followers

    def submit(self, request: Request) -> Completion | None:
        """Queue ``request``; a completion with the reason comes back at once if it can never run."""
        sequence = self.sequence(request)
        reason = self._refusal(sequence)
        if reason is None:
            self._scheduler.submit(sequence)
            return None
        sequence.finish_reason = "error"
        self._journal.finished(sequence)
        return Completion(request=request, token_ids=(), finish_reason="error", error=reason)

    def sequence(self, request: Request) -> Sequence:
        """The state of ``request``, which enters the queue."""
        self._journal.submitted(request)
        sampling, prompt = request.sampling, list(request.prompt_token_ids)
        asked, context = len(prompt) + sampling.max_tokens, self._config.max_positions
        eos = () if sampling.ignore_eos else self._config.eos_token_ids
        return Sequence(
            request=request,
            tokens=prompt,
            max_length=min(asked, context),
            ends_by="length" if asked <= context else "context",
            seed=request_seed(sampling.seed, request.id),
            alone=request.alone,
            eos_token_ids=frozenset(eos),
            stop=self._followers.stop_finder(sampling.stop_strings, prompt)
            if sampling.stop_strings
            else None,
            parts=self._followers.part_finder(prompt),
        )

    def _refusal(self, sequence: Sequence) -> str | None:
        num_prompt, limit = len(sequence.tokens), self._config.max_positions
        if num_prompt == 0:
            return "the prompt is empty: give at least one token"
        vocab_size = self._config.vocab_size
        outside = [t for t in sequence.tokens if not 0 <= t < vocab_size]
        if outside:
            return f"token id {outside[0]} is not in the vocabulary of {vocab_size}"
        biased = [t for t, _ in sequence.request.sampling.logit_bias if not 0 <= t < vocab_size]
        suppressed = [t for t in sequence.request.sampling.suppress_tokens if not 0 <= t < vocab_size]
        if suppressed:
            return f"suppress-tokens names {suppressed[0]}, which is not in the vocabulary of {vocab_size}"
        if biased:
            return f"logit-bias names token {biased[0]}, which is not in the vocabulary of {vocab_size}"
        if num_prompt >= limit:
            return (
                f"the prompt has {num_prompt} tokens and the model's context is {limit}: shorten the prompt"
            )
        return self._scheduler.refusal(sequence)
