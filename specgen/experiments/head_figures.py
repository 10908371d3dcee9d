"""The figures of a comparison: lengths by data set and head, paired differences of every two heads, speeds."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, count
from pathlib import Path
from typing import Any, Self

from specgen.config import require
from specgen.config.json_fields import load_json
from specgen.experiments.rounds import PLAIN, Rounds, Speeds, rounds_under
from specgen.record.files import Rows
from specgen.report.display import from_here
from specgen.report.folder import COMPARISON
from specgen.report.intervals import Interval, Ratio, student_t
from specgen.report.origin import unlike_settings
from specgen.report.paired_requests import (
    Answer,
    Answers,
    Pair,
    PairedFigure,
    corrected,
    corrected_by_kind,
    length_of,
    num_identical,
    pair_up,
    paired_length,
    read_answers,
    with_steps,
)
from specgen.report.references import Reference, RunComparison, compare_run, without_suffix
from specgen.report.report import Report, load_so_far

PLAN = COMPARISON  # its runs, and when and how it was made
ROUNDS, _EARLIER_ROUNDS = "compare.rounds.jsonl", "speed.jsonl"
HEADS_OWN = ("engine.drafter", "fingerprints.drafter")
DECISIVE = (  # for acceptance; the others, such as the batch, the device or a version, are named
    "engine.model",
    "engine.num_spec_tokens",
    "engine.spec_length",
    "engine.draft_sampling",
    "engine.dtype",
    "engine.kv_dtype",
    "engine.chat_template_kwargs.",
    "sampling.",
    "fingerprints.model",
)
OF_DATA = ("data.num_prompts", "data.sha256", "data.shard")  # of which prompts a run is
_DIGEST = 6  # characters that are shown of one
_REMEDY = "generate them alike, or set them side by side with `specgen report`"


@dataclass(frozen=True, kw_only=True)
class HeadRun:
    """One finished run: of which head, on which data set."""

    directory: Path
    head: str  # short name
    data: str  # short name
    report: Report
    manifest: Mapping[str, Any]

    @property
    def drafter(self) -> str:
        """The head's checkpoint, or ``ngram:N``."""
        return str(self.manifest["engine"]["drafter"])


@dataclass(frozen=True, kw_only=True)
class HeadRuns:
    """Runs that differ in data set and head alone, and by field the other settings in which they are unlike."""

    runs: tuple[HeadRun, ...]
    unlike: Mapping[str, tuple[Any, ...]]  # of each run

    @property
    def heads(self) -> tuple[str, ...]:
        """In the order of the runs."""
        return tuple(dict.fromkeys(run.head for run in self.runs))

    @property
    def data(self) -> tuple[str, ...]:
        """The data sets in the order of the runs."""
        return tuple(dict.fromkeys(run.data for run in self.runs))

    def on(self, data: str) -> list[HeadRun]:
        """The runs on ``data``."""
        return [run for run in self.runs if run.data == data]

    def in_order(self) -> list[HeadRun]:
        """The runs by data set, those of one in the order of ``heads``."""
        data, heads = self.data, self.heads
        return sorted(self.runs, key=lambda run: (data.index(run.data), heads.index(run.head)))


def read_runs(directories: Sequence[Path]) -> HeadRuns:
    """The runs in ``directories``; ``UserError`` names what keeps them from being compared."""
    read = [(directory, *_read(directory)) for directory in directories]
    manifests = [manifest for _, _, manifest in read]
    unlike = unlike_settings(manifests)
    refuse_unlike(directories, {name: found for name, found in unlike.items() if name.startswith(DECISIVE)})
    heads = _heads(manifests)
    sources = _sources(manifests)
    sets = short_names(sources)
    runs = tuple(
        HeadRun(directory=directory, head=head, data=sets[source], report=report, manifest=manifest)
        for (directory, report, manifest), head, source in zip(read, heads, sources, strict=True)
    )
    _check_data(runs)
    named = {
        name: each
        for name, each in unlike.items()
        if name not in HEADS_OWN and not name.startswith(("data.", *DECISIVE))
    }
    return HeadRuns(runs=runs, unlike=named)


def published(runs: HeadRuns, reference: Reference) -> list[RunComparison]:
    """Every run beside the figures of ``reference``; ``UserError`` where nothing was measured as one of them was."""
    return [
        compare_run(run.directory, run.report, run.manifest, reference, {"data": run.data, "head": run.head})
        for run in runs.in_order()
    ]


