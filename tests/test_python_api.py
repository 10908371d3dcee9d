"""What a program may hand to the Python API: one string is one, and a wrong type is one clear error at once."""

import inspect
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specgen import (
    Engine,
    EngineConfig,
    Message,
    Prompt,
    Report,
    RequestOutput,
    SamplingParams,
    UserError,
    read_run,
    summarize,
)
from specgen.config import DraftLength
from specgen.config.bundled import pair
from tests.commands import printed, refused, write_rows

MODEL, DRAFTER = pair()
QUESTION = Message(role="user", content="Tom has 3 apples and buys 2 more. How many?")
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(EngineConfig(model=MODEL, drafter=DRAFTER, device="cpu")) as engine:
        yield engine


def texts(engine: Engine, prompts: Any, sampling: SamplingParams = SHORT) -> dict[str, str]:
    return {output.id: output.error or output.text for output in engine.generate(prompts, sampling)}


def test_one_string_is_one_stop_string_wherever_it_is_given(engine: Engine) -> None:
    def answer(sampling: SamplingParams, **own: Any) -> str:
        return texts(engine, [Prompt(id="a", messages=(QUESTION,), sampling=own)], sampling)["a"]

    plain = answer(SamplingParams())
    stop = plain.split()[2]
    before = plain[: plain.index(stop)]
    assert before.strip()
    for several in (stop, [stop], (stop,)):
        assert SamplingParams(stop=several).stop_strings == (stop,)
        assert answer(SamplingParams(stop=several)) == before
        assert answer(SamplingParams(), stop=several) == before
    assert SamplingParams(stop=stop) == SamplingParams(stop=[stop])
    assert hash(SamplingParams(stop=stop)) == hash(SamplingParams(stop=[stop]))


def test_a_stop_string_that_is_a_special_token_ends_a_text_where_the_token_does(engine: Engine) -> None:
    def answer(sampling: SamplingParams, **own: Any) -> tuple[str | None, tuple[int, ...], str]:
        prompt = Prompt(id="a", messages=(QUESTION,), sampling=own)
        (output,) = engine.generate([prompt], sampling)
        return output.finish_reason, output.token_ids, output.text

    ended = answer(SamplingParams())
    assert ended[0] == "stop"
    assert answer(SamplingParams(ignore_eos=True, stop="<|end|>")) == ended
    assert answer(SamplingParams(), ignore_eos=True, stop=("\n\n\n", "<|end|>")) == ended
    last = ended[2][-1]
    reason, ids, text = answer(SamplingParams(ignore_eos=True, stop=f"{last}<|end|>"))
    assert (reason, ids, text) == ("stop", ended[1], ended[2][:-1])


def test_one_prompt_is_one_request(engine: Engine) -> None:
    one = texts(engine, "Tom has 3 apples")
    assert one == texts(engine, ["Tom has 3 apples"]) == texts(engine, iter(["Tom has 3 apples"]))
    assert list(one) == ["0"]
    chat = Prompt(id="chat", messages=(QUESTION,))
    assert texts(engine, chat) == texts(engine, [chat])


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        ([1, 2], "prompt 0 is 1"),
        (["Tom", 2], "prompt 1 is 2"),
        ([{"prompt": "x"}], "prompt 0 is {'prompt': 'x'}"),
        ([[1, 2, 3]], r"prompt 0 is \[1, 2, 3\]"),
        ([None], "prompt 0 is None"),
        ([b"x"], "prompt 0 is b'x'"),
        ([["Tom"]], r"prompt 0 is \['Tom'\]"),
        ({"prompt": "x"}, "prompts is {'prompt': 'x'}"),
        (b"hello", "prompts is b'hello'"),
        (None, "prompts is None"),
        (5, "prompts is 5"),
        (QUESTION, "prompts is Message"),
    ],
)
def test_other_types_of_prompts_are_refused_by_the_call(engine: Engine, prompts: Any, named: str) -> None:
    with pytest.raises(UserError, match=rf"^{named}.*: use a string or Prompt\(id="):
        engine.generate(prompts, SHORT)
    with pytest.raises(UserError, match=r"^prompt 1 is 5: use a string or Prompt"):
        list(engine.generate((each for each in ("Tom", 5)), SHORT))  # type: ignore[arg-type]
    assert list(texts(engine, "Tom")) == ["0"], "the engine is free"


