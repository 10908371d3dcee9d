"""One pass over the prompts before a run: ids of the shard, and a digest of the input."""

import hashlib
import json
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from specgen.config import SamplingParams, UserError, first_line, require, shown
from specgen.jobs.shards import Shard
from specgen.prompts import Prompt, Rejected, content_of
from specgen.prompts.prompt import sample_ids, several_turns
from specgen.record.files import sample_id

REQUESTS = "requests.jsonl"  # of a shard: one line per input row, with the ids of its turns


def read_requests(path: Path) -> Iterator[list[str]]:
    """The rows of a ``REQUESTS`` file, which give ``merge`` the order; ``UserError`` for a corrupt one."""
    with path.open("rb") as lines:
        try:
            yield from map(json.loads, lines)
        except ValueError as error:
            reason = first_line(error)
            raise UserError(
                f"{path} is not JSON lines ({reason}): copy the directory as it was left"
            ) from error


_ONE_EACH = SamplingParams()
_STRIDE = 1000  # rows between two calls of ``seen``
# Fields of which the number of elements, or the number itself, decides how much is computed
_SIZED, _COUNTED = ("logit_bias", "suppress_tokens", "stop_token_ids"), ("logprobs", "prompt_logprobs")


@dataclass(frozen=True, kw_only=True)
class PromptIndex:
    """The requests of an input."""

    # per row of the input the names of its turns or samples; none outside the shard
    rows: tuple[tuple[str, ...], ...]
    num_requests: int  # of the shard, rejected rows included
    num_prompts: int  # valid ones of the input
    digest: str  # SHA-256 over prompts and rejected rows of the input, in order
    has_chats: bool
    sampling: tuple[Mapping[str, Any], ...]  # rows' own parameters, one per kind

    @property
    def ids(self) -> tuple[str, ...]:
        """The requests of the shard, in the order of the input."""
        return tuple(chain.from_iterable(self.rows))

    @property
    def num_conversations(self) -> int:
        """How many requests of the shard can run at once, at least 1: the turns of a prompt follow each other."""
        of_samples = (
            len(each) if each[-1] == sample_id(each[0], len(each) - 1) else 1 for each in self.rows if each
        )
        return max(sum(of_samples), 1)

    @property
    def own_parameters(self) -> tuple[str, ...]:
        """The sampling parameters that rows set themselves."""
        return tuple(sorted({name for row in self.sampling for name in row}))

    def pending(self, done: Container[str]) -> Iterator[Sequence[str]]:
        """Per row of the input its ids if it belongs to the shard and has a turn that is not ``done``, else none."""
        return (turns if any(turn not in done for turn in turns) else () for turns in self.rows)


def index_prompts(
    name: str,
    prompts: Iterable[Prompt | Rejected],
    shard: Shard,
    seen: Callable[[int], None] = lambda num_rows: None,
    asked: SamplingParams = _ONE_EACH,
) -> PromptIndex:
    """Read every prompt of the data set ``name`` once; ``UserError`` if none is valid.

    Digest, chats and sampling are those of the whole input, so that all shards agree on them. ``asked`` says how many
    samples a prompt has that does not say so itself; ``UserError`` if that is several and one has follow-up turns, and
    where a sample has the name of a row. ``seen`` receives the number of rows so far, now and then.
    """
    digest, rows, reason = hashlib.sha256(), list[tuple[str, ...]](), ""
    sampling: dict[Hashable, Mapping[str, Any]] = {}
    num_prompts, has_chats, like, num_samples, odd = 0, False, None, dict[str, int](), list[str]()
    for row, result in enumerate(prompts):
        names = sample_ids(result, asked)
        rows.append(names if shard.holds(row) else ())
        if len(names) > 1:
            num_samples[result.id] = len(names)
        if "/sample-" in result.id:
            odd.append(result.id)
        digest.update(content_of(result))
        if isinstance(result, Rejected):
            reason = reason or result.reason
        else:
            num_prompts += 1
            if result.follow_ups and result.sampling.get("n", asked.n) > 1:
                raise UserError(f"{result.where or shown(result.id)}: {several_turns(asked.n)}")
            has_chats = has_chats or bool(result.messages)
            if result.sampling and result.sampling is not like:  # rows that say the same share one object
                sampling.setdefault(_kind(result.sampling), result.sampling)
                like = result.sampling
        if len(rows) % _STRIDE == 0:
            seen(len(rows))
    for each in odd:
        prompt, _, number = each.rpartition("/sample-")
        taken = number.isascii() and number.isdecimal() and each == sample_id(prompt, int(number))
        require(
            not taken or int(number) >= num_samples.get(prompt, 1),
            f"{shown(each)} is a row of {name} and sample {number} of {shown(prompt)}: give the row another id",
        )
    require(num_prompts > 0, f"none of the {len(rows)} rows of {name} can be run: {reason}")
    return PromptIndex(
        rows=tuple(rows),
        num_requests=sum(map(len, rows)),
        num_prompts=num_prompts,
        digest=digest.hexdigest(),
        has_chats=has_chats,
        sampling=tuple(sampling.values()),
    )


def _kind(sampling: Mapping[str, Any]) -> Hashable:
    """Which parameters a row has, and what of them decides how much is computed for it; a data set has few kinds."""
    return frozenset(
        (
            name,
            len(value)
            if name in _SIZED
            else value
            if name in _COUNTED
            else value != getattr(_ONE_EACH, name),
        )
        for name, value in sampling.items()
    )
