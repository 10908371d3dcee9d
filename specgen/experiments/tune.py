"""``specgen tune``: K, drafter batch and batch size on given traffic, measured until it is clear which is fastest.

All arms of a batch size take turns as far as their engines fit into memory together; where they do not, in groups:
plain decoding and the fastest arm so far meet as many others as fit. See ``Search`` for who takes part in a round.
"""

import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from specgen.config import DrafterBatchName, DraftLength, EngineConfig, TemplateKwargs, bundled, require
from specgen.engine.arms import Arm
from specgen.engine.build import room_for_turns
from specgen.engine.choices import attention_note
from specgen.experiments.matrices import Workload
from specgen.experiments.output import BenchTable, Plot, Value, selected
from specgen.experiments.plans import Plan, Prepared, Yardstick, fitted, forecast, prepare, yardstick_of
from specgen.experiments.rounds import (
    DROPPING,
    Ranking,
    Rounds,
    Search,
    Speedup,
    disturbed,
    kept_rounds,
    record_of,
    seen_rounds,
)
from specgen.experiments.throughput import milliseconds
from specgen.experiments.timing import conditions
from specgen.experiments.turns import Turn, Turns, Watch, nobody
from specgen.report import display
from specgen.report.charts import DRAFT_LENGTHS
from specgen.report.table import Column, Row, Table
from specgen.report.terminal import Part

NAME = "tune"  # of its files
_CHOSEN = ("auto", "uniform")  # by the engine at every step


@dataclass(frozen=True, kw_only=True)
class TuneJob:
    """One run of ``specgen tune``; ``engine`` is the configuration that arms change."""

    batches: tuple[int, ...]
    draft_lengths: tuple[DraftLength, ...]  # that of plain decoding need not be among them
    drafter_batches: tuple[DrafterBatchName, ...]
    workload: Workload
    engine: EngineConfig
    repeats: int  # of an arm, at most
    precision: float  # half of the width of a ratio's interval, as a share of it
    budget: float | None  # seconds

    def __post_init__(self) -> None:
        require(self.repeats >= 1, f"repeats is {self.repeats}: use at least 1")
        require(0 < self.precision < 1, f"precision is {self.precision}: use a share in (0, 1), such as 0.02")
        prompts, largest = self.workload.num_prompts, max(self.batches)
        require(
            prompts is None or prompts >= largest,
            f"num-prompts is {prompts}, which never fill a batch of {largest}: use at least {largest}",
        )
        require(
            any(length.most for length in self.draft_lengths),
            "k is 0 alone, and plain decoding is measured anyway: name a K of at least 1, or auto",
        )

    def by_batch(self) -> dict[int, list[Arm]]:
        """The arms of each batch size, plain decoding first."""
        return {batch: list(self._arms(batch)) for batch in self.batches}

    def _arms(self, batch: int) -> Iterator[Arm]:
        each: list[dict[str, Any]] = [{"K": 0}]
        for length in (length for length in self.draft_lengths if length.most):
            k: int | str = length.kind if length.auto else length.most
            if self.engine.ngram is not None:  # n-grams have no drafter batch
                each.append({"K": k})
            else:
                each += [{"K": k, "drafter_batch": mode} for mode in self.drafter_batches]
        for changes in each:
            yield Arm(name=f"batch {batch}, {label(changes)}", changes={"batch": batch, **changes})

    def to_json(self) -> dict[str, Any]:
        """What the manifest of its engine and data does not say."""
        axes = {"batch": self.batches, "k": self.draft_lengths, "drafter_batch": self.drafter_batches}
        return {
            **{name: ", ".join(map(str, values)) for name, values in axes.items()},
            "workload": self.workload.to_json(),
            "repeats": self.repeats,
            "precision": self.precision,
        }


def prepared(job: TuneJob, output: Path | None = None) -> Prepared:
    """Its arms, prompts and memory, before a weight is read."""
    arms = [arm for arms in job.by_batch().values() for arm in arms]
    record = None if output is None else record_of(output, NAME)
    return prepare(arms, job.engine, job.workload, record=record)


def forecast_of(job: TuneJob, output: Path | None) -> Iterator[Part]:
    """What ``--dry-run`` prints: what is left to do beside the rounds in ``output``."""
    ready = prepared(job, output)
    settings = ready.manifest(job.to_json(), with_fingerprints=False)
    rounds = seen_rounds(output, NAME, settings)
    searches = (_search(job, ready, arms)[0] for arms in job.by_batch().values())
    left = {arm: number for search in searches for arm, number in search.left(rounds).items()}
    return forecast(ready, yardstick_of(ready), left, job.budget)