def is_comparison(directory: Path) -> bool:
    """Whether ``directory`` is that of a comparison."""
    return (directory / PLAN).exists()


def run_directories(directory: Path) -> list[Path]:
    """The runs of the comparison in ``directory``; of anything else, ``directory`` itself."""
    if not is_comparison(directory):
        return [directory]
    runs = [directory / each for each in load_json(directory / PLAN, "compare again")["runs"]]
    begun = [run for run in runs if (run / "manifest.json").exists()]
    require(
        len(begun) == len(runs),
        f"{directory} holds a comparison that is not finished ({len(begun)} of {len(runs)} runs begun): "
        "the same command resumes it",
    )
    return runs


def read_speeds(directory: Path) -> Speeds:
    """The speeds of the comparison in ``directory``; none of anything else."""
    if not is_comparison(directory):
        return {}
    require(
        (directory / ROUNDS).exists() or not (directory / _EARLIER_ROUNDS).exists(),
        f"{directory} holds speeds of an earlier version ({_EARLIER_ROUNDS}): run its command again, which "
        "measures them anew, or give its run directories",
    )
    under = load_json(directory / PLAN, "compare again")["under"]
    return rounds_under(Rows(directory / ROUNDS).values(), under)


def _read(directory: Path) -> tuple[Report, Mapping[str, Any]]:
    report, manifest = load_so_far(directory)
    require(report.state is None, f"{directory}: {report.unfinished}")
    require(
        (directory / "completions.jsonl").is_file(),
        f"{directory} has no completions.jsonl, of which a comparison is made: generate into a new directory",
    )
    require(
        "dataset" in manifest["data"],
        f"{directory} holds no run of `specgen generate`: give such runs, or see `specgen report {directory}`",
    )
    require(
        manifest["engine"]["num_spec_tokens"] != 0,
        f"{directory} is plain decoding, which has no acceptance to compare: give runs with a drafter",
    )
    require(
        manifest["engine"].get("spec_length", "fixed") == "fixed",
        f"{directory} chose K at every step (num-spec-tokens auto), so its length cannot be compared: generate with a "
        "fixed K",
    )
    return report, manifest


def _heads(manifests: Sequence[Mapping[str, Any]]) -> list[str]:
    """The head of each run: equal weights are one head, also under another path; a path may have held several."""
    weights = [str(manifest["fingerprints"]["drafter"]) for manifest in manifests]
    paths: dict[str, str] = {}  # the first of each
    for digest, manifest in zip(weights, manifests, strict=True):
        paths.setdefault(digest, str(manifest["engine"]["drafter"]))
    all_paths = list(paths.values())
    labels = {
        digest: path if all_paths.count(path) == 1 else f"{path}@{digest[:_DIGEST]}"
        for digest, path in paths.items()
    }
    names = short_names(labels.values(), taken=PLAIN)
    return [names[labels[digest]] for digest in weights]


def _sources(manifests: Sequence[Mapping[str, Any]]) -> list[str]:
    """The data set of each run: equal prompts are one, also by another name, whose first name it has."""
    names: dict[str, str] = {}
    data = [manifest["data"] for manifest in manifests]
    return [names.setdefault(each.get("sha256", each["dataset"]), each["dataset"]) for each in data]


def _check_data(runs: Sequence[HeadRun]) -> None:
    """Every head at most once on every data set, with the same prompts."""
    for data in dict.fromkeys(run.data for run in runs):
        alike = [run for run in runs if run.data == data]
        unlike = unlike_settings([run.manifest for run in alike])
        refuse_unlike(
            [run.directory for run in alike], {name: unlike[name] for name in OF_DATA if name in unlike}
        )
        seen: dict[str, HeadRun] = {}
        for run in alike:
            other = seen.setdefault(run.head, run)
            require(
                other is run,
                f"{other.directory} and {run.directory} are both of {from_here(run.drafter)} on {data}: leave one out",
            )


def refuse_unlike(directories: Sequence[Path], unlike: Mapping[str, Sequence[Any]]) -> None:
    """``UserError`` with the value of ``directories``' first two that differ, for every field."""
    differing = []
    for name, values in unlike.items():
        at = next(at for at, value in enumerate(values) if value != values[0])
        differing.append(f"{name} ({values[0]} in {directories[0]}, {values[at]} in {directories[at]})")
    require(
        not differing, f"the runs cannot be compared, as they differ in {', '.join(differing)}: {_REMEDY}"
    )


