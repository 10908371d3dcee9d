"""Formatting of numbers and paths; a dash stands for None."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any

DASH = "-"
Show = Callable[[Any], str]


def _shown(form: str, times: int = 1) -> Show:
    """Numbers in a ``form`` of ``str.format``, ``times`` as many."""
    return lambda number: DASH if number is None else form.format(times * number)


count = _shown("{:z,.0f}")  # 1,234
rate = _shown("{:z,.1f}")  # 1,234.5
plain = _shown("{:z.2f}")  # 2.53
thousandths = _shown("{:.3f}")  # 0.004
ratio = _shown("{:z.2f}x")  # 1.31x
percent = _shown("{:z.1f} %", 100)  # 12.3 %
hundredths = _shown("{:z.1f}", 100)  # 12.3: a percentage where the unit stands elsewhere


def several(number: int, noun: str) -> str:
    """``1 prompt``, ``1,234 prompts``"""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def seconds(number: float | None) -> str:
    """``12.3 ms`` or ``4.56 s``"""
    if number is None:
        return DASH
    return f"{1000 * number:.1f} ms" if number < 1 else f"{number:.2f} s"


def duration(seconds: float) -> str:
    """``12 s``, ``3 min``, ``2 h 5 min``"""
    minutes = round(seconds / 60)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def p_value(p: float | None) -> str:
    """``0.31``, ``0.004``, ``< 0.001``"""
    if p is None:
        return DASH
    if p < 0.001:
        return "< 0.001"
    return f"{p:.2f}" if p >= 0.1 else f"{p:.3f}"


def value(of_any_kind: float | bool | str | None) -> str:
    """An integer as a count, a float as ``2.53``, anything else as it is."""
    if isinstance(of_any_kind, str | bool):
        return str(of_any_kind)
    return count(of_any_kind) if isinstance(of_any_kind, int) else plain(of_any_kind)


def between(interval: Sequence[float] | None, show: Show) -> str:
    """``[low, high]``, each end by ``show``."""
    return DASH if interval is None else f"[{show(interval[0])}, {show(interval[1])}]"


def ends(interval: Sequence[float] | None, show: Show) -> str:
    """The interval of a number shown by ``show``, without the unit of a percentage."""
    return between(interval, hundredths if show is percent else show)


def same_texts(identical: float, num_compared: int) -> str:
    """``63 of 64 texts identical``"""
    return f"{count(round(identical * num_compared))} of {count(num_compared)} texts identical"


def from_here(path: str) -> str:
    """``path``, relative if it is below the working directory."""
    full, here = Path(path), Path.cwd()
    return str(full.relative_to(here)) if full.is_relative_to(here) else path


def checkpoint_name(path: str) -> str:
    """``org/model``: the hub id of a hub id or of a snapshot in its cache, the last two parts of another path.

    The last part alone is often ``target``, ``checkpoint-500`` or a digest, which names nothing.
    """
    if cached := re.search(r"models--([^/]+)/snapshots/[^/]+/*$", path):
        return cached[1].replace("--", "/", 1)
    parts = PurePath(path).parts
    return "/".join([part for part in parts if part not in ("/", "..")][-2:]) or path


def printable(text: str) -> str:
    """``text`` on one line: what is no printable character, such as a line break, as ``\\n`` or ``\\x1b``."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def clip(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"


def clock(seconds: float) -> str:
    """``0:09``, ``12:34``, ``1:02:03``"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def devices(device: str, count: int) -> str:
    """``2 x cuda``: where ``count`` devices of a kind share a model; one is named in full."""
    return device if count == 1 else f"{count} x {device.partition(':')[0]}"
