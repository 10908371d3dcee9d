"""The script that asks an engine for the same in two ways asks for the same, and counts what is wrong."""

import json
import sys
from pathlib import Path
from typing import Any

import bench_requests
import pytest

from specgen import Engine, EngineConfig, Prompt, SamplingParams
from specgen.config import StructuredOutputs

pytestmark = [pytest.mark.scripts, pytest.mark.slow]


def rows(asked: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["bench_requests.py", *asked.split()])
    bench_requests.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_constraint_changes_no_token(
    tiny_pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = f"constraint {tiny_pair} --batches 1,3 --max-tokens 9 --rounds 2"
    found = rows(asked, monkeypatch, capsys)
    assert [(row["batch"], row["wrong_tokens"]) for row in found] == [(1, 0), (3, 0)]
    assert [[*map(len, row["tokens_per_second"].values())] for row in found] == [[2, 2], [2, 2]]
    plain, constrained = found[0]["tokens_per_second"].values()
    assert found[0]["ratio"] == pytest.approx(sum(constrained) / sum(plain), abs=0.002)
    monkeypatch.setattr(bench_requests, "WORDS", "( w[0-9]{1,2})+")  # not all words of the text
    assert rows(asked, monkeypatch, capsys)[0]["wrong_tokens"] > 0


def test_samples_are_the_rows_texts_in_number(tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = f"samples {tiny_pair} --prompts 2 --n 3 --prompt-tokens 20 --max-tokens 5"
    monkeypatch.setattr(sys, "argv", ["bench_requests.py", *asked.split()])
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(bench_requests, "measured", lambda ways, *_: seen.append(ways) or {})
    bench_requests.main()
    prompts = [tuple(range(20)), tuple(range(7, 27))]
    for way in seen[0].values():
        assert [len(text) for text in way(prompts)] == [5] * 6


def test_a_text_of_a_calibrated_pair_is_its_words(tiny_pair: Path) -> None:
    """So that a constraint can be calibrated for it, which holds from the first token on."""
    config = EngineConfig(model=str(tiny_pair / "target"), drafter=None, num_spec_tokens=0, device="cpu")
    fits = StructuredOutputs(regex=bench_requests.WORDS)
    sampling = SamplingParams(temperature=0, max_tokens=4, structured_outputs=fits)
    with Engine(config) as engine:
        (output,) = engine.generate([Prompt(id="a", token_ids=(5, 6, 7))], sampling)
    assert output.text == "".join(f" w{token}" for token in output.token_ids)
