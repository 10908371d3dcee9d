"""FP8: the e4m3 numbers by their definition, attention over what was rounded to them, and checkpoints with scales."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from specgen.attention import LayerAttention
from specgen.kv.layout import Layout
from specgen.models.llama import Llama
from tests.tiny_checkpoints import change_tensors

# sign, 4 bits of exponent, 3 of mantissa; the numbers that are not negative, in order of their codes
NUMBERS = torch.tensor(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
)
Scales = Sequence[tuple[float, float]]  # of keys and of values, by layer
# of an export of modelopt with plain weights
MODELOPT = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"},
}


def rounded(x: Tensor) -> Tensor:
    """The nearest number, of two the one with the even code; the largest one for what is beyond."""
    size = x.double().abs().contiguous()
    above = torch.searchsorted(NUMBERS.double(), size).clamp(1, len(NUMBERS) - 1)
    low, high = NUMBERS[above - 1].double(), NUMBERS[above].double()
    up = (high - size < size - low) | ((high - size == size - low) & (above % 2 == 0))
    return (torch.where(up, high, low) * x.sign()).to(x.dtype)


def stored(x: Tensor, scale: float) -> Tensor:
    """What ``x`` has become when it comes back from an FP8 page."""
    return rounded(x / scale) * scale


class Fp8Attend:
    """Causal attention of one whole sequence in one pass, with ``scales`` of its own."""

    def __init__(self, model: Llama, scales: Scales) -> None:
        self.model = model
        self.scales = scales

    def __call__(self, layer: LayerAttention, qkv: Tensor) -> Tensor:
        rows, _, head_dim = qkv.shape
        config, (k_scale, v_scale) = self.model.config, self.scales[layer.index]
        pages = qkv.new_zeros(2, 1, rows, config.num_kv_heads, head_dim)
        layout = Layout.uniform(
            torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), rows, rows
        )
        q = self.model.rope(layout)(qkv, pages[0], pages[1])
        share = config.num_heads // config.num_kv_heads
        keys, values = (
            stored(x[0], scale).repeat_interleave(share, 1)
            for x, scale in zip(pages, (k_scale, v_scale), strict=True)
        )
        scores = torch.einsum("qhd,khd->hqk", q, keys) / head_dim**0.5
        scores = scores.masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu(1), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)

    def write_kv(self, layer: LayerAttention, heads: Tensor) -> None:
        raise AssertionError("a target does not")


def add_scales(
    path: Path,
    scales: Scales,
    names: tuple[str, str] = ("k_proj.k_scale", "v_proj.v_scale"),
    statement: Mapping[str, object] | None = MODELOPT,
) -> None:
    """Give the checkpoint in ``path`` the scales, and modelopt's statement that its KV cache is FP8."""
    tensors = {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(scale)
        for layer, pair in enumerate(scales)
        for name, scale in zip(names, pair, strict=True)
    }
    change_tensors(path, tensors)
    if statement is not None:
        (path / "hf_quant_config.json").write_text(json.dumps(statement))
