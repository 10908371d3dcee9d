"""The run directory: completions, errors and passes, each request flushed before it is counted."""

import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Self

from specgen.config import UserError, require
from specgen.config.json_fields import load_json
from specgen.record.files import RowFile, cut_torn_line, naming, open_output, sync, writable, write_json
from specgen.record.provenance import differences
from specgen.record.record_rows import (
    WHOLE,
    EngineRow,
    PassRow,
    RequestRow,
    Row,
    Session,
    read_passes,
    require_present_version,
    to_line,
)

LOCK = ".lock"
_SESSION = b'{"row":"session"'
_SYNC_INTERVAL = 1.0  # seconds of work that a power loss may cost
_KEPT = "what is done is kept; fix that and run the same command again"
_NO_RIGHT = "give the right to write there, or name another directory"
_NO_ROOM = "name a directory elsewhere with --output, or in TMPDIR"
_BEFORE_MANIFEST = {
    name + end for name in (LOCK, "manifest.json", "status.json") for end in ("", ".partial")
} - {"manifest.json"}

_RUN_FILES = (  # what ``specgen generate`` writes, but for its manifest and what may be there before that
    *("completions.jsonl", "errors.jsonl", "passes.jsonl", "lost.jsonl", "requests.jsonl", "config.yaml"),
    *("report.json", "report.html", "batch_output.jsonl", "batch_errors.jsonl", "completions.parquet"),
)


@contextmanager
def directory(output: Path | None, marker: str) -> Iterator[Path]:
    """``output``, created and locked, or for None a temporary directory.

    ``UserError`` where it is not empty and lacks the file ``marker``, where another process holds the lock, and for
    any error of the file system in it meanwhile. What is there and may not be written is yielded to be read. A mistake
    of the user's before there is a ``marker`` leaves no new directory behind.
    """
    if output is None:
        with tempfile.TemporaryDirectory(prefix="specgen-") as path, writable(Path(path), _NO_ROOM):
            yield Path(path)
        return
    output = output.absolute()  # else an error naming a program, say, might seem to be in it
    with writable(output, _NO_RIGHT):
        if (output / marker).exists() and not os.access(output, os.W_OK):
            yield output  # a finished run can be read
            return
    with ExitStack() as held:
        with writable(output, _NO_RIGHT):
            _require_ours(output, marker)
            is_new = not output.exists()
            held.enter_context(locked(output))
        with writable(output, _KEPT):
            try:
                yield output
            except UserError:
                if is_new and not (output / marker).exists():
                    _remove(output)
                raise


def _remove(path: Path) -> None:
    """Remove a directory in which nothing was begun."""
    for name in _BEFORE_MANIFEST:
        (path / name).unlink(missing_ok=True)
    with suppress(OSError):  # of what else is there it is no business
        path.rmdir()