def tune(
    job: TuneJob,
    output: Path | None = None,
    watch: Watch = nobody,
    say: Callable[[str], None] = lambda sentence: None,
) -> Iterator[BenchTable]:
    """Yield the growing table after each round, and the whole one at the end; ``say`` takes arms that are dropped.

    Rounds are kept in ``output``; those kept there by the same job are not measured again.
    """
    began = time.monotonic()
    ready = prepared(job, output)
    settings = ready.manifest(job.to_json()) if output is not None else {}
    with kept_rounds(output, NAME, settings) as rounds:
        yield from _Tuning(job, ready, rounds, watch, say, began).run()


class _Tuning:
    def __init__(
        self,
        job: TuneJob,
        ready: Prepared,
        rounds: Rounds,
        watch: Watch,
        say: Callable[[str], None],
        began: float,
    ) -> None:
        self._job, self._ready, self._rounds, self._say = job, ready, rounds, say
        self._end = math.inf if job.budget is None else began + job.budget
        yardstick = yardstick_of(ready)
        self._under = _conditions(job, ready, yardstick)
        models = ready.load()
        self._watch = watch
        self._turns = Turns(lambda plan: models, yardstick, rounds, self._see)
        self._arms = {plan.arm.name: plan.arm for plan in ready.plans}
        self._dropped: set[str] = set()
        self._room = room_for_turns(ready.base, models)
        self._searches = [_search(job, ready, arms) for arms in job.by_batch().values()]

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
                for _ in self._turns.run(
                    group, most=self._job.repeats, due=search.due, plain=search.plain, deadline=deadline
                ):
                    self._tell_dropped(search)
                    yield self._table()
        yield self._table()

    def _see(self, turn: Turn) -> None:
        """Pass on a turn; a budget may end earlier than the turns that are left."""
        left = max(0.0, self._end - time.monotonic())
        self._watch(replace(turn, seconds_left=min(turn.seconds_left, left)))

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
        return [fitted(plan) for plan in plans if plan.arm.name in group]

    def _tell_dropped(self, search: Search) -> None:
        ranking = search.ranking(self._rounds)
        for arm in ranking.arms:
            if arm in self._dropped and not ranking.cannot_win(arm):
                self._dropped.remove(arm)
                self._say(f"measured again: {arm}: it may yet be the fastest")
            elif arm not in self._dropped and ranking.cannot_win(arm):
                self._dropped.add(arm)
                self._say(dropped(ranking, arm, self._arms))

    def _table(self) -> BenchTable:
        rankings = {
            batch: search.ranking(self._rounds)
            for batch, (search, _) in zip(self._job.batches, self._searches, strict=True)
        }
        missing = [
            name for name in self._arms if not (self._rounds.count(name) or name in self._turns.failed)
        ]
        notes = [*self._ready.notes, *self._turns.notes]
        if missing and self._job.budget is not None:
            notes.append(
                f"budget: {display.duration(self._job.budget)} for prompts, weights, warm-ups and rounds; rounds that "
                "would have exceeded it were skipped: raise --budget"
            )
        if missing:
            further = "the same command goes on" if self._rounds.are_kept else "with --output it can go on"
            notes.append(f"not measured yet: {'; '.join(missing)}: {further}")
        run = partial(command, engine=self._job.engine, workload=self._job.workload)
        return tune_table(self._arms, rankings, self._under, notes, run)


def _search(job: TuneJob, ready: Prepared, arms: Sequence[Arm]) -> tuple[Search, list[Plan]]:
    """The search of the ``arms`` of one batch size, and the plans of those that can run."""
    names = [arm.name for arm in arms]
    plans = [plan for plan in ready.plans if plan.arm.name in names]
    search = Search(
        plain=names[0],
        arms=tuple(plan.arm.name for plan in plans),
        most=job.repeats,
        precision=math.log1p(job.precision),
    )
    return search, plans


