"""Checkpoints in FP8 in the layouts they are published in, written from plain ones, and their formulas."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from specgen.attention import LayerAttention
from specgen.kv.layout import Layout
from specgen.models.llama import Llama
from tests.tiny_checkpoints import change_json, change_tensors

E4M3 = torch.float8_e4m3fn
BLOCK = 128
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}


def _compressed(weights: dict[str, Any], inputs: dict[str, Any], **rest: Any) -> dict[str, Any]:
    group = {
        "weights": {**_FLOAT8, "dynamic": False, **weights},
        "input_activations": {**_FLOAT8, **inputs},
        "output_activations": None,
        "targets": ["Linear"],
    }
    kind = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
    }
    return {**kind, "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*mlp.gate$"], **rest}


_IGNORING = ("ignore", "modules_to_not_convert", "ignored_layers")
_MODELOPT: dict[str, Any] = {
    "quant_algo": "FP8",
    "kv_cache_quant_algo": "FP8",
    "exclude_modules": ["lm_head"],
}
# by form: the scales of weights, those of inputs, and quantization_config
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "modelopt": ("tensor", "static", {}),
    "modelopt-newer": (
        "tensor",
        "static",
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "config_groups": {"group_0": {"weights": {"dynamic": False, "num_bits": 8, "type": "float"}}},
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "ignore": ["lm_head"],
        },
    ),
    "dynamic": (
        "channel",
        "token",
        _compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": True}),
    ),
    "static": (
        "tensor",
        "static",
        _compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}),
    ),
    "block": (
        "block",
        "group",
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
        },
    ),
    "compressed-block": (
        "block",
        "group",
        _compressed(
            {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
            {"strategy": "group", "group_size": BLOCK, "dynamic": True},
        ),
    ),
    "autofp8": (
        "tensor",
        "static",
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    ),
}


def quantize(
    path: Path, form: str, *, spread: float = 0.0, seed: int = 0, output_layer: bool = False
) -> None:
    """Turn the plain checkpoint in ``path`` into FP8; ``spread`` multiplies rows by up to that power of two before.

    With KV scales where the form has them, and embedding, norms, routers and, unless asked for, output layer as they
    were.
    """
    weights, inputs, config = CONFIGS[form]
    tensors, noise = load_file(path / "model.safetensors"), torch.Generator().manual_seed(seed)
    suffixes = ("_proj.weight", "_with_mqa.weight", *(("lm_head.weight",) if output_layer else ()))
    suffixes += ("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight")  # not what makes a and b
    for name in [name for name in tensors if name.endswith(suffixes)]:
        wide, layer = tensors[name].float(), name.removesuffix(".weight")
        rows = torch.rand(len(wide), 1, generator=noise) * 2 - 1
        wide = wide * torch.exp2(spread * (rows + torch.rand(1, generator=noise) * 2 - 1))
        data, scale = _rounded(wide, weights)
        tensors[name] = data
        suffix = "weight_scale_inv" if form == "block" else "weight_scale"
        tensors[f"{layer}.{suffix}"] = scale.bfloat16() if weights == "channel" else _stored(scale, form)
        if inputs == "static":
            largest = 0.2 if "o_proj" in name else 2.5  # some inputs are larger
            largest *= 1.0 + 0.2 * int(name.partition(".experts.")[2].partition(".")[0] or 0)
            tensors[f"{layer}.input_scale"] = _stored(torch.tensor(largest / 448), form)
    if form.startswith("modelopt"):
        for layer in {name.rsplit("q_proj.", 1)[0] for name in tensors if name.endswith("q_proj.weight")}:
            tensors |= {
                f"{layer}k_proj.k_scale": torch.tensor(0.5),
                f"{layer}v_proj.v_scale": torch.tensor(0.25),
            }
        stated = {**_MODELOPT, "exclude_modules": []} if output_layer else _MODELOPT
        separate = {"producer": {"name": "modelopt", "version": "0.27.0"}, "quantization": stated}
        (path / "hf_quant_config.json").write_text(json.dumps(separate))
    change_tensors(path, tensors)
    if output_layer:
        config = {name: value for name, value in config.items() if name not in _IGNORING}
    if config:
        change_json(path / "config.json", quantization_config=config)


def _stored(scale: Tensor, form: str) -> Tensor:
    return scale.reshape(1) if form == "static" else scale


def _rounded(wide: Tensor, weights: str) -> tuple[Tensor, Tensor]:
    """In e4m3, and the scales as stored."""
    if weights == "tensor":
        scale = wide.abs().max() / 448
        return (wide / scale).clamp(-448, 448).to(E4M3), scale
    if weights == "channel":
        scale = (wide.abs().amax(1, keepdim=True) / 448).bfloat16().float()
        return (wide / scale).clamp(-448, 448).to(E4M3), scale
    out, scale = torch.empty_like(wide, dtype=E4M3), torch.empty(*(-(-n // BLOCK) for n in wide.shape))
    for rows, columns, (i, j) in _blocks(wide.shape):
        scale[i, j] = wide[rows, columns].abs().max() / 448
        out[rows, columns] = (wide[rows, columns] / scale[i, j]).clamp(-448, 448).to(E4M3)
    return out, scale


def _blocks(shape: torch.Size) -> list[tuple[slice, slice, tuple[int, int]]]:
    return [
        (slice(i, i + BLOCK), slice(j, j + BLOCK), (i // BLOCK, j // BLOCK))
        for i in range(0, shape[0], BLOCK)
        for j in range(0, shape[1], BLOCK)
    ]


def matrix(tensors: dict[str, Tensor], layer: str) -> Tensor:
    """The float32 matrix of a linear layer of a checkpoint in any form, block by block."""
    stored = tensors[f"{layer}.weight"].float()
    scale = tensors.get(f"{layer}.weight_scale_inv", tensors.get(f"{layer}.weight_scale"))
    if scale is None:
        return stored
    scale = scale.float()
    if scale.numel() == 1 or scale.shape == (len(stored), 1):
        return stored * scale
    for rows, columns, (i, j) in _blocks(stored.shape):
        stored[rows, columns] *= scale[i, j]
    return stored


class Fp8Linear(nn.Module):
    """A linear layer of such a checkpoint by its formulas, in the place of ``nn.Linear``."""

    def __init__(self, tensors: dict[str, Tensor], layer: str, inputs: str) -> None:
        super().__init__()
        self.matrix, self.inputs = matrix(tensors, layer), inputs
        bias, scale = tensors.get(f"{layer}.bias"), tensors.get(f"{layer}.input_scale")
        self.bias = None if bias is None else bias.float()
        self.scale = None if scale is None else float(scale)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float().flatten(0, -2)
        if self.scale is not None:
            wide = _as_e4m3(wide, torch.tensor(self.scale))
        elif self.inputs == "token":
            wide = torch.stack([_as_e4m3(row, row.abs().max() / 448) for row in wide])
        else:
            rows = [[_as_e4m3(part, part.abs().max() / 448) for part in row.split(BLOCK)] for row in wide]
            wide = torch.stack([torch.cat(row) for row in rows])
        out = wide @ self.matrix.T
        return (out if self.bias is None else out + self.bias).view(*x.shape[:-1], -1).to(x.dtype)


class Fp8Mixture(nn.Module):
    """A Qwen3-MoE's mixture of such layers, token by token, in the place of ``transformers``' block."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str, inputs: str, num_chosen: int) -> None:
        super().__init__()
        self.router, self.num_chosen = tensors[f"{prefix}gate.weight"].float(), num_chosen
        self.experts = [
            [
                Fp8Linear(tensors, f"{prefix}experts.{e}.{name}_proj", inputs)
                for name in ("gate", "up", "down")
            ]
            for e in range(len(self.router))
        ]

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for row in x.flatten(0, -2):
            weights, ids = (row @ self.router.T).softmax(-1).topk(self.num_chosen)
            outputs = []
            for e in ids.tolist():
                gate, up, down = self.experts[e]
                outputs.append(down(nn.functional.silu(gate(row[None])) * up(row[None]))[0])
            rows.append((torch.stack(outputs) * (weights / weights.sum())[:, None]).sum(0))
        return torch.stack(rows).view_as(x)


