"""What a decode step costs, for K auto: timed on the engine that will run it, and kept between runs.

A file with costs is used only where all that they depend on is the same, down to the source of this package; anything
else is measured anew.
"""

import hashlib
import json
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from itertools import chain, count, takewhile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specgen.checkpoints.tensor_reader import Checkpoint
from specgen.config import CONFIDENCE_LEVELS, DraftLength, EngineConfig, SamplingParams, require
from specgen.core.engine_core import EngineCore
from specgen.core.sequence import Request
from specgen.core.spec_length import FEWEST, FixedPlan, StepCosts, StepPlan
from specgen.engine.choices import Checkpoints
from specgen.ops.jit_modules import runs_on
from specgen.record.provenance import device, machine_state, uuid, versions
from specgen.record.record_rows import EngineRow, PassRow
from specgen.storage import CacheFiles

_UNTIMED = 2  # steps: the first compiles and captures, and the device waits for the second
_TIMED = 5
_PROMPT = 4  # tokens: each plan has prompts of its own
# What longer contexts cost is told by a few of so many tokens, together, which take some tenths of a second to prefill
_LONG_BATCH, _LONG_TOGETHER = 8, {"cuda": 16384, "cpu": 2048}
_LONG_PASSES = 64  # of prefill at most: meanwhile the first sequences grow
KEPT = CacheFiles(kind="step-costs", what="costs of steps")
# variables that may change kernels
_SET = ("CUDA_", "NCCL_", "TORCH", "PYTORCH", "TRITON_", "FLASHINFER_", "TRTLLM_", "TLLM_")
_STATE = ("driver", "max_clock_mhz", "power_limit_watts")  # of a GPU, that last


def timed_plans(max_batch_size: int, length: DraftLength) -> dict[int, list[StepPlan]]:
    """What is timed, by number of sequences: steps with some K, and with ``auto`` parts of the drafts at two sizes.

    Each is a CUDA graph, and takes a sixth of a second of an 8B model's start. What lies between them is interpolated.
    """
    sizes, most = sorted({1, *_spread(8, 4, max_batch_size)}), length.most
    whole = [StepPlan(num_drafts=rows - 1) for rows in _spread(1, 2, most + 1)]
    # by the drafter's confidence, so that sequences have as different numbers of rows as in a run
    rising = tuple((level + 0.5) / len(CONFIDENCE_LEVELS) for level in range(len(CONFIDENCE_LEVELS)))
    parts = [
        StepPlan(num_drafts=k, quarters=quarters, chances=(rising,) * k)
        for k, quarters in sorted({(1, 1), *((most, each) for each in _spread(1, 8, 4 * most))})
    ]
    asked = length.kind == "auto" and max_batch_size >= FEWEST
    with_parts = {*sizes[1:2], max_batch_size} if asked else set()
    return {size: [*whole, *(parts if size in with_parts else ())] for size in sizes}


def _spread(least: int, factor: int, most: int) -> list[int]:
    """``least`` and its products with powers of ``factor``, as far as they are below ``most``, and that."""
    return [*takewhile(lambda each: each < most, (least * factor**power for power in count())), most]


def measure(engine: EngineCore, max_batch_size: int, length: DraftLength) -> StepCosts:
    """The costs of the steps of ``timed_plans``, and what longer contexts add to them.

    Leaves the engine idle. The largest size is what the cache has room for; ``UserError`` where not even one sequence
    has.
    """
    seconds, partial = dict[tuple[int, int], float](), dict[tuple[int, int, int], float]()
    most, rows = length.most, engine.max_prefill_tokens
    sizes = range(max_batch_size, 1, -1)
    largest = next((size for size in sizes if engine.room(size) >= positions(size, most, rows)), 1)
    for size, plans in timed_plans(largest, length).items():
        found = {plan: _step_times(engine, size, plan, _UNTIMED + _TIMED) for plan in plans}
        if not all(found.values()):
            continue
        for plan, times in found.items():
            taken = median(times[_UNTIMED:])
            if plan.quarters is None:
                seconds[size, plan.num_drafts] = taken
            else:
                partial[size, plan.num_drafts, plan.quarters] = taken
    require(
        bool(seconds),
        f"num-spec-tokens is {length.kind}, and the model's context or its cache is too short to time {most} "
        "drafts: name a number",
    )
    of_position = _of_position(engine, largest, most)
    return StepCosts(seconds=seconds, partial=partial, of_position=of_position)


