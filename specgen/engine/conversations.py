"""Prompts become requests, and answers outputs and the context of the next turn."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specgen.config import SamplingParams, UserError, require
from specgen.core.sequence import Completion, EndReason, FinishReason, Request, TokenLogprobs
from specgen.prompts import Prompt, Rejected, failure, prompt_ids
from specgen.prompts.prompt import asked_digest, sample_ids, several_turns
from specgen.record import columns
from specgen.record.files import sample_id
from specgen.record.record_rows import RequestRow
from specgen.report.acceptance import RequestMetrics
from specgen.report.display import clip, plain, several
from specgen.report.report import Report, report_of
from specgen.text.reasoning import answer_of
from specgen.text.tokenizer import Tokenizer

_NONE: Mapping[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The answer to one turn of a prompt, or in ``error`` why there is none (``finish_reason`` is then ``error``).

    ``id`` is the prompt's, for later turns ``ID/turn-2`` and so on; ``turn`` counts from 1. Of ``num_samples`` of the
    prompt this is ``sample``, from 0 on; all have its ``id``, and each a ``name``. ``prompt`` is the text that
    the model saw, the chat template around it, and ``num_prompt_tokens`` its tokens; it ``was_tokenized`` where it was
    given as token ids, which a text may not give back. ``text`` is the answer without ``reasoning``, the part before it
    of ``num_reasoning_tokens``, which is None where there is none; ``token_ids`` are of both, with one entry of
    ``logprobs`` each where they were asked for; ``prompt_logprobs`` has one of each token of the prompt
    (``prompt_token_ids``), None of the first. ``finish_reason`` is ``stop`` (end of text or a stop string), ``length``
    (``max_tokens``, or where ``context_is_full`` the model's context; ``is_incomplete`` where that cut an answer before
    it fits its structured outputs) or ``error``. ``category`` and ``endpoint`` are the prompt's. ``metrics`` says how
    much speculative decoding helped this request, and ``record`` its times and every step; one that never ran has
    neither.
    """

    id: str
    prompt: str = ""
    text: str = ""
    reasoning: str | None = None
    num_reasoning_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason
    context_is_full: bool = False  # where ``finish_reason`` is ``length``: not max_tokens, but the context
    is_incomplete: bool = False  # the same: before the answer fits its structured outputs
    turn: int = 1
    sample: int = 0
    num_samples: int = 1
    num_prompt_tokens: int = 0
    prompt_token_ids: tuple[int, ...] = ()
    was_tokenized: bool = False
    category: str | None = None
    endpoint: str | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    record: RequestRow | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """Of its request, as no other has it: the id, behind sample 0 ``ID/sample-1`` and so on."""
        return sample_id(self.id, self.sample)

    def __repr__(self) -> str:
        """One short line: of a failed request its error, else the beginning of the text and the figures."""
        named = f"id={self.id!r}" + (f", sample={self.sample}" if self.num_samples > 1 else "")
        if self.error is not None:
            return f"RequestOutput({named}, error={self.error!r})"
        length = None if self.metrics is None else self.metrics.mean_acceptance_length
        return (
            f"RequestOutput({named}, text={clip(self.text, 60)!r}, finish_reason={self.finish_reason!r}, "
            f"{several(len(self.token_ids), 'token')}, acceptance length {plain(length)})"
        )

    @property
    def reason(self) -> EndReason:
        """Why it ended, as records have it."""
        return (
            "incomplete" if self.is_incomplete else "context" if self.context_is_full else self.finish_reason
        )

    def to_row(self) -> dict[str, Any]:
        """The row of ``completions.jsonl``; of a failed request that of ``errors.jsonl``.

        The id comes first, and behind it the sample of several.
        """
        name = {"id": self.id, **({"sample": self.sample} if self.num_samples > 1 else {})}
        labels = {"category": self.category, "endpoint": self.endpoint}
        given = {name: label for name, label in labels.items() if label is not None}
        if self.error is not None:
            return {**name, "error": self.error, "turn": self.turn, **given}
        assert self.metrics is not None
        ids = {"prompt_token_ids": list(self.prompt_token_ids)}
        scores = {"prompt_logprobs": [each and dict(vars(each)) for each in self.prompt_logprobs or ()]}
        reasoned = {"reasoning": self.reasoning, "num_reasoning_tokens": self.num_reasoning_tokens}
        return {
            **name,
            "prompt": self.prompt,
            **({} if self.reasoning is None else reasoned),
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            **({} if self.reason == self.finish_reason else {"ended_by": self.reason}),
            "turn": self.turn,
            "num_prompt_tokens": self.num_prompt_tokens,
            **given,
            **({} if self.logprobs is None else {"logprobs": [dict(vars(each)) for each in self.logprobs]}),
            **(ids if self.was_tokenized or self.prompt_logprobs is not None else {}),
            **({} if self.prompt_logprobs is None else scores),
            "metrics": self.metrics.to_row(),
        }


