"""A run's rows as a Batch API's files and as a Parquet table."""

import json

import pytest
from pyarrow import parquet

from specgen.jobs.run_output import Served, export_openai, export_parquet
from specgen.report.acceptance import RequestMetrics, metrics_of
from tests.streams import request

TEXTS = {1: "Hi", 2: " you", 3: "\N{REPLACEMENT CHARACTER}"}
SERVED = Served(model="m", created=1_700_000_000, token_text=TEXTS.__getitem__)


def row(row_id: str, *, drafts: int = 2, **more) -> dict:
    (found,) = request(row_id, [(drafts, drafts), (drafts, 0)])
    metrics = metrics_of(found.counts, (), drafts).to_row()
    return {
        "id": row_id,
        "prompt": "?",
        "text": "Hi you",
        "token_ids": [1, 2],
        "finish_reason": "length",
        "turn": 1,
        "num_prompt_tokens": 5,
        "metrics": metrics,
        "record": found.to_json(),
        **more,
    }


LOGPROBS = [{"chosen": -0.5, "top": [[1, -0.5], [3, -2.0]]}, {"chosen": -3.0, "top": [[1, -float("inf")]]}]


def export(path, rows, errors=()):
    files = (path / "batch_output.jsonl", path / "batch_errors.jsonl")
    export_openai(iter(rows), iter(errors), output=files[0], error_output=files[1], served=SERVED)
    return files


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_a_chat_completion_with_its_speculation(tmp_path):
    output, errors = export(tmp_path, [row("a", endpoint="/v1/chat/completions")])
    (line,) = lines(output)
    assert lines(errors) == []
    assert (line["custom_id"], line["error"], line["response"]["status_code"]) == ("a", None, 200)
    body = line["response"]["body"]
    assert (body["object"], body["model"], body["created"]) == ("chat.completion", "m", 1_700_000_000)
    message = {"role": "assistant", "content": "Hi you", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    assert body["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [1, 0, 1],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 2,
        "num_draft_tokens": 4,
        "num_spec_tokens": 2,
        "per_step_accepted": [2, 0],
        "num_steps_without_drafts": 0,
    }


def test_the_lists_of_metrics_are_those_of_the_record(tmp_path):
    """Which a row has once; steps that were not kept are not listed."""
    (recorded,) = request("a", [(2, 2), (0, 0), (1, 0)])
    whole = metrics_of(recorded.counts, (2, 0), 3)
    for kept, per_step in ((True, [2, 0]), (False, [])):
        given = row("a") | {"metrics": whole.to_row(), "record": recorded.to_json(with_steps=kept)}
        assert not any(isinstance(each, list) for each in given["metrics"].values())
        (line,) = lines(export(tmp_path, [json.loads(json.dumps(given))])[0])
        expected = {**json.loads(json.dumps(whole.to_json())), "per_step_accepted": per_step}
        assert line["response"]["body"]["metrics"]["speculative_decoding"] == expected
        export_parquet([given], tmp_path / "table.parquet")
        assert parquet.read_table(tmp_path / "table.parquet")["metrics"].to_pylist() == [expected]


def test_log_probabilities_in_the_form_of_each_endpoint(tmp_path):
    rows = [row("a", logprobs=LOGPROBS), row("b", logprobs=LOGPROBS, endpoint="/v1/completions")]
    chat, text = (
        line["response"]["body"]["choices"][0]["logprobs"] for line in lines(export(tmp_path, rows)[0])
    )
    hi = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}
    broken = {"token": "\N{REPLACEMENT CHARACTER}", "logprob": -2.0, "bytes": None}
    assert chat["content"][0] == hi | {"top_logprobs": [hi, broken]}
    assert chat["content"][1]["top_logprobs"] == [hi | {"logprob": -9999.0}]
    assert text == {
        "tokens": ["Hi", " you"],
        "token_logprobs": [-0.5, -3.0],
        "top_logprobs": [{"Hi": -0.5, "\N{REPLACEMENT CHARACTER}": -2.0}, {"Hi": -9999.0, " you": -3.0}],
        "text_offset": [0, 2],
    }


