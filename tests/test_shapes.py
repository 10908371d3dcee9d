"""Rows of each format among odd ones, and that an index selects what was read."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.config import SamplingParams, UserError
from specgen.engine.loading import Models
from specgen.experiments.matrices import Workload
from specgen.experiments.workload import make_prompts
from specgen.jobs.prompt_index import index_prompts
from specgen.jobs.shards import WHOLE, Shard
from specgen.prompts import DataSource, Prompt, Rejected
from specgen.prompts.formats import Reading
from specgen.prompts.load import RAW
from specgen.text.tokenizer import load_tokenizer
from tests.commands import refused
from tests.engines import Pair

OWN = {"id": "%d", "prompt": "Say: %d"}
FULL = {**OWN, "category": "math", "temperature": 0.5, "stop": ["x", "%"], "source": {"page": 1, "of": "a"}}
CHAT = {"id": "%d", "messages": [{"role": "system", "content": "Hi"}, {"role": "user", "content": "%d"}]}
BATCH = {
    "custom_id": "%d",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": [{"role": "user", "content": "%d"}], "max_tokens": 9, "n": 1},
}
TEXTS = {"custom_id": "%d", "url": "/v1/completions", "body": {"prompt": "%d", "seed": 1}}
NUM_ROWS = 40  # of a kind
ODD = [
    b"",
    b" \t",
    b"{",
    b"[1]",
    b'"a text"',
    b'\xef\xbb\xbf{"id": "new", "prompt": "behind a byte order mark"}',
    b'{"id": "new", "prompt": "CRLF"}\r',
    b'{"id": "new", "prompt": "an \\"id\\": in a text", "id": "new"}',
    b'{"id": "new", "prompt": "once", "prompt": "twice"}',
    b'{"id": "new", "prompt": "it has \\"id\\": in it"}',
    b'{"id": "new", "prompt": " \\u3000"}',
    b'{"id": "new", "prompt": ""}',
    b'{"id": "", "prompt": "x"}',
    b'{"id": " ", "prompt": "x"}',
    b'{"id": "a\\nb", "prompt": "x"}',
    b'{"id": "7", "prompt": "an id that is there"}',
    b'{"id": 7, "prompt": "and as a number"}',
    b'{"id": 123, "prompt": "a number"}',
    b'{"id": true, "prompt": "x"}',
    b'{"id": null, "prompt": "x"}',
    b'{"prompt": "x"}',
    b'{"id": "new", "prompt": "\xff"}',
    b'{"id": "new", "prompt": "\\ud800"}',
    b'{"id": "new", "prompt": "\xc3\xa9\\u00e9 %d %b %"}',
    b'{"id": "new", "prompt": "\xee\x80\x80"}',
    b'{"id": "\xee\x80\x80", "prompt": "x"}',
    b'{"id": "new", "prompt": "x", "temprature": 1}',
    b'{"id": "new", "prompt": "x", "seed": 1, "seed": 2}',
    b'{"id": "new", "prompt": "x", "turns": ["a"]}',
    b'{"id": "new", "turns": ["a", "b"]}',
    b'{"id": "7/turn-2", "prompt": "x"}',
    b'{"id": "new", "prompt": "x", "question_id": 3}',
    b'{"id": "new", "prompt_token_ids": [1]}',
    b'{"id": "' + b"i" * 513 + b'", "prompt": "x"}',
    json.dumps(FULL | {"id": "new", "temperature": 1}).encode(),
    json.dumps(FULL | {"id": "new", "temperature": True}).encode(),
    json.dumps(FULL | {"id": "new", "temperature": -1}).encode(),
    json.dumps(FULL | {"id": "new", "category": " "}).encode(),
    json.dumps(FULL | {"id": "new", "stop": "\ue000"}).encode(),
    json.dumps(FULL | {"id": "new", "stop": "one", "source": {"page": 1, "of": 1}}).encode(),
    json.dumps(FULL | {"id": "new", "stop": "x"}).encode()[:-1] + b', "stop": "x"}',
    json.dumps(CHAT).replace("user", "assistant").encode(),
    json.dumps(CHAT).replace("Hi", " ").encode(),
    json.dumps(CHAT | {"messages": CHAT["messages"][1:]}).encode(),  # type: ignore[index]
    json.dumps(BATCH).replace("POST", "GET").encode(),
    json.dumps(BATCH).replace('"n": 1', '"n": 2').encode(),
    json.dumps(BATCH).replace('"n": 1', '"n": null').encode(),
    json.dumps(BATCH).replace('"m"', "3").encode(),
    json.dumps(TEXTS).replace('"seed": 1', '"seed": "1"').encode(),
]


def lines_of(row: dict[str, Any], count: int = NUM_ROWS) -> list[bytes]:
    """Rows that differ in id and texts."""
    return [json.dumps(row).replace("%d", str(n)).encode() for n in range(count)]


def check(path: Path, num_prompts: int | None = None, **how: Any) -> list[Prompt | Rejected]:
    """What is read of ``path``, which an index, also of a shard, selects again."""
    prompts = DataSource(dataset=str(path), num_prompts=num_prompts, how=Reading(**how)).open()
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


def num_prompts_of(path: Path, num_prompts: int | None = None, **how: Any) -> int:
    return sum(isinstance(each, Prompt) for each in check(path, num_prompts, **how))


@pytest.mark.parametrize("row", [OWN, FULL, CHAT, BATCH, TEXTS])
def test_rows_of_each_format_are_read(tmp_path: Path, row: dict[str, Any]) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines_of(row)))
    assert num_prompts_of(tmp_path / "a.jsonl") == NUM_ROWS
    assert num_prompts_of(tmp_path / "a.jsonl", num_prompts=7) == 7
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines_of(row))))
    assert num_prompts_of(tmp_path / "b.jsonl.gz") == NUM_ROWS
    assert num_prompts_of(tmp_path) == NUM_ROWS  # those of the second file are there already


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("row", [OWN, FULL, BATCH])
def test_an_odd_row_changes_no_other(tmp_path: Path, row: dict[str, Any], odd: bytes) -> None:
    lines = lines_of(row)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([*lines[:20], odd, *lines[20:30], odd, *lines[30:]]))
    found = {each.id for each in check(path) if isinstance(each, Prompt)}
    assert found - {"new"} >= {str(n) for n in range(NUM_ROWS)}
    for num_prompts in (19, 20, 21, 25, 31, NUM_ROWS):
        assert num_prompts_of(path, num_prompts=num_prompts) == num_prompts


def test_settings_are_told_apart(tmp_path: Path) -> None:
    kinds = (
        FULL,
        {**FULL, "temperature": 1},
        {**FULL, "temperature": 1.0},
        {**FULL, "stop": "a"},
        {**FULL, "category": "b"},
    )
    mixed = [json.dumps({**kinds[n % 5], "id": f"{n}"}).encode() for n in range(100)]
    (tmp_path / "settings.jsonl").write_bytes(b"\n".join(mixed))
    assert num_prompts_of(tmp_path / "settings.jsonl") == 100


def test_a_key_that_is_there_twice_is_found_whatever_the_setting(tmp_path: Path) -> None:
    rows = [
        *({"id": f"a{n}", "prompt": "x", "seed": 2, "stop": ["x", "y"]} for n in range(9)),
        *({"id": f"b{n}", "prompt": "x", "seed": 2, "stop": "x"} for n in range(9)),
    ]
    lines = [json.dumps(row).encode() for row in rows]
    repeated = b'{"id": "c", "prompt": "x", "seed": 1, "seed": 2, "stop": "x"}'
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, repeated, *lines_of(OWN, 3)]))
    found = check(tmp_path / "a.jsonl")
    assert [each.reason for each in found if isinstance(each, Rejected)] == [
        "line 19: the key 'seed' appears twice in one object: remove one"
    ]


@pytest.mark.parametrize("how", [{"chat": True}, {"chat": False}, {"prompt_field": "prompt"}])
def test_the_way_of_reading_is_kept(tmp_path: Path, how: dict[str, Any]) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines_of(OWN)))
    assert num_prompts_of(tmp_path / "a.jsonl", **how) == NUM_ROWS


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_lines_with_some_bytes_changed(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    row = data.draw(st.sampled_from([OWN, FULL, CHAT, BATCH, TEXTS]))
    lines = lines_of(row, 8)
    for _ in range(data.draw(st.integers(1, 6))):
        which = data.draw(st.integers(1, 7))
        start, length = data.draw(st.integers(0, len(lines[which]))), data.draw(st.integers(0, 6))
        other = data.draw(st.sampled_from(lines))[start : start + 9] + data.draw(st.binary(max_size=3))
        lines[which] = lines[which][:start] + other + lines[which][start + length :]
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    check(path)


# --- shapes of traffic ---


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
