"""What a decode step costs, timed on the engine that will run it: for batch sizes and numbers of drafts."""

from collections.abc import Sequence
from statistics import median

from specgen.config import SamplingParams, require
from specgen.engine import Engine
from specgen.events import Event, Stepped
from specgen.sequence import Request
from specgen.spec_length import FixedLength, StepCosts

_UNTIMED = 3  # steps: the first compiles and captures, and the host is a step ahead
_TIMED = 6
_PROMPT = (
    16  # tokens; contexts while timing are short, as what they add is much the same for any number of drafts
)


def batch_sizes(max_batch_size: int) -> list[int]:
    """Powers of two, and ``max_batch_size``."""
    powers = [1 << power for power in range(max_batch_size.bit_length())]
    return sorted({*powers, max_batch_size})


def measure(engine: Engine, sizes: Sequence[int], most: int) -> StepCosts:
    """The costs of steps of ``sizes`` sequences with 0 to ``most`` drafts; leaves the engine idle, and graphs captured.

    Sizes for which the cache has no room are left out. ``ValueError`` where not even one sequence can be timed.
    """
    record, length = engine.record, engine.spec_length
    seconds: dict[tuple[int, int], float] = {}
    for size in sizes:
        times = [_time(engine, size, k) for k in range(most + 1)]
        seconds |= {(size, k): time for k, time in enumerate(times) if time is not None and None not in times}
    engine.record, engine.spec_length = record, length
    require(
        bool(seconds),
        f"num-spec-tokens is auto, and the model's context or its cache is too short to time {most} drafts: "
        "name a number",
    )
    return StepCosts(seconds=seconds)


def _time(engine: Engine, size: int, k: int) -> float | None:
    """Median seconds of a step of ``size`` sequences with ``k`` drafts; None where so many do not run at once."""
    times: list[float] = []

    def record(event: Event) -> None:
        if isinstance(event, Stepped) and event.kind == "decode" and event.num_sequences == size:
            times.append(event.seconds)

    engine.record, engine.spec_length = record, FixedLength(k)
    enough = _UNTIMED + _TIMED
    sampling = SamplingParams(max_tokens=(k + 1) * (enough + 2), ignore_eos=True)
    prompts = [
        Request(id=f"timed {i}", prompt_token_ids=(0,) * _PROMPT, sampling=sampling) for i in range(size)
    ]
    finished = [refused for request in prompts if (refused := engine.submit(request)) is not None]
    while len(times) < enough and not finished:
        finished = engine.step()
    engine.abandon()
    return median(times[_UNTIMED:]) if len(times) >= enough else None
