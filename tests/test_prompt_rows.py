"""What becomes of a row: a prompt, or a reason; the same from a file, in an engine, and in a batch of columns."""

import gzip
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specgen import BatchGenerator, Engine, EngineConfig, SamplingParams
from specgen.config import StructuredOutputs
from specgen.config.bundled import data_directory
from specgen.jobs.prompt_index import index_prompts
from specgen.jobs.shards import WHOLE, Shard
from specgen.prompts import DATASETS, DataSource, Message, Prompt, Rejected
from specgen.prompts.fields import _READERS, SAMPLING_FIELDS
from specgen.prompts.formats import Reading
from tests.commands import write_rows

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DEMO = data_directory() / "demo"
CONFIG = EngineConfig(model=str(DEMO / "target"), drafter=str(DEMO / "drafter"), device="cpu")
SHORT = SamplingParams(max_tokens=1)


def user(content: str | tuple[str, ...] = "Hi") -> Message:
    return Message(role="user", content=content)


SYSTEM = Message(role="system", content="Brief.")


HI = [{"role": "user", "content": "Hi"}]


def own(**fields: object) -> dict[str, Any]:
    return {"prompt": "x", **fields}


def batch(body: object, url: object = CHAT, **more: object) -> dict[str, Any]:
    return {"method": "POST", "url": url, "body": body, **more}


def chat(**parameters: object) -> dict[str, Any]:
    return batch({"model": "any", "messages": HI, **parameters})


def text(**parameters: object) -> dict[str, Any]:
    return batch({"model": "any", "prompt": "x", **parameters}, TEXT)


def said(*messages: object) -> dict[str, Any]:
    return {"messages": [*messages]}


def prompt(**fields: Any) -> Prompt:
    """Of raw text, unless ``fields`` say otherwise."""
    return Prompt(id="x", **fields if {"messages", "token_ids"} & {*fields} else {"text": "x", **fields})


