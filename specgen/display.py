"""Numbers and paths as people read them; a dash stands for None, a number that nothing was seen for."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DASH = "-"
Show = Callable[[Any], str]


def count(number: float | None) -> str:
    """``1,234``"""
    return DASH if number is None else f"{number:,.0f}"


def plain(number: float | None) -> str:
    """``2.53``"""
    return DASH if number is None else f"{number:.2f}"


def rate(number: float | None) -> str:
    """``1,234.5``"""
    return DASH if number is None else f"{number:,.1f}"


def percent(share: float | None) -> str:
    """``12.3 %``"""
    return DASH if share is None else f"{100 * share:.1f} %"


def hundredths(share: float | None) -> str:
    """``12.3``: a percentage where the unit stands elsewhere."""
    return DASH if share is None else f"{100 * share:.1f}"


def ratio(number: float | None) -> str:
    """``1.31x``"""
    return DASH if number is None else f"{number:.2f}x"


def seconds(number: float | None) -> str:
    """``12.3 ms`` or ``4.56 s``"""
    if number is None:
        return DASH
    return f"{1000 * number:.1f} ms" if number < 1 else f"{number:.2f} s"


def value(of_any_kind: float | bool | str | None) -> str:
    """A whole number as a count, another as ``2.53``, and text as it is."""
    if isinstance(of_any_kind, str | bool):
        return str(of_any_kind)
    return count(of_any_kind) if isinstance(of_any_kind, int) else plain(of_any_kind)


def between(interval: Sequence[float] | None, show: Show) -> str:
    """``[low, high]``, each end by ``show``."""
    return DASH if interval is None else f"[{show(interval[0])}, {show(interval[1])}]"


def ends(interval: Sequence[float] | None, show: Show) -> str:
    """The interval of a number shown by ``show``, beside which the unit of a percentage already stands."""
    return between(interval, hundredths if show is percent else show)


def same_texts(identical: float, num_compared: int) -> str:
    """``63 of 64 texts identical``"""
    return f"{count(round(identical * num_compared))} of {count(num_compared)} texts identical"


def from_here(path: str) -> str:
    """``path`` as seen from the working directory where it is below that; anything else as it is."""
    place, here = Path(path), Path.cwd()
    return str(place.relative_to(here)) if place.is_relative_to(here) else path


def clip(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"
