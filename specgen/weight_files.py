"""Weight files on disk: safetensors and torch pickles, single or sharded; headers first, tensors on demand."""

import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgen.config import require

_STEMS = (("model", ".safetensors"), ("pytorch_model", ".bin"))  # the first that is there is read
_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "BOOL": "bool",
}


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """What a tensor is and where it lies, known without reading its data."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as torch names it: "float32"

    @property
    def numel(self) -> int:
        """The number of its values."""
        size = 1
        for dim in self.shape:
            size *= dim
        return size


def tensor_infos(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint directory by name.

    ``ValueError`` when there are no weights, or a file is missing, broken, outside the directory or unsafe.
    """
    infos: dict[str, TensorInfo] = {}
    for file in _weight_files(directory):
        for name, info in _infos(file):
            require(
                name not in infos, f"{name!r} is in two weight files of {directory}: remove the stale one"
            )
            infos[name] = info
    return infos


def read_tensor(name: str, info: TensorInfo) -> Tensor:
    """The tensor as it is stored, on the CPU."""
    if info.file.suffix == ".safetensors":
        with _safetensors(info.file) as handle:
            tensor: Tensor = handle.get_tensor(name)
            return tensor
    return _torch_file(info.file, "cpu")[name]


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; ``ValueError`` when it cannot be read or is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{file} cannot be read ({error.strerror}): give a checkpoint's directory"
        ) from error
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}): download it again") from error
    require(isinstance(content, dict), f"{file} holds no JSON object: download it again")
    return dict(content)


def _weight_files(directory: Path) -> list[Path]:
    for stem, suffix in _STEMS:
        index, single = directory / f"{stem}{suffix}.index.json", directory / f"{stem}{suffix}"
        if index.exists():
            return _sharded(directory, index)
        if single.exists():
            return [single]
    raise ValueError(
        f"{directory} has no weights: add model.safetensors or pytorch_model.bin, or their shards and index"
    )


def _sharded(directory: Path, index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    require(
        isinstance(weight_map, Mapping) and bool(weight_map), f"{index} has no weight_map: download it again"
    )
    assert isinstance(weight_map, Mapping)
    files = []
    for name in sorted({str(value) for value in weight_map.values()}):
        # An index is downloaded data: it must not make us read what lies elsewhere.
        require(name == Path(name).name, f"{index} names {name!r}: only files beside the index are read")
        require((directory / name).is_file(), f"{index} names {name!r}, which is missing: download it")
        files.append(directory / name)
    return files


def _infos(file: Path) -> Iterator[tuple[str, TensorInfo]]:
    if file.suffix == ".safetensors":
        with _safetensors(file) as handle:
            for name in handle.keys():  # noqa: SIM118  the handle is no mapping
                part = handle.get_slice(name)
                dtype = _SAFETENSORS_DTYPES.get(part.get_dtype(), part.get_dtype())
                yield name, TensorInfo(file=file, shape=tuple(part.get_shape()), dtype=dtype)
        return
    for name, tensor in _torch_file(file, "meta").items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield name, TensorInfo(file=file, shape=tuple(tensor.shape), dtype=dtype)


@contextmanager
def _safetensors(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors ({error}): download it again") from error


def _torch_file(file: Path, device: str) -> dict[str, Tensor]:
    """The tensors of a pickle, mapped into memory where the format allows it."""
    try:
        # weights_only: a pickle that holds anything but tensors is refused, not run.
        mapped = zipfile.is_zipfile(file)
        tensors = torch.load(file, map_location=device, weights_only=True, mmap=mapped)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{file} cannot be read as tensors ({reason}): use a safetensors version") from error
    plain = isinstance(tensors, dict) and all(isinstance(value, Tensor) for value in tensors.values())
    require(plain, f"{file} holds other things than named tensors: use a safetensors version")
    return dict(tensors)
