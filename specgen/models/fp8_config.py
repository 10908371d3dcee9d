"""Which weights of a checkpoint, and whether its KV cache, are in FP8 and how, by its ``config.json``; no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from specgen.config import UserError, require, shown
from specgen.models.config_fields import Raw, items, section
from specgen.ops.weight import GROUP

_SECTIONS = ("quantization_config", "compression_config")  # the latter of older compressed-tensors
_OF_WEIGHTS = ("quant_algo", "config_groups", "activation_scheme")
_OF_CACHE = ("kv_cache_quant_algo", "kv_cache_scheme")
_IGNORED = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
_USE = "use plain weights, or FP8 of modelopt, compressed-tensors or blocks of 128x128"


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """Weights in e4m3 with scales, and how the activations before them are rounded to e4m3.

    ``weights``: a scale for each tensor, output channel or block of 128x128. ``activations``: one scale of the
    checkpoint ("static"), or the largest magnitude / 448 of each row ("token") or of each 128 values ("group").
    """

    method: str
    weights: Literal["tensor", "channel", "block"]
    activations: Literal["static", "token", "group"]
    scale_name: str = "weight_scale"  # of the tensor beside "weight"
    ignored: tuple[str, ...]  # names, wildcards or "re:" patterns of layers that are not in FP8

    def ignores(self, name: str) -> bool:
        """Whether the linear layer ``name`` is named as one that is not in FP8, alone or with all around it."""
        return any(_matches(pattern, name) for pattern in self.ignored)

    def scale_shapes(self, num_out: int, num_in: int) -> tuple[tuple[int, ...], ...]:
        """How the scales of a weight [num_out, num_in] may be stored."""
        if self.weights == "block":
            return ((-(-num_out // GROUP), -(-num_in // GROUP)),)
        return ((), (1,)) if self.weights == "tensor" else ((num_out, 1), (num_out,))

    @property
    def rows_per_scale(self) -> int:
        """Outputs of a weight that share a scale, unless all do."""
        return GROUP if self.weights == "block" else 1

    def num_scales(self, num_out: int, num_in: int) -> int:
        """Those that a GEMM with a weight [num_out, num_in] reads: one for each output, or for each block."""
        return -(-num_out // GROUP) * -(-num_in // GROUP) if self.weights == "block" else num_out

    def __str__(self) -> str:
        per = f"{GROUP}x{GROUP} block" if self.weights == "block" else self.weights
        inputs = {
            "static": "with the checkpoint's scale",
            "token": "row by row",
            "group": f"by groups of {GROUP}",
        }
        rounded = inputs[self.activations]
        return f"FP8 e4m3 (quant_method {self.method}), one scale per {per}; activations rounded {rounded}"


def quantization(config: Raw) -> Raw:
    """What a ``config.json`` says of its weights and KV cache, without modelopt's nesting; empty: nothing."""
    given = [name for name in _SECTIONS if config.get(name)]
    require(
        len(given) < 2,
        f"config.json has {' and '.join(given)}: keep the one that the weights were saved with",
    )
    raw = section(config, given[0]) if given else {}
    return {**raw, **section(raw, "quantization")}


def without_quantization(config: Raw) -> dict[str, Any]:
    """``config`` of weights that are plain, whatever it says."""
    return {name: field for name, field in config.items() if name not in _SECTIONS}


def fp8_config(config: Raw) -> Fp8Config | None:
    """Of a ``config.json``; None: plain weights. ``UserError`` names any other format."""
    raw = quantization(config)
    if not raw:
        return None
    method = raw.get("quant_method")
    readers = {"modelopt": _modelopt, "compressed-tensors": _compressed_tensors, "fp8": _fp8}
    if not isinstance(method, str) or method not in readers:
        raise UserError(f"quant_method is {shown(method)}, which is not supported: {_USE}")
    if not any(raw.get(name) for name in _OF_WEIGHTS) and any(raw.get(name) for name in _OF_CACHE):
        return None  # of the KV cache alone
    return readers[method](raw)


def with_modelopt(config: Raw, separate: Raw) -> dict[str, Any]:
    """``config`` with what modelopt wrote to ``hf_quant_config.json``, which newer versions put in both files.

    ``UserError`` where they name different algorithms. What one alone says, as some versions of the KV cache, counts.
    """
    stated, known = section(separate, "quantization"), quantization(config)
    require(bool(stated), "hf_quant_config.json has no quantization: download it again")
    algorithm, other = known.get("quant_algo"), stated.get("quant_algo")
    require(
        not known or algorithm == other,
        f"hf_quant_config.json has the quant_algo {shown(other)} and config.json {shown(algorithm)}: "
        "they are of different models, download both again",
    )
    return {**config, _SECTIONS[0]: {"quant_method": "modelopt", **stated, **known}}


def _modelopt(raw: Raw) -> Fp8Config:
    algorithm = raw.get("quant_algo")
    require(algorithm == "FP8", f"quant_algo is {shown(algorithm)}, which is not supported: {_USE}")
    return Fp8Config(method="modelopt", weights="tensor", activations="static", ignored=_ignored(raw))