def short_names(paths: Iterable[str], taken: str | None = None) -> dict[str, str]:
    """The name of each path: its last part, with as many before it as it takes to differ from earlier names.

    They differ as directories too, and none is ``taken``.
    """
    names: dict[str, str] = {}
    directories: set[str] = set()
    for path in dict.fromkeys(paths):
        free = (name for name in _names(path) if name != taken and as_directory(name) not in directories)
        names[path] = next(free)
        directories.add(as_directory(names[path]))
    return names


def _names(path: str) -> Iterator[str]:
    parts = without_suffix(path).parts
    for length in range(1, len(parts) + 1):
        yield "/".join(parts[-length:])
    yield path
    for number in count(2):
        yield f"{path} ({number})"


def as_directory(name: str) -> str:
    """``name`` as the name of one directory."""
    flat = name.replace("/", "--").replace(":", "-")
    return f"_{flat.lstrip('.')}" if flat.startswith(".") else flat


_LEVEL = 0.05  # of p after Holm's correction, below which a difference is significant


@dataclass(frozen=True, kw_only=True)
class Length:
    """A mean acceptance length: 1 + accepted drafts / steps, those without drafts too.

    So it is what plain decoding's passes are divided by, also of n-grams, which draft in some steps only.
    """

    value: float
    variance: float | None  # of ``value``, over conversations; None with fewer than two
    freedom: float  # degrees of freedom of ``variance``
    most: int  # K + 1, which no length exceeds
    num_conversations: int
    # [K]: accepted drafts by position, also over all steps: 1 + their sum is ``value``; none of a mean
    positions: Sequence[Ratio] = ()

    @classmethod
    def of(cls, answers: Collection[Answer], num_spec_tokens: int) -> Self | None:
        """None without a step."""
        found = length_of(answers)
        if found.rate is None:
            return None
        variance = found.variance() if found.groups > 1 else None
        return cls(
            value=1 + found.rate,
            variance=variance,
            freedom=found.groups - 1,
            most=num_spec_tokens + 1,
            num_conversations=found.groups,
            positions=[length_of(answers, slice(i, i + 1)) for i in range(num_spec_tokens)],
        )

    @classmethod
    def mean(cls, lengths: Sequence["Length | None"]) -> "Length | None":
        """Of independent data sets, each with the same weight; None where one is unknown.

        Degrees of freedom by Satterthwaite (Biometrics Bulletin 2, 1946).
        """
        known = [each for each in lengths if each is not None]
        if not known or len(known) < len(lengths):
            return None
        parts = [(each.variance, each.freedom) for each in known if each.variance]
        complete, total = len(parts) == len(known), math.fsum(variance for variance, _ in parts)
        return Length(
            value=math.fsum(each.value for each in known) / len(known),
            variance=total / len(known) ** 2 if complete else None,
            freedom=total**2 / math.fsum(v**2 / freedom for v, freedom in parts) if complete else 0,
            most=max(each.most for each in known),
            num_conversations=sum(each.num_conversations for each in known),
        )

    @property
    def interval(self) -> Interval | None:
        """The 95 % t interval; None without a spread."""
        if not self.variance:
            return None
        half = student_t(self.freedom) * math.sqrt(self.variance)
        return max(1.0, self.value - half), min(float(self.most), self.value + half)


@dataclass(frozen=True, kw_only=True)
class HeadPair:
    """One head against another on the requests of a data set that both have answered.

    The p of ``length`` are corrected by Holm's method over all data sets and pairs of a comparison; so are those of
    ``positions`` and those of ``categories``, each kind among itself.
    """

    data: str
    ours: str
    first: str  # the head that is named first
    requests: Sequence[Pair]
    length: PairedFigure | None  # None without a request that has steps of both
    positions: Sequence[PairedFigure]  # [K]
    categories: Mapping[str, PairedFigure]  # by category; empty where there is one

    def to_json(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "head": self.ours,
            "against": self.first,
            "num_requests": len(self.requests),
            "num_identical": num_identical(self.requests),
            "figures": [each.to_json() for each in (self.length, *self.positions) if each is not None],
            "categories": {name: each.to_json() for name, each in self.categories.items()},
        }


