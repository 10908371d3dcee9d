"""The tokenizer against transformers, and stop strings against decoding the whole text at every token."""

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from fnmatch import fnmatch
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.utils import chat_template_utils

from specgen.config import EngineConfig, TemplateKwargs, UserError
from specgen.text.chat_template import calls_for_date, pin_date
from specgen.text.tokenizer import Message, StopStrings, Tokenizer, load_tokenizer
from tests.commands import refused
from tests.marks import mostly_slow
from tests.tiny_tokenizers import (
    HARMONY_TEMPLATE,
    TEMPLATE,
    TEXT,
    write_byte_fallback,
    write_byte_level,
    write_harmony,
    write_think,
)

READ_PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}"
)
CHAT = [
    Message(role="system", content="Be brief."),
    Message(role="user", content="Café?\n"),
    Message(role="assistant", content=""),
    Message(role="user", content="Why <|end|> 🙂?"),
]


def reference_tokenizer(path):
    from transformers import AutoTokenizer  # takes two seconds: not while tests are collected

    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def byte_level_path(tmp_path_factory):
    return write_byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def byte_level(byte_level_path) -> Tokenizer:
    return load_tokenizer(str(byte_level_path))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(str(write_byte_fallback(tmp_path_factory.mktemp("byte_fallback"))))


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)


def chat_ids(tokenizer):
    return tokenizer.encode_rendered(tokenizer.render_chat(CHAT))


def test_ids_are_those_of_transformers(byte_level_path, byte_level):
    reference = reference_tokenizer(byte_level_path)
    for text in TEXT:
        assert byte_level.encode_text(text) == reference(text)["input_ids"]
    chat = [{"role": message.role, "content": message.content} for message in CHAT]
    expected = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert chat_ids(byte_level) == expected
    assert byte_level.vocab_size == len(reference)
    assert byte_level.eos_token_id == reference.eos_token_id


def test_raw_text_begins_with_one_bos_and_so_does_a_chat(tokenizer):
    bos = tokenizer.encode_text("")
    assert len(bos) == 1
    assert tokenizer.encode_text("Tom")[:2] != bos * 2
    assert chat_ids(tokenizer)[:1] == bos
    assert chat_ids(tokenizer)[1:2] != bos


def test_a_rendered_chat_ends_where_the_assistant_answers(byte_level):
    text = byte_level.render_chat(CHAT[:2])
    assert text == "<s><|system|>Be brief.<|end|><|user|>Café?\n<|end|><|assistant|>"
    assert (
        byte_level.decode_with_special(byte_level.encode_rendered(byte_level.render_chat(CHAT[:2]))) == text
    )


