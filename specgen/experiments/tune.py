"""``specgen tune``: arms on given traffic, measured until it is clear which is fastest, or as often as asked for.

Arms differ in batch size, K, drafter batch and settings of the engine. All arms of a batch size take turns as far as
their engines fit into memory together; where they do not, in groups: plain decoding and the fastest arm so far meet as
many others as fit. See ``Search`` for who takes part in a round.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from specgen.engine.build import room_for_turns
from specgen.engine.choices import attention_note
from specgen.experiments.output import BenchTable
from specgen.experiments.plans import (
    Plan,
    Setup,
    conditions,
    forecast,
    prepare,
    with_kv_size,
)
from specgen.experiments.rounds import LEAST, Rounds, Search, kept_rounds, num_kept, record_of
from specgen.experiments.tune_job import TuneJob
from specgen.experiments.tune_table import NAME, command, tune_table
from specgen.experiments.turns import Turn, Turns, Watch, ignore
from specgen.experiments.workload import KnownText
from specgen.report import display
from specgen.report.table import Row
from specgen.report.terminal import Part


def set_up(job: TuneJob, output: Path | None = None) -> Setup:
    """The arms, prompts and memory of ``job``, before a weight is read."""
    arms = [arm for arms in job.by_batch().values() for arm in arms]
    record = None if output is None else record_of(output, NAME)
    return prepare(arms, job.base, job.workload, record=record)


def forecast_of(job: TuneJob, output: Path | None) -> Iterator[Part]:
    """What ``--dry-run`` prints; rounds that ``output`` has are not taken off."""
    least = min(LEAST, job.repeats) if job.precision else job.repeats
    repeats = str(least) if least == job.repeats else f"{least} to {job.repeats}"
    yield from forecast(set_up(job, output), repeats, job.budget)
    if output is not None and (kept := num_kept(output, NAME)):
        yield f"{display.several(kept, 'round')} in {output} will not be measured again."


def tune(
    job: TuneJob,
    output: Path | None = None,
    watch: Watch = ignore,
) -> Iterator[BenchTable]:
    """Yield the growing table after each round, and the whole one at the end.

    Rounds are kept in ``output``; those kept there by the same job are not measured again.
    """
    began = time.monotonic()
    setup = set_up(job, output)
    settings = setup.manifest(job.to_json()) if output is not None else {}
    with kept_rounds(output, NAME, settings) as rounds:
        yield from _Tuning(job, setup, rounds, watch, began).run()


class _Tuning:
    def __init__(
        self,
        job: TuneJob,
        setup: Setup,
        rounds: Rounds,
        watch: Watch,
        began: float,
    ) -> None:
        self._job, self._setup, self._rounds = job, setup, rounds
        self._end = math.inf if job.budget is None else began + job.budget
        known = None if setup.base.synthetic_acceptance else KnownText.of(setup.models)
        self._conditions = _conditions(job, setup, known)
        models = setup.load()
        self._watch = watch
        self._turns = Turns(lambda plan: models, known, rounds, self._see)
        self._arms = {plan.arm.name: plan.arm for plan in setup.plans}
        self._room = room_for_turns(setup.base, models)
        self._searches = [_search(job, setup, batch) for batch in job.batches]

    def run(self) -> Iterator[BenchTable]:
        for number, (search, plans) in enumerate(self._searches):
            behind = sum(len(later) for _, later in self._searches[number + 1 :])
            now = time.monotonic()
            deadline = now + (self._end - now) / (len(self._searches) - number)
            waiting = plans
            while waiting and time.monotonic() < deadline:
                group = self._group(search, plans, waiting)
                names = [plan.arm.name for plan in group]
                waiting = [plan for plan in waiting if plan.arm.name not in names]
                self._turns.turns_behind = (behind + len(waiting)) * (self._job.repeats + 1)
                for _ in self._turns.run(group, search, deadline):
                    yield self._table()
        yield self._table()

    def _see(self, turn: Turn) -> None:
        """Pass on a turn; a budget may end earlier than the turns that are left."""
        left = max(0.0, self._end - time.monotonic())
        plain = None if self._job.settings else turn.plain  # whose settings may be others
        self._watch(replace(turn, plain=plain, seconds_left=min(turn.seconds_left, left)))

    def _group(self, search: Search, plans: Sequence[Plan], waiting: Sequence[Plan]) -> list[Plan]:
        """The next that wait, with plain decoding and the fastest arm so far, as far as memory goes; at least one."""
        known = search.ranking(self._rounds)
        references = {search.plain, *([known.best] if known.arms else [])}
        first = [plan for plan in plans if plan.arm.name in references]
        order = {plan.arm.name: plan for plan in (waiting[0], *first, *waiting)}
        group: set[str] = set()
        left = self._room
        for name, plan in order.items():
            if plan.num_bytes <= left:
                group.add(name)
                left -= plan.num_bytes
            elif not group:  # alone, with the cache of its configuration
                return [plan]
        return [with_kv_size(plan) for plan in plans if plan.arm.name in group]

    def _table(self) -> BenchTable:
        rankings = {
            batch: search.ranking(self._rounds)
            for batch, (search, _) in zip(self._job.batches, self._searches, strict=True)
        }
        missing = [
            name for name in self._arms if not (self._rounds.count(name) or name in self._turns.failed)
        ]
        notes = [*self._setup.notes, *self._turns.notes]
        if missing and self._job.budget is not None:
            notes.append(
                f"budget: {display.duration(self._job.budget)} for prompts, weights, warm-ups and rounds; rounds that "
                "would have exceeded it were skipped: raise --budget"
            )
        if missing:
            further = "the same command goes on" if self._rounds.are_kept else "with --output it can go on"
            notes.append(f"not measured yet: {'; '.join(missing)}: {further}")
        engine, run = self._job.base, None
        if not engine.synthetic_acceptance:
            run = partial(command, engine=engine, workload=self._job.workload)
        return tune_table(self._arms, rankings, self._conditions, notes, run)


def _search(job: TuneJob, setup: Setup, batch: int) -> tuple[Search, list[Plan]]:
    """The search of the arms of one batch size, and the plans of those that can run."""
    plans = [plan for plan in setup.plans if plan.arm.changes["batch"] == batch]
    names = tuple(plan.arm.name for plan in plans)
    plain = next((plan.arm.name for plan in plans if plan.arm.changes["K"] == 0), "")
    return Search(plain=plain, arms=names, most=job.repeats, precision=math.log1p(job.precision)), plans


def _conditions(job: TuneJob, setup: Setup, known: KnownText | None) -> Row:
    config, workload = setup.base, job.workload
    # what attends in the arms: of those of one backend, in the one with the most drafts
    configs = sorted((plan.config for plan in setup.plans), key=lambda config: config.draft_length.most)
    attentions = {each.attention: attention_note(each, setup.checkpoints) for each in configs}
    most = f"at most {workload.max_new_tokens}"
    by_data = workload.output_lens == "data"
    lengths = f"as many new tokens as the data's answers have, {most}" if by_data else f"{most} new tokens"
    each_slot = "" if workload.num_prompts else f" ({workload.per_slot} per batch slot)"
    until = f"at most {job.repeats}, until the interval of x_plain is {display.percent(job.precision)} to either side"
    found = {
        **conditions(config, setup.models),
        "attention": "; ".join(attentions.values()),
        "CUDA graphs": None if "cuda_graphs" in job.settings else config.cuda_graphs,
        "prompts": f"{setup.prompts.description}{each_slot}, greedy, {lengths}",
        "concurrency": "the batch: a request that ends makes room for the next",
        "time": "of generate, prefill included; no prefix cache; after one warm-up run of the workload",
        "repeats": f"{until if job.precision else job.repeats}, in turns; speeds and latencies are medians",
        "95 %": "Student's t for the mean logarithm of the ratios within a round; Welch's test for arms never in the "
        "same round. Picking the best of 15 equal arms, the interval holds the truth in 82-85 % of cases (94 % with 2)",
        "in_batch": "mean sequences in a decode step, below the batch size because the batch empties at the end",
        "acceptance": "share of the steps that accepted more than 0, 1, ... drafts",
        "same_texts": None
        if config.synthetic_acceptance
        else "share of the texts that are identical to plain decoding at that batch size",
        "synthetic acceptance": _by_dice(config.synthetic_acceptance),
        "wrong_tokens": known
        and "of all repeats, against the pair's known text; the pair's head knows "
        f"{display.percent(known.accept)} of it",
    }
    return {name: text for name, text in found.items() if text is not None}


def _by_dice(asked: tuple[float, ...] | float) -> str | None:
    """What decided which drafts were accepted, where the target did not."""
    if not asked:
        return None
    rates = (
        f"{', '.join(f'{rate:.3g}' for rate in asked)} by position, the last one's for later ones"
        if isinstance(asked, tuple)
        else f"a mean acceptance length of {asked:g} at each K (auto: at its largest)"
    )
    return f"{rates}: drafts are accepted by dice, texts are not the model's"
