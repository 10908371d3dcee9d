"""Requests as long as the conversations of a data set: every recorded answer is one, with what was said before it."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from specgen.config import SamplingParams, UserError, require
from specgen.core.sequence import Request
from specgen.events import turn_id
from specgen.prompts import Message, Prompt, Rejected, failure, prompt_ids
from specgen.text.tokenizer import Tokenizer

_PLAIN = SamplingParams()


def recorded_turns(
    prompts: Iterable[Prompt | Rejected],
    tokenizer: Tokenizer,
    longest: int,
    sampling: SamplingParams = _PLAIN,
) -> tuple[list[Request], list[str]]:
    """A request for every turn that has an answer in the data, whose number of tokens it generates whatever they are.

    The turns before it are the data's, its answers too. Of a row that sets ``max_tokens`` itself that is the length.
    And why other rows have no request. ``sampling`` holds the other parameters.
    """
    requests: list[Request] = []
    failures: list[str] = []
    for prompt in prompts:
        if isinstance(prompt, Rejected):
            failures.append(failure(prompt.id, prompt.reason))
            continue
        try:
            turns = list(_turns(prompt, tokenizer))
        except UserError as error:
            failures.append(failure(prompt.id, str(error)))
            continue
        requests += [
            Request(
                id=request_id,
                prompt_token_ids=tuple(token_ids),
                sampling=replace(sampling, max_tokens=min(length, longest), ignore_eos=True, stop=()),
                category=prompt.category,
                turn=turn,
            )
            for turn, (request_id, token_ids, length) in enumerate(turns, start=1)
        ]
    return requests, failures


def _turns(prompt: Prompt, tokenizer: Tokenizer) -> Iterator[tuple[str, list[int], int]]:
    """Id, prompt and length of the answer in tokens of every turn of a row."""
    history: tuple[Message, ...] = prompt.messages
    if "max_tokens" in prompt.sampling:
        yield prompt.id, prompt_ids(prompt, tokenizer, ())[1], int(prompt.sampling["max_tokens"])
        return
    require(
        bool(prompt.recorded),
        "it has no answer whose length to take, nor max_tokens of its own; --output-lens fixed needs neither",
    )
    tokenizer.require_chat_template()
    for at, message in enumerate(prompt.recorded):
        if message.role == "assistant":
            token_ids = tokenizer.encode_rendered(tokenizer.render_chat(history))
            name = turn_id(prompt.id, at // 2 + 1)
            yield name, token_ids, max(1, len(tokenizer.encode_rendered(message.content)))
        history += (message,)