FULL = own(category="math", temperature=0.5, stop=["x", "%"], source={"page": 1, "of": "a"})
PARTS = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
OF_NO_EFFECT = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "best_of": 1,
    "stream": False,
    "tools": [],
}
AT_THE_BOUNDS = {"max_tokens": 2**31 - 1, "top_k": 2**31 - 1, "seed": -(2**63), "temperature": 10**6}
ASKED = prompt(messages=(user(),), endpoint=CHAT)
# Rows, with the prompt that they are or the sampling of one. Objects get an id, texts are lines as they are.
TAKEN: list[tuple[object, Prompt | dict[str, Any]]] = [
    (own(), prompt()),
    (own(prompt="éé %d %b %"), prompt(text="éé %d %b %")),
    (own(prompt='it has "id": in it'), prompt(text='it has "id": in it')),
    ('{"id": "1a", "prompt": "\\u00e9\ue000"}\r', prompt(text="é\ue000")),
    ('\ufeff{"id": "1b", "prompt": "x"}', prompt()),
    (r'{"id": "1c", "prompt": "{\"a\": 1, \"a\": 2, \"b\" : 3}"}', prompt(text='{"a": 1, "a": 2, "b" : 3}')),
    ('"a text"', prompt(text="a text")),
    ({"id": 123, "prompt": "x"}, prompt()),
    ({"id": 7.0, "prompt": "x"}, prompt()),
    ({"id": "7/turn-2", "prompt": "x"}, prompt()),
    ({"id": None, "prompt": "of no id"}, prompt(text="of no id")),
    (own(category=5), prompt(category="5")),
    (own(category=3.0), prompt(category="3")),
    (own(turns=["a"], question_id=3, question="y", text="z"), prompt()),
    (own(temprature=1, extra={}), prompt()),
    (FULL, prompt(category="math", sampling={"temperature": 0.5, "stop": ("x", "%")})),
    (FULL | {"stop": "\ue000"}, prompt(category="math", sampling={"temperature": 0.5, "stop": ("\ue000",)})),
    (said({"role": "system", "content": "Brief."}, *HI), prompt(messages=(SYSTEM, user()))),
    ({"prompt_token_ids": [1, 0, 5], "prompt": None, "extra": {}}, prompt(token_ids=(1, 0, 5))),
    (chat(), ASKED),
    (
        batch(said({"role": "developer", "content": "Brief."}, {"role": "user", "content": PARTS})),
        prompt(messages=(SYSTEM, user(("One.", "Two."))), endpoint=CHAT),
    ),
    (text(), prompt(endpoint=TEXT)),
    (text(prompt=[3, 1]), prompt(token_ids=(3, 1), endpoint=TEXT)),
    (chat(model=3, **OF_NO_EFFECT, presence_penalty=None), ASKED),
    (chat(n=None), ASKED),
    (chat(n=2, temperature=0.5), {"n": 2, "temperature": 0.5}),
    (own(n=1), {"n": 1}),
    (own(**AT_THE_BOUNDS), AT_THE_BOUNDS),
    (own(temperature=0, max_tokens=3), {"temperature": 0, "max_tokens": 3}),
    (chat(max_tokens=5, max_completion_tokens=7), {"max_tokens": 7}),
    (chat(max_tokens=5, max_completion_tokens=None), {"max_tokens": 5}),
    (chat(max_tokens=5.0), {"max_tokens": 5}),
    (chat(temperature=0.5, top_p=1, seed=-3), {"temperature": 0.5, "top_p": 1, "seed": -3}),
    (chat(stop="\n"), {"stop": ("\n",)}),
    (text(stop=["a", "b"], top_k=-1, min_p=0.1), {"stop": ("a", "b"), "top_k": 0, "min_p": 0.1}),
    (text(ignore_eos=True), {"ignore_eos": True}),
    (chat(presence_penalty=0.5), {"presence_penalty": 0.5}),
    (chat(frequency_penalty=-2), {"frequency_penalty": -2}),
    (text(repetition_penalty=1.05), {"repetition_penalty": 1.05}),
    (text(suppress_tokens=[4, 2]), {"suppress_tokens": (4, 2)}),
    (text(suppress_tokens=[]), {"suppress_tokens": ()}),
    (chat(logprobs=True, top_logprobs=3), {"logprobs": 3}),
    (chat(logprobs=True), {"logprobs": 0}),
    (chat(logprobs=False), {}),
    (text(logprobs=0), {"logprobs": 0}),
    (text(logprobs=5), {"logprobs": 5}),
    (chat(logit_bias={"50": -100, "7": 1.5, "9": None}), {"logit_bias": ((7, 1.5), (50, -100))}),
    (chat(response_format={"type": "text"}), {"structured_outputs": None}),
    (text(guided_choice=["yes", "no"]), {"structured_outputs": StructuredOutputs(choice=("yes", "no"))}),
    (own(structured_outputs={"choice": ["a"]}), {"structured_outputs": StructuredOutputs(choice=("a",))}),
    (own(bad_words=["a b"], bad_words_ids=[[5, 6]]), {"bad_words": ("a b",), "bad_words_ids": ((5, 6),)}),
    (own(allowed_token_ids=[9, 5]), {"allowed_token_ids": (9, 5)}),
]

