"""The GPU benchmark's results: rows with what they are compared with, as a table and as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_runs import Figures

from specgen.bench.profile import Profile

VLLM = json.loads((Path(__file__).parent / "vllm_h100.json").read_text(encoding="utf-8"))
COLUMNS = (
    "batch",
    "mode",
    "tok/s",
    "x plain",
    "x vLLM",
    "ms/step",
    "bound",
    "x bound",
    "wrong",
    "acceptance",
)
LINE = "{:>5} {:<11}{:>8}{:>9}{:>8}{:>9}{:>8}{:>9}{:>7}  {}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One batch in one mode, and what it is compared with; None where there is nothing to compare."""

    batch: int
    mode: str
    figures: Figures
    mean_context: float
    bound_ms: float  # of a decode step
    times_plain: float | None
    times_vllm: float | None

    @property
    def times_bound(self) -> float | None:
        """The step's time over its bound."""
        return None if self.figures.ms_per_step is None else self.figures.ms_per_step / self.bound_ms

    def to_json(self) -> dict[str, Any]:
        """The fields and ``times_bound``."""
        return asdict(self) | {"times_bound": self.times_bound}


def times_vllm(speed: float, batch: int, mode: str, conditions: Mapping[str, Any]) -> float | None:
    """``speed`` over vLLM's in output tokens a second; None where it has no figure for the same conditions."""
    theirs = VLLM["output_tokens_per_second"]["plain" if mode == "plain" else "eagle3"].get(str(batch))
    return speed / theirs if theirs and conditions == VLLM["conditions"] else None


def head(acceptance: Sequence[float]) -> str:
    """The titles of the columns, with the acceptance that the pair was made for."""
    return LINE.format(*COLUMNS) + f" (made for {_shares(acceptance)})"


def line(row: Row) -> str:
    """A row of the table."""
    figures, late = row.figures, row.figures.num_captures
    return LINE.format(
        row.batch,
        row.mode,
        f"{figures.output_tokens_per_second:.0f}",
        _shown(row.times_plain),
        _shown(row.times_vllm),
        _shown(figures.ms_per_step),
        _shown(row.bound_ms),
        _shown(row.times_bound),
        figures.num_wrong,
        _shares(figures.acceptance) + (f"  {late} graphs captured in the measured time" if late else ""),
    )


def profile_lines(row: Row, profile: Profile) -> list[str]:
    """The idle share of the GPU, and the kernels with the most time."""
    title = (
        f"\nbatch {row.batch}, {row.mode}: {profile.num_steps} steps under the profiler, "
        f"{profile.ms_per_step:.2f} ms each, idle {profile.idle_share:.1%}"
    )
    return [title] + [
        f"{kernel.share:7.1%}{kernel.us_per_step:10.1f} us a step,{kernel.launches_per_step:5.0f}x  {kernel.name[:80]}"
        for kernel in profile.kernels
    ]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)