def test_sampling_is_sampling_params(engine: Engine) -> None:
    for wrong in ({"max_tokens": 3}, [SHORT], 5):
        with pytest.raises(UserError, match=r"^sampling is .*: use SamplingParams\(\.\.\.\)"):
            engine.generate("Tom", wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^config is .*: use EngineConfig\(model="):
        Engine(MODEL)  # type: ignore[arg-type]


@pytest.mark.parametrize("own", [{"max_tokens": 3}, {"max_tokens": 3, "stop": ["x"]}, {}])
def test_prompts_that_ask_for_the_same_share_it(own: dict[str, Any]) -> None:
    """A pass looks at each once; what has a list, say, has its own."""
    for others in (SHORT, replace(SHORT, temperature=1.0)):
        one, two = (Prompt(id=each, text="Tom", sampling=dict(own)).sampling_over(others) for each in "ab")
        assert one == two == replace(others, **own)
        assert (one is two) == ("stop" not in own)


WRONG_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": "x"}, "max_tokens is 'x': use a whole number"),
    ({"max_tokens": True}, "max_tokens is True: use a whole number"),
    ({"max_tokens": 4.0}, "max_tokens is 4.0: use a whole number"),
    ({"max_tokens": np.float64(4)}, r"max_tokens is .*4.0.*: use a whole number"),
    ({"max_tokens": None}, "max_tokens is None: use a whole number"),
    ({"max_tokens": -1}, "is -1: ask for at least 1"),
    ({"seed": 2**70}, "seed is 1180591620717411303424: use a number of 64 bits"),
    ({"temperature": "0"}, "temperature is '0': use a number"),
    ({"temperature": True}, "temperature is True: use a number"),
    ({"temperature": float("nan")}, "temperature is nan: use a finite number"),
    ({"temperature": float("inf")}, "temperature is inf: use a finite number"),
    ({"temperature": np.float32("nan")}, "temperature is nan: use a finite number"),
    ({"temperature": np.array([0.5, 1.0])}, "temperature is array.*: use a number"),
    ({"temperature": -0.1}, "temperature is -0.1: use 0"),
    ({"top_p": float("nan")}, "top_p is nan: use a finite number"),
    ({"logprobs": True}, "logprobs is True: use a whole number"),
    ({"ignore_eos": 1}, "ignore_eos is 1: use True or False"),
    ({"ignore_eos": "false"}, "ignore_eos is 'false': use True or False"),
    ({"stop": 5}, "stop is 5: use a string or a list of strings"),
    ({"stop": [5]}, "stop is 5: use a string"),
    ({"stop": b"x"}, "stop is b'x': use a string or a list of strings"),
    ({"stop": ""}, "an empty stop string"),
    ({"logit_bias": {1: 2.0}}, r"logit_bias is {1: 2.0}: use a tuple of pairs \(token id, bias\)"),
    ({"logit_bias": ((1, "a"),)}, "logit_bias of token 1 is 'a': use a number"),
    ({"logit_bias": (("a", 1.0),)}, "a token id of logit_bias is 'a': use a whole number"),
    ({"logit_bias": ((3, 101.0),)}, "logit-bias of token 3 is 101.0: use -100 to 100"),
    ({"logit_bias": ((3, float("nan")),)}, "logit_bias of token 3 is nan: use a finite number"),
    ({"logit_bias": ((3, 1.0), (3, 2.0))}, "logit-bias names a token twice"),
    ({"logit_bias": tuple((i, 1.0) for i in range(1025))}, "logit-bias names 1025 tokens: use at most 1024"),
    ({"logprobs": 21}, "logprobs is 21: use 0 "),
    ({"logprobs": -1}, "logprobs is -1: use 0 "),
    ({"repetition_penalty": 0}, r"repetition-penalty is 0: use 0\.01 to 100\.0; 1 switches it off"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty is inf"),
    ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
    ({"presence_penalty": 2.5}, r"presence-penalty is 2\.5: use -2\.0 to 2\.0; 0 switches it off"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
    (
        {"suppress_tokens": tuple(range(1020)), "logit_bias": tuple((n, 1.0) for n in range(9))},
        "suppress-tokens and logit-bias name 1029 tokens: use at most 1024",
    ),
]


def params(**wrong: Any) -> None:
    """As a run's and as a prompt's own."""
    with pytest.raises(UserError) as refused:
        Prompt(id="a", text="Tom", sampling=wrong)
    with pytest.raises(UserError) as own:
        SamplingParams(**wrong)
    assert str(own.value) in str(refused.value)
    raise own.value


def configuration(**wrong: Any) -> None:
    EngineConfig(**{"model": MODEL, "drafter": DRAFTER} | wrong)


def test_numbers_of_numpy_and_torch_become_pythons() -> None:
    params = SamplingParams(
        max_tokens=np.int64(4),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_p=torch.tensor(0.25),  # type: ignore[arg-type]
        logprobs=np.uint8(3),  # type: ignore[arg-type]
        logit_bias=((np.int32(7), np.float64(1)),),  # type: ignore[arg-type]
    )
    assert params == SamplingParams(
        max_tokens=4, temperature=0.5, top_p=0.25, logprobs=3, logit_bias=((7, 1.0),)
    )
    kinds = [type(each) for each in (params.max_tokens, params.temperature, params.top_p, params.logprobs)]
    assert kinds == [int, float, float, int]
    assert [type(each) for each in params.logit_bias[0]] == [int, float]
    ids = np.array([5, 6], dtype=np.int32)
    assert Prompt(id="a", token_ids=ids).token_ids == (5, 6)  # type: ignore[arg-type]
    assert {type(each) for each in Prompt(id="a", token_ids=ids).token_ids} == {int}  # type: ignore[arg-type]


WRONG_CONFIGURATIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_batch_size": "8"}, "max_batch_size is '8': use a whole number"),
    ({"max_batch_size": True}, "max_batch_size is True: use a whole number"),
    ({"device": torch.device("cpu")}, "device is device.*: use a string"),
    ({"model": Path(MODEL)}, "model is PosixPath.*: use a string"),
    ({"drafter": 5}, "drafter is 5: use a string"),
    ({"kv_memory": "2GiB"}, "kv_memory is '2GiB': use a whole number"),
    ({"prefix_cache": "no"}, "prefix_cache is 'no': use True or False"),
    ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization is nan: use a finite number"),
    ({"num_spec_tokens": 4.0}, "num-spec-tokens is 4.0: use 1 to 16"),
    ({"num_spec_tokens": True}, "num-spec-tokens is True: use 1 to 16"),
    ({"dtype": torch.bfloat16}, "dtype is torch.bfloat16: use one of auto, float32"),
]
WRONG_PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({"id": 1, "text": "Tom"}, "id is 1: use a string"),
    ({"id": "a"}, "prompt 'a': set exactly one of messages, text and token_ids"),
    ({"id": "a", "text": "Tom", "messages": (QUESTION,)}, "prompt 'a': set exactly one of messages"),
    ({"id": "a", "text": 5}, "text is 5: use a string"),
    ({"id": "a", "messages": "hello"}, "messages is 'hello': use a tuple of Message"),
    ({"id": "a", "messages": [{"role": "user"}]}, r"messages has {'role': 'user'}: use Message\(role="),
    ({"id": "a", "messages": QUESTION}, "messages is Message.*: use a tuple of Message"),
    ({"id": "a", "token_ids": "abc"}, "token_ids is 'abc': use a list of whole numbers"),
    ({"id": "a", "token_ids": (1, True)}, "token_ids is True: use a whole number"),
    ({"id": "a", "token_ids": (1, 2.5)}, "token_ids is 2.5: use a whole number"),
    ({"id": "a", "token_ids": (1, -1)}, "prompt 'a' has the token id -1: use 0 or more"),
    ({"id": "a", "text": "Tom", "follow_ups": ("Why?",)}, "prompt 'a' has follow_ups: they need messages"),
    ({"id": "a", "text": "Tom", "sampling": SHORT}, "sampling is SamplingParam.*: use a dict"),
    ({"id": "a", "text": "Tom", "sampling": {"max_token": 1}}, "did you mean max_tokens"),
]
WRONG_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"role": "usr", "content": "x"}, "role of a message is 'usr': use system, user or assistant"),
    ({"role": "user", "content": 5}, "content of a message from user"),
]
WRONG = {
    params: WRONG_PARAMS,
    configuration: WRONG_CONFIGURATIONS,
    Prompt: WRONG_PROMPTS,
    Message: WRONG_MESSAGES,
}