ONE_OF = "a row takes one of prompt, messages, prompt_token_ids"
WHOLE_NUMBER = "use a whole number"
# Rows, with how their reason begins. Those without an id that can be used are named by their line.
REFUSED: list[tuple[object, str]] = [
    (
        "{",
        "not valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)); the line ends "
        "within it: write each row on a line of its own",
    ),
    ("[" * 100_000, "not valid JSON"),
    ([1], "not a JSON object"),
    ('{"id": "2a", "prompt": "\udcff"}', "not UTF-8 (invalid start byte at byte "),
    ('{"id": "2b", "prompt": "x", "id": "2c"}', "the key 'id' appears twice in one object: remove one"),
    ('{"id": "2d", "prompt" : "x", "prompt": "y"}', "the key 'prompt' appears twice in one object"),
    (r'{"id": "2e", "prompt": "x", "\u0070rompt":"y"}', "the key 'prompt' appears twice in one object"),
    ('{"id": "2f", "prompt": "x", "seed": 1, "seed": 2, "stop": "x"}', "the key 'seed' appears twice"),
    ('{"id": "2g", "messages": [{"content": "x", "content": "y"}]}', "the key 'content' appears twice"),
    ({"id": "x" * 513, "prompt": "x"}, "id has 513 characters: use at most 512"),
    ({"id": "x\n", "prompt": "x"}, "id is 'x\\n': use characters that can be printed"),
    ({"id": "\ue000", "prompt": "x"}, "id is '\\ue000': use characters that can be printed"),
    ({"id": "", "prompt": "x"}, "id is empty"),
    ({"id": " ", "prompt": "x"}, "id is empty"),
    ({"id": 2.0**60, "prompt": "x"}, "id is 1.152921504606847e+18: use a string or a whole number"),
    ({"id": 1.5, "prompt": "x"}, "id is 1.5: use a string or a whole number"),
    ({"id": True, "prompt": "x"}, "id is True"),
    ({"id": "7/turn-2", "prompt": "x"}, "an earlier row has the same id '7/turn-2': give every row its own"),
    ({"id": "123", "prompt": "x"}, "an earlier row has the same id '123'"),
    (
        own(prompt=None),
        f"no prompt: {ONE_OF}, or name a field with --prompt-field; this one has 'prompt (null), id'",
    ),
    ({}, f"no prompt: {ONE_OF}, or name a field"),
    ({"promt": "x"}, f"no prompt: {ONE_OF} ('promt': did you mean prompt?), or name"),
    (own(messages=[]), "prompt and messages: a row takes one of"),
    (own(prompt=3), "prompt is 3, not a string"),
    (own(prompt=""), "prompt is empty"),
    (own(prompt=" \n\u3000"), "prompt is empty"),
    ('{"id": "2h", "prompt": "\\ud83d"}', "prompt holds a lone surrogate"),
    (own(category=1.5), "category is 1.5, not a string"),
    (own(category=" "), "category is empty"),
    ({"messages": "hi"}, "messages is not a list"),
    (said(), "messages is not a list with at least one element"),
    (said("hi"), "a message is not an object"),
    (said({"role": "wizard", "content": "x"}), "unknown role 'wizard': use system, user, assistant"),
    (said({"role": ["user"], "content": "x"}), "unknown role ['user']"),
    (said({"role": "user", "content": ""}), "the content of a message from user is empty"),
    (said({"role": "system", "content": " "}, *HI), "the content of a message from system is empty"),
    (said({"role": "user"}), "the content of a message from user is None, not a string"),
    (said({"role": "assistant", "content": "x"}), "the last message is from assistant: end with the user"),
    ({"prompt_token_ids": []}, "prompt_token_ids is not a list with at least one"),
    ({"prompt_token_ids": [1, True]}, "prompt_token_ids must be integers of 0 or more"),
    ({"prompt_token_ids": [1, -1]}, "prompt_token_ids must be integers of 0 or more"),
    ({"prompt_token_ids": [1.0]}, "prompt_token_ids must be integers of 0 or more"),
    (batch(said(*HI), custom_id=None), "no custom_id"),
    (batch(said(*HI), method="GET"), "method is 'GET': use POST"),
    (batch(said(*HI), "/v1/embeddings"), "url is '/v1/embeddings': use /v1/chat/completions or /v1"),
    (batch(said(*HI), [CHAT]), "url is ['/v1/chat/completions']: use"),
    ({"custom_id": "2i", "body": said(*HI)}, "url is None: use"),
    (batch([]), "body is []: use an object"),
    (batch({"prompt": "x"}), "no messages"),
    (batch(said(*HI), TEXT), "no prompt"),
    (text(prompt=["a", "b"]), "the items of prompt must be integers of 0 or more"),
    (chat(best_of=2), "best_of is 2, which is not supported: use 1, or remove it"),
    (own(n=2, temperature=0), "n is 2: samples at temperature 0 are all the same"),
    (chat(n=0), "n is 0: ask for 1 to 10000 samples"),
    (chat(n=1.5), "n is 1.5: use a whole number"),
    (chat(stream=True), "stream is True"),
    (chat(response_format={"type": "json_schema"}), "response_format is {'type': 'json_schema'}: use an"),
    (chat(response_format="json"), "response_format is 'json': its type is text, json_object or json_schema"),
    (own(guided_grammar="root ::= x"), "guided_grammar is not supported: use guided_json"),
    (own(guided_regex="a", guided_choice=["b"]), "guided_choice and guided_regex say what"),
    (own(guided_json='{"type"'), "json is '{\"type\"' (Expecting"),
    (own(structured_outputs={"grammar": "x"}), "structured_outputs is {'grammar': 'x'}: use an object"),
    (own(structured_outputs={}), "structured outputs name nothing: give one of json, regex"),
    (own(guided_choice=["a", "a"]), "a choice is given twice"),
    (own(bad_words="x"), "bad_words is not a list"),
    (own(bad_words=[""]), "bad_words has an empty word"),
    (own(allowed_token_ids=[]), "allowed_token_ids is not a list with at least one"),
    (own(guided_choice=["a"], ignore_eos=True), "ignore_eos is set, and an answer"),
    (chat(tools=[{"type": "function"}]), "tools is [{'type': 'function'}]"),
    (
        text(temprature=1),
        "'temprature' is not known and might change the answer (did you mean temperature?): remove it",
    ),
    (chat(**{"x" * 10_000: 1}), "'xxxxx"),
    (
        batch(said({"role": "user", "content": [{"type": "image_url"}]})),
        "a part of a message is of type 'image_url'",
    ),
    (
        batch(said({"role": "user", "content": [PARTS[0] | {"text": " "}]})),
        "the content of a message from user is empty",
    ),
    (batch(said({"role": "assistant", "content": "", "tool_calls": [{}]}, *HI)), "a message has tool_calls"),
    (
        batch(said({"role": "assistant", "content": "", "function_call": {"name": "f"}}, *HI)),
        "a message has function_call, which is not supported",
    ),
    (chat(top_logprobs=3), "top_logprobs is 3 but logprobs is not true"),
    (chat(logprobs=1), "logprobs is 1: use true or false"),
    (chat(logprobs=True, top_logprobs=200), "logprobs is 200"),
    (text(logprobs=True), f"logprobs is True: {WHOLE_NUMBER}"),
    (chat(presence_penalty=2.5), "presence-penalty is 2.5: use -2.0 to 2.0"),
    (chat(frequency_penalty="1"), "frequency_penalty is '1': use a number"),
    (chat(repetition_penalty=0), "repetition-penalty is 0: use 0.01 to 100.0"),
    (chat(max_tokens="5"), f"max_tokens is '5': {WHOLE_NUMBER}"),
    (chat(max_tokens=True), f"max_tokens is True: {WHOLE_NUMBER}"),
    (chat(max_tokens=5.5), f"max_tokens is 5.5: {WHOLE_NUMBER}"),
    (chat(max_tokens=10**30), f"max_tokens is {10**30}: {WHOLE_NUMBER} of at most 64 bits"),
    (
        chat(max_tokens=2**40),
        f"max_tokens (--max-new-tokens) is {2**40}: ask for at least 1, at most 2147483647",
    ),
    (chat(max_tokens=0), "max_tokens (--max-new-tokens) is 0"),
    (chat(top_k=2**31), "top-k is 2147483648: use 0 (off) or a number of tokens, at most 2147483647"),
    (chat(top_k=10**20), f"top_k is {10**20}: {WHOLE_NUMBER} of at most 64 bits"),
    (chat(top_k=-2), "top-k is -2: use 0 (off)"),
    (chat(seed="1"), f"seed is '1': {WHOLE_NUMBER}"),
    (chat(seed=2**70), f"seed is {2**70}: {WHOLE_NUMBER} of at most 64 bits"),
    (
        chat(seed=-1),
        "seed is -1: use a number of 64 bits, and not -1, which is a new seed for every request elsewhere",
    ),
    (chat(min_p=-0.1), "min-p is -0.1: use a share in [0, 1]"),
    (chat(top_p=0), "top-p is 0: use a share in (0, 1]"),
    (chat(temperature=10**400), "temperature is 1000000000"),
    (chat(temperature=1e30), "temperature is 1e+30: use 0 (greedy) or more, up to 1000000"),
    (chat(temperature=-1), "temperature is -1: use 0 (greedy) or more"),
    (chat(temperature=True), "temperature is True: use a number"),
    (chat(temperature=float("nan")), "temperature is nan: use a number"),
    (chat(temperature=float("inf")), "temperature is inf: use a number"),
    (chat(stop=[3]), "stop is 3, not a string"),
    (chat(stop=""), "an empty stop string"),
    (chat(ignore_eos="yes"), "ignore_eos is 'yes': use true or false"),
    (chat(logit_bias=[1]), "logit_bias is [1]: use an object"),
    (chat(logit_bias={"x": 1}), "logit_bias has the key 'x': use a token id"),
    (chat(logit_bias={"01": 1}), "logit_bias has the key '01': use a token id"),
    (chat(logit_bias={"-1": 1}), "logit_bias has the key '-1': use a token id"),
    (chat(logit_bias={"1" * 5000: 1}), "logit_bias has the key '111"),
    (chat(logit_bias={"1": "a"}), "logit_bias is 'a': use a number"),
    (chat(logit_bias={"1": 200}), "logit-bias of token 1 is 200"),
    (chat(logit_bias={"1": 1e30}), "logit-bias of token 1 is 1e+30: use -100 to 100"),
]
CASES = [*TAKEN, *REFUSED]
NO_ID_OF_THEIR_OWN = (
    *("not valid JSON", "not a JSON object", "not UTF-8", "the key ", "id is ", "id has "),
    "an earlier row",
)


