"""CUDA sources of this package, compiled by FlashInfer's means when they are first needed."""

import ctypes
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import torch

_FLAGS = ("-gencode=arch=compute_90a,code=sm_90a",)


def runs_on(device: torch.device) -> bool:
    """Whether they are built for ``device``, compute capability 9.0, and can be compiled; a line says where not."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and _compiles()


@cache
def _compiles() -> bool:
    reason = _not_compiled()
    if reason is not None:
        text = "some products and decode attention take other kernels, which are slower: %s"
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

    It is named after all that is compiled, so that no other version's is taken for it. ``folders`` hold headers of
    FlashInfer's, whose version is part of the path that a module is compiled in.
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
            mine = folder / f"{header}.{os.getpid()}"
            mine.write_text(text)
            mine.replace(folder / header)
    flags = [*(f"-D{macro}={value}" for macro, value in defines.items()), *_FLAGS]
    return gen_jit_spec(name, [source], extra_cuda_cflags=flags, extra_include_paths=[folder, *folders])


def compiled(spec: Any, symbol: str) -> Callable[..., int]:  # noqa: ANN401
    """Its function ``symbol``, which returns an error of CUDA's or 0; compiled now where that was not done before."""
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
