"""What a user may not have meant of own rows, counted for a warning: misspelt fields, and what rows were read as."""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from specgen.errors import shown
from specgen.prompts.kinds import kind_of
from specgen.prompts.openai_batch import is_batch
from specgen.prompts.own import CONTENT_FIELDS
from specgen.prompts.row_sampling import SAMPLING_FIELDS
from specgen.spelling import nearest

_MEANT = (*CONTENT_FIELDS, *SAMPLING_FIELDS)  # what changes a text
_KNOWN = frozenset((*_MEANT, "id", "custom_id", "category"))
_LIKENESS = 0.82  # finds temprature and max_new_tokens, not the fields of data sets such as prompt_id
_LONGEST = 64  # characters of a name that is compared
_MOST = 16  # names
TEXT = "a text without fields: taken as it is, without the chat template"


class Notes:
    """How many rows have each field whose name is near a known one, and how many were read in a recognised way.

    Other fields are a data set's own.
    """

    def __init__(self) -> None:
        self._misspelt: Counter[str] = Counter()
        self._read_as: Counter[str] = Counter()

    def see(self, row: Mapping[str, Any] | str, *, by_kind: bool) -> None:
        """Count one row; ``by_kind`` unless the user has said how it is read."""
        if isinstance(row, str):
            self._read_as[TEXT] += by_kind
            return
        if is_batch(row):
            return  # refuses unknown names
        if by_kind and (note := kind_of(row).note):
            self._read_as[note] += 1
        for name in row:
            if (
                name not in _KNOWN
                and _meant(name) is not None
                and (name in self._misspelt or len(self._misspelt) < _MOST)
            ):
                self._misspelt[name] += 1

    def clear(self) -> None:
        self._misspelt.clear()
        self._read_as.clear()

    def sentences(self) -> Iterator[str]:
        """One for each such name and each way of reading."""
        for name, number in self._misspelt.items():
            rows = "1 row has" if number == 1 else f"{number:,} rows have"
            yield f"{rows} a field {shown(name)}, which is ignored: did you mean {_meant(name)}?"
        for note, number in self._read_as.items():
            if number:
                rows = "1 row is" if number == 1 else f"{number:,} rows are"
                yield f"{rows} {note} (--prompt-field, --chat and --raw say otherwise)"


@lru_cache(maxsize=1024)
def _meant(name: str) -> str | None:
    return nearest(name, _MEANT, likeness=_LIKENESS) if len(name) <= _LONGEST else None
