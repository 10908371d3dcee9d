"""The generator of word problems: right answers, clean text, and a split that cannot leak."""

import json
import re
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest
from demo_text.problem import work
from word_problems import TEMPLATES, follow_up, generate, is_held_out, of_split, write_prompts

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")


def check_sums(text: str) -> None:
    """Every calculator annotation in ``text`` is correct, and the number after it repeats the result."""
    for a, op, b, value, said in MARK.findall(text):
        a, b = Fraction(a), Fraction(b)
        assert (
            {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[op] == int(value) == int(said)
        ), text
    assert text.count("<<") == len(MARK.findall(text))


@pytest.mark.parametrize("template", dict.fromkeys(TEMPLATES), ids=lambda template: template.__name__)
def test_each_template_solves_its_problem(template):
    rng = Random(3)
    for _ in range(200):
        problem = template(rng)
        last = MARK.findall(" ".join(problem.steps))[-1]
        check_sums(" ".join(problem.steps))
        assert problem.answer == int(last[3]) > 0 or str(problem.answer) in problem.steps[-1]
        assert problem.question.endswith("?")


def test_texts_are_clean():
    rng = Random(5)
    for _ in range(3000):
        problem = generate(rng)
        for text in (problem.question, problem.solution, *follow_up(rng, problem)):
            assert not re.search(r"[\[\]|@]|  | [?.,]|\.\.", text), text
            check_sums(text)


def test_the_solution_ends_in_gsm8k_format():
    problem = generate(Random(1))
    *steps, last = problem.solution.split("\n")
    assert steps == list(problem.steps)
    assert last == f"#### {problem.answer}"


def test_a_division_with_remainder_is_an_error():
    with pytest.raises(AssertionError):
        work(7, "/", 2)


def test_templates_make_many_different_questions():
    rng = Random(2)
    assert len({generate(rng).question for _ in range(3000)}) > 2900


def test_questions_are_split_by_hash():
    rng = Random(4)
    held_out = {of_split(rng, held_out=True).question for _ in range(100)}
    trained = {of_split(rng, held_out=False).question for _ in range(3000)}
    assert all(map(is_held_out, held_out))
    assert not any(map(is_held_out, trained))
    share = sum(is_held_out(generate(rng).question) for _ in range(4000)) / 4000
    assert 0.02 < share < 0.045


@pytest.mark.parametrize(
    ("path", "count", "seed"),
    [("data/prompts/gsm8k.jsonl", 100, 2), ("eval/tasks/word_problems.jsonl", 250, 3)],
)
def test_bundled_problems_are_held_out_and_as_generated(tmp_path, path, count, seed):
    bundled = ROOT / path
    rows = [json.loads(line) for line in bundled.read_text(encoding="utf-8").splitlines()]
    assert len({row["question"] for row in rows}) == count
    assert all(is_held_out(row["question"]) for row in rows)
    assert all(re.search(r"\n#### \d+$", row["answer"]) for row in rows)
    write_prompts(tmp_path / "again.jsonl", count=count, seed=seed)
    assert (tmp_path / "again.jsonl").read_text(encoding="utf-8") == bundled.read_text(encoding="utf-8")
