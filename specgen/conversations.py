"""Prompts become requests, answers become the context of the next turn, and both become rows of the results."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from specgen.config import SamplingParams
from specgen.prompts import Prompt, Rejected, prompt_ids
from specgen.sequence import Completion, Request
from specgen.tokenizer import StopStrings, Tokenizer


@dataclass(kw_only=True, eq=False)
class _Conversation:
    prompt: Prompt
    answers: list[str] = field(default_factory=list)
    asked: str = ""  # the text of the turn that is running


class Conversations:
    """All prompts of a run; the engine is asked turn by turn. ``reject`` is told of turns that cannot be asked."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        reject: Callable[[Rejected], None],
    ) -> None:
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._reject = reject
        self._open: dict[str, _Conversation] = {}

    @property
    def ids(self) -> list[str]:
        """Ids of all requests, in the order of the input."""
        return [
            turn_id(prompt, turn) for prompt in self._prompts for turn in range(1, len(prompt.follow_ups) + 2)
        ]

    def first_turns(self) -> Iterator[Request]:
        """A request for every prompt that can be asked."""
        for prompt in self._prompts:
            request = self._ask(_Conversation(prompt=prompt))
            if request is not None:
                yield request

    def follow_up(self, completion: Completion) -> Request | None:
        """The next turn of the conversation that ``answer`` has just taken a completion for, if it has one."""
        conversation = self._open.pop(completion.request.id)
        over = len(conversation.answers) > len(conversation.prompt.follow_ups)
        if over or completion.finish_reason == "error":
            return None
        return self._ask(conversation)

    def answer(self, completion: Completion) -> dict[str, Any]:
        """Take in a completion; returns its row of ``completions.jsonl``."""
        request = completion.request
        conversation = self._open[request.id]
        text = StopStrings(self._tokenizer, request.sampling.stop).text(completion.token_ids)
        conversation.answers.append(text)
        row: dict[str, Any] = {
            "id": request.id,
            "prompt": conversation.asked,
            "text": text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "turn": request.turn,
            "num_prompt_tokens": len(request.prompt_token_ids),
        }
        if request.category is not None:
            row["category"] = request.category
        if completion.error is not None:
            row["error"] = completion.error
        return row

    def _ask(self, conversation: _Conversation) -> Request | None:
        prompt, turn = conversation.prompt, len(conversation.answers) + 1
        try:
            conversation.asked, token_ids = prompt_ids(prompt, self._tokenizer, conversation.answers)
        except ValueError as error:
            self._reject(Rejected(id=turn_id(prompt, turn), reason=str(error)))
            return None
        request = Request(
            id=turn_id(prompt, turn),
            prompt_token_ids=tuple(token_ids),
            sampling=self._sampling,
            category=prompt.category,
            turn=turn,
        )
        self._open[request.id] = conversation
        return request


def turn_id(prompt: Prompt, turn: int) -> str:
    """The id of one turn's request: the prompt's own, and from the second turn on with the turn behind it."""
    return prompt.id if turn == 1 else f"{prompt.id}/turn-{turn}"


def rejected_row(rejected: Rejected) -> dict[str, Any]:
    """The row of ``completions.jsonl`` for a row of the input that cannot be run."""
    return {
        "id": rejected.id,
        "prompt": "",
        "text": "",
        "token_ids": [],
        "finish_reason": "error",
        "error": rejected.reason,
    }
