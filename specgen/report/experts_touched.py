"""What the decode steps of a mixture touched of its experts: figures and table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specgen.record.record_rows import PassRow
from specgen.report.display import count, rate, ratio
from specgen.report.table import Column, Table

_SHOWN = 12  # rows of the table, those of the most steps; report.json has all


@dataclass(frozen=True, kw_only=True)
class ExpertStats:
    """Decode steps of one K and of similar batches: means over steps, and for experts also over layers."""

    num_spec_tokens: int
    sequences: str  # the range of batch sizes: "1", "2", "3-4", "5-8", ...
    num_steps: int
    mean_sequences: float
    touched: float  # experts of a layer
    touched_plain: float  # by a plain step in its place
    num_experts: int  # of a layer
    num_bytes: float  # of what is touched in all layers


class ExpertSum:
    """Sums over the decode steps of a mixture, by K and batch size up to the next power of two."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], list[float]] = {}
        self._num_experts = 0

    def add(self, step: PassRow) -> None:
        """Add one step; nothing if it has no experts."""
        found = step.experts
        if found is None:
            return
        self._num_experts = found.num_experts
        key = (1 << (step.num_sequences - 1).bit_length(), step.num_spec_tokens)
        figures = (1, step.num_sequences, found.experts, found.plain, found.num_bytes)
        before = self._sums.get(key, [0.0] * len(figures))
        self._sums[key] = [sum(pair) for pair in zip(before, figures, strict=True)]

    def result(self) -> tuple[ExpertStats, ...]:
        """By batch size and K."""
        return tuple(self._stats(*key, self._sums[key]) for key in sorted(self._sums))

    def _stats(self, most: int, k: int, sums: list[float]) -> ExpertStats:
        number, sequences, touched, plain, size = sums
        least = most // 2 + 1
        return ExpertStats(
            num_spec_tokens=k,
            sequences=str(most) if least >= most else f"{least}-{most}",
            num_steps=int(number),
            mean_sequences=sequences / number,
            touched=touched / number,
            touched_plain=plain / number,
            num_experts=self._num_experts,
            num_bytes=size / number,
        )


_COLUMNS = (
    Column(name="batch", title="sequences"),
    Column(name="step", wraps=True),
    Column(name="num_steps", title="steps", show=count),
    Column(name="touched", title="experts touched", show=rate),
    Column(name="touched_plain", title="by a plain step", show=rate),
    Column(name="x_plain", title="x plain", show=ratio),
    Column(name="gigabytes", title="read", unit="GB"),
)


def experts_table(report: Mapping[str, Any]) -> Iterator[Table]:
    """Of a ``report.json``; none for a dense target, or for reports from before there were mixtures."""
    found: Sequence[Mapping[str, Any]] = report.get("experts", ())
    shown = sorted(found, key=lambda each: -each["num_steps"])[:_SHOWN]
    if not shown:
        return
    rows = tuple(
        {
            "batch": each["sequences"],
            "step": f"verify, K = {k}" if (k := each["num_spec_tokens"]) else "plain",
            "num_steps": each["num_steps"],
            "touched": each["touched"],
            "touched_plain": each["touched_plain"],
            "x_plain": each["touched"] / each["touched_plain"] if each["touched_plain"] else None,
            "gigabytes": each["num_bytes"] / 1e9,
        }
        for each in found
        if each in shown
    )
    yield Table(
        title="Experts touched",
        note="of a layer, means over layers and steps",
        columns=_COLUMNS,
        rows=rows,
        num_keys=2,
    )


def expert_terms(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The definitions that the table needs; none without one."""
    for each in report.get("experts", ())[:1]:
        of = count(each["num_experts"])
        yield "experts touched", f"of the {of} of a layer, by any row of a step; no padding, mean over layers"
        yield "by a plain step", "the same by the row of each newest token alone, in the same step"
        yield "read", "the bytes of the experts touched, in all layers"
