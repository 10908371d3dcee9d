# ruff: noqa: E501 (a phrase stays on one line)
"""Generates grade-school word problems with worked answers in the GSM8K format, split by hash.

Every text is made from the templates below; the calculator annotations ``<<12*3=36>>`` and the last line
``#### 36`` are GSM8K's (Cobbe et al., 2021).
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

from demo_text.phrases import phrase, sentence
from demo_text.problem import Problem, work
from demo_text.problems_of_measures import (
    ages,
    clock,
    group_bill,
    percent,
    price,
    production,
    reading,
    rectangle,
    routine,
    saving,
    shopping,
    travel,
    wages,
)
from demo_text.problems_of_things import (
    boxes_needed,
    chain,
    comparison,
    fraction,
    garden,
    legs,
    packing,
    passengers,
    recipe,
    seats,
    sharing,
    two_days,
)

_HELD_OUT_SHARE = 8  # of 256 hash values


def is_held_out(question: str) -> bool:
    """Whether ``question`` belongs to the test split, by its hash, so that splits cannot leak."""
    return hashlib.sha256(question.encode()).digest()[0] < _HELD_OUT_SHARE


TEMPLATES: tuple[Callable[[Random], Problem], ...] = (
    *(chain, chain, chain, chain, packing, packing, shopping, shopping, price, sharing, boxes_needed),
    fraction,
    *(comparison, comparison, wages, travel, reading, ages, percent, rectangle, legs, seats, saving),
    production,
    *(two_days, two_days, routine, clock, recipe, passengers, garden, group_bill),
)


def _worded(rng: Random, steps: tuple[str, ...], answer: int) -> tuple[str, ...]:
    """The steps with varied openings and sometimes a closing sentence."""
    sentences = []
    for number, step in enumerate(steps):
        opening = phrase(rng, "[So |Now |Next, |This means that |Then |||||]" if number else "[First, ||||]")
        keep = step.startswith(("then ", "after that ", "in total ")) or step[0].isdigit()
        sentences.append(sentence(step if keep else opening + step))
    if rng.random() < 0.2:
        sentences.append(phrase(rng, f"[So the answer is|The answer is|That makes] {answer}."))
    return tuple(sentences)


def generate(rng: Random) -> Problem:
    """A random problem of a random template, of either split."""
    problem = rng.choice(TEMPLATES)(rng)
    return replace(problem, steps=_worded(rng, problem.steps, problem.answer))


def of_split(rng: Random, *, held_out: bool) -> Problem:
    """A random problem of the test split or of the training split."""
    while is_held_out((problem := generate(rng)).question) != held_out:
        pass
    return problem


def follow_up(rng: Random, problem: Problem) -> tuple[str, str]:
    """A second user turn about ``problem`` and its answer."""
    n, extra = problem.answer, rng.randint(2, 20)
    if problem.more and rng.random() < 0.4:
        return problem.more
    sums = (
        ("[Now double|Double] [the answer|that number|the result].", n, "*", 2),
        (
            f"[[Now |]add {extra} to [that|the answer|the result|it].|What is {extra} more than that?]",
            n,
            "+",
            extra,
        ),
        (
            f"[What is [the answer|that|the result] times {extra % 8 + 2}?|Multiply [that|the answer] by {extra % 8 + 2}.]",
            n,
            "*",
            extra % 8 + 2,
        ),
    )
    kind = rng.randrange(6)
    if kind < 3:
        ask, a, op, b = rng.choice(sums)
        value, done = work(a, op, b)
        return sentence(phrase(rng, ask)), phrase(
            rng, f"[The new answer is|That makes|The result is] {done}.\n#### {value}"
        )
    if kind == 3:
        ask = "[[Explain each step|Explain how you got that|Show [me|all] the steps|Show the steps in a list][.|, please.]|How did you get that answer?|Can you explain it?|List the steps.|Explain the answer.]"
        lines = [f"{number}. {step}" for number, step in enumerate(problem.steps, 1)]
        return phrase(rng, ask), "\n".join([*lines, f"So the answer is {n}."])
    if kind == 4:
        ask = "[Write only the answer.|Give me only the number.|So what is the answer?|And the final answer?|What is the final result?|Just the answer, please.|Answer in one short sentence.|What is the result?]"
        return phrase(rng, ask), f"The answer is {n}."
    ask = "[Are you sure?|Check your answer.|Is that right?|Can you check that again?]"
    return phrase(rng, ask), "Yes. " + " ".join(problem.steps) + f" So the answer is {n}."


def write_prompts(path: Path, *, count: int, seed: int) -> None:
    """Write ``count`` held-out problems as a GSM8K file (JSONL with ``question`` and ``answer``)."""
    rng, rows = Random(seed), {}
    while len(rows) < count:
        problem = of_split(rng, held_out=True)
        rows[problem.question] = {"question": problem.question, "answer": problem.solution}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.values()), encoding="utf-8")


if __name__ == "__main__":
    root = Path(__file__).parents[1]
    write_prompts(root / "data/prompts/gsm8k.jsonl", count=100, seed=2)
    write_prompts(root / "eval/tasks/word_problems.jsonl", count=250, seed=3)
