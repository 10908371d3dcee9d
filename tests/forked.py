"""A pair on disk that a test may damage, and the CLI on it in a forked process, bounded in time and memory."""

import gc
import os
import resource
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from specgen.cli import main as cli
from specgen.text.tokenizer import Message, load_tokenizer
from tests.commands import write_rows
from tests.tiny_checkpoints import write_head, write_target
from tests.tiny_tokenizers import write_byte_level
from tests.waiting import LIMIT

_MIB = 1 << 20


def write_pair(path: Path) -> Path:
    """Write ``target`` with a tokenizer, ``head``, and ``prompts.jsonl`` with a raw prompt and a chat."""
    config = write_target(path / "target", vocab_size=320, hidden_size=32)
    write_byte_level(path / "target")
    write_head(path / "head", config)
    rows = [{"prompt": "Tom has"}, {"messages": [{"role": "user", "content": "Hi"}]}]
    write_rows(path / "prompts.jsonl", rows)
    # import here what every forked process would import
    load_tokenizer(str(path / "target")).render_chat([Message(role="user", content="x")])
    return path


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended; ``code`` is negative if a signal ended it."""

    code: int
    out: str
    err: str
    grown: int  # peak memory minus memory at the start, in MiB


def inspect_pair(path: Path) -> Ended:
    """``specgen inspect`` on the pair in ``path``, with less memory than a test's files may claim."""
    return run_cli(["inspect", "target", "head"], path, more_mib=1024)


def generate_with_pair(path: Path) -> Ended:
    """``specgen generate`` with the pair in ``path``, on its two prompts, into the directory ``run`` beside it."""
    files = ["--model", "target", "--drafter", "head", "--dataset", "prompts.jsonl", "--output", "run"]
    limits = ["--max-new-tokens", "2", "--num-spec-tokens", "2", "--device", "cpu", "--kv-memory", "1MiB"]
    return run_cli(["generate", *files, *limits], path, more_mib=1024)


def run_cli(arguments: list[str], directory: Path, *, more_mib: int) -> Ended:
    """Run ``specgen`` with ``arguments`` in ``directory``; it is killed after a minute of processors.

    It can map ``more_mib`` more than this process. Modules are already imported, so it starts at once.
    """
    files = [directory / name for name in ("stdout", "stderr", "grown")]
    child = os.fork()
    if child == 0:
        gc.freeze()  # or the child's collector would touch, and so copy, the parent's memory
        code = 70
        try:
            code = _command(arguments, directory, files, more_mib)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    out, err, grown = (file.read_text(errors="replace") if file.exists() else "" for file in files)
    for file in files:
        file.unlink(missing_ok=True)
    return Ended(code=os.waitstatus_to_exitcode(status), out=out, err=err, grown=int(grown or 0))


def _command(arguments: list[str], directory: Path, files: list[Path], more_mib: int) -> int:
    for number, file in enumerate(files[:2], start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.chdir(directory)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork, and it warns
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(LIMIT))  # where it waits
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    before, mapped = _resident_mib(), int(Path("/proc/self/statm").read_text().split()[0])
    limit = mapped * resource.getpagesize() + more_mib * _MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sys.argv = ["specgen", *arguments]
    code: object = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # a traceback for the user
        traceback.print_exc()
        code = 71
    sys.stdout.flush()
    sys.stderr.flush()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    files[2].write_text(str(max(0, peak - before)))
    return code if isinstance(code, int) else 0


def _resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // _MIB
