"""Fields of own rows that nobody reads and that look like misspelt ones, counted for a warning."""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache

from specgen.errors import shown
from specgen.prompts.own import CONTENT_FIELDS
from specgen.prompts.row_sampling import SAMPLING_FIELDS
from specgen.spelling import nearest

_MEANT = (*CONTENT_FIELDS, *SAMPLING_FIELDS)  # what changes a text
_KNOWN = frozenset((*_MEANT, "id", "custom_id", "category"))
_LIKENESS = 0.82  # finds temprature and max_new_tokens, not the fields of data sets such as prompt_id
_LONGEST = 64  # characters of a name that is compared
_MOST = 16  # names


class UnknownFields:
    """How many rows have each field whose name is near a known one; other fields are a data set's own."""

    def __init__(self) -> None:
        self._rows: Counter[str] = Counter()

    def see(self, names: Iterable[str]) -> None:
        """Count the fields of one row."""
        for name in names:
            if (
                name not in _KNOWN
                and _meant(name) is not None
                and (name in self._rows or len(self._rows) < _MOST)
            ):
                self._rows[name] += 1

    def clear(self) -> None:
        self._rows.clear()

    def sentences(self) -> Iterator[str]:
        """One for each such name."""
        for name, number in self._rows.items():
            rows = "1 row has" if number == 1 else f"{number:,} rows have"
            yield f"{rows} a field {shown(name)}, which is ignored: did you mean {_meant(name)}?"


@lru_cache(maxsize=1024)
def _meant(name: str) -> str | None:
    return nearest(name, _MEANT, likeness=_LIKENESS) if len(name) <= _LONGEST else None
