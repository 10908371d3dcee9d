"""Objects in stores through fsspec, its errors as one line each; files and digests in the user's cache directory."""

import fcntl
import hashlib
import io
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from specgen.config import UserError, first_line, require
from specgen.config.urls import Url, is_url, without_secrets

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

T = TypeVar("T")
_LIBRARIES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
# What stores call the digest or the time of a content, in lower case. Listings may give times in another way.
_DIGESTS = ("etag", "md5hash", "blob_id")
_TIMES = ("lastmodified", "last_modified", "updated", "created", "mtime")
_MISSING = (FileNotFoundError,)
_BLOCK = 8 << 20  # bytes of one request to read
_REMEDY = "check the address, your rights and the network, then run the same command again"


def cache_directory(kind: str) -> Path:
    """Where files of one ``kind`` are: below ``XDG_CACHE_HOME``, else ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "specgen" / kind


def _home() -> Path:
    """The user's, or where nothing can be kept: a container's user may have none."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.devnull)


@contextmanager
def _reaching(url: Url, besides: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Whatever the library of a store raises, as one line, ``besides`` these."""
    try:
        yield
    except besides:
        raise
    except ImportError as error:
        scheme = url.partition("://")[0]
        raise UserError(
            f"{url} needs a library that is not installed ({first_line(error)}): "
            f"pip install {_LIBRARIES.get(scheme, f'what fsspec names for {scheme}://')}"
        ) from error
    except Exception as error:  # each library has its own
        reason = without_secrets(first_line(error))
        raise UserError(f"{url} cannot be reached ({reason}): {_REMEDY}") from error


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object as it was when it was listed, with those properties of a path that readers of rows use."""

    url: Url
    size: int  # bytes
    version: str  # its ETag, or what its store has instead
    changed: datetime | None = None

    @property
    def path(self) -> PurePosixPath:
        return self.url.path

    def __str__(self) -> str:
        return self.url

    def open(self) -> io.BufferedReader:
        """To read, a block at a time; ``OSError`` where that fails, or where it is another object by now."""
        try:
            store = Store.at(self.url)
            (now,) = store.objects()
            if now.version != self.version:
                raise OSError("it was replaced while it was in use")
            raw = store.open()
        except UserError as error:
            raise OSError(str(error)) from error
        return io.BufferedReader(_Raw(raw), _BLOCK)


class _Raw(io.RawIOBase):
    """A file of fsspec's whose errors are ``OSError``."""

    def __init__(self, file: Any) -> None:  # noqa: ANN401
        self._file = file

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        with _as_os_error():
            return int(self._file.readinto(buffer))

    def seek(self, offset: int, whence: int = 0, /) -> int:
        with _as_os_error():
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each library has its own
        raise OSError(without_secrets(first_line(error))) from error


def _said(info: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """What ``info`` says under the first of ``names`` that it has, if any."""
    found = {name.lower(): str(value).strip('"') for name, value in info.items() if value}
    return next((found[name] for name in names if name in found), None)


@dataclass(frozen=True, kw_only=True)
class Store:
    """What is at ``url`` and below, by names below it; ``""`` is ``url`` itself.

    Whatever a store does not do is a ``UserError``, once its library has given up trying; what is not
    there is a ``FileNotFoundError``.
    """

    url: Url
    _fs: Any = field(repr=False)
    _root: str = field(repr=False)

    @classmethod
    def at(cls, url: Url) -> "Store":
        """``UserError`` for a scheme that is unknown, or whose library is not installed."""
        from fsspec import available_protocols
        from fsspec.core import url_to_fs

        scheme = url.partition("://")[0]
        require(
            scheme in available_protocols(),
            f"{url} is of no store that fsspec knows: use s3://, gs://, az://, hf:// or a path of this machine",
        )
        with _reaching(url):
            fs, root = url_to_fs(url, use_listings_cache=False)  # what others write meanwhile counts
        return cls(url=url, _fs=fs, _root=root)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def objects(self) -> list[StoredObject]:
        """All at and below the URL, by name; ``FileNotFoundError`` where there is none."""
        with _reaching(self.url, _MISSING):
            info = self._fs.info(self._root)
            found = {self._root: info} if info["type"] == "file" else self._fs.find(self._root, detail=True)
        if not found:
            raise FileNotFoundError(self.url)
        return [self._stored(path, found[path]) for path in sorted(found) if not path.endswith("/")]

    def _stored(self, path: str, info: Mapping[str, Any]) -> StoredObject:
        digest = _said(info, _DIGESTS)
        if digest is None:
            info = self._fs.info(path)
        times = [value for value in info.values() if isinstance(value, datetime)]
        name = path.removeprefix(self._root).strip("/")
        return StoredObject(
            url=self.url / name if name else self.url,
            size=int(info["size"] or 0),  # a web server may not say it
            version=digest or f"{_said(info, _DIGESTS + _TIMES)} {info['size']}",
            changed=max((time.astimezone(UTC) for time in times), default=None),
        )

    def names(self) -> list[str]:
        """Of all objects below the URL."""
        try:
            return [each.url.removeprefix(f"{self.url}/") for each in self.objects()]
        except FileNotFoundError:
            return []

    def top(self) -> list[str]:
        """The names directly below the URL; none where there is nothing."""
        try:
            with _reaching(self.url, _MISSING):
                found = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in found if path.rstrip("/") != self._root]

    def open(self, name: str = "") -> Any:  # noqa: ANN401
        """fsspec's file to read, whose errors are the library's."""
        with _reaching(self.url, _MISSING):
            return self._fs.open(self._path(name), "rb", block_size=_BLOCK)

    def read(self, name: str) -> bytes:
        with _reaching(self.url, _MISSING):
            return bytes(self._fs.cat_file(self._path(name)))

    def find(self, name: str) -> bytes | None:
        """As ``read``; None for what is not there."""
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def swap(self, name: str, known: bytes | None, content: bytes) -> bool:
        """Replace an object that is still ``known``, or for None create one; whether that was so.

        S3 compares and writes in one. Other stores may create in one, as far as fsspec does it, and compare first.
        """
        path, condition = self._path(name), {"mode": "create"}
        if known is not None:
            with suppress(FileNotFoundError), _reaching(self.url, _MISSING):
                etag = self._fs.info(path).get("ETag")  # before its content is read: never a later one's
                condition = {} if etag is None else {"IfMatch": etag}
        if self.find(name) != known:
            return False
        try:
            self._fs.pipe_file(path, content, **condition)
        except Exception:  # what is there says why: libraries and stores have many errors for it
            now = self.find(name)
            if now == known:  # there are no conditions, or another error, which comes again
                self.write(name, content)
            return now in (known, content)
        return True

    def write(self, name: str, content: bytes) -> None:
        """Create or replace an object as a whole."""
        with _reaching(self.url):
            self._fs.pipe_file(self._path(name), content)

    def upload(self, name: str, file: Path) -> None:
        """As ``write``, of a large file."""
        with _reaching(self.url):
            self._fs.put_file(str(file), self._path(name))

    def download(self, name: str, file: Path) -> None:
        with _reaching(self.url, _MISSING):
            self._fs.get_file(self._path(name), str(file))

    def copy(self, name: str, to: "Store", new_name: str | None = None) -> None:
        """Within one store, by the store; under the same name, or a new one."""
        with _reaching(self.url):
            self._fs.cp_file(self._path(name), to._path(new_name or name))

    def remove(self, names: Sequence[str]) -> None:
        """Of what is not there, nothing."""
        with suppress(FileNotFoundError), _reaching(self.url, _MISSING):
            if names:
                self._fs.rm([self._path(name) for name in names])


# --- directories that are loaded from disk ------------------------------------------------------

_FETCHERS = 4


def hub_id(url: Url) -> str | None:
    """What the hub calls the model ``hf://OWNER/NAME``; None for another URL."""
    found = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)", url)
    return found[1] if found else None


