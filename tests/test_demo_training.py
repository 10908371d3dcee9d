"""The makers of the bundled pair: its drafting equals an engine's, its optimizer and its word problems are right."""

import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest
import torch
from demo_corpus import pack
from demo_problems import TEMPLATES, follow_up, generate, is_held_out, of_split, write_prompts
from demo_target import Optimizer
from demo_text.problem import work
from dense_heads import DFlash, Eagle1, Eagle3, Head, HeadConfig, PEagle, document_mask
from head_training import count_rows, count_steps, pool
from torch import nn

pytestmark = pytest.mark.scripts

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


def test_problems_are_clean_and_many():
    rng, questions = Random(5), set[str]()
    for _ in range(3000):
        problem = generate(rng)
        questions.add(problem.question)
        *steps, last = problem.solution.split("\n")
        assert (steps, last) == (list(problem.steps), f"#### {problem.answer}")  # as GSM8K has it
        for text in (problem.question, problem.solution, *follow_up(rng, problem)):
            assert not re.search(r"[\[\]|@]|  | [?.,]|\.\.", text), text
            check_sums(text)
    assert len(questions) > 2900
    with pytest.raises(AssertionError):
        work(7, "/", 2)  # has a remainder


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


CONFIG = HeadConfig(
    kind="EAGLE3",
    num_layers=1,
    hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    draft_vocab_size=11,
    rope_theta=100.0,
)

VOCAB = 13


def make_head(kind: str) -> tuple[Head, int]:
    """A random head and the width of its features."""
    torch.manual_seed(0)
    embedding = torch.randn(VOCAB, 16)
    if kind == "EAGLE-1":
        return Eagle1(replace(CONFIG, kind="EAGLE-1"), embedding, torch.randn(VOCAB, 16)).double(), 16
    if kind == "DFlash":
        config = replace(CONFIG, kind="DFlash", num_layers=2, num_features=1, mask_token=2)
        return DFlash(config, embedding, torch.randn(VOCAB, 16)).double(), 16
    config = replace(CONFIG, num_layers=2, hidden_size=8) if kind == "two layers" else CONFIG
    if kind == "P-EAGLE":
        return PEagle(replace(CONFIG, kind="P-EAGLE", mask_token=2), embedding).double(), 48
    return Eagle3(config, embedding).double(), 48


KINDS = pytest.mark.parametrize("kind", ["EAGLE-1", "EAGLE3", "two layers", "P-EAGLE"])


def draft_step_by_step(
    head: Head, features: torch.Tensor, tokens: torch.Tensor, row: int, steps: int
) -> list[torch.Tensor]:
    """Drafts after ``row`` step by step: accepted rows up to it, then one new row per draft, causal attention."""
    hidden, read, logits = head.fuse(features[:, : row + 1]), tokens[:, 1 : row + 2], []
    for _ in range(steps):
        length = hidden.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        past = [[] for _ in head.layers]
        out = head(read, hidden, torch.arange(length), causal, past)
        parallel = isinstance(head, PEagle)
        behind = head.fuse(head.mask_hidden) if parallel else out[:, -1:]
        token = torch.tensor([[head.config.mask_token]]) if parallel else tokens[:, length + 1, None]
        hidden, read = torch.cat([hidden, behind], dim=1), torch.cat([read, token], dim=1)
        logits.append(head.logits(out[:, -1]))
    return logits


@KINDS
def test_unrolled_training_equals_step_by_step_drafting(kind: str):
    head, width = make_head(kind)
    features, tokens = torch.randn(1, 12, width).double(), torch.randint(VOCAB, (1, 12))
    mask = document_mask(torch.ones(1, 12))
    unrolled = list(head.unroll(features, tokens, mask, 4, torch.arange(12)))
    for row in (0, 3, 6):
        for j, expected in enumerate(draft_step_by_step(head, features, tokens, row, 4)):
            torch.testing.assert_close(unrolled[j][:, row], expected)


