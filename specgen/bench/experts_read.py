"""What the steps of a bench touched of a mixture's experts, and what reading that takes."""

from collections.abc import Iterable
from statistics import fmean

from specgen.bench.bound import StepBytes
from specgen.events import Event, Stepped, Touched


def mean_touched(events: Iterable[Event], num_sequences: int | None = None) -> Touched | None:
    """The mean over decode steps, or those of ``num_sequences`` alone; None without any of a mixture."""
    found = [
        event.experts
        for event in events
        if isinstance(event, Stepped)
        and event.experts is not None
        and num_sequences in (None, event.num_sequences)
    ]
    if not found:
        return None
    return Touched(
        experts=fmean(each.experts for each in found),
        plain=fmean(each.plain for each in found),
        num_experts=found[0].num_experts,
        num_bytes=round(fmean(each.num_bytes for each in found)),
    )


def sentence(touched: Touched, sizes: StepBytes, num_rows: int, bytes_per_second: float) -> str:
    """What a step of ``num_rows`` rows touched on average, beside chance, and its cost."""
    assert sizes.experts is not None
    chance = sizes.experts.touched_by_chance(num_rows)
    return (
        f"{touched.experts:.1f} of the {touched.num_experts} experts of a layer are touched ({chance:.1f} by chance, "
        f"{touched.plain:.1f} by a plain step), {touched.num_bytes / 1e9:.2f} GB in all layers: "
        f"{1e3 * touched.num_bytes / bytes_per_second:.3f} ms of a copy's bandwidth"
    )
