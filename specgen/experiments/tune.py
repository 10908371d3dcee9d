"""``specgen tune``: arms on given traffic, measured until it is clear which is fastest, or as often as asked for.

Arms differ in batch size, K, drafter batch and settings of the engine. All arms of a batch size take turns as far as
their engines fit into memory together; where they do not, in groups: plain decoding and the fastest arm so far meet as
many others as fit. See ``Search`` for who takes part in a round.
"""

import math
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain, product
from pathlib import Path

from specgen.config import DraftLength, EngineConfig, bundled
from specgen.core.engine_core import discard
from specgen.engine.arms import Arm
from specgen.engine.build import room_for_turns
from specgen.engine.choices import attention_note
from specgen.experiments.output import BenchTable, Plot, Value, selected
from specgen.experiments.plans import (
    KnownText,
    Plan,
    Setup,
    conditions,
    prepare,
    with_kv_size,
)
from specgen.experiments.rounds import (
    TABLE,
    Ranking,
    Repeat,
    Rounds,
    Search,
    disturbed,
    kept_rounds,
)
from specgen.experiments.tune_job import SETTINGS, TuneJob, Workload, label
from specgen.experiments.turns import Turn, Turns, Watch
from specgen.report import display
from specgen.report.table import Column, Row


def tune(job: TuneJob, output: Path | None = None, watch: Watch = discard) -> Iterator[BenchTable]:
    """Yield the growing table after each round, and the whole one at the end.

    Rounds are kept in ``output``; those kept there by the same job are not measured again.
    """
    began = time.monotonic()
    setup = prepare(job, output)
    with kept_rounds(output, {} if output is None else setup.manifest()) as rounds:
        yield from _Tuning(setup, rounds, watch, began).run()


class _Tuning:
    def __init__(self, setup: Setup, rounds: Rounds, watch: Watch, began: float) -> None:
        job = setup.job
        self._job, self._setup, self._rounds, self._watch = job, setup, rounds, watch
        self._end = math.inf if job.budget is None else began + job.budget
        known = None if setup.base.synthetic_acceptance else KnownText.of(setup.models)
        self._conditions = _conditions(setup, known)
        models = setup.load()
        self._turns = Turns(lambda plan: models, known, rounds, self._see)
        self._arms = {plan.arm.name: plan.arm for plan in setup.plans}
        self._room = room_for_turns(setup.base, models)
        self._searches = [_search(setup, batch) for batch in job.batches]

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
        """The arms that have repeats, by batch size."""
        job, arms = self._job, self._arms
        rankings = {
            batch: ranking
            for batch, (search, _) in zip(job.batches, self._searches, strict=True)
            if (ranking := search.ranking(self._rounds)).arms
        }
        repeats = {name: found for ranking in rankings.values() for name, found in ranking.arms.items()}
        ran = {name: arm for name, arm in arms.items() if name in repeats}
        # else they are the dice's
        firsts, own_texts = _firsts(ran.values()), not job.base.synthetic_acceptance
        rows = {
            name: _row(name, ranking, ran, firsts, judges_texts=own_texts)
            for ranking in rankings.values()
            for name in ran
            if name in ranking.arms
        }
        busy, others = disturbed(repeats)
        sentences = [sentence(batch, ranking, arms) for batch, ranking in rankings.items()]
        sentences += busy  # where the speeds are
        bests = [ranking.best for ranking in rankings.values() if ranking.is_judged]
        if bests and own_texts:
            fastest = max(bests, key=lambda name: repeats[name].speed)
            sentences.append(f"Most tokens per second: {command(arms[fastest], job.base, job.workload)}")
        brief = list(_brief(ran.values(), rows.values(), firsts))
        columns = (*brief, *_MORE)
        return BenchTable(
            name=Path(TABLE).stem,
            title="K, drafter batch and batch size",
            conditions=self._conditions,
            columns=columns,
            rows=selected(columns, rows.values()),
            plots=tuple(_plots(tuple(rows.values()))),
            answers=tuple(sentences),
            notes=(*_doubts(rows), *others, *self._setup.notes, *self._turns.notes, *self._missing()),
            shown=len(brief) if job.precision else None,  # a search drops arms
            num_keys=sum(column.name in _KEYS for column in brief),
        )

    def _missing(self) -> Iterator[str]:
        """Notes on arms without repeats."""
        rounds, budget = self._rounds, self._job.budget
        missing = [name for name in self._arms if not (rounds.count(name) or name in self._turns.failed)]
        if missing and budget is not None:
            yield (
                f"budget: {display.duration(budget)} for prompts, weights, warm-ups and rounds; rounds that would have "
                "exceeded it were skipped: raise --budget"
            )
        if missing:
            further = "the same command goes on" if rounds.are_kept else "with --output it can go on"
            yield f"not measured yet: {'; '.join(missing)}: {further}"


