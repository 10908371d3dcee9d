"""Dense references of heads with layers of a Gemma 4: plain formulas, one text at a time, no cache.

As those of ``reference_heads``, classes of small methods, so that a test can plant an error in one of them."""

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from tests.reference_heads import DenseTarget

SLIDING, GLOBAL = "sliding_attention", "full_attention"


class ReferenceGemma4Head(ABC):
    """Layers by their formulas, and what is stored of a text."""

    depth = 5  # drafts computed at once

    def __init__(self, path: Path, target: DenseTarget) -> None:
        self.target = target
        self.raw: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.text: dict[str, Any] = self.raw.get("text_config", self.raw)
        self.t = {name: each.double() for name, each in load_file(path / "model.safetensors").items()}
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    @torch.inference_mode()
    def drafts(self, tokens: tuple[int, ...], k: int) -> tuple[int, ...]:
        """``k`` greedy drafts after ``tokens`` (at least two)."""
        if (found := self._known.get((*tokens, k))) is None:
            found = self._known[(*tokens, k)] = self.propose(tokens, k)
        return found

    @abstractmethod
    def propose(self, tokens: tuple[int, ...], k: int) -> tuple[int, ...]:
        """As ``drafts``, computed."""

    def states(self, tokens: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
        """Of all tokens but the newest, as ``DenseTarget.states``."""
        streams, output = self.target.states(tokens)
        return [each[:-1].double() for each in streams], output[:-1].double()

    def norm(self, x: Tensor, name: str = "") -> Tensor:
        x = F.rms_norm(x, x.shape[-1:], eps=self.text["rms_norm_eps"])
        return x * self.t[f"{name}.weight"] if name else x

    def rotated(self, x: Tensor, positions: Tensor, kind: str) -> Tensor:
        """Heads [rows, n, D] turned by their positions [rows]."""
        said, half = self.text["rope_parameters"][kind], x.shape[-1] // 2
        frequencies = said["rope_theta"] ** (-torch.arange(half).double() / half)
        frequencies[int(said.get("partial_rotary_factor", 1.0) * half) :] = 0
        angles = (positions[:, None] * frequencies)[:, None]
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def attended(self, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        """[rows, n, D] over [positions, m, D], of which rows see some [rows, positions]: [rows, n * D]."""
        keys, values = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, keys).masked_fill(~seen, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)

    def heads(self, x: Tensor, name: str, size: int) -> Tensor:
        return (x @ self.t[f"{name}.weight"].T).view(len(x), -1, size)

    def keys(self, x: Tensor, prefix: str, positions: Tensor, kind: str, size: int) -> tuple[Tensor, Tensor]:
        """Of rows that are normed: keys and values [rows, m, D]."""
        made = self.heads(x, f"{prefix}k_proj", size)
        values = self.norm(
            self.heads(x, f"{prefix}v_proj", size) if f"{prefix}v_proj.weight" in self.t else made
        )
        return self.rotated(self.norm(made, f"{prefix}k_norm"), positions, kind), values

    def queries(self, x: Tensor, prefix: str, positions: Tensor, kind: str, size: int) -> Tensor:
        q = self.norm(self.heads(x, f"{prefix}q_proj", size), f"{prefix}q_norm")
        return self.rotated(q, positions, kind)

    def behind_attention(self, stream: Tensor, attended: Tensor, prefix: str) -> Tensor:
        """The stream behind a layer, of which all but the attention is done here."""
        out = attended @ self.t[f"{prefix}self_attn.o_proj.weight"].T
        stream = stream + self.norm(out, f"{prefix}post_attention_layernorm")
        x = self.norm(stream, f"{prefix}pre_feedforward_layernorm")
        gate, up = (x @ self.t[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = (F.gelu(gate, approximate="tanh") * up) @ self.t[f"{prefix}mlp.down_proj.weight"].T
        return (stream + self.norm(x, f"{prefix}post_feedforward_layernorm")) * self.t[
            f"{prefix}layer_scalar"
        ]

    def scaled(self, embedded: Tensor) -> Tensor:
        return embedded.double() * embedded.shape[-1] ** 0.5

    def capped(self, logits: Tensor) -> Tensor:
        cap = self.text["final_logit_softcapping"]
        return logits if cap is None else (logits / cap).tanh() * cap


class ReferenceAssistant(ReferenceGemma4Head):
    """Four layers over what the target's last layers stored of the text, which is clean here."""

    def position(self, num_stored: int) -> int:
        return num_stored

    def seen(self, num_stored: int, kind: str) -> Tensor:
        """[1, positions]: all, or as many as a window and one."""
        back = num_stored - torch.arange(num_stored)
        return (back <= self.text["sliding_window"] + 1 if kind == SLIDING else back > 0)[None]

    def source(self, kind: str) -> int:
        """The target's layer whose keys and values layers of ``kind`` see."""
        config = self.target.model.config
        stored = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
        return max(index for index, each in enumerate(stored) if each == kind)

    def stored(self, streams: list[Tensor], kind: str) -> tuple[Tensor, Tensor]:
        """By the target's own modules."""
        index = self.source(kind)
        layer = self.target.model.model.layers[index]
        own, x = layer.self_attn, layer.input_layernorm(streams[index].float())
        made = own.k_proj(x).view(len(x), -1, own.head_dim)
        values = made if own.v_proj is None else own.v_proj(x).view(len(x), -1, own.head_dim)
        keys = own.k_norm(made).double()
        return self.rotated(keys, torch.arange(len(x)), kind), own.v_norm(values).double()

    def propose(self, tokens: tuple[int, ...], k: int) -> tuple[int, ...]:
        streams, output = self.states(tokens)
        stored = {kind: self.stored(streams, kind) for kind in (SLIDING, GLOBAL)}
        token, hidden, proposed = tokens[-1], output[-1:], list[int]()
        for _ in range(k):
            logits, hidden = self.forward(token, hidden, stored)
            token = int(logits.argmax())
            proposed.append(token)
        return tuple(proposed)

    def forward(
        self, token: int, hidden: Tensor, stored: dict[str, tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Logits [V], and the state fed back [1, Ht]."""
        embedded = self.scaled(self.target.embedding[[token]])
        stream = torch.cat((embedded, hidden), -1) @ self.t["pre_projection.weight"].T
        for index, kind in enumerate(self.text["layer_types"]):
            prefix, (keys, values) = f"model.layers.{index}.", stored[kind]
            at = torch.tensor([self.position(len(keys))])
            x = self.norm(stream, f"{prefix}input_layernorm")
            q = self.queries(x, f"{prefix}self_attn.", at, kind, keys.shape[-1])
            attended = self.attended(q, keys, values, self.seen(len(keys), kind))
            stream = self.behind_attention(stream, attended, prefix)
        normed = self.norm(stream, "model.norm")
        return self.logits(normed[0]), self.fed_back(stream, normed) @ self.t["post_projection.weight"].T

    def fed_back(self, stream: Tensor, normed: Tensor) -> Tensor:
        return normed

    def logits(self, normed: Tensor) -> Tensor:
        logits = self.capped(self.t["model.embed_tokens.weight"] @ normed)
        if not self.raw["use_ordered_embeddings"]:
            return logits
        fitting = self.t["masked_embedding.centroids.weight"] @ normed
        order = self.t["masked_embedding.token_ordering"].long().view(len(fitting), -1)
        listed = order[fitting.topk(self.raw["centroid_intermediate_top_k"]).indices].flatten()
        return torch.full_like(logits, -torch.inf).index_copy(0, listed, logits[listed])


class ReferenceDeepSpec(ReferenceGemma4Head):
    """What DeepSpec's heads for a Gemma 4 have in common: features, tables and layers without windows."""

    def __init__(self, path: Path, target: DenseTarget) -> None:
        super().__init__(path, target)
        self.embedding = self.t.get("embed_tokens.weight", target.embedding.double())
        self.lm_head = self.t.get("lm_head.weight", target.lm_head.double())
        self.aux: list[int] = [index + 1 for index in self.raw["target_layer_ids"]]
        self.size: int = self.raw["global_head_dim"]

    def fused(self, streams: list[Tensor]) -> Tensor:
        return torch.cat([streams[index] for index in self.aux], -1) @ self.t["fc.weight"].T

    def chosen(self, normed: Tensor, before: int) -> int:
        return int(self.capped(self.lm_head @ normed).argmax())


class ReferenceGemma4Eagle3(ReferenceDeepSpec):
    """One layer; ids are shifted left by one against the states, positions are not."""

    def propose(self, tokens: tuple[int, ...], k: int) -> tuple[int, ...]:
        hidden, ids, proposed = self.fused(self.states(tokens)[0]), [*tokens[1:]], list[int]()
        for _ in range(k):
            stream = self.run(torch.tensor(ids), hidden)[-1:]
            proposed.append(self.chosen(self.norm(stream, "norm")[0], ids[-1]))
            hidden, ids = torch.cat((hidden, self.recycled(stream))), [*ids, proposed[-1]]
        return tuple(proposed)

    def recycled(self, stream: Tensor) -> Tensor:
        return stream

    def run(self, ids: Tensor, hidden: Tensor) -> Tensor:
        embedded = self.norm(self.scaled(self.embedding[ids]), "layers.0.input_layernorm")
        x = torch.cat((embedded, self.norm(hidden, "layers.0.hidden_norm")), -1)
        at, prefix = torch.arange(len(ids)), "layers.0.self_attn."
        keys, values = self.keys(x, prefix, at, GLOBAL, self.size)
        q = self.queries(x, prefix, at, GLOBAL, self.size)
        seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        return self.behind_attention(hidden, self.attended(q, keys, values, seen), "layers.0.")


class ReferenceGemma4DSpark(ReferenceDeepSpec):
    """A block of the newest token and masks over the text's features, whose rows see one another."""

    def propose(self, tokens: tuple[int, ...], k: int) -> tuple[int, ...]:
        states = self.norm(self.fused(self.states(tokens)[0]), "hidden_norm")
        ids = torch.tensor([tokens[-1]] + [self.raw["mask_token_id"]] * (k - 1))
        stream, text = self.scaled(self.embedding[ids]), torch.arange(len(states))
        at = len(states) + torch.arange(k)
        for index in range(self.raw["num_hidden_layers"]):
            prefix = f"layers.{index}.self_attn."
            x = self.norm(stream, f"layers.{index}.input_layernorm")
            stored = self.keys(states, prefix, text, GLOBAL, self.size)
            own = self.keys(x, prefix, at, GLOBAL, self.size)
            keys, values = (torch.cat(both) for both in zip(stored, own, strict=True))
            q = self.queries(x, prefix, at, GLOBAL, self.size)
            seen = torch.ones(k, len(keys), dtype=torch.bool)
            stream = self.behind_attention(stream, self.attended(q, keys, values, seen), f"layers.{index}.")
        proposed, before = list[int](), tokens[-1]
        for row in self.norm(stream, "norm"):
            proposed.append(before := self.chosen(row, before))
        return tuple(proposed)

    def chosen(self, normed: Tensor, before: int) -> int:
        logits = self.capped(self.lm_head @ normed)
        if self.raw["markov_rank"]:
            logits = (
                logits
                + self.t["markov_head.markov_w2.weight"] @ self.t["markov_head.markov_w1.weight"][before]
            )
        return int(logits.argmax())
