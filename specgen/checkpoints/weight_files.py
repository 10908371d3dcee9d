"""Weight files: safetensors and torch pickles, single or sharded; headers first, tensors on demand.

They are untrusted data: a pickle is loaded only if it contains plain tensors, and no code in it is run.
"""

import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from pickletools import genops
from tempfile import TemporaryDirectory
from typing import IO, Any

import torch
from torch import Tensor

from specgen.checkpoints.rank_share import Cut
from specgen.config import UserError, first_line, require, shown
from specgen.config.errors import require_no_stand_in
from specgen.config.json_fields import load_json
from specgen.models.dflash import MASK_ID_TENSOR, MASK_TENSOR
from specgen.storage import file_state

_STEMS = (("model", ".safetensors"), ("pytorch_model", ".bin"))  # in order of preference
MASK_EMBEDDING = "mask_embedding.pt"  # of some DFlash heads, beside their weights
_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}
_PIECE = 16 << 20  # bytes that are compared at once
_LARGEST_JSON = 16 << 20  # bytes; the index of a thousand shards has 2 MiB


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """The header of a tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as torch names it: "float32"
    cut: Cut | None = None  # what is read of it; None: all
    stored: str | None = None  # its name in the file; None: the one that it is asked for by
    lora: "LowRank | None" = None  # what an adapter changes

    def is_like(self, other: "TensorInfo") -> bool:
        """Whether both are as large and of one type."""
        return (self.shape, self.dtype) == (other.shape, other.dtype)


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """A change of a weight: ``own`` in its place, if given, and ``scale`` * ``b`` @ ``a`` on top, in float32."""

    a: TensorInfo | None  # [r, in]
    b: TensorInfo | None  # [out, r]
    scale: float
    own: TensorInfo | None  # shaped as the weight
    transposed: bool  # of an embedding, [in, out]
    files: tuple[Path, ...]

    def of(self, weight: Tensor, cut: Cut | None) -> Tensor:
        """``weight``, of which ``cut`` is, in float32; ``UserError`` where the change is not finite."""
        found = weight if self.own is None else read_tensor("weight", replace(self.own, cut=cut))
        if self.a is None or self.b is None:
            return found
        change = self.scale * (read_tensor("lora_B", self.b).float() @ read_tensor("lora_A", self.a).float())
        require(
            bool(change.isfinite().all()),
            f"{self.a.file}: {self.a.stored} or its lora_B holds NaN or Inf, or both are too large at scale "
            f"{self.scale:g}",
        )
        change = change.T if self.transposed else change
        return found.float() + (change if cut is None else cut.of(change))


def headers(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one file by name."""
    return {name: replace(info, stored=name) for name, info in _infos(file)}


