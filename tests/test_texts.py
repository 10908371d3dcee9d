"""The texts of a page: every character is that of the stored text, every colour that of the steps."""

import random
import re
import shutil
import subprocess
from collections import Counter
from html import escape, unescape
from itertools import chain
from pathlib import Path

import msgspec
import pytest

from specgen.record import columns
from specgen.report import run_texts
from specgen.report.page import Page
from specgen.report.report import report_of
from specgen.report.run_texts import RunTexts, texts_of
from specgen.report.table import Column, Table
from specgen.report.text_list import Source, sources_of
from specgen.text.reasoning import pieces_by_part, split
from specgen.text.tokenizer import StopStrings, fitted, load_tokenizer, pieces
from tests.streams import refusal, request
from tests.tiny_tokenizers import TEXT, write_byte_fallback, write_byte_level, write_harmony, write_think
from tests.waiting import LIMIT

K = 4
BAD = "<script>alert('x')</script>&\""
_WRITERS = {"bytes": write_byte_level, "fallback": write_byte_fallback}


@pytest.fixture(scope="module", params=list(_WRITERS))
def tokenizer(request, tmp_path_factory):
    return load_tokenizer(str(_WRITERS[request.param](tmp_path_factory.mktemp(request.param))))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return load_tokenizer(str(write_byte_level(tmp_path_factory.mktemp("bytes"))))


def a_run(tokenizer, number, *, seed=0, num_steps=0, accepted=(0, 1, 2, K)):
    """Records and rows of ``number`` requests whose tokens are those of a text, from anywhere within a character on."""
    rng, requests, rows = random.Random(seed), [], {}
    tokens = tokenizer.encode_rendered(" ".join(TEXT))
    for at in range(number):
        steps = [(K, rng.choice(accepted)) for _ in range(num_steps or rng.randint(2, 8))]
        steps += [(0, 0)] * (at % 3 == 0)  # one without drafts
        category = BAD if at % 2 else "math"
        requests += request(f"r{at}", steps, category=category, turn=1 + at % 3 // 2)
        begin, size = rng.randrange(50), 1 + sum(a + 1 for _, a in steps)
        token_ids = (tokens * (1 + (begin + size) // len(tokens)))[begin : begin + size]
        rows[f"r{at}"] = {"prompt": BAD, "text": tokenizer.decode(token_ids), "token_ids": token_ids}
    return requests, rows


def shown(requests, rows, tokenizer):
    run = columns.of(requests := list(requests), K)
    tables, listed = RunTexts(run, recorded(requests, rows)).shown(tokenizer)
    return report_of(run, []), tables, listed


def recorded(requests, rows):
    """``rows`` as completions.jsonl has them."""
    return {
        each.name: {
            "id": each.name,
            "finish_reason": each.reason,
            "category": each.category,
            "turn": each.turn,
            "num_prompt_tokens": each.num_prompt_tokens,
            "record": msgspec.to_builtins(each.to_json()),
            **rows[each.name],
        }
        for each in requests
        if each.name in rows and each.reason != "error"
    }


def in_page(listed, tables=()):
    return Page(title="A run", settings={}, tables=tables, texts=listed).to_html()


def spans_of(html):
    """The spans of each text on a page: class, and text as a browser shows it."""
    texts = re.findall(r'<p class="spans">(.*?)</p></div>', html, re.DOTALL)
    return [
        [
            (style, unescape(text))
            for style, text in re.findall(r"<i(?: class=(\w+))?[^>]*?>([^<]*)</i>", each)
        ]
        for each in texts
    ]


# --- pieces ---------------------------------------------------------------------------------------


def test_pieces_are_the_text(tokenizer):
    for text in (*TEXT, " ".join(TEXT), "", "  a", "🙂", "👩‍👩‍👧"):
        token_ids = tokenizer.encode_text(text)
        found = pieces(tokenizer, token_ids)
        assert (len(found), "".join(found)) == (len(token_ids), tokenizer.decode(token_ids))
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in found)
    rng = random.Random(1)
    for _ in range(400):
        token_ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(40))]
        assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_pieces_of_bytes_that_are_no_characters_are_their_text(tmp_path: Path):
    tokenizer = load_tokenizer(str(write_byte_fallback(tmp_path)))
    ids = {value: token_id for token_id, value in tokenizer.byte_values.items()}
    (word,) = tokenizer.encode_rendered("t")[1:]
    for text in (b"\xe2\x82\xac\xa9", b"a\xe2\x82", b"\xa9' ", "🙂é".encode(), b"\xf0a"):
        run = [ids[byte] for byte in text]
        for token_ids in (run, [*run, word], [word, *run, word, word]):
            assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_a_character_is_a_piece_of_its_last_token(byte_level):
    token_ids = byte_level.encode_rendered("🦉!")
    assert len(token_ids) > 2
    assert pieces(byte_level, token_ids) == [*[""] * (len(token_ids) - 2), "🦉", "!"]