def _of_position(engine: EngineCore, max_batch_size: int, most: int) -> tuple[float, float]:
    """See ``StepCosts``; short and long contexts are timed in turn. Zeros where there is no room, or noise hides it."""
    size, device = min(max_batch_size, _LONG_BATCH), engine.device.type
    num_tokens = min(_LONG_TOGETHER[device], _LONG_PASSES * engine.max_prefill_tokens)
    num_steps = _UNTIMED + _TIMED + _steps_before(num_tokens, engine.max_prefill_tokens)
    long = min(num_tokens // size, engine.room(size) - _new_tokens(most, num_steps))
    if long < 32 * _PROMPT:  # too little to be told from noise
        return 0.0, 0.0
    found = []
    for k in (0, most):
        plan = StepPlan(num_drafts=k)
        short, taken = (
            _step_times(engine, size, plan, _UNTIMED + _TIMED, prompt)[_UNTIMED:]
            for prompt in (_PROMPT, long)
        )
        more = median(taken) - median(short) if short and taken else 0.0
        found.append(more / (size * (long - _PROMPT)))
    if min(found) <= 0:
        return 0.0, 0.0
    # drafts make no position cheaper, and a row of them costs no more than a plain one, whatever measurements say
    return found[0], min(max(found), (most + 1) * found[0])


def capture_all(engine: EngineCore, max_batch_size: int, lengths: Sequence[int]) -> None:
    """One step of every size and each number of drafts in ``lengths``: no later greedy step captures a CUDA graph."""
    for size in engine.sizes(max_batch_size):
        for k in lengths:
            _step_times(engine, size, StepPlan(num_drafts=k), 1)


def positions(num_sequences: int, num_drafts: int, max_prefill_tokens: int) -> int:
    """How long each of so many sequences may become while steps are timed."""
    num_steps = _UNTIMED + _TIMED + _steps_before(num_sequences * _PROMPT, max_prefill_tokens)
    return _PROMPT + _new_tokens(num_drafts, num_steps)


def _steps_before(num_tokens: int, max_prefill_tokens: int) -> int:
    """Of the first sequence, while the prompts of all, of ``num_tokens``, take more prefill passes."""
    return -(-num_tokens // max_prefill_tokens) - 1


def _new_tokens(num_drafts: int, num_steps: int) -> int:
    """What so many steps may give, and as many as may be in flight."""
    return (num_steps + 2) * (num_drafts + 1)


def _step_times(
    engine: EngineCore, size: int, plan: StepPlan, enough: int, prompt: int = _PROMPT
) -> list[float]:
    """Seconds of ``enough`` steps of ``size`` new sequences, so that contexts are alike; none without room for them."""
    times: list[float] = []

    def record(row: EngineRow) -> None:
        if isinstance(row, PassRow) and row.kind == "decode" and row.num_sequences == size:
            # with what the device waits for the host, where that is slower
            times.append(row.seconds + row.idle)

    num_steps = enough + _steps_before(size * prompt, engine.max_prefill_tokens)
    sampling = SamplingParams(max_tokens=_new_tokens(plan.num_drafts, num_steps), ignore_eos=True)
    draw = random.Random(0)  # distinct tokens: equal sequences would share the experts that each touches
    prompts = [
        Request(
            id=f"timed {i}",
            prompt_token_ids=tuple(draw.randrange(engine.vocab_size) for _ in range(prompt)),
            sampling=sampling,
        )
        for i in range(size)
    ]
    with engine.rehearsal(record):
        finished = [refused for request in prompts if (refused := engine.submit(request)) is not None]
        engine.spec_length = FixedPlan(plan)
        while len(times) < enough and not finished:
            finished = engine.step()
    return [] if finished else times


def costs_for(config: EngineConfig, checkpoints: Checkpoints, measure: Callable[[], StepCosts]) -> StepCosts:
    """Those kept for a resolved ``config``, or measured now and kept.

    Nothing is kept of a CPU, whose other programs come and go, nor where the driver of a GPU cannot be read, nor where
    the cache had no room for all sizes, or for long contexts. A file that cannot be read, or written, costs a line in
    the log.
    """
    key = key_of(config, checkpoints)
    if key is None:
        return measure()
    points = {
        (size, plan.num_drafts, plan.quarters)
        for size, plans in timed_plans(config.max_batch_size, config.draft_length).items()
        for plan in plans
    }
    kept = KEPT.read(_text(key).encode(), partial(_checked, key=key, points=points))
    if kept is not None:
        return kept
    costs = measure()
    if _points(costs) == points and costs.of_position[0]:
        found = {
            name: [[*point, each] for point, each in sorted(vars(costs)[name].items())] for name in _TABLES
        }
        KEPT.write(_text(key).encode(), {"key": key, **found, "of_position": costs.of_position})
    return costs


_TABLES = ("seconds", "partial")


def _points(costs: StepCosts) -> set[tuple[int, int, int | None]]:
    """Size, K and quarters of each step that was timed."""
    return {*((size, k, None) for size, k in costs.seconds), *costs.partial}


def key_of(config: EngineConfig, checkpoints: Checkpoints) -> dict[str, Any] | None:
    """All that the costs depend on; None where they are not to be kept."""
    if config.device == "cpu":
        return None
    state = machine_state(uuid(config.device))
    if "driver" not in state:
        return None
    engine = config.to_json()
    del engine["chat_template_kwargs"]  # with the date in it
    return {
        "device": device(config.device),
        "state": {name: state.get(name) for name in _STATE},
        "versions": versions(),
        "source": _source(),
        "own_kernels": runs_on(torch.device(config.device)),  # which the machine may not be able to compile
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SET)},
        "engine": engine,
        "checkpoints": {role: _identity(checkpoint) for role, checkpoint in checkpoints.items()},
    }


