"""A mistake of the user is one line with the remedy, a bug a traceback with what to report."""

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specgen import __version__
from specgen.config import EngineConfig, UserError
from specgen.config.errors import DeviceLost
from specgen.config.json_fields import load_json
from specgen.core.engine_core import EngineCore
from specgen.engine.engine import Engine
from specgen.experiments import study_tables
from specgen.experiments.output import BenchTable
from specgen.prompts import Prompt
from specgen.record.files import naming, open_output, sync, writable, write_text
from specgen.record.results import directory
from specgen.text.tokenizer import Tokenizer
from tests.commands import write_rows
from tests.forked import Ended, generate_with_pair, inspect_pair, run_cli, write_pair
from tests.marks import mostly_slow
from tests.streams import fold, request

BUG = f"specgen: this is a bug in specgen {__version__}: report it with the traceback above, the command, "


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("errors"))


@pytest.fixture
def path(pair: Path, tmp_path: Path) -> Path:
    """A directory with the pair."""
    for inner in pair.iterdir():
        (tmp_path / inner.name).symlink_to(inner)
    return tmp_path


def misfit(*arguments: Any, **named: Any) -> None:
    """What a bug of ours may look like."""
    list(zip((1, 2), (1,), strict=True))


def raises(error: BaseException) -> Callable[..., None]:
    def planted(*arguments: Any, **named: Any) -> None:
        raise error

    return planted


def check_bug(ended: Ended, words: str) -> None:
    """Exit code 1, the traceback, and what to report."""
    assert ended.code == 1, ended
    assert "Traceback (most recent call last)" in ended.err
    assert words in ended.err
    asked = ended.err.splitlines()[-1]
    assert asked.startswith(BUG)
    assert "manifest.json" in asked
    assert "cannot be written" not in ended.err


