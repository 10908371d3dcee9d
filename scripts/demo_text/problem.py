"""One worked word problem, and the operations in its answer."""

import operator
from dataclasses import dataclass
from random import Random

from demo_text.phrases import phrase, sentence

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
_SMALL = "zero one two three four five six seven eight nine ten eleven twelve".split()  # noqa: SIM905


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question, the sentences of its solution, and the resulting number."""

    question: str
    steps: tuple[str, ...]
    answer: int
    more: tuple[str, str] | None = None  # a second turn that only makes sense here, and its answer

    @property
    def solution(self) -> str:
        """The worked answer in the GSM8K format."""
        return "\n".join((*self.steps, f"#### {self.answer}"))


def work(a: int, op: str, b: int, unit: str = "") -> tuple[int, str]:
    """The value of ``a op b`` and its text with calculator annotation; divisions must have no remainder."""
    assert op != "/" or a % b == 0
    value = _OPERATIONS[op](a, b)
    return value, f"{a} {op} {b} = {unit}<<{a}{op}{b}={value}>>{value}"


def number_word(rng: Random, value: int) -> str:
    """``value`` in digits, or sometimes a small one as a word."""
    return _SMALL[value] if value < len(_SMALL) and rng.random() < 0.15 else str(value)


def make_problem(question: str, *steps: str, answer: int, more: tuple[str, str] | None = None) -> Problem:
    return Problem(question=question, steps=steps, answer=answer, more=more)


def second_turn(rng: Random, ask: str, a: int, op: str, b: int, says: str, unit: str = "") -> tuple[str, str]:
    """A second turn answered by one operation, whose text replaces ``@`` in ``says``."""
    value, done = work(a, op, b, unit)
    return sentence(phrase(rng, ask).strip()), sentence(f"{says.replace('@', done)}\n#### {value}")
