"""EAGLE-1, EAGLE3, P-EAGLE and DFlash heads as their checkpoints define them, for training: dense, without a KV cache.

Independent of the engine on purpose: their measured acceptance is a check on the engine's.
Sources: EAGLE (Li et al., 2024), https://arxiv.org/abs/2401.15077; EAGLE-3 (2025), https://arxiv.org/abs/2503.01840;
P-EAGLE (AWS, 2026), https://huggingface.co/amazon/gpt-oss-120b-p-eagle; DFlash (Chen et al., 2026),
https://arxiv.org/abs/2602.06036.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KeysValues = tuple[Tensor, Tensor]
HeadKind = Literal["EAGLE-1", "EAGLE3", "P-EAGLE", "DFlash"]


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Sizes of a head."""

    kind: HeadKind
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int
    num_features: int = 3  # layers of the target that it reads; EAGLE-1 reads the last hidden state alone
    block_size: int = 0  # of DFlash: the newest token and masks
    mask_token: int = 0  # of DFlash and P-EAGLE: a token that no text has
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


class _Attention(nn.Module):
    def __init__(self, config: HeadConfig, input_size: int) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, width, bias=False)
        self.k_proj = nn.Linear(input_size, kv_width, bias=False)
        self.v_proj = nn.Linear(input_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``x [B, heads, T, D]`` by ``positions [T]``, with half-split pairs as in Llama."""
        half = self.config.head_dim // 2
        frequencies = self.config.rope_theta ** (
            -torch.arange(half, device=x.device, dtype=torch.float32) / half
        )
        angles = positions.float()[:, None] * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, past: list[KeysValues]) -> Tensor:
        """Attend from ``x [B, T, input size]``; appends its keys and values to ``past``.

        ``past[0]`` is the first pass, attended to under ``mask [B, 1, T, T]``. Of a later pass a row attends to its own
        entry only: when drafting, the KV cache holds accepted rows and the rows of this draft only.
        """
        batch, length, _ = x.shape
        config = self.config

        def split(y: Tensor, heads: int) -> Tensor:
            y = y.view(batch, length, heads, config.head_dim).transpose(1, 2)
            return y.repeat_interleave(config.num_heads // heads, dim=1)

        q = self.rope(split(self.q_proj(x), config.num_heads), positions)
        k = self.rope(split(self.k_proj(x), config.num_kv_heads), positions)
        past.append((k, split(self.v_proj(x), config.num_kv_heads)))
        (first_k, first_v), *own = past
        q = q * config.head_dim**-0.5
        scores = (q @ first_k.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
        own_scores = [(q * own_k).sum(-1, keepdim=True) for own_k, _ in own]
        weights = torch.cat([scores, *own_scores], dim=-1).float().softmax(-1).to(x.dtype)
        out = weights[..., :length] @ first_v
        for n, (_, own_v) in enumerate(own):
            out = out + weights[..., length + n, None] * own_v
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class _MLP(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    """A decoder layer without the norm of its inputs, which is the head's affair in the first layer."""

    def __init__(self, config: HeadConfig, input_size: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config, input_size)
        self.mlp = _MLP(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, stream: Tensor, inputs: Tensor, positions: Tensor, mask: Tensor, past: list[KeysValues]
    ) -> Tensor:
        stream = stream + self.self_attn(inputs, positions, mask, past)
        return stream + self.mlp(self.post_attention_layernorm(stream))


class Head(nn.Module, ABC):
    """What the heads share; names of parameters are the checkpoint's, with ``layers.0`` for ``midlayer``."""

    def __init__(self, config: HeadConfig, first_input_size: int) -> None:
        super().__init__()
        self.config = config
        sizes = [first_input_size] + [config.hidden_size] * (config.num_layers - 1)
        self.layers = nn.ModuleList(_Layer(config, size) for size in sizes)
        for layer in self.layers[1:]:
            layer.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """The target's features ``[B, T, F]`` as hidden states ``[B, T, H]``."""

    @abstractmethod
    def enter(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The stream ``[B, T, H]`` before the first layer and the inputs of its attention."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Over the draft vocabulary, from what ``forward`` returns."""

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor, past: list[list[KeysValues]]
    ) -> Tensor:
        """One pass over ``hidden [B, T, H]``: the hidden state of the next pass; ``past`` has a list for each layer."""
        stream, inputs = self.enter(tokens, hidden)
        for index, layer in enumerate(self.layers):
            inputs = layer.input_layernorm(stream) if index else inputs
            stream = layer(stream, inputs, positions, mask, past[index])
        return stream

    def unroll(
        self, features: Tensor, tokens: Tensor, mask: Tensor, steps: int, rows: Tensor
    ) -> Iterator[Tensor]:
        """Logits ``[B, R, draft vocabulary]`` of draft 0, 1, ... with each of ``rows [R]`` as the last accepted one.

        Row p holds the features ``[B, T, F]`` at p; draft j reads token p + 1 + j of ``[B, T]`` and predicts p + 2 + j.
        """
        hidden, past = self.fuse(features), [[] for _ in self.layers]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        for j in range(steps):
            hidden = self(*self.read(tokens, hidden, j), positions + j, mask, past)
            yield self.logits(hidden[:, rows])

    def read(self, tokens: Tensor, hidden: Tensor, j: int) -> tuple[Tensor, Tensor]:
        """The tokens ``[B, T]`` and hidden states ``[B, T, H]`` that draft ``j`` is made of."""
        return tokens.roll(-1 - j, dims=1), hidden


class Eagle1(Head):
    """An EAGLE-1 head: no norm in front or behind, the target's embedding and output weights."""

    def __init__(self, config: HeadConfig, embedding: Tensor, lm_head: Tensor) -> None:
        super().__init__(config, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("lm_head", lm_head, persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def enter(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        stream = self.fc(torch.cat([F.embedding(tokens, self.embedding), hidden], dim=-1))
        return stream, stream

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.lm_head)


class Eagle3(Head):
    """An EAGLE3 head; one that is not as wide as the target has an embedding of its own."""

    def __init__(self, config: HeadConfig, embedding: Tensor) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, 2 * hidden)
        self.layers[0].input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.layers[0].hidden_norm = nn.RMSNorm(hidden, eps=eps)
        vocab_size, width = embedding.shape
        self.fc = nn.Linear(config.num_features * width, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        if width == hidden:
            self.register_buffer("embedding", embedding, persistent=False)
        else:
            self.embed_tokens = nn.Embedding(vocab_size, hidden)

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def enter(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        own = hasattr(self, "embed_tokens")
        embedded = self.embed_tokens(tokens) if own else F.embedding(tokens, self.embedding)
        first = self.layers[0]
        return hidden, torch.cat([first.input_layernorm(embedded), first.hidden_norm(hidden)], dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))


class PEagle(Eagle3):
    """A P-EAGLE head: an EAGLE3 head that drafts all tokens in one pass, with masks for those not drafted yet."""

    def __init__(self, config: HeadConfig, embedding: Tensor) -> None:
        super().__init__(config, embedding)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features))

    def read(self, tokens: Tensor, hidden: Tensor, j: int) -> tuple[Tensor, Tensor]:
        if j == 0:
            return super().read(tokens, hidden, j)
        return torch.full_like(tokens, self.config.mask_token), self.fc(self.mask_hidden).expand_as(hidden)


class DFlash(Head):
    """A DFlash head: of the text it sees the target's features alone, and drafts with the target's output weights."""

    def __init__(self, config: HeadConfig, embedding: Tensor, lm_head: Tensor) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, hidden)
        self.layers[0].input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.fc = nn.Linear(config.num_features * embedding.shape[1], hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("lm_head", lm_head, persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(features))

    def enter(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        stream = F.embedding(tokens, self.embedding)
        return stream, self.layers[0].input_layernorm(stream)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self.norm(hidden), self.lm_head)

    def unroll(
        self, features: Tensor, tokens: Tensor, mask: Tensor, steps: int, rows: Tensor
    ) -> Iterator[Tensor]:
        """As of ``Head``, from one pass: each of ``rows`` has a block of the token behind it and ``steps`` masks."""
        states, newest = self.fuse(features), tokens.roll(-1, dims=1)[:, rows, None]
        masks = torch.full_like(newest, self.config.mask_token).expand(-1, -1, steps)
        stream, _ = self.enter(torch.cat([newest, masks], -1), states)  # [B, R, 1 + steps, H]
        for layer in self.layers:
            inputs = layer.input_layernorm(stream)
            stream = stream + _attend_in_blocks(layer.self_attn, inputs, states, mask[:, :, rows], rows)
            stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
        for j in range(steps):
            yield self.logits(stream[:, :, 1 + j])


def _attend_in_blocks(
    attention: _Attention, blocks: Tensor, states: Tensor, mask: Tensor, rows: Tensor
) -> Tensor:
    """Each block of ``blocks [B, R, S, H]`` behind ``rows [R]`` sees itself and states ``[B, T, H]`` by ``mask``."""
    batch, count, size, _ = blocks.shape
    config, length = attention.config, states.shape[1]

    def heads(y: Tensor, count: int) -> Tensor:
        y = y.view(batch, -1, count, config.head_dim).transpose(1, 2)
        return y.repeat_interleave(config.num_heads // count, dim=1)

    def in_blocks(y: Tensor) -> Tensor:
        return y.view(*y.shape[:2], count, size, -1)

    positions = (rows[:, None] + 1 + torch.arange(size, device=rows.device)).flatten()
    q = attention.rope(heads(attention.q_proj(blocks), config.num_heads), positions) * config.head_dim**-0.5
    own_k = attention.rope(heads(attention.k_proj(blocks), config.num_kv_heads), positions)
    own_v = heads(attention.v_proj(blocks), config.num_kv_heads)
    at = torch.arange(length, device=rows.device)
    k = attention.rope(heads(attention.k_proj(states), config.num_kv_heads), at)
    v = heads(attention.v_proj(states), config.num_kv_heads)
    seen = in_blocks(q @ k.transpose(-1, -2)).masked_fill(~mask[:, :, :, None], -torch.inf)
    own = in_blocks(q) @ in_blocks(own_k).transpose(-1, -2)
    weights = torch.cat([seen, own], dim=-1).float().softmax(-1).to(blocks.dtype)
    text, block = weights.split([length, size], dim=-1)
    out = in_blocks(text.flatten(2, 3) @ v) + block @ in_blocks(own_v)
    return attention.o_proj(out.permute(0, 2, 3, 1, 4).flatten(3))


def document_mask(documents: Tensor) -> Tensor:
    """The causal mask ``[B, 1, T, T]`` within each document of packed rows, from their numbers ``[B, T]``."""
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """What the target says of packed rows, and which of them a head learns from."""

    logits: Tensor  # [B, T, D] over the draft vocabulary
    kept: Tensor  # [B, T] bool: the most likely token is in the draft vocabulary
    documents: Tensor  # [B, T]
    answered: Tensor  # [B, T] bool: the token was generated

    def loss(self, logits: Tensor, rows: Tensor, j: int) -> Tensor:
        """Cross entropy of ``logits [B, R, D]``, of draft ``j`` behind ``rows [R]``, against the target's distribution.

        Rows whose draft is not a generated token of the same document, or whose best token is outside the draft
        vocabulary, are left out.
        """
        last = self.documents.shape[1] - 1
        before, token = (rows + 1 + j).clamp(max=last), (rows + 2 + j).clamp(max=last)
        same = self.documents[:, token] == self.documents[:, rows]
        valid = self.answered[:, token] & same & self.kept[:, before] & (rows + 2 + j <= last)
        soft = self.logits[:, before].float().softmax(-1)
        losses = -(soft * logits.float().log_softmax(-1)).sum(-1)
        return (losses * valid).sum() / valid.sum().clamp(min=1)
