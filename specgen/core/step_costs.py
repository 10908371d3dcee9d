"""What a decode step costs, timed on the engine that will run it: for batch sizes and numbers of drafts."""

import random
from collections.abc import Sequence
from statistics import median

from specgen.config import SamplingParams, require
from specgen.core.engine_core import EngineCore
from specgen.core.sequence import Request
from specgen.core.spec_length import FixedLength, StepCosts
from specgen.record.record_rows import EngineRow, PassRow

_UNTIMED = 3  # steps: the first compiles and captures, and the host is a step ahead
_TIMED = 6
_PROMPT = 16  # tokens: what a longer context adds is much the same for any number of drafts


def measure(engine: EngineCore, max_batch_size: int, most: int) -> StepCosts:
    """The costs of steps with 0 to ``most`` drafts, for ``timed_sizes``.

    Leaves the engine idle. Sizes for which the cache has no room are left out; ``UserError`` where not even one
    sequence has.
    """
    seconds: dict[tuple[int, int], float] = {}
    for size in timed_sizes(max_batch_size):
        times = _step_times(engine, size, range(most + 1), _UNTIMED + _TIMED)
        seconds |= {(size, k): median(found[_UNTIMED:]) for k, found in times.items()}
    require(
        bool(seconds),
        f"num-spec-tokens is auto, and the model's context or its cache is too short to time {most} drafts: "
        "name a number",
    )
    return StepCosts(seconds=seconds)


def timed_sizes(max_batch_size: int) -> list[int]:
    """Numbers of sequences: powers of two and the largest."""
    return sorted({1 << power for power in range(max_batch_size.bit_length())} | {max_batch_size})


def capture_all(engine: EngineCore, max_batch_size: int, lengths: Sequence[int]) -> None:
    """One step of every size and each number of drafts in ``lengths``: no later greedy step captures a CUDA graph."""
    for size in engine.sizes(max_batch_size):
        _step_times(engine, size, lengths, 1)


def positions(most: int) -> int:
    """How long a sequence may become while steps with 0 to ``most`` drafts are timed."""
    return _PROMPT + _new_tokens(range(most + 1), _UNTIMED + _TIMED)


def _new_tokens(lengths: Sequence[int], enough: int) -> int:
    """What ``enough`` steps of each number of drafts may give, and as many as may be in flight."""
    return (enough + 2) * sum(k + 1 for k in lengths)


def _step_times(engine: EngineCore, size: int, lengths: Sequence[int], enough: int) -> dict[int, list[float]]:
    """Seconds of ``enough`` steps of ``size`` sequences by the number of drafts; none where so many have no room."""
    times: dict[int, list[float]] = {k: [] for k in lengths}

    def record(row: EngineRow) -> None:
        if isinstance(row, PassRow) and row.kind == "decode" and row.num_sequences == size:
            # with what the device waits for the host, where that is slower
            times[row.num_spec_tokens].append(row.seconds + row.idle)

    sampling = SamplingParams(max_tokens=_new_tokens(lengths, enough), ignore_eos=True)
    draw = random.Random(0)  # distinct tokens: equal sequences would share the experts that each touches
    prompts = [
        Request(
            id=f"timed {i}",
            prompt_token_ids=tuple(draw.randrange(engine.vocab_size) for _ in range(_PROMPT)),
            sampling=sampling,
        )
        for i in range(size)
    ]
    with engine.rehearsal(record):
        finished = [refused for request in prompts if (refused := engine.submit(request)) is not None]
        for k, found in times.items():
            engine.spec_length = FixedLength(k)
            while len(found) < enough and not finished:
                finished = engine.step()
    return {} if finished else times
