"""Small JSON files in the user's cache directory, shared by runs; any of them may be lost or damaged."""

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def read_cached(file: Path, what: str, check: Callable[[Any], T | None]) -> T | None:
    """What ``check`` makes of the JSON in ``file``; None where there is no file.

    ``check`` gives None, or raises, for what was not written there: that costs a line in the log, with ``what``.
    """
    try:
        found = check(json.loads(file.read_bytes()))
        if found is not None:
            return found
        reason = "it is not what was written there"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
    _log(f"{what} kept in {file} not used ({reason})")
    return None


def write_cached(file: Path, what: str, value: object) -> None:
    """Replace ``file`` as a whole; where it cannot be written, that costs a line in the log, with ``what``."""
    mine = file.with_suffix(f".{os.getpid()}")  # another process may write at the same time
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        mine.write_text(json.dumps(value))
        os.replace(mine, file)
    except OSError as error:
        with suppress(OSError):
            mine.unlink(missing_ok=True)
        _log(f"{what} cannot be kept in {file} ({error.strerror})")


def _log(line: str) -> None:
    logging.getLogger("specgen").warning("%s", line)
