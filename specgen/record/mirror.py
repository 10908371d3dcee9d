"""A run directory in an object store, which cannot append: numbered parts and a manifest, at the end its files."""

import hashlib
import json
import logging
import mmap
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path, PurePosixPath
from threading import Event, Thread
from typing import Self

from specgen.config import UserError, first_line, require
from specgen.config.urls import Url
from specgen.record.files import as_json, replacement, write_text
from specgen.record.provenance import timestamp
from specgen.record.results import locked
from specgen.storage import Store, cache_directory, file_digest

MANIFEST = "parts.json"  # whose replacement is what commits
_PARTS = "parts"  # the directory of parts
_INTERVAL = 30.0  # seconds of work that the loss of this machine may cost
_MOST = 16 << 20  # bytes that wait, and of a part
_POLL = 0.5  # seconds
_AT_ONCE = 8  # requests
_STATUS = "status.json"  # for others to look at: it is written over, and no resume needs it
# What a resume needs. Passes are last, so that those of every completion are there.
_FILES = (
    *("manifest.json", "config.yaml", "requests.jsonl", "lost.jsonl", "errors.jsonl", "completions.jsonl"),
    *("baseline/lost.jsonl", "baseline/errors.jsonl", "baseline/completions.jsonl"),
    *("passes.jsonl", "baseline/passes.jsonl"),
)
_EXPORTS = {"batch_output.jsonl", "completions.parquet"}  # made of completions at the end of a run
_RESTART = "restore it, or start over with --restart, which keeps what is left"


@dataclass(frozen=True, kw_only=True)
class Part:
    """An object with the next bytes of a file, or with all of it."""

    object: str  # its name below the URL
    size: int
    sha256: str

    @classmethod
    def of(cls, name: str, content: bytes) -> Self:
        return cls(object=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())

    def holds(self, content: bytes) -> bool:
        return self == Part.of(self.object, content)


@dataclass(frozen=True, kw_only=True)
class _Manifest:
    """The parts of each file, in order. Of a run that has finished every file is one object of its own name."""

    session: str = ""  # of the process that wrote it
    is_finished: bool = False
    files: Mapping[str, Sequence[Part]] = field(default_factory=dict)
    writer: str = ""

    @classmethod
    def of(cls, content: bytes, url: Url) -> Self:
        """``UserError`` for what is no manifest."""
        try:
            found = json.loads(content)
            require(found.pop("sha256", None) in (None, _digest(found)), "it has lost or gained something")
            files = {
                str(name): tuple(Part(**part) for part in parts) for name, parts in found["files"].items()
            }
            objects = [part.object for parts in files.values() for part in parts]
            require(all(each and "\0" not in each for each in (*files, *objects)), "a name is none")
            safe = all(not PurePosixPath(name).is_absolute() and ".." not in name for name in files)
            require(safe, "a file is outside of the directory")
            state = ("unfinished", "finished").index(found["state"])
            require(not state or all(len(parts) == 1 for parts in files.values()), "a file is not one object")
            return cls(
                session=str(found["session"]),
                is_finished=bool(state),
                files=files,
                writer=f"process {found['pid']} on {found['host']}",
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{url / MANIFEST} is not as it was written ({first_line(error)}): {_RESTART}"
            ) from error

    def to_bytes(self) -> bytes:
        found = {
            "state": "finished" if self.is_finished else "unfinished",
            "session": self.session,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "updated": timestamp(),
            "files": {name: [asdict(part) for part in parts] for name, parts in self.files.items()},
        }
        return as_json(found | {"sha256": _digest(found)}).encode()