def line_of(number: int, row: object) -> bytes:
    if isinstance(row, str):
        return row.encode("utf-8", "surrogateescape")
    if isinstance(row, dict):
        row = {**row, **{key: row.get(key, f"n{number}") for key in ["custom_id" if "body" in row else "id"]}}
    return json.dumps(row).encode()


def check(path: Path, **how: Any) -> list[Prompt | Rejected]:
    """What is read of ``path``: twice the same, and the same where an index, also of a shard, selects rows."""
    prompts = DataSource(dataset=str(path), how=Reading(**how)).open()
    found, notes = list(prompts), list(prompts.notes.sentences())
    assert list(prompts) == found
    assert list(prompts.notes.sentences()) == notes
    if any(isinstance(each, Prompt) for each in found):
        for shard in (WHOLE, Shard(index=1, count=3)):
            index = index_prompts("a", found, shard)
            assert list(prompts.select(index.rows)) == [
                each for n, each in enumerate(found) if shard.holds(n)
            ]
    return found


@cache
def lines_of_cases() -> bytes:
    """With odd lines between them, which are no rows."""
    return b"\n \t\n".join(line_of(number, row) for number, (row, _) in enumerate(CASES))


def reason_of(found: Prompt | Rejected) -> str | None:
    return found.reason.partition(": ")[2] if isinstance(found, Rejected) else None