def rename_aside(path: Path, marker: str) -> None:
    """Rename ``path``, if a run is there, to the first free of ``path.1``, ``path.2``, ...; see ``directory``."""
    if not path.exists():
        return
    with directory(path, marker):
        if not (path / marker).exists():
            return
        number = 1
        while (free := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        path.rename(free)


def require_same(path: Path, asked: Mapping[str, Any], *, free: Container[str], remedy: str) -> None:
    """Write ``asked`` to ``path``; ``UserError`` where an earlier run's differs in fields other than ``free``."""
    if not path.exists():
        write_json(path, asked)
        return
    earlier = load_json(path, remedy)
    other = differences(earlier, asked, free)
    require(
        not other, f"output {str(path.parent)!r} holds a run that differs in {', '.join(other)}: {remedy}"
    )


def replace_unstarted(path: Path, asked: Mapping[str, Any], free: Container[str]) -> None:
    """Put a run with the manifest ``asked`` in the place of one of other settings in ``path`` that answered nothing.

    The manifest is replaced last: a kill meanwhile leaves such a run again.
    """
    manifest = path / "manifest.json"
    if manifest.exists() and not _has_answers(path):
        earlier = load_json(manifest, "remove the directory, or name another")
        if differences(earlier, asked, free):
            clear(path)
            write_json(manifest, asked)


@contextmanager
def rollback_if_unstarted(path: Path) -> Iterator[None]:
    """A mistake of the user's before the first answer leaves no run in ``path`` that was not there."""
    is_new = not (path / "manifest.json").exists()
    try:
        yield
    except UserError:
        if is_new and not _has_answers(path):
            clear(path)
            (path / "manifest.json").unlink(missing_ok=True)
        raise


def _has_answers(path: Path) -> bool:
    """Whether the run in ``path`` has answered a request."""
    completions = path / "completions.jsonl"
    if not completions.exists():
        return False
    with completions.open("rb") as rows:
        return rows.readline().endswith(b"\n")


def clear(path: Path) -> None:
    """Remove what a run wrote in ``path``, but for its manifest, and nothing else."""
    for name in _RUN_FILES:
        (path / name).unlink(missing_ok=True)
    if (path / "baseline").is_dir():
        clear(path / "baseline")
        with suppress(OSError):
            (path / "baseline").rmdir()


def _require_ours(path: Path, marker: str) -> None:
    require(not path.exists() or path.is_dir(), f"output {str(path)!r} is a file: name a directory")
    held = {inner.name for inner in path.iterdir()} if path.exists() else set()
    require(
        marker in held or held <= _BEFORE_MANIFEST | {f"{marker}.partial"},
        f"output {str(path)!r} is not empty and holds no run: name a new or an empty directory",
    )


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Create ``directory`` if needed and lock it; ``UserError`` names the process that holds the lock.

    It is the kernel's lock on a file that stays, released when the process ends, however that happens.
    """
    with naming(directory):
        file = _hold(directory)
    with file:
        with naming(directory):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"{os.getpid()} {socket.gethostname()}".encode())
        yield


def _hold(directory: Path) -> IO[str]:
    left = 3  # tries: ``is_gone`` of another process holds it for a moment
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / LOCK).open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(directory / LOCK)):
                return file
        except FileNotFoundError:
            pass  # the directory was moved meanwhile, with the file just locked
        except BlockingIOError as error:
            left -= 1
            if not left:
                raise UserError(
                    f"output {str(directory)!r} is in use by {_holder(file)}: wait for it, or name another directory"
                ) from error
            time.sleep(0.05)
        file.close()


def _holder(file: IO[str]) -> str:
    file.seek(0)
    pid, _, host = file.read().partition(" ")
    return f"process {pid} on {host}" if host else "another process"


def is_gone(pid: object, host: object, directory: Path) -> bool:
    """Whether the process ``pid`` that worked in ``directory`` on ``host`` has ended; of another host nobody knows.

    The lock tells: a container has numbers of its own, numbers are used again, and a process that was killed keeps its
    number until its parent asks for it. Only without a lock, as in a copy, does the number.
    """
    if host != socket.gethostname() or not isinstance(pid, int):
        return False
    try:
        with (directory / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    except FileNotFoundError:
        pass
    except OSError:  # it is held
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's, or no number of a process
        pass
    return False


class RunDirectory:
    """The files of a run in ``path``. Those of an earlier run are resumed, but for its errors, which are removed."""

    def __init__(self, path: Path, *, shard: str = WHOLE, with_steps: bool = True) -> None:
        require_present_version(path)
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.completions = RowFile(path / "completions.jsonl")
        (path / "errors.jsonl").unlink(missing_ok=True)  # a new file: who follows the old one sees that
        self.errors = RowFile(path / "errors.jsonl")
        passes = path / "passes.jsonl"
        passes.touch()
        cut_torn_line(passes)
        with passes.open("rb") as lines:
            number = sum(line.startswith(_SESSION) for line in lines)
        last = self.completions.last() or {}
        if "record" in last and "token_ids" in last:  # of a session that ``passes`` may have lost
            number = max(number, 1 + int(RequestRow.of_row(last).session.rpartition("-")[2]))
        self._passes = open_output(passes, "a")
        self._session = f"{shard}-{number}"
        self._in_session = False
        self._with_steps = with_steps
        self._synced = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with closing(self.errors), closing(self.completions), self._passes:  # all, whichever fails
            self._sync()

    def record(self, row: EngineRow) -> None:
        """Record what an engine hands out, behind a row for this process before the first."""
        self._begin(row.time - row.seconds if isinstance(row, PassRow) else row.time)
        self._write(row)

    def _begin(self, time: float) -> None:
        if not self._in_session:
            self._in_session = True
            self._write(Session(name=self._session, time=time, machine=socket.gethostname()))

    def _write(self, row: Row) -> None:
        self._passes.write(to_line(row).encode() + b"\n")

    def add_completion(self, row: Mapping[str, Any], record: RequestRow | None = None) -> None:
        """Append to ``completions.jsonl``, with the request's record; passes are flushed first, then the row."""
        if record is not None:
            self._begin(record.arrival)
            record = replace(record, session=self._session)
            row = {**row, "record": record.to_json(with_steps=self._with_steps)}
        self._passes.flush()
        self.completions.add(row)
        if time.monotonic() - self._synced >= _SYNC_INTERVAL:
            self._sync()

    def arrange(self, ids: Iterable[str]) -> None:
        """Bring the rows of a closed run into the order of ``ids``."""
        self.completions.arrange(ids)
        self.errors.arrange(ids)

    def passes(self) -> Iterator[Row]:
        """The passes of a closed run."""
        return read_passes(self.path / "passes.jsonl")

    @property
    def texts(self) -> Mapping[str, str]:
        """The text of each completion by id, read on access."""
        return _Texts(self.completions)

    def _sync(self) -> None:
        sync(self._passes)
        self.completions.sync()
        self._synced = time.monotonic()


class _Texts(Mapping[str, str]):
    def __init__(self, rows: RowFile) -> None:
        self._rows = rows

    def __contains__(self, row_id: object) -> bool:  # without reading the row
        return row_id in self._rows

    def __getitem__(self, row_id: str) -> str:
        return str(self._rows[row_id]["text"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
