"""Regular expressions of the numbers within bounds, as JSON writes them."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from math import ceil, floor
from typing import Any

from specgen.config import require, shown

DIGITS = 18  # of an integer at most, so that greedy texts do not go on for ever, and that others can read it
_EXACT = 15  # digits that every two numbers of double precision differ in


def one_of(parts: Sequence[str]) -> str:
    """An expression for what one of ``parts`` matches."""
    parts = list(dict.fromkeys(parts))
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def within(kind: str, bounds: Mapping[str, Any], where: str) -> str:
    """An ``integer`` or a ``number`` within ``bounds``, such as ``minimum``, of the schema that ``where`` names.

    Both count in steps of ten to the power of minus ``places``: ``exclusiveMinimum`` is ``minimum`` a step higher. As
    readers have numbers in double precision, digits are few enough beside it that none is rounded to the bound.
    ``UserError`` for bounds that cannot be kept.
    """
    places, most = 0 if kind == "integer" else 16, 10**DIGITS
    for name, value in bounds.items():
        rounded = kind == "number" and "exclusive" in name
        digits = _EXACT if rounded else DIGITS
        require(
            isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 10**digits,
            f"{name} of {where} is {shown(value)}: use a number of at most {digits} digits before the point",
        )
        if rounded:
            places = min(places, digits - len(str(abs(int(value)))))
    step = Decimal(10) ** places
    least, largest = 1 - most * int(step), most * int(step) - 1
    lows, highs = [least], [largest]
    for name, value in bounds.items():
        at = Decimal(str(value)) * step  # as it was written
        require(
            kind == "integer" or at == int(at),
            f"{name} of {where} is {shown(value)}, which has more digits than numbers are compared in ({places} "
            "behind the point here): round it",
        )
        if "inimum" in name:
            lows.append(floor(at) + 1 if "exclusive" in name else ceil(at))
        else:
            highs.append(ceil(at) - 1 if "exclusive" in name else floor(at))
    low, high = max(lows), min(highs)
    require(low <= high, f"{where} has bounds that nothing fits: lower the least or raise the most")
    parts = [_magnitudes(places, max(low, 0), high)] if high >= 0 else []
    if low < 0:
        parts.append(f"-{_magnitudes(places, max(-high, 1 if kind == 'integer' else 0), -low)}")
    return one_of(parts)


def _magnitudes(places: int, low: int, high: int) -> str:
    """Numbers without a sign, of at most ``places`` digits behind the point, in steps of the last of these."""
    first, behind_first = divmod(low, 10**places)
    last, behind_last = divmod(high, 10**places)
    nines = 10**places - 1
    if first == last:
        return str(first) + _fraction(behind_first, behind_last, places)
    parts = []
    if behind_first:
        parts.append(str(first) + _fraction(behind_first, nines, places))
        first += 1
    if behind_last < nines:
        parts.append(str(last) + _fraction(0, behind_last, places))
        last -= 1
    if first <= last:
        parts.append(_between(first, last) + _fraction(0, nines, places))
    return one_of(parts)


def _fraction(low: int, high: int, places: int) -> str:
    """A point and digits, from ``low`` to ``high`` steps of the last of ``places`` digits; or neither for none."""
    if not places:
        return ""
    digits = _digits(f"{low:0{places}}", f"{high:0{places}}", shorter=True)
    return rf"\.{digits}" if low else rf"(?:\.{digits})?"


def _between(low: int, high: int) -> str:
    """The whole numbers from ``low`` to ``high``, of 0 or more, without leading zeros."""
    parts = []
    for size in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (size - 1) if size > 1 else 0), min(high, 10**size - 1)
        parts.append(_digits(str(first), str(last)))
    return one_of(parts)


def _digits(first: str, last: str, *, shorter: bool = False) -> str:
    """Digits from ``first`` to ``last``, which are as many; if ``shorter``, zeros at the end may be left out."""
    size, zeros, nines = len(first), "0" * (len(first) - 1), "9" * (len(first) - 1)
    if first == "0" + zeros and last == "9" + nines:
        return f"[0-9]{{{1 if shorter else size},{size}}}"

    def from_digit(digits: str, low: str, high: str) -> str:
        """One of ``digits``, and behind it those from ``low`` to ``high``."""
        if not low:
            return digits
        rest = _digits(low, high, shorter=shorter)
        return f"{digits}(?:{rest})?" if shorter and not int(low) else digits + rest

    if first[0] == last[0]:
        return from_digit(first[0], first[1:], last[1:])
    low, high = int(first[0]), int(last[0])  # of the digits in front, those that all may follow
    parts = []
    if first[1:] != zeros:
        parts, low = [from_digit(first[0], first[1:], nines)], low + 1
    if last[1:] != nines:
        parts, high = [*parts, from_digit(last[0], zeros, last[1:])], high - 1
    return one_of([*parts, *([from_digit(f"[{low}-{high}]", zeros, nines)] if low <= high else [])])
