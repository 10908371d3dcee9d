"""The requests of a run as columns: what is one unit, which row is damaged, how much memory they take."""

import json
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specgen.record import columns
from specgen.record.record_rows import RequestRow, count_parts, turn_id
from specgen.report.acceptance import Acceptance, figures
from tests.commands import refused
from tests.streams import request, write_session


def a_run(path: Path, rows: Sequence[RequestRow], change: Callable[[dict[str, Any]], object]) -> Path:
    """A directory with ``rows``, each changed."""
    write_session(path, rows)
    file = path / "completions.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()]
    for row in found:
        change(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def test_turns_and_samples_of_one_prompt_are_one_unit(tmp_path: Path) -> None:
    """Also where the first turn comes later in the file, or is missing."""
    rows = [
        *request(turn_id("b", 2), [(2, 1)], turn=2, num_turns=2),
        *request("a", [(2, 2)]),
        *request("b", [(2, 0)], num_turns=2),
        *request("c", [(2, 0)]),
        *request(turn_id("lost", 2), [(2, 0)], turn=2, num_turns=2),
    ]
    prompts = {"a": "same", "b": "other", "c": "same"}
    a_run(tmp_path, rows, lambda row: row.update(prompt=prompts.get(row["id"], row["id"])))
    run = columns.read(tmp_path, 2)
    assert run.unit.tolist() == [0, 1, 0, 1, 4]
    length = Acceptance(run).length
    assert (length.groups, length.hits, length.trials) == (3, 3, 5)


def test_the_parts_of_texts_add_up_to_the_whole() -> None:
    (whole,), (plain,) = request("a", [(3, 2), (3, 0), (0, 0)]), request("b", [(2, 1)])
    parts = count_parts([(0, "reasoning"), (3, "answer")], whole.steps or (), whole.num_output_tokens, 3)
    run = columns.of([replace(whole, parts=parts), plain], 3)
    found = {part: each.speculation() for part, each in figures(run, "part").items()}
    assert {part: (each.num_requests, each.num_drafts) for part, each in found.items()} == {
        "reasoning": (1, 1),
        "answer": (2, 2),
    }
    assert sum(each.total_num_output_tokens for each in found.values()) == 6 + 3
    assert found["answer"].num_steps_without_drafts == 1
    assert figures(columns.of([plain], 3), "part")["reasoning"].speculation().num_requests == 0


def test_a_category_that_is_called_as_none_is_one_with_those_without() -> None:
    rows = [*request("a", [(1, 1)]), *request("b", [(1, 0)], category="x"), *request("c", [(1, 1)])]
    rows[2] = replace(rows[2], category=columns.NO_CATEGORY)
    assert {name: group.names for name, group in columns.of(rows, 1).by("category").items()} == {
        columns.NO_CATEGORY: ["a", "c"],
        "x": ["b"],
    }


def test_counts_that_need_more_than_two_bytes_are_kept() -> None:
    (short,), (long,) = request("a", [(2, 1)]), request("b", [(2, 2)])
    many = 70_000
    counts = type(long.counts)([many] * 2, [many] * 2, [many] * 2, [0, 0, many])
    run = columns.of([short, replace(long, counts=counts)] + [short] * 1100, 4)
    assert run.counts.num_accepted[:3].tolist() == [1, 2 * many, 1]
    assert (run.counts.accepted.dtype, run.counts.num_spec_tokens) == (np.uint32, 4)
    assert columns.of([short] * 1100, 4).counts.accepted.dtype == np.uint16


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda row: row.update(token_ids="1"), "Expected `array"),
        (lambda row: row.update(turn=None), "turn"),
        (lambda row: row["record"]["counts"]["drafted"].append(3), "lists of 3, 2, 2, 3"),
        (lambda row: row["record"]["counts"].update(unverified=-1), "Expected `int` >= 0"),
        (lambda row: row.update(num_prompt_tokens=1 << 40), "num_prompt_tokens"),
        (
            lambda row: row["record"].update(parts={"part": "answer", "steps": {}, "tokens": {}}),
            "the parts of",
        ),
        (lambda row: row["record"].update(session="0/1"), "invalid literal"),
    ],
)
def test_a_row_that_another_program_has_damaged_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    a_run(tmp_path, [*request("a", [(2, 1)])], change)
    with refused(
        rf"completions.jsonl: the row of 'a' is damaged .*{says}.*: remove that line, and run the same"
    ):
        columns.read(tmp_path, 2)


def test_parts_that_do_not_add_up_are_damage(tmp_path: Path) -> None:
    (row,) = request("a", [(2, 1), (2, 2)])
    parts = count_parts([(0, "reasoning"), (3, "answer")], row.steps or (), row.num_output_tokens, 2)

    def damage(found: dict[str, Any]) -> None:
        found["record"]["parts"]["steps"]["answer"]["level_reached"][3] = 1

    a_run(tmp_path, [replace(row, parts=parts)], damage)
    with refused("the row of 'a' is damaged .*the parts of the text have StepCounts"):
        columns.read(tmp_path, 2)


def test_infinite_log_probabilities_are_read(tmp_path: Path) -> None:
    """Which are no JSON."""
    a_run(tmp_path, [*request("a", [(2, 1)])], lambda row: row.update(logprobs=-float("inf")))
    assert "-Infinity" in (tmp_path / "completions.jsonl").read_text()
    assert columns.read(tmp_path, 2).counts.num_accepted.tolist() == [1]


def test_a_run_takes_as_much_memory_as_is_said() -> None:
    """Some 100 bytes a request and 6 K, beside the ids."""
    (row,) = request("a", [(8, 3)] * 40)
    tracemalloc.start()
    run = columns.of((row for _ in range(20_000)), 8)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(run) == 20_000
    assert kept / 20_000 < 100 + 6 * 8 + 60  # levels of confidence take 48
    assert peak / 20_000 < 2 * kept / 20_000