def tensor_infos(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint directory by name.

    ``UserError`` when there are no weights, or a file is missing, corrupt, outside the directory or unsafe, and for
    shards beside a single file with other tensors: some programs read these, others that. A pickle beside safetensors
    is read by none, but for the embedding of a mask token.
    """
    for stem, suffix in _STEMS:
        index, single = directory / f"{stem}{suffix}.index.json", directory / f"{stem}{suffix}"
        found: dict[Path, dict[str, TensorInfo]] = {}
        if index.exists():
            found[index] = _together(directory, _sharded(directory, index, suffix))
            lost = min(read_json(index)["weight_map"].keys() - found[index].keys(), default=None)
            require(
                lost is None,
                f"{index} names {shown(lost)}, which no file has: download again, or mend the index",
            )
        if single.exists():
            require(single.is_file(), f"{single} is not a regular file: download it again")
            found[single] = _together(directory, [single])
        if len(found) == 2:
            _require_copies(directory, found)
        if found:
            extra = directory / MASK_EMBEDDING
            return _with_mask_embedding(next(iter(found.values())), extra)
    raise UserError(
        f"{directory} has no weights: add model.safetensors or pytorch_model.bin, or their shards and index"
    )


def read_tensor(name: str, info: TensorInfo) -> Tensor:
    """The tensor as it is stored, on the CPU."""
    return dict(read_tensors({name: info}))[name]


def read_tensors(infos: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Tensor]]:
    """The tensors by name, on the CPU, file by file: each is opened once. As stored, unless an adapter changes them."""
    for name, tensor in _stored(infos):
        lora = infos[name].lora
        yield name, tensor if lora is None else lora.of(tensor, infos[name].cut)


def _stored(infos: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Tensor]]:
    for file in sorted({info.file for info in infos.values()}):
        names = [name for name, info in infos.items() if info.file == file]
        if file.suffix == ".safetensors":
            with _safetensors(file) as handle:
                for name in names:
                    cut, stored = infos[name].cut, infos[name].stored or name
                    yield name, handle.get_tensor(stored) if cut is None else cut.of(handle.get_slice(stored))
        else:
            tensors = read_pickle(file)
            for name in names:
                cut, tensor = infos[name].cut, tensors[infos[name].stored or name]
                yield name, (tensor if cut is None else cut.of(tensor)).clone()


def are_equal(one: tuple[str, TensorInfo], other: tuple[str, TensorInfo]) -> bool:
    """Whether two tensors, each its name and header, are equal byte for byte; asked again, only of changed files."""
    return _are_equal(one, other, (file_state(one[1].file), file_state(other[1].file)))


@lru_cache(maxsize=1 << 14)
def _are_equal(one: tuple[str, TensorInfo], other: tuple[str, TensorInfo], states: object) -> bool:
    del states  # of the files: another one is another question
    if not one[1].is_like(other[1]):
        return False
    ours, theirs = (
        torch.split(read_tensor(*each).flatten().view(torch.uint8), _PIECE) for each in (one, other)
    )
    return all(torch.equal(*pieces) for pieces in zip(ours, theirs, strict=True))


@contextmanager
def saved_head(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> Iterator[str]:
    """Save a draft head that is in memory; yields its directory, the ``drafter`` of an ``EngineConfig``.

    ``config`` holds what the head's ``config.json`` would, ``state_dict`` its tensors by the names of its checkpoint.
    The directory is temporary: it is removed at the end of the ``with`` block. ``UserError`` for a ``config`` that is
    no JSON and for values that are no tensors.
    """
    from safetensors.torch import save_file

    for name, value in state_dict.items():
        require(isinstance(value, Tensor), f"state_dict[{name!r}] is {shown(value)}: give tensors alone")
    try:
        said = json.dumps(dict(config))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the head's config is no JSON ({error}): give what its config.json would hold"
        ) from error
    with TemporaryDirectory(prefix="specgen-head-") as directory:
        Path(directory, "config.json").write_text(said)
        # copies, as tensors that share memory are refused
        tensors = {
            name: value.detach().to("cpu", copy=True).contiguous() for name, value in state_dict.items()
        }
        save_file(tensors, Path(directory, "model.safetensors"))
        yield directory


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint; ``UserError`` when it cannot be read or is none."""
    if os.path.exists(file):
        # Reading a pipe or a device would not end.
        require(os.path.isfile(file), f"{file} is not a regular file: download it again")
        size = os.path.getsize(file)
        too_large = f"{file} has {size} bytes, more than any such file needs: download it again"
        require(size <= _LARGEST_JSON, too_large)
    return load_json(file, "download it again, or give the directory of a checkpoint that is whole")


def _together(directory: Path, files: Iterable[Path]) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in _infos(file):
            known = name in infos
            require(not known, f"{shown(name)} is in two weight files of {directory}: remove the stale one")
            infos[name] = info
    return infos


def _with_mask_embedding(infos: dict[str, TensorInfo], file: Path) -> dict[str, TensorInfo]:
    """``infos`` and what ``file`` adds to them, if it is there."""
    if not file.exists():
        return infos
    require(file.is_file(), f"{file} is not a regular file: download it again")
    known = infos.keys() & {MASK_TENSOR, MASK_ID_TENSOR}
    require(not known, f"{MASK_TENSOR} is in {file.name} and in the weights beside it: remove one")
    return infos | dict(_infos(file))


def _require_copies(directory: Path, found: Mapping[Path, Mapping[str, TensorInfo]]) -> None:
    """``UserError`` unless both of ``found`` have the same tensors; only those that differ in no header are read."""
    (index, sharded), (single, whole) = found.items()
    by_header = (sharded.keys() ^ whole.keys()) or {
        name for name, info in whole.items() if not info.is_like(sharded[name])
    }
    copied = (
        name
        for name, info in whole.items()
        if sharded[name] != info and not are_equal((name, info), (name, sharded[name]))
    )
    other = min(by_header) if by_header else next(copied, None)
    require(
        other is None,
        f"{directory} has two models: {single.name} and the shards in {index.name} differ in {shown(other)}: "
        "remove the one that is stale",
    )


def _sharded(directory: Path, index: Path, suffix: str) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise UserError(f"{index} has no weight_map: download it again")
    files = []
    for name in sorted({str(value) for value in weight_map.values()}):
        # An index is untrusted data: it must not make us read files elsewhere, or other than weights.
        is_beside = name == Path(name).name and name.endswith(suffix)
        require(is_beside, f"{index} names {shown(name)}: only {suffix} files beside the index are read")
        there = os.path.isfile(directory / name)  # false also for names that no file can have
        require(there, f"{index} names {shown(name)}, which is missing: download it")
        files.append(directory / name)
    return files


def _infos(file: Path) -> Iterator[tuple[str, TensorInfo]]:
    if file.suffix == ".safetensors":
        with _safetensors(file) as handle:
            for name in handle.keys():  # noqa: SIM118  the handle is not a mapping
                part = handle.get_slice(name)
                dtype = _SAFETENSORS_DTYPES.get(part.get_dtype(), part.get_dtype())
                yield name, TensorInfo(file=file, shape=tuple(part.get_shape()), dtype=dtype)
        return
    for name, tensor in read_pickle(file).items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield name, TensorInfo(file=file, shape=tuple(tensor.shape), dtype=dtype)


@contextmanager
def _safetensors(file: Path) -> Iterator[Any]:
    from safetensors import safe_open

    try:
        file.open("rb").close()  # raises the reason; the library calls every unreadable file missing
        with safe_open(file, framework="pt") as handle:
            yield handle
    except Exception as error:  # the library raises whatever its parsers raise
        require_no_stand_in(file)
        raise UserError(
            f"{file} cannot be read as safetensors ({first_line(error)}): download it again"
        ) from error


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

    Those are the same for all who ask: not to be written to. ``UserError`` where the file is corrupt, has anything but
    tensors by name, or claims more bytes than it has.
    """
    try:
        with file.open("rb") as content:
            zipped = content.read(len(_ZIP)) == _ZIP
        return _mapped(file, file_state(file)) if zipped else _unpickled(file, zipped)
    except Exception as error:  # the library raises whatever its parsers raise
        require_no_stand_in(file)
        remedy = "download it again" if file.name == MASK_EMBEDDING else "use a safetensors version"
        raise UserError(f"{file} cannot be read as tensors ({first_line(error)}): {remedy}") from error


@lru_cache(maxsize=64)  # tensors are asked for one by one, each time all of them would be unpickled
def _mapped(file: Path, state: object) -> dict[str, Tensor]:
    del state  # of the file: another one has other tensors
    return _unpickled(file, zipped=True)


def _unpickled(file: Path, zipped: bool) -> dict[str, Tensor]:
    _require_plain(file, zipped)
    tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    if file.name == MASK_EMBEDDING:
        tensors = _of_mask(tensors)
    require(isinstance(tensors, dict), f"it holds {type(tensors).__name__}, not tensors by name")
    for name, value in tensors.items():
        named = isinstance(name, str) and isinstance(value, Tensor)
        require(named, f"{shown(name)} is {type(value).__name__}, not a named tensor")
    claimed, held = sum(tensor.nbytes for tensor in tensors.values()), file.stat().st_size
    # A view may repeat a value without limit. Twice: tied tensors share their values.
    require(claimed <= 2 * held, f"its tensors claim {claimed} bytes, and it has {held}")
    return dict(tensors)


def _of_mask(found: object) -> dict[str, object]:
    """The vector of a ``mask_embedding.pt``, which is there alone or beside the id of the token that it is of."""
    parts: dict[Any, Any] = found if isinstance(found, dict) else {"embedding": found}
    require(
        "embedding" in parts and parts.keys() <= {"embedding", "mask_token_id"},
        f"it holds {shown(sorted(map(str, parts)))}: only a tensor, or embedding and mask_token_id, is supported",
    )
    vector, token = parts["embedding"], parts.get("mask_token_id")
    if isinstance(vector, Tensor) and vector.dim() and vector.shape[-1] == vector.numel():
        vector = vector.flatten()
    if "mask_token_id" not in parts:
        return {MASK_TENSOR: vector}
    require(type(token) is int, f"mask_token_id is {shown(token)}, not a number")
    return {MASK_TENSOR: vector, MASK_ID_TENSOR: torch.tensor(token)}


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
