"""How a model's tensors come from its checkpoint: each read once, checked, and put on the device layer by layer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from specgen.checkpoints.rank_share import RankShare
from specgen.checkpoints.weight_files import MASK_EMBEDDING, TensorInfo, read_tensor, read_tensors
from specgen.config import UserError, require, shown
from specgen.device import SINGLE_RANK, Ranks
from specgen.models.fp8_config import Fp8Config
from specgen.models.loader import Arrange
from specgen.ops.fp8 import in_fp8
from specgen.ops.weight import GROUP, Weight
from specgen.storage import file_state

FLOATS = ("float32", "bfloat16", "float16", "float64")
E4M3 = "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint directory: its configs and the headers of its tensors."""

    name: str  # as the user gave it
    path: Path
    config: Mapping[str, Any]  # config.json
    generation: Mapping[str, Any]  # generation_config.json, empty where there is none
    tensors: Mapping[str, TensorInfo]
    state: frozenset[tuple[int, ...]] = frozenset()  # see ``states_of``: by it its files are known again
    lora: str | None = None  # the adapter that is merged into ``tensors`` as they are read

    @property
    def files(self) -> list[Path]:
        """The weight files, sorted by name."""
        return sorted({info.file for info in self.tensors.values()})

    def is_unchanged(self) -> bool:
        """Whether its files are still those that were opened."""
        try:
            return self.state == states_of(self.path, self.tensors)
        except OSError:
            return False

    def read(self, name: str) -> Tensor | None:
        """A tensor as stored, on the CPU; None where there is none of that name."""
        info = self.tensors.get(name)
        return None if info is None else read_tensor(name, info)


# What is needed besides the weights; tokenizers among them
BESIDES = (MASK_EMBEDDING, "*.json", "*.jinja", "*.model", "merges.txt")


def files_in(path: Path, tensors: Mapping[str, TensorInfo]) -> set[Path]:
    """The files of a checkpoint in ``path``: those of ``tensors``, an adapter's too, configs and the tokenizer's."""
    others = {file for pattern in BESIDES for file in path.glob(pattern) if file.is_file()}
    adapter = {file for info in tensors.values() if info.lora is not None for file in info.lora.files}
    return others.union(adapter, (info.file for info in tensors.values()))


def states_of(path: Path, tensors: Mapping[str, TensorInfo]) -> frozenset[tuple[int, ...]]:
    """What identifies these files as they are now."""
    return frozenset(map(file_state, files_in(path, tensors)))


_PIECE = 16 << 20  # bytes
_THREADS = 8
_SMALL = 1 << 20  # bytes, up to which the detour does not pay


class Fetched(Protocol):
    """As ``torch.cuda.Event``: whether the GPU has fetched what was in a buffer."""

    def record(self, stream: Any) -> None: ...  # noqa: ANN401
    def synchronize(self) -> None: ...


class Upload:
    """Copies tensors from the host into tensors of a GPU, in the order of its current stream.

    Threads copy pieces into pinned memory, from where the GPU fetches them: a copy straight from a mapped file goes
    through one thread of the driver's, at a few GB/s.

    ``pinned`` makes a buffer of so many bytes, ``fetched`` the event that goes with it; a buffer is written only when
    its event says that the GPU is done with it.
    """

    def __init__(
        self,
        pinned: Callable[[int], Tensor] = lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True),
        fetched: Callable[[], Fetched] = torch.cuda.Event,
    ) -> None:
        self._threads = ThreadPoolExecutor(_THREADS)
        self._buffers: SimpleQueue[tuple[Tensor, Fetched]] = SimpleQueue()
        for _ in range(_THREADS):
            self._buffers.put((pinned(_PIECE), fetched()))

    def close(self) -> None:
        """Let go of the threads; the buffers go when the GPU has fetched them."""
        self._threads.shutdown()

    def into(self, target: Tensor, source: Tensor, stream: Any) -> None:  # noqa: ANN401
        """Copy ``source``, on the host, into ``target`` on the device of ``stream``; both are contiguous and alike.

        What follows in ``stream`` sees it.
        """
        assert target.dtype == source.dtype
        assert target.shape == source.shape
        assert target.is_contiguous()
        assert source.is_contiguous()
        if source.nbytes <= _SMALL:
            target.copy_(source)
            return
        here, there = (each.view(-1).view(torch.uint8) for each in (source, target))
        pieces = [slice(start, start + _PIECE) for start in range(0, len(here), _PIECE)]
        for done in [self._threads.submit(self._piece, here[each], there[each], stream) for each in pieces]:
            done.result()

    def _piece(self, source: Tensor, target: Tensor, stream: Any) -> None:  # noqa: ANN401
        """Of bytes ``[n]``."""
        buffer, fetched = self._buffers.get()
        try:
            fetched.synchronize()
            mine = buffer[: len(source)]
            mine.numpy()[:] = source.numpy()  # by this thread alone; torch would start several more in each
            with torch.cuda.stream(stream):  # of its device, which is another thread's affair
                target.copy_(mine, non_blocking=True)
            fetched.record(stream)
        finally:
            self._buffers.put((buffer, fetched))


