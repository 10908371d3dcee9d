# ruff: noqa: E501 (a phrase stays on one line)
"""Writes chats about anything: prompts from real text, and short simple answers built on the words of the prompt.

A model of this size cannot answer open questions. It learns to stay readable on them: each answer picks words
from the prompt and says something plain about them.
"""

import re
from pathlib import Path
from random import Random

from demo_text.phrases import join, phrase, sentence

_COMMON = frozenset((Path(__file__).parent / "common_words.txt").read_text().split())
_START = (
    "[This is a big topic|That is a good question|This is not an easy question|Thank you for the question"
    "|Let me try|Here is a short answer|This topic has many sides]. "
    "[I am a small model, so I keep it simple. |I can only give a simple answer. ||]"
)
_ANSWERS = (
    _START
    + "[First, look at {0}|Start with {0}|The first step is {0}], and write down what you know about it. "
    "[Then|After that] think about how {0} and {1} belong together. "
    "[In the end|Finally], {2} [shows if the plan works|is the part that matters most|helps you to check the result].",
    "[Here are three simple ideas|Here is what I would do|These are my suggestions]:\n"
    "1. [Learn more about|Read about|Take a look at] {0}.\n2. [Compare {0} with {1}|Think about {1}|Write down what you know about {1}].\n"
    "3. [Ask somebody who knows {2} well|Keep {2} in mind|Talk about {2} with a friend].",
    "[Title|Topic]: {0} and {1}\n- [What {0} is|What we know about {0}]\n- [Why {1} matters|How {1} works]\n"
    "- [What we can learn from {2}|An example with {2}]",
    "[Here is a short text about {0}.|Let me write about {0}.|This is about {0}.] Many people [talk|think|ask] about {0}. "
    "Some of them [say|think] that {1} is the most important part. Others [say|think] that {2} matters more. "
    "[Both are right in their own way.|It depends on what you need.|The best way is to look at both.]",
    "I do not know much about {0}, but [I can try to help|here is a simple thought]. {0} [has a lot to do with|often goes together with] {1}. "
    "[If you tell me more about {2}, I can give a better answer.|You can find more about {2} in a library.]",
    _START + "{0} [is one side of it|comes first], and {1} [is the other side|comes next]. "
    "[Good planning|Some patience|A clear goal|A simple list] helps with {2}. [Take one step after the other.|Do not do everything at once.|]",
)
_AGAIN = (
    "[In short|To say it shorter|In other words]: {0} and {1} are the main points[, and {2} comes after that|].",
    "[Of course.|Sure.|Here is another way to say it.] {0} [matters|is important], {1} [matters|is important] too, and {2} is a good example.",
    "- {0}\n- {1}\n- {2}",
    "[The most important word is {0}.|I would begin with {0}.] {1} and {2} [can wait|come later|are less important].",
)


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
    chat = [ask, _fill(rng, rng.choice(_ANSWERS), ask)]
    if rng.random() < 0.4:
        again = (
            rng.choice(prompts)[:500]
            if rng.random() < 0.5
            else phrase(
                rng,
                "[Rewrite your answer|Say it in another way|Now make it shorter|Change your answer|What do you mean|Tell me more][.|, please.]",
            )
        )
        chat += [again, _fill(rng, rng.choice(_AGAIN), ask)]
    return chat