def test_the_work_per_token_does_not_grow(byte_level, monkeypatch):
    decoded, real = [], byte_level.decode
    monkeypatch.setattr(byte_level, "decode", lambda ids: decoded.append(len(ids)) or real(ids))
    pieces(byte_level, byte_level.encode_text(TEXT[0] * 40))
    assert max(decoded[:-1]) < 12  # all but the check of the whole


@pytest.mark.parametrize(
    ("parts", "text", "expected"),
    [
        (["a", "bc", "d"], "abcd", ["a", "bc", "d"]),
        (["a", "bSTOP", "d"], "ab", ["a", "b", ""]),
        (["\n", "\na", "b\n"], "ab", ["", "a", "b"]),
        (["a"], "", [""]),
        (["a"], "b", None),
    ],
)
def test_pieces_are_cut_to_the_stored_text(parts, text, expected):
    assert fitted(parts, text) == expected


@pytest.mark.parametrize(
    ("write", "prompt", "text"),
    [
        (write_think, "", "<think>\n3 🦉\n</think>\n\nIt is 8."),
        (write_think, "<think>\n", "3 + 5</think>It is"),
        (write_harmony, "", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
         "<|end|><|start|>assistant<|channel|>final<|message|>c é"),
    ],
)  # fmt: skip
def test_reasoning_and_answer_are_told_apart(write, prompt, text, tmp_path):
    tokenizer = load_tokenizer(str(write(tmp_path)))
    before, token_ids = tokenizer.encode_rendered(prompt), tokenizer.encode_rendered(text)
    parts = split(tokenizer, before, token_ids)
    found = pieces_by_part(tokenizer, prompt, token_ids)
    assert sorted(index for part in found.values() for index, _ in part) == list(range(len(token_ids)))
    row = {"prompt": prompt, "reasoning": parts.reasoning, "text": tokenizer.decode(parts.answer)}
    sources = [Source("prefill")] * len(token_ids)
    texts = {each.name: each.spans for each in texts_of({**row, "token_ids": token_ids}, sources, tokenizer)}
    for name, stored in (("reasoning", parts.reasoning), ("answer", row["text"])):
        assert "".join(span.text for span in texts[name]) == stored
        assert {span.style for span in texts[name]} == {"prefill"}, "told apart token by token"


# --- colours --------------------------------------------------------------------------------------


def test_the_sources_of_a_step():
    draft = [Source("draft", 0), Source("draft", 1)]
    assert list(sources_of((7, 8, 9), 2)) == [*draft, Source("correction", 2, 9)]
    assert list(sources_of((7, 8), 2)) == [*draft, Source("bonus", 2)]
    assert list(sources_of((), 0)) == [Source("plain", 0)]


def test_the_page_shows_every_text_and_its_colours_are_those_of_the_report(tokenizer):
    requests, rows = a_run(tokenizer, 40)
    report, tables, listed = shown(requests, rows, tokenizer)
    spans = spans_of(in_page(listed, tables))
    stored = {entry.title: rows[entry.title]["text"] for entry in listed.entries}
    assert list(stored.values()) == ["".join(text for _, text in each) for each in spans]
    assert set(stored) == set(rows)
    colours = Counter(style for each in spans for style, _ in each)
    steps = report.acceptance_histogram
    assert [colours[f"d{i}"] for i in range(K)] == [sum(steps[i + 1 :]) for i in range(K)]
    assert colours["correction"] == sum(steps[:K])
    assert colours["bonus"] == steps[K]
    assert colours["plain"] == report.num_steps_without_drafts
    assert colours["prefill"] == len(rows)


def test_a_correction_shows_the_draft_in_whose_place_it_stands(byte_level):
    a, b, c, end = (byte_level.encode_rendered(each)[0] for each in "abc\n")
    requests = list(request("r", [(1, 0)], drafts=[(c,)]))
    for token, text, place in ((end, "\n", " data-break"), (b, "b", "")):
        rows = {"r": {"prompt": "", "text": f"a{text}", "token_ids": [a, token]}}
        _, tables, listed = shown(requests, rows, byte_level)
        assert f'<i class=correction tabindex=0 data-draft="c"{place}>{text}</i>' in in_page(listed)
    missed, rejected = (table.rows[0] for table in tables if table.title.startswith(("Tokens", "Drafts")))
    assert (missed["token"], missed["rejected"], missed["others"]) == ("“b”", 1, "“c” 1")
    assert (rejected["token"], rejected["share"]) == ("“c”", 1.0)


