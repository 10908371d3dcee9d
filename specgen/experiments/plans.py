"""What is known before a weight is read: requests, the arms that can run and their memory; a dry run prints it."""

import gc
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import torch

from specgen.checkpoints import lora
from specgen.checkpoints.fingerprint import fingerprint
from specgen.checkpoints.inspect_checkpoint import Weights
from specgen.config import EngineConfig, SamplingParams, UserError, require
from specgen.core.sequence import Request
from specgen.engine.arms import Arm
from specgen.engine.build import most_demanding
from specgen.engine.choices import Checkpoints, needed_modules, resolve
from specgen.engine.generation_config import FILE, GenerationConfig, generation_config
from specgen.engine.loading import Models, load_models, open_checkpoints, outline
from specgen.experiments.tune_job import Workload
from specgen.experiments.workload import Prompts, kv_bytes, make_prompts
from specgen.ops.jit_modules import compile_missing
from specgen.record.provenance import cpu_name, manifest, versions, with_recorded_date
from specgen.report import display
from specgen.report.table import Column, Row, Table
from specgen.report.terminal import Part

_OVERHEAD = {"cpu": 0, "cuda": 1 << 30}  # bytes of an engine beside its KV cache: workspaces and graphs


def environment(device: str) -> dict[str, str]:
    """The name of the GPU or CPU, and the versions of the software."""
    on_cpu = device == "cpu"
    found = {
        "device": cpu_name() if on_cpu else torch.cuda.get_device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if on_cpu:
        return found
    return found | {"cuda": str(torch.version.cuda), "flashinfer": versions()["flashinfer-python"]}


def conditions(config: EngineConfig, models: Models) -> Row:
    """The environment, target, drafter and dtype, and whether the weights are synthetic."""
    weights = "synthetic" if models.synthetic else "as trained"
    return {
        **environment(config.device),
        **({} if config.tensor_parallel == 1 else {"tensor parallel": config.tensor_parallel}),
        "model": f"{display.checkpoint_name(config.model)}, {config.formats}, weights {weights}",
        **({} if config.lora is None else {"LoRA": lora.summary(models.checkpoints["model"])}),
        "drafter": display.checkpoint_name(str(config.drafter)),
    }


def free_memory() -> None:
    """Return unreferenced memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An arm that can run here, and its memory."""

    arm: Arm
    config: EngineConfig  # resolved
    requests: tuple[Request, ...]
    kv_bytes: int  # of the requests in the batch
    overhead: int  # bytes of the engine beside its KV cache

    @classmethod
    def of(cls, arm: Arm, config: EngineConfig, models: Models, requests: tuple[Request, ...]) -> Self:
        """The plan of an arm with its resolved ``config``; ``models`` may be without weights."""
        need, overhead = kv_bytes(config, models, requests), _OVERHEAD[torch.device(config.device).type]
        return cls(arm=arm, config=config, requests=requests, kv_bytes=need, overhead=overhead)

    @property
    def num_bytes(self) -> int:
        """Bytes that the engine takes beside the weights."""
        return self.kv_bytes + self.overhead


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a bench has before it begins: its pair, without weights, and plans; ``notes`` say which arms have none."""

    base: EngineConfig  # resolved
    workload: Workload
    checkpoints: Checkpoints
    models: Models  # on the device meta
    prompts: Prompts
    plans: list[Plan]
    notes: list[str]
    generation_defaults: GenerationConfig

    def load(self) -> Models:
        """The pair with its weights; what any of the arms needs compiled is, all of it at once."""
        compile_missing(
            module
            for plan in self.plans
            for module in needed_modules(
                plan.config, self.checkpoints, most_demanding(each.sampling for each in plan.requests)
            )
        )
        return load_models(self.base, self.checkpoints)

    def manifest(self, own: dict[str, Any]) -> dict[str, Any]:
        """What decides the numbers: device, versions, weights, requests, and ``own``, which is the bench's.

        Fingerprints read all weights.
        """
        tokens = sha256()
        for request in self.prompts.requests:
            tokens.update(f"{request.prompt_token_ids} {request.sampling}\n".encode())
        path = self.workload.data_path
        data = {"dataset": self.workload.dataset, "data_path": str(path) if path else None}
        found = manifest(
            engine=self.base,
            sampling=self.generation_defaults.over(SamplingParams(max_tokens=self.workload.max_new_tokens)),
            data=data | {"requests": tokens.hexdigest()},
            fingerprints={role: fingerprint(each) for role, each in self.checkpoints.items()},
        )
        return found | {"bench": own}


def prepare(
    arms: Sequence[Arm],
    engine: EngineConfig,
    workload: Workload,
    *,
    record: Path | None = None,
) -> Setup:
    """Resolve everything; ``engine`` is the configuration that arms change.

    ``record`` is the manifest of a bench that may go on, whose date chat templates see. ``UserError`` if no arm
    can run, or no prompt.
    """
    checkpoints = open_checkpoints(engine)
    base = resolve(engine, checkpoints)
    if record is not None:
        base = with_recorded_date(base, engine, record)
    models = outline(base, checkpoints)
    generation_defaults = generation_config(checkpoints["model"], base.generation_config)
    count = max(workload.count(arm.configure(base).max_batch_size) for arm in arms)
    prompts = make_prompts(workload, models, count, generation_defaults)
    if engine.synthetic_acceptance:  # an end is found by chance in such a text
        prompts = prompts.ignoring_eos()
    plans: list[Plan] = []
    notes: list[str] = []
    for arm in arms:
        try:
            config = resolve(arm.configure(engine), checkpoints)
            config.synthetic_chances()  # refuses a length that this K cannot have
        except UserError as error:
            notes.append(f"not run: {arm.name}: {error}")
            continue
        requests = prompts.requests[: workload.count(config.max_batch_size)]
        plans.append(Plan.of(arm, config, models, requests))
    any_drafts = any(plan.config.draft_length.most for plan in plans) or not engine.synthetic_acceptance
    require(bool(plans) and any_drafts, f"no arm can run here: {notes[0] if notes else 'none is asked for'}")
    return Setup(
        base=base,
        workload=workload,
        checkpoints=checkpoints,
        models=models,
        prompts=prompts,
        plans=plans,
        notes=[
            *(f"{FILE}: {each}" for each in [generation_defaults.sentence()] if each),
            *prompts.notes,
            *notes,
        ],
        generation_defaults=generation_defaults,
    )


def all_together(plans: Sequence[Plan], room: int) -> list[Plan]:
    """``plans`` as one group: with the KV cache that their requests need, or an equal part each of too little room.

    A KV cache whose size the user gave keeps it.
    """
    if plans[0].config.kv_memory is not None:
        return list(plans)
    if sum(plan.num_bytes for plan in plans) <= room:
        return [with_kv_size(plan) for plan in plans]
    return [replace(plan, config=replace(plan.config, kv_memory=room // len(plans))) for plan in plans]


def with_kv_size(plan: Plan) -> Plan:
    """``plan`` with the KV cache that its requests need."""
    return replace(plan, config=replace(plan.config, kv_memory=plan.kv_bytes))


_GB = 1e9
_COLUMNS = (
    Column(name="arm"),
    Column(name="prompts"),
    Column(name="new_tokens"),
    Column(name="engine", unit="GB"),
    Column(name="repeats"),
)


def forecast(setup: Setup, repeats: str, budget: float | None = None) -> Iterator[Part]:
    """The arms, each with so many ``repeats``, then a few sentences; ``budget`` is in seconds."""
    rows = tuple(
        {
            "arm": plan.arm.name,
            "prompts": len(plan.requests),
            "new_tokens": sum(request.sampling.max_tokens for request in plan.requests),
            "engine": plan.num_bytes / _GB,
            "repeats": repeats,
        }
        for plan in setup.plans
    )
    yield Table(title="The arms", columns=_COLUMNS, rows=rows)
    within = (
        [
            f"By the budget nothing begins that would not end within {display.duration(budget)}, prompts and weights "
            "counted; the batch sizes share it."
        ]
        if budget is not None
        else []
    )
    yield "\n".join([*within, _memory(setup), *setup.notes, "Nothing was run."])


def _memory(setup: Setup) -> str:
    """Weights as stored, the largest engine, and what the device has."""
    models = setup.models
    configs = {
        "model": models.target.config,
        **({} if models.head is None else {"drafter": models.head.config}),
    }
    weights = sum(Weights.of(setup.checkpoints[role], config).num_bytes for role, config in configs.items())
    largest = max(plan.num_bytes for plan in setup.plans)
    found = f"Weights take {weights / _GB:.2f} GB as stored, the largest engine beside them {largest / _GB:.2f} GB"
    if setup.base.device == "cpu":
        return f"{found}."
    free, total = torch.cuda.mem_get_info(setup.base.device)
    return f"{found}; {free / _GB:.1f} of {total / _GB:.1f} GB of the GPU are free."
