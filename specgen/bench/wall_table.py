"""The table of the throughput bench that says where the wall time of every arm went."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specgen import display
from specgen.bench.repeat import Repeat
from specgen.bench.repeats import Repeats
from specgen.report.table import Column, Row, Table

TERMS = (
    "full: what the decode steps would take if each had the largest batch; filling and tail: what smaller steps take "
    "beyond that, while prompts wait and when none is left; idle: the device has nothing to do; rest: before the first "
    "pass and after the last one; of_products: what of prefill must be, the target's products for the prompts at the "
    "{speed:.3g} TFLOP/s of a large one"
)
_PARTS = {
    "prefill": ("prefill",),
    "full": ("full",),
    "filling": ("filling",),
    "tail": ("tail",),
    "idle": ("idle_outside", "idle_engine"),
    "captures": ("captures",),
    "rest": ("rest",),
}


def wall_tables(
    arms: Sequence[tuple[Mapping[str, Any], Repeats]], flops_per_second: float
) -> Iterator[Table]:
    """The parts of the wall time of each arm's middle repeat, so that they add up; arms by what they change."""
    each = [(changes, _middle(repeats)) for changes, repeats in arms]
    rows = [_row(changes, repeat, flops_per_second) for changes, repeat in each if repeat.wall is not None]
    if not rows:  # rounds of earlier versions
        return
    keys = tuple(Column(name=name) for name in arms[0][0])
    yield Table(
        title="Where the wall time went",
        note="of the repeat in the middle, in shares of its wall time",
        columns=(
            *keys,
            Column(name="wall", unit="s", show=display.plain),
            *(Column(name=name, show=display.percent) for name in ("prefill", "of_products")),
            Column(name="passes"),
            *(Column(name=name, show=display.percent) for name in _PARTS if name != "prefill"),
        ),
        rows=tuple(rows),
        num_keys=len(keys),
    )


def _middle(repeats: Repeats) -> Repeat:
    """The repeat of the median speed; of an even number, the slower of two."""
    ordered = sorted(repeats.each.values(), key=lambda repeat: repeat.tokens_per_second)
    return ordered[(len(ordered) - 1) // 2]


def _row(changes: Mapping[str, Any], repeat: Repeat, flops_per_second: float) -> Row:
    assert repeat.wall is not None
    shares = repeat.wall.shares(repeat.seconds)
    parts = {name: sum(shares[each] for each in of) for name, of in _PARTS.items()}
    return {
        **changes,
        "wall": repeat.seconds,
        "prefill": parts.pop("prefill"),
        "of_products": repeat.prefill_flops / flops_per_second / repeat.seconds,
        "passes": repeat.prefill_passes,
        **parts,
    }
