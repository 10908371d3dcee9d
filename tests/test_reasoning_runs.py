"""Runs of models that reason: rows, later turns, acceptance of both parts, dates over a resume."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from specgen.config.bundled import data_directory
from specgen.engine import choices
from specgen.record.interrupt import StoppedError
from specgen.record.record_rows import RequestRow, Step, count_parts
from tests.commands import printed, refused, specgen, write_rows
from tests.jobs import untimed
from tests.marks import mostly_slow
from tests.tiny_checkpoints import write_head, write_target
from tests.tiny_tokenizers import THINK, write_harmony, write_think

pytestmark = pytest.mark.xdist_group("reasoning")  # one run for all

_RENAMED = {5: "<think>", 19: "</think>"}  # "<|assistant|>", which ends the prompt, and the full stop


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "completions.jsonl").read_text().splitlines()]


def report(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "report.json").read_text())
    return found


@pytest.fixture(scope="module")
def reasoning_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled pair, in whose tokenizer two tokens have the names of markers: a first sentence is reasoning."""
    path = tmp_path_factory.mktemp("reasoning") / "demo"
    shutil.copytree(data_directory() / "demo", path)
    file = path / "target" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    old = {number: text for text, number in tokenizer["model"]["vocab"].items()}
    for number, text in _RENAMED.items():
        del tokenizer["model"]["vocab"][old[number]]
        tokenizer["model"]["vocab"][text] = number
    merged = [merge for merge in tokenizer["model"]["merges"] if old[19] not in "".join(merge)]
    tokenizer["model"]["merges"] = merged
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    kept = [each for each in tokenizer["added_tokens"] if each["id"] not in _RENAMED]
    tokenizer["added_tokens"] = [*kept, *({"id": i, "content": text} | plain for i, text in _RENAMED.items())]
    file.write_text(json.dumps(tokenizer))
    config = path / "target" / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    settings["chat_template"] = (
        "{{ bos_token }}{% for message in messages %}"
        "{{ ('<think>' if message.role == 'assistant' else '<|user|>') ~ message.content ~ '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<think>{% endif %}"
    )
    config.write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of two turns without a full stop, which the renamed tokenizer lacks."""
    turns = [[f"Tom has {n} apples and buys 3 more, how many?", "And then 2 more?"] for n in range(4, 7)]
    lines = [{"question_id": n, "category": "math", "turns": each} for n, each in enumerate(turns)]
    return write_rows(tmp_path_factory.mktemp("questions") / "question.jsonl", lines)


@pytest.fixture(scope="module")
def reasoned(reasoning_pair: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with whole texts."""
    out = tmp_path_factory.mktemp("run") / "out"
    result = generate(reasoning_pair, questions, out)
    assert result.exit_code == 0, result.output
    assert "By part" not in result.stdout, "titles are a page's"
    assert "reasoning" in result.stdout
    return out


def models_of(pair: Path, *more: object) -> list[object]:
    return ["--model", pair / "target", "--drafter", pair / "drafter", *more]


def refuses(result: Result, message: str) -> None:
    with refused(message):
        raise result.exception or AssertionError(result.output)


def random_pair(path: Path, write_tokenizer: Callable[[Path], object]) -> Path:
    """A random pair in ``path`` with a tokenizer that has markers."""
    write_head(path / "drafter", write_target(path / "target", vocab_size=352), draft_vocab_size=100)
    write_tokenizer(path / "target")
    return path


def generate(pair: Path, questions: Path, out: Path, *arguments: object) -> Result:
    models = models_of(pair, "--num-spec-tokens", 3)
    data = ["--dataset", "mt-bench", "--data-path", questions, "--max-new-tokens", 60]
    return specgen("generate", *models, *data, "--output", out, *arguments)


