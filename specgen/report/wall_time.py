"""Where the wall time of a run went: parts that add up to the whole."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from specgen.record.record_rows import Captured, PassRow
from specgen.report import display
from specgen.report.charts import quarters
from specgen.report.table import Column, Table

_NAMES = {
    "prefill": "prefill passes",
    "full": "decode time at full batch",
    "filling": "extra time in smaller batches while prompts wait",
    "tail": "extra time while the batch drains",
    "captures": "captures of CUDA graphs",
    "idle_outside": "device idle: prompts, texts, files (at most)",
    "idle_engine": "device idle: other",
    "rest": "before the first pass and after the last",
}


@dataclass(frozen=True, kw_only=True)
class WallTime:
    """Seconds of a run, which ``idle`` and all fields together add up to.

    The decode steps are in three parts. ``full`` is what their sequences would have taken in steps of the largest
    batch, or of smaller ones that cost a sequence no more (see ``_priced``); what the smaller steps took beyond that is
    ``filling`` where prompts waited for a slot, for pages, or for more prompts to be prefilled with, and ``tail`` where
    there were none left. While the device had nothing to do, the engine's caller had the host (texts, files, prompts)
    for at most ``idle_outside``, the rest is ``idle_engine``.
    """

    prefill: float
    full: float
    filling: float
    tail: float
    captures: float  # of CUDA graphs
    idle_outside: float
    idle_engine: float
    rest: float  # before the first pass and behind the last one

    @property
    def whole(self) -> float:
        return sum(self.shares(1.0).values())

    def shares(self, whole: float) -> dict[str, float]:
        """Each part over ``whole`` seconds."""
        return {name: part / whole for name, part in asdict(self).items()}

    def of_whole(self, whole: float) -> Self:
        """The same where the wall time is ``whole``: the difference is ``rest``."""
        return replace(self, rest=self.rest + whole - self.whole)


class WallSum:
    """Sums over passes and captures. Decode steps are kept by batch size, for the largest is known at the end."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(("prefill", "captures", "idle_outside", "idle_engine"), 0.0)
        self._decode: dict[tuple[int, bool], tuple[int, float]] = {}  # number of steps and their seconds

    def add(self, row: PassRow | Captured) -> None:
        """Add one pass or capture."""
        if isinstance(row, Captured):
            self._seconds["captures"] += row.seconds
            return
        self._seconds["idle_outside"] += row.idle_outside
        self._seconds["idle_engine"] += row.idle - row.idle_outside
        if row.kind == "prefill":
            self._seconds["prefill"] += row.seconds
        else:
            key = row.num_sequences, row.num_waiting > 0
            number, seconds = self._decode.get(key, (0, 0.0))
            self._decode[key] = number + 1, seconds + row.seconds

    def result(self, whole: float) -> WallTime | None:
        """The parts of a wall time of ``whole`` seconds; None without decode steps."""
        if not self._decode:
            return None
        blocks = _priced(self._decode)
        full = blocks[0].price
        # by whether prompts waited
        beyond = {
            waiting: math.fsum((block.price - full) * block.sequences[waiting] for block in blocks)
            for waiting in (True, False)
        }
        decode = sum(seconds for _, seconds in self._decode.values())
        found = WallTime(
            **self._seconds,
            full=decode - sum(beyond.values()),
            filling=beyond[True],
            tail=beyond[False],
            rest=0.0,
        )
        return found.of_whole(whole)


@dataclass(kw_only=True)
class _Block:
    """Decode steps of neighbouring batch sizes: their seconds, and sequences by whether prompts waited."""

    seconds: float
    sequences: Mapping[bool, int]

    @property
    def price(self) -> float:
        """Seconds of a sequence."""
        return self.seconds / sum(self.sequences.values())

    def joined(self, other: "_Block") -> "_Block":
        both = {waiting: self.sequences[waiting] + other.sequences[waiting] for waiting in (True, False)}
        return _Block(seconds=self.seconds + other.seconds, sequences=both)


def _priced(decode: Mapping[tuple[int, bool], tuple[int, float]]) -> list[_Block]:
    """The steps in blocks of batch sizes, the largest first, whose prices do not fall from one to the next.

    A step costs a sequence more the fewer share it. Where measured times say otherwise, of noise or of kernels that
    suit one size better, neighbours are one block, with one price (isotonic regression, by pooling adjacent violators):
    so smaller batches never seem to give time back.
    """
    blocks: list[_Block] = []
    for size in sorted({size for size, _ in decode}, reverse=True):
        steps = {waiting: decode.get((size, waiting), (0, 0.0)) for waiting in (True, False)}
        block = _Block(
            seconds=sum(seconds for _, seconds in steps.values()),
            sequences={waiting: number * size for waiting, (number, _) in steps.items()},
        )
        while blocks and block.price < blocks[-1].price:
            block = blocks.pop().joined(block)
        blocks.append(block)
    return blocks


def wall_table(report: Mapping[str, Any]) -> Iterator[Table]:
    """The parts in a ``report.json``; nothing for a run without them."""
    parts = report.get("wall")
    if not parts:
        return
    whole = sum(parts.values())
    rows = [
        {"part": title, "seconds": parts[name], "share": parts[name] / whole if whole else None}
        for name, title in _NAMES.items()
    ]
    yield Table(
        title="Where the wall time went",
        note="by the device's clock",
        columns=(
            Column(name="part", title="part"),
            Column(name="seconds", title="time", show=display.seconds),
            Column(name="share", show=display.percent),
        ),
        rows=tuple(row for row in rows if row["seconds"]),
        bars="share",
        ticks=quarters(max((row["share"] or 0.0) for row in rows)),
    )