@pytest.mark.parametrize(
    ("make", "wrong", "message"),
    [
        pytest.param(make, *each, id=f"{make.__name__}-{number}")
        for make, cases in WRONG.items()
        for number, each in enumerate(cases)
    ],
)
def test_what_is_wrong_is_refused_when_it_is_made(make: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(**wrong)


def test_one_string_is_one_later_turn() -> None:
    assert Prompt(id="a", messages=(QUESTION,), follow_ups="Why?").turn_ids == ("a", "a/turn-2")  # type: ignore[arg-type]
    assert Prompt(id="a", messages=[QUESTION]).messages == (QUESTION,)  # type: ignore[arg-type]


def test_outputs_and_runs_have_the_numbers_of_the_report(engine: Engine, tmp_path: Path) -> None:
    asked = [{"id": f"r{n}", "prompt": f"Tom has {n % 4} apples.", "category": "ab"[n % 2]} for n in range(6)]
    prompts = [Prompt(id=row["id"], text=row["prompt"], category=row["category"]) for row in asked]
    data = write_rows(tmp_path / "rows.jsonl", asked)
    outputs = [*engine.generate(prompts, SHORT), RequestOutput(id="bad", finish_reason="error", error="no")]
    report = summarize(outputs)
    command = ("generate", "--dataset", data, "--max-new-tokens", SHORT.max_tokens, "--ignore-eos")
    printed(*command, "--output", tmp_path / "run")
    run = read_run(tmp_path / "run")
    timed = {"busy", "num_errors", "wall", "wall_seconds", "ttft_seconds", "tpot_seconds", "steps"}
    timed |= {"num_cached_tokens"}
    for each in fields(Report):
        if each.name not in timed:
            assert getattr(report, each.name) == getattr(run, each.name), each.name
    assert report.mean_acceptance_length_ci95 is not None
    assert len(report.categories) == 2
    assert (report.num_errors, run.num_errors) == (1, 0)
    with refused("none of 1 outputs has an answer"):
        summarize(outputs[-1:])
    with refused("give a directory that"):
        read_run(tmp_path)


def test_every_field_of_an_output_is_in_its_help() -> None:
    documented = inspect.getdoc(RequestOutput) or ""
    assert [each.name for each in fields(RequestOutput) if f"``{each.name}``" not in documented] == []


def test_the_bundled_pair_takes_any_length_that_a_configuration_takes() -> None:
    assert pair() == pair(None, None, 4) == pair(None, None, "auto") == pair(None, None, DraftLength(most=4))
    assert pair("target", None, 0) == ("target", None)
    with pytest.raises(UserError, match="has no drafter"):
        pair("target")
