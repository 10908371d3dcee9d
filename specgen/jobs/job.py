"""The job that ``specgen generate`` runs, as its options say it."""

from dataclasses import dataclass

from specgen.config import Cluster, EngineConfig, FormatName, SamplingParams, option, require
from specgen.config.urls import Url, location
from specgen.jobs.shards import WHOLE, Shard, parse_shard
from specgen.prompts.load import STDIN, DataSource

FORMAT = option(
    "jsonl",
    "Results",
    "Written too: openai for batch_output.jsonl and batch_errors.jsonl in the format of OpenAI's Batch API, "
    "parquet for completions.parquet.",
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of ``specgen generate``, in this process or on the workers of a ``cluster``.

    The checkpoint may say what fields of ``sampling`` are that are not ``given`` (see
    ``EngineConfig.generation_config``). ``config`` is a YAML file that repeats the command, to be written as well.
    """

    engine: EngineConfig
    sampling: SamplingParams
    given: frozenset[str] = frozenset()
    data: DataSource
    shard: Shard = option(
        WHOLE,
        "Prompts",
        "Run shard I of N, counted from 0: every N-th prompt, such as 0/4 on one machine and 1/4 on another. With auto "
        "the scheduler says which (Slurm, SkyPilot, dstack, torchrun), and its directory is --output's I-of-N. "
        "`specgen merge` merges the directories.",
        metavar="I/N|auto",
        shown="all",
        parse=parse_shard,
    )
    cluster: Cluster | None = None
    restart: bool = option(
        False, "Results", "Start over; the existing directory is kept, renamed with the suffix .1."
    )
    retry_errors: bool = option(
        False,
        "Results",
        "Run the rows of --output's run that failed again, also as a corrected prompts file has them: rows with an "
        "answer keep it and must be as they were.",
    )
    format: FormatName = FORMAT
    served_model_name: str | None = option(
        None, "Results", "Name of the model in reports and OpenAI's bodies.", shown="its directory or hub id"
    )
    no_steps: bool = option(
        False,
        "Results",
        "Keep no drafts of single steps, which take most of the space: the report has the same numbers, but its page "
        "shows no texts.",
    )
    max_failures: int | None = option(
        None, "Results", "End the run when more requests than this have failed.", shown="no limit"
    )
    baseline: bool = option(False, "Results", "Run plain decoding on the same prompts too and compare.")
    config: str | None = None

    def __post_init__(self) -> None:
        require(
            self.max_failures is None or self.max_failures >= 0,
            f"max-failures is {self.max_failures}: use 0 or more",
        )
        require(
            not (self.restart and self.retry_errors),
            "restart and retry-errors are both given: one starts over, the other keeps what is answered; choose one",
        )
        require(
            self.served_model_name != "", "served-model-name is empty: leave it out for the model's own name"
        )

    @property
    def is_repeatable(self) -> bool:
        """Whether another process can read the same prompts: a pipe can be read only once."""
        path = self.data.data_path or location(self.data.dataset)
        if self.data.dataset == STDIN or isinstance(path, Url):
            return self.data.dataset != STDIN
        return path.is_file() or path.is_dir() or not path.exists()
