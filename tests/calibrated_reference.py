"""Draft heads written out densely in float32, each whole text again: no cache, no pages, none of specgen's code."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class DenseTarget:
    """The target in ``transformers``."""

    model: Any

    @classmethod
    def load(cls, folder: Path) -> "DenseTarget":
        return cls(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())

    @torch.no_grad()
    def states(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Of texts [B, n]: the three features [B, n, 3 * H], and the last state after the final norm [B, n, H]."""
        states = self.model(ids, output_hidden_states=True).hidden_states
        num_layers = len(states) - 1
        features = [states[i] for i in (2, num_layers // 2, num_layers - 3)]
        return torch.cat(features, -1), states[-1]


class DenseHead:
    """A head of any kind; its checkpoint's tensors by name."""

    def __init__(self, folder: Path, target: DenseTarget) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = {
            name: value.float() for name, value in load_file(folder / "model.safetensors").items()
        }
        self.target = target
        shared = target.model.model.embed_tokens.weight
        self.embedding = self.tensors.get("embed_tokens.weight", shared)
        self.is_eagle1 = "lm_head.weight" not in self.tensors

    @torch.no_grad()
    def drafts(self, text: Tensor, newest: Tensor, count: int) -> Tensor:
        """``[B, count]`` greedy drafts after ``newest`` [B], which follows the texts [B, n]."""
        features, last = self.target.states(text)
        ids = torch.cat((text[:, 1:], newest[:, None]), 1)
        hidden = last if self.is_eagle1 else linear(features, self.tensors["fc.weight"])
        if self.config.get("parallel_drafting"):
            masks = torch.full((len(ids), count - 1), self.config["mask_token_id"])
            mask_hidden = linear(self.tensors["mask_hidden"], self.tensors["fc.weight"])
            hidden = torch.cat((hidden, mask_hidden.expand(len(ids), count - 1, -1)), 1)
            return self._tokens(self._forward(torch.cat((ids, masks), 1), hidden)[:, -count:])
        drafts = []
        for _ in range(count):
            out = self._forward(ids, hidden)[:, -1:]
            drafts.append(self._tokens(out))
            ids, hidden = torch.cat((ids, drafts[-1]), 1), torch.cat((hidden, out), 1)
        return torch.cat(drafts, 1)

    def _tokens(self, state: Tensor) -> Tensor:
        if self.is_eagle1:
            return linear(state, self.target.model.lm_head.weight).argmax(-1)
        ids = linear(self._normed(state, "norm"), self.tensors["lm_head.weight"]).argmax(-1)
        return ids + self.tensors["d2t"].long()[ids]

    def _forward(self, ids: Tensor, hidden: Tensor) -> Tensor:
        embedded = self.embedding[ids]
        if self.is_eagle1:
            stream = linear(torch.cat((embedded, hidden), -1), self.tensors["fc.weight"])
            return self._layer("layers.0.", stream, stream)
        prefix = "midlayer." if "midlayer.hidden_norm.weight" in self.tensors else "layers.0."
        normed = (
            self._normed(embedded, prefix + "input_layernorm"),
            self._normed(hidden, prefix + "hidden_norm"),
        )
        stream = self._layer(prefix, torch.cat(normed, -1), hidden)
        for index in range(1, self.config["num_hidden_layers"]):
            prefix = f"layers.{index}."
            stream = self._layer(prefix, self._normed(stream, prefix + "input_layernorm"), stream)
        return stream

    def _layer(self, prefix: str, inputs: Tensor, stream: Tensor) -> Tensor:
        def project(name: str, x: Tensor) -> Tensor:
            return linear(x, self.tensors[f"{prefix}{name}.weight"])

        q, k, v = (self._heads(project(f"self_attn.{name}_proj", inputs)) for name in "qkv")
        attended = scaled_dot_product_attention(
            self._rotated(q), self._rotated(k), v, is_causal=True, enable_gqa=True
        )
        stream = stream + project("self_attn.o_proj", attended.transpose(1, 2).flatten(2))
        x = self._normed(stream, prefix + "post_attention_layernorm")
        return stream + project(
            "mlp.down_proj", silu(project("mlp.gate_proj", x)) * project("mlp.up_proj", x)
        )

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config["head_dim"])).transpose(1, 2)

    def _rotated(self, x: Tensor) -> Tensor:
        """Of heads ``[B, heads, n, D]`` at positions 0, 1, ...: dimension i turns with dimension i + D / 2."""
        half = x.shape[-1] // 2
        speeds = self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * speeds
        turned = torch.view_as_complex(torch.stack((x[..., :half], x[..., half:]), -1).contiguous())
        turned = turned * torch.polar(torch.ones_like(angles), angles).to(turned.dtype)
        return torch.cat((turned.real, turned.imag), -1)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]
