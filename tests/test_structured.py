"""Structured outputs: what is compiled against other readers of it, and answers of engines that fit."""

import json
import os
import random
import re
import subprocess
from concurrent.futures import Future
from dataclasses import replace
from decimal import Decimal
from itertools import count, product
from threading import Event
from time import process_time
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import numpy as np
import pytest
import torch
from torch import Tensor

from specgen import SamplingParams, StructuredOutputs, UserError
from specgen.core.engine_core import Incoming
from specgen.core.sequence import Request
from specgen.decoding.automaton_tables import Tables
from specgen.decoding.sampling import SamplingBatch
from specgen.engine import build
from specgen.ops.reference import torch_ops
from specgen.text import constraints
from specgen.text.answer_automaton import Answer, byte_automaton, compiled, compiled_apart
from specgen.text.automaton import Automaton, ByteAutomaton, Thoughts, TokenBytes, without
from specgen.text.constraints import Constraints
from specgen.text.json_schema import json_object_regex, json_regex
from specgen.text.tokenizer import load_tokenizer
from tests.commands import printed, refused, rows, specgen, write_rows
from tests.engines import Outputs, Pair, bundled_requests, engine_of, generate, page_bytes
from tests.structured_fuzz import PYDANTIC, fits, pydantic_schema, regex, schema, walks
from tests.structured_fuzz import asked as random_asked
from tests.tiny_tokenizers import (
    write_byte_fallback,
    write_byte_level,
    write_channel,
    write_harmony,
    write_think,
)
from tests.waiting import LIMIT

