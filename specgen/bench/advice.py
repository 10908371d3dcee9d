"""What a tune found, in sentences to act on, and the command that runs it."""

import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from specgen import bundled, display
from specgen.bench.matrices import Workload
from specgen.bench.race import DROPPING, Standing
from specgen.bench.repeats import Repeats, Speedup
from specgen.config import DraftLength, EngineConfig
from specgen.engine.arms import Arm
from specgen.template_kwargs import TemplateKwargs

_RUN_AS_MEASURED = (  # options of ``generate`` that are kept where they are not its defaults
    "device",
    "tensor_parallel",
    "dtype",
    "kv_dtype",
    "attention",
    "cuda_graphs",
    "gpu_memory_utilization",
    "max_prefill_tokens",
    "generation_config",
)


def sentence(batch: int, standing: Standing) -> str:
    """The fastest arm at a batch size, by how much, and what is no different; of at least one arm."""
    best, found = standing.best, standing.arms[standing.best]
    if not standing.is_judged:
        ratio = display.ratio(standing.over_reference(best).ratio)
        ahead = f", {ratio} of plain" if standing.plain in standing.arms and best != standing.plain else ""
        return (
            f"At batch {batch}: no verdict, as one repeat has no spread ({_label(best)} was ahead{ahead}): raise "
            "--budget or --repeats."
        )
    parts = [f"At batch {batch}: {_label(best)}"]
    if standing.plain not in standing.arms:
        parts.append("the fastest; plain decoding was not measured")
    elif best != standing.plain:
        parts.append(f"{interval_of(standing.over_reference(best))} of plain")
    parts += [each for each in (_latency(found), f"{display.count(found.speed.median)} tokens/s") if each]
    return "; ".join([", ".join(parts), *_others(standing)]) + "."


def dropped(standing: Standing, arm: str) -> str:
    """Why ``arm`` gets no more repeats."""
    ratio, most = display.ratio(standing.over_best(arm).ratio), display.ratio(standing.at_most(arm))
    done = len(standing.arms[arm].each)
    return (
        f"dropped: {arm}: {ratio} of {_label(standing.best)} after {done} repeats, at {display.percent(DROPPING)} "
        f"confidence at most {most}"
    )


def interval_of(found: Speedup) -> str:
    """``1.87x [1.84, 1.90]``"""
    if found.interval is None:
        return f"{display.ratio(found.ratio)} (one repeat, no interval)"
    return f"{display.ratio(found.ratio)} {display.between(found.interval, display.plain)}"


def _others(standing: Standing) -> Iterator[str]:
    """The same K with the other drafter batch, ``auto``, and whatever else may be as fast."""
    best = standing.best
    k = _label(best).partition(", ")[0]
    twins = [arm for arm in standing.arms if arm != best and _label(arm).partition(", ")[0] == k]
    autos = [arm for arm in standing.arms if _label(arm).startswith("K auto") and arm != best]
    for arm in twins:
        yield _beside(standing, arm, _label(arm).partition(", ")[2])
    if autos and not k.endswith("auto"):
        fastest = max(autos, key=lambda arm: standing.over_best(arm).ratio)
        yield _beside(standing, fastest, _label(fastest).removeprefix("K "))
    told = {*twins, *autos}
    alike = [_label(arm) for arm in standing.arms if arm not in told and standing.no_different(arm)]
    if alike:
        yield f"no different: {' and '.join(alike)}"
    if best == standing.plain and len(standing.arms) > 1:
        drafting = max((a for a in standing.arms if a != best), key=lambda arm: standing.over_best(arm).ratio)
        yield f"with drafts at best {_label(drafting)}, {interval_of(standing.over_best(drafting))} of plain"


def _beside(standing: Standing, arm: str, name: str) -> str:
    """How ``arm`` compares with the best one."""
    found = interval_of(standing.over_best(arm))
    return f"{name} no different, {found}" if standing.no_different(arm) else f"{name} {found} of that"


def _label(arm: str) -> str:
    """The name of an arm without its batch size."""
    return arm.partition(", ")[2]


def _latency(repeats: Repeats) -> str:
    seconds = repeats.median(lambda repeat: repeat.tpot.median if repeat.tpot else None)
    return "" if seconds is None else f"{display.seconds(seconds)} per token"


def command(arm: Arm, engine: EngineConfig, workload: Workload, data_path: Path | None) -> str:
    """The ``specgen generate`` that runs as ``arm`` did; ``engine`` is what the arms changed."""
    config, words = arm.configure(engine), ["specgen", "generate"]
    if (engine.model, engine.drafter) != bundled.pair(None, None, DraftLength(most=1)):
        words += ["--model", engine.model]
        if config.draft_length.most:
            words += ["--drafter", str(engine.drafter)]
    words += ["--dataset", workload.dataset]
    if data_path is not None:
        words += ["--data-path", str(data_path)]
    how = workload.how
    words += [] if how.split is None else ["--split", how.split]
    words += [] if how.prompt_field is None else ["--prompt-field", how.prompt_field]
    words += [] if how.chat is None else ["--chat" if how.chat else "--raw"]
    if engine.template_kwargs != TemplateKwargs():  # others are other prompts
        words += ["--chat-template-kwargs", str(engine.template_kwargs)]
    words += ["--max-batch-size", str(config.max_batch_size)]
    length = config.draft_length
    words += ["--num-spec-tokens", "auto" if length.auto else str(length.most)]
    if config.head is not None:
        words += ["--drafter-batch", config.drafter_batch]
    if workload.output_lens == "fixed":
        words += ["--max-new-tokens", str(workload.max_new_tokens)]
    defaults = {each.name: each.default for each in fields(EngineConfig)}
    for name in _RUN_AS_MEASURED:
        value = getattr(config, name)
        if value != defaults[name]:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)