def _digest(manifest: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class _Followed:
    """A file that grows, as far as it is published."""

    def __init__(self, path: Path, known: Sequence[Part] = ()) -> None:
        """``known`` are in the store: as many as the file begins with count."""
        self.file = path.open("rb")
        self.parts: list[Part] = []
        self.size = 0
        for part in known:
            if not part.object.startswith(f"{_PARTS}/") or not part.holds(self.file.read(part.size)):
                break
            self.add(part)

    def add(self, part: Part) -> None:
        self.parts.append(part)
        self.size += part.size

    def is_still(self, path: Path) -> bool:
        """Whether ``path`` is this file, only longer: what was replaced or cut is another one."""
        try:
            now = path.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(now, os.fstat(self.file.fileno())) and now.st_size >= self.size

    def waiting(self) -> int:
        """Bytes that are not published."""
        return os.fstat(self.file.fileno()).st_size - self.size

    def pieces(self) -> Iterator[bytes]:
        """The whole lines that are not published; each is to be added before the next."""
        if not self.waiting():
            return
        with mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n", self.size) + 1
        while self.size < end:
            self.file.seek(self.size)
            yield self.file.read(min(_MOST, end - self.size))


class Mirror:
    """The run directory ``path`` and what is published of it, by a thread from ``claim`` on.

    An error of the thread ends the run: ``has_failed`` tells. Another process that has published since is one.
    """

    def __init__(self, store: Store, directory: Path, content: bytes | None) -> None:
        self.path = directory / "run"
        self._kept = directory / "session"  # which wrote the store last, of those that have worked here
        self._store, self._seen = store, content
        self._earlier = _Manifest() if content is None else _Manifest.of(content, store.url)
        self._session = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}"
        self._numbers = count(1)
        self._followed: dict[str, _Followed] = {}
        self._error: BaseException | None = None
        self._is_ours = False
        self._stop = Event()
        self._thread = Thread(target=self._work, name="mirror", daemon=True)

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def prepare(self) -> None:
        """Bring the directory to the state of the store, unless it is that, or what came of it here."""
        if self._is_ahead():
            return
        shutil.rmtree(self.path, ignore_errors=True)
        if self._seen is None:
            others = sorted({*self._store.top()} - {_PARTS})
            require(
                not others,
                f"output {self._store.url} is not empty and holds no run (it has {', '.join(others[:1])}): name "
                "another URL, or remove it first",
            )
        else:
            fetch(self._store, self._earlier, self.path)
            if self.path.exists():
                for name in {*self._store.top()} & _EXPORTS - {*self._earlier.files}:
                    (self.path / name).touch()  # of an earlier end: this run's end makes it anew

    def _is_ahead(self) -> bool:
        """Whether all that is published came from here, and is still here."""
        if not self._kept.exists() or self._kept.read_text() != self._earlier.session:
            return False
        sizes = {name: sum(part.size for part in parts) for name, parts in self._earlier.files.items()}
        return all(
            (self.path / name).exists() and (self.path / name).stat().st_size >= size
            for name, size in sizes.items()
            if PurePosixPath(name).name in ("manifest.json", "completions.jsonl", "passes.jsonl")
        )

    def claim(self) -> None:
        """Publish what is in the directory under this session, and from now on what comes. ``UserError`` if in use."""
        self._followed = {
            name: _Followed(self.path / name, parts)
            for name, parts in self._earlier.files.items()
            if name in _FILES and (self.path / name).exists()
        }
        self._publish()
        write_text(self._kept, self._session)
        self._is_ours = True
        self._thread.start()

    def _work(self) -> None:
        due = time.monotonic() + _INTERVAL
        try:
            while not self._stop.wait(_POLL):
                if (
                    time.monotonic() >= due
                    or sum(each.waiting() for each in self._followed.values()) >= _MOST
                ):
                    self._publish()
                    due = time.monotonic() + _INTERVAL
        except BaseException as error:
            self._error = error

    def _publish(self) -> None:
        """Write what is new as parts, then the manifest that names them."""
        files = {}
        for name in _FILES:
            path, followed = self.path / name, self._followed.get(name)
            if followed is None or not followed.is_still(path):
                if not path.exists():
                    require(
                        followed is None or not followed.size or path.name != "completions.jsonl",
                        f"{self.path} was removed while a run was at work there: leave it until the run has ended",
                    )
                    continue
                followed = self._followed[name] = _Followed(path)
            for piece in followed.pieces():
                part = Part.of(
                    f"{_PARTS}/{self._session}/{next(self._numbers):06}.{PurePosixPath(name).name}", piece
                )
                self._store.write(part.object, piece)
                followed.add(part)
            files[name] = tuple(followed.parts)
        self._commit(_Manifest(session=self._session, files=files))
        if (self.path / _STATUS).exists():
            self._store.write(_STATUS, (self.path / _STATUS).read_bytes())

    def _commit(self, manifest: _Manifest) -> None:
        """Replace the manifest, if it is the one that this process knows."""
        content = manifest.to_bytes()
        while not self._store.swap(MANIFEST, self._seen, content):
            self._require_ours()
        self._seen = content

    def _require_ours(self) -> None:
        """``UserError`` unless the manifest is the one that this process knows, or its own."""
        found = self._store.find(MANIFEST)
        if found != self._seen:
            other = _Manifest() if found is None else _Manifest.of(found, self._store.url)
            by = other.writer if found is not None else "whoever removed it"
            require(
                other.session == self._session,  # a write may do its work and still fail
                f"output {self._store.url} is in use by {by}, which has changed it meanwhile: wait for it, or name "
                "another URL; what this process did since is not in it",
            )
            self._seen = found

    def leave(self) -> None:
        """Publish how far a run that did not finish has come; its own error is what the user has to see."""
        if not self._is_ours:
            return
        self._join()
        if self.has_failed:
            return
        try:
            self._publish()
            if not (self.path / "manifest.json").exists():  # a mistake, before the first answer
                self._remove_parts()
                self._store.remove([MANIFEST, _STATUS])
        except UserError as error:
            logging.getLogger("specgen").warning("%s", error)

    def raise_error(self) -> None:
        """Raise what ended the thread, if anything did."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Write the files of the finished run as they are, then the manifest that says so; remove the parts."""
        if self._is_ours:
            self._join()
            self.raise_error()
        self._require_ours()  # before the files of another process's end are written over
        if self._seen is None:  # a merge: a second one is to know what a broken-off first one has left
            self._commit(_Manifest(session=self._session))
        files = {
            file.relative_to(self.path).as_posix(): file
            for file in sorted(self.path.rglob("*"))
            if file.is_file() and not file.name.startswith(".") and file.suffix != ".partial"
        }
        final = {name: (_part_of(name, file),) for name, file in files.items()}
        known = self._earlier.files if self._earlier.is_finished and not self._is_ours else {}
        changed = [name for name in final if known.get(name) != final[name]]
        whole = (
            f"{_PARTS}/{self._session}/whole"  # so that a slow upload replaces nothing of another process's
        )
        with ThreadPoolExecutor(_AT_ONCE) as uploaders:
            list(uploaders.map(lambda name: self._store.upload(f"{whole}/{name}", files[name]), changed))
            self._require_ours()
            list(uploaders.map(lambda name: self._store.copy(f"{whole}/{name}", self._store, name), changed))
        if changed:
            self._commit(_Manifest(session=self._session, is_finished=True, files=final))
        self._remove_parts()
        self._kept.unlink(missing_ok=True)
        shutil.rmtree(self.path)

    def _join(self) -> None:
        self._stop.set()
        self._thread.join()

    def _remove_parts(self) -> None:
        names = self._store.names()
        self._store.remove([name for name in names if name.startswith(f"{_PARTS}/")])


