"""Torch pickles as untrusted data: loaded only if they contain plain tensors; no code in them is run."""

import zipfile
from collections.abc import Iterator
from pathlib import Path
from pickletools import genops
from typing import IO

import torch
from torch import Tensor

from specgen.config import UserError, first_line, require, shown

_ZIP = b"PK\x03\x04"
_PLAIN = {  # the parts of tensors; the unpickler allows more, such as byte arrays of any size
    "collections OrderedDict",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_tensor",
    "torch._utils _rebuild_tensor_v2",
    "torch.storage UntypedStorage",
}
_LEGACY_PICKLES = 4  # magic number, version, system, tensors


def read_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU, mapped into memory where the format (torch 1.6 and later) allows it.

    ``UserError`` where it is corrupt, has anything but tensors by name, or claims more bytes than it has.
    """
    try:
        with file.open("rb") as content:
            zipped = content.read(len(_ZIP)) == _ZIP
        _require_plain(file, zipped)
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
        require(isinstance(tensors, dict), f"it holds {type(tensors).__name__}, not tensors by name")
        for name, value in tensors.items():
            named = isinstance(name, str) and isinstance(value, Tensor)
            require(named, f"{shown(name)} is {type(value).__name__}, not a named tensor")
        claimed, held = sum(tensor.nbytes for tensor in tensors.values()), file.stat().st_size
        # A view may repeat a value without limit. Twice: tied tensors share their values.
        require(claimed <= 2 * held, f"its tensors claim {claimed} bytes, and it has {held}")
    except Exception as error:  # the library raises whatever its parsers raise
        raise UserError(
            f"{file} cannot be read as tensors ({first_line(error)}): use a safetensors version"
        ) from error
    return dict(tensors)


def _require_plain(file: Path, zipped: bool) -> None:
    for name in _imported(file, zipped):
        storage = name.startswith("torch ") and name.endswith("Storage")
        require(storage or name in _PLAIN, f"it imports {shown(name)}, which is not part of a plain tensor")


def _imported(file: Path, zipped: bool) -> Iterator[str]:
    """The imports of the pickles in a file, as ``module name``, read without running them."""
    if not zipped:
        with file.open("rb") as content:
            for _ in range(_LEGACY_PICKLES):
                yield from _imports(content)
        return
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            # Torch does not compress; compressed data could be a thousand times the size of the file.
            require(entry.compress_type == zipfile.ZIP_STORED, f"{shown(entry.filename)} is compressed")
            if entry.filename.endswith("/data.pkl"):
                with archive.open(entry) as content:
                    yield from _imports(content)


def _imports(content: IO[bytes]) -> Iterator[str]:
    for opcode, argument, _ in genops(content):
        if opcode.name in ("GLOBAL", "INST", "STACK_GLOBAL"):
            yield str(argument)
