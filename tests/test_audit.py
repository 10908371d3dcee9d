"""The losslessness audit: it reports nothing if no text changed, else the position of the divergence."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import Result

from specgen.cli.evaluating import _study
from specgen.config import EngineConfig, SamplingParams, UserError
from specgen.config.bundled import data_directory, pair
from specgen.core import scheduler, step
from specgen.core.sequence import Request
from specgen.decoding.verify import accept_greedy
from specgen.engine.build import prefill_logits
from specgen.experiments.audit import Divergence, distinct, first_difference, gap, rounding
from specgen.experiments.study_tables import of_audit, verdict
from specgen.prompts.load import RAW
from specgen.report.terminal import render as in_terminal
from tests.commands import specgen, write_rows
from tests.engines import Pair, config_of
from tests.reference_heads import ReferenceHead

SHORT = ("--num-prompts", "6", "--max-new-tokens", "40", "--batch-sizes", "1,6", "--device", "cpu")


def verify(*arguments: object) -> Result:
    """``specgen verify`` on the bundled pair."""
    return specgen("verify", *arguments)


def render(found: dict[str, Any], width: int = 100) -> str:
    return in_terminal(of_audit(found), width)


def plant(monkeypatch: pytest.MonkeyPatch, every: int, wrong: int) -> None:
    """Each ``every``-th verify step gives ``wrong`` for the bonus token of its first sequence."""
    num_steps = 0

    def accept(drafts: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal num_steps
        accepted, tokens = accept_greedy(drafts, greedy)
        num_steps += drafts.shape[1] > 0
        if drafts.shape[1] and num_steps % every == 0:
            tokens = tokens.clone()
            tokens[0, accepted[0]] = wrong
        return accepted, tokens

    monkeypatch.setattr(step, "accept_greedy", accept)


def test_nothing_changes_in_float32(tmp_path: Path) -> None:
    out = tmp_path / "new" / "audit.json"
    few = ("--num-prompts", 3, "--max-new-tokens", 24, "--batch-sizes", "1,3", "--device", "cpu")
    result = verify(*few, "--dtype", "float32", "--output", out)
    assert result.exit_code == 0, result.output
    assert "all 15 texts are those of the reference" in result.output
    found = json.loads(out.read_text())
    assert found["reference"] == {"name": "plain", "batch_size": 1}
    assert [(arm["name"], arm["batch_size"], arm["num_identical"]) for arm in found["arms"]] == [
        ("plain", 3, 3),
        ("padded", 1, 3),
        ("padded", 3, 3),
        ("non-padded", 1, 3),
        ("non-padded", 3, 3),
    ]
    lengths = [arm["mean_acceptance_length"] for arm in found["arms"]]
    assert lengths[0] is None  # plain decoding drafts nothing
    assert all(1.5 < length < 5 for length in lengths[1:])  # drafts were accepted, and not always


@pytest.mark.slow
def test_a_wrong_bonus_token_in_one_step_of_a_hundred_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, every=100, wrong=77)
    result = verify(
        "--num-prompts", 12, "--batch-sizes", 1, "--dtype", "float32", "--device", "cpu", "--json"
    )
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    divergences = [each for arm in found["arms"] for each in arm["divergences"]]
    assert divergences
    assert found["num_unexplained"] == len(divergences)
    for each in divergences:
        assert each["token"] == 77
        assert each["gap"] == pytest.approx(each["reference_logit"] - each["logit"], abs=1e-4)
        assert each["gap"] > 100 * each["rounding"]
    text = render(found)
    assert text.count("WRONG") == len(divergences)
    assert divergences[0]["request"] in text
    assert "cannot explain" in text.split("\n\n")[-1]
    narrow = render(found, 80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert narrow.count("WRONG") == len(divergences)
    assert all(f"{each[name]:.4g}" in narrow for each in divergences for name in ("gap", "rounding", "logit"))


@pytest.mark.slow
def test_in_bfloat16_what_differs_is_a_near_tie() -> None:
    result = verify(*SHORT, "--dtype", "bfloat16", "--json")
    found = json.loads(result.stdout)
    assert found["dtype"] == "bfloat16"
    assert result.exit_code == 0, render(found)
    for arm in found["arms"]:
        assert arm["num_identical"] + len(arm["divergences"]) == arm["num_requests"] == 6
        assert all(each["gap"] <= each["rounding"] < 2.1 for each in arm["divergences"])


def divergence(**changes: Any) -> Divergence:
    fields: dict[str, Any] = {"request": "a", "position": 3, "gap": 0.5, "rounding": 1.0}
    fields |= {"reference_token": 1, "reference_text": "x", "reference_logit": 20.0}
    fields |= {"token": 2, "text": "y", "logit": 19.5}
    return Divergence(**(fields | changes))


def test_only_a_gap_within_the_rounding_is_explained() -> None:
    assert divergence().explained
    assert divergence(gap=1.0).explained
    assert not divergence(gap=1.001).explained
    assert not divergence(token=None, logit=None, gap=None).explained
    texts = (
        ((1, 2), (1, 2), None),
        ((), (), None),
        ((1, 2, 3), (1, 5, 3), 1),
        ((1, 2), (1,), 1),
        ((), (4,), 0),
    )
    assert [first_difference(reference, tokens) for reference, tokens, _ in texts] == [at for *_, at in texts]
    # two equal tokens far below the largest logit are not a tie of greedy decoding
    logits = torch.tensor([20.0, 5.0, 5.0, 19.0])
    assert gap(logits, 1, 2) == 15.0
    assert gap(logits, 0, 3) == gap(logits, 3, 0) == 1.0
    assert gap(logits, 0, 0) == 0.0


@pytest.mark.parametrize("largest", [0.3, 1.0, 20.0, -31.9, 32.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_in_steps_of_the_dtype(dtype: torch.dtype, largest: float) -> None:
    """The spacing of numbers as ``torch`` has it."""

    def spacing(dtype: torch.dtype) -> float:
        at = torch.tensor(abs(largest)).to(dtype)
        return float(torch.nextafter(at, torch.tensor(torch.inf, dtype=dtype)) - at)

    logits = torch.tensor([0.1, largest, -0.2])
    plain = 8 * spacing(dtype) + 48 * spacing(torch.float32)
    assert rounding(logits, dtype) == pytest.approx(plain)
    assert rounding(logits, dtype, fp8_kv=True) == pytest.approx(plain + 8 * spacing(torch.bfloat16))
    fp8 = 2 * 2.0 ** (math.floor(math.log2(abs(largest))) - 3)  # three bits behind the first
    assert rounding(logits, dtype, fp8=True) == pytest.approx(plain + fp8)


def test_logits_after_a_prefix_are_those_of_transformers(
    random_pair: Pair, random_reference: ReferenceHead
) -> None:
    prompt = (5, 9, 33, 71, 8, 8, 120, 4, 17)
    logits = prefill_logits(config_of(random_pair), random_pair.models)
    request = Request(id="a", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=8))
    text = list(random_reference.target.texts([request])["a"])
    assert [int(logits([*prompt, *text[:at]]).argmax()) for at in range(8)] == text


@pytest.mark.slow
def test_a_prefix_cache_that_mixes_texts_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are keyed by position only; plain decoding, the reference, must not share them."""

    def by_place(digests: list[bytes], tokens: list[int], page_size: int, root: bytes) -> None:
        digests[:] = [str(page).encode() for page in range((len(tokens) - 1) // page_size)]

    monkeypatch.setattr(scheduler, "extend_digests", by_place)
    result = verify(*SHORT)
    assert result.exit_code == 1, result.output
    assert "decoding is wrong there" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-spec-tokens", 0), "num-spec-tokens is 0"),
        (("--batch-sizes", "1,x"), "batch-sizes is '1,x'"),
        (("--batch-sizes", "0"), "batch-sizes is '0'"),
        (("--output", __file__), "exists"),
        (("--output", ""), "output '.' exists"),
        (("--dataset", "nowhere"), "nowhere"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments: tuple[object, ...], message: str) -> None:
    result = verify(*SHORT, *arguments)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_a_report_has_its_file_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So of two commands that name it one is refused, and nothing is lost where there is no right to write."""
    out = tmp_path / "a.json"

    def asked_twice(*asked: object) -> dict[str, Any]:
        other = verify(*SHORT, "--output", out)
        assert f"output '{out}' exists and is empty (another command is at work" in str(other.exception)
        raise UserError("this was asked")

    monkeypatch.setattr("specgen.experiments.audit.audit", asked_twice)
    result = verify(*SHORT, "--output", out)
    assert str(result.exception) == "this was asked"
    assert not list(tmp_path.iterdir())
    for path in ("/proc/a.json", __file__ + "/a.json"):
        assert f"output '{path}' cannot be written" in str(verify(*SHORT, "--output", path).exception)


@pytest.mark.slow
def test_rows_that_ask_for_sampled_texts_are_decoded_greedily(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    write_rows(
        own, [{"id": "a", "prompt": "Tom has 5", "temperature": 1.0, "seed": 3}, {"id": "b", "prompt": "Ann"}]
    )
    result = verify(*SHORT, "--dataset", own)
    assert result.exit_code == 0, result.output
    assert "1 row sets a temperature, which is left out: everything is decoded greedily" in result.stderr
    assert "Nothing changed" in result.output
    assert "no step had drafts" not in result.stderr
    few = ("--num-prompts", 2, "--max-new-tokens", 1, "--batch-sizes", 1, "--device", "cpu")
    result = verify(*few, "--dataset", own)
    assert "padded, batch 1: no step had drafts, so its texts tell nothing of speculation" in result.stderr
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("Nothing was tested: no step had drafts")


def test_a_chat_model_that_ends_raw_text_at_once_is_no_proof(tmp_path: Path) -> None:
    end = json.loads((data_directory() / "demo" / "target" / "config.json").read_text())["eos_token_id"]
    own = tmp_path / "own.jsonl"
    write_rows(own, [{"prompt": "Tom has 5", "logit_bias": {str(end): 100}}])
    arguments = ("--dataset", own, "--batch-sizes", 1, "--device", "cpu")
    result = verify(*arguments)
    assert result.exit_code == 1
    assert f"specgen: warning: {RAW}" in result.stderr
    text = " ".join(result.stdout.split())
    assert "1 of 1 texts are empty" in text
    assert "Nothing changed" not in text
    assert RAW not in verify(*arguments, "--raw").stderr


@pytest.mark.slow
def test_prompts_that_cannot_be_run_are_named_and_not_compared(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    rows = [
        {"id": "a", "prompt": "Tom has 5"},
        {"id": "b", "prompt": ""},
        {"id": "c", "prompt": "word " * 5000},
    ]
    write_rows(own, rows)
    result = verify(*SHORT, "--dataset", own, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {arm["num_requests"] for arm in found["arms"]} == {1}
    assert "2 prompts could not be run" in render(found)
    assert sorted(failure.partition(":")[0] for failure in found["failures"]) == ["b", "c"]
    own.write_text(json.dumps(rows[1]) + "\n")
    assert "can be run" in str(verify(*SHORT, "--dataset", own).exception)


def test_ngrams_have_no_drafter_batch_and_one_arm() -> None:
    asked = ("--drafter", "ngram", "--num-prompts", "2", "--max-new-tokens", "8", "--batch-sizes", "1")
    found = json.loads(verify(*asked, "--json").stdout)
    assert [arm["name"] for arm in found["arms"]] == ["padded"]
    model, _ = pair()
    engines = (EngineConfig(model=model, drafter="ngram"), EngineConfig(model=model, drafter=model))
    arms = [[arm.name for arm in _study("word_problems", None, None, engine).arms] for engine in engines]
    assert arms == [["padded", "baseline"], ["padded", "non-padded", "baseline"]]


def test_a_text_that_ends_early_is_shown_so() -> None:
    early = divergence(token=None, text="", logit=None, gap=None)
    arm = {"name": "padded", "batch_size": 8, "num_requests": 2, "num_identical": 1, "identical": 0.5}
    arm |= {"mean_acceptance_length": 2.5, "divergences": [asdict(early) | {"explained": early.explained}]}
    engine = dict.fromkeys(("model", "drafter", "device", "dtype", "attention"), "x")
    engine |= {"num_spec_tokens": 4, "spec_length": "fixed"}
    found = {"reference": {"name": "plain", "batch_size": 1}, "dtype": "float32", "num_unexplained": 1}
    found |= {"failures": ["b: the prompt is empty"], "num_empty": 0}
    line = next(
        line
        for line in render(found | {"arms": [arm], "manifest": {"engine": engine}}).splitlines()
        if line.startswith("a ")
    )
    assert "(ended)" in line
    assert line.endswith("WRONG")


def test_batches_that_hold_all_requests_are_run_once() -> None:
    cases = (
        ((1, 8, 32), 4, [1, 8]),
        ((32, 8), 64, [8, 32]),
        ((8, 8), 8, [8]),
        ((4, 8), 1, [4]),
        ((1, 4, 8), 4, [1, 4]),
    )
    assert [distinct(asked, num_requests) for asked, num_requests, _ in cases] == [run for *_, run in cases]


def test_the_verdict_is_one_sentence() -> None:
    arms = [{"num_requests": 6, "num_identical": 5, "mean_acceptance_length": 2.5}]
    same = {"arms": [arms[0] | {"num_identical": 6}], "dtype": "bfloat16", "num_unexplained": 0}
    assert verdict(same).startswith("Nothing changed: all 6")
    assert "so close" in verdict({"arms": arms, "dtype": "bfloat16", "num_unexplained": 0})
    assert "cannot explain" in verdict({"arms": arms, "dtype": "bfloat16", "num_unexplained": 1})