def test_a_block_sees_the_text_before_it_and_itself():
    head, width = make_head("DFlash")
    features, tokens = torch.randn(1, 12, width).double(), torch.randint(VOCAB, (1, 12))
    mask, rows = document_mask(torch.ones(1, 12)), torch.arange(12)
    drafts = torch.stack(list(head.unroll(features, tokens, mask, 3, rows)), 2)  # [1, T, 3, V]
    for at in range(12):
        changed = features.clone()
        changed[:, at] += 1
        moved = torch.stack(list(head.unroll(changed, tokens, mask, 3, rows)), 2) != drafts
        assert moved.any(-1)[0].all(-1).tolist() == [row >= at for row in range(12)], at
    other = tokens.clone()
    other[:, 5] = (other[:, 5] + 1) % VOCAB  # the newest token of row 4 alone
    moved = torch.stack(list(head.unroll(features, other, mask, 3, rows)), 2) != drafts
    assert moved.any(-1)[0].all(-1).tolist() == [row == 4 for row in range(12)]
    fewer = torch.stack(list(head.unroll(features, tokens, mask, 2, rows)), 2)
    assert (fewer != drafts[:, :, :2]).all(), "masks see one another"


@pytest.mark.parametrize("kind", ["EAGLE-1", "EAGLE3", "two layers", "DFlash"])
def test_packed_documents_do_not_attend_to_each_other(kind: str):
    head, width = make_head(kind)
    features = torch.randn(1, 12, width).double()
    tokens, rows = torch.tensor([[0, 1, 2, 3, 4, 0, 5, 6, 7, 8, 9, 1]]), torch.arange(12)
    mask = document_mask(torch.tensor([[1] * 5 + [2] * 7]))
    together = list(head.unroll(features, tokens, mask, 3, rows))
    alone = list(head.unroll(features[:, 5:], tokens[:, 5:], mask[:, :, 5:, 5:], 3, rows[:7]))
    for j in range(3):  # rotary positions are relative, so a shift of the whole document changes nothing
        torch.testing.assert_close(together[j][:, 5:9], alone[j][:, :4])


def test_acceptance_counts_equal_counts_by_hand():
    yes, no = True, False
    right = torch.tensor(
        [[no, no], [yes, yes], [no, yes], [no, no], [yes, no], [yes, yes], [yes, yes], [no, no]]
    )
    rows = count_rows(right, 1, 8)  # rows 1 to 5; row 5 has room for one draft only
    assert (rows.num_drafts, rows.accepted) == (5, [3, 1])
    steps = count_steps(right, 1, 8)  # steps at rows 1 (two accepted) and 4 (one accepted), then the end
    assert (steps.num_drafts, steps.accepted) == (2, [2, 1])
    both = pool([steps, count_steps(right, 2, 5)])  # a second answer with one step that accepts nothing
    assert both.summary()["joint"] == [0.6667, 0.3333]
    assert both.summary()["mean_acceptance_length"] == 2.0


def test_batched_muon_equals_muon():
    torch.manual_seed(0)
    ours = nn.ModuleList([nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False), nn.Linear(16, 8)])
    theirs = [nn.Parameter(layer.weight.detach().clone()) for layer in ours]
    muon = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    targets = [torch.randn(layer.weight.shape) * 1e-3 for layer in ours]
    optimizer = Optimizer(ours, learning_rate=0.01, steps=1)
    optimizer.step(
        sum((layer.weight * target).sum() for layer, target in zip(ours, targets, strict=True))
        + 0 * ours[2].bias.sum()
    )
    for parameter, target in zip(theirs, targets, strict=True):
        parameter.grad = target
    before = [parameter.detach().clone() for parameter in theirs]
    muon.step()
    for layer, parameter, start in zip(
        ours, theirs, before, strict=True
    ):  # both round to bfloat16 on the way
        assert (layer.weight - parameter).norm() < 0.15 * (parameter - start).norm()


@pytest.mark.parametrize("row_length", [8, 10])
def test_packing_does_not_split_documents(row_length):
    import numpy as np

    documents = [np.array([0, *range(1, n)], dtype=np.uint16) for n in (3, 7, 5, 8, 2, 12)]
    rows = pack(documents, row_length, pad=99)
    found = []
    for row in rows.tolist():
        assert row[0] == 0
        for token in row:
            if token == 0:
                found.append([0])
            elif token != 99:
                found[-1].append(token)
    assert sorted(map(len, found)) == sorted(min(len(ids), row_length) for ids in documents)
