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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event
from typing import Annotated, Literal, Self

import msgspec

from specgen.config import UserError, first_line, require
from specgen.config.urls import Url
from specgen.record.files import as_json
from specgen.record.provenance import timestamp
from specgen.record.results import locked
from specgen.storage import Store, cache_directory, file_digest

MANIFEST = "parts.json"  # whose conditional replacement is what commits, and what refuses a second writer
_PARTS = "parts"  # the directory of parts
_INTERVAL = 30.0  # seconds of work that the loss of this machine may cost
_MOST = 16 << 20  # bytes that wait, and of a part
_POLL = 0.5  # seconds
_AT_ONCE = 8  # requests
_STATUS = "status.json"  # for others to look at: it is written over, and no resume needs it
# What a resume needs. Passes are last, so that those of every completion are there.
_FILES = (
    *("manifest.json", "config.yaml", "requests.jsonl"),
    *("lost.jsonl", "errors.jsonl", "completions.jsonl"),
    *("baseline/lost.jsonl", "baseline/errors.jsonl", "baseline/completions.jsonl"),
    *("passes.jsonl", "baseline/passes.jsonl"),
)
_EXPORTS = ("batch_output.jsonl", "completions.parquet")  # made of completions at the end of a run
_Name = Annotated[str, msgspec.Meta(pattern=r"^(?!/|(.*/)?\.\.(/|$))[^\0]+$")]  # at and below the URL


class _Part(msgspec.Struct, frozen=True):
    """An object with the next bytes of a file, or with all of it."""

    object: _Name
    size: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True):
    """The parts of each file, in order. Of a run that has finished every file is one object of its own name."""

    state: Literal["unfinished", "finished"]
    files: dict[_Name, tuple[_Part, ...]]
    pid: int = msgspec.field(default_factory=os.getpid)
    host: str = msgspec.field(default_factory=socket.gethostname)
    updated: str = msgspec.field(default_factory=timestamp)

    @classmethod
    def of(cls, content: bytes, url: Url) -> Self:
        """``UserError`` for what is no manifest, or has lost or gained something."""
        try:
            found = json.loads(content)
            require(found.pop("sha256", None) in (None, _digest(found)), "it has lost or gained something")
            return msgspec.convert(found, cls)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise _damaged(url / MANIFEST, f" is not as it was written ({first_line(error)})") from error

    def to_bytes(self) -> bytes:
        found = msgspec.to_builtins(self)
        return as_json(found | {"sha256": _digest(found)}).encode()


