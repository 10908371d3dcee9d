"""``BatchGenerator``: columns in, the same columns and answers out, in pipelines and from several threads."""

import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest

from specgen import BatchGenerator, Engine, EngineConfig, Prompt, SamplingParams, UserError
from specgen.config.bundled import data_directory
from specgen.jobs.batch_generator import COLUMNS
from specgen.jobs.shared_engine import SharedEngine

DEMO = data_directory() / "demo"
CONFIG = EngineConfig(
    model=str(DEMO / "target"), drafter=str(DEMO / "drafter"), device="cpu", max_batch_size=4
)
SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)
QUESTIONS = [f"Tom has {n} apples and eats {n // 2}. How many are left?" for n in range(3, 15)]


@pytest.fixture(scope="module")
def generator() -> BatchGenerator:
    return BatchGenerator(CONFIG, SAMPLING)


@cache
def texts() -> dict[str, str]:
    """The texts by question, of an engine alone."""
    with Engine(CONFIG) as engine:
        prompts = [Prompt(id=question, text=question) for question in QUESTIONS]
        return {output.id: output.text for output in engine.generate(prompts, SAMPLING)}


@pytest.fixture
def answers() -> dict[str, str]:
    return texts()


def test_a_batch_comes_back_with_answers(generator: BatchGenerator, answers: dict[str, str]) -> None:
    label = np.array([b"a", b"b", b"c"])
    batch = {"label": label, "prompt": np.array(QUESTIONS[:3], dtype=object)}
    found = generator(batch)
    assert list(found) == ["label", "prompt", *COLUMNS]
    assert found["label"] is label
    assert found["generated_text"] == [answers[each] for each in QUESTIONS[:3]]
    assert found["error"] == [None] * 3
    assert set(found["finish_reason"]) <= {"stop", "length"}
    for name, least in (("num_input_tokens", 5), ("num_generated_tokens", 1), ("num_spec_steps", 1)):
        assert min(found[name]) >= least
    assert [len(each) for each in found["generated_tokens"]] == found["num_generated_tokens"]
    drafted, accepted = found["num_draft_tokens"], found["num_accepted_draft_tokens"]
    assert all(0 <= a <= d for a, d in zip(accepted, drafted, strict=True))
    assert 1 <= min(found["mean_acceptance_length"]) <= 5


def test_rows_say_their_prompts_in_three_ways(generator: BatchGenerator) -> None:
    chat = [{"role": "user", "content": QUESTIONS[0], "name": None}]
    (text,) = generator({"messages": [chat]})["generated_text"]
    (same,) = generator({"messages": np.array([np.array(chat, dtype=object)], dtype=object)})[
        "generated_text"
    ]
    assert text == same
    ids = generator({"prompt_token_ids": [np.array([5, 6, 7]), [5, 6, 7]]})
    assert ids["num_input_tokens"] == [3, 3]
    assert ids["generated_text"][0] == ids["generated_text"][1]


def test_a_row_may_ask_otherwise(generator: BatchGenerator) -> None:
    own = [{"max_tokens": 2, "ignore_eos": True}, None, {"max_tokens": 3, "ignore_eos": True, "seed": None}]
    found = generator({"prompt": QUESTIONS[:3], "sampling_params": own})
    assert found["num_generated_tokens"][0] == 2
    assert found["num_generated_tokens"][2] == 3
    assert found["error"] == [None] * 3


def test_columns_are_read_by_order_whatever_their_labels(
    generator: BatchGenerator, answers: dict[str, str]
) -> None:
    column = pandas.Series(QUESTIONS[:3], index=[7, 0, 1])
    found = generator({"prompt": column})
    assert found["generated_text"] == [answers[text] for text in QUESTIONS[:3]]


def test_sampling_parameters_may_be_as_those_of_python(generator: BatchGenerator) -> None:
    own = [{"logit_bias": each} for each in ({"50": 1.5}, {50: 1.5}, ((50, 1.5),))] + [{"stop": []}]
    assert generator({"prompt": QUESTIONS[:1] * 4, "sampling_params": own})["error"] == [None] * 4
    wrong = generator({"prompt": QUESTIONS[:1], "sampling_params": [{"logit_bias": [50]}]})
    assert "logit_bias is [50]: use an object from token id to bias" in wrong["error"][0]


