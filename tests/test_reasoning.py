"""Reasoning and answer of generated tokens, against splitting the written-out text; stop strings in the answer."""

import random
from collections.abc import Sequence as Items
from pathlib import Path

import pytest

from specgen.config import SamplingParams, TemplateKwargs
from specgen.core.sequence import Request, Sequence
from specgen.text.reasoning import PartFinder, Parts, new_reader, part_finder, split, stop_finder
from specgen.text.tokenizer import Message, StopStrings, Tokenizer, load_tokenizer
from tests.tiny_tokenizers import (
    CHANNEL,
    HARMONY,
    THINK,
    write_byte_level,
    write_channel,
    write_harmony,
    write_think,
)

THINKING = TemplateKwargs.of({"enable_thinking": True})
MARKERS = {"harmony": HARMONY, "think": THINK, "channel": CHANNEL[4:]}
USER = [Message(role="user", content="Why <think> 3?")]


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(write_harmony(tmp_path_factory.mktemp("harmony"))))


@pytest.fixture(scope="module")
def think(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(write_think(tmp_path_factory.mktemp("think"))))


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(write_channel(tmp_path_factory.mktemp("channel"))))


def parts(tokenizer: Tokenizer, prompt: str, text: str) -> tuple[str | None, str]:
    """Reasoning and answer of ``text`` after ``prompt``."""
    found = split(tokenizer, tokenizer.encode_rendered(prompt), tokenizer.encode_rendered(text))
    return found.reasoning, tokenizer.decode(found.answer)


def analysis(text: str, name: str = "analysis") -> str:
    return f"<|channel|>{name}<|message|>{text}"


NEXT = "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        (analysis("3 + 5") + NEXT + analysis("It is 8.", "final") + "<|return|>", "3 + 5", "It is 8."),
        (analysis("It is 8.", "final") + "<|return|>", None, "It is 8."),
        (analysis("a") + NEXT + analysis("b") + NEXT + analysis("c", "final"), "a\nb", "c"),
        (
            analysis("a") + NEXT + analysis("note", "commentary") + NEXT + analysis("c", "final"),
            "a\nnote",
            "c",
        ),
        (
            analysis("a") + NEXT + " to=f" + analysis("{}", "commentary<|constrain|>json") + "<|call|>",
            "a\n{}",
            "",
        ),
        (analysis("a") + NEXT + analysis("{}", "final <|constrain|>json") + "<|return|>", "a", "{}"),
        (analysis("a") + "<|end|>" + analysis("b", "final"), "a", "b"),
        (analysis("a") + analysis("b", "final"), "a", "b"),
        (analysis("a") + NEXT + "<|message|>b", "a", "b"),
        (analysis("a") + "<|end|><|start|>user<|message|>b", "a\nb", ""),
        (analysis("a", "final") + NEXT + analysis("b") + NEXT + analysis("c", "final"), "b", "ac"),
        # cut short, everywhere
        (analysis("3 +"), "3 +", ""),
        (analysis("3") + NEXT + "<|channel|>fin", "3", ""),
        (analysis("3") + NEXT + analysis("It", "final"), "3", "It"),
        ("<|channel|>ana", None, ""),
        # without a channel
        ("It is 8.", None, "It is 8."),
        ("<|message|>It is 8.<|return|>", None, "It is 8."),
        ("", None, ""),
    ],
)
def test_harmony(harmony: Tokenizer, text: str, reasoning: str | None, answer: str) -> None:
    assert parts(harmony, harmony.render_chat(USER), text) == (reasoning, answer)


def test_a_harmony_prompt_may_open_a_message_and_raw_text_has_none(harmony: Tokenizer) -> None:
    prompt = harmony.render_chat(USER)
    assert parts(harmony, prompt + analysis("", "final"), "8.<|return|>") == (None, "8.")
    assert parts(harmony, prompt + analysis(""), "8.<|end|>") == ("8.", "")
    assert parts(harmony, "raw", "text") == (None, "text")
    assert parts(harmony, "raw", "text" + analysis("a") + NEXT + analysis("b", "final")) == ("a", "textb")


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "answer"),
    [
        ("?", "<think>\n3 + 5\n</think>\n\nIt is 8.<|end|>", "3 + 5", "It is 8."),
        ("?<think>\n", "3 + 5\n</think>\n\nIt is 8.", "3 + 5", "It is 8."),
        ("?<think>", "3 + 5</think>It is 8.", "3 + 5", "It is 8."),
        ("?<think>\n\n</think>\n\n", "It is 8.", None, "It is 8."),
        ("a <think> b?", "It is 8.", None, "It is 8."),
        ("?", "<think>\n\n</think>\n\nIt is 8.\n\n", "", "It is 8.\n\n"),
        ("?", "It is 8.\n", None, "It is 8.\n"),
        ("?", "\n\nIt is 8.", None, "\n\nIt is 8."),
        ("?", "<think>\n3 +", "3 +", ""),
        ("?", "<think>3<|end|>", "3", ""),
        ("?", "<think>3</think>", "3", ""),
        ("?", "<think>3</think>\n \n", "3", ""),
        ("?", "<think>a</think>b <think>c</think>d", "a", "b <think>c</think>d"),
        ("?", "It </think> is", None, "It </think> is"),
        ("?<think>", "a <think> b</think>c", "a <think> b", "c"),
    ],
)
def test_think(think: Tokenizer, prompt: str, text: str, reasoning: str | None, answer: str) -> None:
    assert parts(think, prompt, text) == (reasoning, answer)


