"""One pass over the prompts before a run: which requests there will be, and a digest that knows them again."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from specgen.config import require
from specgen.prompts import Prompt, Rejected

_FIRST = 2  # prompts to show


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a pass over the prompts has found."""

    ids: tuple[str, ...]  # of all turns and of rejected rows, in the order of the input
    num_prompts: int  # that can be run
    digest: str  # SHA-256 over prompts and rejected rows in their order
    first: tuple[Prompt, ...]
    has_chats: bool


def survey(name: str, prompts: Iterable[Prompt | Rejected]) -> Survey:
    """Look at every prompt of the data set ``name`` once; ``ValueError`` where none can be run."""
    digest, ids, first = hashlib.sha256(), list[str](), list[Prompt]()
    num_prompts, has_chats, reason = 0, False, ""
    for prompt in prompts:
        digest.update(repr(prompt).encode())
        if isinstance(prompt, Rejected):
            ids.append(prompt.id)
            reason = reason or prompt.reason
            continue
        ids.extend(prompt.turn_ids)
        num_prompts += 1
        has_chats = has_chats or bool(prompt.messages)
        if num_prompts <= _FIRST:
            first.append(prompt)
    require(num_prompts > 0, f"none of the {len(ids)} rows of {name} can be run: {reason}")
    return Survey(
        ids=tuple(ids),
        num_prompts=num_prompts,
        digest=digest.hexdigest(),
        first=tuple(first),
        has_chats=has_chats,
    )