def test_failed_requests_have_their_own_file_and_the_same_rows_make_the_same_bytes(tmp_path):
    rows, errors = [row("a"), row("b")], [{"id": "line 3", "error": "line 3: not valid JSON"}]
    (tmp_path / "again").mkdir()
    first, second = (export(path, rows, errors) for path in (tmp_path, tmp_path / "again"))
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]
    output, failed = map(lines, first)
    names = [(line["id"], line["response"]["request_id"]) for line in output]
    assert len({name for pair in names for name in pair}) == 4
    (line,) = failed
    assert (line["custom_id"], line["response"]) == ("line 3", None)
    assert line["error"] == {"code": "request_failed", "message": "line 3: not valid JSON"}


def write_batch(rows, path):
    export_openai(rows, [], output=path, error_output=path.with_name("errors.jsonl"), served=SERVED)


@pytest.mark.parametrize("write", [write_batch, export_parquet])
def test_a_failed_export_keeps_the_old_file(tmp_path, write):
    def broken():
        yield row("a")
        raise OSError("no space left")

    path = tmp_path / "completions"
    path.write_text("earlier")
    with pytest.raises(OSError, match="no space left"):
        write(broken(), path)
    assert path.read_text() == "earlier"


def test_a_message_and_a_text_with_and_without_reasoning_and_speculation(tmp_path):
    parts = {"reasoning": "Hm", "num_reasoning_tokens": 1}
    chat, text_url = (f"/v1/{name}" for name in ("chat/completions", "completions"))
    rows = [row("a", endpoint=chat, **parts), row("b", endpoint=text_url, **parts), row("c", endpoint=chat)]
    output, _ = export(tmp_path, rows)
    bodies = [line["response"]["body"] for line in lines(output)]
    message = bodies[0]["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm", "Hi you")
    choice = bodies[1]["choices"][0]
    assert (choice["reasoning_content"], choice["text"]) == ("Hm", "Hi you")
    assert bodies[0]["usage"] == bodies[2]["usage"] | {"completion_tokens_details": {"reasoning_tokens": 1}}
    assert "reasoning_content" not in bodies[2]["choices"][0]["message"]
    plain = row("a", endpoint=text_url, drafts=0)
    body = lines(export(tmp_path, [plain])[0])[0]["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Hi you", "logprobs": None, "finish_reason": "length"}]
    assert "metrics" not in body, "without speculation"


def test_a_table_is_read_by_datasets_as_it_was_written(tmp_path):
    from datasets import load_dataset

    path = tmp_path / "completions.parquet"
    full = row("a", category="math", ended_by="context")
    rows = [full, row("b", logprobs=LOGPROBS), *(row(str(n)) for n in range(600))]
    export_parquet(iter(rows), path)
    table = load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert table["id"][:3] == ["a", "b", "0"]
    assert len(table) == 602
    names = ("endpoint", "logprobs", "prompt_token_ids", "prompt_logprobs")
    names += ("reasoning", "num_reasoning_tokens")
    metrics = json.loads(json.dumps(RequestMetrics.of_samples([full])))
    expected = {**dict.fromkeys(names), "sample": 0, **full, "metrics": metrics}
    del expected["record"]
    assert table[0] == expected
    assert table[1]["logprobs"][0] == {
        "chosen": -0.5,
        "top": [{"token_id": 1, "logprob": -0.5}, {"token_id": 3, "logprob": -2.0}],
    }


def test_a_table_is_written_in_groups_and_may_be_empty(tmp_path):
    path = tmp_path / "completions.parquet"
    export_parquet([], path)
    assert parquet.ParquetFile(path).metadata.num_rows == 0
    export_parquet((row(str(n)) for n in range(1100)), path)
    assert parquet.ParquetFile(path).metadata.num_row_groups == 3
