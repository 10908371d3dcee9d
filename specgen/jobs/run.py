"""``specgen generate``: prompts through an engine into a run directory, with its report; resumes an earlier run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from specgen import __version__
from specgen.config import EngineConfig, require, shown
from specgen.core.endings import DeviceLost
from specgen.core.engine_core import never_stop
from specgen.decoding.sampling import most_demanding
from specgen.engine.choices import resolve
from specgen.engine.engine import Engine
from specgen.engine.loading import Models, OneTarget, load_chat_tokenizer, load_models, open_checkpoints
from specgen.engine.number_formats import Checkpoints
from specgen.engine.request_output import RequestOutput
from specgen.events import Event
from specgen.jobs.job import Job, job_manifest, without_effect
from specgen.jobs.lost import kept_while_lost, note_lost, read_lost
from specgen.jobs.prompt_index import PromptIndex, index_prompts, keep_index, kept_index
from specgen.jobs.ray_engine import RayEngine
from specgen.jobs.run_output import RunResult, export, is_finished, read_result, write_report
from specgen.jobs.shard import REQUESTS
from specgen.prompts import PromptSet, open_prompts
from specgen.report.summary import Summary
from specgen.rundir.atomic import write_json_lines, write_text
from specgen.rundir.interrupt import StoppedError
from specgen.rundir.progress import Progress
from specgen.rundir.provenance import FREE_IN_A_RUN, with_recorded_date
from specgen.rundir.results import PROMPTS, RunDirectory, directory, require_same, set_aside
from specgen.rundir.status import Status, kept_status
from specgen.rundir.tally import Tally
from specgen.startup import Startup, phase, watched
from specgen.template_kwargs import TemplateKwargs

_REMEDY = "name another directory, or start over with --restart, which keeps the old one"


class TooManyFailuresError(Exception):
    """More requests failed than ``max_failures`` allows; the text is one line for the user."""


def run(
    job: Job,
    output: Path | None,
    progress: Progress,
    until: Callable[[], bool] = never_stop,
    shared: OneTarget | None = None,
) -> RunResult:
    """Run or resume ``job`` in the directory ``output`` (None: no files are kept).

    ``until`` is asked between steps; once it is true the run ends with ``StoppedError``, and beyond
    ``job.max_failures`` with ``TooManyFailuresError``. Finished requests are kept, and the same job resumes the run;
    after ``DeviceLost`` it takes a new process. ``UserError`` for a job that cannot run, and for an ``output`` that
    holds something else, is in use, or cannot be written.
    """
    require(
        output is not None or job.format == "jsonl",
        f"format is {job.format!r} and no file is kept: name a directory with --output, or - for stdout",
    )
    if output is not None and job.restart:
        set_aside(output, "manifest.json")
    with directory(output, "manifest.json") as path, watched(progress.compiling) as startup:
        with kept_status(path / "status.json") as status:
            work = _prepared(job, path, progress, status, until, shared, startup)
            with phase("fingerprints"):
                asked = job_manifest(
                    job, work.config, work.checkpoints, work.index, with_fingerprints=output is not None
                )
            require_same(path / "manifest.json", asked, free=FREE_IN_A_RUN, remedy=_REMEDY)
            if job.config is not None:  # the last command's: a resumed run may have another batch size
                write_text(path / "config.yaml", job.config)
            if is_finished(path, job, status.admit()):
                status.put_back()
            else:
                status.write("preparing")
                if work.unkept is not None:
                    keep_index(path / PROMPTS, work.unkept, work.index)
                if job.shard.count > 1:
                    write_json_lines(path / REQUESTS, filter(None, work.index.rows))
                with kept_while_lost(path):
                    status.finish(write_report(path, work.answer(path)))
        export(path, job.format)
        return read_result(path, work.index.first)


def _prepared(
    job: Job,
    path: Path,
    progress: Progress,
    status: Status,
    until: Callable[[], bool],
    shared: OneTarget | None,
    startup: Startup,
) -> "_Work":
    """The work of ``job`` in ``path``, checked: its whole input is read, or the index that an earlier process left."""
    checkpoints = open_checkpoints(job.engine)
    config = resolve(job.engine, checkpoints)
    prompts = open_prompts(job.dataset, data_path=job.data_path, num_prompts=job.num_prompts, how=job.how)

    def seen(num_rows: int) -> None:
        if until():
            raise StoppedError(f"interrupted after {num_rows:,} rows were read")
        status.read(num_rows)
        progress.read(num_rows)

    content = prompts.key()
    key = None if content is None else f"{__version__}, {content}, {job.dataset}, {job.shard}"
    index = kept_index(path / PROMPTS, key)
    unkept = key if index is None else None
    if index is None:
        read_as = f"{job.data_path}, read as {job.dataset}," if job.data_path else job.dataset
        index = index_prompts(read_as, prompts, job.shard, seen)
        index = replace(index, notes=tuple(prompts.notes.sentences()))
    if job.engine.template_kwargs != TemplateKwargs():
        require(
            index.has_chats,
            f"chat-template-kwargs is {shown(str(job.engine.template_kwargs))} but no row of {job.dataset} is a chat: "
            "remove it, or give rows with messages",
        )
        load_chat_tokenizer(config, checkpoints)  # refuses names before there is a directory with them
    for sentence in (*index.notes, *without_effect(job, index)):
        progress.warn(sentence)
    if index.has_chats:
        config = with_recorded_date(config, job.engine, path / "manifest.json")
    else:  # no prompt has the date in it
        config = replace(config, chat_template_kwargs=job.engine.chat_template_kwargs)
    return _Work(
        job=job,
        config=config,
        checkpoints=checkpoints,
        prompts=prompts,
        index=index,
        unkept=unkept,
        progress=progress,
        status=status,
        until=until,
        shared=shared,
        startup=startup,
    )


@dataclass(kw_only=True)
class _Work:
    """The generation of a job: its prompts through an engine, and for a baseline through a plain one."""

    job: Job
    config: EngineConfig  # the job's, resolved
    checkpoints: Checkpoints
    prompts: PromptSet
    index: PromptIndex
    unkept: str | None  # the key under which the index is to be kept, if it is not yet
    progress: Progress
    status: Status
    until: Callable[[], bool]
    shared: OneTarget | None
    startup: Startup
    models: Models | None = None  # once an engine has loaded them

    def answer(self, path: Path) -> Path | None:
        """Answer all requests in ``path``; returns the directory of the baseline, if the job has one."""
        self._answer(self.config, path)
        if not self.job.baseline:
            return None
        self.startup.take()  # the run's own time is none of its baseline's start
        self._answer(self.config.plain(), path / "baseline")
        return path / "baseline"

    def _answer(self, config: EngineConfig, path: Path) -> None:
        with RunDirectory(path) as files:
            if len(files.completions) < self.index.num_requests:
                self._generate(config, files)
        files.arrange(self.index.ids)

    def _generate(self, config: EngineConfig, files: RunDirectory) -> None:
        tally = Tally()

        summary = Summary(config.draft_length.most)

        def record(event: Event) -> None:
            if self.job.events == "full":
                files.add_event(event)
            elif self.job.events == "summary":
                for ended in summary.take(event):
                    self._add_sums(files, summary, ended)
            tally.see(event)
            self.progress.see(event)
            self.status.see(event)

        name = "plain decoding" if config.draft_length.most == 0 else "speculative decoding"
        if config.device != "cpu":
            self.progress.prepare(name)
        engine = self._engine(config, record)
        if self.index.has_chats:
            engine.tokenizer.require_chat_template()
        seconds = self.startup.take()
        if config.device != "cpu":
            self.progress.ready(name, seconds)
        total, done = self.index.num_requests, len(files.completions)
        self.status.begin(tally, total=total, done=done, startup=seconds)
        self.progress.start(name, tally, total, done)
        outputs = engine.generate(
            self.prompts.select(self.index.pending(files.completions)),
            self.job.sampling,
            earlier=files.texts,
            lost=read_lost(files.path),
            until=lambda: self.until() or self._too_many(files),
        )
        try:
            for output in outputs:
                self._keep(output, files)
        except DeviceLost as lost:
            note_lost(files.path, lost)
            if not self.until():
                raise
        finally:
            self.progress.finish()
            if self.job.events == "summary":
                self._add_sums(files, summary)
        self._require_all(files)

    def _add_sums(self, files: RunDirectory, summary: Summary, *ended: Event) -> None:
        """Record what was done since the last call, then the requests that ended with it."""
        for event in (*summary.worked(), *ended):
            files.add_event(event)

    def _engine(self, config: EngineConfig, record: Callable[[Event], None]) -> Engine | RayEngine:
        sampling = self.job.sampling
        expected = most_demanding([sampling, *(replace(sampling, **row) for row in self.index.sampling)])
        if self.job.cluster is not None:
            return RayEngine(config=config, cluster=self.job.cluster, record=record, expected=expected)
        if self.models is None:
            self.models = (
                load_models(config, self.checkpoints, expected)
                if self.shared is None
                else self.shared.load(config, self.checkpoints)
            )
        return Engine(config, record=record, models=self.models, expected=expected)

    def _keep(self, output: RequestOutput, files: RunDirectory) -> None:
        if output.error is None:
            files.add_completion(output.to_row())
        else:
            files.errors.add(output.to_row())
        self.status.count(done=len(files.completions), failed=len(files.errors))
        self.progress.advance()

    def _too_many(self, files: RunDirectory) -> bool:
        return self.job.max_failures is not None and len(files.errors) > self.job.max_failures

    def _require_all(self, files: RunDirectory) -> None:
        """Raise if the run ended before all requests did."""
        done, failed, total = len(files.completions), len(files.errors), self.index.num_requests
        if self._too_many(files):
            raise TooManyFailuresError(
                f"{failed} requests failed, more than max-failures {self.job.max_failures}; "
                f"{done} of {total} are done"
            )
        if done + failed < total:
            raise StoppedError(f"interrupted with {done} of {total} requests done")
