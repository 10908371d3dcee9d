"""The layers of a calibrated target in FP8: as modelopt stores them, a scale per tensor, or Qwen's, by blocks of 128.

The random projections are those of the same layers in bfloat16, rounded; activations before them have RMS 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from calibrated_weights import RESIDUAL, Layer, Named, Source
from torch import Tensor

Fp8Format = Literal["fp8", "fp8-block"]
BLOCK = 128
E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0  # of e4m3
_INPUT = 24.0  # the largest activation; greater ones saturate
_SIGMAS = {
    "k_proj": 5.0,
    "up_proj": 7.0,
}  # deviations that e4m3 holds, by name: scales are to differ; others 6


@dataclass(frozen=True, kw_only=True)
class Fp8Layers:
    """Makes the tensors of ``layer`` with its projections in FP8; see ``calibrated_weights.Layer``."""

    layer: Layer
    format: Fp8Format
    plain: tuple[str, ...] = ("lm_head",)  # linear layers of the model that stay in bfloat16

    def __call__(self, prefix: str, source: Source) -> Iterator[Named]:
        for named in self.layer(prefix, source):
            if named.name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
                yield from self._quantized(named)
            else:
                yield named

    @property
    def config(self) -> dict[str, Any]:
        """What ``config.json`` says of it."""
        block = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(self.plain),
        }
        modelopt = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": list(self.plain)}
        return {"quantization_config": block if self.format == "fp8-block" else modelopt}

    def _quantized(self, named: Named) -> Iterator[Named]:
        (rows, width), stem = named.shape, named.name.removesuffix("weight")
        name = stem.rstrip(".").rpartition(".")[-1]
        largest = _SIGMAS.get(name, 6.0)
        rms = RESIDUAL if name in ("o_proj", "down_proj") else 1.0
        scale = rms / width**0.5 * largest / _LARGEST

        def values() -> Tensor:
            return named.make().float().div_(scale).clamp_(-_LARGEST, _LARGEST).to(E4M3)

        yield replace(named, make=values, dtype=E4M3)
        if self.format == "fp8-block":
            yield _filled(stem + "weight_scale_inv", (-(-rows // BLOCK), -(-width // BLOCK)), scale)
        else:
            yield _filled(stem + "weight_scale", (), scale)
            yield _filled(stem + "input_scale", (), _INPUT / _LARGEST)


def _filled(name: str, shape: tuple[int, ...], value: float) -> Named:
    """A tensor of one number."""
    return Named(name=name, shape=shape, make=lambda: torch.full(shape, value), dtype=torch.float32)