def is_as_expected(found: Prompt | Rejected, expected: object) -> bool:
    if isinstance(expected, str):
        return (reason_of(found) or "").startswith(expected)
    if isinstance(found, Rejected):
        return False
    return found.sampling == expected if isinstance(expected, dict) else replace(found, id="x") == expected


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json"])
def test_rows_of_a_file(tmp_path: Path, name: str) -> None:
    """No row of which changes another: it is a prompt, or has one short line that names its place."""
    content, cases = lines_of_cases(), CASES
    if name == "rows.json":  # as elements of an array, all of which must be JSON
        as_lines = ("not valid", "not UTF-8", "the key ")
        cases = [(row, what) for row, what in CASES if not str(what).startswith(as_lines)]
        elements = (
            line_of(number, row).removeprefix(b"\xef\xbb\xbf") for number, (row, _) in enumerate(cases)
        )
        content = b"[" + b",\n".join(elements) + b"]"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    found = check(tmp_path / name)
    assert len(found) == len(cases)
    wrong = [
        (row, what, each)
        for (row, what), each in zip(cases, found, strict=True)
        if not is_as_expected(each, what)
    ]
    assert not wrong
    for number, (each, (_, expected)) in enumerate(zip(found, cases, strict=True)):
        place = f"row {number + 1}" if name == "rows.json" else f"line {2 * number + 1}"
        if isinstance(each, Rejected):
            assert each.reason.startswith(f"{place}: ")
            assert len(each.reason) <= 300
            assert len(each.reason.splitlines()) == 1
            assert (place in each.id) is str(expected).startswith(NO_ID_OF_THEIR_OWN), each
    assert len({name for each in found for name in each.turn_ids}) == sum(
        len(each.turn_ids) for each in found
    )


