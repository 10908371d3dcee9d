"""The copy of a directory in a store, without a run: what is published, when, and what another process finds."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import pytest

from specgen.config import UserError
from specgen.config.urls import Url
from specgen.record import mirror
from specgen.record.mirror import Mirror, fetched, mirrored
from specgen.record.results import RunDirectory
from specgen.report.report import load
from specgen.storage import Store
from tests.commands import refused
from tests.object_server import BUCKET, s3_server
from tests.waiting import wait_until

URL = Url("memory://bucket/run")
PART = b'{"object": "parts/a", "size": 1, "sha256": "0"}'


class Killed(BaseException):
    """The end of a process as a store sees it."""


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]
    on(monkeypatch, tmp_path, "first")
    monkeypatch.setattr(mirror, "_INTERVAL", 1e9)


def on(patch: pytest.MonkeyPatch, tmp_path: Path, machine: str) -> None:
    patch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))


def add(path: Path, **lines: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").exists() or (path / "manifest.json").write_text("{}\n")
    for name, line in lines.items():
        with (path / f"{name}.jsonl").open("a") as file:
            file.write(line)


def there(name: str = "completions") -> str:
    with fetched(URL) as path:
        return (path / f"{name}.jsonl").read_text()


def state() -> dict[str, Any]:
    return dict(json.loads(Store.at(URL).read("parts.json")))


@contextmanager
def at_work(url: Url = URL, *, restart: bool = False, **lines: str) -> Iterator[Mirror]:
    """A process that has claimed ``url``, with ``lines`` by file, where there are any."""
    with mirrored(url, restart=restart) as each:
        if lines:
            assert not (restart and each.path.exists())
            add(each.path, **lines)
            each.claim()
        yield each


def ended(url: Url = URL, **how: Any) -> None:
    """Such a process from its beginning to its end."""
    with at_work(url, **how):
        pass


@contextmanager
def killed(url: Url = URL, **lines: str) -> Iterator[Mirror]:
    """A process that is killed at the end of the block: nothing more is written."""
    with suppress(Killed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mirror, "leave", lambda self: self._stop.set())
        with at_work(url, **lines) as each:
            yield each
            raise Killed


@contextmanager
def before_writes(patch: pytest.MonkeyPatch, visit: Callable[[str], None]) -> Iterator[None]:
    """``visit`` is called before an object is written, with its name."""
    write, upload, swap = Store.write, Store.upload, Store.swap
    with patch.context() as within:
        within.setattr(Store, "write", lambda self, name, content: (visit(name), write(self, name, content)))
        within.setattr(Store, "swap", lambda self, name, *rest: (visit(name), swap(self, name, *rest))[1])
        within.setattr(Store, "upload", lambda self, name, file: (visit(name), upload(self, name, file)))
        yield


def test_only_whole_lines_are_published_and_each_once(tmp_path: Path) -> None:
    with killed(completions='{"id": "a"}\n{"id": ') as each:
        assert there() == '{"id": "a"}\n'
        add(each.path, completions='"b"}\n{"id')
        each._publish()
        each._publish()
    assert there() == '{"id": "a"}\n{"id": "b"}\n'
    assert len(state()["files"]["completions.jsonl"]) == 2  # type: ignore[index]


def test_a_file_that_is_replaced_is_published_anew(tmp_path: Path) -> None:
    with killed(completions="b\na\n") as each:
        (each.path / "new").write_text("a\nb\nc\n")
        (each.path / "new").rename(each.path / "completions.jsonl")
        each._publish()
    assert there() == "a\nb\nc\n"


def test_errors_of_an_earlier_process_are_not_taken_for_these(tmp_path: Path) -> None:
    add(tmp_path / "run", errors='{"id": "a", "error": "1"}\n')
    followed = mirror._Followed(tmp_path / "run" / "errors.jsonl")
    with RunDirectory(tmp_path / "run") as again:
        again.errors.add({"id": "b", "error": "as long as the first one"})
    assert not followed.is_still(tmp_path / "run" / "errors.jsonl")


def test_completions_are_published_with_their_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ends while a part is written is in no manifest without its passes."""
    with killed() as each:
        add(each.path, completions="0\n", passes="0\n")

        def visit(name: str) -> None:
            add(each.path, passes="1\n")
            add(each.path, completions="1\n")

        with before_writes(monkeypatch, visit):
            each.claim()
    assert len(there("passes")) >= len(there()) > 0