def _part_of(name: str, file: Path) -> Part:
    return Part(object=name, size=file.stat().st_size, sha256=file_digest(file))


@contextmanager
def mirrored(url: Url, *, restart: bool = False) -> Iterator[Mirror]:
    """A run directory of this machine for the run at ``url``, and its ``Mirror``.

    It is locked, and holds what is known of the run: what is at ``url``, or where the last process to write there was
    on this machine, what that has left here. When the block ends the run has finished and so has the copy at ``url``;
    with an error, as much as there is gets published. ``UserError`` for a URL that holds something else, a part that is
    missing, and where the store cannot be reached.
    """
    store = Store.at(url)
    directory = cache_directory("runs") / hashlib.sha256(url.encode()).hexdigest()[:16]
    with _named(directory, url), locked(directory):
        if restart:
            _set_aside(store)
        mirror = Mirror(store, directory, store.find(MANIFEST))
        mirror.prepare()
        try:
            yield mirror
        except BaseException:
            mirror.leave()
            mirror.raise_error()  # which has ended the run
            raise
        mirror.finish()


@contextmanager
def _named(directory: Path, url: Url) -> Iterator[None]:
    """Makes the user's mistakes with ``directory`` those with ``url``, but for what this machine cannot write."""
    try:
        yield
    except UserError as error:
        text = str(error).replace(str(directory / "run"), url).replace(str(directory), url)
        named = BlockingIOError, FileNotFoundError  # in use, or not there
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, named):
            raise
        raise UserError(text) from error


