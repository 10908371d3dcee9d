"""The throughput bench: the arms of a matrix on one workload, in one process.

Not in the times: loading, compilation, CUDA graph capture and one warm-up run of the workload by every engine. In the
times: prefill, without a prefix cache. Every repeat has the same prompts, so repeats differ in time only.

Arms alternate within a repeat (a b c, a b c) as far as their engines fit together into half of the memory that the
weights leave; the other half is for activations and captures. Neighbours form a group. An arm that does not fit with
others runs all its repeats before the next arm, because building its engine again for every repeat would take longer
than the measurement. The conditions list the groups.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specgen.bench.bound import StepBytes
from specgen.bench.device_speed import copy_bandwidth
from specgen.bench.environment import conditions, free_memory
from specgen.bench.known_text import KnownText
from specgen.bench.matrices import Matrix, Workload
from specgen.bench.output import BenchTable
from specgen.bench.repeats import Repeat, Repeats, Yardstick
from specgen.bench.throughput_table import Result, table
from specgen.bench.workload import Prompts, kv_bytes, make_prompts
from specgen.config import EngineConfig, UserError, require
from specgen.core.sequence import Request
from specgen.engine.arms import Arm
from specgen.engine.choices import resolve
from specgen.engine.loading import Models, load_models, open_checkpoints
from specgen.engine.warm_engine import WarmEngine
from specgen.report.table import Row

_CPU_BYTES = 1 << 30  # for engines that alternate
_OVERHEAD = {"cpu": 0, "cuda": 1 << 30}  # bytes of an engine beside its KV cache: workspaces and graphs


@dataclass(frozen=True, kw_only=True)
class ThroughputJob:
    """One run of ``specgen bench throughput``; ``engine`` is the configuration that arms change."""

    matrix: Matrix
    workload: Workload
    engine: EngineConfig
    data_path: Path | None
    repeats: int

    def __post_init__(self) -> None:
        require(self.repeats >= 1, f"repeats is {self.repeats}: use at least 1")
        require(
            self.engine.draft_length.most >= 1,
            "num-spec-tokens is 0, but plain decoding is an arm of its own: use 1 to 16",
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An arm that can run here, and its memory."""

    arm: Arm
    config: EngineConfig  # resolved
    requests: tuple[Request, ...]
    kv_bytes: int  # of the requests in the batch
    overhead: int  # bytes of the engine beside its KV cache


def throughput(job: ThroughputJob) -> Iterator[BenchTable]:
    """Yield the growing table after each repeat of each group of arms.

    An arm that cannot run, or fails, is a note. ``UserError`` if nothing can run.
    """
    checkpoints = open_checkpoints(job.engine)
    base = resolve(job.engine, checkpoints)
    bandwidth = copy_bandwidth(base.device)
    free_memory()
    models = load_models(base, checkpoints)
    sizes, known = StepBytes.of(models), KnownText.of(models)
    yardstick = Yardstick(sizes=sizes, bytes_per_second=bandwidth, known=known)
    counts = [job.workload.count(arm.configure(base).max_batch_size) for arm in job.matrix.arms]
    prompts = make_prompts(job.workload, models, job.data_path, max(counts))
    plans, notes = _plans(job, models, prompts)
    require(bool(plans), f"no arm of {job.matrix.name} can run here: {(notes or ['it has none'])[0]}")
    notes = [*prompts.notes, *notes]
    groups = side_by_side(plans, _room(base))
    under = {**_conditions(job, base, models, prompts, groups), **yardstick.conditions}
    results: list[Result] = []
    for group in groups:
        for measured, failed in _measure(group, models, job.repeats, yardstick):
            yield table(job.matrix, under, [*results, *measured], [*notes, *failed])
        results += measured
        notes += failed
        free_memory()