def _fp8(raw: Raw) -> Fp8Config:
    """Blocks as of DeepSeek-V3 and Qwen3, or without ``weight_block_size`` one static scale per tensor (AutoFP8)."""
    size, scheme, kind = raw.get("weight_block_size"), raw.get("activation_scheme"), raw.get("fmt", "e4m3")
    scales = raw.get("scale_fmt")
    require(
        scales in (None, "float"), f"scale_fmt is {shown(scales)}, only float scales are supported: {_USE}"
    )
    require(kind == "e4m3", f"fmt is {shown(kind)}, only 'e4m3' is supported: {_USE}")
    require(
        size in (None, [GROUP, GROUP]),
        f"weight_block_size is {shown(size)}, only [{GROUP}, {GROUP}] is supported: {_USE}",
    )
    needed = "static" if size is None else "dynamic"
    require(
        scheme == needed,
        f"activation_scheme is {shown(scheme)}, but with weight_block_size {shown(size)} only {needed!r} is "
        f"supported: {_USE}",
    )
    if size is None:
        return Fp8Config(method="fp8", weights="tensor", activations="static", ignored=_ignored(raw))
    return Fp8Config(
        method="fp8",
        weights="block",
        activations="group",
        scale_name="weight_scale_inv",  # it multiplies, whatever its name says
        ignored=_ignored(raw),
    )


def _compressed_tensors(raw: Raw) -> Fp8Config:
    groups = section(raw, "config_groups")
    require(len(groups) == 1, f"config_groups has {len(groups)} groups, only one is supported: {_USE}")
    require(
        not raw.get("transform_config"),
        f"transform_config is set: weights that need their inputs rotated are not supported, {_USE}",
    )
    group = section(groups, next(iter(groups)))
    targets = items(group, "targets")
    require(targets == ["Linear"], f"targets is {shown(targets)}, only ['Linear'] is supported: {_USE}")
    weights, inputs = section(group, "weights"), section(group, "input_activations")
    both_fp8 = all((each.get("type"), each.get("num_bits")) == ("float", 8) for each in (weights, inputs))
    require(
        both_fp8,
        f"compressed-tensors of the kind {_kind(weights, inputs)} is not supported: {_USE}",
    )
    require(
        not group.get("output_activations"), f"output_activations are set, which is not supported: {_USE}"
    )
    for name, each in (("weights", weights), ("input_activations", inputs)):
        require(
            each.get("symmetric", True) is True, f"{name} are not symmetric, which is not supported: {_USE}"
        )
    sizes = (weights.get("block_structure"), inputs.get("group_size"))
    scheme = (weights.get("strategy"), inputs.get("strategy"), bool(inputs.get("dynamic")))
    for form in _SCHEMES:
        if scheme == form[:3] and (form[0] != "block" or sizes == ([GROUP, GROUP], GROUP)):
            return Fp8Config(
                method="compressed-tensors", weights=form[0], activations=form[3], ignored=_ignored(raw)
            )
    raise UserError(
        f"weights have the strategy {shown(scheme[0])} and input_activations {shown(scheme[1])} "
        f"({'dynamic' if scheme[2] else 'static'}), which is not supported: {_USE}"
    )


# strategies of weights and of activations, whether these are dynamic, and what the latter two mean
_Scheme = tuple[Literal["tensor", "channel", "block"], str, bool, Literal["static", "token", "group"]]
_SCHEMES: tuple[_Scheme, ...] = (
    ("tensor", "tensor", False, "static"),
    ("channel", "tensor", False, "static"),
    ("tensor", "token", True, "token"),
    ("channel", "token", True, "token"),
    ("block", "group", True, "group"),
)


def _kind(weights: Raw, inputs: Raw) -> str:
    """Such as W4A16 or W8A8-int."""
    kind = "-int" if weights.get("type") == "int" and inputs else ""
    return f"W{shown(weights.get('num_bits'))}A{shown(inputs.get('num_bits', 16))}{kind}"


def _ignored(raw: Raw) -> tuple[str, ...]:
    patterns = []
    for name in _IGNORED:
        for each in items(raw, name):
            require(isinstance(each, str), f"{name} has {shown(each)}: it must be a list of names")
            patterns.append(each)
            try:
                _matches(each, "")
            except re.error as error:
                raise UserError(f"{name} has {shown(each)}: it is no regular expression ({error})") from error
    return tuple(patterns)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


FP8 = "FP8"


def kv_scheme(config: Raw) -> str | None:
    """In which number format a ``config.json`` says that the KV cache may be kept; None: it says nothing.

    ``FP8`` is e4m3 with one constant scale for a layer's keys and one for its values. modelopt has
    ``kv_cache_quant_algo``, its newer exports and others ``kv_cache_scheme``.
    """
    found = quantization(config)
    algorithm, scheme = found.get("kv_cache_quant_algo"), found.get("kv_cache_scheme")
    if algorithm:
        return str(algorithm)
    return _kv_name(scheme) if scheme else None


def _kv_name(scheme: object) -> str:
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
