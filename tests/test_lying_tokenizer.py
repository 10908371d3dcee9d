"""Tokenizers and chat templates that are broken or mean harm: one short line, and nothing of them reaches further."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specgen.config import TemplateKwargs, UserError
from specgen.text.tokenizer import Message, Tokenizer, load_tokenizer
from tests.forked import generate_with_pair, write_pair
from tests.tiny_tokenizers import write_byte_level

FILE, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
CHAT = [Message(role="user", content="Hi")]
LONGEST_LINE = 700  # characters
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def path(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copied"))


def _change(file: Path, change: Change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def _one_line(error: UserError) -> None:
    assert len(str(error).splitlines()) == 1
    assert len(str(error)) < LONGEST_LINE


def _split_at(regex: str) -> Change:
    pattern = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return lambda content: content.update(pre_tokenizer=pattern)


def _model(**fields: Any) -> Change:
    return lambda content: content.update(model=fields)


WITHOUT_TOKEN = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "?", "type_id": 0}}]}
BROKEN: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: (path / FILE).unlink(),
    "directory": lambda path: ((path / FILE).unlink(), (path / FILE).mkdir()),
    "pipe": lambda path: ((path / FILE).unlink(), os.mkfifo(path / FILE)),
    "empty": lambda path: (path / FILE).write_text(""),
    "cut": lambda path: (path / FILE).write_bytes((path / FILE).read_bytes()[:999]),
    "nested": lambda path: (path / FILE).write_text("[" * 100_000),
    "negative-id": lambda path: _change(path / FILE, lambda content: content["model"]["vocab"].update(x=-1)),
    "id-of-2^40": lambda path: _change(
        path / FILE, lambda content: content["model"]["vocab"].update(x=1 << 40)
    ),
    "merges-of-nothing": lambda path: _change(
        path / FILE, lambda content: content["model"].update(merges=[["??", "!!"]])
    ),
    "regex-broken": lambda path: _change(path / FILE, _split_at("(a")),
    "regex-that-matches-nothing": lambda path: _change(
        path / FILE,
        lambda content: content.update(
            normalizer={"type": "Replace", "pattern": {"String": ""}, "content": "a"}
        ),
    ),
    "special-token-of-nothing": lambda path: _change(
        path / FILE,
        lambda content: content.update(post_processor=WITHOUT_TOKEN | {"pair": [], "special_tokens": {}}),
    ),
    "unknown-token-of-nothing": lambda path: _change(
        path / FILE, _model(type="WordLevel", unk_token="?", vocab={"Tom": 0})
    ),
    "no-vocabulary": lambda path: _change(path / FILE, _model(type="Unigram", unk_id=None, vocab=[])),
    "config-list": lambda path: (path / CONFIG).write_text("[]"),
    "config-nested": lambda path: (path / CONFIG).write_text("[" * 100_000),
    "config-added-tokens": lambda path: (path / CONFIG).write_text('{"added_tokens_decoder": {"x": {}}}'),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
def test_a_tokenizer_that_cannot_work_is_refused_when_it_is_loaded(
    path: Path, damage: Callable[[Path], object]
) -> None:
    damage(path)
    with pytest.raises(UserError, match="no tokenizer could be loaded") as caught:
        load_tokenizer(str(path))
    _one_line(caught.value)


def test_the_tokenizer_is_the_one_of_the_directory(path: Path) -> None:
    """Files that its config names elsewhere are not read."""
    elsewhere = path.parent / "tokenizer.1.0.json"
    shutil.copy(path / FILE, elsewhere)
    _change(elsewhere, lambda content: content["model"]["vocab"].update({"elsewhere": 5000}))
    before = load_tokenizer(str(path)).encode_text("Tom has")
    names = {"fast_tokenizer_files": ["../tokenizer.1.0.json"], "tokenizer_file": str(elsewhere)}
    _change(path / CONFIG, lambda content: content.update(names, vocab_file="/etc/passwd"))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.encode_text("Tom has") == before
    assert not tokenizer.has_text(5000)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("missing", "there is no file tokenizer.json"),
        ("config-list", None),
        ("no-added-tokens", "'added_tokens' is missing"),
    ],
)
def test_no_message_ends_within_the_librarys(path: Path, damage: str, words: str | None) -> None:
    def without(path: Path) -> None:
        _change(path / FILE, lambda content: content.pop("added_tokens"))

    {**BROKEN, "no-added-tokens": without}[damage](path)
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(path))
    reason = str(caught.value).partition("(")[2].rpartition("): give a directory")[0]
    assert reason.count("'") % 2 == 0
    assert not reason.endswith((":", "("))
    assert words is None or reason == words


def _linked(file: Path, real: Path) -> None:
    real.parent.mkdir(parents=True, exist_ok=True)
    file.rename(real)
    file.symlink_to(real)


@pytest.mark.parametrize(
    ("real", "refused"),
    [
        ("elsewhere/chat_template.jinja", True),
        ("chat_template.jinja", True),
        ("blobs/0f3a", False),  # as the hub's cache
        ("copied/own.txt", False),
    ],
)
def test_a_template_that_is_a_link_out_of_the_checkpoint_is_refused(
    path: Path, real: str, refused: bool
) -> None:
    file, real_file = path / TEMPLATE, path.parent / real
    _linked(file, real_file)
    if not refused:
        assert chat_ids(load_tokenizer(str(path)))
        return
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(path))
    remedy = f"{file} is a link to {real_file}, outside of the checkpoint: copy that file here if it is the template"
    assert str(caught.value) == remedy


def test_a_template_in_the_hubs_cache_is_read(path: Path) -> None:
    snapshot = path.parent / "models--owner--name" / "snapshots" / "0f3a"
    shutil.copytree(path, snapshot)
    _linked(snapshot / TEMPLATE, snapshot.parent.parent / "blobs" / "77")
    assert chat_ids(load_tokenizer(str(snapshot))) == chat_ids(load_tokenizer(str(path)))


def test_a_pattern_with_endless_backtracking_is_given_up(path: Path) -> None:
    _change(path / FILE, _split_at(r"(.*)*\1(.+)+(.+)+Q$"))
    tokenizer = load_tokenizer(str(path))
    try:
        assert tokenizer.encode_text("a" * 2000)
    except UserError as error:
        _one_line(error)


@pytest.mark.slow
def test_ids_beyond_the_model_are_failures_of_requests(tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    shift = {token: 1000 + number for number, token in enumerate("abcdefghijklmnopqrstuvwxyzTH")}
    _change(pair / "target" / FILE, lambda content: content["model"]["vocab"].update(shift))
    ended = generate_with_pair(pair)
    assert ended.code in (0, 3)
    assert "is not in the vocabulary of 320" in ended.out + ended.err
    assert "Traceback" not in ended.err


# ---- chat templates


REFUSED = {
    "syntax": "{% for %}",
    "file": "{% include '/etc/passwd' %}",
    "module": "{% import 'os' as os %}",
    "class": "{{ ''.__class__.__base__.__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch evil') }}",
    "mutation": "{{ messages.clear() }}",
    "division": "{{ 1 / 0 }}",
    "types": "{{ 1 + 'a' }}",
    "undefined": "{{ messages[99].content.x }}",
    "function-of-nothing": "{{ nothing() }}",
    "long-range": "{{ range(10 ** 9) | list }}",
    "endless-recursion": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "two-lines": "{{ raise_exception('no\nno') }}",
    "surrogate": "{{ '\\ud800' }}",
}


def chat_ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode_rendered(tokenizer.render_chat(CHAT))


NO_PROGRAM = {
    "syntax": ("{% for %}", "line 1: Expected an expression"),
    "later": ("{{ messages }}\n\n{% if x %}", "line 3: Unexpected end of template"),
    "filter": ("{{ messages | nothing }}", "line 1: No filter named 'nothing'"),
    "deep": (REFUSED["deep"], ""),
    "python": ("{% set a = b %}" + "{% if a %}" * 200 + "{% endif %}" * 200, ""),
}


@pytest.mark.parametrize("dated", [False, True])
@pytest.mark.parametrize(("template", "reason"), NO_PROGRAM.values(), ids=NO_PROGRAM)
def test_a_template_that_is_no_program_is_refused_before_any_prompt(
    path: Path, template: str, reason: str, dated: bool
) -> None:
    (path / TEMPLATE).write_text("{# strftime_now #}" * dated + template)
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.encode_text("a")  # rows of raw text need none
    if dated:
        tokenizer = tokenizer.with_template_kwargs(TemplateKwargs().with_date("2026-01-31"))
    for use in (
        tokenizer.require_chat_template,
        lambda: tokenizer.with_template_kwargs(TemplateKwargs.of({"a": 1})),
    ):
        with pytest.raises(UserError, match=r"^the chat template cannot be compiled \(") as caught:
            use()
        assert f"({reason}" in str(caught.value)
        _one_line(caught.value)


def test_a_job_with_a_template_that_is_no_program_ends_before_its_first_row(tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    (pair / "target" / TEMPLATE).write_text(NO_PROGRAM["syntax"][0])
    ended = generate_with_pair(pair)
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith("specgen: the chat template cannot be compiled (line 1: ")
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("template", REFUSED.values(), ids=REFUSED)
def test_a_template_that_fails_is_the_failure_of_its_prompt(
    path: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path / TEMPLATE).write_text(template)
    monkeypatch.chdir(path)
    tokenizer = load_tokenizer(str(path))
    with pytest.raises(
        UserError, match=r"refuses these messages|cannot (encode this text|be compiled)"
    ) as caught:
        chat_ids(tokenizer)
    _one_line(caught.value)
    assert not (path / "evil").exists()
    assert isinstance(tokenizer, Tokenizer)


@pytest.mark.parametrize("template", [5, {"a": 1}, [{"name": "a"}]])
def test_an_invalid_template_is_refused(path: Path, template: object) -> None:
    (path / TEMPLATE).unlink()
    _change(path / CONFIG, lambda content: content.update(chat_template=template))
    with pytest.raises(
        UserError, match=r"could be loaded|cannot be compiled|refuses these|no chat template"
    ) as caught:
        chat_ids(load_tokenizer(str(path)))
    _one_line(caught.value)
