"""The figures of a comparison: lengths by data set and head, paired differences of every two heads, speeds."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, count
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specgen.config import require
from specgen.config.json_fields import load_json
from specgen.experiments.rounds import PLAIN, Rounds, Speeds, rounds_by_data
from specgen.record.columns import Run
from specgen.record.files import Rows
from specgen.report.acceptance import Acceptance, figures, mean_length
from specgen.report.display import from_here
from specgen.report.folder import COMPARISON
from specgen.report.intervals import LEVEL, Estimate
from specgen.report.origin import unlike_settings
from specgen.report.paired_requests import Pair, PairedFigure, SharedRequests, compared, corrected, pair_up
from specgen.report.references import Reference, RunComparison, compare_run, without_suffix
from specgen.report.report import Report, load_so_far, requests_of

PLAN = COMPARISON  # its runs, and when and how it was made
ROUNDS = "compare.rounds.jsonl"
_HEADS_OWN = ("engine.drafter", "fingerprints.drafter")
_DECISIVE = (  # for acceptance; the others, such as the batch, the device or a version, are named
    "engine.model",
    "engine.num_spec_tokens",
    "engine.spec_length",
    "engine.draft_sampling",
    "engine.verification",
    "engine.dtype",
    "engine.kv_dtype",
    "engine.chat_template_kwargs.",
    "sampling.",
    "fingerprints.model",
)
_OF_DATA = ("data.num_prompts", "data.sha256", "data.shard")  # of which prompts a run is
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

    @cached_property
    def rows(self) -> Run:
        return requests_of(self.directory, self.report)

    @cached_property
    def acceptance(self) -> Mapping[str | None, Acceptance]:
        """That of all requests under None, and of each category in the order of the rows, if several."""
        groups = figures(self.rows, "category")
        found: dict[str | None, Acceptance] = {None: Acceptance(self.rows)}
        return found | dict(groups if len(groups) > 1 else {})

    @property
    def positions(self) -> list[Estimate]:
        """[K]: accepted drafts by position, per step with drafts or without."""
        return self.acceptance[None].positions_over_all_steps

    @property
    def drafter(self) -> str:
        """The head's checkpoint, or ``ngram:N``."""
        return str(self.manifest["engine"]["drafter"])


def is_comparison(directory: Path) -> bool:
    """Whether ``directory`` is that of a comparison."""
    return (directory / PLAN).exists()


def _read(directory: Path) -> tuple[Report, Mapping[str, Any]]:
    report, manifest = load_so_far(directory)
    engine = manifest["engine"]
    no_rows = "has no completions.jsonl, of which a comparison is made: generate into a new directory"
    no_drafts = "is plain decoding, which has no acceptance to compare: give runs with a drafter"
    own_k = "chose K at every step (num-spec-tokens auto), so its length cannot be compared: generate with a fixed K"
    for is_fit, why in (
        (report.state is None, report.unfinished),
        ((directory / "completions.jsonl").is_file(), no_rows),
        ("dataset" in manifest["data"], "holds no run of `specgen generate`: give such runs"),
        (engine["num_spec_tokens"] != 0, no_drafts),
        (engine.get("spec_length", "fixed") == "fixed", own_k),
    ):
        require(is_fit, f"{directory}: {why}")
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
        _refuse_unlike(
            [run.directory for run in alike], {name: unlike[name] for name in _OF_DATA if name in unlike}
        )
        seen: dict[str, HeadRun] = {}
        for run in alike:
            other = seen.setdefault(run.head, run)
            require(
                other is run,
                f"{other.directory} and {run.directory} are both of {from_here(run.drafter)} on {data}: leave one out",
            )


def _refuse_unlike(directories: Sequence[Path], unlike: Mapping[str, Sequence[Any]]) -> None:
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