def cached_files(name: str, patterns: tuple[str, ...]) -> Path:
    """A directory in a cache with the files of the hub id or URL ``name`` whose names match one of ``patterns``.

    In one call: one for each file would wait for a lost network each time. Errors of the hub are its library's.
    """
    if is_url(name):
        url = Url(name)
        if (on_hub := hub_id(url)) is None:
            return copy_of(url, patterns)
        name = on_hub
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=["*/*"]))


@lru_cache(maxsize=64)
def copy_of(url: Url, patterns: tuple[str, ...]) -> Path:
    """A directory in the cache with the objects directly below ``url`` whose names match one of ``patterns``.

    There is one for each state of the objects, made once. ``UserError`` where it cannot be. A process asks the store
    once.
    """
    found = {each.path.name: each for each in _below(url) if any(map(each.path.match, patterns))}
    state = [url, *(f"{name} {each.size} {each.version}" for name, each in found.items())]
    kept = cache_directory("checkpoints") / hashlib.sha256("\n".join(state).encode()).hexdigest()[:24]
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with kept.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be fetching the same
            if not kept.is_dir():
                _fetch(url, found, kept)
    except OSError as error:
        raise UserError(
            f"{url} cannot be kept in {kept} ({error.strerror or error}): make room, or name another cache directory "
            "in XDG_CACHE_HOME"
        ) from error
    return kept


