"""Trains the bundled target and its heads from scratch, and measures them.

    python scripts/train_demo_pair.py --gsm8k train.jsonl --oasst en_100_tree.jsonl --output data/demo

Without paths the data comes from the hub. Models already in the output folder are kept and measured again.
"""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from random import Random

import demo_problems
import numpy as np
import torch
from demo_corpus import (
    PAD,
    Sources,
    encode_documents,
    open_prompt,
    pack,
    plain_chat,
    problem_chat,
    read_bundled,
    read_gsm8k,
    read_oasst,
    read_questions,
    render,
    train_tokenizer,
)
from demo_problems import is_held_out
from demo_target import Recipe, answer, language_loss, train_target, write_target, write_tokenizer
from demo_text import chats
from dense_heads import HeadConfig
from head_training import Answered, measure_acceptance, read_head, train_head, write_head
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

ROOT = Path(__file__).parents[1]
PROMPTS = ROOT / "data/prompts"
_CARDS = Path(__file__).parent / "demo_cards"  # of the models, to be filled in
# by folder: the head of `make demo`, and small ones of other kinds
HEADS = {
    "drafter": HeadConfig(
        kind="EAGLE3",
        num_layers=1,
        hidden_size=256,
        intermediate_size=512,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        draft_vocab_size=1536,
    ),
    "drafter-eagle1": HeadConfig(
        kind="EAGLE-1",
        num_layers=1,
        hidden_size=256,
        intermediate_size=96,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        draft_vocab_size=3072,
    ),
    "drafter-two-layers": HeadConfig(
        kind="EAGLE3",
        num_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        draft_vocab_size=1536,
    ),
    "drafter-dflash": HeadConfig(
        kind="DFlash",
        num_layers=1,
        hidden_size=256,
        intermediate_size=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        draft_vocab_size=3072,
        num_features=1,
        block_size=6,
        mask_token=2,  # that of padding
    ),
}


def head_recipe(recipe: Recipe, config: HeadConfig) -> Recipe:
    """``recipe`` for the training of such a head: DFlash's was trained on one CPU core, in 11 minutes."""
    if config.kind != "DFlash":
        return recipe
    return replace(
        recipe,
        num_prompts=6000,
        head_epochs=1,
        head_batch_rows=4,
        head_learning_rate=0.03,
        unrolled_steps=config.block_size - 1,
    )


def make_tokenizer(recipe: Recipe, sources: Sources) -> Tokenizer:
    """A tokenizer trained on about equal amounts of real and generated text."""
    rng = Random(recipe.seed)
    generated = [render(problem_chat(rng)) for _ in range(6000)]
    generated += [render(plain_chat(rng, sources.bundled)) for _ in range(10000)]
    real = [*(part for chat in sources.problems for part in chat), *sources.texts]
    return train_tokenizer([*generated, *real], recipe.vocab_size)


def make_rows(recipe: Recipe, sources: Sources, tokenizer: Tokenizer) -> np.ndarray:
    """The training rows of the target."""
    workers = os.cpu_count() or 1
    documents = encode_documents(
        tokenizer, sources, count=recipe.num_documents, workers=workers, seed=recipe.seed
    )
    return pack(documents, recipe.row_length, tokenizer.token_to_id(PAD))