pytestmark = pytest.mark.xdist_group("structured")
MANY = int(os.environ.get("SPECGEN_FUZZ", "200"))  # answers of the long fuzz


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for every constraint takes most of a second; tests of that have it."""
    monkeypatch.setattr(constraints, "compiled_apart", compiled)


def takes(automaton: ByteAutomaton, text: str) -> bool:
    state = 0
    for value in text.encode():
        state = int(automaton.successors[state, value])
        if state < 0:
            return False
    return bool(automaton.final[state])


# --- expressions and schemas -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_an_expression_takes_what_it_matches_as_a_whole(seed: int) -> None:
    rng, num_taken = random.Random(seed), 0
    for _ in range(10):
        pattern = regex(rng)
        automaton = byte_automaton(StructuredOutputs(regex=pattern))
        for _ in range(60):
            text = "".join(rng.choices("abcxyes-.é09 ", k=rng.randint(0, 6)))
            expected = re.fullmatch(pattern, text) is not None
            assert takes(automaton, text) == expected, (pattern, text)
            num_taken += expected
    assert num_taken


@pytest.mark.parametrize(
    "pattern", ["a|ab", "(?:|a)", "a??b??", "^yes$", "^a|b$", "^a$|^yes$|b", "yes|yes please", r"a\$"]
)
def test_the_first_of_two_alternatives_is_not_preferred(pattern: str) -> None:
    automaton = byte_automaton(StructuredOutputs(regex=pattern))
    for text in ("", "a", "b", "ab", "yes", "yes please", "a$"):
        assert takes(automaton, text) == (re.fullmatch(pattern, text) is not None), text


def test_anchors_at_the_ends_say_nothing() -> None:
    for pattern in ("^ab$", r"\Aab\z", r"ab\\z", r"ab\\$"):
        automaton = byte_automaton(StructuredOutputs(regex=pattern))
        expected = {r"ab\\z": "ab\\z", r"ab\\$": "ab\\"}.get(pattern, "ab")
        assert [takes(automaton, text) for text in (expected, "a", "abz", "ab$")] == [True, *[False] * 3]


def test_an_expression_of_any_characters_does_not_double_with_each() -> None:
    before = process_time()
    automaton = byte_automaton(StructuredOutputs(regex="[^,]{18}"))
    assert process_time() - before < 2  # 5 s, if a text were looked for at every byte
    assert [takes(automaton, "é" * size) for size in (17, 18, 19)] == [False, True, False]


@pytest.mark.parametrize(
    "pattern", [r"\P{L}", r"\p{P}", r"\pP", "[[:alpha:]!-~]", r"\x5c|a", r"\u0022|a", r"\u{22}|a"]
)
def test_a_pattern_makes_no_string_that_is_no_json(pattern: str) -> None:
    automaton = byte_automaton(StructuredOutputs(json={"type": "string", "pattern": pattern}))
    texts = [f'"{character}"' for character in map(chr, range(128)) if takes(automaton, f'"{character}"')]
    assert texts
    assert all(json.loads(text) == text[1:-1] for text in texts)


def test_choices_may_begin_alike() -> None:
    automaton = byte_automaton(StructuredOutputs(choice=["no", "none", "ñ", " no"]))
    texts = ("no", "none", "ñ", " no", "non", "", "n", "nones", "\xf1"[:0] + "m")
    assert [takes(automaton, text) for text in texts] == [True] * 4 + [False] * 5


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b c"]}, "maxItems": 2},
        "note": {"$ref": "#/$defs/note"},
    },
    "required": ["name", "age"],
    "$defs": {"note": {"type": ["string", "null"], "description": "whatever"}},
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "A", "age": 7}', True),
        ('{"name":"A","age":130,"tags":["a", "b c"],"note":null}', True),
        ('{"name": "A\\"\\n", "age": 0, "note": "x"}', True),
        ('{"name": "A", "age": 131}', False),
        ('{"name": "A", "age": 07}', False),
        ('{"name": "A", "age": -1}', False),
        ('{"age": 7, "name": "A"}', False),
        ('{"name": "A"}', False),
        ('{"name": "A", "age": 7, "tags": ["a", "a", "a"]}', False),
        ('{"name": "A", "age": 7, "other": 1}', False),
        ('{"name": "012345678901234567890", "age": 7}', False),
        ('{"name": "A", "age": 7,}', False),
        ('{"name": "A\n", "age": 7}', False),
        ('{"name": "A", "age": 7} ', False),
    ],
)
def test_texts_of_a_schema(text: str, expected: bool) -> None:
    assert bool(re.fullmatch(json_regex(json.dumps(SCHEMA)), text)) == expected


@pytest.mark.parametrize("seed", range(40))
def test_whole_numbers_within_bounds(seed: int) -> None:
    rng = random.Random(seed)
    low = rng.choice((0, -1, 1, rng.randint(-1100, 1100)))
    high = low + rng.choice((0, 1, 9, rng.randint(0, 2000)))
    pattern = re.compile(json_regex(json.dumps({"type": "integer", "minimum": low, "maximum": high})))
    for value in range(low - 120, high + 120):
        assert bool(pattern.fullmatch(str(value))) == (low <= value <= high), value
    number = re.compile(json_regex(json.dumps({"type": "number", "minimum": low, "maximum": high})))
    for value in (low, high, low + 0.25, high - 0.5, low - 0.25, high + 0.5, low - 1, high + 1):
        assert bool(number.fullmatch(f"{value:g}")) == (low <= value <= high), value


@pytest.mark.parametrize("seed", range(20))
def test_numbers_within_bounds_of_decimals(seed: int) -> None:
    """Also as readers round them: no text is taken for which they would see another number than the text has."""
    rng = random.Random(seed)
    low = rng.choice((0.0, rng.randint(-5000, 5000) / 10 ** rng.randint(0, 4)))
    high = low + rng.choice((0.001, 0.5, 1, rng.random(), 300.25))
    names = rng.choice(("minimum", "exclusiveMinimum")), rng.choice(("maximum", "exclusiveMaximum"))
    schema = {"type": "number"} | dict(zip(names, (low, round(high, 6)), strict=True))
    pattern = re.compile(json_regex(json.dumps(schema)))
    num_taken = 0
    for _ in range(2000):
        near = Decimal(repr(rng.choice((low, schema[names[1]], 0.0, (low + high) / 2))))
        written = f"{near + rng.choice((-1, 0, 1, 7)) * Decimal(10) ** -rng.randint(0, 16):f}"
        value, taken = float(written), bool(pattern.fullmatch(written))
        fits = not [*jsonschema.Draft202012Validator(schema).iter_errors(value)]
        assert not taken or fits, (schema, written)
        behind = written.partition(".")[2]
        if len(behind) <= 11 and not (value == 0 and written[0] == "-"):
            assert taken == fits, (schema, written)
        num_taken += taken
    assert num_taken > 100


COUNTED = [  # a schema of strings with lengths, and a pattern that says the same
    ({"pattern": "^[a-zé]+$", "maxLength": 3}, "[a-zé]{1,3}"),
    ({"pattern": "^[a-zé]*$", "minLength": 2}, "[a-zé]{2,}"),
    ({"pattern": "^a*(-a+)*$", "minLength": 2, "maxLength": 3}, "aaa?|-aa?|a-a"),
    ({"pattern": "^(aé|b)*$", "minLength": 3, "maxLength": 3}, "aéb|baé|bbb"),
    ({"pattern": "^a*$", "maxLength": 0}, ""),
    ({"pattern": "^a|aa|aaa$", "minLength": 1, "maxLength": 2}, "aa?"),
]


@pytest.mark.parametrize(("schema", "pattern"), COUNTED)
def test_a_pattern_beside_lengths(schema: dict[str, Any], pattern: str) -> None:
    """Alone, and beside another string that begins alike."""
    alone = byte_automaton(StructuredOutputs(json={"type": "string", **schema}))
    other = {"type": "string", "pattern": "^aaaa$", "maxLength": 9}
    both = byte_automaton(StructuredOutputs(json={"anyOf": [{"type": "string", **schema}, other]}))
    texts = ["".join(each) for size in range(5) for each in product("aéb-", repeat=size)]
    for text in texts:
        fits = re.fullmatch(pattern, text) is not None
        assert takes(alone, f'"{text}"') == fits, text
        assert takes(both, f'"{text}"') == (fits or text == "aaaa"), text


def test_a_set_has_each_listed_value_once_in_any_order() -> None:
    schema = {
        "type": "array",
        "uniqueItems": True,
        "items": {"$ref": "#/$defs/C"},
        "minItems": 1,
        "maxItems": 2,
    }
    schema |= {"$defs": {"C": {"enum": ["a", "b", "c", 7], "type": "string"}}}
    pattern = re.compile(json_regex(json.dumps(schema)))
    for size in range(4):
        for values in product("abc", repeat=size):
            fits = 0 < size < 3 and len({*values}) == size
            assert bool(pattern.fullmatch(json.dumps(values))) == fits, values
    assert not pattern.fullmatch("[7]")
    assert not pattern.fullmatch('["a", ]')


@pytest.mark.parametrize("annotation", PYDANTIC)
def test_walks_over_schemas_of_pydantic_write_what_fits(annotation: str) -> None:
    rng, asked = random.Random(annotation), StructuredOutputs(json=pydantic_schema(annotation))
    automaton = byte_automaton(asked)
    texts = walks(rng, automaton, rng.choices((0, 10, 20, 60), k=40))
    assert all(fits(asked, text) for text in texts), texts
    assert len({*texts}) > 5


@pytest.mark.parametrize("seed", range(4))
def test_walks_over_random_schemas_write_what_fits(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(15):
        asked = StructuredOutputs(json=schema(rng))
        automaton = byte_automaton(asked)
        texts = walks(rng, automaton, rng.choices((0, 10, 60), k=5))
        assert all(fits(asked, text) for text in texts), (asked, texts)


def test_any_object_has_bounded_levels() -> None:
    pattern = re.compile(json_object_regex())
    for text in (
        "{}",
        '{"a": [1, {"b": null}]}',
        '{"a": {"b": {"c": 1.5e3}}, "d": "\\u"}'.replace("\\u", "é"),
    ):
        assert pattern.fullmatch(text), text
    for text in ('{"a": {"b": {"c": {}}}}', "[]", '{"a"}', '{"a": 1, }', "1", '{"a": tru}'):
        assert not pattern.fullmatch(text), text


REFUSED = {
    '{"type": "string", "minLength": 3, "maxLength": 1}': "nothing fits",
    '{"type": "strin"}': "type of the schema is 'strin'",
    '{"type": "array", "uniqueItems": true}': "uniqueItems.*drop repeated items afterwards, or set maxItems",
    '{"type": "array", "uniqueItems": true, "items": {"enum": [1, 1.0]}}': "uniqueItems",
    '{"type": "array", "uniqueItems": true, "items": {"enum": ["a"]}, "minItems": 2}': "minItems.*: lower it",
    '{"type": "array", "items": [{"type": "null"}]}': "items of the schema is a list.*write prefixItems",
    '{"type": "array", "items": {"not": {"type": "null"}}}': "items of the schema has 'not'|has no type",
    '{"allOf": [{"type": "null"}, {"type": "null"}]}': "allOf of the schema has 2",
    '{"oneOf": [{"type": "integer"}, {"type": "number"}]}': "write anyOf",
    '{"type": "object", "properties": {"a": {"$ref": "#"}}}': "# refers to itself.*write out as many levels",
    '{"$ref": "http://x/y"}': "within the schema",
    '{"$ref": "#/$defs/x"}': "leads nowhere",
    '{"type": "number", "multipleOf": 2}': "multipleOf",
    '{"type": "number", "minimum": 1e20}': r"minimum of the schema is 1e\+20: use a number of at most 18 digits",
    '{"type": "number", "exclusiveMinimum": 1e-15}': "exclusiveMinimum of the schema is 1e-15.*: round it",
    '{"type": "number", "exclusiveMinimum": 1e16}': "use a number of at most 15 digits",
    '{"type": "integer", "minimum": 1.5, "maximum": 1.6}': "bounds that nothing fits: lower the least",
    '{"type": "integer", "minimum": true}': "minimum of the schema is True",
    '{"type": "string", "format": "base64"}': "'base64': use date",
    '{"type": "string", "pattern": "^a\\"$"}': "JSON writes as two",
    '{"type": "string", "pattern": "a\\tb"}': "JSON writes as two",
    '{"type": "string", "pattern": "a)|(b"}': "closing parenthesis without an opening one: remove it",
    '{"type": "string", "pattern": "^a", "format": "date"}': "has pattern and format: leave one",
    '{"type": "object", "required": ["z"], "properties": {"a": {}}}': "requires 'z'.*describe it there",
    '{"type": "string", "pattern": "^abc$", "maxLength": 2}': "lengths beside it exclude each other",
    '{"type": "object", "patternProperties": {}}': "patternProperties",
    '{"type": "object", "propertyNames": {"enum": [1]}}': "no value of.*is of its type",
    '{"type": "object", "propertyNames": {"enum": ["a"], "maxLength": 0}}': "maxLength beside const or enum",
    '{"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "null"}}}': "of type string",
    '{"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"$ref": "#/$defs/n"}}}': "to itself",
    '{"type": "object", "propertyNames": {"maxLength": 1}, "properties": {"a": {}}}': "beside properties",
    '{"enum": []}': "use a list of values",
    '{"type": "integer", "enum": ["a"]}': "no value of the schema is of its type",
    '{"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2}': "name the properties",
    "false": "nothing fits it",
}


@pytest.mark.parametrize("schema", REFUSED)
def test_a_schema_that_cannot_be_kept_is_refused_by_name(schema: str) -> None:
    with pytest.raises(UserError, match=REFUSED[schema]):
        byte_automaton(StructuredOutputs(json=schema))


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)b", "look-around"),
        ("(", "cannot be compiled"),
        ("[a-z ]{9,8}", "and ranges with the smaller end first"),
        ("a)(b", "closing parenthesis"),
        (r"[^\s\S]", "no text matches it: remove what excludes every character"),
        (r"a\Ab", r"has the anchor \\A within, not at an end: remove it"),
        ("(^a|b)c", r"has the anchor \^ within"),
    ],
)
def test_an_expression_that_cannot_be_compiled(pattern: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        byte_automaton(StructuredOutputs(regex=pattern))


def answer(pair: Pair, **asked: Any) -> Answer:
    texts, drops_space = pair.models.tokenizer.token_bytes()
    return Answer(
        asked=StructuredOutputs(**asked),
        tokens=TokenBytes.of(texts, 3072),
        ends=(1,),
        drops_space=drops_space,
        thoughts=None,
    )


def test_another_process_compiles_the_same(pair: Pair) -> None:
    words = (without(3072, [(5, 6)]),)
    here, there = (each(3072, words, answer(pair, regex="a|ab")) for each in (compiled, compiled_apart))
    assert (here.classes == there.classes).all()
    assert (here.successors == there.successors).all()
    assert (here.start, here.ends) == (there.start, there.ends)
    with pytest.raises(UserError, match=r"^'\(\?=a\)b' cannot be compiled .*look-around"):
        compiled_apart(3072, words, answer(pair, regex="(?=a)b"))
    with pytest.raises(RuntimeError, match="TypeError"):  # a bug is no refusal
        compiled_apart(3072, (None,), answer(pair, regex="a"))  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_expression_without_bounds_ends(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sooner, run = (
        "from specgen.text import answer_automaton as it; it._SECONDS = 2; it.main()",
        subprocess.run,
    )
    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: run([*command[:2], "-c", sooner], **options)
    )
    with pytest.raises(UserError, match="more than 20 s or 4 GiB"):
        compiled_apart(3072, (), answer(pair, regex=".{0,30}a.{0,30}"))


# --- tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [write_byte_level, write_byte_fallback])
def test_the_bytes_of_tokens_are_those_of_texts(write: Any, tmp_path: Any) -> None:
    tokenizer = load_tokenizer(str(write(tmp_path)))
    texts, drops = tokenizer.token_bytes()
    assert drops == (write is write_byte_fallback)
    rng = random.Random(0)
    for text in ("Ein süßer Tee für 3 € im Café. 日本 🙂", " apples", "a  b\n\n", "Stop", "▁x"):
        ids = tokenizer.encode_rendered(text)
        written = b"".join(texts[each] for each in ids).decode()
        assert tokenizer.decode(ids) == (written[1:] if drops and written[0] == " " else written)
    whole = [each for each, value in texts.items() if value.isascii()]
    for _ in range(100):
        ids = rng.choices(whole, k=8)
        written = b"".join(texts[each] for each in ids).decode()
        assert tokenizer.decode(ids) == (written[1:] if drops and written[0] == " " else written)


@pytest.mark.parametrize("write", [write_byte_level, write_byte_fallback])
@pytest.mark.parametrize("seed", range(5))
def test_walks_over_tokens_write_what_fits(write: Any, seed: int, tmp_path: Any) -> None:
    """Random walks to an end, and no token is missing that goes on to a text that fits."""
    tokenizer = load_tokenizer(str(write(tmp_path)))
    end = tokenizer.eos_token_id
    assert end is not None
    compiler = Constraints(tokenizer, tokenizer.vocab_size + 7, [end])
    rng = random.Random(seed)
    choices = [" no", "nein €", "no, Tom", "n", "日本", "Stop"]
    automaton = compiler.automaton(SamplingParams(structured_outputs=StructuredOutputs(choice=choices)), [])
    assert automaton is not None
    seen = set()
    for _ in range(60):
        state, tokens = automaton.start, list[int]()
        while end not in tokens:
            allowed = [each for each in range(tokenizer.vocab_size + 7) if automaton.after(state, each) >= 0]
            tokens.append(rng.choice(allowed))
            state = automaton.after(state, tokens[-1])
        seen.add(tokenizer.decode(tokens))
    drops = write is write_byte_fallback
    assert seen <= {*choices, *(["no"] if drops else [])}
    assert len(seen) > 3
    for choice in choices:
        spelled = tokenizer.encode_rendered(choice)
        if tokenizer.decode(spelled) in choices:
            assert automaton.walk([*spelled, end]) >= 0, choice


# --- behind reasoning ------------------------------------------------------------------------------

DONE = "<|end|><|start|>assistant<|channel|>"
BEHIND = [  # how a prompt ends, a text behind it, and whether it fits; None: it is not allowed
    (write_think, "", "<think>Yes? no</think>no", True),
    (write_think, "", "no", True),
    (write_think, "", "<think>Yes?</think>Yes", None),
    (write_think, "", "Yes? no</think>no", None),
    (write_think, "", "<think>no", False),
    (write_think, "<think>\n", "Yes? no</think>no", True),
    (write_think, "<think>\n", "no", False),
    (write_think, "<think>\n\n</think>\n\n", "no", True),
    (write_think, "<think>\n\n</think>\n\n", "<think>a</think>no", None),
    (write_channel, "", "<|channel>thought\nYes?<channel|>no", True),
    (write_channel, "", "no", True),
    (write_channel, "", "Yes?<channel|>no", None),
    (write_channel, "<|channel>thought\n<channel|>", "no", True),
    (write_channel, "<|channel>thought\n<channel|>", "<|channel>a<channel|>no", None),
    (write_harmony, "", f"<|channel|>analysis<|message|>Yes?{DONE}final<|message|>no", True),
    (write_harmony, "", "<|channel|>final<|message|>no", True),
    (write_harmony, "", "<|channel|><|channel|>final<|message|>no", True),
    (write_harmony, "", f"<|channel|>analysis<|message|>Yes?{DONE}final<|message|>Yes", None),
    (write_harmony, "", f"<|channel|>analysis<|message|>Yes?{DONE}final json<|message|>no", None),
    (write_harmony, "", "<|channel|>analysis<|message|>no", False),
    (write_harmony, "<|channel|>final<|message|>", "no", True),
    (write_harmony, "<|channel|>final<|message|>", "<|channel|>final<|message|>no", None),
]


@pytest.mark.parametrize(("write", "prompt", "text", "expected"), BEHIND)
def test_the_answer_behind_reasoning_is_what_fits(
    write: Any, prompt: str, text: str, expected: bool | None, tmp_path: Any
) -> None:
    tokenizer = load_tokenizer(str(write(tmp_path)))
    start = "<|start|>assistant" if write is write_harmony else "What?"
    end = tokenizer.added_token_id("<|return|>") or tokenizer.eos_token_id
    compiler = Constraints(tokenizer, tokenizer.vocab_size, [end or 0])
    sampling = SamplingParams(structured_outputs=StructuredOutputs(choice=("no", "none")))
    automaton = compiler.automaton(sampling, tokenizer.encode_rendered(start + prompt))
    assert automaton is not None
    state = automaton.walk(tokenizer.encode_rendered(text))
    assert (None if state < 0 else automaton.fits(state)) == expected


def test_a_text_thinks_as_without_a_constraint(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a token that is taken for the mark; then it is what fits, with drafts as without."""
    free = generate(pair, bundled_requests(4, SamplingParams(max_tokens=24)))
    marks = [token for text in free.texts.values() for token in {*text[4:12]}]
    mark = max({*marks}, key=marks.count)
    monkeypatch.setattr(constraints, "thoughts", lambda *_: Thoughts(opener=None, close=(mark,)))
    choices = (" so, it", "done")
    sampling = SamplingParams(max_tokens=24, structured_outputs=StructuredOutputs(choice=choices))
    requests = bundled_requests(4, sampling)
    found = generate(pair, requests, num_spec_tokens=4)
    assert found.texts == generate(pair, requests, num_spec_tokens=0).texts
    answers = set()
    for name, text in found.texts.items():
        if mark in text[:12]:
            at = text.index(mark) + 1
            assert text[:at] == free.texts[name][:at]
            answers.add(pair.models.tokenizer.decode(text[at:]))
    assert answers
    assert answers <= {*choices}