def _below(url: Url) -> list[StoredObject]:
    try:
        found = [each for each in Store.at(url).objects() if each.path.parent == url.path]
    except FileNotFoundError:
        found = []
    require(bool(found), f"{url} is no directory with objects in it: check the address")
    return found


def _fetch(url: Url, found: Mapping[str, StoredObject], into: Path) -> None:
    """Make the directory ``into``, atomically; objects that a killed process has fetched are not fetched again."""
    size = sum(each.size for each in found.values()) / 1e9
    logging.getLogger("specgen").warning("fetching %s, %.1f GB, into %s", url, size, into)
    partial, store = into.with_suffix(".partial"), Store.at(url)
    partial.mkdir(exist_ok=True)

    def fetch(name: str) -> None:
        file, here = partial / name, partial / f"{name}.part"
        if not (file.exists() and file.stat().st_size == found[name].size):
            store.download(name, here)
            whole = here.stat().st_size == found[name].size
            require(whole, f"{url / name} was replaced while it was fetched: run the same command again")
            here.replace(file)

    with ThreadPoolExecutor(_FETCHERS) as fetchers:
        list(fetchers.map(fetch, found))
    partial.rename(into)


# --- small files of the cache, any of which may be lost or damaged ------------------------------


@dataclass(frozen=True, kw_only=True)
class CacheFiles:
    """Those of one ``kind``, by key; ``what`` each of them holds is named in the log."""

    kind: str
    what: str

    def _file(self, key: bytes) -> Path:
        return cache_directory(self.kind) / f"{hashlib.sha256(key).hexdigest()}.json"

    def read(self, key: bytes, check: Callable[[Any], T | None]) -> T | None:
        """What ``check`` makes of the JSON kept for ``key``; None where there is no file.

        ``check`` gives None, or raises, for what was not written there: that costs a line in the log.
        """
        file = self._file(key)
        try:
            found = check(json.loads(file.read_bytes()))
            if found is not None:
                return found
            reason = "it is not what was written there"
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
        _log(f"{self.what} kept in {file} not used ({reason})")
        return None

    def write(self, key: bytes, value: object) -> None:
        """Replace the file of ``key`` as a whole; where it cannot be written, that costs a line in the log."""
        file = self._file(key)
        mine = file.with_suffix(f".{os.getpid()}")  # another process may write at the same time
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            mine.write_text(json.dumps(value))
            os.replace(mine, file)
        except OSError as error:
            with suppress(OSError):
                mine.unlink(missing_ok=True)
            _log(f"{self.what} cannot be kept in {file} ({error.strerror})")

    def forget(self) -> None:
        """Remove all of them."""
        for file in cache_directory(self.kind).glob("*"):
            file.unlink(missing_ok=True)


def _log(line: str) -> None:
    logging.getLogger("specgen").warning("%s", line)


# --- digests of files ---------------------------------------------------------------------------

_LARGE = 64 << 20  # bytes of a file whose digest is kept: a core reads about 1.5 GB/s
_SETTLED = 60.0  # seconds since a file was changed, after which its times would tell of another change
_KEPT = CacheFiles(kind="digests", what="a file's digest")


def file_state(file: Path) -> tuple[int, ...]:
    """What identifies a changed file: device, inode, size and times."""
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def file_digest(file: Path) -> str:
    """SHA-256 of ``file``, read once as long as its state is the same; a large file's is kept for other processes."""
    return _digest(file.absolute(), file_state(file))


@lru_cache(maxsize=4096)
def _digest(file: Path, state: tuple[int, ...]) -> str:
    _, _, size, *times = state
    is_settled = max(times) < (time.time() - _SETTLED) * 1e9
    if size < _LARGE or not is_settled:
        return _read(file)
    known = [str(file), *state]

    def checked(found: Any) -> tuple[str, object] | None:  # noqa: ANN401
        digest = bytes.fromhex(found["sha256"])
        return (digest.hex(), found["file"]) if len(digest) == 32 else None

    digest, of = _KEPT.read(os.fsencode(file), checked) or ("", None)
    if of != known:
        digest = _read(file)
        _KEPT.write(os.fsencode(file), {"file": known, "sha256": digest})
    return digest


def _read(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