def test_an_engine_answers_what_can_be_asked(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines_of_cases())
    found = list(DataSource(dataset=str(tmp_path / "rows.jsonl")).open())
    with Engine(CONFIG) as engine:
        short = [_shortened(each) for each in found]
        outputs = {output.id: output for output in engine.generate(short, SHORT)}
    assert {each.id: each.error for each in outputs.values()} == {
        each.id: each.reason if isinstance(each, Rejected) else None for each in found
    }


def _shortened(found: Prompt | Rejected) -> Prompt | Rejected:
    sampling = {"max_tokens": 1}
    return replace(found, sampling={**found.sampling, **sampling}) if isinstance(found, Prompt) else found


def test_columns_of_a_batch_are_read_as_rows_are() -> None:
    """All that they can say: prompts and sampling."""
    cases = [
        (row, expected)
        for row, expected in ((_as_own(row), expected) for row, expected in CASES)
        if row is not None
        and row.get("temperature") == row.get("temperature")  # NaN is None there
        and row.get("n") != 2  # which would be two rows
    ]
    assert len(cases) > 60
    rows = [row for row, _ in cases]
    batch: dict[str, list[Any]] = {
        name: [row.get(name) for row in rows] for name in ("prompt", "messages", "prompt_token_ids")
    }
    batch["sampling_params"] = [
        {name: row[name] for name in SAMPLING_FIELDS if name in row} | _at_most(1, row) for row in rows
    ]
    errors = BatchGenerator(CONFIG, SHORT)(batch)["error"]
    wrong = [
        (row, expected, error)
        for (row, expected), error in zip(cases, errors, strict=True)
        if not (str(error).startswith(expected.split(":")[0]) if isinstance(expected, str) else error is None)
    ]
    assert not wrong


def _as_own(row: object) -> Mapping[str, Any] | None:
    """An own row that says what ``row`` does, if one can: of the fields of a prompt and of its sampling alone."""
    if isinstance(row, dict) and "body" in row:
        content = {TEXT: "prompt", CHAT: "messages"}.get(str(row.get("url")))
        if row.get("method") != "POST" or "custom_id" in row or content not in row["body"]:
            return None
        row = {key: value for key, value in row["body"].items() if key != "model"}
        if isinstance(row.get("prompt"), list) or {"logprobs", "top_logprobs"} & {*row}:
            return None
    known = {"prompt", "messages", "prompt_token_ids", *SAMPLING_FIELDS}
    return row if isinstance(row, dict) and row and {*row} <= known else None


def _at_most(tokens: int, row: Mapping[str, Any]) -> dict[str, int]:
    asked = row.get("max_tokens")
    return {"max_tokens": tokens} if type(asked) is int and 0 < asked < 2**31 else {}


def test_every_field_of_the_sampling_has_a_reader() -> None:
    assert set(_READERS) == set(SAMPLING_FIELDS)


# --- rows of public data sets -----------------------------------------------------------------------------

