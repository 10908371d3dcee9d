"""The bundled pair keeps its acceptance and accuracy, measured by the engine on held-out prompts."""

import json
from pathlib import Path
from typing import Any

import pytest

from specgen.bundled import data_directory
from specgen.config import SamplingParams
from specgen.core.sequence import Request
from specgen.prompts import load_prompts, prompt_ids
from specgen.report.report import fold
from specgen.text.tokenizer import Tokenizer, load_tokenizer
from tests.engines import Outputs, Pair, generate

FILES = {"mt_bench.jsonl": "mt-bench", "gsm8k.jsonl": "gsm8k"}


@pytest.fixture(scope="module")
def tokenizer(demo_path: Path) -> Tokenizer:
    return load_tokenizer(str(demo_path / "target"))


@pytest.fixture(scope="module")
def outputs(demo_pair: Pair, tokenizer: Tokenizer) -> dict[str, Outputs]:
    """The engine's outputs for the first turns of each file, greedy, K = 4."""
    results = {}
    for name, dataset in FILES.items():
        prompts, _ = load_prompts(dataset, data_path=data_directory() / "prompts" / name, num_prompts=None)
        requests = [
            Request(
                id=prompt.id,
                prompt_token_ids=tuple(prompt_ids(prompt, tokenizer, [])[1]),
                sampling=SamplingParams(max_tokens=160),
            )
            for prompt in prompts
        ]
        results[name] = generate(demo_pair, requests, num_spec_tokens=4, max_batch_size=32, page_size=16)
    return results


@pytest.fixture(scope="module")
def trained(demo_path: Path) -> dict[str, Any]:
    """What the trainer measured with its own dense head, on the same prompts."""
    return json.loads((demo_path / "training.json").read_text())["acceptance"]


def test_the_bundled_pair_is_small(demo_path: Path) -> None:
    assert sum(file.stat().st_size for file in demo_path.rglob("*") if file.is_file()) <= 20_000_000


@pytest.mark.parametrize("name", FILES)
def test_acceptance_is_above_its_minimum(outputs: dict[str, Outputs], name: str) -> None:
    report = fold(outputs[name].events, num_spec_tokens=4).to_json()
    rates = [position["rate"] for position in report["acceptance"]]
    assert rates[0] >= 0.70
    assert rates[3] >= 0.25
    assert rates == sorted(rates, reverse=True)
    assert report["mean_acceptance_length"] >= 2.4


@pytest.mark.parametrize("name", FILES)
def test_the_engine_accepts_what_the_trainer_computes(
    outputs: dict[str, Outputs], trained: dict[str, Any], name: str
) -> None:
    """Two implementations that share no code agree over the same steps, and nearly so over all rows."""
    report = fold(outputs[name].events, num_spec_tokens=4).to_json()
    rates = [position["rate"] for position in report["acceptance"]]
    assert rates == pytest.approx(trained[name]["simulated"]["joint"], abs=0.01)
    assert rates[1] == pytest.approx(trained[name]["teacher_forced"]["joint"][1], abs=0.03)


def test_word_problems_are_solved(outputs: dict[str, Outputs], tokenizer: Tokenizer) -> None:
    rows = (data_directory() / "prompts" / "gsm8k.jsonl").read_text().splitlines()
    expected = [json.loads(row)["answer"].rpartition("#### ")[2] for row in rows]
    texts = outputs["gsm8k.jsonl"].texts
    prompts, _ = load_prompts(
        "gsm8k", data_path=data_directory() / "prompts" / "gsm8k.jsonl", num_prompts=None
    )
    answers = [tokenizer.decode(texts[prompt.id]).rpartition("#### ")[2].strip() for prompt in prompts]
    right = sum(answer == number for answer, number in zip(answers, expected, strict=True))
    assert right / len(expected) >= 0.6
