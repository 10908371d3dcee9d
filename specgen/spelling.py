"""Names that a user may have meant."""

from collections.abc import Iterable
from difflib import get_close_matches

_SHORT = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}


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