@contextmanager
def uploading(device: torch.device) -> Iterator[Upload | None]:
    """For tensors to a GPU; None for another ``device``."""
    if device.type != "cuda":
        yield None
        return
    upload = Upload()
    try:
        yield upload
    finally:
        upload.close()


@dataclass(frozen=True, kw_only=True)
class TensorReader:
    """The ``Loader`` of a checkpoint; on the ``meta`` device it checks names and shapes and reads nothing."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    fp8: Fp8Config | None = None  # of linear layers stored as e4m3
    fp8_output: bool = False  # whether output layers are copied to e4m3, if they are not stored so
    ranks: Ranks = SINGLE_RANK  # that hold a target together
    share: RankShare | None = None  # of this rank; None: everything
    upload: Upload | None = None  # to a GPU
    taken: dict[str, int] = field(default_factory=dict)  # bytes on the device by name

    def __call__(self, name: str, shape: tuple[int, ...], arrange: Arrange | None = None) -> Tensor:
        tensor = self._read(name, self._float(name, shape), self.dtype, arrange)
        return tensor.zero_() if self.share is not None and self.share.drops(name) else tensor

    def linear(self, num_out: Mapping[str, int], num_in: int, *, bias: bool = False) -> Weight:
        weights = self._weights(num_out, num_in)
        if bias:
            biases = [self(f"{name}.bias", (n,)) for name, n in num_out.items()]
            weights = [replace(weight, bias=each) for weight, each in zip(weights, biases, strict=True)]
        return Weight.joined(weights)

    def output(self, name: str, num_out: int, num_in: int, tied: Tensor | None = None) -> Weight:
        weight = self.linear({name: num_out}, num_in) if tied is None else Weight(data=tied)
        if not self.fp8_output or weight.format == "fp8":
            return weight
        copy = in_fp8(weight)
        self.taken[f"{name}.weight"] = copy.num_bytes
        return copy

    def flat(self, name: str, length: int) -> Tensor:
        info = self.checkpoint.tensors.get(name)
        fits = info is not None and prod(info.shape) == length
        return self(name, info.shape if fits and info is not None else (length,)).flatten()

    def float32(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._read(name, self._float(name, shape), torch.float32, None)

    def scalar(self, name: str) -> float:
        info = self.checkpoint.tensors[name]
        require(
            prod(info.shape) == 1,
            f"{self.checkpoint.name}: {name} has shape {shown(list(info.shape))}: one number for a layer is supported, "
            "use a checkpoint without it",
        )
        info = self._float(name, info.shape)
        self.taken[name] = 0  # it stays on the host
        return 1.0 if self.device.type == "meta" else float(read_tensor(name, info))

    def stacked(self, names: Sequence[Sequence[str]], shape: tuple[int, int]) -> Weight:
        every = [name for group in names for name in group]
        fp8 = self._format(every)
        header, dtype = (self._float, self.dtype) if fp8 is None else (self._info, torch.float8_e4m3fn)
        infos = {f"{name}.weight": header(f"{name}.weight", shape) for name in every}
        whole = torch.empty(len(names), len(names[0]), *shape, dtype=dtype, device=self.device)
        places = dict(zip(infos, whole.flatten(0, 1), strict=True))
        if self.device.type != "meta":
            for name, tensor in self._stored(infos):
                self._fill(places[name], tensor)
            self._require_finite(whole, infos)
        self.taken.update((name, part.nbytes) for name, part in places.items())
        data = whole.flatten(1, 2)
        if fp8 is None:
            return Weight(data=data)
        scale = torch.stack([*self._scales(every, shape).values()]).view(*data.shape[:2], -1)
        inputs = self._input_scales(names) if fp8.activations == "static" else None
        return Weight(data=data, scale=scale, format="fp8", activations=fp8.activations, input_scale=inputs)

    def packed(self, name: str, shape: tuple[int, ...], arrange: Arrange) -> Tensor:
        info = self._info(name, shape)
        require(
            info.dtype == "uint8",
            f"{self.checkpoint.name}: {name} is stored as {info.dtype}, not as bytes: config.json is of other weights",
        )
        found = self._read(name, info, torch.uint8, arrange)
        if name.endswith("_scales") and found.device.type != "meta" and found.numel():
            largest = 6.0 * 2.0 ** (int(found.max()) - 127)  # 6: of e2m1
            require(
                largest <= torch.finfo(self.dtype).max,
                f"{info.file}: {name} holds scales too large for {self.dtype}: use --dtype bfloat16, or download again",
            )
        return found

    def __contains__(self, name: object) -> bool:
        return name in self.checkpoint.tensors

    def _weights(self, num_out: Mapping[str, int], num_in: int) -> list[Weight]:
        fp8 = self._format(num_out)
        if fp8 is None:
            return [Weight(data=self(f"{name}.weight", (n, num_in))) for name, n in num_out.items()]
        input_scale = self._input_scales([[*num_out]])[0] if fp8.activations == "static" else None
        return [
            Weight(
                data=self._read(
                    f"{name}.weight", self._info(f"{name}.weight", (n, num_in)), torch.float8_e4m3fn, None
                ),
                scale=self._scales([name], (n, num_in))[name],
                format="fp8",
                activations=fp8.activations,
                input_scale=input_scale,
            )
            for name, n in num_out.items()
        ]

    def _format(self, names: Iterable[str]) -> Fp8Config | None:
        """How linear layers are stored that become one weight; None: plain."""
        found = {name: self._in_fp8(name) for name in names}
        plain = [name for name, in_fp8 in found.items() if not in_fp8]
        if len(plain) == len(found):
            return None
        require(
            not plain,
            f"{self.checkpoint.name}: {shown(next(iter(plain), None))} is not in FP8, but what it is joined with is: "
            "quantize all that have the same inputs, or none",
        )
        return self.fp8

    def _in_fp8(self, name: str) -> bool:
        info = self.checkpoint.tensors.get(f"{name}.weight")
        if self.fp8 is None or info is None or info.dtype != E4M3:
            return False
        require(
            not self.fp8.ignores(name),
            f"{self.checkpoint.name}: {name} is in FP8, but config.json names it among the layers that are not: "
            "they are of different models, download both again",
        )
        return True

    def _scales(self, names: Sequence[str], shape: tuple[int, int]) -> dict[str, Tensor]:
        """Those of FP8 weights of ``shape`` by layer, float32 [out, 1] or, of blocks, [out, ceil(in / 128)]."""
        assert self.fp8 is not None
        num_out, shapes = shape[0], self.fp8.scale_shapes(*shape)
        infos = {}
        for name in names:
            stored = f"{name}.{self.fp8.scale_name}"
            info = self.checkpoint.tensors.get(stored)
            alike = (each for each in shapes if info is not None and len(each) == len(info.shape))
            infos[stored] = self._float(stored, next(alike, shapes[0]))
        if self.device.type == "meta":
            tensors = {name: torch.empty(info.shape, device=self.device) for name, info in infos.items()}
        else:
            tensors = dict(self._stored(infos))
        scales = {}
        for name, stored in zip(names, infos, strict=True):
            scale = self._above_zero(stored, tensors[stored].float())
            if self.fp8.weights == "block":
                scale = scale.repeat_interleave(GROUP, 0)[:num_out]
            scales[name] = scale.reshape(-1, scale.shape[-1] if scale.dim() == 2 else 1).expand(num_out, -1)
            scales[name] = scales[name].contiguous().to(self.device)
            self.taken[stored] = 4 * self.fp8.num_scales(*shape)  # as kernels keep them
        return scales

    def _input_scales(self, names: Sequence[Sequence[str]]) -> Tensor:
        """One for each group of layers with the same inputs, float32."""
        infos = {}
        for name in (name for group in names for name in group):
            stored = f"{name}.input_scale"
            info = self.checkpoint.tensors.get(stored)
            infos[stored] = self._float(stored, info.shape if info and info.shape == (1,) else ())
        self.taken.update(dict.fromkeys(infos, torch.float32.itemsize))
        if self.device.type == "meta":
            return torch.empty(len(names), device=self.device)
        found = dict(read_tensors(infos))
        scales = [self._above_zero(stored, found[stored].float()).reshape(()) for stored in infos]
        groups = torch.stack(scales).view(len(names), -1)
        for group, each in zip(names, groups, strict=True):
            require(
                bool((each == each[0]).all()),
                f"{self.checkpoint.name}: {', '.join(group)} have the same inputs, but different input_scales: "
                "quantize them with one",
            )
        return groups[:, 0].contiguous().to(self.device)

    def _above_zero(self, name: str, scale: Tensor) -> Tensor:
        require(
            scale.device.type == "meta" or bool(((scale > 0) & scale.isfinite()).all()),
            f"{self.checkpoint.tensors[name].file}: {name} has a scale that is not a finite number above 0: "
            "download it again",
        )
        return scale

    def _read(self, name: str, info: TensorInfo, dtype: torch.dtype, arrange: Arrange | None) -> Tensor:
        if self.device.type == "meta":
            tensor = torch.empty(info.shape, dtype=dtype, device=self.device)
        else:
            tensor = self._moved(dict(self._stored({name: info}))[name]).to(self.device, dtype)
            if not name.endswith("_blocks"):  # of MXFP4, in which every byte is two numbers
                self._require_finite(tensor, {name: info})
        if arrange is not None:
            tensor = arrange(tensor).contiguous()  # where it is fast, and there is room for one tensor more
        self.taken[name] = tensor.nbytes
        return tensor

    def _require_finite(self, loaded: Tensor, infos: Mapping[str, TensorInfo]) -> None:
        """``UserError`` for NaN and infinities in ``loaded``, which holds all of ``infos``; it names the first."""
        if is_finite(loaded):
            return
        for name, info in infos.items():
            stored = read_tensor(name, info)
            require(
                is_finite(stored),
                f"{info.file}: {name} holds NaN or Inf: download it again, or use another export",
            )
            require(
                is_finite(stored.to(loaded.dtype)),
                f"{info.file}: {name} holds numbers too large for {loaded.dtype}: use --dtype bfloat16 or float32",
            )
        raise AssertionError(f"{', '.join(infos)} changed on the way to {self.device}")

    def _stored(self, infos: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Tensor]]:
        """As ``read_tensors``."""
        for found in read_tensors(infos):
            self.ranks.alive()
            yield found

    def _moved(self, stored: Tensor) -> Tensor:
        """``stored``, of the CPU, where it is uploaded; elsewhere as it is, which may be in the file."""
        if self.upload is None:
            return stored
        return self._fill(torch.empty(stored.shape, dtype=stored.dtype, device=self.device), stored)

    def _fill(self, place: Tensor, stored: Tensor) -> Tensor:
        """``place`` with the numbers of ``stored``, of the CPU."""
        if self.upload is None or place.dtype != stored.dtype:
            return place.copy_(stored)
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        self.upload.into(place, stored.contiguous(), stream)
        return place

    def _float(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._info(name, shape)
        require(
            info.dtype in FLOATS,
            f"{self.checkpoint.name}: {name} is stored as {info.dtype}: quantized weights are not supported here, "
            "use plain ones",
        )
        return info

    def _info(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self.checkpoint.tensors.get(name)
        if info is None:
            raise UserError(f"{self.checkpoint.name} has no tensor {name!r}: the checkpoint is incomplete")
        cut = None if self.share is None else self.share.cut(name, shape)
        stored = shape if cut is None else cut.stored
        require(
            info.shape == stored,
            f"{self.checkpoint.name}: {name} has shape {shown(list(info.shape))}, but config.json asks for "
            f"{list(stored)}: they are of different models, download both again",
        )
        return replace(info, shape=shape, cut=cut)

    def finish(self, ignored: Iterable[str]) -> None:
        """``UserError`` if a tensor was neither taken nor is in ``ignored``, or an adapter changes one that was not."""
        unknown = sorted(set(self.checkpoint.tensors) - set(self.taken) - set(ignored))
        names = ", ".join(shown(name) for name in unknown[:2])
        found = "an unknown tensor," if len(unknown) == 1 else f"{len(unknown)} unknown tensors, such as"
        require(
            not unknown,
            f"{self.checkpoint.name} has {found} {names}: its architecture or variant is not supported",
        )
        for name, info in self.checkpoint.tensors.items():
            require(
                info.lora is None or name in self.taken,
                f"lora {self.checkpoint.lora} changes {shown(name)}, which is not read for texts: merge it with PEFT",
            )


_LOOKED_AT = 1 << 24  # elements that are looked at together where that takes memory
_NAN = 0x7F  # of e4m3, which has no infinity; and the same with the sign bit
_NO_SCALE = 0xFF  # NaN of e8m0, in which MXFP4 has its scales


def is_finite(tensor: Tensor) -> bool:
    """Whether ``tensor`` has neither NaN nor infinities; bytes are taken for scales of MXFP4.

    Weights are looked at where they lie once they are loaded, at about the bandwidth of that memory.
    """
    if tensor.numel() == 0:
        return True
    if tensor.dtype == torch.uint8:
        return int(tensor.max()) != _NO_SCALE
    if tensor.dtype == torch.float8_e4m3fn:
        pieces = torch.split(tensor.flatten().view(torch.uint8), _LOOKED_AT)
        return not any(bool(((piece & _NAN) == _NAN).any()) for piece in pieces)
    low, high = tensor.aminmax()  # NaN where there is one, without a copy of the tensor
    return bool(low.isfinite() & high.isfinite())