@pytest.mark.parametrize("text", TEXT)
def test_decode_is_exact(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_decode_skips_special_tokens_and_unknown_ids(byte_level):
    ids = [*byte_level.encode_text("Tom"), byte_level.eos_token_id, byte_level.vocab_size + 5]
    assert byte_level.decode(ids) == "Tom"
    assert byte_level.decode_with_special(ids) == "<s>Tom<|end|>"


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    path = write_byte_level(tmp_path)
    reference = reference_tokenizer(path)
    reference.backend_tokenizer.enable_truncation(4)
    reference.backend_tokenizer.enable_padding(length=64)
    reference.backend_tokenizer.save(str(path / "tokenizer.json"))
    assert load_tokenizer(str(path)).decode(load_tokenizer(str(path)).encode_text(TEXT[0])) == TEXT[0]


def test_text_that_is_none_is_not_the_tokenizers_fault(tokenizer):
    with pytest.raises(UserError, match="cannot encode this text, which holds a lone surrogate: remove it"):
        tokenizer.encode_text("a\ud800")


def test_a_missing_chat_template_names_the_remedy(tmp_path):
    tokenizer = load_tokenizer(str(write_byte_level(tmp_path, chat_template=None)))
    with pytest.raises(UserError, match="no chat template: use rows with a raw `prompt`"):
        chat_ids(tokenizer)


def test_a_template_that_refuses_the_messages_is_one_line(tmp_path):
    template = "{{ raise_exception('no system messages') }}"
    tokenizer = load_tokenizer(str(write_byte_level(tmp_path, chat_template=template)))
    with refused(r"^the chat template refuses these messages \(no system messages\).*$"):
        chat_ids(tokenizer)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_file_that_git_lfs_has_not_fetched_is_named(tmp_path, name):
    write_byte_level(tmp_path)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n")
    with refused(rf"^\S+{name}: this is a Git LFS pointer, not the file: run git lfs pull$"):
        load_tokenizer(str(tmp_path))


def test_a_hub_id_is_downloaded_once_and_then_read_from_disk(monkeypatch, byte_level_path):
    asked = []

    def snapshot_download(hub_id, *, allow_patterns, ignore_patterns):
        asked.append(hub_id)
        names = {file.name for file in byte_level_path.iterdir()}
        assert all(any(fnmatch(name, pattern) for pattern in allow_patterns) for name in names)
        assert not any(fnmatch("model.safetensors", pattern) for pattern in allow_patterns)
        return str(byte_level_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert chat_ids(load_tokenizer("owner/name"))
    assert asked == ["owner/name"]


@pytest.mark.parametrize("hub_id", ["owner/name", "no such directory"])
def test_a_hub_id_out_of_reach_is_one_line(monkeypatch, hub_id):
    def snapshot_download(*_, **__):
        raise ConnectionError("no network\n(a traceback)")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with refused(r"^no tokenizer could be loaded from .* \(no network\): give"):
        load_tokenizer(hub_id)


def test_loading_the_tokenizer_does_not_load_torch(byte_level_path):
    code = f"import sys; from specgen.text.tokenizer import load_tokenizer; load_tokenizer({str(byte_level_path)!r})"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- stop strings -----------------------------------------------------------------------------------------


def kept_by_brute_force(tokenizer: Tokenizer, stops: Sequence[str], token_ids: Sequence[int]) -> int | None:
    for count in range(1, len(token_ids) + 1):
        texts = tokenizer.decode(token_ids[:count]), tokenizer.decode_with_special(token_ids[:count])
        if any(stop in texts["<|end|>" in stop] for stop in stops):
            return count
    return None


def kept_in_steps(stop_strings: StopStrings, token_ids: Sequence[int], steps: Sequence[int]) -> int | None:
    """Feed ``token_ids`` in chunks of ``steps`` tokens, over and over, as a speculative engine does."""
    done = 0
    for size in cycle(steps):
        if done >= len(token_ids):
            return None
        kept = stop_strings.feed(token_ids[done : done + size])
        if kept is not None:
            return done + kept
        done += size
    return None


STOPS = st.lists(
    st.one_of(
        st.text(alphabet="ap S.\n\u00e9€日🙂", min_size=1, max_size=4),
        st.sampled_from(["Stop", "STOP", " apples", "\n\n", "€", "🙂🙃", "a", "süßen Tee", "each. Stop"]),
        st.sampled_from(["<|end|>", "<|end|>a", ".<|end|>\n", "€<|end|>", "<|end|><|end|>", " a<|end|>€"]),
    ),
    min_size=1,
    max_size=3,
)
ANY_STOPS = st.lists(
    st.text(alphabet="' \N{REPLACEMENT CHARACTER}t", min_size=1, max_size=3), min_size=1, max_size=2
)
STEPS = st.lists(st.integers(1, 5), min_size=1, max_size=40)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), stops=STOPS | ANY_STOPS, steps=STEPS)
@pytest.mark.parametrize("name", mostly_slow(["byte_level", "byte_fallback"], "byte_fallback"))
def test_random_tokens_stop_where_brute_force_stops(request, name, data, stops, steps):
    tokenizer = request.getfixturevalue(name)
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=60))
    expected = kept_by_brute_force(tokenizer, stops, token_ids)
    assert kept_in_steps(StopStrings(tokenizer, stops), token_ids, steps) == expected


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.sampled_from([*"a .é€日🙂", "t", "\x80", "\xe2", "\xf0\x9f", "<|end|>"]), max_size=14),
    stops=STOPS | ANY_STOPS,
    steps=STEPS,
)
@example(parts=["\x80", "'", " "], stops=[" "], steps=[3])  # the first byte spoils all that follow it
@example(parts=["a", " ", "\x80"], stops=[" "], steps=[3])
@example(parts=["\x80", "'", " "], stops=["\N{REPLACEMENT CHARACTER}" * 3], steps=[3])
@example(parts=["🙂", " ", "."], stops=[" ."], steps=[6])  # the window begins within the character
@example(parts=["\x80", "\n"], stops=["\N{REPLACEMENT CHARACTER}" * 2], steps=[2])
def test_bytes_stop_where_brute_force_stops(byte_fallback, parts, stops, steps):
    """Every character but ``t`` in byte tokens: whole characters, parts of some, and special tokens between them."""
    token_ids = ids_in_bytes(byte_fallback, parts)
    expected = kept_by_brute_force(byte_fallback, stops, token_ids)
    assert kept_in_steps(StopStrings(byte_fallback, stops), token_ids, steps) == expected