def _plans(job: ThroughputJob, models: Models, prompts: Prompts) -> tuple[list[Plan], list[str]]:
    """The arms that can run, and why others cannot."""
    plans, notes = [], []
    for arm in job.matrix.arms:
        try:
            config = resolve(arm.configure(job.engine), models.checkpoints)
        except UserError as error:
            reason = str(error)
            for axis in job.matrix.axes:  # its own option changes no arm
                reason = reason.replace(f"--{axis.name.replace('_', '-')} ", f"--axis {axis.name}=")
            notes.append(f"not run: {arm.name}: {reason}")
            continue
        requests = prompts.requests[: job.workload.count(config.max_batch_size)]
        need, overhead = kv_bytes(config, models, requests), _OVERHEAD[torch.device(config.device).type]
        plans.append(Plan(arm=arm, config=config, requests=requests, kv_bytes=need, overhead=overhead))
    return plans, notes


def side_by_side(plans: Iterable[Plan], room: int) -> list[list[Plan]]:
    """Groups of neighbours whose engines fit into ``room`` bytes; one that needs more is alone.

    An engine that fits gets the KV cache that its requests need, any other the one of its configuration.
    """
    groups: list[list[Plan]] = []
    left = 0
    for plan in plans:
        need = plan.kv_bytes + plan.overhead
        fits = need <= room
        given = replace(plan, config=replace(plan.config, kv_memory=plan.kv_bytes)) if fits else plan
        if not groups or need > left:
            groups.append([])
            left = room
        groups[-1].append(given)
        left -= need
    return groups


def _room(config: EngineConfig) -> int:
    """Bytes for engines that alternate, with the weights loaded."""
    if config.device == "cpu":
        return _CPU_BYTES
    free_memory()
    free, total = torch.cuda.mem_get_info(config.device)
    return (free - int(total * (1 - config.gpu_memory_utilization))) // 2


def _measure(
    plans: Sequence[Plan], models: Models, repeats: int, yardstick: Yardstick
) -> Iterator[tuple[list[Result], list[str]]]:
    """Yield the results so far and a note per failed arm, after each repeat."""
    engines: dict[str, WarmEngine] = {}
    each: dict[str, list[Repeat]] = {plan.arm.name: [] for plan in plans}
    failed: dict[str, str] = {}
    for number in range(repeats + 1):
        for plan in plans:
            name = plan.arm.name
            if name in failed:
                continue
            try:
                if number == 0:
                    engines[name] = WarmEngine(plan.config, models, plan.requests)
                run = engines[name].run().whole()
                if number:
                    each[name].append(Repeat.of(run, yardstick))
            except Exception as error:  # one arm must not cost the others
                failed[name] = f"failed: {name}: {type(error).__name__}: {error}"
                engines.pop(name, None)
        if number:
            whole = [plan.arm for plan in plans if plan.arm.name not in failed]
            results = [Result(arm=arm, repeats=Repeats(each=tuple(each[arm.name]))) for arm in whole]
            yield results, list(failed.values())


def _conditions(
    job: ThroughputJob, config: EngineConfig, models: Models, prompts: Prompts, groups: list[list[Plan]]
) -> Row:
    each = "" if job.workload.num_prompts else " (two per batch slot, at least four)"
    fixed = {axis.name for axis in job.matrix.axes}
    return {
        **conditions(config, models),
        **({} if "K" in fixed else {"draft tokens (K)": config.draft_length.most}),
        **({} if "batch" in fixed else {"batch": f"at most {config.max_batch_size}"}),
        **({} if "attention" in fixed else {"attention": config.attention}),
        **({} if "cuda_graphs" in fixed else {"CUDA graphs": config.cuda_graphs}),
        "prompts": f"{prompts.description}{each}, greedy, at most {job.workload.max_new_tokens} new tokens",
        "time": "of generate, prefill included; no prefix cache; after one warm-up run of the workload",
        "repeats": f"{job.repeats}, the median, with the lowest and the highest; ratios are of the same repeat",
        "arms that took turns": "; ".join(str(len(group)) for group in groups),
        "same_texts": "share of the texts that are equal to those of the first row with the same prompts",
        "acceptance": "share of the steps that accepted more than 0, 1, ... drafts",
    }