@dataclass(frozen=True, kw_only=True)
class HeadPair(SharedRequests):
    """One head against another on the requests of a data set that both have answered.

    The p of the lengths are corrected by Holm's method over all data sets and pairs of a comparison; so are those of
    positions and those of ``categories``, each kind among itself.
    """

    data: str
    ours: str
    first: str  # the head that is named first
    categories: Mapping[str, PairedFigure]  # by category; empty where there is one

    def to_json(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "head": self.ours,
            "against": self.first,
            **super().to_json(),
            "categories": {name: each.to_json() for name, each in self.categories.items()},
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs that differ in data set and head alone, and what sets them apart.

    ``unlike`` has the other settings in which they differ, by field; ``pairs`` every two heads of every data set.
    """

    runs: tuple[HeadRun, ...]
    unlike: Mapping[str, tuple[Any, ...]]
    pairs: tuple[HeadPair, ...] = ()
    speeds: Speeds = field(default_factory=dict)

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads in the order of the runs."""
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

    def of(self, data: str | None, head: str, category: str | None = None) -> Acceptance | None:
        """The acceptance of ``head`` on ``data``, if it has run there."""
        runs = (run for run in self.runs if (run.data, run.head) == (data, head))
        return next((run.acceptance.get(category) for run in runs), None)

    def length(self, data: str | None, head: str, category: str | None = None) -> Estimate | None:
        """The length over all steps of ``head`` on ``data``, if it has steps there; of None the mean of all."""
        if data is None:
            return mean_length([self.of(each, head) for each in self.data])
        found = self.of(data, head, category)
        return None if found is None else found.length_over_all_steps

    def rounds(self, data: str) -> Rounds:
        """The rounds of speeds on ``data``; none of runs that were made one by one."""
        return self.speeds.get(data, Rounds())

    def pair(self, data: str, head: str, other: str) -> HeadPair | None:
        """The pair of ``head`` and ``other`` in either order, if both have run on ``data``."""
        both = {head, other}
        return next(
            (each for each in self.pairs if each.data == data and {each.ours, each.first} == both), None
        )

    def paired(self, data: str | None, head: str, category: str | None = None) -> Sequence[PairedFigure]:
        """The length of ``head`` less that of the first head, and unless of a ``category`` its positions behind."""
        pair = self.pair(data or "", head, self.heads[0])
        if pair is None or pair.ours != head:
            return []
        length = pair.length if category is None else pair.categories.get(category)
        return [] if length is None else [length, *(pair.positions if category is None else ())]

    def to_json(self) -> dict[str, Any]:
        """The content of ``comparison.json``."""
        return {
            "heads": {run.head: run.drafter for run in self.runs},
            "unlike_settings": {name: list(values) for name, values in self.unlike.items()},
            "runs": [self._run(run) for run in self.runs],
            "pairs": [pair.to_json() for pair in self.pairs],
            "speeds": {data: rounds.speeds() for data, rounds in self.speeds.items() if len(rounds)},
        }

    def _run(self, run: HeadRun) -> dict[str, Any]:
        length, positions = run.acceptance[None].length_over_all_steps, run.positions
        return {
            "data": run.data,
            "head": run.head,
            "directory": str(run.directory),
            "length_over_all_steps": length and length.value,
            "length_over_all_steps_ci95": length and length.interval,
            "acceptance_over_all_steps": [each.value for each in positions],
            "acceptance_over_all_steps_ci95": [each.interval for each in positions],
            "report": run.report.to_json(),
        }


def is_significant(figure: PairedFigure | None) -> bool:
    """By its p after Holm's correction."""
    return figure is not None and figure.p is not None and figure.p < LEVEL


def compare_runs(directories: Sequence[Path], speeds: Speeds = MappingProxyType({})) -> Comparison:
    """The comparison of the runs in ``directories``; ``UserError`` names what keeps them from being compared."""
    read = [(directory, *_read(directory)) for directory in directories]
    manifests = [manifest for _, _, manifest in read]
    unlike = unlike_settings(manifests)
    _refuse_unlike(directories, {name: found for name, found in unlike.items() if name.startswith(_DECISIVE)})
    heads, sources = _heads(manifests), _sources(manifests)
    sets = short_names(sources)
    runs = tuple(
        HeadRun(directory=directory, head=head, data=sets[source], report=report, manifest=manifest)
        for (directory, report, manifest), head, source in zip(read, heads, sources, strict=True)
    )
    _check_data(runs)
    found = Comparison(
        runs=runs,
        unlike={
            name: each
            for name, each in unlike.items()
            if name not in _HEADS_OWN and not name.startswith(("data.", *_DECISIVE))
        },
        speeds=speeds,
    )
    return replace(found, pairs=tuple(_pairs(found)))


def read_comparison(directories: Sequence[Path]) -> Comparison:
    """The comparison of finished runs, and the speeds of a comparison's directory if it is alone."""
    runs, speeds = list[Path](), dict[str, Rounds]()
    for directory in directories:
        if not is_comparison(directory):
            runs.append(directory)
            continue
        plan = load_json(directory / PLAN, "compare again")
        own = [directory / each for each in plan["runs"]]
        begun = [run for run in own if (run / "manifest.json").exists()]
        require(
            len(begun) == len(own),
            f"{directory} holds a comparison that is not finished ({len(begun)} of {len(own)} runs begun): "
            "the same command resumes it",
        )
        runs += own
        if len(directories) == 1:
            speeds |= rounds_by_data(Rows(directory / ROUNDS).values(), plan["under"])
    return compare_runs(runs, speeds)


def published(runs: Comparison, reference: Reference) -> list[RunComparison]:
    """Every run beside the figures of ``reference``; ``UserError`` where nothing was measured as one of them was."""
    return [
        compare_run(run.directory, run.report, run.manifest, reference, {"data": run.data, "head": run.head})
        for run in runs.in_order()
    ]


def _pairs(found: Comparison) -> Iterator[HeadPair]:
    """Every two heads of each data set."""
    both = [
        (ours, first, pair_up(ours.rows, first.rows))
        for data in found.data
        for first, ours in combinations([run for run in found.in_order() if run.data == data], 2)
    ]
    categories = corrected(  # of those that a table shows
        [_categories(pair) if first.head == found.heads[0] else [] for _, first, pair in both]
    )
    for (ours, first, _), shared, each in zip(
        both, compared([pair for *_, pair in both]), categories, strict=True
    ):
        by_category = {figure.figure: figure for figure in each}
        yield HeadPair(
            data=ours.data, ours=ours.head, first=first.head, categories=by_category, **vars(shared)
        )


def _categories(pair: Pair) -> list[PairedFigure]:
    """The lengths of each category, in the order of the rows; none where there is one."""
    groups = pair.with_steps().by_category()
    return [group.length(name) for name, group in groups.items()] if len(groups) > 1 else []
