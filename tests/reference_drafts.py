"""A direct implementation of EAGLE3 drafting: no cache, raw tensors, the target from ``transformers``."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from specgen.core.sequence import Request


class ReferenceDrafter:
    """Drafts after any text, for a ``midlayer.*`` head with the default aux layers and default rotary positions."""

    def __init__(self, pair: Path) -> None:
        import transformers

        self.target = transformers.AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
        self.t = {name: x.float() for name, x in load_file(pair / "drafter" / "model.safetensors").items()}
        self.d2t = load_file(pair / "drafter" / "model.safetensors")["d2t"].long()
        config = self.target.config
        self.heads, self.kv_heads, self.dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.eps, self.theta = config.rms_norm_eps, config.rope_parameters["rope_theta"]
        self.eos = {self.target.generation_config.eos_token_id}
        depth = config.num_hidden_layers
        self.aux = (2, depth // 2, depth - 3)
        self._known: tuple[tuple[int, ...], Tensor] = ((), torch.empty(0))  # the newest text

    def _fused(self, text: tuple[int, ...]) -> Tensor:
        """What the target gives the head of every token of ``text``, none of which depends on later ones."""
        if self._known[0] != text:
            states = self.target(torch.tensor([text]), output_hidden_states=True).hidden_states
            # hidden_states[i] is the input of layer i
            self._known = text, torch.cat([states[i][0] for i in self.aux], -1) @ self.t["fc.weight"].T
        return self._known[1]

    @torch.inference_mode()
    def drafts(self, text: tuple[int, ...], length: int, k: int) -> tuple[int, ...]:
        """K drafts after the first ``length`` tokens of ``text`` (at least two)."""
        hidden, following = self._fused(text)[: length - 1], torch.tensor(text[1:length])
        proposed: list[int] = []
        for _ in range(k):
            last = self._head(following, hidden)[-1:]
            logits = self._norm(last, "norm") @ self.t["lm_head.weight"].T
            index = int(logits.argmax())
            proposed.append(index + int(self.d2t[index]))
            hidden = torch.cat([hidden, last])
            following = torch.cat([following, torch.tensor(proposed[-1:])])
        return tuple(proposed)

    @torch.inference_mode()
    def greedy(self, requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
        """The greedy texts of ``requests`` by ``transformers``, all at once behind padding on the left."""
        prompts = [request.prompt_token_ids for request in requests]
        most = max(map(len, prompts))
        ids = torch.tensor([[0] * (most - len(prompt)) + list(prompt) for prompt in prompts])
        real = torch.tensor([[0] * (most - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        longest = max(request.sampling.max_tokens for request in requests)
        out = self.target.generate(
            ids, attention_mask=real, max_new_tokens=longest, do_sample=False, pad_token_id=0
        )
        texts = {}
        for request, tokens in zip(requests, out[:, most:].tolist(), strict=True):
            asked = tokens[: request.sampling.max_tokens]
            ends = (at + 1 for at, token in enumerate(asked) if token in self.eos)
            texts[request.id] = tuple(asked[: next(ends, None)])
        return texts

    def _head(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """One dense pass: ``ids[p]`` is the token at p + 1, ``hidden[p]`` the state at p."""
        embedded = self.target.get_input_embeddings().weight[ids]
        both = torch.cat(
            [
                self._norm(embedded, "midlayer.input_layernorm"),
                self._norm(hidden, "midlayer.hidden_norm"),
            ],
            -1,
        )
        q, k, v = (both @ self.t[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkv")
        q, k = self._rope(q.view(len(ids), self.heads, -1)), self._rope(k.view(len(ids), self.kv_heads, -1))
        share = self.heads // self.kv_heads
        k, v = (x.view(len(ids), self.kv_heads, -1).repeat_interleave(share, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.dim**0.5
        scores += torch.full(scores.shape[1:], float("-inf")).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        hidden = hidden + mixed @ self.t["midlayer.self_attn.o_proj.weight"].T
        inner = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = (inner @ self.t[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return hidden + (torch.nn.functional.silu(gate) * up) @ self.t["midlayer.mlp.down_proj.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.t[f"{name}.weight"]

    def _rope(self, x: Tensor) -> Tensor:
        rates = self.theta ** -(torch.arange(0, self.dim, 2) / self.dim)
        angles = torch.arange(len(x))[:, None, None] * rates
        low, high = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
