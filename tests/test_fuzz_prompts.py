"""Whatever a file holds: prompts, rejected rows with one short line each, or one clear error for the file."""

import gzip
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specgen.config import SamplingParams, UserError
from specgen.prompts import DATASETS, DataSource, Prompt, Rejected
from tests.test_prompt_rows import FULL, chat, said, text
from tests.test_prompt_rows import HI as CHAT

GOOD = [
    *({"id": f"n{n}", **row} for n, row in enumerate((FULL, said(*CHAT), {"prompt_token_ids": [1, 2]}))),
    {"custom_id": "d", **chat(n=1)},
    {"custom_id": "e", **text(prompt=[1], logit_bias={"1": 2}, seed=1)},
    {
        "question_id": 1,
        "turns": ["x", "y"],
        "conversations": [{"from": "human", "value": "x"}],
        "question": "x",
    },
]
KEYS = sorted({key for row in GOOD for key in (*row, *row.get("body", {}))})
VALUES = (
    *(
        *("/v1/chat/completions", "/v1/completions", "POST"),
        *("user", "a/turn-2", "line 1", "\x00", "\ud83d", "1e999"),
    ),
    *(
        float("nan"),
        float("inf"),
        -1,
        0,
        2**63,
        10**400,
        CHAT,
        {"role": "user", "content": [{"type": "text"}]},
    ),
)


def json_values() -> st.SearchStrategy:
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    leaves |= st.sampled_from(VALUES)
    keys = st.sampled_from(KEYS) | st.text(max_size=4)
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=5),
        max_leaves=20,
    )


@st.composite
def rows(draw) -> object:
    """A good row with some of its values replaced, at either level, or any value at all."""
    row = json.loads(json.dumps(draw(st.sampled_from(GOOD))))
    for level in (row, row.get("body", {})):
        level.update(draw(st.dictionaries(st.sampled_from(KEYS), json_values(), max_size=2)))
    return draw(st.just(row) | st.just(row) | json_values())


@st.composite
def mutated(draw, good: bytes) -> bytes:
    """``good`` with a few of its bytes lost or replaced, or cut off."""
    content = good
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        length = draw(st.integers(0, 8) | st.just(len(content)))
        content = content[:start] + draw(st.binary(max_size=8)) + content[start + length :]
    return content


def check(name: str, content: bytes, dataset: str | None = None) -> None:
    """Read ``content`` as a file of that name, twice, and look at all that comes out."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / name
        path.write_bytes(content)
        prompts = DataSource(dataset=dataset or str(path), data_path=path if dataset else None).open()
        try:
            results = list(prompts)
        except UserError as error:
            reason = str(error)
            results = []
        else:
            reason = str(path)
            assert list(prompts) == results
            wanted = (each.turn_ids if n % 2 else () for n, each in enumerate(results))
            assert list(prompts.select(wanted)) == results[1::2]
        assert str(path) in reason
        assert len(reason.splitlines()) == 1
    ids = [name for each in results for name in each.turn_ids]
    assert len(set(ids)) == len(ids)
    for result in results:
        check_result(result)


def check_result(result: Prompt | Rejected) -> None:
    if isinstance(result, Rejected):
        assert 0 < len(result.reason) <= 300
        assert len(result.reason.splitlines()) == 1
        result.reason.encode()
        return
    assert (len(result.messages) > 0) + (result.text is not None) + (len(result.token_ids) > 0) == 1
    json.dumps(result.sampling, allow_nan=False)
    replace(SamplingParams(), **result.sampling)
    result.last_message.encode()


def lines(values: list[object]) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


LINES = lines(GOOD)
ARRAY = json.dumps(GOOD, indent=1).encode()
FILES = {
    "rows.jsonl": LINES,
    "rows.json": ARRAY,
    "rows.jsonl.gz": gzip.compress(LINES, mtime=0),
    "rows.json.gz": gzip.compress(ARRAY, mtime=0),
}
known = st.sampled_from([None, *DATASETS])


@settings(deadline=None)
@given(content=st.binary(max_size=200), name=st.sampled_from(list(FILES)), dataset=known)
def test_any_bytes(content, name, dataset):
    check(name, content, dataset)
    check(name, gzip.compress(content), dataset)


@settings(deadline=None)
@given(data=st.data(), name=st.sampled_from(list(FILES)), dataset=known)
def test_a_good_file_with_some_bytes_changed(data, name, dataset):
    check(name, data.draw(mutated(FILES[name])), dataset)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(values=st.lists(rows(), min_size=1, max_size=6), name=st.sampled_from(list(FILES)), dataset=known)
def test_any_values_as_rows(values, name, dataset):
    content = lines(values) if name.startswith("rows.jsonl") else json.dumps(values).encode()
    check(name, gzip.compress(content) if name.endswith(".gz") else content, dataset)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> bytes:
    from datasets import Dataset

    path = tmp_path_factory.mktemp("table") / "rows.parquet"
    Dataset.from_list(GOOD[:2]).to_parquet(path)
    return path.read_bytes()


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_table_with_some_bytes_changed_or_cut_off(table, data):
    check("rows.parquet", data.draw(mutated(table) | st.binary(max_size=40)))


@settings(max_examples=20, deadline=None)
@given(
    depth=st.integers(1, 100_000),
    kind=st.sampled_from([b"[", b'{"id":', b'{"id":"a","prompt":[', b'[{"id":']),
)
def test_deep_nesting(depth, kind):
    check("rows.jsonl", kind * depth + b"\n" + LINES)
    check("rows.json", b"[" + kind * depth + b"]" * depth)
