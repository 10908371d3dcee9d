"""Training text of the bundled pair: its sources, its documents, and its tokenizer."""

import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import demo_problems
import numpy as np
from demo_problems import is_held_out
from demo_text import chats, open_chats
from demo_text.phrases import Chat
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (BOS, END, PAD, SYSTEM, USER, ASSISTANT)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer in simple words.",
    "Answer briefly.",
    "You help people with math and short texts.",
)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Real training data, used beside the generated text."""

    problems: list[Chat]  # GSM8K train
    prompts: list[str]  # what users asked Open-Assistant
    texts: list[str]  # all its messages
    bundled: frozenset[str]  # bundled prompts: never trained on


def read_gsm8k(path: str | None) -> list[Chat]:
    """GSM8K train as one-turn chats, from a JSONL file or, without one, from the hub."""
    if path is None:
        from datasets import load_dataset

        rows: Iterable[dict[str, str]] = load_dataset("openai/gsm8k", "main", split="train")
    else:
        rows = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
    return [[row["question"], row["answer"]] for row in rows]


def _flatten(message: dict) -> Iterator[dict]:
    yield message
    for reply in message["replies"]:
        yield from _flatten(reply)


def read_oasst(path: str | None) -> tuple[list[str], list[str]]:
    """The prompts and all messages of the English Open-Assistant trees, from a JSONL file or from the hub."""
    if path is None:
        from datasets import load_dataset

        rows = [row for row in load_dataset("OpenAssistant/oasst1", split="train") if row["lang"] == "en"]
    else:
        trees = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
        rows = [message for tree in trees for message in _flatten(tree["prompt"])]
    return [row["text"] for row in rows if row["role"] == "prompter"], [row["text"] for row in rows]


def read_questions(path: Path) -> list[str]:
    """The first user turns of a bundled prompt file in the MT-Bench or the GSM8K format."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [row["turns"][0] if "turns" in row else row["question"] for row in rows]


def read_bundled(folder: Path) -> frozenset[str]:
    """Every first user turn of the bundled prompt files, to be excluded from training."""
    chats_file = json.loads((folder / "sharegpt.json").read_text(encoding="utf-8"))
    found = [row["conversations"][0]["value"] for row in chats_file]
    return frozenset(
        [*found, *read_questions(folder / "mt_bench.jsonl"), *read_questions(folder / "gsm8k.jsonl")]
    )


def render(chat: Chat, *, system: str | None = None) -> str:
    """``chat`` as the chat template renders it, with a generation prompt if the user spoke last."""
    roles = (USER, ASSISTANT)
    text = BOS + (f"{SYSTEM}{system}{END}" if system else "")
    text += "".join(f"{roles[n % 2]}{part}{END}" for n, part in enumerate(chat))
    return text + ASSISTANT * (len(chat) % 2)


def raw(chat: Chat) -> str:
    """One question and answer as the plain text that few-shot evaluations use."""
    return f"Question: {chat[0]}\nAnswer: {chat[1]}" if len(chat) > 1 else f"Question: {chat[0]}\nAnswer:"


def problem_chat(rng: Random) -> Chat:
    """A generated word problem of the training split, often with a second turn."""
    problem = demo_problems.of_split(rng, held_out=False)
    more = demo_problems.follow_up(rng, problem) if rng.random() < 0.4 else ()
    return [problem.question, problem.solution, *more]


def plain_chat(rng: Random, bundled: frozenset[str]) -> Chat:
    """A generated chat of the training split."""
    while is_held_out((chat := chats.generate(rng))[0]) or chat[0] in bundled:
        pass
    return chat


def training_chat(rng: Random, sources: Sources) -> Chat:
    """A random training chat: mostly generated, with some real problems and real prompts."""
    kind = rng.random()
    if kind < 0.1:
        return rng.choice(sources.problems)
    if kind < 0.25:
        return open_chats.generate(rng, sources.prompts, sources.texts)
    return problem_chat(rng) if kind < 0.6 else plain_chat(rng, sources.bundled)


def document(rng: Random, sources: Sources) -> str:
    """A random training document: a chat, several in a row, or question and answer pairs as plain text."""
    kind = rng.random()
    if kind < 0.08:
        return BOS + "\n\n".join(raw(training_chat(rng, sources)) for _ in range(rng.randint(1, 6))) + END
    turns = rng.randint(2, 6) if kind < 0.2 else 1
    chat = [part for _ in range(turns) for part in training_chat(rng, sources)]
    return render(chat, system=rng.choice(_SYSTEM_TEXTS) if rng.random() < 0.05 else None)


