"""Trains a draft head for a target of Llama's architecture, on what that target itself answers.

    python scripts/train_head.py --target runs/smollm2 --answers runs/answers.npz \\
        --prompts gsm8k.jsonl --prompts sharegpt.json:8 --own-prompts 40000
    python scripts/train_head.py --target runs/smollm2 --answers runs/answers.npz --kind EAGLE3 --output runs/eagle3

The first line has the target answer, the second trains on it. Prompts are files that `specgen generate --dataset`
reads, `:N` for N answers to each; of `--own-prompts` the target writes the user's part too, from its chat template
alone. A third of the answers is greedy, the others are sampled at temperature 0.7 and 1. Several processes with a seed
each can answer at once: all files that `--answers` names are trained on. The head is written in a published format,
after every epoch; the seed decides everything but the order of floating-point sums.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import get_args

import numpy as np
import torch
from demo_target import Recipe
from dense_heads import HeadConfig, HeadKind
from head_training import Answered, train_head, write_head
from transformers import LlamaForCausalLM

from specgen import Engine, EngineConfig, Message, Prompt, RequestOutput, SamplingParams
from specgen.config import parse_bytes
from specgen.prompts.load import DataSource

_TEMPERATURES = (0.0, 0.7, 1.0)
_TOO_SHORT, _TOO_LONG = 2, 1200  # characters of a prompt that the target wrote
_MARK = "<prompt>"


def read_prompts(files: Iterable[str]) -> Iterator[tuple[Message, ...]]:
    """The opening messages of every prompt of ``files`` (``PATH`` or ``PATH:N`` for N times)."""
    for name in files:
        path, _, times = name.rpartition(":") if name.rpartition(":")[2].isdigit() else (name, "", "1")
        for prompt in DataSource(dataset=path).open():
            if isinstance(prompt, Prompt) and prompt.messages:
                yield from itertools.repeat(prompt.messages, int(times))


def write_turns(engine: Engine, chats: list[tuple[Message, ...]], seed: int) -> list[str]:
    """What the target writes as the user's next message in each of ``chats``; an empty one opens a chat."""
    tokenizer = engine.tokenizer
    openings = [
        tokenizer.render_open_chat([*chat, Message(role="user", content=_MARK)]).partition(_MARK)[0]
        for chat in chats
    ]
    prompts = (
        Prompt(id=f"turn-{n}", token_ids=tuple(tokenizer.encode_rendered(text)))
        for n, text in enumerate(openings)
    )
    sampling = SamplingParams(temperature=1.0, max_tokens=256, seed=seed)
    found = {output.id: output for output in engine.generate(prompts, sampling)}
    outputs = [found[f"turn-{n}"] for n in range(len(chats))]
    return [output.text.strip() if output.finish_reason == "stop" else "" for output in outputs]


def is_prompt(text: str) -> bool:
    """Whether a text that the target wrote is of a length that a user would write."""
    return _TOO_SHORT <= len(text) <= _TOO_LONG


def answer(engine: Engine, chats: list[tuple[Message, ...]], recipe: Recipe) -> list[RequestOutput]:
    """The target's answer to each of ``chats``, at each of the temperatures in turn."""
    prompts = (
        Prompt(id=str(n), messages=chat, sampling={"temperature": _TEMPERATURES[n % len(_TEMPERATURES)]})
        for n, chat in enumerate(chats)
    )
    sampling = SamplingParams(max_tokens=recipe.max_new_tokens, seed=recipe.seed)
    found = {output.id: output for output in engine.generate(prompts, sampling) if output.error is None}
    return [found[str(n)] for n in range(len(chats)) if str(n) in found]


def make_answers(options: argparse.Namespace, recipe: Recipe) -> Answered:
    """Prompts and answers as token ids, in a random order; half of the target's own prompts go on for a second turn."""
    rng, user = Random(recipe.seed), "user"
    config = EngineConfig(
        model=options.target,
        drafter=None,
        num_spec_tokens=0,
        max_batch_size=options.batch,
        dtype="bfloat16",
        kv_memory=options.kv_memory,
    )
    with Engine(config) as engine:
        written = dict.fromkeys(write_turns(engine, [()] * options.own_prompts, recipe.seed))
        own = [text for text in written if is_prompt(text)]
        chats = [*read_prompts(options.prompts), *((Message(role=user, content=text),) for text in own)]
        rng.shuffle(chats)
        outputs = answer(engine, chats, recipe)
        longer = [
            (*chats[int(output.id)], Message(role="assistant", content=output.text))
            for output in outputs
            if output.finish_reason == "stop" and output.text and rng.random() < 0.5
        ]
        turns = zip(longer, write_turns(engine, longer, recipe.seed), strict=True)
        second = [
            (*chat, Message(role=user, content=text))
            for chat, text in turns
            if _TOO_SHORT <= len(text) <= _TOO_LONG
        ]
        outputs += answer(engine, second, recipe)
        encode = engine.tokenizer.encode_rendered
        pairs = dict.fromkeys((output.prompt, output.token_ids) for output in outputs)  # greedy ones repeat
        answered = [(encode(prompt), list(token_ids)) for prompt, token_ids in pairs]
    rng.shuffle(answered)
    print(
        f"{len(own):,} prompts of its own, {len(answered):,} answers of {sum(len(a) for _, a in answered):,} tokens",
        flush=True,
    )
    return answered