def _conditions(job: TuneJob, ready: Prepared, yardstick: Yardstick) -> Row:
    config, workload = ready.base, job.workload
    return {
        **conditions(config, ready.models),
        "attention": attention_note(config, ready.checkpoints),
        "CUDA graphs": config.cuda_graphs,
        "prompts": f"{ready.prompts.description}{workload.size}, greedy, {workload.lengths}",
        "concurrency": "the batch: a request that ends makes room for the next",
        "time": "of generate, prefill included; no prefix cache; after one warm-up run of the workload",
        "repeats": f"at most {job.repeats}, until the interval of x_plain is {display.percent(job.precision)} to "
        "either side, in turns; speeds and latencies are medians",
        "95 %": "Student's t for the mean logarithm of the ratios within a round; Welch's test for arms never in the "
        "same round. Picking the best of 15 equal arms, the interval holds the truth in 82-85 % of cases (94 % with 2)",
        "in_batch": "mean sequences in a decode step, below the batch size because the batch empties at the end",
        "per_user": "1 / median time per output token",
        "same_texts": "share of the texts that are identical to plain decoding at that batch size",
        **{name: text for name, text in yardstick.conditions.items() if name == "wrong_tokens"},
    }


# --- the table ------------------------------------------------------------------------------------


_PLAIN = "-"  # the drafter batch of plain decoding
COLUMNS = (
    Column(name="batch"),
    Column(name="K"),
    Column(name="drafter_batch"),
    Column(name="speed", unit="tokens/s", show=display.rate),
    Column(name="x_plain", show=display.ratio, interval="x_plain_ci95"),
    Column(name="x_best", show=display.ratio, interval="x_best_ci95"),
    Column(name="tpot", unit="ms"),
    Column(name="per_user", unit="tokens/s", show=display.rate),
    Column(name="acceptance_length"),
    Column(name="in_batch", show=display.rate),
    Column(name="repeats"),
    Column(name="same_texts", show=display.percent),
    Column(name="wrong_tokens"),
    Column(name="verdict"),
)


def tune_table(
    arms: Mapping[str, Arm],
    rankings: Mapping[int, Ranking],
    conditions: Mapping[str, Value],
    notes: Sequence[str],
    command: Callable[[Arm], str],
) -> BenchTable:
    """The table of the arms that have repeats, by batch size; ``command`` is what runs as an arm did."""
    known = {batch: ranking for batch, ranking in rankings.items() if ranking.arms}
    rows = {
        name: _row(arms[name], ranking) for ranking in known.values() for name in arms if name in ranking.arms
    }
    repeats = {name: found for ranking in known.values() for name, found in ranking.arms.items()}
    busy, others = disturbed(repeats)
    judged = {name: rows[name] for each in known.values() if each.is_judged for name in each.arms}
    sentences = [sentence(batch, ranking, arms) for batch, ranking in known.items()]
    sentences += busy  # where the speeds are
    bests = [ranking.best for ranking in known.values() if ranking.is_judged]
    if bests:
        fastest = max(bests, key=lambda name: repeats[name].speed.median)
        sentences.append(f"Most tokens per second: {command(arms[fastest])}")
    has_known_text = any(row["wrong_tokens"] is not None for row in rows.values())
    shown = [column for column in COLUMNS if has_known_text or column.name != "wrong_tokens"]
    return BenchTable(
        name="tune",
        title="K, drafter batch and batch size",
        conditions=conditions,
        columns=tuple(shown),
        rows=selected(shown, rows.values()),
        plots=tuple(_plots(tuple(rows.values()))),
        answers=tuple(sentences),
        notes=(*_doubts(rows), *others, *notes),
        more=(best_line(judged),),
        num_keys=3,
    )


def _row(arm: Arm, ranking: Ranking) -> Row:
    repeats = ranking.arms[arm.name]
    over_plain = over_best = None
    if ranking.has_steps:
        over_plain = ranking.over_reference(arm.name) if ranking.plain in ranking.arms else None
        over_best = ranking.over_best(arm.name)
    tpot = repeats.tpot
    return {
        "batch": arm.changes["batch"],
        "K": arm.changes["K"],
        "drafter_batch": arm.changes.get("drafter_batch", _PLAIN),
        "speed": repeats.speed.median,
        **_ratio("x_plain", over_plain, arm.name == ranking.plain),
        **_ratio("x_best", over_best, arm.name == ranking.best),
        "tpot": milliseconds(tpot),
        "per_user": 1 / tpot if tpot else None,
        "acceptance_length": repeats.acceptance_length,
        "in_batch": repeats.median(lambda repeat: repeat.mean_sequences),
        "repeats": len(repeats.each),
        "same_texts": repeats.same_texts(ranking.arms[ranking.plain]) if over_plain else None,
        "wrong_tokens": repeats.num_wrong,
        "verdict": _verdict(arm.name, ranking),
    }