def test_nan_is_no_value(generator: BatchGenerator) -> None:
    """As numpy and pandas write None into a column."""
    own = pandas.Series([{"max_tokens": 2, "seed": np.nan, "ignore_eos": True}, np.nan])
    found = generator({"prompt": np.array([QUESTIONS[0], np.nan], dtype=object), "sampling_params": own})
    assert found["num_generated_tokens"] == [2, 0]
    assert "no prompt" in found["error"][1]


def test_a_bad_row_fails_alone(generator: BatchGenerator, answers: dict[str, str]) -> None:
    own = [None, {"max_tokens": 0}, {"wat": 1}, [3], None]
    found = generator({"prompt": [QUESTIONS[0], "a", "b", "c", None], "sampling_params": own})
    assert found["generated_text"] == [answers[QUESTIONS[0]], None, None, None, None]
    assert found["error"][0] is None
    for reason, part in zip(
        found["error"][1:],
        ("max_tokens (--max-new-tokens) is 0", "'wat'", "sampling_params is [3]", "no prompt"),
        strict=True,
    ):
        assert part in reason
        assert "\n" not in reason
    alone = generator({"prompt": [None]})
    assert alone["finish_reason"] == ["error"]
    assert alone["num_generated_tokens"] == [0]


def test_what_is_no_sampling_is_refused_before_a_call() -> None:
    with pytest.raises(UserError, match=r"^sampling is {'max_tokens': 3}: use SamplingParams"):
        BatchGenerator(CONFIG, {"max_tokens": 3})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1], "the batch is [1]: use a dict of columns"),
        (
            {"text": ["a"]},
            "the batch has the columns text: one of prompt, messages, prompt_token_ids is needed",
        ),
        ({"prompt": ["a"], "label": [1, 2]}, "columns have different lengths: {'prompt': 1, 'label': 2}"),
        ({"prompt": ["a"], "error": [""]}, "the batch has a column error already: rename it"),
        ({"prompt": ["a"], "x": 5}, "the batch has no value for each row in x: use a list of them"),
        ({"prompt": "Tom"}, "the batch has no value for each row in prompt: use a list of them"),
        ({"prompt": {"a": "Tom"}}, "the batch has no value for each row in prompt: use a list of them"),
    ],
)
def test_what_is_no_batch_is_refused(generator: BatchGenerator, batch: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        generator(batch)
    assert message in str(error.value)


def test_an_empty_batch_is_empty(generator: BatchGenerator) -> None:
    assert generator({"prompt": []}) == {"prompt": [], **{name: [] for name in COLUMNS}}


def test_calls_at_once_share_the_engine(generator: BatchGenerator, answers: dict[str, str]) -> None:
    """Each gets its own rows, in order, also where two ask the same."""
    batches = [QUESTIONS[first : first + 3] for first in range(0, 12, 3)] * 2
    with ThreadPoolExecutor(len(batches)) as pool:
        found = list(pool.map(lambda questions: generator({"prompt": questions}), batches))
    for questions, each in zip(batches, found, strict=True):
        assert each["generated_text"] == [answers[question] for question in questions]
    assert not generator._engine._calls, "nothing of a call is kept"
    assert not generator._engine._owners


def test_later_rows_join_the_running_batch(generator: BatchGenerator) -> None:
    """Two calls of two rows each take about as many passes as one call of four."""
    rows = [{"max_tokens": 24, "ignore_eos": True}] * 2
    passes: list[int] = []
    engine = generator._engine._engine
    assert engine is not None
    core = engine._require_open()[1]
    record = core._record
    core._record = lambda row: passes.append(getattr(row, "num_sequences", 0))  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(2) as pool:
            batches = [{"prompt": QUESTIONS[i : i + 2], "sampling_params": rows} for i in (0, 2)]
            list(pool.map(generator, batches))
    finally:
        core._record = record  # type: ignore[method-assign]
    assert max(passes) == 4


def test_the_last_call_leaves_the_engine_idle(generator: BatchGenerator) -> None:
    """No pass is in flight whose row would never be recorded, and no run is open."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(generator, [{"prompt": QUESTIONS[:3]}, {"prompt": QUESTIONS[3:4]}]))
    engine = generator._engine._engine
    assert engine is not None
    assert engine._running is None
    assert next(generator._engine._outputs, None) is None


def test_a_short_call_does_not_wait_for_a_long_one(generator: BatchGenerator) -> None:
    long = {"prompt": QUESTIONS[:3], "sampling_params": [{"max_tokens": 120}] * 3}
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(generator, long)
        while not generator._engine._at_work:
            assert not first.done()
        second = pool.submit(generator, {"prompt": QUESTIONS[3:4], "sampling_params": [{"max_tokens": 2}]})
        assert second.result()["num_generated_tokens"] == [2]
        assert not first.done()
    assert first.result()["num_generated_tokens"] == [120] * 3


def test_draws_depend_on_prompt_and_seed_alone(
    generator: BatchGenerator, caplog: pytest.LogCaptureFixture
) -> None:
    own = {"temperature": 1.0, "seed": 5, "max_tokens": 16}

    def drawn(prompts: list[str], *owns: Any, **more: Any) -> list[str]:
        columns = {"prompt": prompts, "sampling_params": [*owns], **more}
        return list(generator(columns)["generated_text"])

    (alone,) = drawn(QUESTIONS[1:2], own)
    assert drawn(QUESTIONS[:3], own, own, own)[1] == alone
    assert not caplog.messages
    for _ in range(2):
        assert drawn(QUESTIONS[1:2] * 3, *[own] * 3) == [alone] * 3, "repeated"
    (warning,) = caplog.messages
    assert warning.startswith(
        "2 sampled rows repeat the prompt and the seed of another, and get the same draws"
    )
    spelled = {"max_tokens": 16.0, "stop": None, "top_p": 1, "seed": np.int64(5), "temperature": 1}
    assert drawn(QUESTIONS[1:2], spelled, messages=[None], prompt_token_ids=[pandas.NA]) == [alone]
    assert alone.startswith(drawn(QUESTIONS[1:2], own | {"max_tokens": 8})[0])
    contents = QUESTIONS[1], [{"type": "text", "text": QUESTIONS[1]}]
    chats = [[{"role": "user", "content": content}] for content in contents]
    assert len({*generator({"messages": chats, "sampling_params": [own, own]})["generated_text"]}) == 1
    others = drawn(QUESTIONS[1:2] * 3, *({**own, "seed": seed} for seed in (6, 7, 8)))
    assert len({alone, *others}) == 4, "samples of one prompt"


@pytest.mark.slow
def test_draws_follow_the_seed_of_the_generator() -> None:
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True)
    sampled = BatchGenerator(CONFIG, sampling)
    (alone,) = sampled({"prompt": QUESTIONS[1:2]})["generated_text"]
    for own in (None, {}, {"seed": None}, {"seed": 5}, pandas.NA, np.nan):
        assert sampled({"prompt": QUESTIONS[1:2], "sampling_params": [own]})["generated_text"] == [alone]


def test_many_equal_rows_take_no_longer_than_others(generator: BatchGenerator) -> None:
    begin = time.process_time()
    found = generator({"prompt": [" "] * 10_000})
    assert found["error"] == ["prompt is empty"] * 10_000
    assert time.process_time() - begin < 15, "they were numbered by trying, which took minutes"


def test_it_is_pickled_without_its_engine(generator: BatchGenerator, answers: dict[str, str]) -> None:
    copy = pickle.loads(pickle.dumps(generator))
    assert copy._engine._engine is None
    assert copy({"prompt": QUESTIONS[:1]})["generated_text"] == [answers[QUESTIONS[0]]]


def test_datasets_map_takes_it(generator: BatchGenerator, answers: dict[str, str]) -> None:
    """Also where a row fails behind batches without an error, in which the type of that column is not seen."""
    rows = datasets.Dataset.from_dict({"prompt": [*QUESTIONS, None], "number": list(range(13))})
    schema = generator.schema(rows.features.arrow_schema)
    assert schema.names == ["prompt", "number", *COLUMNS]
    features = datasets.Features.from_arrow_schema(schema)
    found = rows.map(generator, batched=True, batch_size=5, new_fingerprint="answers", features=features)
    assert found["generated_text"] == [*(answers[each] for each in QUESTIONS), None]
    assert found["number"] == list(range(13))
    assert found["error"][:-1] == [None] * 12
    assert "no prompt" in found["error"][-1]


FORKED = """
import multiprocessing, sys
from specgen import BatchGenerator, Engine, EngineConfig, SamplingParams
from specgen.config.bundled import pair

model, drafter = pair()
config, sampling = EngineConfig(model=model, drafter=drafter, device="cpu"), SamplingParams(max_tokens=2)

def ask(use):
    try:
        use()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "answered"

generator = BatchGenerator(config, sampling)
engine = Engine(config)
list(engine.generate(["Tom has 3 apples"] * 8, sampling))
uses = lambda: generator({"prompt": ["Tom"]}), lambda: list(engine.generate("Tom"))
answers = multiprocessing.get_context("fork").Queue()
child = multiprocessing.get_context("fork").Process(target=lambda: answers.put([ask(use) for use in uses]))
child.start()
print(*answers.get(timeout=60), sep="\\n")
"""


@pytest.mark.slow
def test_a_fork_of_a_process_with_an_engine_refuses() -> None:
    """As in ``datasets.map`` with ``num_proc``: work there would wait for OpenMP's threads for ever."""

    def run(num_threads: int) -> list[str]:
        environment = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
        command = [sys.executable, "-c", FORKED]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=90, env=environment
        )
        return done.stdout.splitlines()

    found = run(2)
    assert len(found) == 2
    for line in found:
        assert re.match(r"UserError: an engine has run in process \d+, .* leave num_proc out", line)
    assert run(1) == ["answered", "answered"], "there are no threads to wait for"


