"""Every data set format, every row that cannot be run, and the token ids of every turn."""

import bz2
import gc
import gzip
import io
import json
import lzma
import os
import re
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from pathlib import Path

import datasets
import pandas
import pyarrow
import pytest
from pyarrow.parquet import write_table

from specgen.config import UserError
from specgen.config.bundled import data_directory
from specgen.prompts import DATASETS, DataSource, Message, Prompt, Rejected, json_rows, prompt_ids
from specgen.prompts.formats import Reading
from specgen.text.tokenizer import load_tokenizer
from tests.commands import refused
from tests.test_prompt_rows import load as read
from tests.test_prompt_rows import turns_of
from tests.tiny_tokenizers import write_byte_level

PUBLIC = Path(os.environ.get("SPECGEN_DATASETS", Path(__file__).parents[2] / "shared" / "datasets"))
public = pytest.mark.skipif(not PUBLIC.is_dir(), reason=f"no public data sets at {PUBLIC}")

CATEGORIES = ("writing", "roleplay", "reasoning", "coding", "extraction", "stem", "humanities")
OWN = {"id": "a", "prompt": "Once upon a time"}
EXPECTED_OWN = Prompt(id="a", text="Once upon a time")
ROWS = {  # data set: one row as its public file has it
    "mt-bench": {
        "question_id": 81,
        "category": "writing",
        "turns": ["Write.", "Shorter."],
        "reference": ["x"],
    },
    "sharegpt": {
        "id": "s1",
        "conversations": [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hi."}],
    },
    "gsm8k": {"question": "How many?", "answer": "Two. #### 2"},
    "spec-bench": {"question_id": 161, "category": "translation", "turns": ["Translate."]},
    "speed-bench": {
        "question_id": "0a" * 16,
        "category": "coding",
        "sub_category": "python",
        "turns": ["Sort it.", "Faster."],
        "source": "https://huggingface.co/datasets/a/b",
        "src_id": "a_7",
        "difficulty": "easy",
        "multiturn": True,
    },
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": "..."},
}
ROWS |= {name: ROWS[name.partition(":")[0]] for name in DATASETS if ":" in name}


def user(content: str) -> tuple[Message, ...]:
    return (Message(role="user", content=content),)


EXPECTED = {
    "mt-bench": Prompt(id="81", messages=user("Write."), follow_ups=("Shorter.",), category="writing"),
    "sharegpt": Prompt(
        id="s1", messages=user("Hello?"), recorded=(Message(role="assistant", content="Hi."),)
    ),
    "gsm8k": Prompt(id="91cb48a56ac898b4", messages=user("How many?")),
    "spec-bench": Prompt(id="161", messages=user("Translate."), category="translation"),
    "speed-bench": Prompt(
        id="0a" * 16, messages=user("Sort it."), follow_ups=("Faster.",), category="coding"
    ),
    "humaneval": Prompt(id="HumanEval/0", messages=user("def f():\n")),
}
ASKED = {  # as DeepSpec's files and vLLM's tests have them
    "mt-bench": Prompt(id="81", messages=user("Write."), category="writing"),
    "gsm8k": Prompt(
        id="91cb48a56ac898b4",
        messages=user("How many?\nPlease reason step by step, and put your final answer within \\boxed{}."),
    ),
    "humaneval": Prompt(
        id="HumanEval/0",
        messages=user(
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f():\n\n```"
        ),
    ),
}
EXPECTED |= {f"{name}:{table}": prompt for name, prompt in ASKED.items() for table in ("dspark", "vllm")}


def write_lines(path: Path, *rows: object) -> Path:
    """Strings are lines as they are; everything else is dumped."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def table(rows: list[dict]):
    """As ``datasets`` gives rows; imported late, so that collecting the tests is quick."""
    from datasets import Dataset

    return Dataset.from_list(rows)


def load(dataset: str | Path, data_path: Path | None = None, num_prompts: int | None = None):
    """The prompts, and the rejected rows."""
    found = list(DataSource(dataset=str(dataset), data_path=data_path, num_prompts=num_prompts).open())
    prompts = [each for each in found if isinstance(each, Prompt)]
    return prompts, [each for each in found if isinstance(each, Rejected)]


# --- formats and files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("kind", ["rows.jsonl", "rows.json", "rows.jsonl.gz", "rows.json.gz", "rows.parquet"])
def test_each_data_set_in_each_kind_of_file(tmp_path, name, kind):
    path = tmp_path / kind
    if kind.endswith(".parquet"):
        table([ROWS[name]]).to_parquet(path)
    else:
        text = json.dumps(ROWS[name]) + "\n" if ".jsonl" in kind else json.dumps([ROWS[name]], indent=1)
        path.write_bytes(gzip.compress(text.encode()) if kind.endswith(".gz") else text.encode())
    assert load(name, path) == ([EXPECTED[name]], [])
    assert load(name, tmp_path) == ([EXPECTED[name]], [])


def test_files_of_a_directory_are_known_by_their_names_in_any_case_and_gzipped(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"prompt\nb\n"))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"c\n"))
    (tmp_path / "d.CSV").write_text("prompt\nd\n")
    (tmp_path / "e.JSON.GZ").write_bytes(gzip.compress(b'[{"prompt": "e"}]'))
    (tmp_path / "f.log").write_text("f\n")
    assert [prompt.text for prompt in load(tmp_path)[0]] == ["a", "b", "c", "d", "e"]
    assert [prompt.text for prompt in load(tmp_path / "d.CSV")[0]] == ["d"]
    (tmp_path / "own.jsonl").write_bytes(gzip.compress(json.dumps(OWN).encode()))  # by its content
    write_lines(tmp_path / "plain.jsonl.gz", OWN)
    assert load(tmp_path / "own.jsonl") == load(tmp_path / "plain.jsonl.gz") == ([EXPECTED_OWN], [])


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
NO_ARRAY = r"not valid JSON \(.*({}).*mend the array, or write"
WHOLE = "cannot be read .*: check that it is whole"


def parquet_of_two_columns() -> bytes:
    columns, file = [pyarrow.array([text]) for text in "ab"], io.BytesIO()
    write_table(pyarrow.Table.from_arrays(columns, ["prompt", "prompt"]), file)
    return file.getvalue()


REFUSED = [  # files of which no row is read: name, content, reason
    ("a.csv", b'id,prompt\n1,"Tom\n2,second\n', r"line \d: .*: close every quote"),
    ("a.csv", b'id,prompt\n1,"say "no" now"\n', r"line \d: .*: close every quote"),
    ("a.csv", b"prompt,prompt\na,b\n", r"cannot be read \(two columns have the same name"),
    ("a.parquet", parquet_of_two_columns(), r"cannot be read \(two columns have the same name"),
    (
        "a.csv",
        b"id;prompt\n1;x\n",
        "the header 'id;prompt' is one column with a semicolon in it: separate col",
    ),
    ("a.tsv", b"id,prompt\n1,x\n", "with a comma in it: separate columns by tabs"),
    ("a.csv", "prompt\nx\n".encode("utf-16"), "not UTF-8 but UTF-16"),
    ("a.jsonl", "{}".encode("utf-16"), "not UTF-8 but UTF-16: save the file as UTF-8"),
    ("a.jsonl", b"\n", "has no rows: name a file with at least one"),
    ("a.json", b'[{"prompt": "a"}]\n[{"prompt": "b"}]', NO_ARRAY.format("Extra data: line 2 column 1")),
    ("a.json", b'[{"prompt": "a"}]' + b"\n" * 2**20 + b"x", NO_ARRAY.format("Extra data")),
    (
        "a.json",
        b'[{"prompt": "a"}, {"prompt": "b"',
        NO_ARRAY.format("Expecting ',' delimiter: line 1 column 33"),
    ),
    ("a.json", b'[{"prompt": "a"},]', NO_ARRAY.format("Illegal trailing comma|Expecting value")),
    ("a.json", b"[" * 100_000, NO_ARRAY.format("recursion")),
    ("a.jsonl.gz", gzip.compress(json.dumps(OWN).encode())[:-9], WHOLE),
    ("a.parquet", b"PAR1", WHOLE),
    (
        "a.jsonl.bz2",
        bz2.compress(b"{}"),
        "compressed as bzip2, which is not read: unpack it, or compress it with gzip",
    ),
    ("a.jsonl", lzma.compress(b"{}"), "compressed as xz, which"),
    ("a.zip", b"PK\x03\x04", "compressed as zip, which"),
    ("a.parquet", LFS_POINTER, "this is a Git LFS pointer, not the file: run git lfs pull"),
    ("a.txt", LFS_POINTER, "this is a Git LFS pointer"),
    (
        "a.json",
        b"<!DOCTYPE html><html>",
        "this is a web page, perhaps of a login or an error: check the link",
    ),
]


@pytest.mark.parametrize(("name", "content", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_files_are_refused_in_one_line(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with refused(rf"^{re.escape(str(tmp_path / name))}:? (.*{reason}|{reason})"):
        load(tmp_path / name)


def test_an_invalid_number_invalidates_only_its_element_of_an_array(tmp_path):
    (tmp_path / "rows.json").write_text('[{"prompt": "a", "temperature": NaN}, {"prompt": "b"}]\n \n')
    (prompt,), (rejected,) = load(tmp_path / "rows.json")
    assert prompt.text == "b"
    assert re.match("row 1: temperature is .*nan", rejected.reason)


@pytest.mark.parametrize("before", ["", " ", "  ", "\t"])
@pytest.mark.parametrize("kind", ["rows.jsonl", "rows.json"])
def test_a_key_that_is_there_twice_is_found_however_it_is_spaced(tmp_path, kind, before):
    path, row = tmp_path / kind, f'{{"id":"a","prompt":"x","prompt"{before}:"y"}}'
    path.write_text(f"[{row}]" if kind.endswith(".json") else row + "\n" * 3)
    (rejected,) = load(path)[1]
    assert "the key 'prompt' appears twice" in rejected.reason


def test_another_content_than_in_the_first_pass_is_no_answer_to_it(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "b"})
    prompts = DataSource(dataset=str(path)).open()
    ids = [each.turn_ids for each in prompts]
    assert [each.text for each in prompts.select(ids)] == ["a", "b", "b"]
    write_lines(path, {"prompt": "a"}, {"prompt": "c"}, {"prompt": "b"})
    with pytest.raises(UserError, match="line 2: it has another content than when this run has read it"):
        list(prompts.select(ids))


def test_rows_of_a_table_are_counted_over_its_batches(tmp_path):
    path = tmp_path / "own.parquet"
    rows = [{"id": str(number), "prompt": "Hi"} for number in range(1, 2501)]
    rows[2399]["prompt"] = " "
    table(rows).to_parquet(path)
    prompts, rejected = load(str(path))
    assert [prompt.where for prompt in prompts[1022:1026]] == [
        f"row {number}" for number in range(1023, 1027)
    ]
    assert len(prompts) == 2499
    assert [(row.id, row.reason) for row in rejected] == [("2400", "row 2400: prompt is empty")]


def test_a_published_form_keeps_what_a_question_says(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", {"question": "What is {x} in \\boxed{}?"})
    (prompt,), _ = load("gsm8k:vllm", path)
    assert prompt.last_message.startswith("What is {x} in \\boxed{}?\nPlease reason")


@pytest.mark.parametrize("text", [f"{json.dumps(OWN)}\n", f"\n {json.dumps([OWN])}"])
def test_a_json_file_may_have_lines_or_an_array_after_a_byte_order_mark(tmp_path, text):
    path = tmp_path / "own.json"
    path.write_text(text, encoding="utf-8-sig")
    assert load(path) == ([Prompt(id="a", text="Once upon a time")], [])


def test_num_prompts_counts_prompts_that_can_run_and_reads_no_further(tmp_path):
    path = write_lines(tmp_path / "own.jsonl", "{", OWN, {**OWN, "id": "b"}, "never read", {**OWN, "id": "c"})
    prompts, rejected = load(path, num_prompts=2)
    assert [prompt.id for prompt in prompts] == ["a", "b"]
    assert [row.id for row in rejected] == ["line 1"]


def test_every_pass_reads_the_set_again_and_only_as_far_as_needed(tmp_path):
    path = write_lines(tmp_path / "own.jsonl", OWN, "{", {**OWN, "id": "b"})
    prompts = DataSource(dataset=str(path)).open()
    first = list(prompts)
    assert list(prompts) == first
    assert [type(result) for result in first] == [Prompt, Rejected, Prompt]
    passes = iter(prompts), iter(prompts)
    assert next(passes[0]) == next(passes[1]) == first[0]
    write_lines(path, {**OWN, "id": "new"})
    assert [result.id for result in prompts] == ["new"]


def test_rows_that_are_not_selected_are_not_parsed_and_keep_their_ids(tmp_path, monkeypatch):
    named = [{**OWN, "id": name} for name in ("line 5", "line 4", "c")]
    rows = OWN, "", named[0], "{", OWN, *named[1:], "never read"
    prompts = DataSource(dataset=str(write_lines(tmp_path / "own.jsonl", *rows)), num_prompts=3).open()
    whole = list(prompts)
    assert [result.id for result in whole] == ["a", "line 5", "line 4", "a (line 5)", "line 4 (line 6)", "c"]
    parse = json_rows._value
    parsed = []
    monkeypatch.setattr(json_rows, "_value", lambda text: parsed.append(text.decode()) or parse(text))
    ids = [each.turn_ids for each in whole]
    assert list(prompts.select([(), (), *ids[2:5], ()])) == whole[2:5]
    assert parsed == ["{", json.dumps(OWN), json.dumps(named[1])]
    (last,) = prompts.select([(), ids[1], ()])
    assert (last, last.where) == (whole[1], "line 3")


def test_standard_input_is_kept_for_every_pass_and_removed_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    content = gzip.compress((json.dumps(OWN) + "\n{\n").encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    prompts = DataSource(dataset="-").open()
    assert [result.id for result in prompts] == [result.id for result in prompts] == ["a", "line 2"]
    del prompts
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_kept_for_every_pass(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=write_lines, args=(pipe, OWN), daemon=True).start()
    prompts = DataSource(dataset=str(pipe)).open()
    assert list(prompts) == list(prompts) == [EXPECTED_OWN]


def test_standard_input_that_cannot_be_kept(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"{}")))
    with pytest.raises(UserError, match=r"^standard input cannot be saved in .* write it to a file"):
        load("-")


def test_a_directory_is_read_by_the_names_of_its_files(tmp_path):
    write_lines(tmp_path / "b.jsonl", {**OWN, "id": "2"}, OWN)
    write_lines(tmp_path / "a.jsonl", {**OWN, "id": "1"}, OWN)
    (tmp_path / "README.md").write_text("not data")
    prompts, rejected = load(tmp_path)
    assert [prompt.id for prompt in prompts] == ["1", "a", "2"]
    assert rejected[0].id == "a (b.jsonl line 2)"
    assert rejected[0].reason == "b.jsonl line 2: an earlier row has the same id 'a': give every row its own"


def test_rows_of_files_of_one_name_are_told_by_their_directories(tmp_path):
    for name in ("a/part.jsonl", "b/part.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{\n")
    prompts, rejected = load(tmp_path)
    assert [row.id for row in rejected] == ["a/part.jsonl line 1", "b/part.jsonl line 1"]
    assert rejected[1].reason.startswith("b/part.jsonl line 1: not valid JSON")
    assert prompts == []


def test_the_test_split_is_chosen_where_a_directory_has_several(tmp_path):
    (tmp_path / "main").mkdir()
    (tmp_path / "socratic").mkdir()
    for name in ("main/train-00000.jsonl", "main/test-00000.jsonl", "socratic/test-00000.jsonl"):
        write_lines(tmp_path / name, {"question": name, "answer": ""})
    assert [prompt.messages for prompt in load("gsm8k", tmp_path)[0]] == [user("main/test-00000.jsonl")]


def test_rows_without_an_id_get_the_same_one_in_every_file(tmp_path):
    other = {"question": "Other?", "answer": ""}
    first, _ = load("gsm8k", write_lines(tmp_path / "1.jsonl", ROWS["gsm8k"], other))
    gap = {**ROWS["gsm8k"], "source": None}
    second, rejected = load("gsm8k", write_lines(tmp_path / "2.jsonl", other, gap))
    assert {prompt.id for prompt in first} == {prompt.id for prompt in second}
    assert (len(first), rejected) == (2, [])


def test_equal_rows_without_ids_are_different_requests(tmp_path):
    row = {"prompt": "x"}
    (digest,) = (prompt.id for prompt in load(write_lines(tmp_path / "one.jsonl", row))[0])
    rows = [
        row,
        {"prompt": "y"},
        {"id": f"{digest}-2", "prompt": "z"},
        {**row, "id": None},
        {"prompt": 3},
        row,
        row,
    ]
    path = write_lines(tmp_path / "own.jsonl", *rows, {"prompt": 3})
    prompts, rejected = load(path)
    ids = [prompt.id for prompt in prompts if prompt.text == "x"]
    assert ids == [digest, *[f"{digest}-{number}" for number in (3, 4, 5)]]
    assert rejected[1].id == f"{rejected[0].id}-2"
    whole = DataSource(dataset=str(path)).open()
    wanted = [each.turn_ids if number % 2 else () for number, each in enumerate(whole)]
    again = [each.turn_ids for each in whole.select(wanted)]
    assert again == [each for each in wanted if each], "a resume knows them by their place"


def test_a_rejected_conversation_has_one_error(tmp_path):
    rows = [
        {"question_id": 1, "turns": ["x", "y"]},
        {"question_id": 1, "turns": ["x", "y"]},
        {"question_id": 2, "turns": [" ", "y", "z"]},
        {"question_id": 3},
    ]
    _, rejected = load("mt-bench", write_lines(tmp_path / "rows.jsonl", *rows))
    assert [row.turn_ids for row in rejected] == [("1 (line 2)",), ("2",), ("3",)]


# --- ids --------------------------------------------------------------------------------------------------


def test_all_ids_are_different_whatever_the_rows_say(tmp_path):
    rows = [
        {**OWN, "id": "line 2"},
        "{",  # would be "line 2"
        {**OWN, "id": "bad", "prompt": 3},
        {**OWN, "id": "bad"},  # the id is in the errors already
        {**OWN, "id": "line 2 (2)"},
        {**OWN, "id": "fine"},
    ]
    prompts, rejected = load(write_lines(tmp_path / "own.jsonl", *rows))
    assert [prompt.id for prompt in prompts] == ["line 2", "fine"]
    assert [row.id for row in rejected] == ["line 2 (2)", "bad", "bad (line 4)", "line 2 (2) (line 5)"]


def test_later_turns_take_their_ids_too(tmp_path):
    rows = [
        {"question_id": 1, "turns": ["x", "y"]},
        {"question_id": "1/turn-2", "turns": ["x"]},
        {"question_id": "1/turn-3", "turns": ["x"]},
    ]
    prompts, rejected = load("mt-bench", write_lines(tmp_path / "rows.jsonl", *rows))
    assert [prompt.turn_ids for prompt in prompts] == [("1", "1/turn-2"), ("1/turn-3",)]
    assert [row.id for row in rejected] == ["1/turn-2 (line 2)"]


# --- rows that cannot be run ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow"])
def test_whole_numbers_that_a_gap_has_made_floats_are_whole(tmp_path, kind):
    frame = pandas.DataFrame(
        {"prompt": ["a", "b"], "max_tokens": [5, None], "top_k": [-1, None], "seed": [None, 3]}
    )
    path = tmp_path / f"rows.{kind}"
    if kind == "arrow":  # as numpy has them: with NaN, not null
        datasets.Dataset.from_dict({name: frame[name].to_numpy() for name in frame}).save_to_disk(path)
    else:
        frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
    assert [each.sampling for each in load(path)[0]] == [{"max_tokens": 5, "top_k": 0}, {"seed": 3}]


def test_invalid_utf8_invalidates_only_its_element(tmp_path):
    path = tmp_path / "own.json"
    path.write_bytes(b'[{"id": "x", "prompt": "\xff"}, ' + json.dumps(OWN).encode() + b"]")
    assert load(path)[0] == [EXPECTED_OWN]
    assert load(path)[1][0].reason.startswith("row 1: not UTF-8 (invalid ")


def test_an_endless_row_is_skipped_in_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("specgen.prompts.json_rows._LONGEST", 2**20)
    path = tmp_path / "own.jsonl"
    lines = [
        json.dumps(OWN),
        json.dumps({**OWN, "id": "b", "prompt": "x" * 2**26}),
        json.dumps({**OWN, "id": "c"}),
    ]
    path.write_bytes(gzip.compress("\n".join(lines).encode(), 1))
    del lines
    tracemalloc.start()
    prompts, rejected = load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24
    assert [prompt.id for prompt in prompts] == ["a", "c"]
    assert len(rejected) == 1
    assert "longer than 1,048,576" in rejected[0].reason


def test_a_reason_never_repeats_megabytes(tmp_path):
    big = "x" * 10**7
    rows = [
        {**OWN, "id": "1", "messages": big},
        {**OWN, "id": big},
        {"id": "3", "messages": [{"role": big}]},
        big,
    ]
    rejected = load(write_lines(tmp_path / "own.jsonl", *rows, {big: 1, "id": "5"}))[1]
    assert [row.id for row in rejected] == ["1", "line 2", "3", "line 4", "5"]
    assert rejected[2].reason.endswith("x': use system, user, assistant")
    assert max(len(row.reason) for row in rejected) <= 300


# --- errors of the whole ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "data_path", "num_prompts", "reason"),
    [
        ("bundled", None, 0, "num-prompts is 0: use at least 1"),
        ("bundled", None, -1, "num-prompts is -1: use at least 1"),
        (
            *("gsm9k", None, None),
            r"'gsm9k', neither a known name nor a file \(did you mean gsm8k\?\): use bundled, mt-bench, shareg",
        ),
        ("mt-bench", "gone.jsonl", None, "gone.jsonl does not exist"),
        ("gsm8k", "gone/", None, "gone does not exist"),
        ("bundled", ".", None, "name the format of that path, one of mt-bench, sharegpt"),
        ("own.jsonl", ".", None, "name the format of that path, one of mt-bench, sharegpt"),
        ("gsm8k", ".", None, r"has no data file in it: use \.jsonl"),
    ],
)
def test_what_is_no_data_set_is_refused(tmp_path, dataset, data_path, num_prompts, reason):
    with refused(reason):
        load(dataset, data_path and tmp_path / data_path, num_prompts)


# --- tables, and what is no file of rows ---

_TEXTS = [f"prompt {number}" for number in range(5)]


def _saved(path: Path, texts: list[str], **options: int) -> None:
    datasets.Dataset.from_dict({"id": texts, "prompt": texts}).save_to_disk(path, **options)


def test_a_data_set_that_datasets_has_saved(tmp_path):
    _saved(tmp_path / "in" / "saved", _TEXTS, num_shards=2)
    datasets.load_from_disk(tmp_path / "in" / "saved").map(lambda row: {"prompt": "cached"})
    assert len([*(tmp_path / "in" / "saved").glob("*.arrow")]) == 3
    for path in (tmp_path / "in" / "saved", tmp_path / "in"):
        prompts, rejected = load(path)
        assert [prompt.text for prompt in prompts] == _TEXTS
        assert not rejected
    next((tmp_path / "in" / "saved").glob("data-00001*")).unlink()
    with refused(r"data-00001-of-00002.arrow is missing: .*state.json names it; save the data set again"):
        load(tmp_path / "in")


@pytest.mark.parametrize(
    "said", ["[]", '{"_data_files": [{}]}', '{"_data_files": [{"filename": "../a.arrow"}]}', "3"]
)
def test_a_damaged_record_of_a_saved_data_set_is_one_line(tmp_path, said):
    _saved(tmp_path, _TEXTS)
    (tmp_path / "state.json").write_text(said)
    with refused(r"state.json cannot be read \(.*\): save the data set again"):
        load(tmp_path)


def test_the_splits_that_datasets_has_saved(tmp_path):
    splits = {"train": _TEXTS[:2], "test": _TEXTS[2:]}
    found = {name: datasets.Dataset.from_dict({"prompt": texts}) for name, texts in splits.items()}
    datasets.DatasetDict(found).save_to_disk(tmp_path)
    with refused(r"split is 'a' but dataset is .*, which has none: leave --split out"):
        DataSource(dataset=str(tmp_path / "test"), how=Reading(split="a")).open()
    with refused(r"has the splits train, test: name one with --split, or its directory"):
        load(tmp_path)
    for source in (
        DataSource(dataset=str(tmp_path), how=Reading(split="test")),
        DataSource(dataset=str(tmp_path / "test")),
    ):
        assert [prompt.text for prompt in source.open()] == _TEXTS[2:]


@pytest.mark.parametrize("name", ["a.arrow", "a.feather", "a.pq", "a.parquet", "a"])
def test_tables_are_known_by_their_content(tmp_path, name):
    frame, path = pandas.DataFrame({"prompt": _TEXTS * 1000}), tmp_path / name
    frame.to_feather(path) if name in ("a.arrow", "a.feather") else frame.to_parquet(path)
    prompts, _ = load(path)
    assert [prompt.text for prompt in prompts] == _TEXTS * 1000
    assert prompts[-1].where == "row 5000"


def test_lines_of_text_and_json_strings_are_raw_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "spaces.txt").write_bytes(b"  if x: \r\n \t\nb\n\nlast ")
    assert [each.text for each in load(tmp_path / "spaces.txt")[0]] == ["  if x: ", "b", "last "]
    (tmp_path / "own.txt").write_bytes(b"\xef\xbb\xbfOne\r\n \nTwo\xff\n")
    (one, bad), warnings = read(tmp_path / "own.txt")
    assert (one, one.where) == (Prompt(id=one.id, text="One"), "line 1")  # type: ignore[union-attr]
    assert isinstance(bad, Rejected)
    assert bad.reason.startswith("line 3: prompt is not UTF-8")
    assert warnings[0].startswith(
        "2 rows are a text without fields: taken as it is, without the chat template"
    )
    found, warnings = read(write_lines(tmp_path / "own.jsonl", '"One"', '"Two"'), chat=True)
    assert [turns_of(prompt) for prompt in found] == [("One",), ("Two",)]
    assert (found[0].id, warnings) == (one.id, []), "who says --chat knows"


@pytest.mark.parametrize(("name", "mark"), [("own.csv", ","), ("own.tsv", "\t"), ("own.csv.gz", ",")])
def test_a_table_has_a_row_per_line_below_its_header(tmp_path: Path, name: str, mark: str) -> None:
    lines = ["id,prompt,max_tokens,stop", 'a,"x, y\nz",3,1', "b,w,,", "", "c,v", "d,u,hot,"]
    content = "\r\n".join(lines).replace(",", mark).replace(f"x{mark} y", "x, y").encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    (first, second, short, hot), _ = read(tmp_path / name)
    assert first == Prompt(id="a", text="x, y\nz", sampling={"max_tokens": 3, "stop": ("1",)})
    assert second == Prompt(id="b", text="w")
    assert isinstance(short, Rejected)
    assert short.reason == "row 3: 2 cells and 4 columns: quote cells that hold a separator"
    assert isinstance(hot, Rejected)
    assert "max_tokens is 'hot'" in hot.reason


def test_a_cell_of_a_table_may_have_several_stop_strings(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text('prompt,stop\na,"[""x"", "" y""]"\nb,"""x"""\nc,[]\n')
    prompts, _ = read(tmp_path / "own.csv")
    assert [dict(each.sampling) for each in prompts] == [
        {"stop": ("x", " y")},
        {"stop": ('"x"',)},
        {"stop": ()},
    ]


def test_hidden_files_and_runs_in_a_directory_are_no_prompts(tmp_path: Path) -> None:
    run, hidden = tmp_path / "out" / "run", tmp_path / ".ipynb_checkpoints"
    for folder in (run, hidden, tmp_path / "more"):
        folder.mkdir(parents=True)
        write_lines(folder / "completions.jsonl", {"prompt": folder.name})
    for name in (".lock", "status.json"):
        (run / name).write_text("{}")
    write_lines(tmp_path / "._a.jsonl", {"prompt": "hidden"})
    write_lines(tmp_path / "a.jsonl", {"prompt": "a"})
    assert [each.text for each in load(tmp_path)[0]] == ["a", "more"]


def test_a_split_of_a_directory_and_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, config: str | None, *, data_files: None, split: str) -> list[dict[str, str]]:
        asked.append((path, config, split))
        if split == "gone":
            raise ValueError("Unknown split")
        return [{"question": "a"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert turns_of(read(Path("some/set:main"), split="dev")[0][0]) == ("a",)
    read(tmp_path, split="dev")
    assert asked == [("some/set", "main", "dev"), (str(tmp_path), None, "dev")]
    with pytest.raises(UserError, match=r"Unknown split.*: check its name and split"):
        read(tmp_path, split="gone")
    with pytest.raises(UserError, match="which has none: leave --split out"):
        read(write_lines(tmp_path / "own.jsonl", {"prompt": "a"}), split="dev")


def test_a_split_of_real_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for split in ("train", "test"):
        write_lines(tmp_path / f"{split}.jsonl", {"question": split})
    assert [turns_of(prompt) for prompt in read(tmp_path, split="test")[0]] == [("test",)]


# --- the hub ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mt-bench", ("philschmid/mt-bench", None, None, "train")),
        ("gsm8k", ("openai/gsm8k", "main", None, "test")),
        ("humaneval", ("openai/openai_humaneval", None, None, "test")),
        ("gsm8k:dspark", ("openai/gsm8k", "main", None, "test")),
    ],
)
def test_a_name_asks_the_hub_for_its_public_id(monkeypatch, name, expected):
    asked = []

    def load_dataset(path, config, *, data_files, split):
        asked.append((path, config, data_files, split))
        return table(
            [ROWS[name], {**ROWS[name], "broken": 1, **dict.fromkeys(("turns", "question", "prompt"))}]
        )

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    prompts, rejected = load(name)
    assert asked == [expected]
    assert prompts == [EXPECTED[name]]
    assert [row.reason.split(":")[0] for row in rejected] == ["row 2"]


@pytest.mark.parametrize("name", DATASETS)
def test_without_the_network_the_error_is_one_line_with_the_remedy(monkeypatch, name):
    def load_dataset(path, *_, **__):
        raise ConnectionError(f"Couldn't reach {path!r} on the Hub\n(a traceback)")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with refused(rf"^dataset is '{name}', but .*with --data-path$") as caught:
        load(name)
    hub = DATASETS[name].hub
    assert (hub.address if hub else "examples/specdec_bench") in str(caught.value)


# --- SPEED-Bench ------------------------------------------------------------------------------------------

NOT_HERE = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def test_speed_bench_with_messages_has_the_turns_of_its_users(tmp_path):
    row = {name: value for name, value in ROWS["speed-bench"].items() if name != "turns"}
    said = [{"role": "user", "content": turn} for turn in ROWS["speed-bench"]["turns"]]
    path = write_lines(tmp_path / "qualitative.jsonl", row | {"messages": said})
    assert load("speed-bench", path) == ([EXPECTED["speed-bench"]], [])
    answered = [said[0], {"role": "assistant", "content": "x"}]
    write_lines(path, row | {"messages": answered}, row | {"question_id": "b", "messages": said})
    prompts, rejected = load("speed-bench", path)
    assert [prompt.id for prompt in prompts] == ["b"]
    assert rejected[0].reason == "line 1: turn 2 is None, not a string"


def test_of_a_directory_with_all_of_speed_bench_the_qualitative_part_is_read(tmp_path):
    for part in ("throughput_1k", "qualitative"):
        (tmp_path / part).mkdir()
        table([ROWS["speed-bench"] | {"category": part}]).to_parquet(tmp_path / part / "test.parquet")
    prompts, rejected = load("speed-bench", tmp_path)
    assert ([prompt.category for prompt in prompts], rejected) == (["qualitative"], [])
    only = load("speed-bench", tmp_path / "throughput_1k")[0]
    assert [prompt.category for prompt in only] == ["throughput_1k"]


@pytest.mark.parametrize("name", ["speed-bench", "own"])
@pytest.mark.parametrize("turns", [[NOT_HERE], ["Sort it.", f"{NOT_HERE}\n\nAnswer: {{question}}"]])
def test_speed_bench_without_its_texts_is_refused(tmp_path, name, turns):
    rows = [ROWS["speed-bench"], ROWS["speed-bench"] | {"question_id": "b", "turns": turns}]
    path = write_lines(tmp_path / "rows.jsonl", *rows)
    with refused(
        r"rows.jsonl, line 2: the texts of SPEED-Bench are not in these rows: fetch them with prepare_data.py"
    ):
        list(
            (
                DataSource(dataset=name, data_path=path)
                if name in DATASETS
                else DataSource(dataset=str(path))
            ).open()
        )


# --- bundled ----------------------------------------------------------------------------------------------


def test_the_bundled_prompts_are_found_from_any_directory(tmp_path):
    code = (
        "from specgen.prompts import Prompt, DataSource\n"
        "prompts = list(DataSource(dataset='bundled').open())\n"
        "assert len(prompts) >= 24 and all(isinstance(prompt, Prompt) for prompt in prompts)\n"
        "assert all(len(prompt.follow_ups) == 1 and prompt.category for prompt in prompts)\n"
        "import sys; assert 'datasets' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_the_bundled_prompts_cover_every_category():
    counts = Counter(prompt.category for prompt in load("bundled")[0])
    assert set(counts) == {*CATEGORIES, "math"}
    assert 0.25 <= counts["math"] / counts.total() <= 0.4


def test_the_bundled_sharegpt_file_loads_by_its_format():
    prompts, rejected = load("sharegpt", data_directory() / "prompts" / "sharegpt.json")
    assert len(prompts) >= 24
    assert rejected == []


# --- public files -----------------------------------------------------------------------------------------


@public
@pytest.mark.parametrize(
    ("name", "path", "count", "rejected"),
    [
        ("mt-bench", "mt_bench", 80, 0),
        ("gsm8k", "gsm8k", 1319, 0),
        ("spec-bench", "spec_bench", 480, 0),
        ("humaneval", "humaneval", 164, 0),
        ("sharegpt", "sharegpt/ShareGPT_V3_filtered_500.json", 500, 0),
        ("sharegpt", "sharegpt/dummy_conversation.json", 500, 0),
        (
            "sharegpt",
            "sharegpt/glaive_toolcall_en_demo.json",
            300,
            0,
        ),  # 35 rows are there twice, and have no id
        ("sharegpt", "sharegpt/oasst_en_sharegpt.json", 547, 0),
    ],
)
def test_public_files_load_whole(name, path, count, rejected):
    prompts, bad = load(name, PUBLIC / path)
    assert (len(prompts), len(bad)) == (count, rejected)
    assert all(prompt.messages[-1].role == "user" for prompt in prompts)


@public
def test_mt_bench_has_two_turns_everywhere_and_spec_bench_in_its_mt_bench_part():
    assert all(len(prompt.follow_ups) == 1 for prompt in load("mt-bench", PUBLIC / "mt_bench")[0])
    assert sum(len(prompt.follow_ups) for prompt in load("spec-bench", PUBLIC / "spec_bench")[0]) == 80


# --- token ids of a turn ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(write_byte_level(tmp_path_factory.mktemp("tokenizer"))))


def test_later_turns_have_the_answers_in_context(tokenizer):
    prompt = Prompt(id="a", messages=user("One?"), follow_ups=("Two?", "Three?"))
    first, _ = prompt_ids(prompt, tokenizer, [])
    third, ids = prompt_ids(prompt, tokenizer, ["1", ""])
    assert first == "<s><|user|>One?<|end|><|assistant|>"
    assert third == (
        "<s><|user|>One?<|end|><|assistant|>1<|end|><|user|>Two?<|end|><|assistant|><|end|>"
        "<|user|>Three?<|end|><|assistant|>"
    )
    assert tokenizer.decode_with_special(ids) == third


def test_raw_text_and_token_ids_are_taken_as_they_are(tokenizer):
    text, ids = prompt_ids(Prompt(id="a", text="Tom has"), tokenizer, [])
    assert (text, ids) == ("Tom has", tokenizer.encode_text("Tom has"))
    assert prompt_ids(Prompt(id="a", token_ids=tuple(ids)), tokenizer, []) == ("<s>Tom has", ids)


def test_a_token_id_outside_the_vocabulary(tokenizer):
    size = tokenizer.vocab_size
    assert prompt_ids(Prompt(id="a", token_ids=(size - 1,)), tokenizer, [])[1] == [size - 1]
    with pytest.raises(UserError, match=rf"token id {size} is outside the vocabulary of {size}"):
        prompt_ids(Prompt(id="a", token_ids=(1, size)), tokenizer, [])
    outside = 2**62
    with refused(rf"^token id {outside} is outside the vocabulary of {size}: tokenize"):
        prompt_ids(Prompt(id="a", token_ids=(1, outside)), tokenizer, [])
    with pytest.raises(UserError, match=r"^prompt 'a' has the token id -1: use 0 or more"):
        Prompt(id="a", token_ids=(1, -1))


def test_a_prompt_ends_with_the_user():
    said = Message(role="user", content="x"), Message(role="assistant", content="Sure, ")
    with refused(r"^prompt 'a': the last message is from assistant: end with the user$"):
        Prompt(id="a", messages=said)
