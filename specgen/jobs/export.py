"""The rows of a run in other formats: the two files of OpenAI's Batch API, and a Parquet table."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.rundir.atomic import replacement, write_json_lines

if TYPE_CHECKING:
    import pyarrow


_CHAT = "/v1/chat/completions"  # the default, for rows that are not of a batch
_MIN_LOGPROB = -9999.0  # minus infinity, which JSON cannot write, as in vLLM


@dataclass(frozen=True, kw_only=True)
class Served:
    """What all responses of a run share."""

    model: str
    created: int  # start of the run, seconds since 1970: a second export is identical
    token_text: Callable[[int], str]  # of one token id, for log-probabilities


def export_openai(
    completions: Iterable[Mapping[str, Any]],
    errors: Iterable[Mapping[str, Any]],
    *,
    output: Path,
    error_output: Path,
    served: Served,
) -> None:
    """Write the rows of ``completions.jsonl`` and ``errors.jsonl`` as a batch's two files, in their order.

    The lines are those of "The request output object" in OpenAI's API reference and of vLLM's ``run-batch``:
    ``custom_id`` is the id of the row, a chat or text completion is in ``response.body``, and a request that failed
    has no response but an ``error``. Each body has the request's speculation as vLLM's
    ``--per-request-spec-decode-metrics detailed`` gives it, in ``metrics.speculative_decoding``. Ids that a server
    makes at random are hashes of ``custom_id``, so the files are reproducible. Each is replaced atomically.
    """
    write_json_lines(output, (_answered(row, served) for row in completions))
    write_json_lines(error_output, (_failed(row) for row in errors))


def _answered(row: Mapping[str, Any], served: Served) -> dict[str, Any]:
    name = _digest(row["id"])
    response = {"status_code": 200, "request_id": f"req_{name}", "body": _body(row, name, served)}
    return {"id": f"batch_req_{name}", "custom_id": row["id"], "response": response, "error": None}


def _failed(row: Mapping[str, Any]) -> dict[str, Any]:
    error = {"code": "request_failed", "message": row["error"]}
    return {"id": f"batch_req_{_digest(row['id'])}", "custom_id": row["id"], "response": None, "error": error}


def _digest(row_id: str) -> str:
    return hashlib.sha256(row_id.encode()).hexdigest()[:32]


def _body(row: Mapping[str, Any], name: str, served: Served) -> dict[str, Any]:
    is_chat = row.get("endpoint", _CHAT) == _CHAT
    num_prompt, num_output = row["num_prompt_tokens"], len(row["token_ids"])
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": served.created,
        "model": served.model,
        "choices": [(_chat_choice if is_chat else _text_choice)(row, served.token_text)],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            **_details(row),
        },
    }
    if row["metrics"]["num_spec_tokens"]:
        body["metrics"] = {"speculative_decoding": row["metrics"]}
    return body


def _details(row: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the usage that is reasoning, where there is any."""
    if "reasoning" not in row:
        return {}
    return {"completion_tokens_details": {"reasoning_tokens": row["num_reasoning_tokens"]}}


def _chat_choice(row: Mapping[str, Any], token_text: Callable[[int], str]) -> dict[str, Any]:
    message = {"role": "assistant", "content": row["text"], "refusal": None}
    if "reasoning" in row:
        message["reasoning_content"] = row["reasoning"]
    logprobs = None
    if "logprobs" in row:
        content = [
            _token(token_text(token), each["chosen"])
            | {"top_logprobs": [_token(token_text(other), logprob) for other, logprob in each["top"]]}
            for token, each in zip(row["token_ids"], row["logprobs"], strict=True)
        ]
        logprobs = {"content": content, "refusal": None}
    return {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": row["finish_reason"]}


def _token(text: str, logprob: float) -> dict[str, Any]:
    # The bytes of an incomplete character cannot be recovered from its text.
    spelled = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, _MIN_LOGPROB), "bytes": spelled}


def _text_choice(row: Mapping[str, Any], token_text: Callable[[int], str]) -> dict[str, Any]:
    logprobs = None
    if "logprobs" in row:
        tokens = [token_text(token) for token in row["token_ids"]]
        chosen = [max(each["chosen"], _MIN_LOGPROB) for each in row["logprobs"]]
        top = [
            {token_text(other): max(value, _MIN_LOGPROB) for other, value in each["top"]} | {token: logprob}
            for each, token, logprob in zip(row["logprobs"], tokens, chosen, strict=True)
        ]
        offsets = list(accumulate((len(token) for token in tokens), initial=0))[:-1]
        logprobs = {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}
    reasoning = {"reasoning_content": row["reasoning"]} if "reasoning" in row else {}
    end = {"logprobs": logprobs, "finish_reason": row["finish_reason"]}
    return {"index": 0, "text": row["text"], **reasoning, **end}


_ROW_GROUP = 512  # rows in memory at a time


def export_parquet(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write the rows of ``completions.jsonl`` as ``path``, which ``datasets.load_dataset("parquet")`` reads.

    The columns are fixed; ``category``, ``endpoint``, ``logprobs`` and the two of reasoning are null
    where a row has none. Memory is that of
    one row group, and the file is replaced atomically.
    """
    from pyarrow import Table, parquet

    schema, remaining = _schema(), iter(rows)
    with replacement(path) as file, parquet.ParquetWriter(file, schema) as writer:
        while group := [_table_row(row) for row in islice(remaining, _ROW_GROUP)]:
            writer.write_table(Table.from_pylist(group, schema=schema))


def _table_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` with log-probabilities as objects: a list of a column cannot mix ids and floats."""
    if "logprobs" not in row:
        return dict(row)
    logprobs = [
        {
            "chosen": each["chosen"],
            "top": [{"token_id": token, "logprob": value} for token, value in each["top"]],
        }
        for each in row["logprobs"]
    ]
    return {**row, "logprobs": logprobs}


def _schema() -> "pyarrow.Schema":
    import pyarrow as pa

    text, whole_number, number = pa.string(), pa.int64(), pa.float64()
    likely = pa.struct({"token_id": whole_number, "logprob": number})
    metrics = {
        "mean_acceptance_length": number,
        "draft_acceptance_rate": number,
        "acceptance_histogram": pa.list_(whole_number),
        "num_spec_steps": whole_number,
        "num_accepted_draft_tokens": whole_number,
        "num_draft_tokens": whole_number,
        "num_spec_tokens": whole_number,
        "per_step_accepted": pa.list_(whole_number),
        "num_steps_without_drafts": whole_number,
    }
    columns = {
        "id": text,
        "prompt": text,
        "reasoning": text,
        "num_reasoning_tokens": whole_number,
        "text": text,
        "token_ids": pa.list_(whole_number),
        "finish_reason": text,
        "ended_by": text,
        "turn": whole_number,
        "num_prompt_tokens": whole_number,
        "category": text,
        "endpoint": text,
        "logprobs": pa.list_(pa.struct({"chosen": number, "top": pa.list_(likely)})),
        "metrics": pa.struct(metrics),
    }
    return pa.schema(list(columns.items()))