def _doubts(rows: Mapping[str, Row]) -> Iterator[str]:
    """What says that an arm may be fast because it is wrong."""
    for name, row in rows.items():
        if row["wrong_tokens"]:
            yield f"wrong: {name}: {display.count(row['wrong_tokens'])} tokens differ from the pair's known text"
    others = [name for name, row in rows.items() if row["same_texts"] is not None and row["same_texts"] < 1]
    if others:
        named = "; ".join(others)
        yield f"texts differ from plain decoding in {named}: specgen verify says whether rounding explains it"


def _ratio(name: str, found: Speedup | None, itself: bool) -> dict[str, object]:
    """The columns of a ratio; an arm over itself is 1, without an interval."""
    if found is None:
        return {name: None, f"{name}_ci95": None}
    return {name: found.ratio, f"{name}_ci95": None if itself else found.interval}


def _verdict(arm: str, ranking: Ranking) -> str:
    if not ranking.has_steps:
        return "unknown"
    if arm == ranking.best:
        return "best" if ranking.is_judged else "unknown"
    if ranking.cannot_win(arm):
        return "dropped"
    if ranking.over_best(arm).interval is None:
        return "unknown"
    return "no different" if ranking.no_different(arm) else "slower"


def _plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """Speed-up and speed over the batch, a line per K, for each drafter batch; plain decoding is in all of them."""
    modes = dict.fromkeys(row["drafter_batch"] for row in rows if row["drafter_batch"] != _PLAIN)
    for y, title in (("x_plain", "Speed-up over plain decoding"), ("speed", "Output tokens per second")):
        for mode in modes or [_PLAIN]:  # n-grams have none
            yield Plot(
                title=f"{title}, {mode}" if modes else title,
                x="batch",
                y=y,
                series="K",
                where={"drafter_batch": (_PLAIN, mode)},
                reference=1.0 if y == "x_plain" else None,
                order=DRAFT_LENGTHS,
            )


def best_line(rows: Mapping[str, Row]) -> Table:
    """The arms that no other arm beats in both tokens per second for one user and for all (the Pareto front)."""
    points = {
        name: (row["per_user"], row["speed"]) for name, row in rows.items() if row["per_user"] is not None
    }
    front = {
        name: point
        for name, point in points.items()
        if not any(
            other[0] >= point[0] and other[1] >= point[1] and other != point for other in points.values()
        )
    }
    return Table(
        title="Tokens per second for one user and for all",
        note="Pareto front: no other setting is better for one user and in total",
        columns=(
            Column(name="arm", title=""),
            Column(name="per_user", unit="tokens/s", show=display.rate),
            Column(name="speed", unit="tokens/s", show=display.rate),
        ),
        rows=tuple(
            {"arm": name, "per_user": front[name][0], "speed": front[name][1]}
            for name in sorted(front, key=lambda name: front[name])
        ),
    )


_RUN_AS_MEASURED = (  # options of ``generate`` that are kept where they are not its defaults
    "device",
    "tensor_parallel",
    "dtype",
    "kv_dtype",
    "attention",
    "cuda_graphs",
    "gpu_memory_utilization",
    "max_prefill_tokens",
    "generation_config",
)


def label(changes: Mapping[str, Any]) -> str:
    """What an arm changes beside the batch size: ``plain``, ``K 2, padded``."""
    mode = changes.get("drafter_batch")
    return ("plain" if changes["K"] == 0 else f"K {changes['K']}") + (f", {mode}" if mode else "")


def sentence(batch: int, ranking: Ranking, arms: Mapping[str, Arm]) -> str:
    """The fastest arm at a batch size, by how much, and what is no different; of at least one arm."""
    best, found = ranking.best, ranking.arms[ranking.best]
    named = label(arms[best].changes)
    if not ranking.has_steps:
        return f"At batch {batch}: no verdict, as every text ended at its first token: no step had drafts."
    if not ranking.is_judged:
        ratio = display.ratio(ranking.over_reference(best).ratio)
        ahead = f", {ratio} of plain" if ranking.plain in ranking.arms and best != ranking.plain else ""
        return (
            f"At batch {batch}: no verdict, as one repeat has no spread ({named} was ahead{ahead}): raise --budget or "
            "--repeats."
        )
    parts = [f"At batch {batch}: {named}"]
    if ranking.plain not in ranking.arms:
        parts.append("the fastest; plain decoding was not measured")
    elif best != ranking.plain:
        parts.append(f"{interval_of(ranking.over_reference(best))} of plain")
    parts += [f"{display.seconds(found.tpot)} per token"] if found.tpot is not None else []
    parts.append(f"{display.count(found.speed.median)} tokens/s")
    return "; ".join([", ".join(parts), *_others(ranking, arms)]) + "."


