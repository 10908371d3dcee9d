"""How likely the model finds given texts: packed prefill passes that look at every token instead of choosing one."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from specgen.config import SamplingParams, UserError, first_line, require
from specgen.core.packing import chunk_layout, chunk_tokens
from specgen.core.peers import Peers
from specgen.core.scheduler import Chunk, Scheduler
from specgen.core.sequence import Request, Sequence
from specgen.core.shortages import NO_MEMORY
from specgen.core.step import Steps
from specgen.device import HostCopy, on_device, use
from specgen.models.model_config import TargetConfig

_UNUSED = SamplingParams(max_tokens=1)


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """A text whose tokens from ``num_context`` on are to be scored; the last of them needs no slot in the cache."""

    id: str
    token_ids: tuple[int, ...]
    num_context: int  # at least 1: the first token follows nothing

    def __post_init__(self) -> None:
        require(
            1 <= self.num_context < len(self.token_ids),
            f"{self.id}: {self.num_context} of {len(self.token_ids)} tokens are context: "
            "leave at least one on either side",
        )


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The answer: a value for each of ``request.token_ids[request.num_context:]``."""

    request: ScoreRequest
    log_probs: tuple[float, ...]  # natural, given all tokens before
    greedy: tuple[bool, ...]  # whether no token was likelier


@dataclass(kw_only=True)
class _PartialScores:
    request: ScoreRequest
    log_probs: list[float] = field(default_factory=list)
    greedy: list[bool] = field(default_factory=list)

    def wanted(self, chunk: Chunk) -> range:
        """The positions in ``chunk`` whose next tokens are asked for."""
        end = chunk.start + chunk.num_rows
        return range(min(max(chunk.start, self.request.num_context - 1), end), end)

    def scored(self) -> Scored:
        return Scored(request=self.request, log_probs=tuple(self.log_probs), greedy=tuple(self.greedy))


class Scorer:
    """Runs texts through the target alone, in the cache and within the limits that ``scheduler`` keeps."""

    def __init__(
        self,
        *,
        config: TargetConfig,
        steps: Steps,
        scheduler: Scheduler,
        device: torch.device,
        peers: Peers,
    ) -> None:
        self._peers = peers
        self._partial: dict[Sequence, _PartialScores] = {}
        self._config = config
        self._steps = steps
        self._scheduler = scheduler
        self._device = device

    def score(self, requests: Iterable[ScoreRequest]) -> Iterator[Scored]:
        """Yield every request's scores as its last token is seen. ``UserError`` for a text that cannot be scored."""
        source = iter(requests)
        try:
            while (found := self.run(list(self._pull(source)))) is not None:
                yield from found
        finally:  # also where the caller has seen enough
            self.abandon()

    def run(self, requests: list[ScoreRequest]) -> list[Scored] | None:
        """Queue ``requests`` and run a pass; the scores that are complete then, None where nothing is left to do."""
        sequences = [self._sequence(request) for request in requests]
        for sequence, request in zip(sequences, requests, strict=True):
            self._partial[sequence] = _PartialScores(request=request)
            self._scheduler.submit(sequence)
        with self._peers.working("score_pass", requests):
            chunks = self._scheduler.next_chunks()
            if not chunks:
                return None
            if not self._attempt(chunks):
                return []
            self._scheduler.launched(chunks)
        complete = [chunk.sequence for chunk in chunks if chunk.last]
        for sequence in complete:
            self._scheduler.retire(sequence)
        return [self._partial.pop(sequence).scored() for sequence in complete]

    def abandon(self) -> None:
        """Drop all requests."""
        self._peers.tell("abandon_scores")
        self._scheduler.clear()
        self._partial.clear()

    def _attempt(self, chunks: list[Chunk]) -> bool:
        """One pass, which fails as those of ``EngineCore`` do: within lower limits, or alone, it is tried again.

        ``RuntimeError`` where that has failed.
        """
        short = False
        try:
            self._run(chunks)
            self._scheduler.limits.see_pass()
            return True
        except torch.OutOfMemoryError:
            self._peers.give_up(RuntimeError(NO_MEMORY))
            short = self._scheduler.limits.lower_prefill()
            reason = "the device has no memory for it even alone: lower --gpu-memory-utilization"
        except RuntimeError as error:
            self._peers.give_up(error)
            reason = first_line(error)
        # outside of the handlers: the exception holds on to the tensors of the pass
        for sequence in self._scheduler.send_all_back():
            self._partial[sequence] = _PartialScores(request=self._partial[sequence].request)
        torch.cuda.empty_cache()
        if not short:
            self._scheduler.forget()
            self._isolate([chunk.sequence for chunk in chunks], reason)
        return False

    def _isolate(self, sequences: list[Sequence], reason: str) -> None:
        """Let ``sequences``, one of which may be to blame, run alone; ``RuntimeError`` for one that did."""
        for sequence in sequences:
            if sequence.alone:
                raise RuntimeError(
                    f"{sequence.request.id} could not be scored ({reason}), and not alone either"
                )
            sequence.alone = True

    def _pull(self, source: Iterator[ScoreRequest]) -> Iterator[ScoreRequest]:
        """As many as the batch has room for."""
        for _ in range(self._scheduler.num_wanted):
            request = next(source, None)
            if request is None:
                return
            yield request

    def _sequence(self, request: ScoreRequest) -> Sequence:
        inputs, limit = request.token_ids[:-1], self._config.max_positions
        require(
            len(inputs) <= limit,
            f"{request.id}: {len(inputs)} tokens come before the last and the model's context is {limit}: "
            "cut them from the left",
        )
        outside = [token for token in request.token_ids if not 0 <= token < self._config.vocab_size]
        if outside:
            raise UserError(
                f"{request.id}: token id {outside[0]} is not in the vocabulary of {self._config.vocab_size}: "
                "use the tokenizer of this model"
            )
        sequence = Sequence(
            request=Request(id=request.id, prompt_token_ids=inputs, sampling=_UNUSED),
            tokens=list(inputs),
            max_length=len(inputs),
            seed=0,
            eos_token_ids=frozenset(),
            prefix_root=b"target",  # the head's cache is left as it is
            first_scored_position=request.num_context - 1,
        )
        reason = self._scheduler.refusal(sequence)
        require(reason is None, f"{request.id}: {reason}")
        return sequence

    @torch.inference_mode()
    def _run(self, chunks: list[Chunk]) -> None:
        """One pass; what it finds is kept."""
        use(self._device)
        partial = self._partial
        rows, targets, first = list[int](), list[int](), 0
        for chunk in chunks:
            scores = partial[chunk.sequence]
            for position in scores.wanted(chunk):
                rows.append(first + position - chunk.start)
                targets.append(scores.request.token_ids[position + 1])
            first += chunk.num_rows
        self._peers.see(len(chunks), first)
        log_probs, greedy = self._steps.score(
            chunk_layout(chunks, self._scheduler.page_size, self._device),
            chunk_tokens(chunks, self._device, shift=0),
            on_device(rows, self._device, torch.int64),
            on_device(targets, self._device, torch.int64),
        )
        numbers = HostCopy(torch.stack((log_probs, greedy.float()), 1))
        self._peers.wait(numbers)
        found = iter(numbers.read())
        for chunk in chunks:
            scores = partial[chunk.sequence]
            for _ in scores.wanted(chunk):
                log_prob, is_greedy = next(found)
                scores.log_probs.append(log_prob)
                scores.greedy.append(bool(is_greedy))
