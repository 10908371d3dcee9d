"""Prompts and checkpoints at URLs: streamed, fetched once, known again by their versions; and what is no URL."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from specgen.checkpoints.checkpoint import open_checkpoint
from specgen.config import EngineConfig
from specgen.config.bundled import data_directory
from specgen.config.urls import Url, is_url, location, require_no_secrets, without_secrets
from specgen.prompts.load import DataSource
from specgen.storage import Store, copy_of, hub_id
from specgen.text.tokenizer import load_tokenizer
from tests.commands import refused, rows, specgen, write_rows
from tests.object_server import BUCKET, S3Server, s3_server

ROWS = [{"id": f"r{n}", "prompt": f"Tom has {n} apples"} for n in range(40)]


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]
    copy_of.cache_clear()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(monkeypatch) as server:
        yield server


def put(url: str, content: bytes) -> None:
    Store.at(Url(url)).write("", content)


def lines(rows: list[dict[str, object]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def prompts(dataset: str, **settings: object) -> list[str]:
    return [prompt.id for prompt in DataSource(dataset=dataset, **settings).open()]  # type: ignore[arg-type]


def test_rows_are_those_of_the_same_file_on_a_disk(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    table = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), table)
    contents = {
        "rows.jsonl": lines(ROWS),
        "rows.jsonl.gz": gzip.compress(lines(ROWS)),
        "rows.json": json.dumps(ROWS).encode(),
        "rows.csv": b"id,prompt\n" + b"".join(f"{each['id']},{each['prompt']}\n".encode() for each in ROWS),
        "rows.parquet": table.read_bytes(),
    }
    for name, content in contents.items():
        put(f"memory://in/{name}/{name}", content)
        (tmp_path / name).write_bytes(content)
        here = list(DataSource(dataset=str(tmp_path / name)).open())
        for url in (f"memory://in/{name}/{name}", f"memory://in/{name}"):  # the object, and all below
            assert list(DataSource(dataset=url).open()) == here
    named = DataSource(dataset="gsm8k", data_path=Url("memory://gsm8k"))
    put("memory://gsm8k/train.jsonl", lines([{"question": "1 + 1?", "answer": "#### 2"}] * 3))
    put("memory://gsm8k/test.jsonl", lines([{"question": "2 + 2?", "answer": "#### 4"}]))
    assert [prompt.last_message for prompt in named.open()] == ["2 + 2?"], "the split, by its file's name"  # type: ignore[union-attr]


def test_hidden_objects_and_runs_are_no_prompts(tmp_path: Path) -> None:
    names = [
        *("a.jsonl", "below/b.jsonl", ".c.jsonl", ".d/e.jsonl"),
        *("run/completions.jsonl", "run/parts/f.jsonl"),
    ]
    for number, name in enumerate(names):
        content = lines([{"id": name, "prompt": f"prompt {number}"}])
        put(f"memory://lake/{name}", content)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    put("memory://lake/run/parts.json", b"{}")
    (tmp_path / "run" / "parts.json").write_text("{}")  # of a copy
    for dataset in ("memory://lake", str(tmp_path)):
        assert sorted(prompts(dataset)) == ["a.jsonl", "below/b.jsonl"]


def test_json_lines_are_streamed(s3: S3Server) -> None:
    """The first rows of a large object cost its first block; one that ends early is refused."""
    size = 40 << 20
    put(f"s3://{BUCKET}/large.jsonl", lines(ROWS[:3]) + lines([{"prompt": "x" * (size // 50)}]) * 50)
    s3.requests.clear()
    assert prompts(f"s3://{BUCKET}/large.jsonl", num_prompts=3) == ["r0", "r1", "r2"]
    assert sum(answered for _, _, answered in s3.requests) < 20 << 20
    put(f"s3://{BUCKET}/rows.jsonl.gz", gzip.compress(lines(ROWS))[:-9])
    whole = rf"^s3://{BUCKET}/rows.jsonl.gz cannot be read \(.*\): check that it is whole and can be reached"
    with refused(whole):
        prompts(f"s3://{BUCKET}/rows.jsonl.gz")


def test_the_index_of_prompts_is_used_again_while_the_object_is_the_same(tmp_path: Path) -> None:
    put("memory://in/rows.jsonl", lines(ROWS))
    source = DataSource(dataset="memory://in/rows.jsonl")
    key, (file,) = source.open().key(), source.open().files
    assert source.open().key() == key
    assert str(file) == "memory://in/rows.jsonl"
    first = iter(source.open())
    next(first)
    put("memory://in/rows.jsonl", lines(ROWS[:-1]))
    assert source.open().key() != key
    opened = source.open()
    put("memory://in/rows.jsonl", lines(ROWS))
    with refused(
        r"^memory://in/rows.jsonl cannot be read \(it was replaced while it was in use\): check that it is"
    ):
        list(opened)


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        ("memory://in/none.jsonl", "^memory://in/none.jsonl does not exist: name an object or a directory"),
        ("memory://in", "^memory://in has no data file in it: use .jsonl"),
        ("gs://in/rows.jsonl", r"^gs://in/rows.jsonl needs a library .*: pip install gcsfs$"),
        ("nope://in/rows.jsonl", "^nope://in/rows.jsonl is of no store that fsspec knows: use s3://"),
        ("memory://in/notes", "^memory://in/notes: not UTF-8 but UTF-16: save the file as UTF-8$"),
    ],
)
def test_what_cannot_be_read_is_refused(dataset: str, reason: str) -> None:
    put("memory://in/notes", b"\xff\xfea")
    with refused(reason):
        assert prompts(dataset) == []


# --- checkpoints --------------------------------------------------------------------------------


def upload_pair() -> tuple[str, str]:
    for name in ("target", "drafter"):
        for file in (data_directory() / "demo" / name).iterdir():
            put(f"memory://models/{name}/{file.name}", file.read_bytes())
    put("memory://models/target/pytorch_model.bin", b"another format")
    put("memory://models/target/original/weights.safetensors", b"below")
    return "memory://models/target", "memory://models/drafter"


def test_a_pair_at_urls_generates_what_it_does_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, drafter = upload_pair()
    file = write_rows(tmp_path / "rows.jsonl", ROWS[:3])
    pair = [data_directory() / "demo" / name for name in ("target", "drafter")]
    for out, names in (("url", (model, drafter)), ("disk", pair)):
        command = ["--dataset", file, "--model", names[0], "--drafter", names[1], "--max-new-tokens", "6"]
        assert specgen("generate", *command, "--output", tmp_path / out, "--quiet").exit_code == 0
    texts = [[row["text"] for row in rows(tmp_path / out / "completions.jsonl")] for out in ("url", "disk")]
    assert texts[0] == texts[1]
    manifest = json.loads((tmp_path / "url" / "manifest.json").read_text())
    assert (manifest["engine"]["model"], manifest["settings"]["drafter"]) == (model, drafter)
    assert (
        manifest["fingerprints"]
        == json.loads((tmp_path / "disk" / "manifest.json").read_text())["fingerprints"]
    )
    copies = {path for path in (tmp_path / "cache" / "specgen" / "checkpoints").iterdir() if path.is_dir()}
    assert not [path for copy in copies for path in copy.iterdir() if path.name == "pytorch_model.bin"]
    downloads = []
    monkeypatch.setattr(Store, "download", lambda *asked: downloads.append(asked))
    copy_of.cache_clear()
    assert open_checkpoint(model).path in copies
    assert load_tokenizer(model).encode_text("a")
    assert downloads == [], "fetched once"


def test_a_fetch_that_is_broken_off_goes_on_and_a_new_checkpoint_is_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = upload_pair()
    download, names = Store.download, []

    def fail(self: Store, name: str, file: Path) -> None:
        names.append(name)
        if name.endswith(".safetensors"):
            file.write_bytes(b"half")
            raise OSError("broken off")
        download(self, name, file)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "download", fail)
        with refused(rf"^{model} cannot be kept in \S+ \(broken off\): make room"):
            open_checkpoint(model)
    monkeypatch.setattr(Store, "download", lambda *asked: (names.append(asked[1]), download(*asked))[1])
    first = open_checkpoint(model)
    assert first.path.joinpath("model.safetensors").read_bytes() == Store.at(Url(model)).read(
        "model.safetensors"
    )
    assert len(names) == len(set(names)) + sum(name.endswith(".safetensors") for name in set(names))
    put(f"{model}/config.json", Store.at(Url(model)).read("config.json") + b" ")
    copy_of.cache_clear()
    assert open_checkpoint(model).path != first.path


# --- addresses ----------------------------------------------------------------------------------


def test_urls_and_paths() -> None:
    assert is_url("s3://bucket/a")
    assert not any(map(is_url, ("file:///a", "gsm8k=s3://bucket/a")))
    assert [location(text) for text in ("file:///a/b", "a/b")] == [Path("/a/b"), Path("a/b")]
    assert location("s3://bucket/a/") / "b" == Url("s3://bucket/a/b")
    assert hub_id(Url("hf://owner/name")) == "owner/name"
    assert hub_id(Url("hf://owner/name/below")) is hub_id(Url("s3://owner/name")) is None
    with refused("^memory://models/none is no directory with objects in it: check the address$"):
        open_checkpoint("memory://models/none")


@pytest.mark.parametrize(
    "url",
    [
        *("s3://user:secret@bucket/a", "s3://user:secr/et@bucket/a", "s3://user:12/secret@bucket/a"),
        *("s3://secret@bucket/a", "https://host/a?sig=secret", "az://container/a?secret"),
        *("gsm8k=s3://user:secret@bucket/a",),
    ],
)
def test_a_url_with_a_secret_is_refused_without_it(url: str) -> None:
    with refused(r"^the URL \w+://\.\.\. has (a user or a password|a query \(\?\.\.\.\)) in it") as caught:
        require_no_secrets(url)
    with refused("^the URL"):
        EngineConfig(model=url, drafter="ngram")
    assert "secret" not in str(caught.value)


def test_secrets_in_errors_of_libraries_are_left_out() -> None:
    for plain in ("abfs://a@b.dfs.core.windows.net/a", "https://host:9000/a", "hf://owner/name@main/a"):
        require_no_secrets(plain)
    text = "no https://user:secret@host/a, no https://host/a?sig=secret, here"
    assert "secret" not in without_secrets(text)
    assert without_secrets("plain? text s3://bucket/a") == "plain? text s3://bucket/a"


def test_commands_that_write_to_a_directory_refuse_a_url() -> None:
    for command in ("compare", "tune"):
        error = specgen(command, "--output", "s3://bucket/a").exception
        assert str(error).startswith(
            "output is a URL, s3://bucket/a, and this command takes a path of this machine"
        )
