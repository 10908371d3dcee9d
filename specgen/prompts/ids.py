"""What a row is called, and which row of a data set has which id."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from specgen.config import UserError, require, shown
from specgen.prompts.fields import checked_text

_LONGEST = 512


class Ids:
    """The ids that are taken, each by the first row that asks, who may ask again; a million are 130 MB."""

    def __init__(self) -> None:
        self._owners: dict[bytes, int] = {}  # by digest: the number of the row

    def take(self, ids: Iterable[str], number: int) -> bool:
        """Take ``ids`` for row ``number``, if no other row has one of them."""
        digests = [hashlib.blake2b(row_id.encode(), digest_size=16).digest() for row_id in ids]
        free = all(self._owners.get(digest, number) == number for digest in digests)
        if free:
            self._owners.update(dict.fromkeys(digests, number))
        return free

    def take_place(self, where: str, number: int) -> str:
        """``where`` as an id, with a number behind it if another row calls itself so."""
        names = (where if tried == 1 else f"{where} ({tried})" for tried in count(1))
        return next(name for name in names if self.take([name], number))


def id_of(row: Mapping[str, Any], id_keys: Sequence[str]) -> str:
    """The row's own id, or where it has none a hash of its content, which is the same in every run."""
    key = next((key for key in id_keys if row.get(key) is not None), None)
    if key is None:
        # A field without a value is the same as no field: tables of `datasets` fill the gaps.
        content = {name: field for name, field in row.items() if field is not None}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode())
        return digest.hexdigest()[:16]
    value = row[key]
    if type(value) not in (str, int):  # words for a row that needs none would be most of what a pass costs
        raise UserError(f"{key} is {shown(value)}: use a string or a whole number")
    row_id = checked_text(str(value), key)
    require(len(row_id) <= _LONGEST, f"{key} has {len(row_id):,} characters: use at most {_LONGEST}")
    if not row_id.isprintable():
        raise UserError(f"{key} is {shown(row_id)}: use characters that can be printed")
    return row_id