@dataclass(kw_only=True, eq=False)
class _Conversation:
    prompt: Prompt
    names: tuple[str, ...]  # of its turns
    sample: int = 0
    num_samples: int = 1
    answers: list[str] = field(default_factory=list)
    asked: str = ""  # the text of the turn that is running


class Conversations:
    """All prompts of a run; the engine is asked turn by turn. ``fail`` takes the outputs of turns that cannot be asked.

    ``earlier`` has the texts of turns, by id, that were answered before: they are not asked again and are the
    context of the turns behind them. ``lost`` has why the device was lost while a turn ran, by id and once for each
    time: the second time it runs alone, and there is no third. ``sampling`` holds what a prompt leaves open.
    """

    def __init__(
        self,
        prompts: Iterable[Prompt | Rejected | None],
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        fail: Callable[[RequestOutput], None],
        earlier: Mapping[str, str] = _NONE,
        lost: Mapping[str, Sequence[str]] = _NONE,
    ) -> None:
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._fail = fail
        self._earlier = earlier
        self._lost = lost
        self._open: dict[str, _Conversation] = {}
        self._encoded: tuple[Prompt, tuple[str, list[int]]] | None = None  # the newest, for all its samples

    def first_turns(self) -> Iterator[Request | None]:
        """A request for every prompt, and sample of one, that has one left and can be asked; None: none is there now.

        The samples of a prompt follow each other, so that those behind the first find its KV.
        """
        for prompt in self._prompts:
            if prompt is None:
                yield None
            elif isinstance(prompt, Rejected):
                for turn, name in enumerate(prompt.turn_ids, start=1):
                    self._fail(RequestOutput(id=name, finish_reason="error", turn=turn, error=prompt.reason))
            else:
                for conversation in self._samples(prompt):
                    if (request := self._ask(conversation)) is not None:
                        yield request

    def _samples(self, prompt: Prompt) -> Iterator[_Conversation]:
        names = sample_ids(prompt, self._sampling)
        each = [names] if prompt.follow_ups else [(name,) for name in names]
        for sample, turns in enumerate(each):
            yield _Conversation(prompt=prompt, names=turns, sample=sample, num_samples=len(each))

    def follow_up(self, completion: Completion) -> Request | None:
        """The next turn of the conversation that ``answer`` has just taken a completion for, if it has one."""
        conversation = self._open.pop(completion.request.id)
        if completion.error is not None:
            self._fail_behind(conversation)
            return None
        return self._ask(conversation)

    def answer(self, completion: Completion, metrics: RequestMetrics) -> RequestOutput:
        request, reason = completion.request, completion.finish_reason
        conversation = self._open[request.id]
        parts, text = answer_of(
            self._tokenizer, request.prompt_token_ids, completion.token_ids, request.sampling
        )
        if completion.error is None:
            conversation.answers.append(text)  # without its reasoning, as chat templates expect
        return replace(
            _output(conversation, request.turn, completion.error),
            prompt=conversation.asked,
            text=text,
            reasoning=parts.reasoning,
            num_reasoning_tokens=parts.num_reasoning_tokens,
            token_ids=completion.token_ids,
            finish_reason="length" if reason == "context" or reason == "incomplete" else reason,
            context_is_full=reason == "context",
            is_incomplete=reason == "incomplete",
            num_prompt_tokens=len(request.prompt_token_ids),
            prompt_token_ids=request.prompt_token_ids,
            was_tokenized=bool(conversation.prompt.token_ids),
            metrics=metrics,
            logprobs=completion.logprobs,
            prompt_logprobs=completion.prompt_logprobs,
            record=completion.record,
        )

    def _ask(self, conversation: _Conversation) -> Request | None:
        """The request of the first turn without an answer."""
        answers = conversation.answers
        while (unanswered := conversation.names[len(answers) :]) and unanswered[0] in self._earlier:
            # no later turn asks for the text of the last
            answers.append(self._earlier[unanswered[0]] if len(unanswered) > 1 else "")
        if not unanswered:
            return None
        try:
            request = self._request(conversation, unanswered[0])
        except UserError as error:
            self._fail(_output(conversation, len(answers) + 1, str(error)))
            self._fail_behind(conversation)
            return None
        self._open[request.id] = conversation
        return request

    def _request(self, conversation: _Conversation, request_id: str) -> Request:
        prompt = conversation.prompt
        require(
            request_id not in self._open, f"id {request_id!r} is being answered: give every prompt its own"
        )
        lost = self._lost.get(request_id, ())
        if len(lost) > 1:
            raise UserError(f"the device was lost while it ran alone: {lost[-1]}")
        sampling = prompt.sampling_over(self._sampling)
        require(sampling.n == 1 or not prompt.follow_ups, several_turns(sampling.n))
        conversation.asked, token_ids = self._prompt_ids(conversation)
        turn = len(conversation.answers) + 1
        return Request(
            id=request_id,
            prompt_token_ids=tuple(token_ids),
            sampling=sampling,
            category=prompt.category,
            turn=turn,
            num_turns=len(prompt.turn_ids),
            alone=bool(lost),
            share=prompt.id if conversation.num_samples > 1 else "",
            asked=asked_digest(prompt, turn),
        )

    def _prompt_ids(self, conversation: _Conversation) -> tuple[str, list[int]]:
        prompt = conversation.prompt
        if self._encoded is None or self._encoded[0] is not prompt or conversation.answers:
            self._encoded = prompt, prompt_ids(prompt, self._tokenizer, conversation.answers)
        return self._encoded[1]

    def _fail_behind(self, conversation: _Conversation) -> None:
        """The turns behind one that failed cannot be asked."""
        failed = len(conversation.answers) + 1
        for turn in range(failed + 1, len(conversation.names) + 1):
            self._fail(_output(conversation, turn, f"turn {failed} before it has no answer"))


