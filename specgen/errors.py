"""Mistakes of the user, and values and other errors on one short line."""

import reprlib

_LONGEST_SHOWN = 200  # characters

_short = reprlib.Repr()
_short.maxstring = 100  # a tensor's name fits


class UserError(ValueError):
    """A mistake of the user; the text is one line with the value, the reason and the remedy."""


def require(condition: bool, message: str) -> None:
    """Raise ``UserError(message)`` unless ``condition`` holds."""
    if not condition:
        raise UserError(message)


def shown(value: object) -> str:
    """``value`` on one short line, however large it is."""
    text = _short.repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


def first_line(error: BaseException) -> str:
    """The first line of an error of another library, cut short."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(iter(lines), type(error).__name__)[:_LONGEST_SHOWN]
