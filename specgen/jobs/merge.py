"""The shards of a run, brought together into the directory that one process would have left."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from specgen.config import FormatName, require
from specgen.events import Merged, Sharded, to_line
from specgen.jobs.run_output import export, read_json, write_report
from specgen.jobs.shard import REQUESTS, WHOLE, Shard, parse_shard, read_requests
from specgen.report.report import load
from specgen.rundir.atomic import replacement, write_json
from specgen.rundir.provenance import FREE_IN_A_RUN, differences
from specgen.rundir.results import directory
from specgen.rundir.row_file import id_of
from specgen.rundir.status import figures

_NEEDED = ("completions.jsonl", "errors.jsonl", "events.jsonl", "status.json", REQUESTS)
_SHOWN = 5  # of the shards that are missing
_FREE = (*FREE_IN_A_RUN, "data.shard")


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The directory of a finished shard."""

    path: Path
    shard: Shard
    manifest: Mapping[str, Any]
    status: Mapping[str, Any]
    has_baseline: bool


def merge(output: Path, directories: Sequence[Path], format_name: FormatName) -> None:
    """Leave in ``output`` what one process would have left for the shards in ``directories``, in any order.

    Rows pass through one at a time. ``output`` is there whole or not at all, and in ``format_name`` too. ``UserError``
    where it exists already, and for shards that are not all of one run, or not finished.
    """
    require(not output.exists(), f"output {str(output)!r} exists: name a new directory, or remove it first")
    parts = _all_of_one_run([_open(path) for path in directories])
    with directory(output.with_name(f"{output.name}.partial"), "manifest.json") as path:
        write_json(path / "manifest.json", _manifest(parts))
        shutil.rmtree(path / "baseline", ignore_errors=True)  # of a merge that was killed
        _join(path, [part.path for part in parts], parts)
        baseline = path / "baseline" if parts[0].has_baseline else None
        if baseline is not None:
            _join(baseline, [part.path / "baseline" for part in parts], parts)
        report = write_report(path, baseline)
        write_json(path / "status.json", {**parts[0].status, **figures(report)})
        export(path, format_name)
        path.rename(output)


def _open(path: Path) -> _Part:
    report, manifest = load(path)
    shard = parse_shard(manifest.get("data", {}).get("shard", str(WHOLE)))
    require(
        shard.count > 1, f"{str(path)!r} is no shard but a whole run: give what `generate --shard` has left"
    )
    missing = [name for name in _NEEDED if not (path / name).exists()]
    require(not missing, f"{str(path)!r} has no {', '.join(missing)}: copy the directory as it was left")
    status = read_json(path / "status.json")
    require(
        status["state"] == "finished",
        f"the run in {str(path)!r} is {status['state']}: finish it with its `specgen generate` before merging",
    )
    return _Part(
        path=path,
        shard=shard,
        manifest=manifest,
        status=status,
        has_baseline=report["baseline"] is not None,
    )


def _all_of_one_run(parts: Sequence[_Part]) -> list[_Part]:
    """All shards of a run in their order."""
    first, by_index = parts[0], dict[int, _Part]()
    for part in parts:
        _require_same_run(first, part)
        twin = by_index.setdefault(part.shard.index, part)
        require(
            twin is part,
            f"{str(twin.path)!r} and {str(part.path)!r} are both shard {part.shard}: give it once",
        )
    missing = [
        str(Shard(index=i, count=first.shard.count)) for i in range(first.shard.count) if i not in by_index
    ]
    named = ", ".join(missing[:_SHOWN]) + (
        f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    )
    require(not missing, f"shard {named} is missing: give the directories of all {first.shard.count}")
    return [by_index[index] for index in sorted(by_index)]


def _require_same_run(first: _Part, part: _Part) -> None:
    other = differences(first.manifest, part.manifest, _FREE)
    if first.shard.count != part.shard.count:
        other.append(f"shards ({first.shard.count}, now {part.shard.count})")
    if first.has_baseline != part.has_baseline:
        other.append(f"baseline ({first.has_baseline}, now {part.has_baseline})")
    require(
        not other,
        f"{str(first.path)!r} and {str(part.path)!r} are no shards of one run: they differ in {', '.join(other)}",
    )


def _join(into: Path, sources: Sequence[Path], parts: Sequence[_Part]) -> None:
    """Bring the files of ``sources``, one of each part, together in ``into``."""
    into.mkdir(exist_ok=True)
    requests = [part.path / REQUESTS for part in parts]
    asked = sum(len(ids) for path in requests for ids in read_requests(path))
    given = 0
    for name in ("completions.jsonl", "errors.jsonl"):
        rows = [_by_row(source / name, ids) for source, ids in zip(sources, requests, strict=True)]
        with replacement(into / name) as file:
            for line in _in_turn(rows):
                given += 1
                file.write(line)
    require(
        given == asked,
        f"the shards have {given} rows for {asked} requests: a file of theirs was changed or cut",
    )
    with replacement(into / "events.jsonl") as file:
        for source, part in zip(sources, parts, strict=True):
            file.write(to_line(Sharded(time=0.0, shard=str(part.shard))).encode() + b"\n")
            with (source / "events.jsonl").open("rb") as events:
                shutil.copyfileobj(events, file)
        file.write(to_line(Merged(time=0.0)).encode() + b"\n")


def _by_row(path: Path, requests: Path) -> Iterator[list[bytes]]:
    """For every row of a shard's input the lines that ``path`` has of it."""
    with path.open("rb") as lines:
        line = lines.readline()
        for ids in read_requests(requests):
            found = []
            while line and id_of(line) in ids:
                found.append(line)
                line = lines.readline()
            yield found


def _in_turn(rows: Sequence[Iterator[list[bytes]]]) -> Iterator[bytes]:
    """The lines of the first row of each shard, then those of the second: the order that the input had."""
    for of_all in zip_longest(*rows, fillvalue=[]):
        for lines in of_all:
            yield from lines


def _manifest(parts: Sequence[_Part]) -> dict[str, Any]:
    manifest = parts[0].manifest
    settings = {name: text for name, text in manifest["settings"].items() if name != "shard"}
    settings["shards"] = f"{len(parts)}, each in a process of its own; the time is the slowest one's"
    return {**manifest, "data": {**manifest["data"], "shard": str(WHOLE)}, "settings": settings}