def ids_in_bytes(tokenizer: Tokenizer, parts: Sequence[str]) -> list[int]:
    ids = {value: token_id for token_id, value in tokenizer.byte_values.items()}
    whole = {part: tokenizer.encode_rendered(part)[-1:] for part in ("t", "<|end|>")}
    latin = {"\x80", "\xe2", "\xf0\x9f"}  # bytes that are no character
    return [
        token_id
        for part in parts
        for token_id in whole.get(part)
        or [ids[byte] for byte in part.encode("latin-1" if part in latin else "utf-8")]
    ]


def test_names_of_bytes_are_text_where_the_decoder_takes_them_for_it(byte_level, byte_fallback):
    assert len(byte_fallback.byte_values) == 256
    assert not byte_level.byte_values


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="ap Stop.\n\u00e9€日🙂", max_size=60), stops=STOPS, steps=STEPS)
@example(text="é日🙂€ a", stops=["€"], steps=[60])
@example(text="12 .", stops=[" ."], steps=[60])
@pytest.mark.parametrize("name", mostly_slow(["byte_level", "byte_fallback"], "byte_level"))
def test_text_stops_where_brute_force_stops(request, name, text, stops, steps):
    tokenizer = request.getfixturevalue(name)
    token_ids = tokenizer.encode_text(text)
    expected = kept_by_brute_force(tokenizer, stops, token_ids)
    stop_strings = StopStrings(tokenizer, stops)
    kept = kept_in_steps(stop_strings, token_ids, steps)
    assert kept == expected

    generated, shown = tokenizer.decode(token_ids[:kept]), stop_strings.text(token_ids[:kept])
    assert not any(stop in shown for stop in stops)
    assert generated == shown if kept is None else generated.removeprefix(shown).startswith(tuple(stops))


def test_the_text_is_cut_before_the_first_of_several_stops(byte_level):
    stop_strings = StopStrings(byte_level, ["3 bags", "12", "buys"])
    assert stop_strings.text(byte_level.encode_text(TEXT[0])) == "Tom has "


@pytest.mark.parametrize(
    ("written", "stop", "end", "text"),
    [
        ("It is 8.<|end|>more", "<|end|>", "It is 8.<|end|>", "It is 8."),
        ("It is 8.<|end|>\nmore", "<|end|>\n", "It is 8.<|end|>\n", "It is 8."),
        ("a<|end|>b<|end|>\nmore", "<|end|>\n", "a<|end|>b<|end|>\n", "ab"),
        ("It is 8 €.<|end|>more", " €.<|end|>", "It is 8 €.<|end|>", "It is 8"),
        ("🙂🙃€<|end|>more", "€<|end|>", "🙂🙃€<|end|>", "🙂🙃"),
        ("<|end|><|end|>more", "<|end|><|end|>", "<|end|><|end|>", ""),
        ("each. Stop<|end|>", "op<|end|>", "each. Stop<|end|>", "each. St"),
        ("St<|end|>op", "Stop", "St<|end|>op", ""),  # as in the text that is shown
    ],
)
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_a_stop_string_may_name_a_special_token(request, name, written, stop, end, text):
    tokenizer = request.getfixturevalue(name)
    # of SentencePiece in bytes, as it would put a space behind each special token
    in_bytes = partial(ids_in_bytes, tokenizer)
    encode = (
        tokenizer.encode_rendered
        if name == "byte_level"
        else lambda text: in_bytes(re.split(r"(<\|end\|>)", text))
    )
    token_ids, kept = encode(written), encode(end)
    assert StopStrings(tokenizer, [stop]).feed(token_ids) == len(kept)
    assert StopStrings(tokenizer, [stop]).text(kept) == text
    assert StopStrings(tokenizer, [stop]).text(token_ids) == text


def test_special_tokens_do_not_hide_a_stop_string(byte_level):
    spread = [token_id for piece in byte_level.encode_text("Stop")[1:] for token_id in (*[4] * 9, piece)]
    assert byte_level.decode_with_special(spread[:2]) == "<|end|>" * 2
    assert StopStrings(byte_level, ["Stop"]).feed(spread) == len(spread)


def test_without_stops_nothing_is_decoded(byte_level, monkeypatch):
    monkeypatch.setattr(Tokenizer, "decode", lambda *_: pytest.fail("decoded"))
    assert StopStrings(byte_level, []).feed([1, 2, 300]) is None


