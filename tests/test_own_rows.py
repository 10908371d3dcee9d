"""Users' files as they are found: recognised kinds, tables, lines of text, and what the user says of them."""

import gzip
import re
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow.parquet import write_table

from specgen.config import UserError
from specgen.prompts import DataSource, Message, Prompt, Rejected
from specgen.prompts.formats import Reading
from tests.commands import write_rows


def load(path: Path, **how: Any) -> tuple[list[Prompt | Rejected], list[str]]:
    """The rows, and the warnings about them."""
    prompts = DataSource(dataset=str(path), how=Reading(**how)).open()
    return list(prompts), list(prompts.notes.sentences())


def written(path: Path, *rows: object) -> Path:
    return write_rows(path, rows)


def said(prompt: Prompt | Rejected) -> tuple[str, ...]:
    """The user's turns."""
    assert isinstance(prompt, Prompt), prompt
    assert [message.role for message in prompt.messages] == ["user"]
    return prompt.messages[0].content, *prompt.follow_ups


TALK = {"id": 1, "task": "CM", "history": [{"user": "a", "bot": "x"}, {"user": "b"}]}
CODE = {"task_id": "H/0", "prompt": "def f", "entry_point": "f", "test": ""}
TREE = {"message_tree_id": "m", "prompt": {"text": "a", "replies": []}}
ASKED = {"id": "t", "instruction": "a"}
KINDS = [  # of public files: a row, its id, what the user says, and the warning
    ({"question_id": 81, "category": "c", "turns": ["a", "b"]}, "81", ("a", "b"), "read as mt-bench: "),
    ({"id": "s", "conversations": [{"from": "human", "value": "a"}]}, "s", ("a",), "read as sharegpt: "),
    ({"id": "g", "question": "a", "answer": "b"}, "g", ("a",), "read as gsm8k: "),
    (CODE, "H/0", ("def f",), "read as humaneval: "),
    ({"task_id": 3, "text": "a", "code": "b"}, "3", ("a",), "read by the field text, "),
    (ASKED | {"instances": [{"input": "", "output": "b"}]}, "t", ("a",), "read as instruct"),
    (ASKED | {"instances": [{"input": "b"}]}, "t", ("a\n\nb",), "read as instructions: "),
    (ASKED | {"input": "b", "output": "c"}, "t", ("a\n\nb",), "read as instructions: "),
    (ASKED | {"history": []}, "t", ("a",), "read as instructions: "),
    (TALK, "1", ("a", "b"), "read as mt-b"),
    (TREE, "m", ("a",), "read as trees of messages: "),
]


@pytest.mark.parametrize(("row", "row_id", "turns", "kind"), KINDS)
def test_kinds_of_rows_are_recognised_and_named(
    tmp_path: Path, row: dict[str, Any], row_id: str, turns: tuple[str, ...], kind: str
) -> None:
    (prompt,), (sentence,) = load(written(tmp_path / "own.jsonl", row))
    assert (prompt.id, said(prompt)) == (row_id, turns)
    assert sentence.startswith(f"1 row is {kind}")
    assert "--raw" in sentence


def test_own_rows_and_batches_are_what_they_say_without_warnings(tmp_path: Path) -> None:
    batch = {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "x"}}
    found, warnings = load(
        written(tmp_path / "own.jsonl", {"prompt": "x", "question": "y", "text": "z"}, batch)
    )
    assert [prompt.text for prompt in found if isinstance(prompt, Prompt)] == ["x", "x"]
    assert warnings == []


def test_sampling_of_a_recognised_row_counts(tmp_path: Path) -> None:
    path = written(
        tmp_path / "own.jsonl", {"question": "a", "max_tokens": 3}, {"question": "b", "top_p": "x"}
    )
    good, bad = load(path)[0]
    assert isinstance(good, Prompt)
    assert good.sampling == {"max_tokens": 3}
    assert isinstance(bad, Rejected)
    assert "top_p is 'x'" in bad.reason


def test_lines_of_text_and_json_strings_are_raw_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_bytes(b"\xef\xbb\xbfOne\r\n \nTwo\xff\n")
    (one, bad), warnings = load(tmp_path / "own.txt")
    assert (one, one.where) == (Prompt(id=one.id, text="One"), "line 1")  # type: ignore[union-attr]
    assert isinstance(bad, Rejected)
    assert bad.reason.startswith("line 3: prompt is not UTF-8")
    assert warnings[0].startswith(
        "2 rows are a text without fields: taken as it is, without the chat template"
    )
    found, warnings = load(written(tmp_path / "own.jsonl", "One", "Two"), chat=True)
    assert [said(prompt) for prompt in found] == [("One",), ("Two",)]
    assert (found[0].id, warnings) == (one.id, []), "who says --chat knows"