def dropped(ranking: Ranking, arm: str, arms: Mapping[str, Arm]) -> str:
    """Why ``arm`` gets no more repeats."""
    ratio, most = display.ratio(ranking.over_best(arm).ratio), display.ratio(ranking.at_most(arm))
    done = len(ranking.arms[arm].each)
    return (
        f"dropped: {arm}: {ratio} of {label(arms[ranking.best].changes)} after {done} repeats, at "
        f"{display.percent(DROPPING)} confidence at most {most}"
    )


def interval_of(found: Speedup) -> str:
    """``1.87x [1.84, 1.90]``"""
    if found.interval is None:
        return f"{display.ratio(found.ratio)} (one repeat, no interval)"
    return f"{display.ratio(found.ratio)} {display.between(found.interval, display.plain)}"


def _others(ranking: Ranking, arms: Mapping[str, Arm]) -> Iterator[str]:
    """The same K with the other drafter batch, ``auto``, and whatever else may be as fast."""
    best, k = ranking.best, arms[ranking.best].changes["K"]
    others = {arm: arms[arm].changes for arm in ranking.arms if arm != best}
    twins = [arm for arm, changes in others.items() if changes["K"] == k]
    for arm in twins:
        yield _beside(ranking, arm, others[arm]["drafter_batch"])
    autos = [arm for arm, changes in others.items() if changes["K"] in _CHOSEN and changes["K"] != k]
    if autos:
        fastest = max(autos, key=lambda arm: ranking.over_best(arm).ratio)
        yield _beside(ranking, fastest, label(others[fastest]).removeprefix("K "))
    alike = [arm for arm in others if arm not in {*twins, *autos} and ranking.no_different(arm)]
    if alike:
        yield f"no different: {' and '.join(label(others[arm]) for arm in alike)}"
    if best == ranking.plain and others:
        drafting = max(others, key=lambda arm: ranking.over_best(arm).ratio)
        yield f"with drafts at best {label(others[drafting])}, {interval_of(ranking.over_best(drafting))} of plain"


def _beside(ranking: Ranking, arm: str, name: str) -> str:
    """How ``arm`` compares with the best one."""
    found = interval_of(ranking.over_best(arm))
    return f"{name} no different, {found}" if ranking.no_different(arm) else f"{name} {found} of that"


def command(arm: Arm, engine: EngineConfig, workload: Workload) -> str:
    """The ``specgen generate`` that runs as ``arm`` did; ``engine`` is what the arms changed."""
    config, how = arm.configure(engine), workload.how
    length, template = config.draft_length, engine.template_kwargs
    is_bundled = (engine.model, engine.drafter) == bundled.pair(None, None, DraftLength(most=1))
    given = {  # option: value, None where it is left out
        "--model": None if is_bundled else engine.model,
        "--drafter": None if is_bundled or length.most == 0 else engine.drafter,
        "--dataset": workload.dataset,
        "--data-path": workload.data_path,
        "--split": how.split,
        "--prompt-field": how.prompt_field,
        **({} if how.chat is None else {"--chat" if how.chat else "--raw": True}),
        # others are other prompts
        "--chat-template-kwargs": None if template == TemplateKwargs() else template,
        "--max-batch-size": config.max_batch_size,
        "--num-spec-tokens": length.kind if length.auto else length.most,
        "--drafter-batch": None if config.head is None else config.drafter_batch,
        "--max-new-tokens": workload.max_new_tokens if workload.output_lens == "fixed" else None,
    }
    defaults = {each.name: each.default for each in fields(EngineConfig)}
    changed = [name for name in _RUN_AS_MEASURED if getattr(config, name) != defaults[name]]
    given |= {f"--{name.replace('_', '-')}": getattr(config, name) for name in changed}
    words = [
        [name] if value is True else [name, str(value)] for name, value in given.items() if value is not None
    ]
    return shlex.join(["specgen", "generate", *chain(*words)])
