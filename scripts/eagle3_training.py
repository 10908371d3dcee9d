"""An EAGLE3 head as its checkpoints define it, trained by training-time test: dense, without a KV cache.

Independent of the engine on purpose: its measured acceptance is a check on the engine's.
Source: EAGLE-3 (Li et al., 2025), https://arxiv.org/abs/2503.01840.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Sizes of the head; hidden size, heads and vocabulary follow the target."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int
    rope_theta: float
    rms_norm_eps: float


class _Attention(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``x [B, heads, T, D]`` by ``positions [T]``, with half-split pairs as in Llama."""
        half = self.config.head_dim // 2
        frequencies = self.config.rope_theta ** (
            -torch.arange(half, device=x.device, dtype=torch.float32) / half
        )
        angles = positions.float()[:, None] * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def forward(
        self, x: Tensor, positions: Tensor, mask: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Attend from ``x [B, T, 2H]``; appends its keys and values to ``past``.

        ``past[0]`` is the first pass, attended to under ``mask [B, 1, T, T]``. Of a later pass a row attends to its own
        entry only: when drafting, the KV cache holds accepted rows and the rows of this draft only.
        """
        batch, length, _ = x.shape
        config = self.config

        def split(y: Tensor, heads: int) -> Tensor:
            y = y.view(batch, length, heads, config.head_dim).transpose(1, 2)
            return y.repeat_interleave(config.num_heads // heads, dim=1)

        q = self._rope(split(self.q_proj(x), config.num_heads), positions)
        k = self._rope(split(self.k_proj(x), config.num_kv_heads), positions)
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


class _MidLayer(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Head(nn.Module):
    """The head; parameter names are the checkpoint's."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = _MidLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    def forward(self, hidden: Tensor, embeds: Tensor, positions: Tensor, mask: Tensor, past: list) -> Tensor:
        """One pass over ``hidden [B, T, H]``: the hidden state that feeds the next pass, before the norm."""
        layer = self.midlayer
        x = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], dim=-1)
        hidden = hidden + layer.self_attn(x, positions, mask, past)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def unroll(self, features: Tensor, embeds: Tensor, mask: Tensor, steps: int) -> Iterator[Tensor]:
        """Logits ``[B, T, draft vocabulary]`` of draft 0, 1, ... with every row as the last accepted one.

        Row p holds the features ``[B, T, 3H]`` at p; draft j reads token p + 1 + j and predicts p + 2 + j.
        """
        hidden, past = self.fc(features), []
        positions = torch.arange(embeds.shape[1], device=embeds.device)
        for j in range(steps):
            hidden = self(hidden, embeds.roll(-1 - j, dims=1), positions + j, mask, past)
            yield self.lm_head(self.norm(hidden))


def document_mask(tokens: Tensor, bos: int) -> tuple[Tensor, Tensor]:
    """The document of each token of packed rows ``[B, T]``, and the causal mask ``[B, 1, T, T]`` inside it."""
    documents = (tokens == bos).cumsum(1)
    length = tokens.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
    return documents, ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]


def agreement(logits: Tensor, d2t: Tensor, tokens: Tensor, j: int) -> Tensor:
    """Whether draft ``j`` of each row is the token that follows: bool ``[B, T]``."""
    drafts = logits.argmax(-1)
    return drafts + d2t[drafts] == tokens.roll(-2 - j, dims=1)


def head_loss(
    logits: Tensor, teacher: Tensor, kept: Tensor, answered: Tensor, documents: Tensor, j: int
) -> Tensor:
    """Cross entropy of draft ``j`` against the target's distribution over the draft vocabulary.

    ``teacher [B, T, V]`` are the target's logits, ``kept`` the target ids of the draft vocabulary, ``answered``
    marks generated tokens. Rows whose best token is outside the draft vocabulary are left out.
    """
    teacher = teacher.roll(-1 - j, dims=1)
    best_kept = torch.zeros(teacher.shape[-1], dtype=torch.bool, device=kept.device).index_fill(0, kept, True)
    valid = (
        answered.roll(-2 - j, dims=1)
        & (documents == documents.roll(-2 - j, dims=1))
        & best_kept[teacher.argmax(-1)]
    )
    valid[:, -2 - j :] = False
    soft = teacher[..., kept].float().softmax(-1)
    losses = -(soft * logits.float().log_softmax(-1)).sum(-1)
    return (losses * valid).sum() / valid.sum().clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Number of steps, and of those in which each draft and all before it were accepted.

    As in the engine's reports every step drafts all positions, and drafts beyond a text's end are not accepted.
    """

    num_drafts: int
    accepted: list[int]

    def summary(self) -> dict[str, object]:
        """Joint and conditional rates by position and the mean acceptance length, all positions pooled."""
        joint = [count / max(self.num_drafts, 1) for count in self.accepted]
        before = [1.0, *joint[:-1]]
        return {
            "joint": [round(rate, 4) for rate in joint],
            "conditional": [
                round(rate / max(last, 1e-9), 4) for rate, last in zip(joint, before, strict=True)
            ],
            "mean_acceptance_length": round(1 + sum(joint), 4),
            "num_drafts": self.num_drafts,
        }


def _run(right: Tensor, room: int) -> int:
    """How many leading drafts of one step ``right [K]`` are accepted with ``room`` tokens left in the text."""
    return int(right[: max(room, 0)].long().cumprod(0).sum())


def _count(runs: list[int], num_positions: int) -> Acceptance:
    return Acceptance(
        num_drafts=len(runs), accepted=[sum(run > j for run in runs) for j in range(num_positions)]
    )


def count_rows(right: Tensor, first: int, end: int) -> Acceptance:
    """Counts with every row of one answer as the last accepted one.

    ``right [T, K]``: whether each draft after each row is right; ``first``: the prompt's last
    row; ``end``: the text's length in tokens.
    """
    return _count([_run(right[row], end - row - 2) for row in range(first, end - 2)], right.shape[1])


def count_steps(right: Tensor, first: int, end: int) -> Acceptance:
    """As ``count_rows``, but only for rows where speculative decoding would start a step."""
    runs, row = [], first
    while row < end - 2:
        runs.append(_run(right[row], end - row - 2))
        row += 1 + runs[-1]
    return _count(runs, right.shape[1])


def pool(counts: list[Acceptance]) -> Acceptance:
    """The sum of the counts of several answers."""
    accepted = [sum(column) for column in zip(*(count.accepted for count in counts), strict=True)]
    return Acceptance(num_drafts=sum(count.num_drafts for count in counts), accepted=accepted)