def save_answers(path: Path, answered: Answered) -> None:
    """Token ids one behind the other, and the lengths of prompts and answers."""
    ids = np.fromiter(itertools.chain.from_iterable(p + a for p, a in answered), dtype=np.uint32)
    lengths = np.array([(len(p), len(a)) for p, a in answered], dtype=np.uint32)
    np.savez_compressed(path, ids=ids, lengths=lengths)


def load_answers(path: Path) -> Answered:
    """What ``save_answers`` has written."""
    stored = np.load(path)
    ids, answered, at = stored["ids"].tolist(), [], 0
    for prompt, length in stored["lengths"].tolist():
        answered.append((ids[at : at + prompt], ids[at + prompt : at + prompt + length]))
        at += prompt + length
    return answered


def head_config(options: argparse.Namespace, target: LlamaForCausalLM) -> HeadConfig:
    """A head as wide as the target and with its heads of attention."""
    config = target.config
    full = options.kind in ("EAGLE-1", "DFlash")  # they have the target's output weights
    return HeadConfig(
        kind=options.kind,
        num_layers=options.layers,
        hidden_size=config.hidden_size,
        intermediate_size=options.intermediate_size or config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        draft_vocab_size=config.vocab_size if full else min(options.draft_vocab, config.vocab_size),
        block_size=options.drafts + 1 if options.kind == "DFlash" else 0,
        mask_token=options.mask_token,
        rope_theta=config.rope_parameters["rope_theta"],
        rms_norm_eps=config.rms_norm_eps,
    )


def main() -> None:
    """Parse the command line, answer, train, write the head and how it was made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="directory of the target")
    parser.add_argument("--kind", choices=get_args(HeadKind), help="of the head; default: none is trained")
    parser.add_argument("--output", type=Path, default=Path("head"), help="directory of the head")
    parser.add_argument("--prompts", action="append", default=[], metavar="PATH[:N]")
    parser.add_argument("--own-prompts", type=int, default=0, help="prompts that the target writes")
    parser.add_argument(
        "--answers",
        type=Path,
        action="append",
        required=True,
        help="a file of answers, made if absent (.npz)",
    )
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--intermediate-size", type=int, help="default: the target's")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="of EAGLE3 and P-EAGLE")
    parser.add_argument("--drafts", type=int, default=5, help="steps ahead that are trained")
    parser.add_argument(
        "--mask-token", type=int, default=0, help="of DFlash and P-EAGLE: one that no text has"
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rows", type=int, default=32, help="rows of 1,024 tokens in a training batch")
    parser.add_argument(
        "--loss-rows", type=int, default=512, help="positions of each row that are learnt from"
    )
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--max-new-tokens", type=int, default=640)
    parser.add_argument("--batch", type=int, default=512, help="sequences answered at once")
    parser.add_argument(
        "--kv-memory", type=parse_bytes, help="where several answer on one GPU: each one's, 16GiB"
    )
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    recipe = Recipe(
        head_row_length=1024,
        head_batch_rows=options.rows,
        head_epochs=options.epochs,
        head_learning_rate=options.learning_rate,
        head_loss_rows=options.loss_rows,
        unrolled_steps=options.drafts,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
    )
    start = time.monotonic()
    for path in options.answers:
        if not path.exists():
            save_answers(path, make_answers(options, recipe))
    answered = [pair for path in options.answers for pair in load_answers(path)]
    print(f"{len(answered):,} answers after {time.monotonic() - start:.0f} s", flush=True)
    if not options.kind:
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    target = LlamaForCausalLM.from_pretrained(options.target, dtype=dtype).to(device).eval()
    target.requires_grad_(False)
    config = head_config(options, target)
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    asked["answers"] = [str(path) for path in options.answers]
    made = {"options": asked, "answers": len(answered), "answer_tokens": sum(len(a) for _, a in answered)}
    for epoch, (head, kept) in enumerate(train_head(recipe, config, target, answered)):
        write_head(options.output, head, kept, target)
        made |= {"epochs": epoch + 1, "seconds": round(time.monotonic() - start)}
        (options.output / "training.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(made), flush=True)


if __name__ == "__main__":
    main()