@pytest.mark.parametrize(("name", "mark"), [("own.csv", ","), ("own.tsv", "\t"), ("own.csv.gz", ",")])
def test_a_table_has_a_row_per_line_below_its_header(tmp_path: Path, name: str, mark: str) -> None:
    lines = ["id,prompt,max_tokens,stop", 'a,"x, y\nz",3,1', "b,w,,", "", "c,v", "d,u,hot,"]
    content = "\r\n".join(lines).replace(",", mark).replace(f"x{mark} y", "x, y").encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    (first, second, short, hot), _ = load(tmp_path / name)
    assert first == Prompt(id="a", text="x, y\nz", sampling={"max_tokens": 3, "stop": ("1",)})
    assert second == Prompt(id="b", text="w")
    assert isinstance(short, Rejected)
    assert short.reason == "row 3: 2 cells and 4 columns: quote cells that hold a separator"
    assert isinstance(hot, Rejected)
    assert "max_tokens is 'hot'" in hot.reason


def test_a_table_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("prompt,prompt\na,b\n")
    columns = [pyarrow.array([text]) for text in "ab"]
    write_table(pyarrow.Table.from_arrays(columns, ["prompt", "prompt"]), tmp_path / "own.parquet")
    for name in ("own.csv", "own.parquet"):
        with pytest.raises(UserError, match=rf"{name} cannot be read \(two columns have the same name"):
            load(tmp_path / name)


def test_a_cell_of_a_table_may_have_several_stop_strings(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text('prompt,stop\na,"[""x"", "" y""]"\nb,"""x"""\nc,[]\n')
    prompts, _ = load(tmp_path / "own.csv")
    assert [dict(each.sampling) for each in prompts] == [
        {"stop": ("x", " y")},
        {"stop": ('"x"',)},
        {"stop": ()},
    ]


def test_lines_keep_their_white_space(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_bytes(b"  if x: \r\n \t\nb\n\nlast ")
    prompts, _ = load(tmp_path / "own.txt")
    assert [each.text for each in prompts] == ["  if x: ", "b", "last "]


def test_hidden_files_and_runs_in_a_directory_are_no_prompts(tmp_path: Path) -> None:
    run, hidden = tmp_path / "out" / "run", tmp_path / ".ipynb_checkpoints"
    for folder in (run, hidden, tmp_path / "more"):
        folder.mkdir(parents=True)
        written(folder / "completions.jsonl", {"prompt": folder.name})
    for name in (".lock", "status.json"):
        (run / name).write_text("{}")
    written(tmp_path / "._a.jsonl", {"prompt": "hidden"})
    written(tmp_path / "a.jsonl", {"prompt": "a"})
    source = DataSource(dataset=str(tmp_path)).open()
    assert [each.text for each in source] == ["a", "more"]


def test_fields_that_other_engines_heed_are_named(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "system": "x", "min_tokens": 3}, {"prompt": "b", "system": "y"}]
    _, sentences = load(written(tmp_path / "own.jsonl", *rows))
    assert sentences == [
        "2 rows have a field 'system', which is ignored, so no answer follows it",
        "1 row has a field 'min_tokens', which is ignored, so no answer follows it",
    ]


@pytest.mark.parametrize(
    ("value", "turns"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([{"role": "user", "content": "a"}], ("a",))],
)
def test_a_field_that_is_named(tmp_path: Path, value: object, turns: tuple[str, ...]) -> None:
    row = {"id": "i", "meta": {"ask": value}, "prompt": "not this", "temperature": 0.5}
    (prompt,), warnings = load(written(tmp_path / "own.jsonl", row), prompt_field="meta.ask")
    assert (said(prompt), warnings) == (turns, [])
    assert isinstance(prompt, Prompt)
    assert prompt.sampling == {"temperature": 0.5}
    (bad,), _ = load(tmp_path / "own.jsonl", prompt_field="meta.question")
    assert isinstance(bad, Rejected)
    assert bad.reason == "line 1: no field 'meta.question': the row has 'id, meta, prompt, temperature'"


def test_chat_and_raw(tmp_path: Path) -> None:
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "s"}
    rows = {"prompt": "a"}, {"messages": [user]}, {"messages": [system, user]}, {"prompt_token_ids": [1]}
    batch = {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "x"}}
    path = written(tmp_path / "own.jsonl", *rows, {"turns": ["a", "b"]}, batch)
    chats, raws = load(path, chat=True)[0], load(path, chat=False)[0]
    assert [said(chats[0]), said(chats[1]), said(chats[4])] == [("a",), ("a",), ("a", "b")]
    assert chats[2].messages[0] == Message(role="system", content="s")  # type: ignore[union-attr]
    assert [raw.text for raw in raws[:2] if isinstance(raw, Prompt)] == ["a", "a"]
    assert raws[3].token_ids == (1,)  # type: ignore[union-attr]
    reasons = [each.reason for each in (chats[3], raws[2], raws[4], chats[5], raws[5])]  # type: ignore[union-attr]
    assert [reason.partition(": ")[2].partition(":")[0] for reason in reasons] == [
        "token ids cannot be put into a chat template",
        *["several messages or turns need the chat template"] * 2,
        *["the url of a batch row says whether it is a chat"] * 2,
    ]


