"""Small JSON files in the user's cache directory, shared by runs; any of them may be lost or damaged."""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from specgen.storage import cache_directory

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CacheFiles:
    """Those of one ``kind``, by key; ``what`` each of them holds is named in the log."""

    kind: str
    what: str

    def _file(self, key: bytes) -> Path:
        return cache_directory(self.kind) / f"{hashlib.sha256(key).hexdigest()}.json"

    def read(self, key: bytes, check: Callable[[Any], T | None]) -> T | None:
        """What ``check`` makes of the JSON kept for ``key``; None where there is no file.

        ``check`` gives None, or raises, for what was not written there: that costs a line in the log.
        """
        file = self._file(key)
        try:
            found = check(json.loads(file.read_bytes()))
            if found is not None:
                return found
            reason = "it is not what was written there"
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
        _log(f"{self.what} kept in {file} not used ({reason})")
        return None

    def write(self, key: bytes, value: object) -> None:
        """Replace the file of ``key`` as a whole; where it cannot be written, that costs a line in the log."""
        file = self._file(key)
        mine = file.with_suffix(f".{os.getpid()}")  # another process may write at the same time
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            mine.write_text(json.dumps(value))
            os.replace(mine, file)
        except OSError as error:
            with suppress(OSError):
                mine.unlink(missing_ok=True)
            _log(f"{self.what} cannot be kept in {file} ({error.strerror})")

    def forget(self) -> None:
        """Remove all of them."""
        for file in cache_directory(self.kind).glob("*"):
            file.unlink(missing_ok=True)


def _log(line: str) -> None:
    logging.getLogger("specgen").warning("%s", line)
