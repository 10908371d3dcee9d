"""Mistakes of the user and the names that may have been meant, a device that is lost, and other errors in one line."""

import reprlib
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

_LONGEST_SHOWN = 200  # characters
_SHORT = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}

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


def stand_in(start: bytes) -> str | None:
    """What a file that begins with ``start`` is in place of the one that was meant, with the remedy; None: itself."""
    if start.startswith(b"version https://git-lfs.github.com/"):
        return "this is a Git LFS pointer, not the file: run git lfs pull"
    if start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return (
            "this is a web page, perhaps of a login or an error: check the link, and download the file again"
        )
    return None


def require_no_stand_in(file: Path) -> None:
    """``UserError`` where ``file`` is something else in its place, as its library says it less plainly."""
    if not file.is_file():  # a pipe, whose reader waits for a writer
        return
    try:
        with file.open("rb") as content:
            other = stand_in(content.read(64))
    except OSError:
        return  # for who reads it to say
    require(other is None, f"{file}: {other}")


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


def under(name: str, message: object) -> str:
    """``message`` as one that begins with the name of what it is about, which it may do already."""
    text = str(message)
    return text if text.startswith((f"{name}:", f"{name} ")) else f"{name}: {text}"


def nearest(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The one of ``known`` most like ``name``, whatever its case and hyphens; None below ``likeness``, in [0, 1]."""
    plain = {_plain(each): each for each in known}
    if (meant := _SHORT.get(_plain(name))) in plain:
        return plain[str(meant)]
    found = get_close_matches(_plain(name), plain, n=1, cutoff=likeness)
    return plain[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean gsm8k?)`` for the end of a clause; empty where no known name is near, or it is one."""
    known = tuple(known)
    meant = None if name in known else nearest(name, known)
    return "" if meant is None else f" (did you mean {meant}?)"


def _plain(name: str) -> str:
    return name.casefold().replace("_", "-")
