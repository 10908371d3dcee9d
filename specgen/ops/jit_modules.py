"""CUDA sources of this package and of FlashInfer: what a run needs is compiled side by side, before it.

Without this each is compiled where it is first used, one after the other: XQA for another number of rows in 10 s on 16
cores, the prefill kernel of FlashAttention 3 in 37 s.
"""

import ctypes
import logging
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from shutil import which
from threading import Thread
from typing import IO, Any

import torch

from specgen.config import UserError
from specgen.record.startup import compiling, phase

_POLL = 0.1  # seconds
_LAST_LINES = 15  # of a compiler's output
_WIDEST = 300  # characters of a line
_NINJAS = re.compile(r"\[\d+/\d+\] |FAILED: |ninja: ")  # how its own lines begin
_MEMORY = 2 << 30  # bytes of a compiler


@dataclass(frozen=True, kw_only=True)
class Module:
    """A module of FlashInfer's: ``spec`` makes its ``JitSpec``, and is called where FlashInfer is installed."""

    what: str  # as a bar names it
    spec: Callable[[], Any] = field(compare=False)
    longest: bool = False  # takes longer to compile than any that is not, however many files those have


def compile_missing(modules: Iterable[Module]) -> list[str]:
    """Compile those of ``modules`` that this machine has not compiled, or of other files; say which those were.

    ``UserError`` with the compiler's last lines where one cannot be. Another process that compiles the same ones is
    waited for. A module that was left half compiled is finished by FlashInfer when it is loaded.
    """
    modules = list(modules)
    if not modules:
        return []
    with phase("kernels"):
        return _compile_missing(modules)


@contextmanager
def compiled_meanwhile(modules: Sequence[Module]) -> Iterator[None]:
    """``compile_missing``, and the import of FlashInfer, beside what is done within; at its end they are waited for.

    What fails within is raised at once, and leaves the compilation to itself.
    """
    if not modules:
        yield
        return
    failed: list[BaseException] = []

    def work(context: Context) -> None:
        try:
            context.run(_compile_missing, modules)
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=work, args=(copy_context(),), daemon=True)  # no reason for a process to stay
    thread.start()
    yield
    with phase("kernels"):
        thread.join()
    if failed:
        raise failed[0]


def _compile_missing(modules: Sequence[Module]) -> list[str]:
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        return []
    with ExitStack() as locks:
        missing = _to_compile(_specs(modules))
        if not missing:
            return []
        from filelock import FileLock  # which FlashInfer depends on

        for each in sorted(missing, key=lambda each: str(each.spec.lock_path)):  # everybody in one order
            locks.enter_context(FileLock(each.spec.lock_path, thread_local=False))
        missing = _to_compile(missing)  # nor has another process meanwhile
        _compile(missing)
        return [each.what for each in missing]


@dataclass(frozen=True, kw_only=True)
class _Missing:
    what: str
    spec: Any  # flashinfer.jit.core.JitSpecNvcc
    longest: bool


def _specs(modules: Sequence[Module]) -> list[_Missing]:
    """Each module once: several uses of kernels may come down to one."""
    found = [_Missing(what=each.what, spec=each.spec(), longest=each.longest) for each in modules]
    return list({each.spec.name: each for each in reversed(found)}.values())[::-1]


def _to_compile(modules: Sequence[_Missing]) -> list[_Missing]:
    """Those without a library that is up to date."""
    with ThreadPoolExecutor() as pool:
        current = list(pool.map(lambda each: _is_current(each.spec), modules))
    return [each for each, is_current in zip(modules, current, strict=True) if not is_current]


def _is_current(spec: Any) -> bool:  # noqa: ANN401
    """Whether its library is there and ninja, asked as FlashInfer asks it at first use, would leave it as it is.

    It would not where a file has changed since, or lies elsewhere: another version of CUDA or torch, another
    environment that shares the cache.
    """
    if spec.is_aot or not spec.is_compiled:
        return bool(spec.is_aot)
    try:
        spec.write_ninja()
        command = ["ninja", "-n", "-C", str(spec.build_dir), "-f", str(spec.ninja_path)]
        said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).stdout
    except OSError:  # no ninja, or a cache that is not to be written to: it is used as it is, if it can be
        return True
    return b"no work to do" in said


