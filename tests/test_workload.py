"""Requests for a bench from conversations and own rows: how long answers are, and what was said before."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specgen.config import SamplingParams, UserError
from specgen.engine.loading import Models
from specgen.experiments.matrices import Workload
from specgen.experiments.workload import make_prompts
from specgen.prompts.load import RAW
from specgen.text.tokenizer import load_tokenizer
from tests.commands import refused
from tests.engines import Pair

WORKLOAD = Workload(dataset="sharegpt", max_new_tokens=20, output_lens="data")


def said(*texts: str) -> dict[str, object]:
    senders = ("human", "gpt")
    return {"conversations": [{"from": senders[n % 2], "value": text} for n, text in enumerate(texts)]}


@pytest.fixture
def models(demo_pair: Pair) -> Models:
    return replace(demo_pair.models, tokenizer=load_tokenizer(str(demo_pair.path / "target")))


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    rows = [
        {"id": "a", **said("How many apples?", "Tom has three apples.", "And pears?", "Two. " * 30)},
        {"id": "b", **said("How many?")},
        {"id": "c", **said("How many plums?", "None.", "Why?")},
        {"id": "d", "conversations": [{"from": "gpt", "value": "Hello."}]},
    ]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(rows))
    return path


def test_every_answer_is_a_request_behind_what_was_said_before(models: Models, talks: Path) -> None:
    tokenizer = models.tokenizer
    prompts = make_prompts(replace(WORKLOAD, data_path=talks), models, 4)
    assert [request.id for request in prompts.requests] == ["a", "a/turn-2", "c", "a again 1"]
    first, second, third, _ = prompts.requests
    lengths = [len(tokenizer.encode_rendered(text)) for text in ("Tom has three apples.", "None.")]
    assert (first.sampling, third.sampling) == tuple(
        SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths
    )
    assert second.sampling.max_tokens == 20, "no longer than asked for"
    asked = tokenizer.decode_with_special(second.prompt_token_ids)
    assert asked.index("How many apples?") < asked.index("Tom has three apples.") < asked.index("And pears?")
    assert "Two." not in asked
    assert (first.turn, second.turn) == (1, 2)
    assert prompts.description == "3 turns of sharegpt, repeated to 4"
    assert [note.split(": ")[:2] for note in prompts.notes] == [["left out", "b"], ["left out", "d"]]


def test_own_rows_say_how_long_they_are(models: Models, tmp_path: Path) -> None:
    rows = tmp_path / "mine.jsonl"
    rows.write_text('{"id": "x", "prompt": "Tom has", "max_tokens": 7}\n{"id": "y", "prompt": "Ann has"}\n')
    workload = Workload(dataset=str(rows), output_lens="data")
    prompts = make_prompts(workload, models, 2)
    assert [request.id for request in prompts.requests] == ["x", "x again 1"]
    assert prompts.requests[0].sampling == SamplingParams(max_tokens=7, ignore_eos=True)
    assert prompts.notes == (
        "left out: y: it has no answer whose length to take, nor max_tokens; "
        "--output-lens fixed needs neither",
    )
    assert RAW in make_prompts(replace(workload, output_lens="fixed"), models, 2).notes
    rows.write_text('{"id": "y", "prompt": "Ann has"}\n')
    with refused(r"no prompt of .* can run: left out: y: it has no answer whose length"):
        make_prompts(workload, models, 2)


def test_lengths_of_data_need_data() -> None:
    with pytest.raises(UserError, match="output-lens is 'data' but prompts are random: name a data set"):
        Workload(dataset="random", output_lens="data")
    with pytest.raises(UserError, match="output-lens is 'long': use one of fixed, data"):
        Workload(dataset="sharegpt", output_lens="long")