@dataclass(frozen=True, kw_only=True)
class Comparison(HeadRuns):
    """Heads on data sets; ``pairs`` has every two heads of every data set.

    ``lengths`` are by data set and head, then by category, where there are several; that of all is under None.
    """

    lengths: Mapping[tuple[str, str], Mapping[str | None, Length | None]]
    pairs: tuple[HeadPair, ...]
    speeds: Speeds

    def length(self, data: str, head: str, category: str | None = None) -> Length | None:
        """That of ``head`` on ``data``, if it has run there, and has steps."""
        return self.lengths.get((data, head), {}).get(category)

    def rounds(self, data: str) -> Rounds:
        """The rounds of speeds on ``data``; none of runs that were made one by one."""
        return self.speeds.get(data, Rounds())

    def pair(self, data: str, head: str, other: str) -> HeadPair | None:
        """The pair of ``head`` and ``other`` in either order, if both have run on ``data``."""
        both = {head, other}
        return next(
            (each for each in self.pairs if each.data == data and {each.ours, each.first} == both), None
        )

    def to_json(self) -> dict[str, Any]:
        """The content of ``comparison.json``."""
        return {
            "heads": {run.head: run.drafter for run in self.runs},
            "unlike_settings": {name: list(values) for name, values in self.unlike.items()},
            "runs": [_run(run, self.length(run.data, run.head)) for run in self.runs],
            "pairs": [pair.to_json() for pair in self.pairs],
            "speeds": {data: rounds.speeds() for data, rounds in self.speeds.items() if len(rounds)},
        }


def _run(run: HeadRun, length: Length | None) -> dict[str, Any]:
    positions = length.positions if length else ()
    return {
        "data": run.data,
        "head": run.head,
        "directory": str(run.directory),
        "length_over_all_steps": length and length.value,
        "length_over_all_steps_ci95": length and length.interval,
        "acceptance_over_all_steps": [each.rate for each in positions],
        "acceptance_over_all_steps_ci95": [each.share_interval() for each in positions],
        "report": run.report.to_json(),
    }


def is_significant(figure: PairedFigure | None) -> bool:
    return figure is not None and figure.p is not None and figure.p < _LEVEL


def compare_runs(runs: HeadRuns, speeds: Speeds) -> Comparison:
    """Pair the requests of every two heads, data set by data set."""
    answers = {(run.data, run.head): read_answers(run.directory) for run in runs.runs}
    found = [each for data in runs.data for each in _pairs(runs, data, answers)]
    figures = corrected_by_kind([requests for *_, requests in found])
    categories = corrected(  # of those that a table shows
        [list(_categories(requests)) if first == runs.heads[0] else [] for *_, first, requests in found]
    )
    return Comparison(
        runs=runs.runs,
        unlike=runs.unlike,
        lengths={(run.data, run.head): _lengths(run, answers[run.data, run.head]) for run in runs.runs},
        pairs=tuple(
            HeadPair(
                data=data,
                ours=ours,
                first=first,
                requests=requests,
                length=next(iter(of_pair), None),
                positions=of_pair[1:],
                categories={each.figure: each for each in by_category},
            )
            for (data, ours, first, requests), of_pair, by_category in zip(
                found, figures, categories, strict=True
            )
        ),
        speeds=speeds,
    )


def _lengths(run: HeadRun, answers: Answers) -> dict[str | None, Length | None]:
    """Of all requests, and of each category, in the order of the rows, where there are several."""
    groups: dict[str | None, list[Answer]] = {}
    for answer in answers.values():
        groups.setdefault(_category(answer), []).append(answer)
    most = run.report.num_spec_tokens
    by_category = {name: Length.of(group, most) for name, group in groups.items()}
    return {None: Length.of(answers.values(), most), **(by_category if len(groups) > 1 else {})}


def _category(answer: Answer) -> str:
    return "(none)" if answer.category is None else answer.category


def _pairs(
    runs: HeadRuns, data: str, answers: Mapping[tuple[str, str], Answers]
) -> Iterator[tuple[str, str, str, list[Pair]]]:
    for first, ours in combinations([head for head in runs.heads if (data, head) in answers], 2):
        yield data, ours, first, pair_up(answers[data, ours], answers[data, first])


def _categories(requests: Sequence[Pair]) -> Iterator[tuple[str, Any]]:
    """The lengths of each category, in the order of the rows; none where there is one."""
    groups: dict[str, list[Pair]] = {}
    for pair in with_steps(requests):
        groups.setdefault(_category(pair[0]), []).append(pair)
    for name, group in groups.items():
        if len(groups) > 1 and (found := paired_length(group)) is not None:
            yield name, found