def test_the_work_per_token_does_not_grow_with_the_text(byte_level_path, monkeypatch):
    byte_level = load_tokenizer(str(byte_level_path))  # what it knows of tokens is not true elsewhere
    lengths = []

    def decode(token_ids):
        lengths.append(len(token_ids))
        return "\N{REPLACEMENT CHARACTER}" * len(token_ids)  # the case with the most decoding

    monkeypatch.setattr(byte_level, "decode", decode)
    assert StopStrings(byte_level, ["12345678"]).feed(list(range(6, 300))) is None
    assert max(lengths) <= 8 + 4
    assert len(lengths) <= (4 + 1) * 294, "the window, and each token once by itself"


def test_nothing_is_decoded_after_a_token_that_ends_no_stop(tokenizer, monkeypatch):
    token_ids = tokenizer.encode_text(TEXT[0])[1:]
    stops = ["Question:", "</s>", "<|im_end|>"]
    assert StopStrings(tokenizer, stops).feed(token_ids) is None
    monkeypatch.setattr(Tokenizer, "decode", lambda *_: pytest.fail("decoded"))
    assert StopStrings(tokenizer, stops).feed(token_ids) is None


# --- chat templates ---


@pytest.mark.parametrize(
    ("template", "system", "user"),
    [
        ("{{ m.content }}", "A B", "Add:   3 and\n 4"),
        ("{{ '' + m.content }}", "A B", "Add:   3 and\n 4"),  # no string and list together
        ("{{ m.content | tojson }}", '"A B"', '"Add:   3 and\\n 4"'),
        ("{{ m.content if m.content is string else m.content[0].text }}", "A B", "Add:   3 and\n 4"),
        (READ_PARTS, "[A][B]", "[Add: ][ 3 and\n][4]"),
        (
            "{% if m.role == 'system' %}{{ m.content | trim }}{% else %}" + READ_PARTS + "{% endif %}",
            "A B",
            None,
        ),
    ],
)
def test_parts_are_read_by_the_template_or_joined(tmp_path, template, system, user):
    loop = "{% for m in messages %}" + template + "|{% endfor %}"
    tokenizer = load_tokenizer(str(write_byte_level(tmp_path, chat_template=loop)))
    chat = [
        Message(role="system", content=("A", "B")),
        Message(role="user", content=("Add: ", " 3 and\n", "4")),
        Message(role="assistant", content="7"),
        Message(role="user", content=["Thanks"]),
    ]
    told, asked, answered, thanked, _ = tokenizer.render_chat(chat).split("|")
    assert (told, asked) == (system, user or "[Add: ][ 3 and\n][4]")
    assert answered.strip('"') == "7"
    assert thanked.strip('"[]') == "Thanks"


def test_parts_are_rendered_as_by_transformers(tmp_path):
    loop = "{% for m in messages %}" + READ_PARTS + "{% endfor %}"
    path = write_byte_level(tmp_path, chat_template=loop)
    parts = [{"type": "text", "text": "Add: "}, {"type": "text", "text": "3"}]
    theirs = reference_tokenizer(path).apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    assert load_tokenizer(str(path)).render_chat([Message(role="user", content=("Add: ", "3"))]) == theirs


USER = [Message(role="user", content="Why?")]
DAY = datetime(2026, 3, 7)


def rendered(path: Path, template: str, **kwargs: Any) -> str:
    tokenizer = load_tokenizer(str(write_byte_level(path, chat_template=template)))
    return tokenizer.with_template_kwargs(TemplateKwargs.of(kwargs)).render_chat(USER)


def test_kwargs_reach_the_template(tmp_path: Path) -> None:
    own = load_tokenizer(str(write_harmony(tmp_path)))
    assert "Effort: medium" in own.render_chat(USER)
    low = own.with_template_kwargs(TemplateKwargs.of({"reasoning_effort": "low"}))
    assert "Effort: low" in low.render_chat(USER)
    assert "Effort: low" in low.render_open_chat([*USER, Message(role="assistant", content="So")])
    assert "Effort: medium" in own.render_chat(USER), "the first is not changed"
    again = low.with_template_kwargs(TemplateKwargs.of({"strftime_now": "2026-03-07"}))
    assert "Date: 2026-03-07. Effort: medium" in again.render_chat(USER), "they are replaced, not added"
    think = load_tokenizer(str(write_think(tmp_path / "think")))
    off = think.with_template_kwargs(TemplateKwargs.of({"enable_thinking": False}))
    assert off.render_chat(USER) == think.render_chat(USER) + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    "template",
    [
        HARMONY_TEMPLATE,
        "{{ strftime_now('%d %b %Y') }}",
        '{{ strftime_now("%A, %-d. %B %Y, %H:%M:%S, week %V; %x|%y|%j|%e") }}',
        "\n  {% if strftime_now is defined %}\n  {% set day = strftime_now('%d %b %Y') %}\n{% endif %}\n {{ day }}!\n",
        "{%- for message in messages %}{{ message.content ~ strftime_now('plain %m') }}\n{% endfor %}",
        "{{ strftime_now('') }}|{{ strftime_now('no directive') }}",
    ],
)
def test_the_pinned_date_is_written_as_transformers_writes_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return DAY

    pinned = rendered(tmp_path, template, strftime_now="2026-03-07")
    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    expected = load_tokenizer(str(tmp_path)).render_chat(USER)
    assert pinned == expected
    assert (rendered(tmp_path, template, strftime_now="2027-12-08") == expected) is (
        "no directive" in template
    )


