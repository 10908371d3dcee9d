"""The deterministic requests of a bench: turns of a data set, or random tokens."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specgen.bench.known_text import KnownText
from specgen.bench.matrices import RANDOM, Workload
from specgen.bench.traffic import recorded_turns
from specgen.config import EngineConfig, SamplingParams, require
from specgen.core import step_costs
from specgen.core.sequence import Request
from specgen.engine.conversations import first_turns
from specgen.engine.generation_config import GenerationConfig
from specgen.engine.loading import Models
from specgen.engine.memory import kv_page_bytes
from specgen.prompts import open_prompts

_WARM_UP = 192  # positions per sequence during warm-up
_SHOWN = 3  # reasons in an error
_NOTHING = GenerationConfig()


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The requests, how they were made, and what was left out."""

    requests: tuple[Request, ...]
    description: str
    notes: tuple[str, ...]


def make_prompts(
    workload: Workload,
    models: Models,
    data_path: Path | None,
    count: int,
    said: GenerationConfig = _NOTHING,
) -> Prompts:
    """``count`` greedy requests, repeated if the data set has fewer; ``UserError`` if none can run.

    For synthetic weights prompts have the lengths of the data set's and random tokens of the known text, or else of the
    vocabulary (a head's, if there is one); random prompts ignore EOS, so their texts have ``max_new_tokens``. Others
    have what the checkpoint has ``said`` of generating.
    """
    if workload.dataset == RANDOM:
        require(data_path is None, f"data-path is {data_path} but prompts are random: name a data set")
        lengths = [(workload.prompt_tokens, workload.max_new_tokens)] * count
        return Prompts(
            requests=_random(lengths, models),
            description=f"{count} of {workload.prompt_tokens} random tokens",
            notes=(),
        )
    prompts = open_prompts(workload.dataset, data_path=data_path, num_prompts=count, how=workload.how)
    if workload.output_lens == "data":
        asked, failures = recorded_turns(
            prompts, models.tokenizer, workload.max_new_tokens, said.over(SamplingParams())
        )
        turns = "turns"
    else:
        sampling = said.over(SamplingParams(max_tokens=workload.max_new_tokens))
        asked, failures = first_turns(prompts, models.tokenizer, sampling)
        turns = "first turns"
    requests, notes = _fitting(asked, models, workload)
    notes += _in_short(failures)
    require(bool(requests), f"no prompt of {workload.dataset} can run: {'; '.join(notes[:_SHOWN])}")
    description = f"{count} of {min(len(requests), count)} {turns} of {workload.dataset}"
    requests = _filled(requests, count)
    if models.synthetic:
        lengths = [(len(request.prompt_token_ids), request.sampling.max_tokens) for request in requests]
        requests, description = _random(lengths, models), f"random tokens, as long as {description}"
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
    """Bytes of KV pages for the longest requests that can be in the batch together."""
    least = step_costs.positions(config.draft_length.most) if config.draft_length.auto else _WARM_UP
    lengths = sorted(
        (max(len(r.prompt_token_ids) + r.sampling.max_tokens, least) for r in requests), reverse=True
    )
    longest = [length + config.draft_length.most + 1 for length in lengths[: config.max_batch_size]]
    return sum(-(-length // config.page_size) for length in longest) * kv_page_bytes(config, models)
