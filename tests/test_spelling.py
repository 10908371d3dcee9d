"""Names near a misspelt one, and none where nothing is near."""

from pathlib import Path

import pytest

from specgen.config import UserError
from specgen.config.errors import did_you_mean, nearest
from specgen.experiments.matrices import find_matrix
from specgen.prompts import load_prompts


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("mtbench", "mt-bench"), ("mt_bench", "mt-bench"), ("MT-Bench", "mt-bench"), ("gsm8", "gsm8k")),
        *(("human_eval", "humaneval"), ("bundeld", "bundled"), ("xyz", None)),
    ],
)
def test_a_data_set_is_suggested(name: str, meant: str | None) -> None:
    with pytest.raises(UserError) as refused:
        load_prompts(name, data_path=None, num_prompts=None)
    hint = "" if meant is None else f" (did you mean {meant}?)"
    assert str(refused.value).startswith(
        f"dataset is {name!r}, neither a known name nor a file{hint}: use bundled"
    )


def test_a_matrix_is_suggested() -> None:
    with pytest.raises(UserError, match=r"matrix is 'batch-k' \(did you mean batch-and-k\?\): use one of"):
        find_matrix("batch-k")


def test_a_row_without_a_prompt_says_how_to_name_its_field(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"a": "x"}\n')
    _, (rejected,) = load_prompts(str(file), data_path=None, num_prompts=None)
    assert "name a field with --prompt-field; this one has 'a'" in rejected.reason


def test_case_and_hyphens_do_not_count_and_a_known_name_is_no_mistake() -> None:
    assert nearest("Top_P", ["top-k", "top-p"]) == "top-p"
    assert nearest("top_q", ["top_p"], likeness=0.9) is None
    assert did_you_mean("batch", ["batch", "batches"]) == ""