def _as_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-448, 448).to(E4M3).float() * scale


def reference(
    path: Path, form: str, make: Callable[[dict[str, Tensor], str, str], nn.Module] = Fp8Linear
) -> Any:
    """``transformers``' model of a checkpoint in FP8, each of whose linear layers is what ``make`` returns."""
    import transformers

    tensors = load_file(path / "model.safetensors")
    settings = json.loads((path / "config.json").read_text())
    settings.pop("quantization_config", None)
    config = transformers.AutoConfig.for_model(**settings)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain = {name: value for name, value in tensors.items() if value.dtype != E4M3 and "scale" not in name}
    missing, unexpected = model.load_state_dict(plain, strict=False)
    assert not unexpected
    layers = [name.removesuffix(".weight") for name, value in tensors.items() if value.dtype == E4M3]
    known = {f"{layer}.weight" for layer in layers}
    assert all(name in known or "lm_head" in name or ".mlp.experts." in name for name in missing)
    for layer in layers:
        prefix, inside, _ = layer.partition("mlp.experts.")
        if inside:
            mixture = Fp8Mixture(tensors, f"{prefix}mlp.", CONFIGS[form][1], config.num_experts_per_tok)
            model.get_submodule(prefix.removesuffix(".")).mlp = mixture
            continue
        parent, _, child = layer.rpartition(".")
        setattr(model.get_submodule(parent), child, make(tensors, layer, CONFIGS[form][1]))
    return model.eval()


# --- FP8 KV caches ---


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