@pytest.mark.parametrize(
    "place",
    mostly_slow(
        [
            *("core.engine_core.EngineCore.step", "prompts.load.PromptSet.__iter__"),
            "record.results.RunDirectory.arrange",
            "prompts.load._own_id",  # is no rejected row
            "engine.conversations.Conversations._request",  # no failed request
            "checkpoints.inspect_checkpoint.draft_to_target",  # no misfit
        ],
        *("core.engine_core.EngineCore.step", "engine.conversations.Conversations._request"),
        "checkpoints.inspect_checkpoint.draft_to_target",
    ),
)
def test_a_bug_shows_its_traceback_and_what_to_report(
    path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(f"specgen.{place}", misfit)
    ended = inspect_pair(path) if "inspect" in place else generate_with_pair(path)
    check_bug(ended, "ValueError: zip() argument 2 is shorter than argument 1")
    errors = path / "run" / "errors.jsonl"
    assert not errors.exists() or not errors.read_text()


def test_a_lost_device_is_not_a_bug(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a command that does not restart itself."""
    monkeypatch.setattr(EngineCore, "generate", raises(DeviceLost("an illegal memory access", ("a",))))
    arguments = ["verify", "--model", "target", "--drafter", "head", "--dataset", "prompts.jsonl"]
    ended = run_cli([*arguments, "--device", "cpu"], path, more_mib=1024)
    assert ended.code == 1
    assert ended.err.endswith(
        "specgen: the device is lost (an illegal memory access): continue in a new process\n"
    )
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),  # while a kernel is compiled
        *mostly_slow(
            [
                FileNotFoundError(errno.ENOENT, "No such file or directory", "ninja"),
                ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub"),
                BrokenPipeError(errno.EPIPE, "Broken pipe"),
                PermissionError(errno.EACCES, "Permission denied", "target/model.safetensors"),
            ]
        ),
    ],
    ids=["elsewhere", "ninja", "hub", "pipe", "input"],
)
def test_an_os_error_elsewhere_is_not_blamed_on_the_output(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    monkeypatch.setattr(EngineCore, "step", raises(error))
    check_bug(generate_with_pair(path), f"{type(error).__name__}: {error}")


def test_other_names_are_not_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError), directory(Path(), "manifest.json"):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "ninja")


def test_a_user_error_is_one_line_wherever_it_is_raised(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCore, "step", raises(UserError("no room: make some")))
    ended = generate_with_pair(path)
    assert (ended.code, ended.err.splitlines()[-1]) == (2, "specgen: no room: make some")
    assert "Traceback" not in ended.err


# ---- outputs that cannot be written


@pytest.fixture
def small_files() -> Iterator[None]:
    """A file cannot have more than 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_error_names_the_file_that_cannot_be_written(tmp_path: Path, small_files: None) -> None:
    file = open_output(tmp_path / "a", "a")
    file.write(bytes(100))
    os.truncate(tmp_path / "a", 1 << 16)
    with pytest.raises(OSError, match="File too large") as refused:
        sync(file)
    assert refused.value.filename == str(tmp_path / "a")
    with pytest.raises(OSError, match="File too large") as refused:
        write_text(tmp_path / "b", "b" * 70_000)
    assert refused.value.filename == str(tmp_path / "b.partial")


def test_a_table_that_cannot_be_written_is_one_line(tmp_path: Path, small_files: None) -> None:
    table = BenchTable(name="t", title="x" * 70_000, conditions={}, columns=(), rows=())
    with (
        pytest.raises(UserError, match=r"out' cannot be written \(File too large\): fix that"),
        writable(tmp_path / "out"),
    ):
        table.write(tmp_path / "out")


def test_parquet_that_cannot_be_written_is_one_line(tmp_path: Path, small_files: None) -> None:
    from specgen.jobs.run_output import export_parquet

    (found,) = request("a", [(1, 1)])
    own = {"text": "", "metrics": {"num_spec_tokens": 1}, "record": found.to_json()}
    rows = [{"id": str(n), "prompt": os.urandom(999).hex(), **own} for n in range(99)]
    with (
        pytest.raises(UserError, match=r"File too large"),
        directory(tmp_path / "run", "manifest.json") as path,
    ):
        export_parquet(rows, path / "completions.parquet")


@pytest.mark.parametrize(
    ("named", "is_ours"),
    [("run/a/b", True), ("run", True), ("run.partial", True), ("run2/a", False), ("x", False), (3, False)],
)
def test_which_files_are_in_an_output(named: object, is_ours: bool) -> None:
    error = OSError(errno.EIO, "Input/output error", named)
    with pytest.raises(UserError if is_ours else OSError), writable(Path("run")):
        raise error


def test_a_parent_of_an_output_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    output = tmp_path / "file" / "new" / "run"
    with (
        pytest.raises(
            UserError, match=r"run' cannot be written \(Not a directory\): give the right to write there"
        ),
        directory(output, "manifest.json"),
    ):
        pass
    with (
        pytest.raises(UserError, match=r"cannot be written \(File name too long\)"),
        directory(tmp_path / ("e" * 300), "manifest.json"),
    ):
        pass
    with pytest.raises(NotADirectoryError) as refused, naming(output):
        output.mkdir(parents=True)
    assert refused.value.filename == str(output)


def test_a_run_without_output_needs_disk_space_too() -> None:
    with (
        pytest.raises(UserError, match=r"No space left on device\): .* TMPDIR"),
        directory(None, "manifest.json") as path,
        naming(path / "completions.jsonl"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_audit_that_cannot_be_written_is_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"num_unexplained": 0, "failures": []}
    monkeypatch.setattr("specgen.experiments.audit.audit", lambda *asked: found)
    monkeypatch.setattr(study_tables, "of_audit", lambda found: [])
    (path / "file").touch()
    ended = run_cli(["verify", "--output", "file/audit.json"], path, more_mib=4096)
    assert ended.code == 2, ended
    assert ended.err.startswith("specgen: output 'file/audit.json' cannot be written (")


# ---- files that are no such files


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON"),
        ("[]", "is not a JSON object"),
        ("\xff", "is not valid JSON"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_not_an_object(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=rf"a\.json {words}.*: fix it$"):
        load_json(tmp_path / "a.json", "fix it")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_json_is_read_in_every_encoding_that_it_may_have(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.json").write_text('{"a": "ä"}', encoding=encoding)
    assert load_json(tmp_path / "a.json", "fix it") == {"a": "ä"}


def test_an_invalid_manifest_is_one_line(path: Path) -> None:
    (path / "run").mkdir()
    (path / "run" / "manifest.json").write_text("mine")
    ended = generate_with_pair(path)
    assert ended.code == 2, ended
    assert "manifest.json is not valid JSON" in ended.err.splitlines()[-1]


def test_an_empty_prompt_fails_alone(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a tokenizer that begins no text with a token of its own."""
    encode_text = Tokenizer.encode_text
    monkeypatch.setattr(Tokenizer, "encode_text", lambda own, text: text and encode_text(own, text))
    files = {"model": str(pair / "target"), "drafter": str(pair / "head")}
    engine = Engine(EngineConfig(**files, num_spec_tokens=2, device="cpu"))
    outputs = {
        each.id: each for each in engine.generate([Prompt(id="a", text=""), Prompt(id="b", text="Tom")])
    }
    assert "makes no token of the prompt" in str(outputs["a"].error)
    assert outputs["b"].error is None


# ---- pipes


def specgen(*arguments: object, into: str) -> subprocess.CompletedProcess[str]:
    """``specgen`` in a process of its own, with its stdout into what a shell calls ``into``; its own exit code."""
    command = [sys.executable, "-c", "from specgen.cli.main import main; main()", *map(str, arguments)]
    script = f'set -o pipefail; "$@" {into}'
    return subprocess.run(["bash", "-c", script, "bash", *command], capture_output=True, text=True)


@pytest.mark.parametrize("number", mostly_slow([3, 3000], 3000), ids=["short", "long"])
def test_a_closed_pipe_is_not_an_error(tmp_path: Path, number: int) -> None:
    """As with ``head``, whether the text breaks off while it is printed or at the end."""
    report = fold([], num_spec_tokens=0).to_json()
    report["finish_reasons"] = {f"{'x' * 99} {at}": 1 for at in range(number)}
    (tmp_path / "report.json").write_text(json.dumps(report))
    (tmp_path / "manifest.json").write_text("{}")
    done = specgen("report", tmp_path, "--json", into="| true")
    assert (done.returncode, done.stderr) == (141, "")
    done = specgen("report", tmp_path, "--json", into="> /dev/full")
    assert (done.returncode, done.stderr) == (
        2,
        "specgen: standard output cannot be written (No space left on device): free space there, or name a directory "
        "with --output\n",
    )


@pytest.mark.slow
def test_rows_that_stdout_does_not_take_are_no_bug(pair: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "own.jsonl", [{"prompt": "Tom"}])
    models = ["--model", pair / "target", "--drafter", pair / "head", "--max-new-tokens", 2]
    done = specgen("generate", *models, "--dataset", rows, "--output", "-", "--quiet", into="> /dev/full")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "specgen: standard output cannot be written (No space left"
    )


def test_a_word_that_is_not_utf_8_is_refused() -> None:
    done = specgen("report", "b\udcff", into="")
    message = "specgen: 'b\\udcff' is not UTF-8: rename it, or write it so\n"
    assert (done.returncode, done.stderr) == (2, message)
