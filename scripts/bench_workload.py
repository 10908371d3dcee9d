"""The requests that the GPU benchmark runs: slices of a known text, as long as what people first ask."""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from calibrated_cycle import Cycle

from specgen.config import SamplingParams
from specgen.core.sequence import Completion, Request

SHORTEST, LONGEST = 4, 1024  # tokens of a prompt
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Groups of requests, one group after the other, with at most ``batch`` of them running."""

    batch: int
    groups: tuple[tuple[Request, ...], ...]

    @property
    def requests(self) -> tuple[Request, ...]:
        """All of them, in order."""
        return tuple(request for group in self.groups for request in group)

    @property
    def mean_context(self) -> float:
        """Positions that a decode step of one request attends to, on average over its text."""
        lengths = [len(r.prompt_token_ids) + r.sampling.max_tokens / 2 for r in self.requests]
        return sum(lengths) / len(lengths)

    @classmethod
    def draw(
        cls, batch: int, cycle: Cycle, prompt_lengths: Sequence[int], new_tokens: int, seed: int
    ) -> "Workload":
        """Slices of ``cycle`` of lengths drawn from ``prompt_lengths``; the same for the same seed and batch."""
        rng = random.Random(f"{seed} {batch}")
        sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)

        def request(name: str) -> Request:
            start, length = rng.randrange(len(cycle.tokens)), rng.choice(prompt_lengths)
            return Request(id=name, prompt_token_ids=cycle.slice(start, length), sampling=sampling)

        groups = enumerate(group_sizes(batch))
        return cls(
            batch=batch,
            groups=tuple(tuple(request(f"{group}/{i}") for i in range(size)) for group, size in groups),
        )


def group_sizes(batch: int) -> list[int]:
    """Six single requests, two batches one after the other, or (from 128) two batches in one queue."""
    if batch == 1:
        return [1] * 6
    return [batch] * 2 if batch < 128 else [2 * batch]


def prompt_lengths(sharegpt: Path) -> list[int]:
    """Tokens of each conversation's first turn in a ShareGPT file, at four characters a token, within limits.

    ``ValueError`` for a file that is something else.
    """
    rows = json.loads(sharegpt.read_text(encoding="utf-8"))
    try:
        turns = [row["conversations"][0]["value"] for row in rows if row["conversations"]]
        lengths = [len(turn) // CHARACTERS_PER_TOKEN for turn in turns]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{sharegpt} is not in ShareGPT's format ({error!r}): give a list of conversations"
        ) from error
    if not lengths:
        raise ValueError(f"{sharegpt} has no conversations: give a file with at least one")
    return [min(max(length, SHORTEST), LONGEST) for length in lengths]


def num_wrong(cycle: Cycle, completions: Iterable[Completion]) -> int:
    """Tokens that are not the known text's, missing and surplus ones among them."""
    wrong = 0
    for completion in completions:
        request = completion.request
        text = cycle.after(request.prompt_token_ids[-1], request.sampling.max_tokens)
        wrong += sum(ours != known for ours, known in zip_longest(completion.token_ids, text))
    return wrong
