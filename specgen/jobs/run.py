"""``specgen generate``: prompts through an engine into a run directory, with its report; resumes an earlier run."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from specgen.checkpoints import lora
from specgen.checkpoints.checkpoint import target_config
from specgen.checkpoints.fingerprint import files_of, fingerprint, state_of
from specgen.config import EngineConfig, TemplateKwargs, UserError, require, shown
from specgen.config.errors import DeviceLost
from specgen.config.json_fields import load_json
from specgen.config.urls import Url
from specgen.core.engine_core import never_stop
from specgen.core.garbage import fewer_gc_passes
from specgen.core.graphs import bucket
from specgen.engine.build import most_demanding, require_memory
from specgen.engine.choices import attention_note, choose_attention, kv_note, resolve
from specgen.engine.conversations import RequestOutput
from specgen.engine.earlier_answers import newest_answers
from specgen.engine.engine import Engine
from specgen.engine.generation_config import FILE, generation_config
from specgen.engine.loading import (
    Models,
    OneTarget,
    described,
    load_chat_tokenizer,
    load_models,
    open_checkpoints,
)
from specgen.jobs.job import Job
from specgen.jobs.prompt_index import REQUESTS, PromptIndex, index_prompts
from specgen.jobs.ray_engine import RayEngine
from specgen.jobs.run_output import MAIN_FILES, FinishedRun, RunResult, complete_run
from specgen.jobs.shards import WHOLE
from specgen.prompts import Prompt, failure
from specgen.prompts.load import RAW
from specgen.prompts.prompt import asked_digest, sample_ids
from specgen.record.files import Rows, whole_lines, write_json, write_json_lines, write_text
from specgen.record.interrupt import StoppedError
from specgen.record.mirror import mirrored
from specgen.record.progress import Progress, Status, kept_status
from specgen.record.provenance import (
    FREE_IN_A_RUN,
    NAMES_OF_DATA,
    differences,
    manifest,
    state_after,
    timestamp,
    with_recorded_date,
)
from specgen.record.record_rows import EngineRow, RequestRow
from specgen.record.results import (
    RunDirectory,
    directory,
    rename_aside,
    replace_unstarted,
    require_same,
    rollback_if_unstarted,
)
from specgen.record.startup import Startup, phase, watched
from specgen.report.display import devices, from_here, several
from specgen.text.constraints import Constraints

_LOST = "lost.jsonl"  # the requests in flight when the device was lost
_FIRST = 32  # requests, which may all fail before the rest is given up
_NUM_SHOWN = 2  # prompts
_MANY = 50_000  # requests, whose report takes a quarter of a minute
_REMEDY = "name another directory, or start over with --restart, which keeps the old one"


class TooManyFailuresError(Exception):
    """More requests failed than ``max_failures`` allows, or all of the first; the text is one line for the user."""


def run(
    job: Job,
    output: Path | Url | None,
    progress: Progress,
    until: Callable[[], bool] = never_stop,
    shared: OneTarget | None = None,
) -> RunResult:
    """Run or resume ``job`` in the directory ``output`` (None: no files are kept), or at that URL.

    ``until`` is asked between steps; once it is true the run ends with ``StoppedError``, and beyond
    ``job.max_failures``, or where the first 32 requests all fail, with ``TooManyFailuresError``. Finished requests are
    kept, and the same job resumes the run; after ``DeviceLost`` it takes a new process. ``UserError`` for a job that
    cannot run, and for an ``output`` that holds something else, is in use, or cannot be written.
    """
    require(
        output is not None or job.format == "jsonl",
        f"format is {job.format!r} and no file is kept: name a directory with --output, or - for stdout",
    )
    learn_from = job.engine.learn_from
    require(
        output is None
        or isinstance(output, Url)
        or not learn_from
        or output.resolve() != Path(learn_from).resolve(),
        f"learn-from {learn_from!r} is the output itself, whose answers are learnt where a run is resumed: name "
        "another run",
    )
    if isinstance(output, Url):
        with mirrored(output, restart=job.restart) as mirror:
            return _run(
                job, mirror.path, progress, lambda: mirror.has_failed or until(), shared, mirror.claim
            )
    if output is not None and job.restart:
        rename_aside(output, "manifest.json")
    return _run(job, output, progress, until, shared)


def _run(
    job: Job,
    output: Path | None,
    progress: Progress,
    until: Callable[[], bool],
    shared: OneTarget | None,
    begin: Callable[[], None] = lambda: None,
) -> RunResult:
    """``run`` in a directory; ``begin`` is called where the run in it is found to be this one and unfinished."""
    with directory(output, "manifest.json") as path, watched(progress.compiling) as startup:
        with rollback_if_unstarted(path), kept_status(path / "status.json") as status:
            work = _Work(job, path, progress, status, until, shared, startup)
            with phase("fingerprints"):
                asked = work.manifest(with_fingerprints=output is not None)
            replace_unstarted(path, asked, free=FREE_IN_A_RUN)
            if not job.retry_errors:
                work.take_samples(path / "manifest.json", asked)
            is_corrected = job.retry_errors and work.take_corrections(path, asked)
            remedy = _REMEDY if shared is None else "name another directory"  # a comparison has no --restart
            require_same(path / "manifest.json", asked, free=FREE_IN_A_RUN, remedy=remedy)
            run = complete_run(path, job, status.claim(), work.index)
            if run is not None:
                status.restore()
                require(
                    not job.retry_errors or is_corrected,
                    f"retry-errors is given, but no row of the run in {str(path)!r} failed: leave it out",
                )
                if not (path / MAIN_FILES[job.format]).exists():
                    run.export(job.format)
            else:
                begin()
                if job.config is not None:  # the last command's: a resumed run may have another batch size
                    write_text(path / "config.yaml", job.config)
                status.write("preparing")
                if job.shard.count > 1:
                    write_json_lines(path / REQUESTS, filter(None, work.index.rows))
                with _kept_while_lost(path):
                    run, baseline = work.answer(path)
                    for name, file in MAIN_FILES.items():  # what an earlier command left lacks rows
                        if name == job.format or (path / file).exists():
                            run.export(name)
                    # workers are processes of their own, as ranks are
                    after = state_after(work.config) if job.cluster is None else {}
                    status.finish(run.write_report(baseline, asked["state"], after).status())
        return run.result(work.first)


def _with_rows_for(index: PromptIndex, config: EngineConfig) -> EngineConfig:
    """``config`` with no more rows than the prompts can use, which take memory."""
    return replace(config, max_batch_size=min(config.max_batch_size, bucket(index.num_conversations)))


class _Work:
    """A job at work: its prompts through an engine, and for a baseline through a plain one.

    It is checked when it is made: its whole input is read.
    """

    def __init__(
        self,
        job: Job,
        path: Path,
        progress: Progress,
        status: Status,
        until: Callable[[], bool],
        shared: OneTarget | None,
        startup: Startup,
    ) -> None:
        self.progress, self.status, self.until = progress, status, until
        self.shared, self.startup = shared, startup
        self.models: Models | None = None  # once an engine has loaded them
        with phase("checkpoints"):
            self.checkpoints = open_checkpoints(job.engine)
            config = resolve(job.engine, self.checkpoints)
            self.generation = generation_config(self.checkpoints["model"], config.generation_config)
        if job.cluster is None:  # else it is the workers' memory
            # how many rows there are is known of the prompts
            require_memory(replace(config, max_batch_size=1))
        with phase("rows"):
            self.prompts = job.data.open()
            self.content = self.prompts.key()
            file, dataset = job.data.data_path, job.data.dataset
            read_as = f"{file}, read as {dataset}," if file else dataset
            with fewer_gc_passes():  # what a row leaves is no garbage
                self.index = index_prompts(read_as, self.prompts, job.shard, self._read, job.sampling)
            selected = self.prompts.select(self.index.rows)
            self.first = list(islice((row for row in selected if isinstance(row, Prompt)), _NUM_SHOWN))
        if job.engine.template_kwargs != TemplateKwargs():
            require(
                self.index.has_chats,
                f"chat-template-kwargs is {shown(str(job.engine.template_kwargs))} but no row of {job.data.dataset} is "
                "a chat: remove it, or give rows with messages",
            )
            # refuses names before there is a directory with them
            load_chat_tokenizer(config, self.checkpoints)
        if job.cluster is None:
            require_memory(_with_rows_for(self.index, config))
        # arms of a comparison have options that others of them need
        idle = without_effect(job, self.index) if shared is None else ()
        for sentence in (*self.prompts.notes.sentences(), *idle):
            progress.warn(sentence)
        if said := self.generation.sentence(job.given):
            progress.note(f"{FILE}: {said}")
        if self.index.has_chats:
            self.config = with_recorded_date(config, job.engine, path / "manifest.json")
        else:  # no prompt has the date in it
            self.config = replace(config, chat_template_kwargs=job.engine.chat_template_kwargs)
        self.job = replace(job, sampling=self.generation.over(job.sampling, job.given))
        if self.job.sampling.constrained:  # refuses what cannot be kept before there is a directory
            target = target_config(self.checkpoints["model"])
            tokenizer = load_chat_tokenizer(config, self.checkpoints)
            constraints = Constraints(tokenizer, target.vocab_size, target.eos_token_ids)
            constraints.automaton(self.job.sampling, ())

    def _read(self, num_rows: int) -> None:
        if self.until():
            raise StoppedError(f"interrupted after {num_rows:,} rows were read")
        self.status.read(num_rows)
        self.progress.read(num_rows)

    def manifest(self, *, with_fingerprints: bool) -> dict[str, Any]:
        """The content of ``manifest.json``. Fingerprints read all weights."""
        job, found = self.job, self.checkpoints if with_fingerprints else {}
        # absent unless there are some, so that a run of an earlier version goes on
        own = {"own_parameters": list(self.index.own_parameters)} if self.index.own_parameters else {}
        return manifest(
            engine=self.config,
            sampling=job.sampling,
            data={**job.data.to_json(), "sha256": self.index.digest, "shard": str(job.shard)} | own,
            fingerprints={name: fingerprint(checkpoint) for name, checkpoint in found.items()},
            files={name: files_of(checkpoint) for name, checkpoint in found.items()}
            | {"prompts": {str(file): state_of(file) for file in self.prompts.files}},
        ) | {
            # absent unless given, so that a run of an earlier version goes on
            **({} if job.served_model_name is None else {"served_model_name": job.served_model_name}),
            **({"steps": False} if job.no_steps else {}),
            "settings": self._settings(),
        }

    def take_samples(self, file: Path, asked: Mapping[str, Any]) -> None:
        """Make the run of the manifest ``file`` one of more samples, if that is all that sets what is ``asked`` apart.

        What it has answered are the first ones.
        """
        if not file.exists():
            return
        earlier = load_json(file, _REMEDY)
        had_fewer = earlier.get("sampling", {}).get("n", 1) in range(1, self.job.sampling.n)
        if had_fewer and not differences(earlier, asked, {"sampling.n", *FREE_IN_A_RUN}):
            said = {"sampling": asked["settings"]["sampling"]}
            write_json(
                file, {**earlier, "sampling": asked["sampling"], "settings": earlier["settings"] | said}
            )

    def take_corrections(self, path: Path, asked: Mapping[str, Any]) -> bool:
        """Make the run in ``path`` one of the prompts as they are now; whether they were others.

        ``UserError`` without a run there, and where another setting or a row that has an answer is not as it was.
        """
        file = path / "manifest.json"
        require(
            file.exists(), f"retry-errors is given, but output {str(path)!r} holds no run yet: leave it out"
        )
        earlier, of_data = load_json(file, _REMEDY), {"data.sha256", *NAMES_OF_DATA}
        require_same(file, asked, free=of_data.union(FREE_IN_A_RUN), remedy=_REMEDY)
        if earlier["data"]["sha256"] == asked["data"]["sha256"]:
            return False
        for answered in (path, path / "baseline"):
            self._require_unchanged(Rows(answered / "completions.jsonl"))
        of_rows = {"data", "rows set their own"}
        kept = {name: text for name, text in earlier["settings"].items() if name not in of_rows}
        now = {name: text for name, text in asked["settings"].items() if name in of_rows}
        changed = {"data": asked["data"], "files": asked["files"], "settings": kept | now}
        write_json(file, {**earlier, **changed})
        return True

    def _require_unchanged(self, answered: Rows) -> None:
        """``UserError`` unless every row with an answer is in the prompts, as it was asked."""
        remedy = (
            "--retry-errors takes other rows for failed ones alone; put it back, or start over with --restart"
        )
        gone = {*answered}
        for prompt in self.prompts.select(self.index.rows):
            for turn, name in enumerate(sample_ids(prompt, self.job.sampling), start=1):
                if name in gone:
                    gone.remove(name)
                    was, num_turns = RequestRow.of_row(answered[name]), len(prompt.turn_ids)
                    require(  # with turns more than then, it would count as two conversations
                        isinstance(prompt, Prompt)
                        and was.asked == asked_digest(prompt, turn)
                        and was.num_turns >= num_turns,
                        f"{shown(name)} has an answer, but its row in {self.prompts.name} is not what was asked: "
                        f"{remedy}",
                    )
        for name in gone:
            raise UserError(f"{shown(name)} has an answer, but no row in {self.prompts.name}: {remedy}")

    def _settings(self) -> dict[str, str]:
        """The configuration as a report shows it, by label."""
        job, config, checkpoints = self.job, self.config, self.checkpoints
        _, why = choose_attention(replace(config, attention=job.engine.attention), checkpoints)
        drafts, is_cpu = config.draft_length.most > 0, config.device == "cpu"
        template, own = config.template_kwargs, ", ".join(self.index.own_parameters)
        settings = {
            "model": job.served_model_name or described(config.model, checkpoints["model"]),
            "LoRA": None if config.lora is None else lora.summary(checkpoints["model"]),
            "drafter": from_here(str(config.drafter)) if drafts else "none (plain decoding)",
            "learnt from": None if not config.learns else config.learn_from,
            "draft tokens (K)": str(config.draft_length),
            "drafter batch": None if config.head is None else config.drafter_batch,
            "draft lm_head": "a copy in FP8" if config.head and config.draft_lm_head == "fp8" else None,
            "draft sampling": None if config.draft_sampling == "greedy" else config.draft_sampling,
            "verification": None if config.verification == "token" else f"by {config.verification}",
            "data": f"{job.data.dataset}, {several(self.index.num_prompts, 'prompt')}",
            "shard": None if job.shard == WHOLE else str(job.shard),
            "template": None if template == TemplateKwargs() else str(template),
            "sampling": job.sampling.in_words(),
            "rows set their own": own or None,
            "generation config": self.generation.sentence(job.given) or None,
            "runs on": f"{devices(config.device, config.tensor_parallel)}, {config.dtype}",
            **kv_note(config, job.engine, checkpoints),
            "attention": f"{attention_note(config, checkpoints)}: {why}",
            "workers": None if job.cluster is None else f"{job.cluster.num_workers} on Ray, at once",
            "CUDA graphs": None if is_cpu else config.cuda_graphs,
            "batch": f"at most {config.max_batch_size}",
            "steps": "not kept (--no-steps), so no texts on the page" if job.no_steps else None,
        }
        return {name: text for name, text in settings.items() if text is not None}

    def answer(self, path: Path) -> tuple[FinishedRun, FinishedRun | None]:
        """Answer all requests in ``path``; returns the run, and that of the baseline if the job has one."""
        run = self._answer(self.config, path)
        if not self.job.baseline:
            return run, None
        self.startup.take()  # the run's own time is none of its baseline's start
        return run, self._answer(self.config.plain(), path / "baseline")

    def _answer(self, config: EngineConfig, path: Path) -> FinishedRun:
        with RunDirectory(path, shard=str(self.job.shard), with_steps=not self.job.no_steps) as files:
            asked = {*self.index.ids}
            more = (
                name
                for name in files.completions
                if name not in asked and name.rpartition("/sample-")[0] in asked
            )
            if (first := next(more, None)) is not None:
                raise UserError(
                    f"output {str(path)!r} has an answer to {shown(first)}, which no row asks for any more: put its n "
                    "back, or start over with --restart"
                )
            if any(self.index.pending(files.completions)):
                self._generate(config, files)
            else:
                self.status.begin(total=self.index.num_requests, done=len(files.completions), startup={})
        self.status.write("running")  # as it is now
        if self.index.num_requests >= _MANY:  # of a million that takes minutes
            self.progress.note(
                f"{path.name}: all requests have ended; putting them in order and writing the report"
            )
        files.arrange(self.index.ids)
        return FinishedRun(path, files.completions, files.errors)

    def _generate(self, config: EngineConfig, files: RunDirectory) -> None:
        def record(row: EngineRow) -> None:
            files.record(row)
            self.progress.update(row)
            self.status.update(row)

        def begin() -> None:
            seconds, total, done = self.startup.take(), self.index.num_requests, len(files.completions)
            if config.device != "cpu":
                self.progress.ready(name, seconds)
            self.status.begin(total=total, done=done, startup=seconds)
            self.progress.start(name, total, done)

        name = "plain decoding" if config.draft_length.most == 0 else "speculative decoding"
        if config.device != "cpu" or self.job.cluster is not None:
            self.progress.prepare(name)
        engine = self._engine(config, record, begin)
        require(
            not self._has_changed(),
            f"{self.prompts.name} has changed since this run has read it: put back what it was, or start over "
            "with --restart",
        )
        if self.index.has_chats:
            engine.tokenizer.require_chat_template()
        elif engine.tokenizer.chat_template and config is self.config and self.prompts.are_raw(self.first):
            self.progress.warn(RAW)
        # another's workers are still to start, and learn each from its own answers
        if isinstance(engine, Engine):
            if config.learns:
                engine.learn(newest_answers(files.completions))
            begin()
        first = self._first_ids(files)
        outputs = engine.generate(
            self.prompts.select(self.index.pending(files.completions)),
            self.job.sampling,
            earlier=files.texts,
            lost=_read_lost(files.path),
            until=lambda: self.until() or self._too_many(files) or _all_failed(files, first),
        )
        try:
            with fewer_gc_passes():  # also while its texts are written
                for output in outputs:
                    self._keep(output, files)
        except DeviceLost as lost:
            _note_lost(files.path, lost)
            if not self.until():
                raise
        finally:
            self.progress.finish()
        if self._has_changed():  # rows with ids of their own may have passed for the first ones
            name = self.prompts.name
            self.progress.warn(
                f"{name} has changed under this run: answers may be of other rows than it has counted"
            )
        self._require_all(files, first)

    def _has_changed(self) -> bool:
        """Whether the files of prompts are not what was counted."""
        try:
            return self.prompts.key() != self.content
        except OSError:  # gone
            return True

    def _first_ids(self, files: RunDirectory) -> list[str]:
        """The first requests of the input that are not done: if all fail, so will others; none with ``max_failures``.

        In the order of the input, as what fails at once is known long before what runs beside it, and without rows that
        are no requests.
        """
        if self.job.max_failures is not None:  # the user has said how many failures are too many
            return []
        rows = self.prompts.select(self.index.pending(files.completions))
        return [row.turn_ids[0] for row in islice((row for row in rows if isinstance(row, Prompt)), _FIRST)]

    def _engine(
        self, config: EngineConfig, record: Callable[[EngineRow], None], ready: Callable[[], None]
    ) -> Engine | RayEngine:
        sampling, config = self.job.sampling, _with_rows_for(self.index, config)
        asked = [sampling]
        for row in self.index.sampling:
            with suppress(UserError):  # that of the row, once it is asked
                asked.append(replace(sampling, **row))
        expected = most_demanding(asked)
        if self.job.cluster is not None:
            cluster = self.job.cluster
            return RayEngine(config=config, cluster=cluster, record=record, expected=expected, ready=ready)
        if self.models is None:
            self.models = (
                load_models(config, self.checkpoints, expected)
                if self.shared is None
                else self.shared.load(config, self.checkpoints)
            )
            for sentence in self.models.notes:
                self.progress.warn(sentence)
        return Engine(config, record=record, models=self.models, expected=expected)

    def _keep(self, output: RequestOutput, files: RunDirectory) -> None:
        if output.error is None:
            files.add_completion(output.to_row(), output.record)
        else:
            files.errors.add(output.to_row())
        self.status.count(done=len(files.completions), failed=len(files.errors))
        self.progress.advance()

    def _too_many(self, files: RunDirectory) -> bool:
        return self.job.max_failures is not None and len(files.errors) > self.job.max_failures

    def _require_all(self, files: RunDirectory, first: Sequence[str]) -> None:
        """Raise if the run ended before all requests did."""
        done, failed, total = len(files.completions), len(files.errors), self.index.num_requests
        if self._too_many(files):
            raise TooManyFailuresError(
                f"{failed:,} requests failed, more than max-failures {self.job.max_failures}; "
                f"{done:,} of {total:,} are done"
            )
        if done + failed < total and _all_failed(files, first):
            reason = failure(first[0], str(files.errors[first[0]]["error"]))
            raise TooManyFailuresError(
                f"the first {_FIRST} of {total:,} requests all failed, and none is done ({reason}): fix that, or "
                "let the others run with --max-failures"
            )
        if done + failed < total:
            raise StoppedError(f"interrupted with {done:,} of {total:,} requests done")


def _all_failed(files: RunDirectory, first: Sequence[str]) -> bool:
    """Whether all of so many first requests have, in this run, and nothing is done."""
    return len(first) == _FIRST and not files.completions and all(each in files.errors for each in first)


def _note_lost(directory: Path, lost: DeviceLost) -> None:
    """Append a row per request in flight, for the process that resumes the run."""
    now = timestamp()
    rows = [{"id": request, "reason": lost.reason, "time": now} for request in lost.requests]
    write_json_lines(directory / _LOST, [*_lost_rows(directory), *rows])


def _read_lost(directory: Path) -> dict[str, list[str]]:
    """By request id, the reason of every device loss during which the request was in flight."""
    reasons = defaultdict[str, list[str]](list)
    for row in _lost_rows(directory):
        reasons[row["id"]].append(row["reason"])
    return reasons


def _lost_rows(directory: Path) -> list[dict[str, str]]:
    path = directory / _LOST
    return [json.loads(line) for _, line in whole_lines(path)] if path.exists() else []


@contextmanager
def _kept_while_lost(directory: Path) -> Iterator[None]:
    """Removes the notes in and below ``directory`` at the end, unless the device or the process was lost.

    So running the command again retries what failed.
    """
    is_lost = False
    try:
        yield
    except DeviceLost:
        is_lost = True
        raise
    finally:
        for path in () if is_lost else directory.rglob(_LOST):
            path.unlink()


def without_effect(job: Job, index: PromptIndex) -> Iterator[str]:
    """A sentence on options of ``job`` that change nothing, if there are any."""
    asked, drafts = job.sampling, job.engine
    sampled = drafts.draft_sampling == "probabilistic"
    if drafts.learn_from is not None and not drafts.learns:
        yield "learn-from changes nothing without --drafter suffix: leave it out"
    of_heads = {"draft-sampling": sampled, "draft-lm-head": drafts.draft_lm_head == "fp8"}
    for name in (name for name, given in of_heads.items() if given and drafts.head is None):
        yield f"{name} changes nothing without a head that drafts: leave it out"
    if drafts.verification == "block" and not (sampled and drafts.head):
        yield (
            "verification block accepts no more than token where drafts are chosen outright: set --draft-sampling "
            "probabilistic, with a head that drafts"
        )
    rows = any(row.get("temperature") for row in index.sampling)
    if asked.temperature > 0 or rows:
        return
    filters = {"top-p": asked.top_p < 1, "top-k": asked.top_k > 0, "min-p": asked.min_p > 0}
    of_drafts = {"draft-sampling": sampled, "verification": sampled and drafts.verification == "block"}
    given = [name for name, given in (filters | (of_drafts if drafts.head else {})).items() if given]
    if given:
        verb = "changes" if len(given) == 1 else "change"
        yield f"{' and '.join(given)} {verb} nothing at temperature 0, which is greedy: set --temperature"
