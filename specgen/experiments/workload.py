"""The deterministic requests of a bench: turns of a data set, or random tokens."""

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Self

from specgen.config import EngineConfig, SamplingParams, UserError, require
from specgen.config.json_fields import load_json
from specgen.core.sequence import Completion, Request
from specgen.engine import step_costs
from specgen.engine.build import page_budget, state_bytes
from specgen.engine.conversations import first_turns, greedy
from specgen.engine.generation_config import GenerationConfig
from specgen.engine.loading import Models
from specgen.experiments.tune_job import RANDOM, Workload
from specgen.prompts import Message, Prompt, Rejected, failure, prompt_ids
from specgen.prompts.load import RAW
from specgen.record.record_rows import turn_id
from specgen.report.display import several
from specgen.text.tokenizer import Tokenizer

_WARM_UP = 192  # positions per sequence during warm-up
_SHOWN = 3  # reasons in an error
_NOTHING = GenerationConfig()


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The requests, how they were made, and what was left out."""

    requests: tuple[Request, ...]
    description: str
    notes: tuple[str, ...]

    def ignoring_eos(self) -> Self:
        """These prompts, with as many new tokens as are asked for."""
        requests = (
            replace(request, sampling=replace(request.sampling, ignore_eos=True)) for request in self.requests
        )
        return replace(self, requests=tuple(requests))


def make_prompts(
    workload: Workload,
    models: Models,
    count: int,
    generation_defaults: GenerationConfig = _NOTHING,
) -> Prompts:
    """``count`` greedy requests, repeated if the data set has fewer; ``UserError`` if none can run.

    For synthetic weights prompts have the lengths of the data set's and random tokens of the known text, or else of the
    vocabulary (a head's, if there is one); random prompts ignore EOS, so their texts have ``max_new_tokens``. Others
    have the checkpoint's ``generation_defaults``.
    """
    if workload.dataset == RANDOM:
        lengths = [(workload.prompt_tokens, workload.max_new_tokens)] * count
        return Prompts(
            requests=_random(lengths, models),
            description=f"{several(count, 'prompt')} of {workload.prompt_tokens} random tokens",
            notes=(),
        )
    opened = replace(workload, num_prompts=count).open()
    prompts = list(opened)
    if workload.output_lens == "data":
        asked, failures = recorded_turns(
            prompts, models.tokenizer, workload.max_new_tokens, generation_defaults.over(SamplingParams())
        )
        turns = "turns"
    else:
        sampling = generation_defaults.over(SamplingParams(max_tokens=workload.max_new_tokens))
        asked, failures = first_turns(prompts, models.tokenizer, sampling)
        turns = "first turns"
    asked, sampled = greedy(asked)
    requests, notes = _fitting(asked, models, workload)
    notes += (*opened.notes.sentences(), *sampled, *_in_short(failures))
    require(bool(requests), f"no prompt of {workload.dataset} can run: {'; '.join(notes[:_SHOWN])}")
    again = f", repeated to {count}" if len(requests) < count else ""
    description = f"{min(len(requests), count)} {turns} of {workload.dataset}{again}"
    requests = _filled(requests, count)
    if models.synthetic:
        lengths = [(len(request.prompt_token_ids), request.sampling.max_tokens) for request in requests]
        requests, description = _random(lengths, models), f"random tokens, as long as {description}"
    elif workload.output_lens == "fixed" and models.tokenizer.chat_template and opened.are_raw(prompts):
        notes += (RAW,)
    return Prompts(requests=requests, description=description, notes=notes)


def _in_short(failures: Sequence[str]) -> tuple[str, ...]:
    """A note for each failure; where there are many, the first of them and their number."""
    rest = len(failures) - _SHOWN
    more = (f"left out: {rest} more rows",) if rest > 0 else ()
    return tuple(f"left out: {each}" for each in failures[:_SHOWN]) + more


def _fitting(
    requests: list[Request], models: Models, workload: Workload
) -> tuple[tuple[Request, ...], tuple[str, ...]]:
    """The requests that fit the model's context with their new tokens, and a note on the others."""
    limit = models.target.config.max_positions
    fitting = tuple(r for r in requests if len(r.prompt_token_ids) + r.sampling.max_tokens <= limit)
    missing = len(requests) - len(fitting)
    new = (
        "their answers' tokens" if workload.output_lens == "data" else f"{workload.max_new_tokens} new tokens"
    )
    note = f"left out: {missing} prompts that with {new} exceed a context of {limit}"
    return fitting, (note,) if missing else ()


def _filled(requests: tuple[Request, ...], count: int) -> tuple[Request, ...]:
    """``count`` requests, repeated under new ids if they are too few."""
    rounds = ((number, request) for number in itertools.count() for request in requests)
    return tuple(
        replace(request, id=f"{request.id} again {number}") if number else request
        for number, request in itertools.islice(rounds, count)
    )


def _random(lengths: Sequence[tuple[int, int]], models: Models) -> tuple[Request, ...]:
    """A request per pair of prompt length and output length, in tokens."""
    known, head = KnownText.of(models), models.head
    vocabulary: Sequence[int] = range(models.target.config.vocab_size)
    if known is not None:
        vocabulary = sorted(known.follower)  # other tokens have no known follower
    elif head is not None:
        vocabulary = head.draft_to_target.tolist()
    rng = random.Random(0)
    return tuple(
        Request(
            id=f"random {index}",
            prompt_token_ids=tuple(rng.choices(vocabulary, k=length)),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        for index, (length, max_tokens) in enumerate(lengths)
    )


def kv_bytes(config: EngineConfig, models: Models, requests: Sequence[Request]) -> int:
    """Bytes of KV pages for the longest requests that can be in the batch together, and of states for the batch."""
    least = step_costs.positions(config) if config.draft_length.auto else _WARM_UP
    lengths = sorted(
        (max(len(r.prompt_token_ids) + r.sampling.max_tokens, least) for r in requests), reverse=True
    )
    budget = page_budget(config, models)
    pages = budget.for_sequences(lengths[: config.max_batch_size])
    return budget.bytes_with(pages) + state_bytes(config, models.target.config, config.max_batch_size)


@dataclass(frozen=True, kw_only=True)
class KnownText:
    """A cycle of tokens: each one determines the next."""

    follower: Mapping[int, int]
    accept: float  # share of the tokens whose follower the drafter knows
    max_positions: int  # of prompt and text

    @classmethod
    def of(cls, models: Models) -> "KnownText | None":
        """The known text of ``models``; None without one, or if the drafter's own vocabulary has other tokens."""
        file = models.checkpoints["model"].path.resolve().parent / "cycle.json"
        if not (models.synthetic and file.is_file()):
            return None
        cycle = load_json(file, "make the pair again")
        tokens, head = cycle["tokens"], models.head
        vocabulary = tokens  # of the drafts, where that is a part of the target's
        if head is not None and head.config.draft_vocab_size < head.config.vocab_size:
            vocabulary = head.draft_to_target.tolist()
        if not set(vocabulary) <= set(tokens):
            return None
        return cls(
            follower=dict(zip(tokens, [*tokens[1:], tokens[0]], strict=True)),
            accept=cycle["accept"],
            max_positions=models.target.config.max_positions,
        )

    def num_wrong(self, completions: Iterable[Completion]) -> int:
        """Tokens that differ from the known text, missing and surplus ones included."""
        wrong = 0
        for completion in completions:
            prompt, token_ids = completion.request.prompt_token_ids, completion.token_ids
            length = min(completion.request.sampling.max_tokens, self.max_positions - len(prompt))
            text = [self.follower[prompt[-1]]]
            while len(text) < length:
                text.append(self.follower[text[-1]])
            wrong += sum(ours != known for ours, known in zip_longest(token_ids, text))
        return wrong


def recorded_turns(
    prompts: Iterable[Prompt | Rejected], tokenizer: Tokenizer, longest: int, sampling: SamplingParams
) -> tuple[list[Request], list[str]]:
    """A request for every turn that has an answer in the data, whose number of tokens it generates whatever they are.

    The turns before it are the data's, its answers too. Of a row that sets ``max_tokens`` itself that is the length.
    And why other rows have no request. ``sampling`` holds the other parameters.
    """
    requests: list[Request] = []
    failures: list[str] = []
    only_its_length = replace(
        sampling, ignore_eos=True, stop=(), stop_token_ids=(), min_tokens=0
    )  # ends a text
    for prompt in prompts:
        if isinstance(prompt, Rejected):
            failures.append(failure(prompt.id, prompt.reason))
            continue
        try:
            requests += [
                Request(
                    id=name,
                    prompt_token_ids=tuple(token_ids),
                    sampling=replace(only_its_length, max_tokens=min(length, longest)),
                    category=prompt.category,
                    turn=turn,
                )
                for turn, (name, token_ids, length) in enumerate(_turns(prompt, tokenizer), start=1)
            ]
        except UserError as error:
            failures.append(failure(prompt.id, str(error)))
    return requests, failures


def _turns(prompt: Prompt, tokenizer: Tokenizer) -> Iterator[tuple[str, list[int], int]]:
    """Id, prompt and length of the answer in tokens of every turn of a row."""
    history: tuple[Message, ...] = prompt.messages
    if "max_tokens" in prompt.sampling:
        yield prompt.id, prompt_ids(prompt, tokenizer, ())[1], int(prompt.sampling["max_tokens"])
        return
    require(
        bool(prompt.recorded),
        "it has no answer whose length to take, nor max_tokens; --output-lens fixed needs neither",
    )
    tokenizer.require_chat_template()
    for at, message in enumerate(prompt.recorded):
        if message.role == "assistant":
            token_ids = tokenizer.encode_rendered(tokenizer.render_chat(history))
            name = turn_id(prompt.id, at // 2 + 1)
            yield name, token_ids, max(1, len(tokenizer.encode_rendered(message.text)))
        history += (message,)
