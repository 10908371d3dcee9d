"""The job that ``specgen generate`` runs, and its manifest."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specgen.checkpoints.fingerprint import files_of, fingerprint, state_of
from specgen.config import Cluster, EngineConfig, FormatName, SamplingParams, TemplateKwargs, require
from specgen.engine.choices import Checkpoints, attention_note, choose_attention, kv_note
from specgen.engine.generation_config import generation_config
from specgen.engine.loading import described
from specgen.jobs.prompt_index import WHOLE, PromptIndex, Shard
from specgen.prompts.formats import AS_IT_IS, Reading
from specgen.prompts.load import STDIN
from specgen.record.provenance import manifest
from specgen.report.display import devices, from_here, several


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of ``specgen generate``, which more than ``max_failures`` failed requests end (None: no limit).

    A ``format`` other than ``jsonl`` is written as well, and so is ``config``, a file that repeats the command. Of
    the first ``num_prompts`` prompts (None: all) those of ``shard`` are run, in this process or on the workers of a
    ``cluster``. The checkpoint may say what fields of ``sampling`` are that are not ``given`` (see
    ``EngineConfig.generation_config``).
    """

    engine: EngineConfig
    sampling: SamplingParams
    given: frozenset[str] = frozenset()
    dataset: str
    data_path: Path | None
    num_prompts: int | None
    baseline: bool
    shard: Shard = WHOLE
    cluster: Cluster | None = None
    restart: bool = False  # the existing output is renamed
    max_failures: int | None = None
    format: FormatName = "jsonl"
    config: str | None = None  # YAML
    served_model_name: str | None = None  # in reports and OpenAI's bodies, instead of the model's path
    how: Reading = AS_IT_IS  # the rows of the data set are read
    steps: bool = True  # rows have the steps of their request

    def __post_init__(self) -> None:
        require(
            self.max_failures is None or self.max_failures >= 0,
            f"max-failures is {self.max_failures}: use 0 or more",
        )
        require(
            self.served_model_name != "", "served-model-name is empty: leave it out for the model's own name"
        )

    @property
    def is_repeatable(self) -> bool:
        """Whether another process can read the same prompts: a pipe can be read only once."""
        path = self.data_path or Path(self.dataset)
        return self.dataset != STDIN and (path.is_file() or path.is_dir() or not path.exists())


def without_effect(job: Job, index: PromptIndex) -> Iterator[str]:
    """A sentence on options of ``job`` that change nothing, if there are any."""
    asked, drafts = job.sampling, job.engine
    sampled = drafts.draft_sampling == "probabilistic"
    if sampled and drafts.head is None:
        yield "draft-sampling changes nothing without a head that drafts: leave it out"
    rows = any(row.get("temperature") for row in index.sampling)
    if asked.temperature > 0 or rows:
        return
    filters = {"top-p": asked.top_p < 1, "top-k": asked.top_k > 0, "min-p": asked.min_p > 0}
    given = [
        name for name, given in (filters | {"draft-sampling": sampled and bool(drafts.head)}).items() if given
    ]
    if given:
        verb = "changes" if len(given) == 1 else "change"
        yield f"{' and '.join(given)} {verb} nothing at temperature 0, which is greedy: set --temperature"


def job_manifest(
    job: Job,
    config: EngineConfig,
    checkpoints: Checkpoints,
    index: PromptIndex,
    prompt_files: Iterable[Path],
    *,
    with_fingerprints: bool,
) -> dict[str, Any]:
    """The content of ``manifest.json``; ``config`` is the job's engine, resolved. Fingerprints read all weights."""
    found = checkpoints if with_fingerprints else {}
    data = {
        "dataset": job.dataset,
        "data_path": str(job.data_path) if job.data_path else None,
        "num_prompts": job.num_prompts,
        "sha256": index.digest,
        "shard": str(job.shard),
    }
    return manifest(
        engine=config,
        sampling=job.sampling,
        data=data,
        fingerprints={name: fingerprint(checkpoint) for name, checkpoint in found.items()},
        files={name: files_of(checkpoint) for name, checkpoint in found.items()}
        | {"prompts": {str(file): state_of(file) for file in prompt_files}},
    ) | {
        # absent unless given, so that a run of an earlier version goes on
        **({} if job.served_model_name is None else {"served_model_name": job.served_model_name}),
        **({} if job.steps else {"steps": False}),
        "settings": _settings(job, config, checkpoints, index.num_prompts),
    }


def _settings(job: Job, config: EngineConfig, checkpoints: Checkpoints, num_prompts: int) -> dict[str, str]:
    """The configuration as a report shows it, by label."""
    _, why = choose_attention(replace(config, attention=job.engine.attention), checkpoints)
    model = checkpoints["model"]
    generation = generation_config(model, config.generation_config).sentence(job.given)
    return {
        "model": job.served_model_name or described(config.model, model),
        "drafter": from_here(str(config.drafter)) if config.draft_length.most else "none (plain decoding)",
        "draft tokens (K)": str(config.draft_length),
        **({} if config.head is None else {"drafter batch": config.drafter_batch}),
        **({} if config.draft_sampling == "greedy" else {"draft sampling": config.draft_sampling}),
        "data": f"{job.dataset}, {several(num_prompts, 'prompt')}",
        **({} if job.shard == WHOLE else {"shard": str(job.shard)}),
        **({} if config.template_kwargs == TemplateKwargs() else {"template": str(config.template_kwargs)}),
        "sampling": job.sampling.in_words(),
        **({"generation config": generation} if generation else {}),
        "runs on": f"{devices(config.device, config.tensor_parallel)}, {config.dtype}",
        **kv_note(config, job.engine),
        "attention": f"{attention_note(config, checkpoints)}: {why}",
        **({} if job.cluster is None else {"workers": f"{job.cluster.num_workers} on Ray, at once"}),
        **({} if config.device == "cpu" else {"CUDA graphs": config.cuda_graphs}),
        "batch": f"at most {config.max_batch_size}",
        **({} if job.steps else {"steps": "not kept (--no-steps), so no texts on the page"}),
    }