# --- engines ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(demo_pair: Pair) -> Pair:
    tokenizer = load_tokenizer(str(demo_pair.path / "target"))
    return replace(demo_pair, models=replace(demo_pair.models, tokenizer=tokenizer))


CHOICES = ("The answer is 12.", "The answer is 8", "I do not know, sorry.", "12", "8", "yes", "yes, it is")
REGEX = r"(The|So) answer is -?[0-9]{1,3}(\.[0-9]+)?( apples| [a-z]+)?\.|I [a-z ]{3,30}\."


def of_text(tokenizer: Any, end: int) -> Any:
    """The processor: a token may come if the text with it is the beginning of one that fits, by other matchers."""
    import regex as matcher

    pieces = [tokenizer.decode([each]) for each in range(3072)]

    def change(request: Request, tokens: Tensor, logits: Tensor) -> Tensor:
        output = tokens[0, len(request.prompt_token_ids) :].tolist()
        if (asked := request.sampling.structured_outputs) is None or end in output:
            return logits
        text, only = tokenizer.decode(output), torch.full_like(logits, float("-inf"))
        for token in torch.argsort(logits[0], descending=True).tolist():
            if token == end:
                good = text in asked.choice if asked.choice else matcher.fullmatch(str(asked.regex), text)
            elif not pieces[token] or tokenizer.is_special(token):
                good = False
            elif asked.choice:
                good = any(each.startswith(text + pieces[token]) for each in asked.choice)
            else:
                good = matcher.fullmatch(str(asked.regex), text + pieces[token], partial=True)
            if good:
                only[0, token] = logits[0, token]
                return only
        raise AssertionError(text)

    return change