def test_what_is_published_counts(tmp_path: Path) -> None:
    """Not what a killed process has left on this machine."""
    with killed(completions="a\n") as each:
        add(each.path, completions="b\n")
        left = each.path
    add(left, completions="c\n")
    with killed() as each:
        assert (each.path / "completions.jsonl").read_text() == "a\n"
        each.claim()
        assert len(state()["files"]["completions.jsonl"]) == 1, "not published again"


def test_a_kill_at_any_write_of_an_end_leaves_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a second end, where objects of the first one are written over."""
    for end in ("first", "second"):
        for number in range(20):
            left = number

            def visit(name: str) -> None:
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed

            on(monkeypatch, tmp_path, f"{end} {number}")
            before = there() if "parts.json" in Store.at(URL).names() else ""
            try:
                with pytest.MonkeyPatch.context() as patch, before_writes(monkeypatch, visit):
                    patch.setattr(Mirror, "leave", lambda self: self._stop.set())
                    with mirrored(URL) as each:
                        add(each.path, completions=f"{end} {number}\n", passes="1\n")
                        each.claim()
            except Killed:
                assert not before or there().startswith(before)
                continue
            break
        assert left >= 0, "the last one was not killed"
        assert state()["state"] == "finished"
        assert not [name for name in Store.at(URL).names() if name.startswith("parts/")]


def test_a_working_directory_that_is_removed_takes_nothing_with_it() -> None:
    """Such as by a cleaner of caches while the run goes on."""
    with killed(completions="a\n") as each:
        shutil.rmtree(each.path)
        with refused(f"^{each.path} was removed while a run was at work there"):
            each._publish()
    assert there() == "a\n"


def test_an_error_of_the_thread_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def visit(name: str) -> None:
        if each.has_begun:  # type: ignore[attr-defined]
            raise UserError("no room in the bucket")

    monkeypatch.setattr(mirror, "_INTERVAL", 0.01)
    with refused("^no room in the bucket$"), mirrored(URL) as each:
        each.has_begun = False  # type: ignore[attr-defined]
        add(each.path, completions="a\n")
        with before_writes(monkeypatch, visit):
            each.claim()
            each.has_begun = True  # type: ignore[attr-defined]
            add(each.path, completions="b\n")
            wait_until(lambda: each.has_failed)
    assert there() == "a\n"


def test_a_file_that_is_not_there_is_named_by_its_url() -> None:
    ended(completions="a\n")
    with refused(f"^{URL}/report.json cannot be read"), fetched(URL) as path:
        load(path)


def test_starting_over_keeps_a_copy() -> None:
    with killed(completions="a\n"):
        pass
    ended(restart=True, completions="b\n")
    assert there() == "b\n"
    with fetched(Url(f"{URL}.1")) as path:
        assert (path / "completions.jsonl").read_text() == "a\n"


def test_starting_over_may_be_killed_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    copy, fs = Store.copy, type(fsspec.filesystem("memory"))
    remove = fs.rm
    for left in count():
        fsspec.filesystem("memory").store.clear()
        with killed(completions="a\n", passes="b\n"):
            pass
        steps = iter(range(left))

        def kill(steps: Iterator[int] = steps) -> None:
            if next(steps, None) is None:
                raise Killed

        with suppress(Killed), monkeypatch.context() as patch:
            patch.setattr(Store, "copy", lambda *asked: (kill(), copy(*asked)))
            patch.setattr(fs, "rm", lambda self, names: [(kill(), remove(self, name)) for name in names])
            mirror._rename_aside(Store.at(URL))
        num_left = len(list(steps))
        ended(restart=True, completions="c\n")
        assert there() == "c\n"
        copies = [Url(f"{URL}.{number}") for number in (1, 2)]
        whole = [url for url in copies if "parts.json" in Store.at(url).top()]
        with fetched(whole[0]) as path:
            assert (path / "completions.jsonl").read_text() == "a\n"
        if num_left:
            break
    assert left > 8


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"{}", b"[" * 100_000),
        *(
            b'{"session": "a", "pid": 1, "host": "b", "state": "%b", "files": {"%b": [%b]}}' % each
            for each in (
                (b"finished", b"../a", PART),
                (b"finished", b"", PART),
                (b"unfinished", b"a\\u0000", PART),
                (b"unfinished", b"a", PART.replace(b"parts/a", b"")),
                (b"finnished", b"a", PART),
            )
        ),
    ],
    ids=lambda content: content[-60:].decode(),
)
def test_a_manifest_that_is_none_is_refused(content: bytes) -> None:
    Store.at(URL).write("parts.json", content)
    with refused(f"^{URL}/parts.json is not as it was written"), mirrored(URL):
        raise AssertionError


@pytest.mark.parametrize("what", ["is missing", "is not as it was written", "a file", "a part"])
def test_what_is_missing_or_another_is_refused(what: str) -> None:
    """A part, or an entry of the manifest."""
    with killed(completions="a\n"):
        pass
    store, manifest = Store.at(URL), state()
    name = next(name for name in store.names() if name.endswith("completions.jsonl"))
    reason = f"^{URL}/parts.json is not as it was written .*restore it"
    if what.startswith("is"):
        store.remove([name])
        reason = f"^{URL / name}, which parts.json names, {what}: restore it, or start over with --restart"
        if what != "is missing":
            store.write(name, b"b\n")
    else:
        if what == "a file":
            del manifest["files"]["completions.jsonl"]
        else:
            manifest["files"]["completions.jsonl"].pop()
        store.write("parts.json", json.dumps(manifest).encode())
    before = store.names()
    for read in (mirrored, fetched):
        with refused(reason), read(URL):
            raise AssertionError
    assert store.names() == before, "nothing else is touched"
    if what.startswith("is"):
        store.write(name, b"a\n")
        assert there() == "a\n"


def test_a_slow_upload_of_an_end_replaces_nothing_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def visit(name: str) -> None:
        if name.endswith("completions.jsonl") and (name.count("/") == 0 or "/whole/" in name) and not others:
            others.append(name)
            on(monkeypatch, tmp_path, "second")
            ended(completions="second\n")

    others: list[str] = []
    with before_writes(monkeypatch, visit), refused("is in use by"):
        ended(completions="first\n")
    assert others
    assert state()["state"] == "finished"
    assert there() == "first\nsecond\n", "it had gone on"


def test_a_run_that_is_going_on_elsewhere_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed(completions="a\n") as first:
        on(monkeypatch, tmp_path, "second")
        with refused(rf"^output {URL} is in use by process \d+ on "), mirrored(URL) as second:
            add(first.path, completions="b\n")
            first._publish()
            second.claim()
        assert there() == "a\nb\n"


@pytest.mark.parametrize("begun", [False, True])
def test_of_two_that_write_to_a_bucket_in_the_same_moment_one_is_refused(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new run, and one that both go on with: the store itself compares."""
    url, others = Url(f"s3://{BUCKET}/run"), list[str]()

    def work(machine: str) -> None:
        on(monkeypatch, tmp_path, machine)
        with killed(url, completions=f"{machine}\n"):
            pass

    def late(method: str, key: str) -> None:
        if method == "PUT" and key == "run/parts.json" and not others:
            others.append(key)
            work("second")

    with s3_server(monkeypatch) as server:
        if begun:
            work("earlier")
        server.fault = late
        with refused(rf"^output {url} is in use by process \d+ on "):
            work("first")
        with fetched(url) as path:
            assert (path / "completions.jsonl").read_text() == "earlier\n" * begun + "second\n"


@pytest.mark.parametrize("error", [TypeError("unknown argument"), OSError("NotImplemented")])
def test_a_store_without_conditions_is_written_all_the_same(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = type(fsspec.filesystem("memory"))
    pipe = memory.pipe_file

    def plain(self: Any, path: str, content: bytes, **condition: Any) -> None:
        if condition:
            raise error
        pipe(self, path, content)

    monkeypatch.setattr(memory, "pipe_file", plain)
    ended(completions="a\n")
    assert there() == "a\n"
    assert state()["state"] == "finished"


def test_exports_of_an_earlier_end_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine that goes on finds them empty, which says that they lack rows."""
    ended(completions="a\n", batch_output="old\n")
    with killed(completions="b\n"):
        pass
    on(monkeypatch, tmp_path, "second")
    with killed() as each:
        assert (each.path / "batch_output.jsonl").read_text() == ""