def _digest(manifest: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _damaged(name: str, what: str) -> UserError:
    return UserError(f"{name}{what}: restore it, or start over with --restart, which keeps what is left")


class _Followed:
    """A file that grows, as far as it is published: it begins with ``parts``."""

    def __init__(self, path: Path, parts: Sequence[_Part] = ()) -> None:
        self.file = path.open("rb")
        self.parts = [*parts]

    @property
    def size(self) -> int:
        """Bytes that are published."""
        return sum(part.size for part in self.parts)

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
        """The whole lines that are not published; each is to be added to the parts before the next."""
        if not self.waiting():
            return
        with mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n", self.size) + 1
        while (begin := self.size) < end:
            self.file.seek(begin)
            yield self.file.read(min(_MOST, end - begin))


class Mirror:
    """The run directory ``path`` in the state of a store, and from ``claim`` on a thread that publishes what comes.

    An error of the thread has to end the run: ``has_failed`` tells. Another process that has published since is one.
    """

    def __init__(self, store: Store, path: Path) -> None:
        self.path = path
        self._store, self._seen = store, store.find(MANIFEST)
        self._parts = f"{_PARTS}/{uuid.uuid4().hex}"  # a directory of this process
        self._numbers = count(1)
        self._stop = Event()
        self._work: Future[None] | None = None  # once the store is claimed
        shutil.rmtree(path, ignore_errors=True)
        known: dict[str, tuple[_Part, ...]] = {}
        self._final = known  # of a finished run, while nothing is added to it
        if self._seen is None:
            others = sorted({*store.top()} - {_PARTS})
            require(
                not others,
                f"output {store.url} is not empty and holds no run (it has {', '.join(others[:1])}): name another "
                "URL, or remove it first",
            )
        else:
            earlier = _Manifest.of(self._seen, store.url)
            known, self._final = earlier.files, earlier.files if earlier.state == "finished" else {}
        _fetch(store, known, path)
        self._followed = {name: _Followed(path / name, known[name]) for name in _FILES if name in known}

    @property
    def has_failed(self) -> bool:
        return self._work is not None and self._work.done()

    def claim(self) -> None:
        """Publish what is in the directory, and from now on what comes. ``UserError`` where others have meanwhile."""
        self._final = {}
        self._publish()
        thread = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self._work = thread.submit(self._publish_now_and_then)
        thread.shutdown(wait=False)

    def _publish_now_and_then(self) -> None:
        due = time.monotonic() + _INTERVAL
        while not self._stop.wait(_POLL):
            if time.monotonic() >= due or sum(each.waiting() for each in self._followed.values()) >= _MOST:
                self._publish()
                due = time.monotonic() + _INTERVAL

    def _publish(self) -> None:
        """Write what is new as parts, then the manifest that names them."""
        # another machine makes exports anew that it finds empty
        files: dict[str, tuple[_Part, ...]] = {name: () for name in _EXPORTS if (self.path / name).exists()}
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
                part = f"{self._parts}/{next(self._numbers):06}.{path.name}"
                self._store.write(part, piece)
                followed.parts.append(_Part(part, len(piece), hashlib.sha256(piece).hexdigest()))
            files[name] = tuple(followed.parts)
        self._commit("unfinished", files)
        if (self.path / _STATUS).exists():
            self._store.write(_STATUS, (self.path / _STATUS).read_bytes())

    def _commit(
        self, state: Literal["unfinished", "finished"], files: Mapping[str, tuple[_Part, ...]]
    ) -> None:
        """Replace the manifest; ``UserError`` unless it is the one that this process has read or written."""
        content = _Manifest(state, dict(files)).to_bytes()
        if not self._store.swap(MANIFEST, self._seen, content):
            raise self._in_use()
        self._seen = content

    def _in_use(self) -> UserError:
        found, by = self._store.find(MANIFEST), "whoever removed it"
        if found is not None:
            other = _Manifest.of(found, self._store.url)
            by = f"process {other.pid} on {other.host}"
        return UserError(
            f"output {self._store.url} is in use by {by}, which has changed it meanwhile: wait for it, or name "
            "another URL; what this process did since is not in it"
        )

    def _join(self) -> None:
        """Raise what ended the thread, if anything did."""
        if self._work is not None:
            self._stop.set()
            self._work.result()

    def leave(self) -> None:
        """Publish how far a run that did not finish has come; its own error is what the user has to see."""
        self._join()
        if self._work is None:
            return
        try:
            self._publish()
            if not (self.path / "manifest.json").exists():  # a mistake, before the first answer
                for names in ([_STATUS], [MANIFEST], self._written()):
                    self._store.remove(names)
        except UserError as error:
            logging.getLogger("specgen").warning("%s", error)

    def finish(self) -> None:
        """Write the files of the finished run as they are, and the manifest that says so; remove the parts.

        First to the directory of this process: at any moment the manifest names a run that is whole, and an upload
        replaces nothing of another process.
        """
        self._join()
        if self._store.find(MANIFEST) != self._seen:  # before anything large is uploaded
            raise self._in_use()
        files = {
            file.relative_to(self.path).as_posix(): file
            for file in sorted(self.path.rglob("*"))
            if file.is_file() and not file.name.startswith(".") and file.suffix != ".partial"
        }
        final = {name: (_part_of(name, file),) for name, file in files.items()}
        changed = {
            name: f"{self._parts}/whole/{name}" for name in final if self._final.get(name) != final[name]
        }
        with ThreadPoolExecutor(_AT_ONCE) as uploaders:
            list(uploaders.map(lambda name: self._store.upload(changed[name], files[name]), changed))
            parts = {
                name: (msgspec.structs.replace(final[name][0], object=to),) for name, to in changed.items()
            }
            parts_left = self._written()
            if changed or parts_left:
                self._commit("unfinished", final | parts)
                list(uploaders.map(lambda name: self._store.copy(changed[name], self._store, name), changed))
                self._commit("finished", final)
        self._store.remove(parts_left)

    def _written(self) -> list[str]:
        return [name for name in self._store.names() if name.startswith(f"{_PARTS}/")]


def _part_of(name: str, file: Path) -> _Part:
    return _Part(name, file.stat().st_size, file_digest(file))


@contextmanager
def mirrored(url: Url, *, restart: bool = False) -> Iterator[Mirror]:
    """A run directory of this machine for the run at ``url``, locked and in the state of the run there.

    When the block ends the run has finished and so has the copy at ``url``; with an error, as much as there is gets
    published. ``UserError`` for a URL that holds something else, a part that is missing, and where the store cannot be
    reached.
    """
    store = Store.at(url)
    directory = cache_directory("runs") / hashlib.sha256(url.encode()).hexdigest()[:16]
    with _named(directory, url), locked(directory):
        if restart:
            _rename_aside(store)
        mirror = Mirror(store, directory / "run")
        try:
            yield mirror
        except BaseException:
            mirror.leave()
            raise
        else:
            mirror.finish()
        finally:
            shutil.rmtree(mirror.path, ignore_errors=True)


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


def _rename_aside(store: Store) -> None:
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
    manifest = _Manifest.of(content, url)
    is_all = not least or manifest.state == "unfinished"
    with tempfile.TemporaryDirectory(prefix="specgen-") as directory:
        path = Path(directory) / url.path.name
        _fetch(
            store, {name: parts for name, parts in manifest.files.items() if is_all or name in least}, path
        )
        if manifest.state == "unfinished" and (status := store.find(_STATUS)) is not None:
            (path / _STATUS).write_bytes(status)
        with _named(path, url):
            yield path


def _fetch(store: Store, files: Mapping[str, Sequence[_Part]], into: Path) -> None:
    """Write ``files`` below ``into``; ``UserError`` for an object that is missing or another."""
    for name, parts in files.items():
        file = into / name
        file.parent.mkdir(parents=True, exist_ok=True)
        pieces = [file.with_name(f"{file.name}.{number}") for number in range(len(parts))]
        with file.open("wb") as whole, ThreadPoolExecutor(_AT_ONCE) as fetchers:
            for piece in fetchers.map(partial(_download, store), parts, pieces):
                with piece.open("rb") as content:
                    shutil.copyfileobj(content, whole)
                piece.unlink()


def _download(store: Store, part: _Part, file: Path) -> Path:
    try:
        store.download(part.object, file)
        what = "" if _part_of(part.object, file) == part else "is not as it was written"
    except FileNotFoundError:
        what = "is missing"
    if what:
        raise _damaged(store.url / part.object, f", which {MANIFEST} names, {what}")
    return file
