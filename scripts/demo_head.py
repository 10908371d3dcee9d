"""The bundled EAGLE3 head: its training on the target's generations, its acceptance and its files."""

import json
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from demo_corpus import BOS, pack
from demo_optimizer import Optimizer
from demo_target import Recipe, answer
from eagle3_training import (
    Acceptance,
    Head,
    HeadConfig,
    agreement,
    count_rows,
    count_steps,
    document_mask,
    head_loss,
    pool,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

_STEP_WEIGHT = 0.8  # of the loss of each draft against the one before it
Answered = list[tuple[list[int], list[int]]]  # prompt ids, answer ids


def aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Layers whose inputs are the features, by EAGLE3's default rule."""
    return 2, num_layers // 2, num_layers - 3


def draft_vocabulary(answered: Answered, size: int) -> Tensor:
    """The token ids ``[size]``, ascending, that the target generates most often."""
    counts = Counter(token for _, answer_ids in answered for token in answer_ids)
    ranked = sorted(range(max(size, max(counts) + 1)), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


def head_config(recipe: Recipe, target: LlamaForCausalLM) -> HeadConfig:
    """The head's sizes beside those of its target."""
    return HeadConfig(
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_heads=recipe.num_heads,
        num_kv_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        draft_vocab_size=recipe.draft_vocab_size,
        rope_theta=10000.0,
        rms_norm_eps=target.config.rms_norm_eps,
    )


@torch.no_grad()
def read_target(target: LlamaForCausalLM, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features ``[B, T, 3H]``, logits ``[B, T, V]`` and token embeddings ``[B, T, H]`` of packed rows."""
    output = target(input_ids=tokens, attention_mask=mask, output_hidden_states=True, use_cache=False)
    layers = aux_layers(target.config.num_hidden_layers)
    features = torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)
    return features, output.logits, target.get_input_embeddings()(tokens)


def pack_answers(recipe: Recipe, answered: Answered, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed rows of prompts with answers, and a mask of the generated tokens."""
    fitting = [(p, a) for p, a in answered if len(p) + len(a) <= recipe.head_row_length]
    tokens = pack([np.array(p + a) for p, a in fitting], recipe.head_row_length, pad)
    written = pack([np.array([0] * len(p) + [1] * len(a)) for p, a in fitting], recipe.head_row_length, 0)
    return tokens, written.astype(bool)


def train_head(
    recipe: Recipe, target: LlamaForCausalLM, answered: Answered, device: str
) -> tuple[Head, Tensor]:
    """A head trained by training-time test on the target's generations, and its draft vocabulary."""
    torch.manual_seed(recipe.seed)
    kept = draft_vocabulary(answered, recipe.draft_vocab_size).to(device)
    head = Head(head_config(recipe, target)).to(device)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[kept])
    bos = target.config.bos_token_id

    def loss_of(tokens: Tensor, written: Tensor) -> Tensor:
        documents, mask = document_mask(tokens, bos)
        features, teacher, embeds = read_target(target, tokens, mask)
        drafts = enumerate(head.unroll(features, embeds, mask, recipe.unrolled_steps))
        losses = [
            _STEP_WEIGHT**j * head_loss(logits, teacher, kept, written, documents, j) for j, logits in drafts
        ]
        return torch.stack(losses).sum()

    loss_of = torch.compile(loss_of) if device == "cuda" else loss_of
    rows, written = pack_answers(recipe, answered, target.config.pad_token_id)
    data, marks = torch.from_numpy(rows.astype(np.int32)).to(device), torch.from_numpy(written).to(device)
    each, start = len(rows) // recipe.head_batch_rows, time.monotonic()
    steps, rng = each * recipe.head_epochs, np.random.default_rng(recipe.seed)
    optimizer = Optimizer(head, learning_rate=recipe.head_learning_rate, steps=steps)
    for step in range(steps):
        if step % each == 0:
            order = torch.from_numpy(rng.permutation(len(rows))).to(device)
        chosen = order[step % each * recipe.head_batch_rows :][: recipe.head_batch_rows]
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of(data[chosen].long(), marks[chosen])
        optimizer.step(loss)
        if step % max(steps // 15, 1) == 0 or step == steps - 1:
            print(
                f"head step {step}/{steps} loss {loss.item():.4f} {time.monotonic() - start:.0f} s",
                flush=True,
            )
    return head.eval(), kept


@torch.no_grad()
def measure_acceptance(
    target: LlamaForCausalLM,
    head: Head,
    kept: Tensor,
    prompts: list[list[int]],
    *,
    num_drafts: int,
    max_new_tokens: int,
) -> dict[str, object]:
    """Acceptance on the target's greedy answers: over all rows, and over the rows where steps start."""
    answers = answer(target, prompts, max_new_tokens=max_new_tokens, temperature=0.0, batch_size=64)
    d2t = kept - torch.arange(len(kept), device=kept.device)
    every_row: list[Acceptance] = []
    every_step: list[Acceptance] = []
    for start in range(0, len(prompts), 32):
        pairs = list(zip(prompts[start : start + 32], answers[start : start + 32], strict=True))
        width = max(len(p) + len(a) for p, a in pairs)
        rows = [p + a + [target.config.pad_token_id] * (width - len(p) - len(a)) for p, a in pairs]
        tokens = torch.tensor(rows, device=kept.device)
        _, mask = document_mask(tokens, target.config.bos_token_id)
        features, _, embeds = read_target(target, tokens, mask)
        drafts = enumerate(head.unroll(features, embeds, mask, num_drafts))
        right = torch.stack([agreement(logits, d2t, tokens, j) for j, logits in drafts], dim=-1).cpu()
        spans = [(row, len(p) - 1, len(p) + len(a)) for row, (p, a) in zip(right, pairs, strict=True)]
        every_row += [count_rows(*span) for span in spans]
        every_step += [count_steps(*span) for span in spans]
    return {"teacher_forced": pool(every_row).summary(), "simulated": pool(every_step).summary()}


def write_head(folder: Path, head: Head, kept: Tensor, recipe: Recipe, tokenizer: Tokenizer) -> None:
    """The head in bfloat16 in the EAGLE format: ``d2t`` holds offsets, ``t2d`` marks the draft vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.to(torch.bfloat16).contiguous().cpu() for name, value in head.state_dict().items()}
    kept = kept.cpu()
    tensors["d2t"] = kept - torch.arange(len(kept))
    tensors["t2d"] = torch.zeros(recipe.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id("<|end|>"),
        "pad_token_id": tokenizer.token_to_id("<|pad|>"),
        "hidden_act": "silu",
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_kv_heads,
        "head_dim": recipe.head_dim,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": recipe.vocab_size,
        "draft_vocab_size": recipe.draft_vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_head(folder: Path, recipe: Recipe, target: LlamaForCausalLM) -> tuple[Head, Tensor]:
    """The stored head in float32 beside ``target``, and the target ids of its draft vocabulary."""
    tensors = load_file(folder / "model.safetensors")
    kept = tensors.pop("d2t") + torch.arange(recipe.draft_vocab_size)
    assert torch.equal(tensors.pop("t2d").nonzero()[:, 0], kept)
    head = Head(head_config(recipe, target))
    head.load_state_dict(tensors)
    return head.to(target.device).eval(), kept.to(target.device)