def _identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """Its configuration, and its files as far as their names, sizes and times tell."""
    found = [(file, file.stat()) for file in checkpoint.files]
    return {
        "config": checkpoint.config,
        "files": [[file.name, state.st_size, state.st_mtime_ns] for file, state in found],
    }


def _source() -> str:
    """Of this package: a change of the code may change what a step takes, and no version with it."""
    total = hashlib.sha256()
    root = Path(str(files("specgen")))
    for file in sorted(file for file in root.rglob("*") if file.suffix in (".py", ".cu", ".cuh", ".toml")):
        total.update(f"{file.relative_to(root)} {file.stat().st_size}\n".encode())
        total.update(file.read_bytes())
    return total.hexdigest()


def _checked(
    found: Any,  # noqa: ANN401
    key: Mapping[str, Any],
    points: set[tuple[int, int, int | None]],
) -> StepCosts | None:
    """None for what is not of ``key`` and ``points``."""
    tables: dict[str, Any] = {
        name: {tuple(map(int, point)): float(each) for *point, each in found[name]} for name in _TABLES
    }
    none, most = map(float, found["of_position"])
    every = chain([none, most], *(table.values() for table in tables.values()))
    sound = all(math.isfinite(each) and each > 0 for each in every)
    if not sound or _text(found["key"]) != _text(key):
        return None
    costs = StepCosts(**tables, of_position=(none, most))
    return costs if _points(costs) == points else None


def _text(key: Any) -> str:  # noqa: ANN401
    return json.dumps(key, sort_keys=True)
