"""In which number format a checkpoint says that its KV cache may be kept."""

from collections.abc import Iterator, Mapping
from typing import Any

from specgen.checkpoints.tensor_reader import Checkpoint
from specgen.models.fp8_config import SECTIONS

FP8 = "FP8"


def kv_scheme(checkpoint: Checkpoint) -> str | None:
    """``FP8`` (e4m3, one constant scale for a layer's keys and one for its values), another format's name, or None.

    Read from ``quantization_config`` (see ``checkpoint.open_checkpoint``), where modelopt has ``kv_cache_quant_algo``,
    perhaps in a ``quantization`` inside it; others, and newer exports of modelopt, have ``kv_cache_scheme``.
    """
    return next(_named(checkpoint), None)


def _named(checkpoint: Checkpoint) -> Iterator[str]:
    for found in _statements(checkpoint):
        algorithm, scheme = found.get("kv_cache_quant_algo"), found.get("kv_cache_scheme")
        if algorithm:
            yield str(algorithm)
        if scheme:
            yield _name(scheme)


def _statements(checkpoint: Checkpoint) -> Iterator[Mapping[str, Any]]:
    """The objects that may say it."""
    quantized = (checkpoint.config.get(name) for name in SECTIONS)
    for each in quantized:
        if isinstance(each, Mapping):
            yield each
            inner = each.get("quantization")
            if isinstance(inner, Mapping):
                yield inner


def _name(scheme: object) -> str:
    """``FP8`` for numbers of 8 bits with a point and scales that no pass computes, one for a layer.

    AutoFP8 calls the same "static".
    """
    if not isinstance(scheme, Mapping):
        return FP8 if scheme == "static" else str(scheme)
    fp8 = (
        (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
        and not scheme.get("dynamic")
        and scheme.get("strategy") in (None, "tensor")
    )
    return FP8 if fp8 else ", ".join(f"{name} {value}" for name, value in sorted(scheme.items()))