TALK = {"id": 1, "task": "CM", "history": [{"user": "a", "bot": "x"}, {"user": "b"}]}
CODE = {"task_id": "H/0", "prompt": "def f", "entry_point": "f", "test": ""}
TREE = {"message_tree_id": "m", "prompt": {"text": "a", "replies": []}}
TOLD = {"id": "t", "instruction": "a"}
KINDS: list[
    tuple[dict[str, Any], str, tuple[str, ...], str]
] = [  # a row, its id, what the user says, the warning
    ({"question_id": 81, "category": "c", "turns": ["a", "b"]}, "81", ("a", "b"), "read as mt-bench: "),
    ({"id": "s", "conversations": [{"from": "human", "value": "a"}]}, "s", ("a",), "read as sharegpt: "),
    ({"id": "g", "question": "a", "answer": "b"}, "g", ("a",), "read as gsm8k: "),
    (CODE, "H/0", ("def f",), "read as humaneval: "),
    ({"task_id": 3, "text": "a", "code": "b"}, "3", ("a",), "read by the field text, "),
    (TOLD | {"instances": [{"input": "", "output": "b"}]}, "t", ("a",), "read as instruct"),
    (TOLD | {"instances": [{"input": "b"}]}, "t", ("a\n\nb",), "read as instructions: "),
    (TOLD | {"input": "b", "output": "c"}, "t", ("a\n\nb",), "read as instructions: "),
    (TOLD | {"history": []}, "t", ("a",), "read as instructions: "),
    (TALK, "1", ("a", "b"), "read as mt-b"),
    (TREE, "m", ("a",), "read as trees of messages: "),
]


def load(path: Path, **how: Any) -> tuple[list[Prompt | Rejected], list[str]]:
    """The rows, and the warnings about them."""
    prompts = DataSource(dataset=str(path), how=Reading(**how)).open()
    return list(prompts), list(prompts.notes.sentences())


def turns_of(prompt: Prompt | Rejected) -> tuple[object, ...]:
    """What the user says."""
    assert isinstance(prompt, Prompt), prompt
    assert [message.role for message in prompt.messages] == ["user"]
    return prompt.messages[0].content, *prompt.follow_ups


@pytest.mark.parametrize(("row", "row_id", "turns", "kind"), KINDS)
def test_kinds_of_rows_are_recognised_and_named(
    tmp_path: Path, row: dict[str, Any], row_id: str, turns: tuple[str, ...], kind: str
) -> None:
    (prompt,), (sentence,) = load(write_rows(tmp_path / "own.jsonl", [row]))
    assert (prompt.id, turns_of(prompt)) == (row_id, turns)
    assert sentence.startswith(f"1 row is {kind}")
    assert "--raw" in sentence


def test_own_rows_and_batches_are_what_they_say_without_warnings(tmp_path: Path) -> None:
    rows = own(question="y", text="z"), text() | {"custom_id": "b"}
    found, warnings = load(write_rows(tmp_path / "own.jsonl", rows))
    assert [prompt.text for prompt in found if isinstance(prompt, Prompt)] == ["x", "x"]
    assert warnings == []


def test_sampling_of_a_recognised_row_counts(tmp_path: Path) -> None:
    rows = {"question": "a", "max_tokens": 3}, {"question": "b", "top_p": "x"}
    good, bad = load(write_rows(tmp_path / "own.jsonl", rows))[0]
    assert isinstance(good, Prompt)
    assert good.sampling == {"max_tokens": 3}
    assert "top_p is 'x'" in (reason_of(bad) or "")


def test_fields_that_other_engines_heed_are_named(tmp_path: Path) -> None:
    rows = own(system="x", best_of=3), own(system="y"), own(max_new_tokens=3), own(json_schema={})
    prompts = DataSource(dataset=str(write_rows(tmp_path / "own.jsonl", rows))).open()
    for _ in range(2):  # every pass counts anew
        list(prompts)
        assert [*prompts.notes.sentences()] == [
            "2 rows have a field 'system', which is ignored, so no answer follows it",
            "1 row has a field 'best_of', which is ignored, so no answer follows it",
            "1 row has a field 'max_new_tokens', which is ignored: did you mean max_tokens?",
            "1 row has a field 'json_schema', which is ignored, so no answer follows it",
        ]


