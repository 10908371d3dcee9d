"""Heads of a target: their training on its generations, their acceptance and their files."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from demo_corpus import pack
from demo_target import Optimizer, Recipe
from dense_heads import DFlash, Eagle1, Eagle3, Head, HeadConfig, PEagle, Teacher, document_mask
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

_STEP_WEIGHT = 0.8  # of the loss of each draft against the one before it
Answered = list[tuple[list[int], list[int]]]  # prompt ids, answer ids


def aux_layers(config: HeadConfig, num_layers: int) -> tuple[int, ...]:
    """Layers whose inputs are the features: the last ones of EAGLE3's default rule."""
    return (2, num_layers // 2, num_layers - 3)[-config.num_features :]


def draft_vocabulary(answered: Answered, size: int) -> Tensor:
    """The token ids ``[size]``, ascending, that the target generates most often."""
    counts = Counter(token for _, answer_ids in answered for token in answer_ids)
    ranked = sorted(range(max(size, max(counts) + 1)), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


def make_head(config: HeadConfig, target: LlamaForCausalLM) -> Head:
    """An untrained head beside ``target``, on its device."""
    embedding = target.get_input_embeddings().weight.detach()
    output = target.get_output_embeddings().weight.detach()
    if config.kind == "EAGLE-1":
        head: Head = Eagle1(config, embedding, output)
    elif config.kind == "DFlash":
        head = DFlash(config, embedding, output)
        head.norm.load_state_dict(target.model.norm.state_dict())  # in front of the same output weights
    else:
        head = (PEagle if config.kind == "P-EAGLE" else Eagle3)(config, embedding)
    return head.to(target.device)


@torch.no_grad()
def read_target(
    target: LlamaForCausalLM, config: HeadConfig, tokens: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Features ``[B, T, F]`` for a head and logits ``[B, T, V]`` of packed rows."""
    output = target(input_ids=tokens, attention_mask=mask, output_hidden_states=True, use_cache=False)
    states = output.hidden_states  # the last one is behind the final norm
    if config.kind == "EAGLE-1":
        return states[-1], output.logits
    layers = aux_layers(config, target.config.num_hidden_layers)
    return torch.cat([states[layer] for layer in layers], dim=-1), output.logits


def pack_answers(recipe: Recipe, answered: Answered) -> tuple[Tensor, Tensor, Tensor]:
    """Packed rows ``[N, T]`` of prompts with answers, a mask of the generated tokens, the number of each token's
    document (0: padding)."""
    fitting = [(p, a) for p, a in answered if len(p) + len(a) <= recipe.head_row_length]
    columns = (
        [np.array(p + a) for p, a in fitting],
        [np.array([0] * len(p) + [1] * len(a)) for p, a in fitting],
        [np.full(len(p) + len(a), 1 + n % 65535) for n, (p, a) in enumerate(fitting)],
    )
    tokens, written, documents = (
        torch.from_numpy(pack(column, recipe.head_row_length, 0).astype(np.int32)) for column in columns
    )
    return tokens, written.bool(), documents


def train_head(
    recipe: Recipe, config: HeadConfig, target: LlamaForCausalLM, answered: Answered
) -> Iterator[tuple[Head, Tensor]]:
    """A head in training by training-time test on the target's generations, and its draft vocabulary, after every
    epoch: the same head each time."""
    torch.manual_seed(recipe.seed)
    device = target.device
    kept = draft_vocabulary(answered, config.draft_vocab_size).to(device)
    in_kept = torch.zeros(target.config.vocab_size, dtype=torch.bool, device=device).index_fill(0, kept, True)
    head = make_head(config, target)
    output = target.get_output_embeddings().weight
    if isinstance(head, Eagle3) and head.lm_head.weight.shape[1] == output.shape[1]:
        with torch.no_grad():
            head.lm_head.weight.copy_(output[kept])

    def loss_of(tokens: Tensor, written: Tensor, documents: Tensor, rows: Tensor) -> Tensor:
        mask = document_mask(documents)
        features, said = read_target(target, config, tokens, mask)
        teacher = Teacher(
            logits=said[..., kept], kept=in_kept[said.argmax(-1)], documents=documents, answered=written
        )
        drafts = enumerate(head.unroll(features, tokens, mask, recipe.unrolled_steps, rows))
        return torch.stack([_STEP_WEIGHT**j * teacher.loss(logits, rows, j) for j, logits in drafts]).sum()

    on_gpu = device.type == "cuda"
    loss_of = torch.compile(loss_of) if on_gpu else loss_of
    data = [column.to(device) for column in pack_answers(recipe, answered)]
    each, start = len(data[0]) // recipe.head_batch_rows, time.monotonic()
    steps, rng = each * recipe.head_epochs, np.random.default_rng(recipe.seed)
    optimizer = Optimizer(head, learning_rate=recipe.head_learning_rate, steps=steps)
    for step in range(steps):
        if step % each == 0:
            order = torch.from_numpy(rng.permutation(len(data[0]))).to(device)
        chosen = order[step % each * recipe.head_batch_rows :][: recipe.head_batch_rows]
        tokens, written, documents = (column[chosen] for column in data)
        rows = torch.from_numpy(np.sort(rng.permutation(tokens.shape[1])[: recipe.head_loss_rows])).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
            loss = loss_of(tokens.long(), written, documents, rows)
        optimizer.step(loss)
        if step % max(steps // 15, 1) == 0 or step == steps - 1:
            print(
                f"head step {step}/{steps} loss {loss.item():.4f} {time.monotonic() - start:.0f} s",
                flush=True,
            )
        if step % each == each - 1:
            yield head, kept


@torch.no_grad()
def measure_acceptance(
    target: LlamaForCausalLM, head: Head, kept: Tensor, answered: Answered, *, num_drafts: int
) -> dict[str, object]:
    """Acceptance on the target's greedy answers: over all rows, and over the rows where steps start."""
    d2t = kept - torch.arange(len(kept), device=kept.device)
    every_row: list[Acceptance] = []
    every_step: list[Acceptance] = []
    for start in range(0, len(answered), 32):
        pairs = answered[start : start + 32]
        width = max(len(p) + len(a) for p, a in pairs)
        tokens = torch.tensor([p + a + [0] * (width - len(p) - len(a)) for p, a in pairs], device=kept.device)
        mask = document_mask(torch.ones_like(tokens))  # what stands behind a text is seen by no row of it
        features, _ = read_target(target, head.config, tokens, mask)
        rows = torch.arange(width, device=kept.device)
        drafts = enumerate(head.unroll(features, tokens, mask, num_drafts, rows))
        right = torch.stack([agreement(logits, d2t, tokens, j) for j, logits in drafts], dim=-1).cpu()
        spans = [(row, len(p) - 1, len(p) + len(a)) for row, (p, a) in zip(right, pairs, strict=True)]
        every_row += [count_rows(*span) for span in spans]
        every_step += [count_steps(*span) for span in spans]
    return {"teacher_forced": pool(every_row).summary(), "simulated": pool(every_step).summary()}


def write_head(folder: Path, head: Head, kept: Tensor, target: LlamaForCausalLM) -> None:
    """The head in bfloat16 in EAGLE's formats or z-lab's; ``d2t`` holds offsets, ``t2d`` marks the draft vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    head_config, vocab_size, kept = head.config, target.config.vocab_size, kept.cpu()
    tensors = {name: value.to(torch.bfloat16).contiguous().cpu() for name, value in head.state_dict().items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: getattr(target.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "hidden_act": "silu",
        "hidden_size": head_config.hidden_size,
        "intermediate_size": head_config.intermediate_size,
        "num_hidden_layers": head_config.num_layers,
        "num_attention_heads": head_config.num_heads,
        "num_key_value_heads": head_config.num_kv_heads,
        "head_dim": head_config.head_dim,
        "max_position_embeddings": target.config.max_position_embeddings,
        "rms_norm_eps": head_config.rms_norm_eps,
        "rope_theta": head_config.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": vocab_size,
    }
    layers = aux_layers(head_config, target.config.num_hidden_layers)
    if head_config.kind == "DFlash":
        config |= {
            "architectures": ["DFlashDraftModel"],
            "block_size": head_config.block_size,
            "num_target_layers": target.config.num_hidden_layers,
            # outputs of layers
            "dflash_config": {
                "mask_token_id": head_config.mask_token,
                "target_layer_ids": [layer - 1 for layer in layers],
            },
        }
    if isinstance(head, Eagle3):
        tensors = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
        tensors["d2t"] = kept - torch.arange(len(kept))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, kept, True)
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": head_config.draft_vocab_size,
        }
        if head_config.hidden_size != target.config.hidden_size:
            config["target_hidden_size"] = target.config.hidden_size
    if head_config.kind == "P-EAGLE":
        config |= {"parallel_drafting": True, "ptd_token_id": head_config.mask_token}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_head(folder: Path, config: HeadConfig, target: LlamaForCausalLM) -> tuple[Head, Tensor]:
    """The stored head in float32 beside ``target``, and the target ids of its draft vocabulary."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    kept = torch.arange(config.draft_vocab_size)
    if "d2t" in tensors:
        kept = kept + tensors.pop("d2t")
        assert torch.equal(tensors.pop("t2d").nonzero()[:, 0], kept)
    head = make_head(config, target)
    head.load_state_dict(tensors)
    return head.eval(), kept.to(target.device)


def agreement(logits: Tensor, d2t: Tensor, tokens: Tensor, j: int) -> Tensor:
    """Whether draft ``j`` of each row is the token that follows: bool ``[B, T]``."""
    drafts = logits.argmax(-1)
    return drafts + d2t[drafts] == tokens.roll(-2 - j, dims=1)


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Number of steps, and of those in which each draft and all before it were accepted.

    As in the engine's reports every step drafts all positions, and drafts beyond a text's end are not accepted.
    """

    num_drafts: int
    accepted: list[int]

    def summary(self) -> dict[str, object]:
        """Joint rates by position and the mean acceptance length, all positions pooled."""
        joint = [count / max(self.num_drafts, 1) for count in self.accepted]
        return {
            "joint": [round(rate, 4) for rate in joint],
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