def test_parts_of_characters_are_told_apart_by_their_ids(byte_level):
    owl = byte_level.encode_rendered("🦉")
    rows = {"r": {"prompt": "", "text": "\ufffd", "token_ids": owl[:2]}}
    _, tables, _ = shown(list(request("r", [(1, 0)], drafts=[(owl[2],)])), rows, byte_level)
    missed, rejected = (table.rows[0] for table in tables if table.title.startswith(("Tokens", "Drafts")))
    assert (missed["token"], rejected["token"]) == (f"token {owl[1]}", f"token {owl[2]}")


def test_a_share_is_of_the_places_where_a_token_was_drafted_or_missed(byte_level):
    a, b, c = (byte_level.encode_rendered(each)[0] for each in "abc")
    requests = [
        *request("r", [(1, 0), (3, 3)], drafts=[(c,), (0, 1, 2)]),
        *request("all accepted", [(3, 3)], drafts=[(0, 1, 2)]),
    ]
    rows = {
        "r": {"prompt": "", "text": "abbbca", "token_ids": [a, b, b, b, c, a]},  # b, b and c are accepted
        "all accepted": {"prompt": "", "text": "abbba", "token_ids": [a, b, b, b, a]},
    }
    _, tables, _ = shown(requests, rows, byte_level)
    missed, rejected = (table.rows for table in tables if table.title.startswith(("Tokens", "Drafts")))
    assert [(row["token"], row["share"]) for row in missed] == [("“b”", 1 / 6)]
    assert [(row["token"], row["share"]) for row in rejected] == [("“c”", 1 / 2)]


def test_the_requests_with_the_lowest_acceptance_are_shown(byte_level, monkeypatch):
    """Of all, and of each category, turn and reason to end."""
    requests, rows = a_run(byte_level, 40, num_steps=7)
    lengths = sorted((each.acceptance_length, each.name) for each in requests)
    for most, of_each in ((3, 0), (0, 1)):
        monkeypatch.setattr(run_texts, "_WORST", most)
        monkeypatch.setattr(run_texts, "_WORST_OF_EACH", of_each)
        _, _, listed = shown(requests, rows, byte_level)
        found = [dict(map(reversed, lengths))[entry.title] for entry in listed.entries]
        assert found[0] == lengths[0][0]
        assert found == sorted(found), "the worst come first"
        if most:
            assert found == [length for length, _ in lengths[:most]]
        else:
            assert {entry.labels["category"] for entry in listed.entries} == {"math", BAD}


def test_a_category_per_request_makes_no_endless_page(byte_level, monkeypatch):
    token_ids = byte_level.encode_rendered(TEXT[0])[:4]
    rows = {f"r{at}": {"text": byte_level.decode(token_ids), "token_ids": token_ids} for at in range(300)}
    requests = chain(*(request(name, [(K, 0)], category=f"c{name}") for name in rows))
    monkeypatch.setattr(run_texts, "_WORST", 0)
    _, _, listed = shown(requests, rows, byte_level)
    assert len(listed.entries) == 200


def test_refused_requests_have_no_text(byte_level):
    token_ids = byte_level.encode_rendered("abc")
    rows = {"r": {"prompt": "", "text": byte_level.decode(token_ids), "token_ids": token_ids}}
    steps = list(request("r", [(2, 1)]))
    _, _, listed = shown(chain(refusal("r"), steps), rows, byte_level)
    (entry,) = listed.entries
    assert [span.style for span in entry.texts[0].spans] == ["prefill", "d0", "correction"]


@pytest.mark.parametrize("change", [{"token_ids": [1]}, {"text": "of another run"}])
def test_a_text_that_is_not_of_its_tokens_is_shown_without_colours(byte_level, change):
    requests, rows = a_run(byte_level, 1)
    rows["r0"] |= change
    _, _, listed = shown(requests, rows, byte_level)
    assert spans_of(in_page(listed)) == [[("", rows["r0"]["text"])]]


def test_without_a_tokenizer_or_drafts_the_texts_are_there(byte_level):
    requests, rows = a_run(byte_level, 3)
    _, _, listed = shown(requests, rows, None)
    assert [each[0][1] for each in spans_of(in_page(listed))] == [
        rows[e.title]["text"] for e in listed.entries
    ]
    assert "the tokenizer could not be read" in listed.note
    plain = list(request("r0", [(0, 0)] * (len(rows["r0"]["token_ids"]) - 1)))
    _, tables, listed = shown(plain, {"r0": rows["r0"]}, byte_level)
    assert tables == []
    assert listed.note == "every token is of the target alone"
    assert shown([], {}, byte_level)[1:] == ([], None)