def _search(setup: Setup, batch: int) -> tuple[Search, list[Plan]]:
    """The search of the arms of one batch size, and the plans of those that can run."""
    plans = [plan for plan in setup.plans if plan.arm.changes["batch"] == batch]
    names = tuple(plan.arm.name for plan in plans)
    plain = next((plan.arm.name for plan in plans if plan.arm.changes["K"] == 0), "")
    job = setup.job
    return Search(plain=plain, arms=names, most=job.repeats, precision=math.log1p(job.precision)), plans


def _conditions(setup: Setup, known: KnownText | None) -> Row:
    config, job, workload = setup.base, setup.job, setup.job.workload
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


# --- the table -----------------------------------------------------------------------------------------

_PLAIN = "-"  # the drafter batch of plain decoding
_OF_PLAIN: Mapping[str, Value] = {"K": 0, "drafter_batch": _PLAIN}
_SPREADS, _PARTS = ("ttft", "tpot", "itl"), ("mean", "median", "p99")
_KEYS = ("batch", *SETTINGS, "K", "drafter_batch")
COLUMNS = (
    *(Column(name=name) for name in _KEYS if name not in SETTINGS),
    Column(name="speed", unit="tokens/s", show=display.rate),
    Column(name="x_plain", show=display.ratio, interval="x_plain_ci95"),
    Column(name="x_best", show=display.ratio, interval="x_best_ci95"),
    Column(name="tpot", unit="ms"),
    Column(name="acceptance_length"),
    Column(name="in_batch", show=display.rate),
    Column(name="repeats"),
    Column(name="same_texts", show=display.percent),
    Column(name="wrong_tokens"),
    Column(name="verdict"),
)
_MORE = (  # not on the terminal of a search
    *(Column(name=name, unit="tokens/s", show=display.rate) for name in ("lowest", "highest")),
    Column(name="acceptance"),
    Column(name="step", unit="ms"),
    *(Column(name=f"{name}_{part}", unit="ms") for name in _SPREADS for part in _PARTS),
)


def _firsts(arms: Iterable[Arm]) -> dict[str, str]:
    """The first value of drafter batch and of each setting with several in ``arms``: others are compared with it."""
    found: dict[str, list[str]] = {}
    for arm in arms:
        for axis in arm.changes.keys() & {"drafter_batch", *SETTINGS}:
            found.setdefault(axis, []).append(arm.changes[axis])
    return {axis: found[axis][0] for axis in _KEYS if len({*found.get(axis, ())}) > 1}


def _ratio_to(first: str) -> str:
    return f"x_{first.replace('-', '_')}"


def _brief(arms: Iterable[Arm], rows: Iterable[Row], firsts: Mapping[str, str]) -> Iterator[Column]:
    """``COLUMNS``, with the settings that arms differ in and the ratios to their first values."""
    changed = {name for arm in arms for name in arm.changes}
    judged = any(row["wrong_tokens"] is not None for row in rows)
    for column in COLUMNS:
        if column.name == "K":
            yield from (Column(name=name) for name in SETTINGS if name in changed)
        if judged or column.name != "wrong_tokens":
            yield column
        if column.name == "x_best":
            for name in map(_ratio_to, firsts.values()):
                yield Column(name=name, show=display.ratio, interval=f"{name}_ci95")