THOUGHT = "<|channel>thought\n"


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "answer"),
    [
        ("?", f"{THOUGHT}3 + 5<channel|>It is 8.<turn|>", "3 + 5", "It is 8."),
        ("?", f"{THOUGHT}3\n+ 5\n<channel|>\n\nIt is\n8.", "3\n+ 5", "It is\n8."),
        ("?", f"{THOUGHT}<channel|>It is 8.", None, "It is 8."),
        ("?", "<|channel><channel|>It is 8.", None, "It is 8."),
        ("?", "It is 8.\n", None, "It is 8.\n"),
        ("?", f"{THOUGHT}3 +", "3 +", ""),
        ("?", "<|channel>tho", None, ""),
        ("?", f"{THOUGHT}3<turn|>", "3", ""),
        ("?", f"{THOUGHT}a<channel|>b {THOUGHT}c<channel|>d", "a\nc", "b d"),
        ("?", "It <channel|>is", None, "It is"),
        (f"?{THOUGHT}<channel|>", "It is 8.", None, "It is 8."),
        (f"?{THOUGHT}<channel|>", f"{THOUGHT}3<channel|>8.", "3", "8."),
        (f"?{THOUGHT}", "3 + 5<channel|>8.", "3 + 5", "8."),
        ("?<|channel>", "thought\n3<channel|>8.", "3", "8."),
        (f"what is {THOUGHT} here?", "8.", None, "8."),
    ],
)
def test_channels(channel: Tokenizer, prompt: str, text: str, reasoning: str | None, answer: str) -> None:
    assert parts(channel, prompt, text) == (reasoning, answer)


def test_thinking_is_an_argument_of_the_template(channel: Tokenizer) -> None:
    """Without it the prompt has an empty thought, and the answer begins."""
    text = "3 + 5<channel|>8."
    off, on = (channel.with_template_kwargs(kwargs) for kwargs in (TemplateKwargs(), THINKING))
    assert off.render_chat(USER).endswith(f"<|turn>model\n{THOUGHT}<channel|>")
    assert parts(off, off.render_chat(USER), "8.<turn|>") == (None, "8.")
    assert "<|think|>" in on.render_chat(USER)
    assert parts(on, on.render_chat(USER), THOUGHT + text) == ("3 + 5", "8.")


def test_a_raw_text_begins_with_what_the_model_needs(channel: Tokenizer, think: Tokenizer) -> None:
    bos = channel.added_token_id("<bos>")
    assert channel.encode_rendered("Tom")[0] != bos
    assert channel.encode_text("Tom") == [bos, *channel.encode_rendered("Tom")]
    assert channel.encode_text("<bos>Tom") == channel.encode_text("Tom")
    assert channel.encode_text("") == [bos]
    assert think.encode_text("Tom") == [think.bos_token_id, *think.encode_rendered("Tom")]


def test_the_tokens_decide(tmp_path: Path, harmony: Tokenizer, think: Tokenizer, channel: Tokenizer) -> None:
    plain = load_tokenizer(str(write_byte_level(tmp_path)))
    ids = plain.encode_rendered("<think>3</think>It is 8.")
    assert new_reader(plain, []) is None
    assert part_finder(plain, []) is None
    assert split(plain, [], ids) == Parts(reasoning=None, num_reasoning_tokens=0, answer=tuple(ids))
    half = load_tokenizer(str(write_byte_level(tmp_path, special=HARMONY[:2], added=THINK[:1])))
    assert new_reader(half, []) is None
    assert len({type(new_reader(each, [])) for each in (harmony, think, channel)}) == 3


def random_texts(tokenizer: Tokenizer, markers: Items[str], count: int) -> list[list[int]]:
    """Token ids with markers anywhere, mostly in no sensible order."""
    rng = random.Random(0)
    pieces = [*markers, "assistant", "final", "analysis", "Tom", " has", "\n", "."]
    return [
        tokenizer.encode_rendered("".join(rng.choices(pieces, k=rng.randint(0, 30)))) for _ in range(count)
    ]


