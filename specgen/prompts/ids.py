"""The ids of the rows of a data set, all different."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from specgen.config import UserError, shown
from specgen.prompts.fields import checked_text

_LONGEST = 512  # characters


class Ids:
    """The ids of the rows so far, for a pass over all of them."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def claim(self, ids: Sequence[str]) -> bool:
        """Whether all ``ids`` are now those of this row: no earlier row has one of them."""
        free = self._taken.isdisjoint(ids)
        if free:
            self._taken.update(ids)
        return free

    def of_rejected(self, row_id: str | None, where: str) -> str:
        """The id of a row that cannot be run: its own, or its place with a suffix if that is taken."""
        if row_id is not None and self.claim([row_id]):
            return row_id
        names = (where if tried == 1 else f"{where} ({tried})" for tried in count(1))
        return next(name for name in names if self.claim([name]))


@dataclass(frozen=True, kw_only=True)
class KnownIds:
    """Those that an earlier pass gave to a row, instead of ``Ids``."""

    ids: Sequence[str]

    def claim(self, ids: Sequence[str]) -> bool:
        return tuple(ids) == tuple(self.ids)

    def of_rejected(self, row_id: str | None, where: str) -> str:
        return self.ids[0]


def id_of(row: Mapping[str, Any], id_keys: Sequence[str]) -> str:
    """The row's own id, or a hash of its content."""
    for key in id_keys:
        if (value := row.get(key)) is not None:
            break
    else:
        # Null is the same as no field: `datasets` fills missing fields with nulls.
        content = {name: field for name, field in row.items() if field is not None}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode())
        return digest.hexdigest()[:16]
    if type(value) not in (str, int):  # not `require`, which would format its message for every row
        raise UserError(f"{key} is {shown(value)}: use a string or a whole number")
    row_id = checked_text(str(value), key)
    if len(row_id) > _LONGEST:
        raise UserError(f"{key} has {len(row_id):,} characters: use at most {_LONGEST}")
    if not row_id.isprintable():
        raise UserError(f"{key} is {shown(row_id)}: use characters that can be printed")
    return row_id