def test_a_misspelt_prompt_is_named(tmp_path: Path) -> None:
    (bad,), _ = load(written(tmp_path / "own.jsonl", {"promt": "a"}))
    assert isinstance(bad, Rejected)
    assert "('promt': did you mean prompt?)" in bad.reason
    body = {"prompt": "x", "temprature": 1}
    (bad,), _ = load(
        written(tmp_path / "b.jsonl", {"custom_id": "b", "url": "/v1/completions", "body": body})
    )
    assert isinstance(bad, Rejected)
    assert (
        "'temprature' is not known and might change the answer (did you mean temperature?): remove"
        in bad.reason
    )


def test_a_split_of_a_directory_and_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, config: str | None, *, data_files: None, split: str) -> list[dict[str, str]]:
        asked.append((path, config, split))
        if split == "gone":
            raise ValueError("Unknown split")
        return [{"question": "a"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert said(load(Path("some/set:main"), split="dev")[0][0]) == ("a",)
    load(tmp_path, split="dev")
    assert asked == [("some/set", "main", "dev"), (str(tmp_path), None, "dev")]
    with pytest.raises(UserError, match=r"Unknown split.*: check its name and split"):
        load(tmp_path, split="gone")
    with pytest.raises(UserError, match="which has none: leave --split out"):
        load(written(tmp_path / "own.jsonl", {"prompt": "a"}), split="dev")


def test_a_split_of_real_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for split in ("train", "test"):
        written(tmp_path / f"{split}.jsonl", {"question": split})
    assert [said(prompt) for prompt in load(tmp_path, split="test")[0]] == [("test",)]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "a.csv",
            b"id;prompt\n1;x\n",
            "a.csv: the header 'id;prompt' is one column with a semicolon in it: separate col",
        ),
        ("a.tsv", b"id,prompt\n1,x\n", "with a comma in it: separate columns by tabs"),
        (
            "a.jsonl",
            '{"prompt": "x"}'.encode("utf-16"),
            "a.jsonl: not UTF-8 but UTF-16: save the file as UTF-8",
        ),
        ("a.csv", "prompt\nx\n".encode("utf-16"), "a.csv: not UTF-8 but UTF-16"),
    ],
)
def test_another_separator_or_encoding_is_named(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(words)):
        list(DataSource(dataset=str(tmp_path / name)).open())


@pytest.mark.parametrize("array", [False, True])
def test_a_row_with_a_key_twice_is_refused_and_the_rest_runs(tmp_path: Path, array: bool) -> None:
    """The last would win in silence. Texts with what looks like a key are texts."""
    rows = [
        r'{"id": "a", "prompt": "x", "temperature": 0, "temperature": 1}',
        r'{"id": "b", "messages": [{"role": "user", "content": "x", "content": "y"}]}',
        r'{"id": "c", "prompt" : "x", "prompt" : "y"}',
        r'{"id": "d", "prompt": "x", "\u0070rompt": "y"}',
        r'{"id": "e", "prompt": "{\"a\": 1, \"a\": 2, \"b\" : 3}"}',
        r'{"id": "f", "prompt_token_ids": [1, 2]}',
        r'{"id": "g", "prompt": "x"}',
    ]
    file = tmp_path / ("own.json" if array else "own.jsonl")
    file.write_text("[" + ",\n".join(rows) + "]" if array else "\n".join(rows))
    found = list(DataSource(dataset=str(file)).open())
    assert [row.id for row in found if isinstance(row, Prompt)] == ["e", "f", "g"]
    reasons = [row.reason for row in found if isinstance(row, Rejected)]
    place = "row" if array else "line"
    assert reasons == [
        f"{place} {number}: the key {key!r} appears twice in one object: remove one"
        for number, key in enumerate(("temperature", "content", "prompt", "prompt"), start=1)
    ]
