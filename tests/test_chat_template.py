"""What the user hands to chat templates, and the date that they see, against transformers' own rendering."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from specgen.config import EngineConfig, TemplateKwargs, UserError
from specgen.text.chat_template import calls_for_date, pin_date
from specgen.text.tokenizer import Message, load_tokenizer
from tests.tiny_tokenizers import HARMONY_TEMPLATE, TEMPLATE, write_byte_level, write_harmony, write_think

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
    with pytest.raises(
        UserError, match=r"has enable_thinkng, which .* does not use: the names in it are none"
    ):
        rendered(tmp_path, template, enable_thinkng=False)
    tokenizer = load_tokenizer(str(write_think(tmp_path)))
    with pytest.raises(UserError, match=r"has low, which .*: the names in it are enable_thinking, opens$"):
        tokenizer.with_template_kwargs(TemplateKwargs.of({"low": 1, "enable_thinking": True}))
    bare = load_tokenizer(str(write_byte_level(tmp_path / "bare", chat_template=None)))
    with pytest.raises(UserError, match="no chat template"):
        bare.with_template_kwargs(TemplateKwargs.of({"low": 1}))
    assert bare.with_template_kwargs(TemplateKwargs()).encode_text("a") == bare.encode_text("a")


def test_a_broken_template_is_refused_where_it_is_needed(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_byte_level(tmp_path, chat_template="{% if %}")))
    assert tokenizer.encode_text("a")  # rows of raw text need none
    with pytest.raises(UserError, match="the chat template cannot be compiled"):
        tokenizer.with_template_kwargs(TemplateKwargs.of({"a": 1}))
    with pytest.raises(UserError, match="the chat template cannot be compiled"):
        tokenizer.render_chat(USER)


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
    with pytest.raises(UserError, match=r"^chat-template-kwargs") as caught:
        EngineConfig(model="a", drafter="b", chat_template_kwargs=asked)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


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