def _row(
    name: str, ranking: Ranking, arms: Mapping[str, Arm], firsts: Mapping[str, str], *, judges_texts: bool
) -> Row:
    repeats, changes = ranking.arms[name], arms[name].changes
    plain = _beside(name, ranking, arms, K=0)
    is_judged = judges_texts and ranking.plain in ranking.arms and ranking.has_steps
    row = {
        **{axis: changes[axis] for axis in _KEYS if axis in changes},
        "drafter_batch": changes.get("drafter_batch", _PLAIN),
        "speed": repeats.speed,
        **_ratio("x_plain", name, plain, ranking),
        **_ratio("x_best", name, ranking.best, ranking),
        "tpot": _milliseconds(repeats.tpot),
        "acceptance_length": repeats.acceptance_length,
        "in_batch": repeats.median(lambda repeat: repeat.mean_sequences),
        "repeats": len(repeats.each),
        "same_texts": repeats.same_texts(ranking.arms[ranking.plain]) if is_judged else None,
        "wrong_tokens": repeats.num_wrong,
        "verdict": _verdict(name, ranking),
        "lowest": min(repeats.speeds),
        "highest": max(repeats.speeds),
        "acceptance": repeats.acceptance,
        "step": _milliseconds(repeats.median(lambda repeat: repeat.step_seconds)),
    }
    for axis, first in firsts.items():
        base = _beside(name, ranking, arms, **{axis: first}) if axis in changes else None
        row |= _ratio(_ratio_to(first), name, base, ranking)
    for spread, part in product(_SPREADS, _PARTS):
        row[f"{spread}_{part}"] = _milliseconds(repeats.median(_latency(spread, part)))
    return row


def _beside(name: str, ranking: Ranking, arms: Mapping[str, Arm], **changed: object) -> str | None:
    """The arm of a ``ranking`` that is like ``name`` but for what is ``changed``; None where that has not run."""
    wanted = {**arms[name].changes, **changed}
    if wanted["K"] == 0:
        wanted.pop("drafter_batch", None)
    return next((each for each in ranking.arms if arms[each].changes == wanted), None)


def _latency(name: str, part: str) -> Callable[[Repeat], float | None]:
    return lambda repeat: getattr(getattr(repeat, name), part, None)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _doubts(rows: Mapping[str, Row]) -> Iterator[str]:
    """Notes on arms that may be fast because they are wrong."""
    for name, row in rows.items():
        if row["wrong_tokens"]:
            yield f"wrong: {name}: {display.count(row['wrong_tokens'])} tokens differ from the pair's known text"
    others = [name for name, row in rows.items() if row["same_texts"] is not None and row["same_texts"] < 1]
    if others:
        named = "; ".join(others)
        yield f"texts differ from plain decoding in {named}: specgen verify says whether rounding explains it"


def _ratio(column: str, arm: str, other: str | None, ranking: Ranking) -> dict[str, object]:
    """The columns of the speed of ``arm`` over that of ``other``; over itself it is 1, without an interval."""
    if other is None or not ranking.has_steps:
        return {column: None, f"{column}_ci95": None}
    found = ranking.arms[arm].speedup(ranking.arms[other])
    return {column: found.value, f"{column}_ci95": None if other == arm else found.interval}


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
    """Speed-up and speed, plain decoding in all of them.

    Over the batch with a line for each K, or over the first of ``SETTINGS`` that arms differ in with one for each
    drafter batch; a plot for each value of what else differs.
    """
    values = {name: dict.fromkeys(row[name] for row in rows if name in row) for name in _KEYS}
    over = [name for name in SETTINGS if len(values[name]) > 1]
    x, series = (over[0], "drafter_batch") if over else ("batch", "K")
    apart = [name for name in _KEYS if name not in (x, series) and values[name]]
    drafts = {name: [each for each in values[name] if each != _OF_PLAIN.get(name)] for name in apart}
    for y, title in (("x_plain", "Speed-up over plain decoding"), ("speed", "Output tokens per second")):
        for each in product(*(drafts[name] or [_OF_PLAIN.get(name)] for name in apart)):
            where = {
                name: (_OF_PLAIN.get(name, value), value) for name, value in zip(apart, each, strict=True)
            }
            shown = [
                str(value) if name == "drafter_batch" else f"{name} {value}"
                for name, value in zip(apart, each, strict=True)
                if (name == "drafter_batch" and value != _PLAIN) or len(drafts[name]) > 1
            ]
            yield Plot(
                title=", ".join((title, *shown)),
                x=x,
                y=y,
                series=series,
                where=where,
                reference=1.0 if y == "x_plain" else None,
            )