@pytest.mark.parametrize(("value", "turns"), [("a", ("a",)), (["a", "b"], ("a", "b")), (HI, ("Hi",))])
def test_a_field_that_is_named(tmp_path: Path, value: object, turns: tuple[str, ...]) -> None:
    row = {"id": "i", "meta": {"ask": value}, "prompt": "not this", "temperature": 0.5}
    (prompt,), warnings = load(write_rows(tmp_path / "own.jsonl", [row]), prompt_field="meta.ask")
    assert (turns_of(prompt), warnings) == (turns, [])
    assert isinstance(prompt, Prompt)
    assert prompt.sampling == {"temperature": 0.5}
    (bad,), _ = load(tmp_path / "own.jsonl", prompt_field="meta.question")
    assert reason_of(bad) == "no field 'meta.question': the row has 'id, meta, prompt, temperature'"


def test_chat_and_raw(tmp_path: Path) -> None:
    system = {"role": "system", "content": "s"}
    rows = own(), said(*HI), said(system, *HI), {"prompt_token_ids": [1]}, {"turns": ["a", "b"]}
    path = write_rows(tmp_path / "own.jsonl", [*rows, text() | {"custom_id": "b"}])
    chats, raws = check(path, chat=True), check(path, chat=False)
    assert [turns_of(chats[n]) for n in (0, 1, 4)] == [("x",), ("Hi",), ("a", "b")]
    assert chats[2].messages[0] == Message(role="system", content="s")  # type: ignore[union-attr]
    assert [raw.text for raw in raws[:2] if isinstance(raw, Prompt)] == ["x", "Hi"]
    assert raws[3].token_ids == (1,)  # type: ignore[union-attr]
    reasons = [
        str(reason_of(each)).partition(":")[0] for each in (chats[3], raws[2], raws[4], chats[5], raws[5])
    ]
    assert reasons == [
        "token ids cannot be put into a chat template",
        *["several messages or turns need the chat template"] * 2,
        *["the url of a batch row says whether it is a chat"] * 2,
    ]


OF_SETS: list[tuple[str, dict[str, Any], str]] = [
    ("mt-bench", {"question_id": 1}, "turns is not a list"),
    ("mt-bench", {"question_id": 1, "turns": []}, "turns is not a list with at least one element"),
    ("mt-bench", {"question_id": 1, "turns": ["x", ""]}, "turn 2 is empty"),
    ("sharegpt", {"id": 1, "conversations": []}, "conversations is not a list with at least one"),
    ("sharegpt", {"id": 1, "conversations": ["x"]}, "conversations: the first message is not an object"),
    (
        "sharegpt",
        {"id": 1, "conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "x"}]},
        "the first message is from 'gpt', not from a human",
    ),
    ("sharegpt", {"id": 1, "conversations": [{"from": "human", "value": ""}]}, "the first message is empty"),
    ("gsm8k", {"id": 1, "answer": "x"}, "question is None, not a string"),
    ("humaneval", {"task_id": "1", "prompt": None}, "prompt is None, not a string"),
    ("humaneval:vllm", {"task_id": "1", "prompt": None}, "prompt is None, not a string"),
    ("mt-bench:vllm", {"question_id": 1, "turns": [3, "x"]}, "turn 1 is 3, not a string"),
    ("mt-bench:dspark", {"question_id": 1, "turns": []}, "turns is not a list with at least one"),
]


def test_bad_rows_of_known_data_sets(tmp_path: Path) -> None:
    for name, row, reason in OF_SETS:
        path = write_rows(tmp_path / "rows.jsonl", [row])
        (found,) = DataSource(dataset=name, data_path=path).open()
        assert found.id == "1"
        assert (reason_of(found) or "").startswith(reason), (name, row)
    assert {name for name, _, _ in OF_SETS} <= {*DATASETS}