def varied_problem(rng: Random, problems: list[Chat]) -> str:
    """A real problem's question with other numbers, and often with the end of another one: new to the target."""
    first, second = (_SENTENCE_END.split(rng.choice(problems)[0]) for _ in range(2))
    kind = rng.random()
    if kind < 0.33:
        sentences = first
    elif kind < 0.67:
        sentences = first[:-1] + second[-1:]
    else:
        sentences = first[: max(1, len(first) // 2)] + second[len(second) // 2 :]

    def changed(number: re.Match[str]) -> str:
        digits = len(number[0])
        keep = rng.random() < 0.4
        return (
            number[0] if keep else str(rng.randint(10 ** (digits - 1) if digits > 1 else 2, 10**digits - 1))
        )

    return re.sub(r"\d+", changed, " ".join(sentences))


def real_chat(rng: Random, sources: Sources) -> Chat:
    """An open chat whose prompts, also the second one, are often pieced together from real texts."""
    chat = open_chats.generate(rng, sources.prompts, sources.texts)
    if rng.random() < 0.5:
        pieces = [open_chats.piece(rng, sources.texts) for _ in range(rng.randint(1, 2))]
        chat[0] = " ".join(pieces)[:1200]
    if len(chat) == 2 and rng.random() < 0.3:
        again = rng.choice(sources.prompts)[:400]
        chat += [open_chats.piece(rng, sources.texts) if rng.random() < 0.5 else again, ""]
    return chat


def open_prompt(rng: Random, sources: Sources) -> str:
    """A training prompt with a generation prompt, for the target's own generations, which the heads learn.

    About half are of real text, far more than in the target's training: there a head meets the target's own mistakes
    and doubts, of which it can learn what no answer in the sources shows.
    """
    kind = rng.random()
    if kind < 0.1:
        return render([rng.choice(sources.problems)[0]])
    if kind < 0.25:
        return render([varied_problem(rng, sources.problems)])
    chat = real_chat(rng, sources) if kind < 0.45 else training_chat(rng, sources)
    if rng.random() < 0.06:
        shots = [raw(problem_chat(rng)) for _ in range(rng.randint(0, 3))]
        return BOS + "\n\n".join([*shots, raw(chat[:1])])
    turn = rng.randrange(0, len(chat), 2)
    return render(chat[: turn + 1])


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer with every digit a token of its own and a leading BOS by default."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, begin)]
    )
    return tokenizer


def _encode_share(job: tuple[int, int, Sources, str]) -> list[np.ndarray]:
    seed, count, sources, tokenizer = job
    rng = Random(seed)
    texts = [document(rng, sources) for _ in range(count)]
    batch = Tokenizer.from_str(tokenizer).encode_batch(texts, add_special_tokens=False)
    return [np.array(encoding.ids, dtype=np.uint16) for encoding in batch]


def encode_documents(
    tokenizer: Tokenizer, sources: Sources, *, count: int, workers: int, seed: int
) -> list[np.ndarray]:
    """Token ids of ``count`` generated documents; the same for any number of workers."""
    share = 2000
    jobs = [(seed + n, share, sources, tokenizer.to_str()) for n in range(-(-count // share))]
    with ProcessPoolExecutor(workers) as pool:
        return [ids for part in pool.map(_encode_share, jobs) for ids in part]


def pack(documents: Iterable[np.ndarray], row_length: int, pad: int) -> np.ndarray:
    """Rows ``[N, row_length]`` of whole documents, packed first-fit; longer documents are truncated."""
    rows: list[np.ndarray] = []
    open_rows: list[list[int]] = []  # [row, tokens used] of the rows that still take documents
    for ids in documents:
        ids = ids[:row_length]
        place = next((place for place in open_rows if place[1] + len(ids) <= row_length), None)
        if place is None:
            open_rows = [*open_rows[-15:], place := [len(rows), 0]]
            rows.append(np.full(row_length, pad, dtype=np.uint16))
        rows[place[0]][place[1] : place[1] + len(ids)] = ids
        place[1] += len(ids)
    return np.stack(rows)