def by_part(found: Iterable[Mapping[str, Any]], labels: Mapping[str, list[str]]) -> dict[str, Counter[str]]:
    """Counts of steps by the label of their first token, straight from the steps of rows."""
    counts = {part: Counter[str]() for part in ("reasoning", "answer")}
    for row in found:
        first = 1
        for step in RequestRow.of_row(row).steps or ():
            part = labels[row["id"]][first]
            first += step.emitted
            counts[part]["num_drafts"] += bool(step.drafts)
            counts[part]["num_steps_without_drafts"] += not step.drafts
            counts[part]["num_draft_tokens"] += len(step.drafts)
            counts[part]["num_accepted_tokens"] += step.accepted
    for parts in labels.values():
        counts["reasoning"]["total_num_output_tokens"] += parts.count("reasoning")
        counts["answer"]["total_num_output_tokens"] += parts.count("answer")
    return counts


_COUNTED = (
    *("num_drafts", "num_steps_without_drafts", "num_draft_tokens", "num_accepted_tokens"),
    "total_num_output_tokens",
)


def check_parts(out: Path, labels: Mapping[str, list[str]], k: int) -> None:
    """The report of the run in ``out`` has the counts of both parts, which add up to the whole."""
    found, expected = report(out), by_part(rows(out), labels)
    assert list(found["parts"]) == ["reasoning", "answer"]
    for part, counts in expected.items():
        assert {name: found["parts"][part][name] for name in _COUNTED} == {
            name: counts[name] for name in _COUNTED
        }
    for name in _COUNTED:
        assert sum(each[name] for each in found["parts"].values()) == found[name]
    for position in range(k):
        for name in ("drafted", "reached", "accepted"):
            parts = [each["acceptance"][position][name] for each in found["parts"].values()]
            assert sum(parts) == found["acceptance"][position][name]


def until_marker(row: Mapping[str, Any], marker: int) -> list[str]:
    """The labels of a row whose reasoning the prompt opens."""
    ids = row["token_ids"]
    end = ids.index(marker) + 1 if marker in ids else len(ids)
    return ["reasoning"] * end + ["answer"] * (len(ids) - end)