class _Build:
    """A ninja at work. One for each module and in its own folder, so that FlashInfer's later finds nothing to do."""

    def __init__(self, module: _Missing, num_jobs: int) -> None:
        self.module = module
        module.spec.write_ninja()
        folder = str(module.spec.build_dir)
        command = ["ninja", "-v", "-C", folder, "-f", str(module.spec.ninja_path), "-j", str(num_jobs)]
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by stop
        try:
            self._process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise self._failed(f"ninja cannot be run ({error.strerror})") from error

    @property
    def done(self) -> bool:
        """``UserError`` where it has failed."""
        code = self._process.poll()
        if code is None:
            return False
        if code:
            self._output.seek(0)
            lines = self._output.read().decode(errors="replace").splitlines()
            if lines and "interrupted by user" in lines[-1]:  # Ctrl-C is for all processes of a terminal
                raise KeyboardInterrupt
            raise self._failed("the compiler's last lines:\n" + "\n".join(_last_lines(lines)))
        return True

    def _failed(self, how: str) -> UserError:
        return UserError(
            f"FlashInfer's module {self.module.spec.name} ({self.module.what}) cannot be compiled: install a CUDA "
            f"toolkit (nvcc) for this GPU and ninja, or use --attention sdpa; {how}"
        )

    def stop(self) -> None:
        """End it; ninja takes back what is half written."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        self._output.close()


def _last_lines(output: Sequence[str]) -> list[str]:
    """Of what the first command that failed has printed: ninja prints it below ``FAILED`` and the command."""
    failed = next((number for number, line in enumerate(output) if line.startswith("FAILED:")), None)
    said = (
        [] if failed is None else list(takewhile(lambda line: not _NINJAS.match(line), output[failed + 2 :]))
    )
    return [line[:_WIDEST] for line in (said or output)[-_LAST_LINES:]]


def _compile(missing: Sequence[_Missing]) -> None:
    """Side by side: the longest first with all their files at once, and others beside them as there is room."""
    room, running = _room(), list[_Build]()
    left = sorted(missing, key=lambda each: (not each.longest, -len(each.spec.sources)))
    try:
        while left or running:
            while left and (not running or _fits(left[0], running, room)):
                running.append(_Build(left.pop(0), room))
                _tell(missing, running, left)
            time.sleep(_POLL)
            for build in [build for build in running if build.done]:
                build.stop()
                running.remove(build)
                _tell(missing, running, left)
    finally:
        for build in running:
            build.stop()


def _fits(module: _Missing, running: Sequence[_Build], room: int) -> bool:
    return len(module.spec.sources) + sum(len(build.module.spec.sources) for build in running) <= room


def _tell(missing: Sequence[_Missing], running: Sequence[_Build], left: Sequence[_Missing]) -> None:
    to_do = [*(build.module.what for build in running), *(each.what for each in left)]
    compiling(len(missing) - len(to_do), len(missing), to_do)


def _room() -> int:
    """Compilers at once: ``MAX_JOBS``, which FlashInfer heeds as well, or one for each core, as far as memory goes.

    With more the file that takes longest, which the run waits for, would share a core.
    """
    asked = os.environ.get("MAX_JOBS", "")
    if asked.isdigit():
        return max(int(asked), 1)
    return max(min(len(os.sched_getaffinity(0)), _free_memory() // _MEMORY), 1)


def _free_memory() -> int:
    """Bytes that Linux can give to new processes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


_FLAGS = ("-gencode=arch=compute_90a,code=sm_90a",)


def runs_on(device: torch.device) -> bool:
    """Whether this package's CUDA sources are for ``device``, of compute capability 9.0, and can be compiled.

    Where they cannot a line says why.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and compiles()


@cache
def compiles() -> bool:
    """Whether this package's CUDA sources can be compiled here."""
    reason = _not_compiled()
    if reason is not None:
        text = "some GEMMs and attention take other kernels, which are slower: %s"
        logging.getLogger("specgen").warning(text, reason)
    return reason is None


def _not_compiled() -> str | None:
    """Why they cannot be compiled here; None: they can."""
    if find_spec("flashinfer") is None:
        return "flashinfer-python, which compiles specgen's kernels, is not installed"
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        return "FLASHINFER_DISABLE_JIT is set"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    for tool in ("nvcc", "ninja"):
        if which(tool) is None and not (Path(home) / "bin" / tool).exists():
            return f"{tool} is not installed"
    return None


def source_spec(
    name: str,
    source: Path,
    defines: Mapping[str, int],
    headers: Mapping[str, str],
    folders: Sequence[Path] = (),
) -> Any:  # noqa: ANN401
    """The ``JitSpec`` of ``source`` with macros and generated ``headers``, texts by file name.

    It is named after all that is compiled, so that no other version's is taken for it; its ``headers`` come before a
    library's. ``folders`` hold headers of FlashInfer's, whose version is part of the path that a module is compiled in.
    """
    from flashinfer.jit import env
    from flashinfer.jit.core import gen_jit_spec

    digest = sha256(source.read_bytes() + "".join(headers.values()).encode()).hexdigest()[:12]
    values = "_".join(str(value) for value in defines.values())
    name = f"specgen_{name}_{values}_{digest}"
    folder = env.FLASHINFER_GEN_SRC_DIR / name
    folder.mkdir(parents=True, exist_ok=True)
    for header, text in headers.items():
        if not (folder / header).exists():  # as a whole: another rank may read it
            (folder / header).parent.mkdir(parents=True, exist_ok=True)
            mine = folder / f"{header}.{os.getpid()}"
            mine.write_text(text)
            mine.replace(folder / header)
    flags = [*(f"-D{macro}={value}" for macro, value in defines.items()), *_FLAGS]
    return gen_jit_spec(name, [source], extra_cuda_cflags=flags, extra_include_paths=[folder, *folders])


@cache
def compiled(make_spec: Callable[..., Any], symbol: str, *sizes: Hashable) -> Callable[..., int]:
    """The function ``symbol`` of what ``make_spec`` makes for ``sizes``; it returns an error of CUDA's or 0.

    Compiled now where that was not done before.
    """
    spec = make_spec(*sizes)
    spec.build(need_lock=True)
    function = getattr(ctypes.CDLL(str(spec.get_library_path())), symbol)
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]


def pointers(tensors: Sequence[torch.Tensor | None]) -> list[ctypes.c_void_p]:
    """Arguments; NULL for None."""
    return [ctypes.c_void_p(None if each is None else each.data_ptr()) for each in tensors]


def current_stream(device: torch.device) -> ctypes.c_void_p:
    """The last argument of every function."""
    return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)


@cache
def num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