@pytest.fixture(scope="module")
def greedy(pair: Pair) -> list[Request]:
    kinds = (
        {"structured_outputs": StructuredOutputs(choice=CHOICES)},
        {},
        {"structured_outputs": StructuredOutputs(regex=REGEX)},
        {"structured_outputs": StructuredOutputs(choice=CHOICES[:3])},
    )
    free = bundled_requests(12, SamplingParams(max_tokens=24))
    return [replace(r, sampling=SamplingParams(max_tokens=24, **kinds[i % 4])) for i, r in enumerate(free)]


@pytest.fixture(scope="module")
def expected(pair: Pair, demo_reference: Any, greedy: list[Request]) -> dict[str, tuple[int, ...]]:
    end = pair.models.tokenizer.eos_token_id
    return demo_reference.target.texts(greedy, of_text(pair.models.tokenizer, int(end or 0)))


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
@pytest.mark.parametrize("drafter", [None, "ngram:2", "eagle"])
@pytest.mark.slow
def test_greedy_text_equals_transformers_with_another_matcher(
    pair: Pair, greedy: list[Request], expected: dict[str, tuple[int, ...]], batch: str, drafter: str | None
) -> None:
    settings: dict[str, Any] = {"num_spec_tokens": 0} if drafter is None else {"num_spec_tokens": 4}
    if drafter == "ngram:2":
        settings["drafter"] = drafter
    outputs = generate(pair, greedy, drafter_batch=batch, max_batch_size=4, **settings)
    assert outputs.texts == expected
    if drafter == "eagle":
        assert set(outputs.accepted) >= {0, 1, 2}


