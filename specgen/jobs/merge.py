"""Merging the shards of a run into the directory that one process would have written."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from specgen.config import FormatName, require
from specgen.config.json_fields import load_json
from specgen.jobs import score
from specgen.jobs.prompt_index import REQUESTS, read_requests
from specgen.jobs.run_output import FinishedRun, RunResult
from specgen.jobs.shards import WHOLE, Shard, parse_shard
from specgen.record.files import id_of, replacement, whole_lines, write_json
from specgen.record.provenance import FREE_IN_A_RUN, differences
from specgen.record.record_rows import require_present_version
from specgen.record.results import clear, directory
from specgen.report.report import Report, load, status_of

_NEEDED = ("completions.jsonl", "errors.jsonl", "passes.jsonl", "status.json", REQUESTS)
_REMEDY = "copy the directory as it was left"
_SHOWN = 5  # missing shards named in an error
_FREE = (*FREE_IN_A_RUN, "data.shard")


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """The directory of a finished shard of `specgen generate`, or of `specgen score`, which has no report."""

    path: Path
    shard: Shard
    manifest: Mapping[str, Any]
    report: Report | None = None

    @property
    def has_baseline(self) -> bool:
        return self.report is not None and self.report.baseline is not None


def merge(output: Path, directories: Sequence[Path], format_name: FormatName) -> RunResult:
    """Write to ``output`` what one process would have written for the shards in ``directories``, in any order.

    Returns what is to be printed. Rows are streamed. ``output`` appears atomically, in ``format_name`` too.
    ``UserError`` where it exists already, and unless the shards are all those of one run, finished.
    """
    runs = _all_of_one_run([_open(path) for path in directories])
    with _appearing(output, "manifest.json", _manifest(runs)) as path:
        _join(path, [run.path for run in runs], runs)
        baseline = path / "baseline" if runs[0].has_baseline else None
        if baseline is not None:
            _join(baseline, [run.path / "baseline" for run in runs], runs)
        merged = FinishedRun(path)
        busy = next((run.report.busy for run in runs if run.report and run.report.busy), "")
        report = merged.write_report(None if baseline is None else FinishedRun(baseline), busy_shard=busy)
        write_json(path / "status.json", {**status_of(runs[0].path), **report.status()})
        merged.export(format_name)
        return merged.result()


@contextmanager
def _appearing(output: Path, marker: str, manifest: Mapping[str, Any]) -> Iterator[Path]:
    """A directory with the ``manifest`` that becomes ``output`` at the end; an error leaves nothing of it.

    What a kill leaves is used by the next merge. ``UserError`` where ``output`` exists.
    """
    require(not output.exists(), f"output {str(output)!r} exists: name a new directory")
    with directory(output.with_name(f"{output.name}.partial"), marker) as path:
        write_json(path / marker, manifest)
        clear(path)
        try:
            yield path
        except BaseException:
            shutil.rmtree(path)
            raise
        path.rename(output)


def _open(path: Path) -> _Shard:
    status = status_of(path)
    done = f", {status['done']:,} of {status['total']:,} requests done" if status.get("total") else ""
    require(
        status.get("state", "finished") == "finished",
        f"the run in {str(path)!r} is not finished ({status.get('state')}{done}): run its `specgen generate` again, "
        "which resumes it, before merging",
    )
    report, manifest = load(path)
    shard = parse_shard(manifest.get("data", {}).get("shard", str(WHOLE)))
    require(
        shard.count > 1,
        f"{str(path)!r} is not a shard but a whole run: give directories of `generate --shard`",
    )
    require_present_version(path)
    missing = [name for name in _NEEDED if not (path / name).exists()]
    require(not missing, f"{str(path)!r} has no {', '.join(missing)}: {_REMEDY}")
    return _Shard(path=path, shard=shard, manifest=manifest, report=report)


def merge_scores(output: Path, directories: Sequence[Path]) -> int:
    """The same for the shards of `specgen score`; returns how many rows failed."""
    shards = _all_of_one_run([_open_scores(path) for path in directories])
    with _appearing(output, score.FILE, _manifest(shards)) as path:
        _join_rows(path, [each.path for each in shards], shards, (score.ROWS, score.ERRORS))
    return sum(1 for _ in whole_lines(output / score.ERRORS))


def _open_scores(path: Path) -> _Shard:
    found = [path / name for name in (score.FILE, score.ROWS, score.ERRORS, REQUESTS)]
    missing = [file.name for file in found if not file.exists()]
    require(
        not missing, f"{str(path)!r} has no {', '.join(missing)}: give finished shards of `score --shard`"
    )
    manifest = load_json(path / score.FILE, _REMEDY)
    return _Shard(path=path, shard=parse_shard(manifest["data"]["shard"]), manifest=manifest)


def _all_of_one_run(runs: Sequence[_Shard]) -> list[_Shard]:
    """``runs`` in the order of their shards, checked to be all those of one run."""
    first, by_index = runs[0], dict[int, _Shard]()
    for run in runs:
        _require_same_run(first, run)
        twin = by_index.setdefault(run.shard.index, run)
        require(
            twin is run, f"{str(twin.path)!r} and {str(run.path)!r} are both shard {run.shard}: give it once"
        )
    missing = [
        str(Shard(index=i, count=first.shard.count)) for i in range(first.shard.count) if i not in by_index
    ]
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    named = ", ".join(missing[:_SHOWN]) + more
    require(not missing, f"shard {named} is missing: give the directories of all {first.shard.count}")
    return [by_index[index] for index in sorted(by_index)]


def _require_same_run(first: _Shard, run: _Shard) -> None:
    other = differences(first.manifest, run.manifest, _FREE)
    if first.shard.count != run.shard.count:
        other.append(f"shards {first.shard.count} -> {run.shard.count}")
    if first.has_baseline != run.has_baseline:
        other.append(f"--baseline {first.has_baseline} -> {run.has_baseline}")
    require(
        not other,
        f"{str(first.path)!r} and {str(run.path)!r} are not shards of one run: they differ in {', '.join(other)}",
    )


def _join(into: Path, sources: Sequence[Path], runs: Sequence[_Shard]) -> None:
    """Merge the files of ``sources``, one per shard, in ``into``."""
    into.mkdir(exist_ok=True)
    _join_rows(into, sources, runs, ("completions.jsonl", "errors.jsonl"))
    with replacement(into / "passes.jsonl") as file:
        for source in sources:
            with (source / "passes.jsonl").open("rb") as passes:
                shutil.copyfileobj(passes, file)
                passes.seek(max(0, passes.tell() - 1))
                require(passes.read() in (b"", b"\n"), f"{passes.name} ends within a row: {_REMEDY}")


def _join_rows(into: Path, sources: Sequence[Path], runs: Sequence[_Shard], names: tuple[str, str]) -> None:
    """Merge the rows of the files ``names``, one of which has an answer to each request."""
    requests = [run.path / REQUESTS for run in runs]
    num_requests, num_rows = sum(len(ids) for path in requests for ids in read_requests(path)), 0
    for name in names:
        rows = [_lines_by_row(source / name, ids) for source, ids in zip(sources, requests, strict=True)]
        with replacement(into / name) as file:
            # of the first row of each shard, then of the second, ...: the order of the input
            for line in chain.from_iterable(chain.from_iterable(zip_longest(*rows, fillvalue=[]))):
                num_rows += 1
                file.write(line)
    require(
        num_rows == num_requests,
        f"the shards have {num_rows} rows for {num_requests} requests: one of them is not finished, or was changed",
    )


def _lines_by_row(path: Path, requests: Path) -> Iterator[list[bytes]]:
    """Per row of a shard's input, the lines of ``path`` that are of its requests."""
    lines = ((id_of(line), line + b"\n") for _, line in whole_lines(path))
    name, line = next(lines, ("", b""))
    for ids in read_requests(requests):
        found = []
        while line and name in ids:
            found.append(line)
            name, line = next(lines, ("", b""))
        yield found
    require(not line, f"{path} has a row of {name!r}, which is not the next of {requests.name}: {_REMEDY}")


def _manifest(runs: Sequence[_Shard]) -> dict[str, Any]:
    """That of the whole; scores have no settings."""
    found = {**runs[0].manifest, "data": {**runs[0].manifest["data"], "shard": str(WHOLE)}}
    if "settings" in found:
        settings = {name: text for name, text in found["settings"].items() if name != "shard"}
        settings["shards"] = f"{len(runs)}, each in its own process; the time is the slowest one's"
        found["settings"] = settings
    return found