def test_files_with_and_without_a_failed_row_are_read_together(
    generator: BatchGenerator, tmp_path: Path
) -> None:
    import pyarrow
    from pyarrow import parquet

    for name, prompts in (("a", QUESTIONS[:2]), ("b", [QUESTIONS[0], None])):
        parquet.write_table(pyarrow.table(generator({"prompt": prompts})), tmp_path / f"{name}.parquet")
    schema = generator.schema(pyarrow.schema({"prompt": pyarrow.string()}))
    found = parquet.read_table(tmp_path, schema=schema)
    assert found.schema.names == schema.names
    assert [error is None for error in found["error"].to_pylist()] == [True, True, True, False]


@pytest.mark.parametrize("when", ["at once", "behind an output"])
def test_an_error_of_the_engine_ends_all_calls_in_its_run(
    generator: BatchGenerator, answers: dict[str, str], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Rows that the engine had taken are in no later run."""
    generate = Engine.generate

    def breaking(self: Engine, *arguments: Any, **named: Any) -> Iterator[Any]:
        if when != "at once":
            outputs = generate(self, *arguments, **named)
            yield next(outputs)
            outputs.close()  # type: ignore[attr-defined]
        raise RuntimeError("planted")

    long = {"prompt": QUESTIONS[:2], "sampling_params": [{"max_tokens": 60}] * 2}
    generator({"prompt": QUESTIONS[:1]})
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "generate", breaking)
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(generator, long) for _ in range(3)]
            errors = [call.exception(timeout=60) for call in calls]
    assert [str(error) for error in errors] == ["planted"] * 3
    assert generator({"prompt": QUESTIONS[:1]})["generated_text"] == [answers[QUESTIONS[0]]]


def test_a_failed_run_leaves_no_prompt_of_its_calls_to_the_next() -> None:
    """Also while their threads have not noticed yet."""

    class Broken:
        def generate(self, prompts: Iterator[Any], *arguments: Any, **named: Any) -> Iterator[Any]:
            while len(shared._calls) < 2:
                time.sleep(0.01)
            next(prompts)
            raise RuntimeError("planted")

    shared = SharedEngine(lambda record: Broken(), SAMPLING)
    seen: list[Any] = []
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(shared.answer, [Prompt(id=name, text="x")], seen.append) for name in "ab"]
        while not any(each.failed for each in [*shared._calls]) and not all(call.done() for call in calls):
            """Wait."""
        assert next(shared._prompts()) is None
        assert [str(call.exception()) for call in calls] == ["planted"] * 2
    assert not seen