def test_a_template_without_a_date_is_left_alone(tmp_path: Path) -> None:
    assert pin_date(TEMPLATE, "2026-03-07") == TEMPLATE
    assert pin_date(HARMONY_TEMPLATE, None) == HARMONY_TEMPLATE
    assert not calls_for_date(write_byte_level(tmp_path / "plain"))
    assert not calls_for_date(tmp_path / "nothing")
    assert calls_for_date(write_harmony(tmp_path / "dated"))
    assert rendered(tmp_path, TEMPLATE, strftime_now="2026-03-07") == rendered(tmp_path, TEMPLATE)


def test_a_directive_that_is_not_known_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"refuses these messages \(strftime_now has no %Q\)"):
        rendered(tmp_path, "{{ strftime_now('%Q') }}", strftime_now="2026-03-07")


def test_names_that_the_template_does_not_use_are_refused(tmp_path: Path) -> None:
    template = "{% generation %}{{ bos_token }}{{ messages[0].content | tojson }}{% endgeneration %}"
    with refused(r"has enable_thinkng, which .* does not use: the names in it are none"):
        rendered(tmp_path, template, enable_thinkng=False)
    tokenizer = load_tokenizer(str(write_think(tmp_path)))
    with pytest.raises(UserError, match=r"has low, which .*: the names in it are enable_thinking, opens$"):
        tokenizer.with_template_kwargs(TemplateKwargs.of({"low": 1, "enable_thinking": True}))
    bare = load_tokenizer(str(write_byte_level(tmp_path / "bare", chat_template=None)))
    with pytest.raises(UserError, match="no chat template"):
        bare.with_template_kwargs(TemplateKwargs.of({"low": 1}))
    assert bare.with_template_kwargs(TemplateKwargs()).encode_text("a") == bare.encode_text("a")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("{", "chat-template-kwargs is '{'"),
        ("[1]", "chat-template-kwargs is '[1]': write one JSON object"),
        ("3", "write one JSON object"),
        ('{"a": NaN}', "write one JSON object"),
        ('{"a": "\\ud800"}', "write one JSON object"),
        ('{"messages": [], "tools": 1}', "has messages, tools, which specgen sets itself: remove it"),
        ('{"add_generation_prompt": true}', "has add_generation_prompt, which"),
        ('{"strftime_now": "31.1.2026"}', "has strftime_now '31.1.2026': give the date as 2026-01-31"),
        ('{"strftime_now": "20260131"}', "give the date as 2026-01-31"),
        ('{"strftime_now": 3}', "has strftime_now 3: give"),
        ({"a": {1, 2}}, "write one JSON object"),
    ],
)
def test_what_is_no_object_of_the_users_is_refused_in_one_line(asked: Any, reason: str) -> None:
    with refused(r"^chat-template-kwargs") as caught:
        EngineConfig(model="a", drafter="b", chat_template_kwargs=asked)
    assert reason in str(caught.value)


def test_equal_kwargs_are_equal_configurations() -> None:
    given = {"b": [1], "a": {"x": None}}
    config = EngineConfig(model="a", drafter="b", chat_template_kwargs=given)
    given["b"].append(2)  # type: ignore[union-attr]
    other = replace(config, chat_template_kwargs='{"a": {"x": null}, "b": [1]}')
    assert config == other
    assert hash(config) == hash(other)
    assert config.to_json()["chat_template_kwargs"] == {"a": {"x": None}, "b": [1]}
    assert config.template_kwargs.with_date("2026-03-07").values["strftime_now"] == "2026-03-07"
    dated = TemplateKwargs.of({"strftime_now": "2026-01-01"})
    assert dated.with_date("2026-03-07") == dated, "the user's own date"
