"""What ``measure_choices.py`` does without a GPU: which tile is taken, from which row on, and the file's new text."""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from specgen.ops.measured_choices import Tile

MARGIN = (
    0.02  # by which a new tile must be faster than the present one: the same measurement again is 1 % off
)
_STEPS: dict[str, tuple[int, ...]] = {
    "block_out": (16, 32, 64, 128),
    "block_in": (64, 128, 256),
    "stages": (2, 3, 4, 5, 6, 8),
    "warps": (2, 4, 8),
    "prefetch_bytes": (0, 512, 1024, 2048),
}
T = TypeVar("T", bound=Tile)


def neighbours(tile: T, fixed: Sequence[str] = ()) -> list[T]:
    """``tile`` and those that are one step from it in one of its sizes, but for the ``fixed`` ones."""
    found = [tile]
    for name, steps in _STEPS.items():
        if name in fixed:
            continue
        at = steps.index(getattr(tile, name))
        found += [
            replace(tile, **{name: step}) for step in (*steps[max(at - 1, 0) : at], *steps[at + 1 : at + 2])
        ]
    return found


def fastest(present: T, seconds: Mapping[T, Sequence[float | None]]) -> T:
    """The tile with the smallest geometric mean of its ``seconds`` over the shapes; None: not usable for one.

    ``present`` stays unless another is faster by ``MARGIN``, or it is not usable itself.
    """
    means = {
        tile: math.fsum(math.log(each) for each in known) / len(known)
        for tile, times in seconds.items()
        if len(known := [each for each in times if each is not None]) == len(times) > 0
    }
    if not means:
        return present
    best = min(means, key=lambda tile: means[tile])
    if present in means and means[best] > means[present] + math.log1p(-MARGIN):
        return present
    return best


def first_faster(ratios: Mapping[int, float]) -> int | None:
    """Where the kernel for many rows takes over: of ``ratios``, its seconds by those of the other, by rows.

    That is the fewest rows from which it is never slower; None: it is slower at the most rows.
    """
    found = None
    for rows in sorted(ratios, reverse=True):
        if ratios[rows] > 1:
            break
        found = rows
    return found


def entry(tile: Tile) -> str:
    """``tile`` as a line of the file has it, without what is the default."""
    shown = []
    for field in fields(tile):
        value = getattr(tile, field.name)
        if field.name != "prefetch_bytes" and value == field.default:
            continue
        shown.append(f"{field.name} = {str(value).lower()}")
    return "{ " + ", ".join(shown) + " }"


def rewritten(
    text: str, table: str, tiles: Mapping[int, Tile], numbers: Mapping[str, int], measured: str
) -> str:
    """The file's ``text`` with other entries of ``table`` by index, other ``numbers``, and what it was ``measured`` on.

    All other lines, comments included, stay as they are. ``ValueError`` where the table does not hold what is replaced,
    or the result is not what was meant.
    """
    lines = text.splitlines(keepends=True)
    begin = lines.index(f"[{table}]\n") + 1
    end = next((i for i in range(begin, len(lines)) if lines[i].startswith("[")), len(lines))
    wanted: dict[str, Any] = tomllib.loads(text)
    here = wanted[table]
    values = {**{name: str(number) for name, number in numbers.items()}, "measured": f'"{measured}"'}
    here |= {**numbers, "measured": measured}
    for name, value in values.items():
        at = next(i for i in range(begin, end) if re.match(rf"{name} = ", lines[i]))
        pattern = rf'({name} = )("[^"]*"|\S+)'
        lines[at] = re.sub(pattern, lambda match, value=value: match[1] + value, lines[at], count=1)
    rows = [i for i in range(begin, end) if lines[i].lstrip().startswith("{ ")]
    for index, tile in tiles.items():
        lines[rows[index]] = re.sub(r"\{.*\}", entry(tile), lines[rows[index]], count=1)
        here["tiles"][index] = tomllib.loads(f"tile = {entry(tile)}")["tile"]
    new = "".join(lines)
    if tomllib.loads(new) != wanted:
        raise ValueError(f"the table {table} cannot be rewritten line by line")
    return new