@pytest.mark.parametrize("name", MARKERS)
def test_every_token_has_a_part_and_changes_are_found_in_any_steps(
    name: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    rng = random.Random(1)
    prompt = tokenizer.encode_rendered(tokenizer.render_chat(USER))
    for ids in random_texts(tokenizer, MARKERS[name], 300):
        reader = new_reader(tokenizer, prompt)
        expected = [reader.read(token)[0] for token in ids]
        finder, labels, at = part_finder(tokenizer, prompt), ["answer"], 0
        assert isinstance(finder, PartFinder)
        found: dict[int, str] = {}
        while at < len(ids):
            size = rng.randint(1, 5)
            found |= {at + index: part for index, part in finder.feed(ids[at : at + size])}
            at += size
        for position in range(len(ids)):
            labels.append(found.get(position, labels[-1]))
        assert labels[1:] == expected
        parts = split(tokenizer, prompt, ids)
        assert parts.num_reasoning_tokens == expected.count("reasoning")
        assert len(parts.answer) <= expected.count("answer")
        assert parts.reasoning is None or parts.num_reasoning_tokens > 0


def test_markers_belong_to_the_reasoning_and_an_end_token_to_its_message(harmony: Tokenizer) -> None:
    text = analysis("a") + NEXT + analysis("b", "final") + "<|return|>"
    ids = harmony.encode_rendered(text)
    prompt = harmony.encode_rendered(harmony.render_chat(USER))
    finder = part_finder(harmony, prompt)
    num_answer = len(harmony.encode_rendered("b<|return|>"))
    assert finder.feed(ids) == [(0, "reasoning"), (len(ids) - num_answer - 1, "answer")], (
        "with its <|message|>"
    )
    assert split(harmony, prompt, ids).num_reasoning_tokens == len(ids) - num_answer - 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("harmony", analysis("Stop here. STOP") + NEXT + analysis("Stop. STOP and more", "final")),
        ("think", "<think>\nStop here. STOP\n</think>\n\nStop. STOP and more"),
        ("channel", f"{THOUGHT}Stop here. STOP\n<channel|>\n\nStop. STOP and more"),
    ],
)
def test_stop_strings_are_those_of_the_answer(name: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    prompt = tokenizer.encode_rendered(tokenizer.render_chat(USER))
    ids = tokenizer.encode_rendered(text)
    end = len(tokenizer.encode_rendered(text[: text.rindex("STOP") + len("STOP")]))
    for stops in (["STOP"], ["here", "STOP"]):
        assert stop_finder(tokenizer, stops, prompt).feed(ids) == end
    assert stop_finder(tokenizer, ["here"], prompt).feed(ids) is None
    assert stop_finder(tokenizer, ["\n\n"], prompt).feed(ids) is None, "before the answer"


def test_a_stop_string_may_name_the_end_of_the_answer(harmony: Tokenizer) -> None:
    """Not of the reasoning, which ends with the same token."""
    prompt = harmony.encode_rendered(harmony.render_chat(USER))
    ids = harmony.encode_rendered(analysis("a 8") + NEXT + analysis("It is 8", "final") + "<|end|><|start|>")
    for stop in ("<|end|>", " 8<|end|>"):
        assert stop_finder(harmony, [stop], prompt).feed(ids) == len(ids) - 1
        text = StopStrings(harmony, [stop]).text(split(harmony, prompt, ids[:-1]).answer)
        assert text == "It is 8".removesuffix(stop.removesuffix("<|end|>"))


def test_a_stop_string_ends_any_text_without_parts(think: Tokenizer) -> None:
    ids = think.encode_rendered("It is 8. STOP")
    assert stop_finder(think, ["STOP"], []).feed(ids) == len(ids)


@pytest.mark.parametrize(
    ("max_length", "step", "kept", "changes"),
    [
        (50, "closes 9", 2, [(3, "answer")]),
        (50, "9 4 closes 9", 2, []),  # a step may go on behind the end token
        (5, "9 closes 9", 2, []),  # or beyond the limit
    ],
)
def test_what_is_dropped_at_the_end_of_a_text_changes_no_part(
    think: Tokenizer, max_length: int, step: str, kept: int, changes: list[tuple[int, str]]
) -> None:
    opens, closes = (think.encode_rendered(marker)[0] for marker in THINK)
    sequence = Sequence(
        request=Request(id="a", prompt_token_ids=(7,), sampling=SamplingParams()),
        tokens=[7],
        max_length=max_length,
        seed=0,
        eos_token_ids=frozenset([4]),
        parts=part_finder(think, []),
    )
    assert sequence.append([opens, 9]) == 2
    assert sequence.append([closes if each == "closes" else int(each) for each in step.split()]) == kept
    assert sequence.switches == [(0, "reasoning"), *changes]
