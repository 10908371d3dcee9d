"""One pass over the prompts before a run: the ids of all requests, and a digest of the input."""

import hashlib
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from specgen.config import require
from specgen.jobs.shard import Shard
from specgen.prompts import Prompt, Rejected

_NUM_FIRST = 2  # prompts to show
_KINDS: Mapping[str, Callable[[Any], Hashable]] = {
    "temperature": bool,
    "top_p": lambda top_p: top_p < 1,
    "top_k": bool,
    "min_p": bool,
    "logit_bias": len,
    "logprobs": int,
}


@dataclass(frozen=True, kw_only=True)
class PromptIndex:
    """The requests of an input."""

    rows: tuple[tuple[str, ...], ...]  # per row of the input the ids of its turns; none outside the shard
    num_requests: int  # of the shard, rejected rows included
    num_prompts: int  # valid ones of the input
    digest: str  # SHA-256 over prompts and rejected rows of the input, in order
    first: tuple[Prompt, ...]  # of the shard
    has_chats: bool
    sampling: tuple[Mapping[str, Any], ...]  # rows' own parameters, one per kind

    @property
    def ids(self) -> tuple[str, ...]:
        """The requests of the shard, in the order of the input."""
        return tuple(chain.from_iterable(self.rows))

    def pending(self, done: Container[str]) -> Iterator[bool]:
        """Per row of the input, whether it belongs to the shard and has a turn that is not ``done``."""
        return (any(turn not in done for turn in turns) for turns in self.rows)


def index_prompts(name: str, prompts: Iterable[Prompt | Rejected], shard: Shard) -> PromptIndex:
    """Read every prompt of the data set ``name`` once; ``UserError`` if none is valid.

    Digest, chats and sampling are those of the whole input, so that all shards agree on them.
    """
    digest, rows, first = hashlib.sha256(), list[tuple[str, ...]](), list[Prompt]()
    sampling: dict[Hashable, Mapping[str, Any]] = {}
    num_rows, num_prompts, has_chats, reason = 0, 0, False, ""
    for num_rows, prompt in enumerate(prompts, start=1):
        ours = shard.holds(num_rows - 1)
        digest.update(repr(prompt).encode())
        rows.append(prompt.turn_ids if ours else ())
        if isinstance(prompt, Rejected):
            reason = reason or prompt.reason
            continue
        num_prompts += 1
        has_chats = has_chats or bool(prompt.messages)
        if prompt.sampling:
            sampling.setdefault(_kind(prompt.sampling), prompt.sampling)
        if ours and len(first) < _NUM_FIRST:
            first.append(prompt)
    require(num_prompts > 0, f"none of the {num_rows} rows of {name} can be run: {reason}")
    return PromptIndex(
        rows=tuple(rows),
        num_requests=sum(map(len, rows)),
        num_prompts=num_prompts,
        digest=digest.hexdigest(),
        first=tuple(first),
        has_chats=has_chats,
        sampling=tuple(sampling.values()),
    )


def _kind(sampling: Mapping[str, Any]) -> Hashable:
    """The part of a row's parameters that decides how much is computed for it; a data set has few kinds."""
    return frozenset((name, kind(sampling[name])) for name, kind in _KINDS.items() if name in sampling)
