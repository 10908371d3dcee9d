"""What ``--dry-run`` prints: the arms of a bench, and what time and memory it will take at least. Reads no weights."""

from collections.abc import Iterator, Mapping
from statistics import fmean

import torch

from specgen import display
from specgen.bench.plans import Plan, Prepared
from specgen.bench.repeat import Yardstick
from specgen.checkpoints.inspect_checkpoint import Weights
from specgen.report.table import Column, Table
from specgen.report.terminal import Part

_GB = 1e9
_COLUMNS = (
    Column(name="arm"),
    Column(name="prompts"),
    Column(name="new_tokens"),
    Column(name="engine", unit="GB"),
    Column(name="repeat", unit="s"),
    Column(name="repeats", title="to go"),
)


def forecast(
    ready: Prepared, yardstick: Yardstick, left: Mapping[str, tuple[int, int]], budget: float | None = None
) -> Iterator[Part]:
    """The arms, then a few sentences; ``left`` is how many repeats, at least and at most, each has to do that goes on.

    ``budget`` is in seconds.
    """
    seconds = {plan.arm.name: plain_seconds(plan, yardstick) for plan in ready.plans}
    rows = tuple(
        {
            "arm": plan.arm.name,
            "prompts": len(plan.requests),
            "new_tokens": sum(request.sampling.max_tokens for request in plan.requests),
            "engine": plan.num_bytes / _GB,
            "repeat": seconds[plan.arm.name],
            "repeats": _span(*map(str, left.get(plan.arm.name, (0, 0)))),
        }
        for plan in ready.plans
    )
    yield Table(title="The arms", columns=_COLUMNS, rows=rows)
    yield "\n".join(
        [*_time(seconds, left, budget, yardstick), _memory(ready), *ready.notes, "Nothing was run."]
    )


def _time(
    seconds: Mapping[str, float],
    left: Mapping[str, tuple[int, int]],
    budget: float | None,
    yardstick: Yardstick,
) -> Iterator[str]:
    """How long it takes at least."""
    if not left:
        yield "No repeat is left: the rounds that are kept are enough, and the command prints its table."
        return
    ends = [sum(seconds[arm] * (1 + number[end]) for arm, number in left.items()) for end in (0, 1)]
    some = f"{len(left)} arms" if len(left) == len(seconds) else f"{len(left)} of {len(seconds)} arms go on"
    yield (
        f"{some}, with a warm-up each: about {_span(*map(display.duration, ends))}, if every step took the time of a "
        f"plain one at its bound (weights and KV cache at {yardstick.bytes_per_second / 1e12:.3g} TB/s). Arms that are "
        "slower take longer, as do prompts, loading, compilation and CUDA graphs, which come on top."
    )
    if budget is not None:
        yield (
            f"By the budget nothing begins that would not end within {display.duration(budget)}, prompts and weights "
            "counted; the batch sizes share it."
        )


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def plain_seconds(plan: Plan, yardstick: Yardstick) -> float:
    """The bound of plain decoding of a plan's requests: each step at the mean context, the batch always full."""
    batch = min(plan.config.max_batch_size, len(plan.requests))
    lengths = [request.sampling.max_tokens for request in plan.requests]
    context = fmean(
        len(request.prompt_token_ids) + request.sampling.max_tokens / 2 for request in plan.requests
    )
    return sum(lengths) / batch * yardstick.sizes.step(0, batch, context) / yardstick.bytes_per_second


def _memory(ready: Prepared) -> str:
    """Weights as stored, the largest engine, and what the device has."""
    models = ready.models
    configs = {
        "model": models.target.config,
        **({} if models.head is None else {"drafter": models.head.config}),
    }
    weights = sum(Weights.of(ready.checkpoints[role], config).num_bytes for role, config in configs.items())
    largest = max(plan.num_bytes for plan in ready.plans)
    found = f"Weights take {weights / _GB:.2f} GB as stored, the largest engine beside them {largest / _GB:.2f} GB"
    if ready.base.device == "cpu":
        return f"{found}."
    free, total = torch.cuda.mem_get_info(ready.base.device)
    return f"{found}; {free / _GB:.1f} of {total / _GB:.1f} GB of the GPU are free."
