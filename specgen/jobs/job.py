"""What ``specgen generate`` is asked for, and the record of it that a run directory begins with."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specgen.checkpoints.checkpoint import fingerprint
from specgen.config import Cluster, EngineConfig, FormatName, SamplingParams, require
from specgen.display import from_here
from specgen.engine.choices import choose_attention
from specgen.engine.loading import Checkpoints, described
from specgen.jobs.shard import WHOLE, Shard
from specgen.jobs.survey import Survey
from specgen.prompts.load import STDIN
from specgen.rundir.provenance import manifest


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of ``specgen generate``. More than ``max_failures`` failed requests end it; None: none do.

    With a ``format`` other than ``jsonl`` its output is there in that format too. Of the first ``num_prompts`` prompts
    (None: all) those of ``shard`` are run, in this process or on the workers of a ``cluster``.
    """

    engine: EngineConfig
    sampling: SamplingParams
    dataset: str
    data_path: Path | None
    num_prompts: int | None
    baseline: bool
    shard: Shard = WHOLE
    cluster: Cluster | None = None
    restart: bool = False  # what the output holds is set aside
    max_failures: int | None = None
    format: FormatName = "jsonl"

    def __post_init__(self) -> None:
        require(
            self.max_failures is None or self.max_failures >= 0,
            f"max-failures is {self.max_failures}: use 0 or more",
        )

    @property
    def is_repeatable(self) -> bool:
        """Whether another process finds the same prompts: a pipe gives its content once."""
        path = self.data_path or Path(self.dataset)
        return self.dataset != STDIN and (path.is_file() or path.is_dir() or not path.exists())


def job_manifest(
    job: Job, config: EngineConfig, checkpoints: Checkpoints, found: Survey, *, with_fingerprints: bool
) -> dict[str, Any]:
    """What ``manifest.json`` holds; ``config`` is the job's engine, resolved. Fingerprints read all weights."""
    data = {
        "dataset": job.dataset,
        "data_path": str(job.data_path) if job.data_path else None,
        "num_prompts": job.num_prompts,
        "sha256": found.digest,
        "shard": str(job.shard),
    }
    return manifest(
        engine=config,
        sampling=job.sampling,
        data=data,
        fingerprints={
            name: fingerprint(checkpoint) for name, checkpoint in checkpoints.items() if with_fingerprints
        },
    ) | {"settings": _settings(job, config, checkpoints, found.num_prompts)}


def _settings(job: Job, config: EngineConfig, checkpoints: Checkpoints, num_prompts: int) -> dict[str, str]:
    """What runs, in the words that head a report."""
    _, why = choose_attention(replace(config, attention=job.engine.attention), checkpoints)
    sampling = job.sampling
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    plain = config.draft_length.most == 0
    return {
        "model": described(config.model, checkpoints["model"]),
        "drafter": "none (plain decoding)" if plain else from_here(str(config.drafter)),
        "draft tokens (K)": str(config.draft_length),
        **({} if plain else {"drafter batch": config.drafter_batch}),
        "data": f"{job.dataset}, {num_prompts} prompts",
        **({} if job.shard == WHOLE else {"shard": str(job.shard)}),
        "sampling": f"{how}, at most {sampling.max_tokens} new tokens, seed {sampling.seed}",
        "runs on": f"{config.device}, {config.dtype}",
        "attention": f"{config.attention}: {why}",
        **({} if job.cluster is None else {"workers": f"{job.cluster.num_workers} on Ray, at once"}),
        **({} if config.device == "cpu" else {"CUDA graphs": config.cuda_graphs}),
        "batch": f"at most {config.max_batch_size}",
    }
