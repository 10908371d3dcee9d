"""Random wording for the generated training text, and what it is about: the words and facts of ``facts.json``."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

Chat = list[str]  # turns of the user and the assistant, the user first
_CHOICE = re.compile(r"\[([^\[\]]*)\]")


def phrase(rng: Random, text: str) -> str:
    """``text`` with every ``[a|b|c]`` replaced by one of its choices, the innermost first."""
    while True:
        text, count = _CHOICE.subn(lambda match: rng.choice(match[1].split("|")), text)
        if not count:
            return text


def sentence(text: str) -> str:
    """``text`` with a capital first letter."""
    return text[:1].upper() + text[1:]


def numbered(lines: list[str] | tuple[str, ...]) -> str:
    """``lines`` as a numbered list."""
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))


def bulleted(lines: list[str] | tuple[str, ...]) -> str:
    """``lines`` as a list with dashes."""
    return "\n".join(f"- {line}" for line in lines)


def join(words: list[str]) -> str:
    """``a``, ``a and b`` or ``a, b and c``."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def a(word: str) -> str:
    """``word`` with its indefinite article."""
    return ("an " if word[0] in "aeiou" else "a ") + word


@dataclass(frozen=True, kw_only=True)
class Person:
    """A person in a story, with pronouns."""

    name: str
    he: str
    his: str
    him: str


@dataclass(frozen=True, kw_only=True)
class Topic:
    """A thing to talk about: ``plain`` defines it, ``facts`` are whole sentences that can follow in any order."""

    name: str
    kind: str
    plain: str
    facts: tuple[str, ...]

    @property
    def bare(self) -> str:
        """The name without its article."""
        return self.name.removeprefix("a ").removeprefix("an ").removeprefix("the ")


def _tuples(value: Any) -> Any:
    """``value`` with tuples for lists, so that nothing changes it."""
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


_FACTS = _tuples(json.loads((Path(__file__).parent / "facts.json").read_text(encoding="utf-8")))
TOPICS: tuple[Topic, ...] = tuple(
    Topic(name=name, kind=kind, plain=plain, facts=tuple(facts))
    for name, kind, plain, *facts in _FACTS["topics"]
)
TIPS: dict[str, tuple[str, ...]] = _FACTS["tips"]
LISTS: dict[str, tuple[str, ...]] = _FACTS["lists"]
CAPITALS: dict[str, str] = _FACTS["capitals"]
OPPOSITES: dict[str, str] = _FACTS["opposites"]
PROGRAMS: tuple[tuple[str, str, str], ...] = _FACTS["programs"]  # what it does, the function, how it works
LETTERS: tuple[tuple[str, str], ...] = _FACTS["letters"]  # the reason for a letter, its text
SIDES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = _FACTS["sides"]  # arguments for and against
COMPLAINTS: dict[str, str] = _FACTS["complaints"]  # by activity of ``TIPS``, what a user may say about it
RHYMES: tuple[tuple[str, ...], ...] = _FACTS["rhymes"]  # verses on {x}
ROLES: dict[str, str] = _FACTS["roles"]  # what each says; {n} is a name
TALK: tuple[tuple[str, str], ...] = _FACTS["talk"]  # small talk and its answer
ANSWERS: tuple[str, ...] = _FACTS["open answers"]  # on three topic words, {0} to {2}
ANSWERS_AGAIN: tuple[str, ...] = _FACTS["open answers again"]
LEGS: dict[str, int] = _FACTS["legs"]  # of animals
GARDENS: tuple[tuple[str, str], ...] = _FACTS["gardens"]  # plants, and what they give
HABITS: tuple[tuple[str, str], ...] = _FACTS["habits"]  # what somebody does, and its unit
ORDERS: tuple[tuple[str, str, str, str], ...] = _FACTS["orders"]  # comparatives and superlatives both ways
TENSES: tuple[tuple[str, str, str], ...] = _FACTS["tenses"]  # present, past and future; {place} is one
_WORDS = _FACTS["words"]
SHE: list[str] = [*_WORDS["she"]]
HE: list[str] = [*_WORDS["he"]]
THINGS: tuple[str, ...] = _WORDS["things"]
CONTAINERS: tuple[str, ...] = _WORDS["containers"]
GOODS: tuple[str, ...] = _WORDS["goods"]
PLACES: tuple[str, ...] = _WORDS["places"]
CHOICES: tuple[str, ...] = _WORDS["choices"]  # things to do, of which one is better
JOBS: tuple[str, ...] = _WORDS["jobs"]
MAKERS: tuple[tuple[str, str], ...] = _WORDS["makers"]
_IRREGULAR: dict[str, str] = _WORDS["irregular"]


def people(rng: Random, count: int) -> list[Person]:
    """``count`` people with different names."""
    return [
        Person(name=name, he="she", his="her", him="her")
        if name in SHE
        else Person(name=name, he="he", his="his", him="him")
        for name in rng.sample(SHE + HE, count)
    ]


def one(plural: str) -> str:
    """The singular of one of the plural words."""
    if plural in _IRREGULAR:
        return _IRREGULAR[plural]
    if plural.endswith(("xes", "ches", "shes", "toes")):
        return plural[:-2]
    if plural.endswith("ies") and plural not in {"cookies", "pies"}:
        return plural[:-3] + "y"
    return plural[:-1]


def next_turn(rng: Random, kind: str, **fields: object) -> Chat:
    """One of the second turns of chats of that ``kind`` and its answer, on ``fields``."""
    return [phrase(rng, text).format(**fields) for text in rng.choice(_FACTS["next_turns"][kind])]


def tell(rng: Random, kind: str, **fields: object) -> list[str]:
    """The sentences of a story, a scene or a plan on ``fields``."""
    return [phrase(rng, text).format(**fields) for text in _FACTS["told"][kind]]