# fields of an arm's configuration that ``command`` says otherwise, or that are the bench's own
_ASIDE = {
    *("model", "drafter", "num_spec_tokens", "drafter_batch", "draft_lm_head", "max_batch_size"),
    "prefix_cache",
}


def sentence(batch: int, ranking: Ranking, arms: Mapping[str, Arm]) -> str:
    """The fastest arm at a batch size, by how much, and what is no different; of at least one arm."""
    best, found = ranking.best, ranking.arms[ranking.best]
    named, plain = label(arms[best].changes), _beside(best, ranking, arms, K=0)
    if not ranking.has_steps:
        return f"At batch {batch}: no verdict, as every text ended at its first token: no step had drafts."
    if not ranking.is_judged:
        ahead = f"({named} was ahead)" if len(ranking.arms) > 1 else f"({named} alone was measured)"
        one = f"one repeat has no spread {ahead}"
        return f"At batch {batch}: no verdict, {one}: raise --budget or --repeats."
    parts = [f"At batch {batch}: {named}"]
    if plain is None:
        parts.append("the fastest; plain decoding was not measured")
    elif plain != best:
        of_plain = found.speedup(ranking.arms[plain])
        parts.append(
            f"{display.ratio(of_plain.value)} {display.between(of_plain.interval, display.plain)} of plain"
        )
    parts += [f"{display.seconds(found.tpot)} per token"] if found.tpot is not None else []
    alike = [label(arms[arm].changes) for arm in ranking.arms if ranking.no_different(arm)]
    others = f"; no different: {' and '.join(alike)}" if alike else ""
    return f"{', '.join(parts)}, {display.count(found.speed)} tokens/s{others}."


def command(arm: Arm, engine: EngineConfig, workload: Workload) -> str:
    """The ``specgen generate`` that runs as ``arm`` did; ``engine`` is what the arms changed."""
    config, how = arm.configure(engine), workload.how
    length = config.draft_length
    is_bundled = (engine.model, engine.drafter) == bundled.pair(None, None, DraftLength(most=1))
    given = {  # option: value, None where it is left out
        "--model": None if is_bundled else engine.model,
        "--drafter": None if is_bundled or length.most == 0 else engine.drafter,
        "--dataset": workload.dataset,
        "--data-path": workload.data_path,
        "--split": how.split,
        "--prompt-field": how.prompt_field,
        **({} if how.chat is None else {"--chat" if how.chat else "--raw": True}),
        "--max-batch-size": config.max_batch_size,
        "--num-spec-tokens": length.kind if length.auto else length.most,
        "--drafter-batch": None if config.head is None else config.drafter_batch,
        "--draft-lm-head": "fp8" if config.head and config.draft_lm_head == "fp8" else None,
        "--max-new-tokens": workload.max_new_tokens if workload.output_lens == "fixed" else None,
    }
    options = (each for each in fields(config) if each.metadata and each.name not in _ASIDE)
    changed = [each.name for each in options if getattr(config, each.name) != each.default]
    given |= {f"--{name.replace('_', '-')}": getattr(config, name) for name in changed}
    words = [
        [name] if value is True else [name, str(value)] for name, value in given.items() if value is not None
    ]
    return shlex.join(["specgen", "generate", *chain(*words)])
