"""Requests for a bench, from conversations, own rows and a known text, and the engine that runs them."""

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calibrated_cycle import Cycle
from calibrated_shapes import SHAPES

from specgen.config import DraftLength, EngineConfig, SamplingParams, UserError
from specgen.core.sequence import Completion, Request
from specgen.engine import step_costs
from specgen.engine.build import build_engine
from specgen.engine.loading import Models
from specgen.engine.warm_engine import WarmEngine
from specgen.experiments import plans
from specgen.experiments.plans import KnownText, kv_bytes, make_prompts
from specgen.experiments.tune_job import Workload
from specgen.prompts.load import RAW
from specgen.text.tokenizer import load_tokenizer
from tests.commands import refused
from tests.engines import Pair, engine_config, loaded, resolved
from tests.streams import RECORD

WORKLOAD = Workload(dataset="sharegpt", max_new_tokens=20, output_lens="data")
SMALL = Workload(dataset="random", num_prompts=3, prompt_tokens=9, max_new_tokens=12)
SHAPE = SHAPES["tiny"]
CYCLE = Cycle.draw(SHAPE.num_plain_tokens, SHAPE.draft_vocab_size, 0.75, seed=0)


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
    rows.write_text('{"id": "x", "prompt": "Tom has", "max_tokens": 7, "temprature": 1}\n')
    (note,) = make_prompts(workload, models, 1).notes
    assert note.endswith("a field 'temprature', which is ignored: did you mean temperature?")
    rows.write_text('{"id": "y", "prompt": "Ann has"}\n')
    with refused(r"no prompt of .* can run: left out: y: it has no answer whose length"):
        make_prompts(workload, models, 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"output_lens": "data"}, "output-lens is 'data' but prompts are random: name a data set"),
        ({"dataset": "sharegpt", "output_lens": "long"}, "output-lens is 'long': use one of fixed, data"),
        ({"num_prompts": 0}, "num-prompts is 0: use at least 1"),
    ],
)
def test_what_cannot_be_asked_is_refused(changes: dict[str, Any], reason: str) -> None:
    with refused(reason):
        replace(SMALL, **changes)


# --- of a pair whose text is known ------------------------------------------------------------------


def engine_of(tiny_pair: Path, **changes) -> EngineConfig:
    return engine_config(tiny_pair, **{"page_size": 4, "device": "cpu", "prefix_cache": False} | changes)


@pytest.fixture(scope="module")
def known(tiny_pair: Path) -> Models:
    return loaded(engine_of(tiny_pair))


def test_random_prompts_are_of_the_draft_vocabulary(known: Models) -> None:
    prompts = make_prompts(SMALL, known, 40)
    assert [len(request.prompt_token_ids) for request in prompts.requests] == [9] * 40
    drawn = {token for request in prompts.requests for token in request.prompt_token_ids}
    assert drawn <= set(CYCLE.tokens)
    assert len(drawn) > 20
    assert len({request.prompt_token_ids for request in prompts.requests}) == 40
    assert make_prompts(SMALL, known, 40) == prompts
    assert prompts.requests[0].sampling == SamplingParams(max_tokens=12, ignore_eos=True)


def test_synthetic_weights_get_random_tokens_as_long_as_the_texts(known: Models, tmp_path: Path) -> None:
    rows = [
        {"id": str(i), "prompt": " ".join(["a"] * length)}
        for i, length in enumerate((3, 7, SHAPE.max_positions - 100))
    ]
    data = tmp_path / "own.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    prompts = make_prompts(replace(SMALL, dataset=str(data), max_new_tokens=200), known, 5)
    assert [len(request.prompt_token_ids) for request in prompts.requests] == [3, 7, 3, 7, 3]
    assert len({request.prompt_token_ids for request in prompts.requests}) == 5
    limit = SHAPE.max_positions
    assert prompts.notes == (f"left out: 1 prompts that with 200 new tokens exceed a context of {limit}",)
    assert prompts.description == f"random tokens, as long as 2 first turns of {data}, repeated to 5"
    with pytest.raises(UserError, match=r"no prompt of .* can run: left out: 3 prompts"):
        make_prompts(replace(SMALL, dataset=str(data), max_new_tokens=limit), known, 5)


def test_the_cache_is_as_large_as_the_requests_need(tiny_pair: Path, known: Models, monkeypatch) -> None:
    monkeypatch.setattr(plans, "_WARM_UP", 1)
    config = resolved(engine_of(tiny_pair, max_batch_size=2, num_spec_tokens=3))
    sampling = SamplingParams(max_tokens=6)
    lengths = (5, 30, 1)
    requests = [
        Request(id=str(i), prompt_token_ids=(0,) * length, sampling=sampling)
        for i, length in enumerate(lengths)
    ]
    token_bytes = 2 * SHAPE.kv_size * 4 * (SHAPE.num_layers + 1)
    pages = 10 + 4  # of four positions: 30 and 5 prompt tokens, 6 new ones, 4 rows per step
    assert kv_bytes(config, known, requests) == pages * 4 * token_bytes
    auto = replace(config, num_spec_tokens="auto", max_batch_size=1)
    need = kv_bytes(auto, known, requests)
    engine = build_engine(replace(auto, kv_memory=need, num_spec_tokens=7), known, lambda event: None)
    costs = step_costs.measure(engine, 1, DraftLength(most=7, kind="auto"))
    assert costs.lengths == tuple(range(8)), "short requests leave room to time the steps"


def test_wrong_missing_and_surplus_tokens_are_counted(known: Models) -> None:
    text_of = KnownText.of(known)
    prompt = CYCLE.slice(7, 4)
    request = Request(id="a", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=5))
    text = CYCLE.after(prompt[-1], 5)

    def num_wrong(*token_ids: int) -> int:
        done = Completion(request=request, token_ids=token_ids, finish_reason="length", record=RECORD)
        return text_of.num_wrong([done, done])

    assert text_of.accept == 0.75
    assert num_wrong(*text) == 0
    assert num_wrong(*text[:3]) == 4
    assert num_wrong(*text, text[0]) == 2
    assert num_wrong(text[1], *text[1:]) == 2
    at_the_end = replace(text_of, max_positions=len(prompt) + 3)
    done = Completion(request=request, token_ids=text[:3], finish_reason="length", record=RECORD)
    assert at_the_end.num_wrong([done]) == 0, "the context ends the text"


def test_a_text_that_is_not_known_is_not_judged(known: Models, demo_pair: Pair) -> None:
    assert KnownText.of(demo_pair.models) is None
    other = replace(known, head=demo_pair.models.head)  # drafts tokens outside of the cycle
    assert KnownText.of(other) is None


def test_an_engine_frees_its_memory_at_once(tiny_pair: Path, known: Models) -> None:
    """Even without garbage collection before the next engine, which takes all free memory."""
    requests = make_prompts(SMALL, known, 2).requests
    gc.disable()
    try:
        engine = WarmEngine(resolved(engine_of(tiny_pair)), known, requests)
        core, runs = weakref.ref(engine._engine), [engine.run(), engine.run()]
        del engine
        assert core() is None
    finally:
        gc.enable()
    for run in runs:  # each has its own rows
        assert len({row.number for row in run.passes}) == len(run.passes) > 0
        assert len(run.requests) == 2