def make_answers(
    recipe: Recipe, sources: Sources, tokenizer: Tokenizer, folder: Path, device: str
) -> Answered:
    """The answers of the target in ``folder`` to training prompts: greedy, and sampled at two temperatures."""
    target = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    rng = Random(recipe.seed + 1)
    texts = [open_prompt(rng, sources) for _ in range(recipe.num_prompts)]
    encoded = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    prompts = [ids for ids in encoded if len(ids) <= recipe.head_row_length - recipe.max_new_tokens]
    half, answered = len(prompts) // 2, []
    for temperature, part in (
        (0.0, prompts[:half]),
        (0.7, prompts[half : half * 3 // 2]),
        (1.0, prompts[half * 3 // 2 :]),
    ):
        found = answer(target, part, max_new_tokens=recipe.max_new_tokens, temperature=temperature)
        answered += list(zip(part, found, strict=True))
    Random(recipe.seed).shuffle(answered)
    return answered


def held_out_prompts(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, list[list[int]]]:
    """Token ids of held-out prompts by kind: the bundled files' first turns, and generated chats."""
    rng = Random(recipe.seed + 2)
    plain: list[str] = []
    while len(plain) < recipe.num_measured // 4:
        if is_held_out((chat := chats.generate(rng))[0]):
            plain.append(chat[0])
    texts = {
        "mt_bench.jsonl": read_questions(PROMPTS / "mt_bench.jsonl"),
        "gsm8k.jsonl": read_questions(PROMPTS / "gsm8k.jsonl"),
        "generated chats": plain,
    }
    return {
        kind: [
            e.ids for e in tokenizer.encode_batch([render([text]) for text in some], add_special_tokens=False)
        ]
        for kind, some in texts.items()
    }


def accuracy(recipe: Recipe, tokenizer: Tokenizer, target: LlamaForCausalLM) -> float:
    """Share of held-out word problems with the exact final answer, decoded greedily."""
    rng = Random(recipe.seed + 3)
    problems = [demo_problems.of_split(rng, held_out=True) for _ in range(recipe.num_measured)]
    prompts = [tokenizer.encode(render([p.question]), add_special_tokens=False).ids for p in problems]
    answers = answer(target, prompts, max_new_tokens=recipe.max_new_tokens, temperature=0.0)
    ends = [tokenizer.decode(ids).rpartition("#### ")[2].strip() for ids in answers]
    return sum(end == str(p.answer) for end, p in zip(ends, problems, strict=True)) / len(problems)


@torch.no_grad()
def held_out_loss(recipe: Recipe, tokenizer: Tokenizer, target: LlamaForCausalLM) -> float:
    """Next-token cross entropy on held-out word problems with their answers."""
    rng = Random(recipe.seed + 4)
    problems = [demo_problems.of_split(rng, held_out=True) for _ in range(recipe.num_measured)]
    texts = [render([p.question, p.solution]) for p in problems]
    ids = [np.array(e.ids) for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    rows = torch.from_numpy(pack(ids, 512, target.config.pad_token_id).astype(np.int64))[:32].to(
        target.device
    )
    return language_loss(target, rows, target.config.bos_token_id, target.config.pad_token_id).item()


def get_target(
    recipe: Recipe, sources: Sources, folder: Path, device: str
) -> tuple[Tokenizer, LlamaForCausalLM]:
    """The target in ``folder``, in float32 from its stored bfloat16; trained first if there is none."""
    if not (folder / "model.safetensors").exists():
        if not (folder / "tokenizer.json").exists():
            write_tokenizer(folder, make_tokenizer(recipe, sources))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        rows = make_rows(recipe, sources, tokenizer)
        print(f"{rows.size / 1e6:.1f} M tokens in {len(rows)} rows", flush=True)
        write_target(folder, train_target(recipe, tokenizer, rows, device))
    target = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    return Tokenizer.from_file(str(folder / "tokenizer.json")), target


def answer_held_out(recipe: Recipe, tokenizer: Tokenizer, target: LlamaForCausalLM) -> dict[str, Answered]:
    """The target's greedy answers to held-out prompts by kind; some are printed."""
    answered = {}
    for kind, prompts in held_out_prompts(recipe, tokenizer).items():
        answers = answer(
            target, prompts, max_new_tokens=recipe.max_new_tokens, temperature=0.0, batch_size=64
        )
        answered[kind] = list(zip(prompts, answers, strict=True))
        for ids, text in answered[kind][:24]:
            print(f"[{kind}] {tokenizer.decode(ids)}\n  -> {tokenizer.decode(text[:96])}", flush=True)
    return answered


def _rows(acceptance: dict[str, dict[str, dict]]) -> str:
    lines = []
    for prompts, measured in acceptance.items():
        for how, rates in measured.items():
            cells = [f"{rate:.3f}" for rate in rates["joint"]]
            length = f"{rates['mean_acceptance_length']:.2f}"
            lines.append("| " + " | ".join([prompts, how.replace("_", " "), *cells, length]) + " |")
    return "\n".join(lines)


def write_cards(output: Path, figures: dict) -> None:
    """Write ``figures`` as ``training.json`` and as the README of the target and of each head."""
    (output / "training.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    target_config = json.loads((output / "target/config.json").read_text(encoding="utf-8"))
    target = (
        (_CARDS / "target.md")
        .read_text("utf-8")
        .format(
            million=(output / "target/model.safetensors").stat().st_size / 2e6,
            accuracy=figures["word_problem_accuracy"],
            loss=figures["target_loss_held_out_word_problems"],
            vocab=target_config["vocab_size"],
        )
    )
    (output / "target/README.md").write_text(target, encoding="utf-8")
    for name in HEADS:
        config = json.loads((output / name / "config.json").read_text(encoding="utf-8"))
        card = (_CARDS / f"{name}.md").read_text("utf-8")
        card = card.format(**config, rows=_rows(figures["acceptance"][name]))
        (output / name / "README.md").write_text(card, encoding="utf-8")


def train(recipe: Recipe, sources: Sources, output: Path, device: str) -> dict[str, object]:
    """Train the models missing in ``output``, measure the stored ones, write and return the measurements."""
    tokenizer, target = get_target(recipe, sources, output / "target", device)
    target.requires_grad_(False)
    missing = [name for name in HEADS if not (output / name / "model.safetensors").exists()]
    recipes = {name: head_recipe(recipe, HEADS[name]) for name in missing}
    for each in dict.fromkeys(recipes.values()):
        answered = make_answers(each, sources, tokenizer, output / "target", device)
        for name in (name for name in missing if recipes[name] == each):
            *_, (head, kept) = train_head(each, HEADS[name], target, answered)
            write_head(output / name, head, kept, target)
    held_out, acceptance = answer_held_out(recipe, tokenizer, target), {}
    for name, config in HEADS.items():
        head, kept = read_head(output / name, config, target)
        acceptance[name] = {
            kind: measure_acceptance(target, head, kept, some, num_drafts=4)
            for kind, some in held_out.items()
        }
    figures = {
        "target_loss_held_out_word_problems": round(held_out_loss(recipe, tokenizer, target), 4),
        "word_problem_accuracy": accuracy(recipe, tokenizer, target),
        "acceptance": acceptance,
    }
    write_cards(output, figures)
    return figures


def main() -> None:
    """Parse the command line, train, print the measurements as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gsm8k", help="GSM8K train.jsonl (default: openai/gsm8k from the hub)")
    parser.add_argument(
        "--oasst", help="Open-Assistant trees as JSONL (default: OpenAssistant/oasst1 from the hub)"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "data/demo", help="default: data/demo")
    options = parser.parse_args()
    prompts, texts = read_oasst(options.oasst)
    sources = Sources(
        problems=read_gsm8k(options.gsm8k),
        prompts=prompts,
        texts=texts,
        bundled=read_bundled(PROMPTS),
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    figures = train(Recipe(), sources, options.output, device)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
