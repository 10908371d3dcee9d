"""The run directory: completions and events as they happen, reports and manifest at the end."""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specgen.config import require
from specgen.events import Event, read, to_line
from specgen.resume import read_rows, recover


def require_free(path: Path) -> None:
    """``ValueError`` if ``path`` already holds something: results are never overwritten."""
    require(not path.exists() or path.is_dir(), f"output {str(path)!r} is a file: name a directory")
    require(
        not path.exists() or not any(path.iterdir()),
        f"output {str(path)!r} is not empty: name a new directory, or remove it first",
    )


@contextmanager
def directory(output: Path | None) -> Iterator[Path]:
    """``output``, or for None a directory that is gone afterwards."""
    if output is not None:
        yield output
        return
    with tempfile.TemporaryDirectory(prefix="specgen-") as path:
        yield Path(path)


class RunDirectory:
    """Writes one run's files into ``path``, and goes on with what a killed run has left there."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        completions, events = path / "completions.jsonl", path / "events.jsonl"
        recover(completions, events)
        self._completions = completions.open("a", encoding="utf-8")
        self._events = events.open("a", encoding="utf-8")

    def add_event(self, event: Event) -> None:
        """Append to ``events.jsonl``."""
        self._events.write(to_line(event) + "\n")

    def add_completion(self, row: dict[str, Any]) -> None:
        """Append to ``completions.jsonl``; it is there, after its events, before the next one is taken."""
        self._events.flush()
        self._completions.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._completions.flush()

    def close(self, ids: Iterable[str] = ()) -> None:
        """Close both files and bring the completions into the order of ``ids``; others follow as they came."""
        self._events.close()
        self._completions.close()
        place = {request_id: index for index, request_id in enumerate(ids)}
        rows = sorted(self.completions(), key=lambda row: place.get(row["id"], len(place)))
        write_text(
            self.path / "completions.jsonl",
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        )

    def events(self) -> Iterator[Event]:
        """The events of a closed run."""
        return read(self.path / "events.jsonl")

    def completions(self) -> Iterator[dict[str, Any]]:
        """The rows of ``completions.jsonl``."""
        return read_rows(self.path / "completions.jsonl")


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text``, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
