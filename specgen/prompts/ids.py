"""The ids of the rows of a data set, all different."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from specgen.config import UserError, require, shown
from specgen.prompts.fields import checked_text

_LONGEST = 512  # characters


class Ids:
    """The ids in use, each by the first row that claims it, which may claim it again; 130 MB per million ids."""

    def __init__(self) -> None:
        self._owners: dict[bytes, int] = {}  # row number by digest of the id

    def claim(self, ids: Iterable[str], number: int) -> bool:
        """Whether all ``ids`` are now those of row ``number``: no other row has one of them."""
        digests = [hashlib.blake2b(row_id.encode(), digest_size=16).digest() for row_id in ids]
        free = all(self._owners.get(digest, number) == number for digest in digests)
        if free:
            self._owners.update(dict.fromkeys(digests, number))
        return free

    def claim_location(self, where: str, number: int) -> str:
        """``where`` as an id of row ``number``, with a suffix if another row has that id."""
        names = (where if tried == 1 else f"{where} ({tried})" for tried in count(1))
        return next(name for name in names if self.claim([name], number))


def id_of(row: Mapping[str, Any], id_keys: Sequence[str]) -> str:
    """The row's own id, or a hash of its content."""
    key = next((key for key in id_keys if row.get(key) is not None), None)
    if key is None:
        # Null is the same as no field: `datasets` fills missing fields with nulls.
        content = {name: field for name, field in row.items() if field is not None}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode())
        return digest.hexdigest()[:16]
    value = row[key]
    if type(value) not in (str, int):  # not `require`, which would format its message for every row
        raise UserError(f"{key} is {shown(value)}: use a string or a whole number")
    row_id = checked_text(str(value), key)
    require(len(row_id) <= _LONGEST, f"{key} has {len(row_id):,} characters: use at most {_LONGEST}")
    if not row_id.isprintable():
        raise UserError(f"{key} is {shown(row_id)}: use characters that can be printed")
    return row_id
