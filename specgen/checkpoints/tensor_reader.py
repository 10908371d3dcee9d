"""How a model's tensors come from its checkpoint: each read once, checked, and put on the device layer by layer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgen.checkpoints.weight_files import TensorInfo, read_tensor, read_tensors
from specgen.config import UserError, require, shown
from specgen.models.take import Arrange
from specgen.ops.weight import Weight

_FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint directory: its configs and the headers of its tensors."""

    name: str  # as the user gave it
    path: Path
    config: Mapping[str, Any]  # config.json
    generation: Mapping[str, Any]  # generation_config.json, empty where there is none
    tensors: Mapping[str, TensorInfo]

    @property
    def files(self) -> list[Path]:
        """The weight files, sorted by name."""
        return sorted({info.file for info in self.tensors.values()})

    def read(self, name: str) -> Tensor | None:
        """A tensor as stored, on the CPU; None where there is none of that name."""
        info = self.tensors.get(name)
        return None if info is None else read_tensor(name, info)


@dataclass(frozen=True, kw_only=True)
class TensorReader:
    """The ``Take`` of a checkpoint; on the ``meta`` device it checks names and shapes and reads nothing."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    taken: dict[str, int] = field(default_factory=dict)  # bytes on the device by name

    def __call__(self, name: str, shape: tuple[int, ...], arrange: Arrange | None = None) -> Tensor:
        return self._read(name, self._float(name, shape), self.dtype, arrange)

    def linear(self, num_out: Mapping[str, int], num_in: int, *, bias: bool = False) -> Weight:
        weights = [Weight(data=self(f"{name}.weight", (n, num_in))) for name, n in num_out.items()]
        if bias:
            biases = [self(f"{name}.bias", (n,)) for name, n in num_out.items()]
            weights = [replace(weight, bias=each) for weight, each in zip(weights, biases, strict=True)]
        return Weight.joined(weights)

    def flat(self, name: str, length: int) -> Tensor:
        info = self.checkpoint.tensors.get(name)
        fits = info is not None and prod(info.shape) == length
        return self(name, info.shape if fits and info is not None else (length,)).flatten()

    def scalar(self, name: str) -> float:
        info = self.checkpoint.tensors[name]
        require(
            prod(info.shape) == 1,
            f"{self.checkpoint.name}: {name} has shape {shown(list(info.shape))}: one number is supported",
        )
        info = self._float(name, info.shape)
        self.taken[name] = 0  # it stays on the host
        return 1.0 if self.device.type == "meta" else float(read_tensor(name, info))

    def stacked(self, names: Sequence[Sequence[str]], shape: tuple[int, int]) -> Tensor:
        infos = {name: self._float(name, shape) for group in names for name in group}
        whole = torch.empty(len(names), len(names[0]), *shape, dtype=self.dtype, device=self.device)
        places = {
            name: part
            for group, rows in zip(names, whole, strict=True)
            for name, part in zip(group, rows, strict=True)
        }
        if self.device.type != "meta":
            for name, tensor in read_tensors(infos):
                places[name].copy_(tensor)
        self.taken.update((name, part.nbytes) for name, part in places.items())
        return whole.flatten(1, 2)

    def packed(self, name: str, shape: tuple[int, ...], arrange: Arrange) -> Tensor:
        info = self._info(name, shape)
        require(
            info.dtype == "uint8",
            f"{self.checkpoint.name}: {name} is stored as {info.dtype}, not as bytes: config.json is of other weights",
        )
        return self._read(name, info, torch.uint8, arrange)

    def __contains__(self, name: object) -> bool:
        return name in self.checkpoint.tensors

    def _read(self, name: str, info: TensorInfo, dtype: torch.dtype, arrange: Arrange | None) -> Tensor:
        if self.device.type == "meta":
            tensor = torch.empty(info.shape, dtype=dtype, device=self.device)
        else:
            tensor = read_tensor(name, info).to(self.device, dtype)
        if arrange is not None:
            tensor = arrange(tensor).contiguous()  # where it is fast, and there is room for one tensor more
        self.taken[name] = tensor.nbytes
        return tensor

    def _float(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._info(name, shape)
        require(
            info.dtype in _FLOATS,
            f"{self.checkpoint.name}: {name} is stored as {info.dtype}: quantized weights are not supported",
        )
        return info

    def _info(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self.checkpoint.tensors.get(name)
        if info is None:
            raise UserError(f"{self.checkpoint.name} has no tensor {name!r}: the checkpoint is incomplete")
        require(
            info.shape == shape,
            f"{self.checkpoint.name}: {name} has shape {shown(list(info.shape))}, but config.json asks for "
            f"{list(shape)}: they are of different models, download both again",
        )
        return info

    def finish(self, ignored: Iterable[str]) -> None:
        """``UserError`` if a tensor was neither taken nor is in ``ignored``."""
        unknown = sorted(set(self.checkpoint.tensors) - set(self.taken) - set(ignored))
        names = ", ".join(shown(name) for name in unknown[:2])
        require(
            not unknown,
            f"{self.checkpoint.name} has {len(unknown)} unknown tensors, such as {names}: "
            "its architecture or variant is not supported",
        )
