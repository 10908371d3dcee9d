# ruff: noqa: E501 (a phrase stays on one line)
"""Writes chats about anything: prompts from real text, and short simple answers built on the words of the prompt.

A model of this size cannot answer open questions. It learns to stay readable on them: each answer picks words
from the prompt and says something plain about them.
"""

import re
from pathlib import Path
from random import Random

from demo_text.phrases import ANSWERS, ANSWERS_AGAIN, join, phrase, sentence

_COMMON = frozenset((Path(__file__).parent / "common_words.txt").read_text().split())


def keywords(text: str) -> list[str]:
    """The longer words of ``text`` that carry its topic, in order, without repeats."""
    words = re.findall(r"[A-Za-z][A-Za-z-]{4,}", text)
    return list(dict.fromkeys(word for word in words if word.lower() not in _COMMON))


def _fill(rng: Random, template: str, text: str) -> str:
    """``template`` on three topic words of ``text``, in the order in which they stand there."""
    found = keywords(text)
    found += [word for word in ("time", "people", "practice") if word not in found][: max(3 - len(found), 0)]
    words = [found[n] for n in sorted(rng.sample(range(len(found)), 3))]
    lines = phrase(rng, template).format(*words).strip().split("\n")
    return "\n".join(re.sub(r"(^|[.:] )([a-z])", lambda m: m[1] + m[2].upper(), line) for line in lines)


def piece(rng: Random, texts: list[str]) -> str:
    """One to five sentences of a real text, or the whole of a short one."""
    text = rng.choice(texts)
    sentences = re.split(r"(?<=[.!?])\s+", text)
    if len(text) < 300 and rng.random() < 0.5:
        return text
    start = rng.randrange(len(sentences))
    return " ".join(sentences[start : start + rng.randint(1, 5)])[:900]


def generate(rng: Random, prompts: list[str], texts: list[str]) -> list[str]:
    """A chat on a real prompt of ``prompts`` or on a piece of ``texts``, sometimes with a second turn."""
    ask = rng.choice(prompts)[:1500] if rng.random() < 0.4 else piece(rng, texts)
    if rng.random() < 0.12:
        ask = (
            phrase(
                rng,
                "[Summarize this text|Summarize the following text in one sentence|What is this text about|Read the text]: ",
            )
            + ask
        )
        words = (keywords(ask.partition(": ")[2]) or ["something"])[:3]
        answer = f"The text is about {join(words)}."
        more = [
            phrase(rng, "[List the main points.|Give me the key words.|What are the main points?]"),
            "\n".join(f"- {sentence(word)}" for word in words),
        ]
        return [ask, answer, *(more if rng.random() < 0.5 else ())]
    chat = [ask, _fill(rng, rng.choice(ANSWERS), ask)]
    if rng.random() < 0.4:
        again = (
            rng.choice(prompts)[:500]
            if rng.random() < 0.5
            else phrase(
                rng,
                "[Rewrite your answer|Say it in another way|Now make it shorter|Change your answer|What do you mean|Tell me more][.|, please.]",
            )
        )
        chat += [again, _fill(rng, rng.choice(ANSWERS_AGAIN), ask)]
    return chat