def _output(conversation: _Conversation, turn: int, error: str | None) -> RequestOutput:
    """That of ``turn`` before there is an answer, or why there is none: ``error``, after the prompt's line in its file.

    The id is a turn's name, and of samples the prompt's id.
    """
    prompt = conversation.prompt
    return RequestOutput(
        id=conversation.names[turn - 1] if conversation.num_samples == 1 else prompt.id,
        sample=conversation.sample,
        num_samples=conversation.num_samples,
        finish_reason="error",
        turn=turn,
        category=prompt.category,
        endpoint=prompt.endpoint,
        error=f"{prompt.where}: {error}" if error is not None and prompt.where else error,
    )


def first_turns(
    prompts: Iterable[Prompt | Rejected], tokenizer: Tokenizer, sampling: SamplingParams
) -> tuple[list[Request], list[str]]:
    """A request for the first turn of every prompt that can be asked, and why the others cannot: ``id: reason``.

    It is one also where a row asks for several samples. ``UserError`` where there are chats and the tokenizer has no
    template for them.
    """
    prompts = [
        replace(prompt, sampling={**prompt.sampling, "n": 1}) if isinstance(prompt, Prompt) else prompt
        for prompt in prompts
    ]
    if any(isinstance(prompt, Prompt) and prompt.messages for prompt in prompts):
        tokenizer.require_chat_template()
    refused: list[RequestOutput] = []
    turns = Conversations(prompts, tokenizer, sampling, refused.append).first_turns()
    requests = [turn for turn in turns if turn is not None]
    return requests, [failure(output.id, str(output.error)) for output in refused]


def greedy(requests: Iterable[Request]) -> tuple[list[Request], tuple[str, ...]]:
    """``requests`` at temperature 0, for those who compare texts, and a sentence if rows have asked for another."""
    asked = list(requests)
    sampled = sum(request.sampling.temperature > 0 for request in asked)
    rows = "1 row sets a temperature" if sampled == 1 else f"{sampled:,} rows set a temperature"
    note = f"{rows}, which is left out: everything is decoded greedily"
    found = [replace(each, sampling=replace(each.sampling, temperature=0.0)) for each in asked]
    return found, (note,) if sampled else ()


def summarize(outputs: Iterable[RequestOutput]) -> Report:
    """The report of ``outputs``: what `specgen generate` says of the same requests.

    Pooled acceptance by position, category and turn with 95 % intervals over conversations, confidence, latencies. The
    time is from the first request's arrival to the last one's end; of engine steps (``steps``, ``wall``) it knows
    nothing. ``UserError`` for outputs of several K, and where none has an answer.
    """
    found = list(outputs)
    lengths = {output.metrics.num_spec_tokens for output in found if output.metrics is not None}
    require(bool(lengths), f"none of {len(found)} outputs has an answer: there is nothing to summarize")
    require(len(lengths) == 1, f"the outputs are of K = {sorted(lengths)}: summarize those of each K alone")
    rows = [
        replace(
            output.record,
            reason=output.reason,
            category=output.category,
            is_empty=not output.text.strip(),
        )
        for output in found
        if output.record is not None
    ]
    failed = sum(output.error is not None for output in found)
    prompts = (output.prompt for output in found if output.record is not None)
    return replace(report_of(columns.of(rows, lengths.pop(), prompts), (), num_errors=failed), wall=None)
