"""In which number format a checkpoint says that its KV cache may be kept."""

from collections.abc import Mapping

from specgen.checkpoints.tensor_reader import Checkpoint
from specgen.models.fp8_config import quantization

FP8 = "FP8"


def kv_scheme(checkpoint: Checkpoint) -> str | None:
    """``FP8`` (e4m3, one constant scale for a layer's keys and one for its values), another format's name, or None.

    modelopt has ``kv_cache_quant_algo``, its newer exports and others ``kv_cache_scheme``.
    """
    found = quantization(checkpoint.config)
    algorithm, scheme = found.get("kv_cache_quant_algo"), found.get("kv_cache_scheme")
    if algorithm:
        return str(algorithm)
    return _name(scheme) if scheme else None


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
