"""Mistakes of the user, a device that is lost, and values and other errors on one short line."""

import reprlib

_LONGEST_SHOWN = 200  # characters

_short = reprlib.Repr()
_short.maxstring = 100  # a tensor's name fits


class UserError(ValueError):
    """A mistake of the user; the text is one line with the value, the reason and the remedy."""


class DeviceLost(RuntimeError):  # noqa: N818
    """The device answers nothing any more, and only a new process gets it back; what has finished is not touched.

    ``reason`` is what the device said, and ``requests`` has the ids of all that were in flight, one of which may have
    caused it.
    """

    def __init__(self, reason: str, requests: tuple[str, ...]) -> None:
        super().__init__(reason, requests)
        self.reason = reason
        self.requests = requests

    def __str__(self) -> str:
        return f"the device is lost ({self.reason}): continue in a new process"


def require(condition: bool, message: str) -> None:
    """Raise ``UserError(message)`` unless ``condition`` holds."""
    if not condition:
        raise UserError(message)


def shown(value: object) -> str:
    """``value`` on one short line, however large it is."""
    text = _short.repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


def is_text(text: str) -> bool:
    """Whether ``text`` can be encoded: without lone surrogates, which stand for bytes that are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def first_line(error: BaseException) -> str:
    """The first line of an error of another library, with the next where it announces that; cut short at a word."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 1 + lines[0].endswith(":")]) if lines else type(error).__name__
    if lines and isinstance(error, KeyError):  # which says no more than the name
        text += " is missing"
    if len(text) <= _LONGEST_SHOWN:
        return text
    whole_words = text[:_LONGEST_SHOWN].rpartition(" ")[0] or text[:_LONGEST_SHOWN]
    return whole_words.rstrip(" ,;:(") + " ..."
