"""Checkpoints on disk: what is in them, their tensors on demand, and the strict way from names to a model."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgen.config import require
from specgen.models.config import Eagle3Config, TargetConfig
from specgen.models.eagle3 import Eagle3Head
from specgen.models.llama import Llama
from specgen.models.weights import Shape
from specgen.ops import bind_ops

_DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "BOOL": "bool",
    "I64": "int64",
    "I32": "int32",
}
_TOKENIZER = ("*.model", "*.jinja", "*.txt")  # beside the JSON files; small


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where a tensor is and what it is, known without reading its data."""

    file: Path
    shape: Shape
    dtype: str  # as torch names it: "float32"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint directory: parsed configs, and every tensor by name."""

    name: str  # as the user gave it
    path: Path
    config: Mapping[str, Any]  # config.json
    generation: Mapping[str, Any]  # generation_config.json, empty if absent
    tensors: Mapping[str, TensorInfo]

    @property
    def files(self) -> list[Path]:
        """The weight files, sorted."""
        return sorted({info.file for info in self.tensors.values()})

    def read(self, name: str) -> Tensor:
        """One tensor as stored, on the CPU."""
        file = self.tensors[name].file
        if file.suffix == ".safetensors":
            with _safetensors(file) as handle:
                tensor: Tensor = handle.get_tensor(name)
                return tensor
        tensor = _torch_file(file, "cpu")[name]
        return tensor


def open_checkpoint(path_or_hub_id: str) -> Checkpoint:
    """A local directory or a Hugging Face hub id (downloaded, or found in the cache); headers only.

    ``ValueError`` when it is neither, or when its files are missing, broken or unsafe.
    """
    path = Path(path_or_hub_id)
    if not path.is_dir():
        path = _download(path_or_hub_id)
    return Checkpoint(
        name=path_or_hub_id,
        path=path,
        config=_json(path / "config.json"),
        generation=_json(path / "generation_config.json")
        if (path / "generation_config.json").exists()
        else {},
        tensors=_tensor_infos(path),
    )


def target_config(checkpoint: Checkpoint) -> TargetConfig:
    """The config of a target; the ids that end a text come from generation_config.json where it names them."""
    eos = checkpoint.generation.get("eos_token_id", checkpoint.config.get("eos_token_id"))
    return TargetConfig.from_hf({**checkpoint.config, "eos_token_id": eos})


def load_target(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Llama:
    """The target's weights as ``dtype`` on ``device``; ``ValueError`` for missing, unknown or misshapen tensors."""
    reader = _Reader(checkpoint, dtype, device)
    model = Llama.build(target_config(checkpoint), reader.take, bind_ops(device))
    reader.finish(Llama.ignored_tensors(model.config))
    return model


def load_drafter(
    checkpoint: Checkpoint, target: Llama, dtype: torch.dtype, device: torch.device
) -> Eagle3Head:
    """The head's weights as ``dtype`` on ``device``, checked against the ``target`` that it drafts for."""
    config = Eagle3Config.from_hf(checkpoint.config, target.config, frozenset(checkpoint.tensors))
    reader = _Reader(checkpoint, dtype, device)
    head = Eagle3Head.build(config, reader.take, target.embedding, bind_ops(device))
    reader.finish(Eagle3Head.ignored_tensors())
    return head


def fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 over the contents of config.json and the weight files."""
    total = hashlib.sha256()
    for file in (checkpoint.path / "config.json", *checkpoint.files):
        with file.open("rb") as content:
            total.update(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


class _Reader:
    """Hands tensors out by name, once, and says at the end what nobody asked for."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device
        self.taken: set[str] = set()

    def take(self, name: str, shape: Shape) -> Tensor:
        """The tensor ``name``, which must have ``shape``; floats come as the reader's dtype."""
        info = self.checkpoint.tensors.get(name)
        require(
            info is not None, f"{self.checkpoint.name} has no tensor {name!r}: the checkpoint is incomplete"
        )
        assert info is not None
        require(
            info.shape == shape,
            f"{self.checkpoint.name}: {name} has shape {list(info.shape)} but its config asks for {list(shape)}",
        )
        self.taken.add(name)
        tensor = self.checkpoint.read(name)
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

    def finish(self, ignored: Iterable[str]) -> None:
        """``ValueError`` if a tensor was neither taken nor is ``ignored``."""
        unknown = sorted(set(self.checkpoint.tensors) - self.taken - set(ignored))
        require(
            not unknown,
            f"{self.checkpoint.name} has {len(unknown)} tensors that this model does not know, first "
            f"{unknown[0] if unknown else ''!r}: it is another architecture or a newer format",
        )


def _tensor_infos(path: Path) -> dict[str, TensorInfo]:
    infos = {}
    for file in _weight_files(path):
        entries = _safetensors_infos(file) if file.suffix == ".safetensors" else _torch_infos(file)
        for name, info in entries:
            require(name not in infos, f"{name!r} is in two files of {path}: remove the stale one")
            infos[name] = info
    return infos


def _weight_files(path: Path) -> list[Path]:
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        index, single = path / f"{stem}{suffix}.index.json", path / f"{stem}{suffix}"
        if index.exists():
            names = sorted(set(_json(index).get("weight_map", {}).values()))
            return [_inside(path, name, index) for name in names]
        if single.exists():
            return [single]
    raise ValueError(
        f"{path} has no model.safetensors or pytorch_model.bin, single or with an index: add the weights"
    )


def _inside(path: Path, name: str, index: Path) -> Path:
    plain = name == Path(name).name and name not in ("", ".", "..")
    require(plain, f"{index} names the file {name!r}: only files of its own directory are read")
    require((path / name).is_file(), f"{index} names {name!r}, which is not there: download it")
    return path / name


def _safetensors_infos(file: Path) -> Iterator[tuple[str, TensorInfo]]:
    with _safetensors(file) as handle:
        for name in handle.keys():  # noqa: SIM118  the handle is no mapping
            part = handle.get_slice(name)
            dtype = _DTYPES.get(part.get_dtype(), part.get_dtype())
            yield name, TensorInfo(file=file, shape=tuple(part.get_shape()), dtype=dtype)


@contextmanager
def _safetensors(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read as safetensors ({error}): download it again") from error


def _torch_infos(file: Path) -> Iterator[tuple[str, TensorInfo]]:
    for name, tensor in _torch_file(file, "meta").items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield name, TensorInfo(file=file, shape=tuple(tensor.shape), dtype=dtype)


def _torch_file(file: Path, device: str) -> dict[str, Tensor]:
    # weights_only: a pickle that holds anything but tensors is refused, not run.
    tensors: dict[str, Tensor] = torch.load(file, map_location=device, weights_only=True)
    return tensors


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{file} cannot be read ({error.strerror}): give the directory of a checkpoint"
        ) from error
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}): download it again") from error
    require(isinstance(content, dict), f"{file} does not hold a JSON object: download it again")
    return dict(content)


def _download(hub_id: str) -> Path:
    require(
        re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", hub_id) is not None,
        f"{hub_id!r} is neither a directory nor a hub id of the form 'owner/name'",
    )
    from huggingface_hub import snapshot_download

    def fetch(weights: str) -> Path:
        patterns = ["*.json", *_TOKENIZER, weights]
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=["*/*"]))

    try:
        path = fetch("*.safetensors")
        return path if any(path.glob("*.safetensors")) else fetch("pytorch_model*.bin")
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{hub_id!r} is no directory here and could not be had from the hub: {reason}"
        ) from error