def fuzzed(pair: Pair, count: int, seed: int, **settings: Any) -> tuple[Outputs, list[Request]]:
    rng = random.Random(seed)
    prompts = bundled_requests(20, SamplingParams())
    requests = []
    for number in range(count):
        sampling = SamplingParams(
            max_tokens=rng.choice((12, 48, 96)),
            temperature=rng.choice((0.0, 0.8, 1.5)),
            top_p=rng.choice((1.0, 0.9)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
            structured_outputs=None if rng.random() < 0.1 else random_asked(rng),
        )
        requests.append(replace(rng.choice(prompts), id=f"{seed}-{number}", sampling=sampling))
    return generate(pair, requests, **settings), requests


def check(pair: Pair, outputs: Outputs, requests: list[Request]) -> int:
    """How many constrained answers are complete; each fits, and the others are beginnings."""
    end, num_fitting = pair.models.tokenizer.eos_token_id, 0
    for request in requests:
        completion, asked = outputs.completions[request.id], request.sampling.structured_outputs
        assert completion.error is None, (asked, completion.error)
        if asked is None:
            continue
        if completion.finish_reason == "stop":
            assert completion.token_ids[-1] == end
            text = pair.models.tokenizer.decode(completion.token_ids)
            assert fits(asked, text), (asked, text)
            num_fitting += 1
    return num_fitting


def test_answers_fit_what_each_row_asks_for(pair: Pair) -> None:
    outputs, requests = fuzzed(pair, 12, 0, num_spec_tokens=3, max_batch_size=12)
    assert check(pair, outputs, requests) >= 4


@pytest.mark.slow
def test_many_answers_fit(pair: Pair) -> None:
    num_fitting, num_asked = 0, 0
    for seed in range(1, 1 + -(-MANY // 100)):
        settings: dict[str, Any] = {
            "num_spec_tokens": seed % 5,
            "drafter_batch": ("padded", "non-padded")[seed % 2],
        }
        settings |= {"drafter": "ngram:2"} if seed % 5 == 4 else {}
        settings |= {"draft_sampling": "probabilistic"} if seed % 3 == 0 and seed % 5 != 4 else {}
        outputs, requests = fuzzed(pair, 100, seed, max_batch_size=24, page_size=16, **settings)
        num_fitting += check(pair, outputs, requests)
        num_asked += sum(r.sampling.structured_outputs is not None for r in requests)
    print(f"{num_fitting} of {num_asked} answers are complete, and all of them fit")
    assert num_fitting > num_asked / 2


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["padded", "non-padded"])
def test_preemption_and_chunks_change_no_answer(pair: Pair, batch: str) -> None:
    """States are found again from the tokens."""
    free, requests = fuzzed(pair, 16, 7, num_spec_tokens=4, drafter_batch=batch, max_batch_size=8)
    memory = 40 * page_bytes(pair)
    settings: dict[str, Any] = {"num_spec_tokens": 4, "drafter_batch": batch, "max_batch_size": 8}
    tight = generate(pair, requests, kv_memory=memory, **settings)
    assert tight.num_preempted > 2
    assert {*tight.begun.values()} == {1}  # none failed and was tried again
    assert tight.texts == free.texts == generate(pair, requests, max_prefill_tokens=7, **settings).texts


def test_automata_without_room_wait(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many different ones only some fit; those that nobody needs make room, and the others wait."""
    kinds = [StructuredOutputs(choice=(f"answer {n}", f"{n} apples", "none")) for n in range(10)]
    base = bundled_requests(10, SamplingParams(max_tokens=12))
    requests = [
        replace(each, sampling=replace(each.sampling, structured_outputs=kind))
        for each, kind in zip(base, kinds, strict=True)
    ]
    free = generate(pair, requests, max_batch_size=8)
    size = max(of_choice(pair, kind) for kind in kinds)
    monkeypatch.setattr(build, "LARGEST_AUTOMATON", 2 * size)
    tight = generate(pair, requests, max_batch_size=8)
    assert tight.texts == free.texts
    assert max(row.num_sequences for row in tight.steps) <= 3 < max(row.num_sequences for row in free.steps)


def test_an_automaton_that_is_half_on_the_device_is_put_there_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = SamplingParams(max_tokens=12, structured_outputs=StructuredOutputs(choice=("none", "12 apples")))
    requests, whole = bundled_requests(3, only), Tables.fill
    expected, failures = generate(pair, requests).texts, [1]

    def fill(tables: Tables, number: int, first: int, classes: Any, table: Any) -> None:
        if failures and failures.pop():
            whole(tables, number, first, classes, np.full_like(table, -1))
            raise torch.OutOfMemoryError("planted")
        whole(tables, number, first, classes, table)

    monkeypatch.setattr(Tables, "fill", fill)
    assert generate(pair, requests).texts == expected
    assert not failures


class Compiler:
    """``compiled_apart`` that waits with the choices of ``slow`` for ``go``, and knows what it was asked."""

    def __init__(self, slow: StructuredOutputs) -> None:
        self.slow, self.go = slow, Event()
        self.asked: list[StructuredOutputs] = []

    def __call__(self, vocab_size: int, words: Any, answer: Answer) -> Automaton:
        self.asked.append(answer.asked)
        if answer.asked == self.slow:
            assert self.go.wait(LIMIT)
        if "refused" in answer.asked.choice:
            raise UserError("it is refused")
        return compiled(vocab_size, words, answer)


def test_requests_whose_constraints_are_ready_go_first(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """And no text depends on it; what cannot be compiled is asked once, and refused for every row."""
    slow, quick, bad = (
        StructuredOutputs(choice=(text, "no", "12")) for text in ("The answer is 12.", "yes", "refused")
    )
    kinds = [slow, bad, quick, slow, None, quick, bad, slow]
    requests = [
        replace(each, sampling=replace(each.sampling, structured_outputs=kind, temperature=0.9))
        for each, kind in zip(bundled_requests(8, SamplingParams(max_tokens=8)), kinds, strict=True)
    ]
    compiler = Compiler(slow)
    monkeypatch.setattr(constraints, "compiled_apart", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    core = engine_of(pair, max_batch_size=2)
    found = []
    for completion in core.generate(requests):
        found.append(completion)
        if len(found) == 5:
            compiler.go.set()
    names = [each.request.id for each in found]
    assert {*names[:5]} == {requests[number].id for number in (1, 2, 4, 5, 6)}
    assert [name for name in names if name in {requests[n].id for n in (0, 3)}] == [
        requests[0].id,
        requests[3].id,
    ]
    refused = {each.request.id: each.error for each in found if each.error}
    assert refused == dict.fromkeys((requests[1].id, requests[6].id), "structured_outputs: it is refused")
    assert sorted(compiler.asked, key=repr) == sorted((slow, quick, bad), key=repr)
    one_by_one = [completion for each in requests for completion in core.generate([each])]
    assert {each.request.id: each.token_ids for each in found} == {
        each.request.id: each.token_ids for each in one_by_one
    }


def test_requests_of_one_constraint_keep_their_order() -> None:
    compiling, ready = Future[Automaton](), Future[Automaton]()
    ready.set_result(without(4, [(1,)]))
    kinds = [compiling, None, compiling, ready, compiling]
    asked = [
        Request(id=str(at), prompt_token_ids=(at,), sampling=SamplingParams()) for at in range(len(kinds))
    ]
    found = SimpleNamespace(compiling=lambda sampling, prompt: kinds[prompt[0]])
    incoming = Incoming(iter(asked), cast("Constraints", found))
    assert [incoming.next() for _ in range(3)] == [asked[1], asked[3], None]
    assert incoming.wait(), "there is one to wait for"
    compiling.set_result(without(4, [(1,)]))
    assert [incoming.next() for _ in range(4)] == [asked[0], asked[2], asked[4], None]
    assert not incoming.wait()


def test_a_run_ends_while_nothing_but_a_constraint_is_missing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    asked = StructuredOutputs(choice=("yes", "no"))
    compiler = Compiler(asked)
    monkeypatch.setattr(constraints, "compiled_apart", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    core = engine_of(pair)
    (request,) = bundled_requests(1, SamplingParams(max_tokens=8, structured_outputs=asked))
    looks = count()
    assert not list(core.generate([request], until=lambda: next(looks) > 2))
    compiler.go.set()
    assert [each.finish_reason for each in core.generate([request])] == ["stop"]
    assert compiler.asked == [asked]


def test_what_is_being_compiled_is_not_begun_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """However many others were asked for meanwhile."""
    slow, *others = (SamplingParams(structured_outputs=StructuredOutputs(choice=(text,))) for text in "abc")
    assert slow.structured_outputs is not None
    compiler = Compiler(slow.structured_outputs)
    monkeypatch.setattr(constraints, "compiled_apart", compiler)
    monkeypatch.setattr(constraints, "_KEPT", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = Constraints(pair.models.tokenizer, 3072, [1])
    first = asked.compiling(slow, ())
    for each in others:
        asked.automaton(each, ())
    assert asked.compiling(slow, ()) is first
    compiler.go.set()
    assert asked.automaton(slow, ()) is not None
    assert compiler.asked.count(slow.structured_outputs) == 1


def of_choice(pair: Pair, asked: StructuredOutputs) -> int:
    """Entries of its table."""
    tokenizer = pair.models.tokenizer
    compiler = Constraints(tokenizer, 3072, [tokenizer.eos_token_id or 0])
    found = compiler.automaton(SamplingParams(structured_outputs=asked), ())
    assert found is not None
    return found.num_entries


def test_an_answer_that_is_cut_says_so(pair: Pair) -> None:
    asked = StructuredOutputs(choice=("one two three four five six", "12"))
    request = bundled_requests(1, SamplingParams())[0]
    words = [
        replace(request, id=f"{n}", sampling=SamplingParams(max_tokens=n, structured_outputs=asked))
        for n in (1, 9)
    ]
    only = StructuredOutputs(choice=("one two three four five six",))
    words.append(replace(request, id="cut", sampling=SamplingParams(max_tokens=3, structured_outputs=only)))
    found = generate(pair, words).completions
    assert found["cut"].finish_reason == found["cut"].record.reason == "incomplete"
    assert {found["1"].finish_reason, found["9"].finish_reason} <= {"stop", "length", "incomplete"}


def copies(self: SamplingBatch, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """``SamplingBatch.fitting`` that looks at nothing."""
    return drafts, torch.zeros_like(drafts, dtype=torch.bool)


def test_what_a_step_was_cut_by_is_counted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """N-grams copy what the prompt says, which the choices do not allow."""
    monkeypatch.setattr(SamplingBatch, "fitting", copies)
    prompt = pair.models.tokenizer.encode_text("A: yes, it is red. B: yes, it is red. A: yes,")
    asked = StructuredOutputs(
        choice=("yes, it was blue and green all day", "yes, it is red. B: yes, it is blue")
    )
    sampling = SamplingParams(max_tokens=40, structured_outputs=asked)
    request = Request(id="a", prompt_token_ids=tuple(prompt), sampling=sampling)
    completion = generate(pair, [request], drafter="ngram:2", num_spec_tokens=4).completions["a"]
    steps = completion.record.steps or ()
    text = completion.token_ids
    tokenizer, at, cut = pair.models.tokenizer, 1, 0
    for step in steps:
        behind = text[: at + step.accepted]
        rejected = step.drafts[step.accepted :][:1]
        if rejected:
            written = tokenizer.decode([*behind, *rejected])
            cut += not any(each.startswith(written) for each in asked.choice)
        at += step.emitted
    assert completion.record.counts.cut == cut > 0


def test_the_longest_forced_token_is_known(pair: Pair) -> None:
    regex = r'\{"answer": (12|13), "unit": "apples"\}( again)?'
    automaton = compiled(3072, (), answer(pair, regex=regex))
    texts, _ = pair.models.tokenizer.token_bytes()
    assert automaton.forced is not None
    num_forced = 0
    for state, forced in enumerate(automaton.forced):
        allowed = [token for token in range(3072) if automaton.after(state, token) >= 0]
        spelled = [texts[token] if token not in automaton.ends else b"" for token in allowed]
        longest = max(spelled, key=len)
        expected = len(allowed) == 1 or all(text and longest.startswith(text) for text in spelled)
        assert (forced >= 0) == expected, (state, spelled)
        if expected:
            assert spelled[allowed.index(forced)] == longest
            num_forced += 1
    assert num_forced > len(automaton.forced) / 3
    assert (automaton.forced < 0).sum() > 0


@pytest.mark.parametrize("seed", range(10))
def test_drafts_end_or_are_forced_where_they_do_not_fit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    classes, successors = rng.integers(0, 3, 5), rng.integers(-1, 4, (4, 3))
    forced = rng.integers(-1, 5, 4)
    forced = np.array(
        [token if token >= 0 and successors[s, classes[token]] >= 0 else -1 for s, token in enumerate(forced)]
    )
    automaton = Automaton(classes=classes, successors=successors, forced=forced)
    ops = torch_ops()
    tables = Tables(3, 100, 5, torch.device("cpu"), walk=ops.walk, mask=ops.mask)
    tables.fill(2, 7, classes, automaton.table)
    drafts = rng.integers(0, 5, (8, 4))
    drafts[np.arange(4) >= rng.integers(0, 6, (8, 1))] = -1
    begin = [(2, state) for state in range(4)] * 2
    begin[0] = (0, 0)  # everything is allowed
    batch = SamplingBatch.of(
        [SamplingParams(allowed_token_ids=(0,))] * 8,
        range(8),
        torch.device("cpu"),
        places=[(number, number and 7 + 4 * state) for number, state in begin],
        tables=tables,
    )
    found, are_forced = batch.fitting(torch.tensor(drafts))
    for row, (number, state) in enumerate(begin):
        expected, flags, is_copied = list[int](), list[bool](), True
        for token in drafts[row].tolist():
            fits = token >= 0 and (not number or automaton.after(state, token) >= 0)
            is_copied = is_copied and fits
            chosen = token if is_copied else int(forced[state]) if number else -1
            chosen = -1 if -1 in expected else chosen
            expected.append(chosen)
            flags.append(not is_copied)
            state = automaton.after(state, chosen) if number and chosen >= 0 else state
        assert found[row].tolist() == expected
        assert are_forced[row].tolist() == flags


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_ngrams_draft_what_is_allowed_and_forced(
    pair: Pair, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = StructuredOutputs(regex=r'\{"answer": [0-9]{1,3}, "unit": "[a-z]{3,9}"\}')
    sampling = SamplingParams(max_tokens=24, structured_outputs=asked, temperature=temperature)
    free, *requests = bundled_requests(4, sampling)  # one of them without
    requests.append(replace(free, sampling=replace(sampling, structured_outputs=None)))
    settings = {"drafter": "ngram:2", "num_spec_tokens": 4, "max_batch_size": 4}
    fitting = generate(pair, requests, **settings)
    monkeypatch.setattr(SamplingBatch, "fitting", copies)
    plain = generate(pair, requests, **settings)
    if temperature == 0:
        assert fitting.texts == plain.texts == generate(pair, requests, num_spec_tokens=0).texts
        accepted = [
            sum(sum(step.accepted for step in each.record.steps or ()) for each in found.completions.values())
            for found in (fitting, plain)
        ]
        assert accepted[0] > accepted[1] + 4
    assert not any(each.record.counts.cut for each in fitting.completions.values())
    assert fitting.verified[free.id] == plain.verified[free.id]  # whose drafts nothing changes


def test_drafts_of_a_head_are_ones_that_are_allowed(pair: Pair) -> None:
    asked = StructuredOutputs(regex=r'\{"answer": [0-9]{1,3}, "unit": "[a-z]{3,9}"\}')
    base = bundled_requests(6, SamplingParams(max_tokens=40))
    requests = [replace(r, sampling=replace(r.sampling, structured_outputs=asked)) for r in base]
    outputs = generate(pair, requests, num_spec_tokens=4)
    counts = [each.record.counts for each in outputs.completions.values()]
    assert sum(each.cut for each in counts) < sum(each.num_steps for each in counts) / 4
    assert outputs.texts == generate(pair, requests, num_spec_tokens=0).texts


def test_what_no_text_can_be_is_an_error_at_its_token(pair: Pair) -> None:
    request, tokenizer = bundled_requests(1, SamplingParams())[0], pair.models.tokenizer
    of_yes = (each for each in range(3072) if tokenizer.decode([each])[:1] == "y")
    suppressed = SamplingParams(
        suppress_tokens=tuple({*tokenizer.encode_rendered("yes"), *of_yes}),
        structured_outputs=StructuredOutputs(choice=("yes",)),
    )
    short = SamplingParams(min_tokens=9, structured_outputs=StructuredOutputs(regex="[a-c]"))
    requests = [replace(request, id=f"{n}", sampling=each) for n, each in enumerate((suppressed, short))]
    found = generate(pair, requests).completions
    assert "-inf for all that its constraints allow, at output token 1" in str(found["0"].error)
    assert "constraints (and min_tokens, 9: ask for fewer) allow, at output token 2" in str(found["1"].error)


def test_a_compiled_constraint_is_kept(pair: Pair, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sampling = SamplingParams(structured_outputs=StructuredOutputs(regex="a+b"), bad_words=("aa",))

    def compiled() -> Any:
        return Constraints(pair.models.tokenizer, 3072, [1]).automaton(sampling, ())

    first = compiled()
    monkeypatch.setattr(constraints, "compiled_apart", None)  # is not asked again
    again = compiled()
    assert (first.classes == again.classes).all()
    assert (first.successors == again.successors).all()
    assert (first.forced == again.forced).all()
    (file,) = (tmp_path / "specgen" / "constraints").iterdir()
    file.write_text(file.read_text()[:-40])
    with pytest.raises(TypeError):
        compiled()


# --- commands --------------------------------------------------------------------------------------


def test_a_command_with_choices_resumes_and_refuses_others(tmp_path: Any) -> None:
    out, few = tmp_path / "out", ("--num-prompts", 4, "--max-new-tokens", 12, "--output", tmp_path / "out")
    printed("generate", "--choice", "yes", "--choice", "no", "--bad-word", "maybe", *few)
    found = rows(out / "completions.jsonl")
    assert {each["text"] for each in found} <= {"yes", "no"}
    manifest = json.loads((out / "manifest.json").read_text())["sampling"]
    assert manifest["structured_outputs"]["choice"] == ["yes", "no"]
    assert "answers of one of 2 choices" in (out / "report.html").read_text()
    with refused("choice"):
        printed("generate", "--choice", "yes", "--bad-word", "maybe", *few)
    printed("generate", "--config", out / "config.yaml")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--json-schema", "nowhere.json"), "'nowhere.json' cannot be read"),
        (("--json-schema", "{tmp}/bad.json"), r"uniqueItems, which is kept for an enum"),
        (("--regex", "a", "--choice", "b"), "regex and choice: give one"),
        (("--choice", "b", "--ignore-eos"), "ignore_eos is set"),
        (("--choice", "b", "--choice="), "a choice is empty: give the text of the answer, or leave it out"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_written(
    tmp_path: Any, options: tuple[str, ...], reason: str
) -> None:
    (tmp_path / "bad.json").write_text('{"type": "array", "uniqueItems": true}')
    with refused(reason):
        printed("generate", *(each.format(tmp=tmp_path) for each in options), "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rows_with_their_own_constraints(tmp_path: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    written = [
        {"id": "a", "prompt": "One or two?", "guided_choice": ["one", "two"]},
        {"id": "b", "prompt": "One or two?", "structured_outputs": {"json": schema}},
        {"id": "c", "prompt": "One or two?", "guided_json": {"type": "strin"}},
        {"id": "d", "prompt": "One or two?", "bad_words": [" the"], "max_tokens": 4},
        {"id": "e", "prompt": "One or two?", "allowed_token_ids": [99999]},
    ]
    out = tmp_path / "out"
    result = specgen("generate", "--dataset", write_rows(tmp_path / "rows.jsonl", written), "--output", out)
    assert result.exit_code == 3
    texts = {each["id"]: each["text"] for each in rows(out / "completions.jsonl")}
    assert texts["a"] in ("one", "two")
    assert json.loads(texts["b"])["n"] in (1, 2)
    errors = {each["id"]: each["error"] for each in rows(out / "errors.jsonl")}
    assert "type of the schema is 'strin': use one of string, integer" in errors["c"]
    assert "allowed_token_ids names 99999, which is not in the vocabulary of 3072" in errors["e"]
    assert set(errors) == {"c", "e"}
