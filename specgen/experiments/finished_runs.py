"""Finished runs of heads, read from their directories; runs that cannot be compared are refused."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePath
from typing import Any

from specgen.config import require
from specgen.config.json_fields import load_json
from specgen.experiments.rounds import PLAIN, Speeds
from specgen.report.display import from_here
from specgen.report.origin import unlike_settings
from specgen.report.other_directories import COMPARISON
from specgen.report.unfinished import load_so_far, unfinished
from specgen.rundir.row_file import Rows

PLAN = COMPARISON  # its runs, and when and how it was made
ROUNDS, _EARLIER_ROUNDS = "compare.rounds.jsonl", "speed.jsonl"
_HEADS_OWN = ("engine.drafter", "fingerprints.drafter")
_DECISIVE = (  # for acceptance; the others, such as the batch, the device or a version, are named
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
_OF_DATA = ("data.num_prompts", "data.sha256", "data.shard")
_DIGEST = 6  # characters that are shown of one
_REMEDY = "generate them alike, or set them side by side with `specgen report`"


@dataclass(frozen=True, kw_only=True)
class HeadRun:
    """One finished run: of which head, on which data set."""

    directory: Path
    head: str  # short name
    data: str  # short name
    report: Mapping[str, Any]
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

    def of(self, data: str, head: str) -> HeadRun | None:
        """The run of ``head`` on ``data``, if there is one."""
        return next((run for run in self.runs if (run.data, run.head) == (data, head)), None)


def read_runs(directories: Sequence[Path]) -> HeadRuns:
    """The runs in ``directories``; ``UserError`` names what keeps them from being compared."""
    read = [(directory, *_read(directory)) for directory in directories]
    manifests = [manifest for _, _, manifest in read]
    unlike = unlike_settings(manifests)
    _refuse(directories, {name: found for name, found in unlike.items() if name.startswith(_DECISIVE)})
    heads = _heads(manifests)
    sets = short_names(manifest["data"]["dataset"] for manifest in manifests)
    runs = tuple(
        HeadRun(
            directory=directory,
            head=head,
            data=sets[manifest["data"]["dataset"]],
            report=report,
            manifest=manifest,
        )
        for (directory, report, manifest), head in zip(read, heads, strict=True)
    )
    _check_data(runs)
    named = {
        name: each
        for name, each in unlike.items()
        if name not in _HEADS_OWN and not name.startswith(("data.", *_DECISIVE))
    }
    return HeadRuns(runs=runs, unlike=named)


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
        return Speeds()
    require(
        (directory / ROUNDS).exists() or not (directory / _EARLIER_ROUNDS).exists(),
        f"{directory} holds speeds of an earlier version ({_EARLIER_ROUNDS}): run its command again, which "
        "measures them anew, or give its run directories",
    )
    under = load_json(directory / PLAN, "compare again")["under"]
    return Speeds.of(Rows(directory / ROUNDS).values(), under)


def _read(directory: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    report, manifest = load_so_far(directory)
    require("state" not in report, f"{directory}: {unfinished(report)}")
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
        manifest["engine"].get("spec_length") != "auto",
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


def _check_data(runs: Sequence[HeadRun]) -> None:
    """Every head at most once on every data set, with the same prompts."""
    for data in dict.fromkeys(run.data for run in runs):
        alike = [run for run in runs if run.data == data]
        unlike = unlike_settings([run.manifest for run in alike])
        _refuse([run.directory for run in alike], {name: unlike[name] for name in _OF_DATA if name in unlike})
        seen: dict[str, HeadRun] = {}
        for run in alike:
            other = seen.setdefault(run.head, run)
            require(
                other is run,
                f"{other.directory} and {run.directory} are both of {from_here(run.drafter)} on {data}: leave one out",
            )


def _refuse(directories: Sequence[Path], unlike: Mapping[str, Sequence[Any]]) -> None:
    """``UserError`` with the value of ``directories``' first two that differ, for every field."""
    differing = []
    for name, values in unlike.items():
        at = next(at for at, value in enumerate(values) if value != values[0])
        differing.append(f"{name} ({values[0]} in {directories[0]}, {values[at]} in {directories[at]})")
    require(
        not differing, f"the runs cannot be compared, as they differ in {', '.join(differing)}: {_REMEDY}"
    )


_FILES = (".json", ".jsonl", ".csv", ".txt", ".parquet")  # a head's name may have another dot


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
    bare = path.removesuffix(".gz")
    parts = (PurePath(bare).with_suffix("") if bare.endswith(_FILES) else PurePath(bare)).parts
    for length in range(1, len(parts) + 1):
        yield "/".join(parts[-length:])
    yield path
    for number in count(2):
        yield f"{path} ({number})"


def as_directory(name: str) -> str:
    """``name`` as the name of one directory."""
    flat = name.replace("/", "--").replace(":", "-")
    return f"_{flat.lstrip('.')}" if flat.startswith(".") else flat