def test_rows_have_reasoning_and_text_apart(reasoned: Path, questions: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    assert generate(data_directory() / "demo", questions, plain).exit_code == 0
    found, first = rows(reasoned), {row["id"]: row for row in rows(plain) if row["turn"] == 1}
    assert len(found) == 6
    for row in found:
        assert row["token_ids"].index(19) > 2
        assert row["num_reasoning_tokens"] == row["token_ids"].index(19) + 1
        assert "reasoning" not in next(iter(first.values()))
        if row["turn"] == 1:
            assert row["token_ids"] == first[row["id"]]["token_ids"], "only names differ"
            reasoning, _, text = first[row["id"]]["text"].partition(".")
            assert (row["reasoning"], row["text"]) == (reasoning, text.replace(".", "</think>").lstrip())
    keys = list(found[0])
    assert keys[keys.index("reasoning") : keys.index("text") + 1] == [
        "reasoning",
        "num_reasoning_tokens",
        "text",
    ]


def test_the_next_turn_has_the_answer_alone_in_its_context(reasoned: Path) -> None:
    found = {row["id"]: row for row in rows(reasoned)}
    for n in range(3):
        first, second = found[str(n)], found[f"{n}/turn-2"]
        assert f"more, how many?<|end|><think>{first['text']}<|end|><|user|>And then" in second["prompt"]
        assert first["reasoning"] not in second["prompt"]


def test_acceptance_is_counted_by_part(reasoned: Path) -> None:
    check_parts(reasoned, {row["id"]: until_marker(row, 19) for row in rows(reasoned)}, 3)
    parts = report(reasoned)["parts"]
    assert parts["reasoning"]["mean_acceptance_length"] > 1.5
    assert parts["reasoning"]["mean_acceptance_length"] != parts["answer"]["mean_acceptance_length"]
    assert parts["reasoning"]["num_requests"] == parts["answer"]["num_requests"] == 6
    assert report(reasoned)["ended_in_reasoning"] == {}
    assert "By part" in (reasoned / "report.html").read_text()
    printed = specgen("report", reasoned).stdout
    assert all(part in printed for part in ("part ", "reasoning ", "answer "))
    assert "  of reasoning" in specgen("report", reasoned, reasoned).stdout


def test_a_text_cut_in_its_reasoning_has_no_answer_and_the_report_says_so(
    reasoning_pair: Path, questions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = generate(reasoning_pair, questions, out, "--max-new-tokens", 6, "--format", "openai")
    assert result.exit_code == 0, result.output
    found = rows(out)
    cut = [row for row in found if 19 not in row["token_ids"]]
    assert cut
    assert {row["text"] for row in cut} == {""}
    assert all(row["num_reasoning_tokens"] == len(row["token_ids"]) for row in cut)
    assert report(out)["ended_in_reasoning"] == {"length": sum(row["text"] == "" for row in found)}
    assert f"{len(cut)} answers ended while reasoning: raise --max-new-tokens." in result.stdout
    assert "(ended while reasoning) ..." in result.stdout
    assert "ended while reasoning" in (out / "report.html").read_text()
    check_parts(out, {row["id"]: until_marker(row, 19) for row in found}, 3)
    for line, row in zip((out / "batch_output.jsonl").read_text().splitlines(), found, strict=True):
        body = json.loads(line)["response"]["body"]
        message = body["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (row["reasoning"], row["text"])
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": row["num_reasoning_tokens"]}


def test_a_stop_string_is_looked_for_in_the_answer(
    reasoned: Path, reasoning_pair: Path, questions: Path, tmp_path: Path
) -> None:
    assert generate(reasoning_pair, questions, tmp_path / "out", "--stop", " 3").exit_code == 0
    for whole, row in zip(rows(reasoned), rows(tmp_path / "out"), strict=True):
        if row["turn"] == 1:
            assert " 3" in row["reasoning"]
            assert (row["reasoning"], row["text"]) == (whole["reasoning"], whole["text"].partition(" 3")[0])


@pytest.mark.slow
def test_shards_merge_to_the_same_parts(
    reasoned: Path, reasoning_pair: Path, questions: Path, tmp_path: Path
) -> None:
    shards = [tmp_path / "0", tmp_path / "1"]
    for number, shard in enumerate(shards):
        assert generate(reasoning_pair, questions, shard, "--shard", f"{number}/2").exit_code == 0
    printed("merge", tmp_path / "all", *shards)
    assert untimed(tmp_path / "all" / "completions.jsonl") == untimed(reasoned / "completions.jsonl")
    assert report(tmp_path / "all")["parts"] == report(reasoned)["parts"]


# --- sampled texts with markers anywhere ----------------------------------------------------------


@pytest.fixture(scope="module")
def think_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_pair(tmp_path_factory.mktemp("think"), write_think)


@pytest.mark.parametrize("spec", mostly_slow([0, 2], 2))
def test_sampled_texts_with_markers_anywhere_have_exact_parts(
    think_pair: Path, tmp_path: Path, spec: int
) -> None:
    from specgen.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(think_pair / "target"))
    opens, closes = (tokenizer.encode_rendered(marker)[0] for marker in THINK)
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    bias = {str(opens): 4, str(closes): 5}
    asked = [
        {
            "id": f"r{n}",
            "messages": [{"role": "user", "content": "?"}],
            "temperature": 1.0,
            "logit_bias": bias,
        }
        for n in range(40)
    ]
    write_rows(data, asked)
    models = models_of(think_pair, "--num-spec-tokens", spec)
    options = ["--chat-template-kwargs", '{"opens": true}', "--max-new-tokens", 12, "--output", out]
    printed("generate", *models, "--dataset", data, *options)
    found = rows(out)
    labels = {row["id"]: until_marker(row, closes) for row in found}
    assert len({tuple(each) for each in labels.values()}) > 5
    check_parts(out, labels, spec)
    ended = Counter(row["finish_reason"] for row in found if "answer" not in labels[row["id"]])
    assert report(out)["ended_in_reasoning"] == dict(ended)


def test_a_step_is_of_the_part_of_its_first_token() -> None:
    steps = [Step(0, (1, 2), 2, 3), Step(1, (1, 2), 0, 1), Step(2, (), 0, 1)]
    found = count_parts([(0, "reasoning"), (4, "answer")], steps, 6, 2)
    assert found.part == "answer"
    assert found.tokens == {"reasoning": 4, "answer": 2}
    assert found.steps["reasoning"].histogram == [0, 0, 1]
    assert found.steps["answer"].histogram == [1, 0, 0]
    assert found.steps["answer"].without_drafts == 1


def test_a_change_of_part_at_a_token_that_was_dropped_counts_no_tokens() -> None:
    found = count_parts([(0, "reasoning"), (3, "answer")], [], 1, 4)
    assert found.tokens == {"reasoning": 1, "answer": 0}


SHORT = ("--max-new-tokens", 6)  # for texts that no test reads

# --- the date -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def harmony_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_pair(tmp_path_factory.mktemp("harmony"), write_harmony)


def on(day: str, patch: pytest.MonkeyPatch) -> None:
    """It is ``day``."""
    patch.setattr(choices, "today", lambda: day)


def test_a_run_resumed_on_another_day_has_the_prompts_of_the_first(
    harmony_pair: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    kwargs = (*SHORT, "--chat-template-kwargs", '{"reasoning_effort": "high"}')
    on("2026-03-07", monkeypatch)
    assert generate(harmony_pair, questions, whole, *kwargs).exit_code == 0
    stopped = []

    def stop_soon(*given: Any, **named: Any) -> Any:
        stopped.append(1)
        if len(stopped) > 3:
            raise StoppedError("stopped")
        return add(*given, **named)

    from specgen.jobs.run import RunDirectory

    add = RunDirectory.add_completion
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "add_completion", stop_soon)
        assert generate(harmony_pair, questions, out, *kwargs).exit_code != 0
    assert len(rows(out)) == 3
    on("2026-03-08", monkeypatch)
    result = generate(harmony_pair, questions, out, *kwargs)
    assert result.exit_code == 0, result.output
    assert untimed(out / "completions.jsonl") == untimed(whole / "completions.jsonl")
    assert all("Date: 2026-03-07. Effort: high" in row["prompt"] for row in rows(out))
    recorded = json.loads((out / "manifest.json").read_text())
    assert recorded["engine"]["chat_template_kwargs"] == {
        "reasoning_effort": "high",
        "strftime_now": "2026-03-07",
    }
    assert '"strftime_now": "2026-03-07"' in recorded["settings"]["template"]
    assert report(out)["num_requests"] == report(whole)["num_requests"] == 6
    for other, field in (
        ('{"reasoning_effort": "low"}', r"chat_template_kwargs.reasoning_effort high -> low"),
        ('{"reasoning_effort": "high", "strftime_now": "2026-03-08"}', r"strftime_now 2026-03-07 -> 2026"),
        ("{}", r"reasoning_effort high -> not given"),
    ):
        refused = generate(harmony_pair, questions, out, *SHORT, "--chat-template-kwargs", other)
        refuses(refused, field)


@pytest.mark.slow
def test_the_date_is_the_users_or_that_of_a_new_run(
    harmony_pair: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("2026-03-07", monkeypatch)
    assert generate(harmony_pair, questions, tmp_path / "a", *SHORT).exit_code == 0
    on("2026-03-08", monkeypatch)
    assert generate(harmony_pair, questions, tmp_path / "a", *SHORT, "--restart").exit_code == 0
    assert all("Date: 2026-03-08" in row["prompt"] for row in rows(tmp_path / "a"))
    pinned = (*SHORT, "--chat-template-kwargs", '{"strftime_now": "2026-03-07"}')
    assert generate(harmony_pair, questions, tmp_path / "b", *pinned).exit_code == 0
    assert untimed(tmp_path / "b" / "completions.jsonl") == untimed(tmp_path / "a.1" / "completions.jsonl")


def test_without_chats_or_a_dated_template_no_date_is_recorded(
    harmony_pair: Path, think_pair: Path, questions: Path, tmp_path: Path
) -> None:
    own = tmp_path / "rows.jsonl"
    own.write_text('{"id": "a", "prompt": "Tom has"}\n')
    models = models_of(harmony_pair, "--max-new-tokens", 4)
    printed("generate", *models, "--dataset", own, "--output", tmp_path / "raw")
    assert generate(think_pair, questions, tmp_path / "chats", *SHORT).exit_code == 0
    for name in ("raw", "chats"):
        record = json.loads((tmp_path / name / "manifest.json").read_text())
        assert record["engine"]["chat_template_kwargs"] == {}
        assert "template" not in record["settings"]


@pytest.mark.slow
def test_wrong_kwargs_leave_no_directory_that_refuses_the_right_ones(
    think_pair: Path, questions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    models = models_of(think_pair, "--max-new-tokens", 4)
    wrong = ("--chat-template-kwargs", '{"enable_thinkin": false}')
    evaluation = ("eval", "word_problems", *models, "--apply-chat-template", "--limit", 2, "--num-fewshot", 0)
    own = tmp_path / "rows.jsonl"
    own.write_text('{"id": "a", "prompt": "Tom has"}\n')
    right = ("--chat-template-kwargs", '{"enable_thinking": false}')
    for arguments, reason in (
        (("generate", *models, *wrong), "enable_thinkin, which the chat template"),
        ((*evaluation, *wrong), "enable_thinkin, which the chat template"),
        (("generate", *models, "--dataset", own, *right), "no row of .* is a chat: remove it"),
    ):
        refused = specgen(*arguments, "--output", out)
        refuses(refused, reason)
        assert not (out / "manifest.json").exists()
        assert not (out / "study.json").exists()
    assert generate(think_pair, questions, out, *right).exit_code == 0


@pytest.mark.slow
def test_an_audit_renders_with_the_same_kwargs(
    harmony_pair: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("2026-03-07", monkeypatch)
    models = models_of(harmony_pair, "--max-new-tokens", 4)
    data = ["--dataset", "mt-bench", "--data-path", questions, "--batch-sizes", 2, "--json"]
    shown = printed("verify", *models, *data, "--chat-template-kwargs", '{"reasoning_effort": "low"}')
    engine = json.loads(shown)["manifest"]["engine"]
    assert engine["chat_template_kwargs"] == {"reasoning_effort": "low", "strftime_now": "2026-03-07"}


# --- evaluation -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_evaluation_scores_the_answer_alone(reasoning_pair: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    models = models_of(reasoning_pair)
    arguments = ("word_problems", *models, "--apply-chat-template", "--limit", 3, "--arms", "padded,baseline")
    printed("eval", *arguments, "--num-spec-tokens", 3, "--log-samples", "--output", out)
    found = rows(out / "padded")
    samples = json.loads((out / "padded" / "samples_word_problems.json").read_text())
    scored = {sample["doc_id"]: sample["resps"][0][0] for sample in samples}
    assert sorted(scored.values()) == sorted(row["text"] for row in found)
    assert all(19 in row["token_ids"] and row["reasoning"] and row["text"] for row in found)
    assert not any(row["reasoning"] in row["text"] for row in found)
    comparison = json.loads((out / "comparison.json").read_text())
    assert [arm["ended_in_reasoning"] for arm in comparison["arms"]] == [{}, {}]
    assert "ended while reasoning" not in comparison["sentence"]
    padded, baseline = comparison["arms"]
    parts = report(out / "padded")["parts"]
    assert padded["parts"] == parts
    assert parts["reasoning"]["total_num_output_tokens"] == sum(
        row["token_ids"].index(19) + 1 for row in found
    )
    assert baseline["parts"]["answer"]["num_drafts"] == 0
    assert "By part" in (out / "padded" / "report.html").read_text()


def test_an_evaluation_refuses_a_limit_that_would_cut_its_prompts(tmp_path: Path) -> None:
    arguments = ("word_problems", "--apply-chat-template", "--limit", 2, "--arms", "padded,baseline")
    refused = specgen("eval", *arguments, "--max-new-tokens", 2040, "--output", tmp_path / "out")
    message = (
        r"max-new-tokens is 2040 and a prompt of word_problems has \d+ tokens, in a context of 2048: lower it"
    )
    refuses(refused, message)


@pytest.mark.slow
def test_an_evaluation_counts_answers_that_ended_while_reasoning(
    reasoning_pair: Path, tmp_path: Path
) -> None:
    models = models_of(reasoning_pair)
    arguments = ("word_problems", *models, "--apply-chat-template", "--limit", 4, "--arms", "padded,baseline")
    out = tmp_path / "out"
    shown = printed("eval", *arguments, "--max-new-tokens", 3, "--output", out)
    assert {len(row["token_ids"]) for row in rows(out / "padded")} == {3}, "instead of the task's limit"
    sentence = " ".join(shown.split())
    assert "ended while reasoning: 4 of padded, 4 of baseline; raise --max-new-tokens." in sentence
    other = specgen("eval", *arguments, "--max-new-tokens", 4, "--output", out)
    refuses(other, r"max_new_tokens 3 -> 4")


@pytest.mark.slow
def test_an_evaluation_keeps_its_date_and_raw_text_takes_no_kwargs(
    harmony_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = models_of(harmony_pair, "--limit", 2)
    arguments = ["eval", "word_problems", *models, "--max-new-tokens", 4, "--num-spec-tokens", 2]
    given = ("--chat-template-kwargs", '{"reasoning_effort": "low"}')
    refused = specgen(*arguments, *given)
    refuses(refused, "prompts are raw text: add --apply-chat-template")
    arguments += ["--apply-chat-template", "--num-fewshot", 0, "--output", tmp_path / "out", *given]
    on("2026-03-07", monkeypatch)
    shown = printed(*arguments, "--arms", "padded,baseline", "--log-samples")
    assert 'template {"reasoning_effort": "low", "strftime_now": "2026-03-07"}' in shown
    samples = (tmp_path / "out" / "padded" / "samples_word_problems.json").read_text()
    assert "Date: 2026-03-07. Effort: low" in samples
    shutil.rmtree(tmp_path / "out" / "baseline")
    before = rows(tmp_path / "out" / "padded")
    on("2026-03-08", monkeypatch)
    printed(*arguments, "--arms", "padded,baseline")
    assert rows(tmp_path / "out" / "padded") == before
    for arm in ("padded", "baseline"):
        engine = json.loads((tmp_path / "out" / arm / "manifest.json").read_text())["engine"]
        assert engine["chat_template_kwargs"]["strftime_now"] == "2026-03-07"


def test_a_text_ends_at_any_of_the_end_tokens_of_the_generation_config(tmp_path: Path) -> None:
    ends = [7, 21, 30]
    random_pair(tmp_path, write_harmony)
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    bias = dict.fromkeys(map(str, ends), 4)
    asked = [
        {"id": f"r{n}", "prompt": "Tom", "temperature": 1.0, "logit_bias": bias, "seed": n} for n in range(30)
    ]
    write_rows(data, asked)
    models = models_of(tmp_path, "--num-spec-tokens", 2)
    printed("generate", *models, "--dataset", data, "--max-new-tokens", 20, "--output", out)
    found = rows(out)
    stopped = [row["token_ids"] for row in found if row["finish_reason"] == "stop"]
    assert {ids[-1] for ids in stopped} == set(ends)
    assert not any(set(ids[:-1]) & set(ends) for ids in stopped)
