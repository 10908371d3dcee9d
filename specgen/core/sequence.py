"""One request on its way through the engine: its tokens, its pages, how far it is, how it ended."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal

from specgen.config import SamplingParams, require
from specgen.kv.pages import Place
from specgen.record.record_rows import RequestRow, Step, StepCounts, count_parts
from specgen.text.automaton import NOT_ALLOWED, Automaton
from specgen.text.reasoning import PartFinder
from specgen.text.tokenizer import StopStrings

FinishReason = Literal["stop", "length", "error"]  # of vLLM and OpenAI
# a ``length`` that the model's context set, or that cut an answer before it fits structured outputs
EndReason = FinishReason | Literal["context", "incomplete"]
NOT_FINITE = -1  # in place of a token that the model's logits could not decide


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
    greedy: tuple[bool, ...]  # whether no token was more likely


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the engine is asked for. ``category``, ``turn`` and ``num_turns`` only label it in reports.

    ``alone`` is for one that may have failed before: it runs alone, and is not tried again. Requests that ``share``
    the same, and begin alike, share the KV of that with or without a prefix cache. With ``text`` nothing is
    generated: the text is scored, and the prompt is all of it but its last token.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    category: str | None = None
    turn: int = 1
    num_turns: int = 1  # of its conversation
    alone: bool = False
    share: str = ""  # of samples, what their prompt is called; empty: nothing
    asked: str = ""  # see ``RequestRow``
    text: ScoreRequest | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely the model found one output token, and which were most likely in its place."""

    chosen: float  # natural log-probability
    top: tuple[tuple[int, float], ...]  # token ids and theirs, the most likely first

    @staticmethod
    def of(row: Items[float], num_top: int) -> "TokenLogprobs":
        """From a row of ``sampling.token_logprobs``, which may have more of the most likely than are asked for."""
        found = len(row) // 2
        top = zip(map(int, row[1 : 1 + found]), row[1 + found :], strict=True)
        return TokenLogprobs(chosen=row[0], top=tuple(top)[:num_top])


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What the engine answers. ``error`` says why a request was refused or failed (``finish_reason`` ``error``)."""

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: EndReason
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of each token id, where they were asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # likewise; None of the first
    record: RequestRow
    scored: Scored | None = None  # of a request with a text


@dataclass(kw_only=True, eq=False)
class Sequence:
    """A request's state; the one noun that changes."""

    request: Request
    tokens: list[int]  # prompt and output
    max_length: int  # tokens at which it ends ...
    ends_by: EndReason = "length"  # ... and what sets them
    seed: int
    eos_token_ids: frozenset[int]  # and its own stop_token_ids; with ignore_eos these alone
    stop: StopStrings | None = None
    parts: PartFinder | None = None  # None where a text has one part
    automaton: Automaton | None = None  # of what may come next; None: every token
    state: int = 0  # of it, behind the tokens so far
    place: Place | None = None  # of it on the device, while the sequence has pages
    # by block table: of all layers but those whose pages go back behind a window, and of these, where there are any: 0
    # in place of what went back
    page_lists: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    state_slot: int = 0  # of its recurrent state, while it has pages
    state_source: int = 0  # slot with the state that its first pass begins with; 0: with none
    digests: list[bytes] = field(default_factory=list)  # of its pages, see ``prefix_cache``
    num_known: int = 0  # of these pages somebody has computed so many, when it was last asked
    prefix_root: bytes = b""  # sequences share pages only with those of the same
    num_cached: int = 0  # positions that another sequence had computed
    num_cached_prompt: int = 0  # of the prompt, when its first token was found
    first_token: float | None = None  # when that was
    num_computed: int = 0  # positions in the cache, while prefilling
    in_flight_min: int = 0  # tokens that passes whose results are not read yet will add at least ...
    in_flight_max: int = 0  # ... and at most
    alone: bool = False  # has failed once, and is tried again alone
    arrival: float = 0.0  # when it entered the queue
    refused: str | None = None  # why it can never run
    num_shortages: int = 0  # how often the device had no memory for it alone
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of its output, where they are asked for
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # likewise, by position
    scores: dict[int, tuple[float, bool]] = field(default_factory=dict)  # of its text's tokens, by position
    steps: list[Step] = field(default_factory=list)
    switches: list[tuple[int, str]] = field(default_factory=list)  # output token and part
    finish_reason: EndReason | None = None

    @property
    def pages(self) -> list[int]:
        """Those of all layers, or of the layers without a window."""
        return self.page_lists[0]

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def prompt_and_output(self) -> tuple[list[int], list[int]]:
        """Its tokens so far."""
        num_prompt = len(self.request.prompt_token_ids)
        return self.tokens[:num_prompt], self.tokens[num_prompt:]

    @property
    def num_prefill_tokens(self) -> int:
        """Positions that a prefill computes: the prompt, or after a preemption all but the newest token."""
        return len(self.tokens) - (1 if self.num_output_tokens else 0)

    @property
    def num_reusable(self) -> int:
        """Leading positions that need not be computed if the cache has them: those whose logits nobody asks for."""
        return min(self.num_prefill_tokens, self.scored.start) - 1

    @property
    def scored(self) -> range:
        """Positions of the tokens whose probabilities are asked for and not known: of its text, or of its prompt."""
        text, num_prompt = self.request.text, len(self.request.prompt_token_ids)
        if text is not None:
            return range(text.num_context, len(text.token_ids))
        known = self.request.sampling.prompt_logprobs is None or len(self.prompt_logprobs) == num_prompt - 1
        return range(len(self.tokens), 0) if known else range(1, num_prompt)

    @property
    def will_finish(self) -> bool:
        """Whether passes in flight will finish it, whatever they find."""
        return len(self.tokens) + self.in_flight_min >= self.max_length

    @property
    def may_finish(self) -> bool:
        """Whether passes in flight could fill it."""
        return len(self.tokens) + self.in_flight_max >= self.max_length

    def append(self, tokens: list[int], logprobs: Items[Items[float]] = ()) -> int:
        """Take ``tokens`` up to the first that ends the text or is NOT_FINITE; returns how many were taken.

        ``logprobs`` has a row per token where they are asked for, see ``TokenLogprobs.of``.
        """
        room = self.max_length - len(self.tokens)
        ends: EndReason | None = None
        if NOT_FINITE in tokens:
            tokens, ends = tokens[: tokens.index(NOT_FINITE)], "error"
        if len(tokens) >= room:
            tokens, ends = tokens[:room], self.ends_by
        if not self.eos_token_ids.isdisjoint(tokens):
            end = next(index for index, token in enumerate(tokens) if token in self.eos_token_ids)
            tokens, ends = tokens[: end + 1], "stop"
        if self.stop is not None and (found := self.stop.feed(tokens)) is not None:
            tokens, ends = tokens[:found], "stop"
        if self.automaton is not None:
            for index, token in enumerate(tokens):
                if (after := self.automaton.after(self.state, token)) == NOT_ALLOWED:
                    tokens, ends = tokens[:index], "error"
                    break
                self.state = after
            if ends in ("length", "context") and not self.automaton.fits(self.state):
                ends = "incomplete"
        if self.parts is not None:
            first = self.num_output_tokens
            self.switches += [(first + index, part) for index, part in self.parts.feed(tokens)]
        self.tokens += tokens
        if (num_top := self.request.sampling.logprobs) is not None:
            self.logprobs += [TokenLogprobs.of(row, num_top) for row in logprobs[: len(tokens)]]
        self.finish_reason = ends
        return len(tokens)

    def is_cut(self, drafts: Items[int], accepted: int) -> bool:
        """Whether its automaton does not allow the draft behind the ``accepted`` ones, which are not appended yet."""
        if self.automaton is None or accepted >= len(drafts):
            return False
        state = self.automaton.walk(drafts[:accepted], self.state)
        return state != NOT_ALLOWED and self.automaton.after(state, drafts[accepted]) == NOT_ALLOWED

    def begin(self, now: float) -> None:
        """Its first token was found, with its whole prompt in the cache."""
        self.first_token, self.num_cached_prompt = now, self.num_cached

    def completion(self, now: float, error: str | None = None) -> Completion:
        """The finished sequence as an answer; ``error`` says why it could not go on, ``now`` when it ended."""
        assert self.finish_reason is not None
        return Completion(
            request=self.request,
            token_ids=tuple(self.tokens[len(self.request.prompt_token_ids) :]),
            finish_reason=self.finish_reason,
            error=error,
            logprobs=None if self.request.sampling.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=self._prompt_logprobs(),
            record=self._record(now),
            scored=self._scored(),
        )

    def _prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        if self.request.sampling.prompt_logprobs is None:
            return None
        return tuple(map(self.prompt_logprobs.get, range(len(self.request.prompt_token_ids))))

    def _record(self, ended: float) -> RequestRow:
        request, most = self.request, max([len(step.drafts) for step in self.steps], default=0)
        num_tokens = self.num_output_tokens
        return RequestRow(
            name=request.id,
            reason=str(self.finish_reason),
            category=request.category,
            turn=request.turn,
            num_turns=request.num_turns,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=self.num_cached_prompt,
            num_output_tokens=num_tokens,
            arrival=self.arrival,
            first_token=self.first_token,
            ended=ended,
            counts=StepCounts.of(self.steps, most),
            parts=count_parts(self.switches, self.steps, num_tokens, most) if self.switches else None,
            steps=self.steps,
            asked=request.asked,
        )

    def _scored(self) -> Scored | None:
        text = self.request.text
        if text is None or self.finish_reason == "error":
            return None
        found = [self.scores[position] for position in range(text.num_context, len(text.token_ids))]
        log_probs, greedy = zip(*found, strict=True)
        return Scored(request=text, log_probs=log_probs, greedy=greedy)
