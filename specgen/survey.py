"""One pass over the prompts before a run: which requests there will be, and a digest that knows them again."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from specgen.config import require
from specgen.prompts import Prompt, Rejected
from specgen.shard import Shard

_FIRST = 2  # prompts to show


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a pass over the prompts has found."""

    ids: tuple[str, ...]  # of all turns and of rejected rows of the shard, in the order of the input
    num_prompts: int  # of the input, that can be run
    digest: str  # SHA-256 over prompts and rejected rows of the input in their order
    first: tuple[Prompt, ...]  # of the shard
    has_chats: bool


def survey(name: str, prompts: Iterable[Prompt | Rejected], shard: Shard) -> Survey:
    """Look at every prompt of the data set ``name`` once; ``ValueError`` where none can be run.

    What is no matter of ``shard`` alone is told of the whole input, so that all shards agree on it.
    """
    digest, ids, first = hashlib.sha256(), list[str](), list[Prompt]()
    num_rows, num_prompts, has_chats, reason = 0, 0, False, ""
    for num_rows, prompt in enumerate(prompts, start=1):
        ours = shard.holds(num_rows - 1)
        digest.update(repr(prompt).encode())
        if ours:
            ids.extend(prompt.turn_ids)
        if isinstance(prompt, Rejected):
            reason = reason or prompt.reason
            continue
        num_prompts += 1
        has_chats = has_chats or bool(prompt.messages)
        if ours and len(first) < _FIRST:
            first.append(prompt)
    require(num_prompts > 0, f"none of the {num_rows} rows of {name} can be run: {reason}")
    return Survey(
        ids=tuple(ids),
        num_prompts=num_prompts,
        digest=digest.hexdigest(),
        first=tuple(first),
        has_chats=has_chats,
    )
