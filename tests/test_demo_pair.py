"""The bundled heads keep their acceptance, the target its accuracy: by the engine, on held-out prompts."""

import json
from pathlib import Path
from typing import Any

import pytest

from specgen.config import SamplingParams
from specgen.config.bundled import data_directory
from specgen.core.sequence import Request
from specgen.prompts import DataSource, prompt_ids
from specgen.text.tokenizer import Tokenizer, load_tokenizer
from tests.engines import Outputs, Pair, generate, load_pair

# They generate once. That drafts of the bundled pair change no text is in the quick test_lossless.py.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("bundled heads")]
FILES = {"mt_bench.jsonl": "mt-bench", "gsm8k.jsonl": "gsm8k"}
# mean acceptance lengths
LOWEST = {"drafter": 3.9, "drafter-eagle1": 3.0, "drafter-two-layers": 2.5, "drafter-dflash": 1.35}
Runs = dict[tuple[str, str], Outputs]
HEADS = pytest.mark.parametrize("head", LOWEST)
NAMES = pytest.mark.parametrize("name", FILES)


@pytest.fixture(scope="module")
def tokenizer(demo_path: Path) -> Tokenizer:
    return load_tokenizer(str(demo_path / "target"))


@pytest.fixture(scope="module")
def requests(tokenizer: Tokenizer) -> dict[str, list[Request]]:
    """The first turns of each file, greedy."""
    results = {}
    for name, dataset in FILES.items():
        prompts = DataSource(dataset=dataset, data_path=data_directory() / "prompts" / name).open()
        results[name] = [
            Request(
                id=prompt.id,
                prompt_token_ids=tuple(prompt_ids(prompt, tokenizer, [])[1]),
                sampling=SamplingParams(max_tokens=160),
            )
            for prompt in prompts
        ]
    return results


@pytest.fixture(scope="module")
def outputs(demo_path: Path, requests: dict[str, list[Request]]) -> Runs:
    """Each head's outputs for each file, K = 4."""
    pairs = {head: load_pair(demo_path, drafter=head) for head in LOWEST}
    return {
        (head, name): generate(
            pair, some, num_spec_tokens=4, max_batch_size=32, page_size=16, drafter=str(demo_path / head)
        )
        for head, pair in pairs.items()
        for name, some in requests.items()
    }


@pytest.fixture(scope="module")
def trained(demo_path: Path) -> dict[str, Any]:
    """What the trainer measured with its own dense heads, on the same prompts."""
    return json.loads((demo_path / "training.json").read_text())["acceptance"]


def test_the_bundled_data_is_small() -> None:
    """A wheel carries it."""
    files = (file for name in ("demo", "prompts") for file in (data_directory() / name).rglob("*"))
    assert sum(file.stat().st_size for file in files if file.is_file()) <= 20_400_000


@HEADS
@NAMES
def test_acceptance_is_above_its_minimum(outputs: Runs, head: str, name: str) -> None:
    report = outputs[head, name].report(4).to_json()
    rates = [position["rate"] for position in report["acceptance"]]
    assert rates == sorted(rates, reverse=True)
    assert report["mean_acceptance_length"] >= LOWEST[head]


@HEADS
@NAMES
def test_the_engine_accepts_what_the_trainer_computes(
    outputs: Runs, trained: dict[str, Any], head: str, name: str
) -> None:
    """Two implementations that share no code agree over the same steps."""
    report = outputs[head, name].report(4).to_json()
    rates = [position["rate"] for position in report["acceptance"]]
    assert rates == pytest.approx(trained[head][name]["simulated"]["joint"], abs=0.01)


@HEADS
def test_drafter_batches_give_the_same_steps(
    demo_path: Path, requests: dict[str, list[Request]], outputs: Runs, head: str
) -> None:
    pair = load_pair(demo_path, drafter=head)
    settings = {"num_spec_tokens": 4, "max_batch_size": 32, "page_size": 16, "drafter": str(demo_path / head)}
    packed = generate(pair, requests["mt_bench.jsonl"], drafter_batch="non-padded", **settings)
    steps = verify_steps(packed)
    assert steps == verify_steps(outputs[head, "mt_bench.jsonl"])
    assert {accepted for _, _, accepted, _ in steps} == {0, 1, 2, 3, 4}, (
        "each position accepted, and rejected"
    )


def verify_steps(outputs: Outputs) -> list[tuple[str, tuple[int, ...], int, int]]:
    return [(name, *step) for name, steps in sorted(outputs.verified.items()) for step in steps]


@NAMES
def test_every_head_gives_the_text_of_plain_decoding(
    demo_pair: Pair, requests: dict[str, list[Request]], outputs: Runs, name: str
) -> None:
    plain = generate(demo_pair, requests[name], num_spec_tokens=0, max_batch_size=32).texts
    for head in LOWEST:
        assert outputs[head, name].texts == plain


def test_word_problems_are_solved(outputs: Runs, tokenizer: Tokenizer) -> None:
    rows = (data_directory() / "prompts" / "gsm8k.jsonl").read_text().splitlines()
    expected = [json.loads(row)["answer"].rpartition("#### ")[2] for row in rows]
    texts = outputs["drafter", "gsm8k.jsonl"].texts
    prompts = DataSource(dataset="gsm8k", data_path=data_directory() / "prompts" / "gsm8k.jsonl").open()
    answers = [tokenizer.decode(texts[prompt.id]).rpartition("#### ")[2].strip() for prompt in prompts]
    right = sum(answer == number for answer, number in zip(answers, expected, strict=True))
    assert right / len(expected) >= 0.6
