"""``specgen score`` gives the scores of transformers and of lm-eval's path, row by row, and goes on where it ended."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.config.bundled import data_directory
from specgen.core.engine_core import EngineCore
from specgen.jobs import score as scoring
from specgen.jobs.score import ROWS
from specgen.text.tokenizer import Message, Tokenizer, load_tokenizer
from tests.commands import printed, refused, rows, specgen, write_rows
from tests.engines import Pair, nan_at
from tests.test_evaluation import config, lm, models, path  # noqa: F401  # fixtures
from tests.test_urls import lines, put

pytestmark = pytest.mark.xdist_group("eval_command")  # which imports as much
TARGET = data_directory() / "demo" / "target"
ROWS_ASKED: list[dict[str, Any]] = [
    {"id": "one", "prompt": "Tom has 3 bags and ", "completion": "he buys 4 more"},
    {"id": "several", "prompt": "Tom has 3 bags", "completions": [" and", " and buys 4.", "s", "\n\n"]},
    {
        "id": "chat",
        "messages": [{"role": "user", "content": "Hi"}],
        "completions": ["Hello", "\nBye 🙂"],
        "temperature": 1.0,
        "n": 3,
    },
    {"id": "ids", "prompt_token_ids": [5, 60, 226], "completion": "Tom"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(TARGET))


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The scores of these rows by id, in pieces of prompts."""
    place = tmp_path_factory.mktemp("scored")
    data, out = write_rows(place / "rows.jsonl", ROWS_ASKED), place / "out"
    printed("score", "--dataset", data, "--output", out, "--max-prefill-tokens", 5, "--max-batch-size", 3)
    found = rows(out / ROWS)
    assert [row["id"] for row in found] == [row["id"] for row in ROWS_ASKED]
    return {row["id"]: row["scores"] for row in found}


def test_scores_are_those_of_one_pass_of_transformers(
    scored: dict[str, list[dict[str, Any]]], tokenizer: Tokenizer
) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    for row in ROWS_ASKED:
        texts = row.get("completions") or [row["completion"]]
        assert [score["completion"] for score in scored[row["id"]]] == texts
        for text, score in zip(texts, scored[row["id"]], strict=True):
            if "messages" in row:
                chat = tokenizer.render_chat([Message(role="user", content="Hi")])
                whole = tokenizer.encode_rendered(chat + text)
            elif "prompt" in row:
                whole = tokenizer.encode_text(row["prompt"] + text)
            else:
                whole = [*row["prompt_token_ids"], *tokenizer.encode_rendered(text)]
            num = score["num_tokens"]
            assert whole[-num:] == score["token_ids"]
            assert text.lstrip(" ") in tokenizer.decode(score["token_ids"])
            with torch.inference_mode():
                logits = model(torch.tensor([whole])).logits[0, -num - 1 : -1].log_softmax(-1)
            wanted = torch.tensor(score["token_ids"])
            expected = logits.gather(1, wanted[:, None])[:, 0].tolist()
            assert score["logprobs"] == pytest.approx(expected, abs=1e-4)
            assert score["logprob"] == pytest.approx(sum(expected), abs=1e-3)
            assert score["greedy"] == bool((logits.argmax(-1) == wanted).all())
    assert {score["greedy"] for each in scored.values() for score in each} == {True, False}


def test_they_are_those_of_the_path_of_lm_eval(lm: Any, path: Path, tmp_path: Path) -> None:  # noqa: F811
    from lm_eval.api.instance import Instance

    pairs = [("Tom has ", "12 apples"), ("Tom has", " 12 apples"), ("Ein Känguru trinkt", " süßen Tee €")]
    asked = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0, metadata=("t", n, 1))
        for n, pair in enumerate(pairs)
    ]
    expected = lm.loglikelihood(asked)
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": a, "completion": b} for a, b in pairs])
    text = printed("score", "--model", path / "target", "--device", "cpu", "--dataset", data)
    found = [json.loads(line)["scores"][0] for line in text.splitlines()]
    for score, (log_prob, greedy) in zip(found, expected, strict=True):
        assert (score["logprob"], score["greedy"]) == (pytest.approx(log_prob, abs=1e-4), greedy)
    assert found[0]["num_tokens"] == found[1]["num_tokens"]


