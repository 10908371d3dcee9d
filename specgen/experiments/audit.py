"""The losslessness audit: the same prompts, greedy, with and without speculation, and where texts diverge."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from specgen.checkpoints.fingerprint import fingerprint
from specgen.config import EngineConfig, SamplingParams, require
from specgen.core.sequence import Completion, Request
from specgen.engine.arms import DECODING, Arm
from specgen.engine.choices import resolve
from specgen.engine.conversations import first_turns
from specgen.engine.generation_config import FILE, generation_config
from specgen.engine.loading import Models, load_models, open_checkpoints
from specgen.engine.warm_engine import Run, WarmEngine
from specgen.experiments.divergence import Judge
from specgen.prompts.load import DataSource
from specgen.record.progress import Progress, Tally
from specgen.record.provenance import manifest
from specgen.record.record_rows import EngineRow


@dataclass(frozen=True, kw_only=True)
class AuditJob:
    """One run of ``specgen verify``: ``engine`` with speculation, at each of ``batch_sizes``."""

    engine: EngineConfig
    sampling: SamplingParams
    data: DataSource
    batch_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        require(
            self.engine.draft_length.most > 0,
            "num-spec-tokens is 0, which leaves no speculation to verify: use 1 to 16",
        )
        assert self.batch_sizes
        assert self.sampling.temperature == 0, "only greedy texts can be compared"


def audit(job: AuditJob, progress: Progress) -> dict[str, Any]:
    """Decode the first turns in every arm and compare with plain decoding at the smallest batch size: the document.

    All arms share one set of weights. ``failures`` says which requests were not run and why. ``UserError`` if an arm,
    or every prompt, cannot run.
    """
    checkpoints = open_checkpoints(job.engine)
    config = resolve(job.engine, checkpoints)
    opened = job.data.open()
    prompts = list(opened)
    for sentence in opened.notes.sentences():
        progress.warn(sentence)
    generation = generation_config(checkpoints["model"], config.generation_config)
    said, sampling = generation.sentence(), generation.over(job.sampling)
    if said:
        progress.note(f"{FILE}: {said}")
    models = load_models(config, checkpoints)
    requests, failures = first_turns(prompts, models.tokenizer, sampling)
    first, *others = _arms(distinct(job.batch_sizes, len(requests)))
    decode = partial(_decode, config=config, models=models, requests=requests, progress=progress)
    reference, target = decode(first).completions, Judge.of(config, models)
    failures += [f"{c.request.id}: {c.error}" for c in reference.values() if c.error]
    answered = {name: completion for name, completion in reference.items() if completion.error is None}
    require(
        bool(answered),
        f"none of the prompts of {job.data.dataset} can be run: {(failures or ['no prompt'])[0]}",
    )
    arms = [_compare(arm, decode(arm), answered, target) for arm in others]
    divergences = [each for arm in arms for each in arm["divergences"]]
    return {
        "reference": _arm_json(first),
        "dtype": config.formats,
        "num_unexplained": sum(not each["explained"] for each in divergences),
        "arms": arms,
        "failures": failures,
        "manifest": _manifest(replace(job, sampling=sampling), config, models)
        | ({"settings": {"generation config": said}} if said else {}),
    }


def distinct(batch_sizes: Sequence[int], num_requests: int) -> list[int]:
    """Those of ``batch_sizes`` that run differently: of several that hold all requests the smallest."""
    sizes = sorted(set(batch_sizes))
    return [size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] < num_requests]


def _arms(batch_sizes: Sequence[int]) -> list[Arm]:
    """The arms: plain decoding at the smallest batch size first."""
    return [
        Arm(
            name=f"{decoding}, batch {size}",
            # without the prefix cache, so that the reference does not share a bug of it
            changes={"decoding": decoding, "batch": size}
            | ({"prefix_cache": False} if decoding == "plain" else {}),
        )
        for decoding in DECODING
        for size in batch_sizes
    ]


def _arm_json(arm: Arm) -> dict[str, Any]:
    return {"name": arm.changes["decoding"], "batch_size": arm.changes["batch"]}


def _decode(
    arm: Arm, config: EngineConfig, models: Models, requests: Sequence[Request], progress: Progress
) -> Run:
    if config.device != "cpu":
        progress.prepare(arm.name)
    engine, tally = WarmEngine(arm.configure(config), models, requests), Tally()

    def see(row: EngineRow) -> None:
        tally.see(row)
        progress.see(row)

    progress.start(arm.name, tally, len(requests))
    run = engine.run(see, lambda _: progress.advance())
    progress.finish()
    return run


def _compare(arm: Arm, run: Run, reference: Mapping[str, Completion], target: Judge) -> dict[str, Any]:
    """The texts of ``arm`` against the reference's."""
    found = [
        target.first_divergence(
            name,
            ours.request.prompt_token_ids,
            ours.token_ids,
            run.completions[name].token_ids,
            ours.request.sampling,
        )
        for name, ours in reference.items()
    ]
    num_identical = found.count(None)
    return {
        **_arm_json(arm),
        "num_requests": len(found),
        "num_identical": num_identical,
        "identical": num_identical / len(found),
        "mean_acceptance_length": run.report.mean_acceptance_length,  # None without drafts
        "divergences": [asdict(each) | {"explained": each.explained} for each in found if each is not None],
    }


def _manifest(job: AuditJob, config: EngineConfig, models: Models) -> dict[str, Any]:
    fingerprints = {name: fingerprint(checkpoint) for name, checkpoint in models.checkpoints.items()}
    return manifest(engine=config, sampling=job.sampling, data=job.data.to_json(), fingerprints=fingerprints)