# --- the page -------------------------------------------------------------------------------------


def test_texts_from_outside_are_escaped(byte_level):
    token_ids = byte_level.encode_rendered(BAD)
    rows = {BAD: {"prompt": BAD, "text": BAD, "token_ids": token_ids}}
    draft = token_ids[0]
    plain = len(token_ids) - 2
    steps, drafts = [*[(0, 0)] * plain, (1, 0)], [*[()] * plain, (draft,)]
    requests = list(request(BAD, steps, drafts=drafts, category=BAD))
    requests += request("other", [(1, 1)])
    rows["other"] = {"text": "", "token_ids": [1] * 3}
    _, tables, listed = shown(requests, rows, byte_level)
    html = in_page(listed, tables)
    assert "<script" not in html
    assert BAD in ["".join(text for _, text in each) for each in spans_of(html)]
    assert f'data-draft="{byte_level.decode([draft])}"'.replace('"<"', '"&lt;"') in html


def test_stop_strings_are_not_shown(byte_level):
    token_ids = byte_level.encode_rendered("Tom STOP")
    text = StopStrings(byte_level, ["STOP"]).text(token_ids)
    rows = {"r": {"prompt": "", "text": text, "token_ids": token_ids}}
    _, _, listed = shown(request("r", [(0, 0)] * (len(token_ids) - 1)), rows, byte_level)
    assert ["".join(text for _, text in each) for each in spans_of(in_page(listed))] == ["Tom "]


@pytest.mark.slow
def test_a_page_of_many_requests_stays_small(byte_level):
    requests, rows = a_run(byte_level, 600)
    long, more = a_run(byte_level, 220, seed=1, num_steps=500, accepted=(0, 0, 1))
    rows |= {f"r{at}": more[f"r{at}"] for at in range(220)}
    requests[:220] = long
    _, tables, listed = shown(requests, rows, byte_level)
    size = len(in_page(listed, tables).encode())
    assert 3_000_000 < size < 5_000_000
    assert {entry.labels["category"] for entry in listed.entries} == {"math", BAD}
    assert f"{len(listed.entries)} of 600 requests" in listed.note


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_filters_by_label(byte_level, tmp_path: Path):
    requests, rows = a_run(byte_level, 13)
    _, tables, listed = shown(requests, rows, byte_level)
    html = in_page(listed, tables)
    chosen = listed.filters["category"]["math"]
    seen = f"{all_of('.entry')}.filter(each => each.offsetParent).length + ' seen'"
    option = f'<option value="{chosen}"'
    some = html.replace(option, f"{option} selected")
    found = found_in([(html, 390), (some, 1280)], seen, tmp_path)
    assert found == ["13 seen, 0 too wide", "7 seen, 0 too wide"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_on_a_phone_wide_tables_scroll_and_names_stay_whole(tmp_path: Path):
    names = ["drafter-two-layers", "a question of several words that the model saw " * 3]
    columns = (Column(name="name", title=""), *(Column(name=f"number {n}") for n in range(6)))
    rows = tuple({"name": name, **{f"number {n}": 0.5 for n in range(6)}} for name in names)
    html = Page(title="Page", settings={}, tables=[Table(title="Wide", columns=columns, rows=rows)]).to_html()
    cells = f"{all_of('tbody th')}.map(each => each.clientHeight < 40 ? 'line' : each.clientWidth > 150 ? 'text' : 0)"
    box = f"{all_of('.wide')}.map(each => each.scrollWidth > each.clientWidth + 50)"
    found = found_in([(html, 390)], f"[{cells}, {box}].join()", tmp_path)
    assert found == ["line,text,true, 0 too wide"]


def all_of(selector):
    return f"[...document.querySelectorAll('{selector}')]"


def found_in(pages, script, tmp_path):
    """What ``script`` finds in each page, and how much wider it is than its frame.

    ``pages`` are with the widths of their frames, which a window may not have.
    """
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    frames = []
    for number, (html, width) in enumerate(pages):
        found = f"parent.found[{number}] = {script} + ', ' + ({wide}) + ' too wide'"
        shown = f"<script>{found}; parent.document.title = parent.found.join('; ')</script></body>"
        frame = escape(html.replace("</body>", shown))
        frames.append(f'<iframe width="{width}" height="800" srcdoc="{frame}"></iframe>')
    (tmp_path / "page.html").write_text(f"<title></title><script>found = []</script>{''.join(frames)}")
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    asked = [*command, (tmp_path / "page.html").as_uri()]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT, check=True)
    return re.search("<title>(.*?)</title>", done.stdout)[1].split("; ")