def test_a_token_across_the_boundary_is_the_completions(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Where lm-eval would score another text, without it."""
    whole = tokenizer.encode_text("Tom has")
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "Tom h", "completion": "as"}])
    (score,) = json.loads(printed("score", "--dataset", data))["scores"]
    assert tokenizer.encode_text("Tom h")[: len(whole)] != whole
    assert score["token_ids"] == whole[-1:]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a"}, "no completion: a row to score takes one of completion, completions"),
        (
            {"prompt": "a", "completion": "b", "completions": ["c"]},
            "completion and completions: a row to score",
        ),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"prompt": "a", "completion": 5}, "completion is 5, not a string"),
        ({"prompt": "a", "completions": []}, "completions is not a list with at least one element"),
        ({"prompt": "a", "completions": ["b", 5]}, "a text of completions is 5, not a string"),
        ({"completion": "b"}, "no prompt: a row takes one of"),
        ({"turns": ["a", "b"], "completion": "c"}, "a row of several turns has no place for a completion"),
        ({"prompt": "a " * 4000, "completion": "b"}, "tokens and there is room for"),
        ({"prompt_token_ids": [5000], "completion": "b"}, "token id 5000 is outside the vocabulary"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_a_row_that_cannot_be_scored_is_one_error(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"id": "good", "prompt": "Tom", "completion": " has"}, row])
    result = specgen("score", "--dataset", data, "--output", tmp_path / "out")
    assert result.exit_code == 3
    assert [each["id"] for each in rows(tmp_path / "out" / ROWS)] == ["good"]
    (error,) = rows(tmp_path / "out" / "errors.jsonl")
    assert error["error"].startswith("line 2: ")
    assert reason in error["error"]
    assert "specgen: failed: " in result.stderr


def test_scores_that_are_no_numbers_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = scoring.load_models

    def spoilt(*given: Any) -> Any:
        found = load(*given)
        return replace(found, target=nan_at(Pair(path=tmp_path, models=found), 5).models.target)

    monkeypatch.setattr(scoring, "load_models", spoilt)
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt_token_ids": [9, 5], "completion": "a"}])
    result = specgen("score", "--dataset", data, "--output", tmp_path / "out")
    assert "line 1: the model's logits were not finite (NaN)" in result.stderr
    assert rows(tmp_path / "out" / ROWS) == []


def test_it_goes_on_where_it_was_stopped(
    scored: dict[str, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a signal, and behind a torn line; what is answered is not asked again, and other settings are refused."""
    data, out = write_rows(tmp_path / "rows.jsonl", ROWS_ASKED), tmp_path / "out"
    command = ("score", "--dataset", data, "--output", out, "--max-batch-size", 1)
    score, asked, is_resumed = EngineCore.score, list[str](), False

    def stopping(self: EngineCore, requests: Any) -> Any:
        for number, each in enumerate(score(self, requests)):
            asked.append(each.request.id)
            if number == 2 and not is_resumed:
                os.kill(os.getpid(), signal.SIGTERM)
            yield each

    monkeypatch.setattr(EngineCore, "score", stopping)
    stopped = specgen(*command)
    assert stopped.exit_code == 75
    assert "rows done; the same command resumes the run" in stopped.stderr
    done = [row["id"] for row in rows(out / ROWS)]
    assert 0 < len(done) < len(ROWS_ASKED)
    with (out / ROWS).open("a") as file:
        file.write('{"id": "ids", "scores"')
    asked.clear()
    is_resumed = True
    with refused("holds a run that differs in --dtype"):
        raise specgen(*command, "--dtype", "bfloat16").exception or AssertionError
    printed(*command)
    assert {name.split("/")[0] for name in asked} == {*scored} - {*done}
    for row in rows(out / ROWS):
        for mine, theirs in zip(row["scores"], scored[row["id"]], strict=True):
            assert mine["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-5)
    assert [row["id"] for row in rows(out / ROWS)] == [*scored]
    with refused("is not empty and holds no run"):
        raise specgen("generate", "--output", out).exception or AssertionError


def test_shards_are_the_whole(scored: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    data, found = write_rows(tmp_path / "rows.jsonl", ROWS_ASKED), {}
    for index in range(2):
        out = tmp_path / f"{index}"
        printed("score", "--dataset", data, "--output", out, "--shard", f"{index}/2")
        found |= {row["id"]: len(row["scores"]) for row in rows(out / ROWS)}
    assert found == {name: len(scores) for name, scores in scored.items()}
    assert specgen("merge", tmp_path / "all", tmp_path / "1", tmp_path / "0").exit_code == 0
    merged = {row["id"]: row["scores"] for row in rows(tmp_path / "all" / ROWS)}
    assert [*merged] == [*scored]
    for name, scores in merged.items():
        for mine, theirs in zip(scores, scored[name], strict=True):
            assert mine["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-5)
    printed("score", "--dataset", data, "--output", tmp_path / "all")  # is finished
    with refused("shard and restart are about a directory"):
        raise specgen("score", "--dataset", data, "--shard", "0/2").exception or AssertionError


def test_merged_scores_keep_errors_and_refuse_what_does_not_fit(tmp_path: Path) -> None:
    asked = [*ROWS_ASKED, {"id": "none", "prompt": "a"}]
    data, other = (write_rows(tmp_path / f"{n}.jsonl", asked[:n]) for n in (5, 4))
    for index in range(2):
        code = specgen("score", "--dataset", data, "--output", tmp_path / f"{index}", "--shard", f"{index}/2")
        assert code.exit_code == (0 if index else 3)
    assert specgen("merge", tmp_path / "all", tmp_path / "0", tmp_path / "1").exit_code == 3
    assert [row["id"] for row in rows(tmp_path / "all" / "errors.jsonl")] == ["none"]
    printed("score", "--dataset", other, "--output", tmp_path / "2", "--shard", "1/2")
    for shards, reason in (
        (("0",), r"shard 1/2 is missing"),
        (("0", "2"), "are not shards of one run: they differ in"),
        (("0", "0"), "are both shard 0/2"),
        (("0", "1"), "output .*all' exists"),
    ):
        out = tmp_path / ("all" if "exists" in reason else "new")
        with refused(reason):
            raise specgen("merge", out, *(tmp_path / each for each in shards)).exception or AssertionError
    left = (tmp_path / "1" / ROWS).read_bytes().splitlines(keepends=True)
    (tmp_path / "1" / ROWS).write_bytes(left[0])
    with refused("have 4 rows for 5 requests: one of them is not finished"):
        raise specgen("merge", tmp_path / "new", tmp_path / "0", tmp_path / "1").exception or AssertionError
    (tmp_path / "1" / "requests.jsonl").unlink()
    with refused("has no requests.jsonl: give finished shards of `score --shard`"):
        raise specgen("merge", tmp_path / "new", tmp_path / "0", tmp_path / "1").exception or AssertionError
    assert not [each for each in tmp_path.iterdir() if each.name.startswith((".", "new"))]


def test_rows_may_be_in_a_store(scored: dict[str, list[dict[str, Any]]]) -> None:
    put("memory://in/score.jsonl", lines(ROWS_ASKED[:1]))
    found = json.loads(printed("score", "--dataset", "memory://in/score.jsonl"))
    assert found["scores"][0]["logprob"] == pytest.approx(scored["one"][0]["logprob"], abs=1e-5)
