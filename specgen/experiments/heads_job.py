"""``specgen compare`` over heads and data sets: a run of `specgen generate` for every two, then rounds of speeds."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product, takewhile
from pathlib import Path

from specgen.checkpoints.checkpoint import check_fit
from specgen.checkpoints.fingerprint import fingerprint
from specgen.config import EngineConfig, SamplingParams, UserError, lookup_of, require, under
from specgen.config.json_fields import load_json
from specgen.core.engine_core import discard
from specgen.core.sequence import Request
from specgen.engine.arms import Arm
from specgen.engine.build import room_for_turns
from specgen.engine.choices import choose_device, resolve
from specgen.engine.conversations import first_turns
from specgen.engine.generation_config import generation_config
from specgen.engine.loading import Models, OneTarget, load_chat_tokenizer, open_checkpoints
from specgen.experiments.head_figures import PLAN, ROUNDS, Comparison, as_directory, compare_runs, short_names
from specgen.experiments.plans import Plan, all_together
from specgen.experiments.rounds import LEAST_ROUNDS, PLAIN, Rounds, Search, Speeds, rounds_by_data
from specgen.experiments.turns import Turn, Turns, Watch
from specgen.jobs.job import Job
from specgen.jobs.run import run
from specgen.prompts import Prompt
from specgen.prompts.formats import Format
from specgen.prompts.load import STDIN, DataSource
from specgen.prompts.prompt import single_turns
from specgen.record.files import RowFile, Rows, write_json
from specgen.record.interrupt import StoppedError
from specgen.record.progress import Progress
from specgen.record.provenance import OF_THE_MOMENT, now, with_recorded_date

_METHOD = "turns as in tune: the KV cache that the requests need"  # other rounds are measured again
_REMEDY = "remove the directory, or name another"


@dataclass(frozen=True)
class HeadsJob:
    """``drafters`` one after another in the place of ``engine``'s, each on every data set.

    ``repeats`` is the number of rounds of speeds; 0 for none. Of ``sampling`` what is ``given`` is not the
    checkpoint's to say.
    """

    engine: EngineConfig
    drafters: tuple[str, ...]
    sampling: SamplingParams
    data: tuple[DataSource, ...]
    repeats: int
    given: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        require(
            self.repeats == 0 or self.repeats >= LEAST_ROUNDS,
            f"repeats is {self.repeats}: one run has no spread, so it gets no ratio; use {LEAST_ROUNDS} or more, "
            "or 0 for no speeds",
        )
        require(
            self.engine.draft_length.most >= 1,
            "num-spec-tokens is 0, which leaves nothing to compare: use 1 to 16",
        )
        require(
            not self.engine.draft_length.auto,
            "num-spec-tokens is auto, so every head would draft another number of tokens: use 1 to 16",
        )
        require(
            all(each.dataset != STDIN for each in self.data),
            "dataset is -, but standard input can be read only once: write it to a file",
        )
        drafters = [each if (known := lookup_of(each)) is None else known.name for each in self.drafters]
        object.__setattr__(self, "drafters", tuple(drafters))
        for what, names in (("drafter", drafters), ("dataset", [each.dataset for each in self.data])):
            twice = [name for name in names if names.count(name) > 1]
            require(not twice, f"{what} {twice[:1] and twice[0]!r} is given twice: leave one out")

    @property
    def heads(self) -> Mapping[str, str]:
        return {name: drafter for drafter, name in short_names(self.drafters, taken=PLAIN).items()}

    @property
    def sources(self) -> Mapping[str, DataSource]:
        return dict(zip(short_names(each.dataset for each in self.data).values(), self.data, strict=True))

    @property
    def runs(self) -> Mapping[tuple[str, str], Path]:
        """By data set and head, the directory of the run in the comparison's."""
        names = product(self.sources, self.heads)
        return {(data, head): Path(as_directory(data), as_directory(head)) for data, head in names}

    def check(self) -> None:
        """``UserError`` for what would end the comparison after its first runs."""
        prompts: dict[tuple[str, Format], str] = {}  # the first data set with each
        for source in self.data:
            opened = source.open()
            if (content := opened.key()) is not None:
                first = prompts.setdefault((content, opened.row_format), source.dataset)
                require(
                    first == source.dataset,
                    f"data sets {first!r} and {source.dataset!r} have the same content: leave one out",
                )
        weights: dict[str, str] = {}  # the first drafter with each
        for drafter in self.drafters:
            try:
                digest = self._check_head(replace(self.engine, drafter=drafter))
            except UserError as error:
                raise UserError(under(drafter, error)) from error
            first = weights.setdefault(digest, drafter)
            require(
                first == drafter, f"drafters {first!r} and {drafter!r} have the same weights: leave one out"
            )

    def _check_head(self, config: EngineConfig) -> str:
        """The drafter's fingerprint, as in the manifest of its run."""
        checkpoints = open_checkpoints(config)
        if config.head is not None:
            check_fit(checkpoints["model"], checkpoints["drafter"], config.draft_lm_head == "fp8")
        resolve(config, checkpoints)
        return str(config.drafter) if config.head is None else fingerprint(checkpoints["drafter"])


