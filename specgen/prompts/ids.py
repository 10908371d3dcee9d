"""The ids of the rows of a data set, all different."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from specgen.config import UserError, shown
from specgen.prompts.fields import checked_text
from specgen.prompts.prompt import turn_ids

_LONGEST = 512  # characters


class Ids:
    """The ids of the rows so far, for a pass over all of them."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._copies: dict[str, int] = {}  # of rows with one content, the last number

    def claim(self, ids: Sequence[str]) -> bool:
        """Whether all ``ids`` are now those of this row: no earlier row has one of them."""
        free = self._taken.isdisjoint(ids)
        if free:
            self._taken.update(ids)
        return free

    def of_content(self, digest: str) -> str:
        """The id of a row without one: the first with its content has ``digest``, the next ``digest-2``, ..."""
        if digest not in self._taken:
            return digest
        numbers = count(self._copies.get(digest, 1) + 1)
        self._copies[digest] = next(n for n in numbers if f"{digest}-{n}" not in self._taken)
        return f"{digest}-{self._copies[digest]}"

    def of_rejected(self, row_id: str | None, where: str, num_turns: int) -> str:
        """The id of a row that cannot be run: its own, with its place if that is taken, or its place alone."""
        if row_id is not None and self.claim(turn_ids(row_id, num_turns)):
            return row_id
        place = where if row_id is None else f"{row_id} ({where})"
        names = (place if tried == 1 else f"{place} ({tried})" for tried in count(1))
        return next(name for name in names if self.claim(turn_ids(name, num_turns)))


@dataclass(frozen=True, kw_only=True)
class KnownIds:
    """Those that an earlier pass gave to a row, instead of ``Ids``."""

    ids: Sequence[str]

    def claim(self, ids: Sequence[str]) -> bool:
        return tuple(ids) == tuple(self.ids)

    def of_content(self, digest: str) -> str:
        return self.ids[0]

    def of_rejected(self, row_id: str | None, where: str, num_turns: int) -> str:
        return self.ids[0]


def digest_of(row: Mapping[str, Any]) -> str:
    """A hash of the content of ``row``. Null is the same as no field: `datasets` fills missing fields with nulls."""
    content = {name: field for name, field in row.items() if field is not None}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def own_id(row: Mapping[str, Any], id_keys: Sequence[str]) -> str | None:
    """The row's own id, if it has one."""
    for key in id_keys:
        if (value := row.get(key)) is not None:
            break
    else:
        return None
    if type(value) is str and value.isprintable() and len(value) <= _LONGEST and value.strip():
        return value
    if type(value) not in (str, int):  # not `require`, which would format its message for every row
        raise UserError(f"{key} is {shown(value)}: use a string or a whole number")
    row_id = checked_text(str(value), key)
    if len(row_id) > _LONGEST:
        raise UserError(f"{key} has {len(row_id):,} characters: use at most {_LONGEST}")
    if not row_id.isprintable():
        raise UserError(f"{key} is {shown(row_id)}: use characters that can be printed")
    return row_id
