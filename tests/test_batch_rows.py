"""Rows of OpenAI's Batch API, and how each row says it wants to be decoded."""

import pytest

from specgen.prompts import DataSource, Message, Prompt, Rejected
from specgen.prompts.fields import _READERS, SAMPLING_FIELDS
from tests.commands import write_rows

HI = [{"role": "user", "content": "Hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def read(tmp_path, *rows: object) -> list[Prompt | Rejected]:
    path = tmp_path / "rows.jsonl"
    write_rows(path, rows)
    found = DataSource(dataset=str(path)).open()
    return sorted(found, key=lambda each: isinstance(each, Rejected))


def batch(body: object, url: object = CHAT, **more: object) -> dict:
    return {"custom_id": "r", "method": "POST", "url": url, "body": body, **more}


def chat(**parameters: object) -> dict:
    return batch({"model": "any", "messages": HI, **parameters})


def text(**parameters: object) -> dict:
    return batch({"model": "any", "prompt": "Once", **parameters}, TEXT)


def test_a_chat_request(tmp_path):
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    (prompt,) = read(tmp_path, batch({"messages": messages}))
    said = (Message(role="system", content="Be brief."), Message(role="user", content=("One.", "Two.")))
    assert prompt == Prompt(id="r", messages=said, endpoint=CHAT)
    assert prompt.where == "line 1"


def test_text_requests_with_text_and_with_token_ids(tmp_path):
    first, second = read(tmp_path, text(), text(prompt=[3, 1]) | {"custom_id": "s"})
    assert first == Prompt(id="r", text="Once", endpoint=TEXT)
    assert second == Prompt(id="s", token_ids=(3, 1), endpoint=TEXT)


OF_NO_EFFECT = {"user": "me", "metadata": {"a": "b"}, "store": True, "n": 1, "stream": False, "tools": []}


@pytest.mark.parametrize(
    ("row", "sampling"),
    [
        (chat(max_tokens=5, max_completion_tokens=7), {"max_tokens": 7}),
        (chat(max_tokens=5, max_completion_tokens=None), {"max_tokens": 5}),
        (chat(max_tokens=5.0), {"max_tokens": 5}),
        (chat(temperature=0.5, top_p=1, seed=-3), {"temperature": 0.5, "top_p": 1, "seed": -3}),
        (chat(stop="\n"), {"stop": ("\n",)}),
        (text(stop=["a", "b"], top_k=-1, min_p=0.1), {"stop": ("a", "b"), "top_k": 0, "min_p": 0.1}),
        (text(ignore_eos=True), {"ignore_eos": True}),
        (chat(**OF_NO_EFFECT, presence_penalty=None), {}),
        (chat(presence_penalty=0.5), {"presence_penalty": 0.5}),
        (chat(frequency_penalty=-2), {"frequency_penalty": -2}),
        (text(repetition_penalty=1.05), {"repetition_penalty": 1.05}),
        (text(suppress_tokens=[4, 2]), {"suppress_tokens": (4, 2)}),
        (text(suppress_tokens=[]), {"suppress_tokens": ()}),
        ({"id": "r", "prompt": "x", "temperature": 0, "max_tokens": 3}, {"temperature": 0, "max_tokens": 3}),
        ({"id": "r", "prompt": "x", "else": []}, {}),
        (chat(logprobs=True, top_logprobs=3), {"logprobs": 3}),
        (chat(logprobs=True), {"logprobs": 0}),
        (chat(logprobs=False), {}),
        (text(logprobs=0), {"logprobs": 0}),
        (text(logprobs=5), {"logprobs": 5}),
        (chat(logit_bias={"50": -100, "7": 1.5, "9": None}), {"logit_bias": ((7, 1.5), (50, -100))}),
    ],
)
def test_sampling_by_row(tmp_path, row, sampling):
    (prompt,) = read(tmp_path, row)
    assert prompt.sampling == sampling


BAD = [
    (batch({"messages": HI}, custom_id=None), "no custom_id"),
    (batch({"messages": HI}, method="GET"), "method is 'GET': use POST"),
    (batch({"messages": HI}, "/v1/embeddings"), "url is '/v1/embeddings': use /v1/chat/completions or /v1"),
    (batch({"messages": HI}, [CHAT]), "url is ['/v1/chat/completions']: use"),
    ({"custom_id": "r", "body": {"messages": HI}}, "url is None: use"),
    (batch([]), "body is []: use an object"),
    (batch({"prompt": "x"}), "no messages"),
    (batch({"messages": HI}, TEXT), "no prompt"),
    (text(prompt=["a", "b"]), "the items of prompt must be integers of 0 or more"),
    (chat(n=2), "n is 2, which is not supported: use 1, or remove it"),
    (chat(stream=True), "stream is True"),
    (chat(presence_penalty=2.5), "presence-penalty is 2.5: use -2.0 to 2.0"),
    (chat(frequency_penalty="1"), "frequency_penalty is '1': use a number"),
    (chat(repetition_penalty=0), "repetition-penalty is 0: use 0.01 to 100.0"),
    (chat(response_format={"type": "json_object"}), "response_format is {'type': 'json_object'}"),
    (chat(tools=[{"type": "function"}]), "tools is [{'type': 'function'}]"),
    (chat(temprature=1), "'temprature' is not known"),
    (chat(**{"x" * 10_000: 1}), "'xxxxx"),
    (chat(max_tokens="5"), "max_tokens is '5': use a whole number"),
    (chat(max_tokens=True), "max_tokens is True: use a whole number"),
    (chat(max_tokens=5.5), "max_tokens is 5.5: use a whole number"),
    (chat(max_tokens=10**30), f"max_tokens is {10**30}: use a whole number of at most 64 bits"),
    (
        chat(max_tokens=2**40),
        f"max_tokens (--max-new-tokens) is {2**40}: ask for at least 1, at most 2147483647",
    ),
    (chat(top_k=2**31), "top-k is 2147483648: use 0 (off) or a number of tokens, at most 2147483647"),
    (chat(top_k=10**20), f"top_k is {10**20}: use a whole number of at most 64 bits"),
    (chat(top_k=-2), "top-k is -2: use 0 (off)"),
    (chat(seed=2**70), f"seed is {2**70}: use a whole number of at most 64 bits"),
    (
        chat(seed=-1),
        "seed is -1: use a number of 64 bits, and not -1, which is a new seed for every request elsewhere",
    ),
    (chat(min_p=-0.1), "min-p is -0.1: use a share in [0, 1]"),
    (chat(top_p=0), "top-p is 0: use a share in (0, 1]"),
    (chat(temperature=10**400), "temperature is 1000000000"),
    (chat(temperature=1e30), "temperature is 1e+30: use 0 (greedy) or more, up to 1000000"),
    (chat(logit_bias={"1": 1e30}), "logit-bias of token 1 is 1e+30: use -100 to 100"),
    (chat(logit_bias={"-1": 1}), "logit_bias has the key '-1': use a token id"),
    (chat(max_tokens=0), "max_tokens (--max-new-tokens) is 0"),
    (chat(temperature=-1), "temperature is -1: use 0 (greedy) or more"),
    (chat(temperature=True), "temperature is True: use a number"),
    (chat(temperature=float("nan")), "temperature is nan: use a number"),
    (chat(temperature=float("inf")), "temperature is inf: use a number"),
    (chat(stop=[3]), "stop is 3, not a string"),
    (chat(stop=""), "an empty stop string"),
    (chat(ignore_eos="yes"), "ignore_eos is 'yes': use true or false"),
    (chat(top_logprobs=3), "top_logprobs is 3 but logprobs is not true"),
    (chat(logprobs=1), "logprobs is 1: use true or false"),
    (
        batch({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        "a part of a message is of type 'image_url': use text",
    ),
    (
        batch({"messages": [{"role": "user", "content": [{"type": "text", "text": " "}]}]}),
        "the content of a user message is empty",
    ),
    (
        batch({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}, *HI]}),
        "a message has tool_calls",
    ),
    (
        batch({"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}, *HI]}),
        "a message has function_call, which is not supported",
    ),
    (chat(logprobs=True, top_logprobs=200), "logprobs is 200"),
    (text(logprobs=True), "logprobs is True: use a whole number"),
    (chat(logit_bias=[1]), "logit_bias is [1]: use an object"),
    (chat(logit_bias={"x": 1}), "logit_bias has the key 'x': use a token id"),
    (chat(logit_bias={"01": 1}), "logit_bias has the key '01': use a token id"),
    (chat(logit_bias={"1" * 5000: 1}), "logit_bias has the key '111"),
    (chat(logit_bias={"1": "a"}), "logit_bias is 'a': use a number"),
    (chat(logit_bias={"1": 200}), "logit-bias of token 1 is 200"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_unsupported_rows_are_named_and_the_rest_runs(tmp_path, row, reason):
    prompt, rejected = read(tmp_path, row, chat(max_tokens=1) | {"custom_id": "last"})
    assert prompt.id == "last"
    assert rejected.reason.startswith(f"line 1: {reason}")
    assert len(rejected.reason) <= 300


def test_values_at_the_bounds_are_taken(tmp_path):
    kept = {"max_tokens": 2**31 - 1, "top_k": 2**31 - 1, "seed": -(2**63), "temperature": 10**6}
    (prompt,) = read(tmp_path, chat(**kept))
    assert prompt.sampling == kept


def test_every_field_of_the_sampling_has_a_reader():
    assert set(_READERS) == set(SAMPLING_FIELDS)