def _set_aside(store: Store) -> None:
    """Move the run in ``store``, if there is one, to the first free of URL.1, URL.2, ..."""
    if MANIFEST not in store.top():
        return
    numbers = (Store.at(Url(f"{store.url}.{number}")) for number in count(1))
    free = next(each for each in numbers if not each.top())
    # The manifest last, both times: a kill meanwhile leaves this a run, which the same command sets aside again, and
    # a copy that is not whole none
    names = sorted(store.names(), key=lambda name: name == MANIFEST)
    for name in names:
        store.copy(name, free)
    store.remove(names[:-1])
    store.remove([MANIFEST])


# --- from a store -------------------------------------------------------------------------------


@contextmanager
def fetched(url: Url, least: Container[str] = ()) -> Iterator[Path]:
    """The run directory at ``url`` as far as it is published, in a temporary directory; ``UserError`` for no run.

    Of a finished run only the files in ``least``, if that names any.
    """
    store = Store.at(url)
    content = store.find(MANIFEST)
    if content is None:
        raise UserError(f"{url} holds no run (it has no {MANIFEST}): check the address")
    with tempfile.TemporaryDirectory(prefix="specgen-") as directory:
        path = Path(directory) / url.path.name
        manifest = _Manifest.of(content, url)
        if manifest.is_finished and least:
            files = {name: parts for name, parts in manifest.files.items() if name in least}
            manifest = replace(manifest, files=files)
        fetch(store, manifest, path)
        with _named(path, url):
            yield path


def fetch(store: Store, manifest: _Manifest, into: Path) -> None:
    """Write the files of ``manifest`` below ``into``; ``UserError`` for an object that is missing or another."""
    for name, parts in manifest.files.items():
        file = into / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if manifest.is_finished:
            _download(store, parts[0], file)
            continue
        with replacement(file) as whole, ThreadPoolExecutor(_AT_ONCE) as fetchers:
            for first in range(0, len(parts), _AT_ONCE):  # no more than these in memory
                some = parts[first : first + _AT_ONCE]
                whole.writelines(fetchers.map(lambda part: _content(store, part), some))
    if not manifest.is_finished:
        with suppress(FileNotFoundError):
            (into / _STATUS).write_bytes(store.read(_STATUS))


def _content(store: Store, part: Part) -> bytes:
    try:
        content = store.read(part.object)
    except FileNotFoundError:
        raise _lost(store, part, "is missing") from None
    if not part.holds(content):
        raise _lost(store, part, "is not as it was written")
    return content


def _download(store: Store, part: Part, file: Path) -> None:
    try:
        store.download(part.object, file)
    except FileNotFoundError:
        raise _lost(store, part, "is missing") from None
    if _part_of(part.object, file) != part:
        raise _lost(store, part, "is not as it was written")


def _lost(store: Store, part: Part, what: str) -> UserError:
    return UserError(f"{store.url / part.object}, which {MANIFEST} names, {what}: {_RESTART}")