class HeadsRun:
    """A job at work in the directory ``path``, which holds what an earlier command has done of it.

    ``progress`` makes the display of one run from its name; ``watch`` receives turns. Once ``until`` is true a method
    ends with ``StoppedError``; runs and rounds that are done are kept.
    """

    def __init__(
        self,
        job: HeadsJob,
        path: Path,
        progress: Callable[[str], Progress],
        until: Callable[[], bool],
        watch: Watch = discard,
    ) -> None:
        self._job, self._path, self._progress, self._until = job, path, progress, until
        self._watch, self._device = watch, str(choose_device(job.engine.device))
        self._target = OneTarget()
        path.mkdir(parents=True, exist_ok=True)
        earlier = load_json(path / PLAN, _REMEDY) if (path / PLAN).exists() else {}
        self._write_plan(earlier.get("under", {}))  # before the first run, as it makes the directory ours

    def generate(self) -> Comparison:
        """Every head on every data set; one after another, as by `specgen generate`."""
        runs = self._job.runs
        for done, ((data, head), below) in enumerate(runs.items()):
            if self._until():
                raise StoppedError(f"interrupted with {done} of {len(runs)} runs done")
            shown = self._progress(f"{head} on {data} ({done + 1} of {len(runs)})")
            run(self._one(data, head), self._path / below, shown, self._until, self._target)
        return compare_runs([self._path / below for below in runs.values()])

    def _one(self, data: str, head: str) -> Job:
        """The run of ``head``, with the date in its prompts that the first head's have."""
        job = Job(
            engine=replace(self._job.engine, drafter=self._job.heads[head]),
            sampling=self._job.sampling,
            given=self._job.given,
            data=self._job.sources[data],
        )
        first = self._path / self._job.runs[data, next(iter(self._job.heads))] / "manifest.json"
        return replace(job, engine=with_recorded_date(job.engine, job.engine, first))

    def measure(self, found: Comparison) -> Speeds:
        """The rounds of speeds that are missing, data set by data set; the plan is written before."""
        search = Search(plain=PLAIN, arms=(PLAIN, *self._job.heads), most=self._job.repeats)
        digests = {data: self._conditions_digest(found, data) for data in found.data}
        self._write_plan(digests)
        with closing(RowFile(self._path / ROUNDS)) as file:
            speeds = rounds_by_data(file.values(), digests, file)
            for data, rounds in speeds.items():
                if search.next_arms(search.arms, rounds):
                    self._take_turns(found, data, rounds, search)
        return speeds

    def _take_turns(self, found: Comparison, data: str, rounds: Rounds, search: Search) -> None:
        def see(turn: Turn) -> None:
            self._watch(replace(turn, arm=f"{turn.arm} on {data}"))
            if turn.failure is not None:  # a round without one of them has no ratios
                raise turn.failure

        def load(plan: Plan) -> Models:
            return self._target.load(plan.config, open_checkpoints(plan.config))

        for _ in Turns(load, None, rounds, see, self._until).run(self._plans(found, data), search):
            pass

    def _plans(self, found: Comparison, data: str) -> list[Plan]:
        """Every arm, each asked the same; no prefix cache, which the second round would find filled."""
        requests = tuple(self._requests(found, data, self._job.sources[data]))
        require(
            bool(requests),
            f"no request on {data} was answered, so there is no speed to measure: see `error` in "
            f"{found.on(data)[0].directory / 'errors.jsonl'}, and leave that data set out or use --repeats 0",
        )
        plans: list[Plan] = []
        for name, config in self._arms(data).items():
            checkpoints = open_checkpoints(config)
            resolved = resolve(replace(config, prefix_cache=False), checkpoints)
            rows = min(resolved.max_batch_size, len(requests))  # ``auto`` captures and times as many
            models = self._target.load(resolved, checkpoints)
            arm = Arm(name=name, changes={"drafter": config.drafter, "K": config.draft_length.most})
            plans.append(Plan.of(arm, replace(resolved, max_batch_size=rows), models, requests))
        return all_together(plans, room_for_turns(plans[0].config, models))

    def _requests(self, found: Comparison, data: str, source: DataSource) -> list[Request]:
        """Every turn that all heads' runs answered, with the first one's answers as the context of the turns behind.

        So every arm is asked the same, all at once, and nothing is left to tokenize where it is timed.
        """
        every = [Rows(run.directory / "completions.jsonl") for run in found.on(data)]
        config = self._one(data, found.on(data)[0].head).engine
        checkpoints = open_checkpoints(config)
        defaults = generation_config(checkpoints["model"], config.generation_config)
        sampling = defaults.over(self._job.sampling, self._job.given)

        def answers(prompt: Prompt) -> Iterator[str]:
            for name in takewhile(lambda name: all(name in rows for rows in every), prompt.turn_ids):
                yield str(every[0][name]["text"])

        prompts = (prompt for prompt in source.open() if isinstance(prompt, Prompt))
        turns = (turn for prompt in prompts for turn in single_turns(prompt, answers(prompt)))
        return first_turns(turns, load_chat_tokenizer(config, checkpoints), sampling)[0]

    def _arms(self, data: str) -> dict[str, EngineConfig]:
        heads = {head: self._one(data, head).engine for head in self._job.heads}
        return {PLAIN: next(iter(heads.values())).plain(), **heads}

    def _conditions_digest(self, found: Comparison, data: str) -> str:
        """A digest of what speeds on ``data`` depend on; weights and prompts by content, wherever they are."""
        engines = {
            name: resolve(config, open_checkpoints(config)).to_json()
            for name, config in self._arms(data).items()
        }
        for path, engine in product(("model", "lora", "drafter"), engines.values()):
            engine.pop(path, None)
        manifests = [run.manifest for run in found.on(data)]
        asked = [
            [each["fingerprints"], each["sampling"], [each["data"][name] for name in ("sha256", "shard")]]
            for each in manifests
        ]
        machine = {name: value for name, value in now(self._device).items() if name not in OF_THE_MOMENT}
        conditions = [engines, asked, machine, _METHOD]
        return hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:16]

    def _write_plan(self, digests: Mapping[str, str]) -> None:
        runs = list(map(str, self._job.runs.values()))
        write_json(self._path / PLAN, {**now(self._device), "runs": runs, "under": dict(digests)})
