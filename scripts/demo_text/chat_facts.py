"""Facts of the generated chats, from ``facts.json``: everyday topics, activities with tips, lists, small programs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
