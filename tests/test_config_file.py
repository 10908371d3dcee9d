"""``--config FILE.yaml``, and the files with which runs repeat themselves."""

import json
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from specgen.cli.help import Command
from specgen.cli.options import repeating, with_options
from specgen.config import DraftLength, EngineConfig, SamplingParams, UserError, option
from tests.commands import printed, refused
from tests.jobs import untimed

SEEN: dict[str, Any] = {}


@with_options
def work(
    *,
    ctx: typer.Context,
    tasks: Annotated[list[str] | None, typer.Argument()] = None,
    engine: EngineConfig,
    sampling: SamplingParams,
    sizes: str = option("1,8", "Running", "Sizes."),
    restart: bool = option(False, "Results", "Over."),
) -> None:
    SEEN.update(
        tasks=tasks, engine=engine, sampling=sampling, sizes=sizes, restart=restart, again=repeating(ctx)
    )


def called(*arguments: str) -> dict[str, Any]:
    app = typer.Typer(add_completion=False)
    app.command(cls=Command)(work)
    SEEN.clear()
    result = CliRunner().invoke(app, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return dict(SEEN)


def file_of(path: Path, text: str) -> str:
    file = path / "some.yaml"
    file.write_text(text, encoding="utf-8")
    return f"--config={file}"


WRITTEN = """
tasks: [a, b]
num-spec-tokens: 3
cuda_graphs: off           # a text, not false
prefix-cache: false
chat-template-kwargs: {enable_thinking: false, effort: low}
sizes: [1, 4]
temperature: 5e-1
stop: ["\\n\\n", "off", "007"]
"""


def test_a_file_says_what_a_command_line_says(tmp_path):
    found = called(file_of(tmp_path, WRITTEN))
    spelled = called(
        *("a", "b", "--num-spec-tokens=3", "--cuda-graphs=off", "--no-prefix-cache", "--sizes=1,4"),
        '--chat-template-kwargs={"enable_thinking": false, "effort": "low"}',
        *("--temperature=0.5", "--stop=\n\n", "--stop=off", "--stop=007"),
    )
    assert {**found, "again": ""} == {**spelled, "again": ""}
    assert found["sampling"].stop == ("\n\n", "off", "007")
    assert found["engine"].template_kwargs.values == {"enable_thinking": False, "effort": "low"}


def test_a_file_may_use_vllms_names(tmp_path):
    file = file_of(tmp_path, "max_num_seqs: 3\nnum-speculative-tokens: auto\n")
    made = called(file)["engine"]
    assert (made.max_batch_size, made.num_spec_tokens) == (3, DraftLength.of("auto"))
    assert called(file, "--max-num-seqs=4")["engine"].max_batch_size == 4


def test_the_command_line_wins(tmp_path):
    found = called(file_of(tmp_path, WRITTEN), "c", "--prefix-cache", "--stop=x", "--num-spec-tokens=auto")
    assert found["tasks"] == ["c"]
    assert found["sampling"].stop == ("x",)
    assert found["engine"].prefix_cache is True
    assert found["engine"].num_spec_tokens == called("--num-spec-tokens=auto")["engine"].num_spec_tokens
    assert found["sizes"] == "1,4"


def test_what_a_run_writes_repeats_it(tmp_path):
    arguments = (
        *("b", "--stop=007", "--stop=\n", "--stop=３", "--no-prefix-cache", "--kv-memory=2GiB", "--seed=3"),
    )
    first = called(*arguments, "--restart", "--sizes=8", "--dtype=float16", "--min-p=1e-05")
    again = called(file_of(tmp_path, first["again"]))
    assert again == {**first, "restart": False}, "and the file of the second run is that of the first"
    assert "max-new-tokens" not in first["again"], "only what was asked for"
    overridden = called(file_of(tmp_path, first["again"]), "--seed=4")
    assert yaml.safe_load(overridden["again"])["seed"] == 4


def test_nothing_asked_for_is_an_empty_file(tmp_path):
    assert called(file_of(tmp_path, called()["again"])) == called()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num-spec-token: 3", r"line 1: unknown option 'num-spec-token' \(did you mean num-spec-tokens\?\)"),
        ("seed: 1\nconfig: a", "line 2: config is for the command line alone"),
        ("restart: true", "restart is for the command line alone"),
        (
            "no-prefix-cache: true",
            "line 1: no-prefix-cache is set by its opposite: write prefix-cache: false",
        ),
        ("seed: 1\nseed: 2", "line 2: seed is set twice"),
        ("top_k: 1\ntop-k: 1", "line 2: top-k is set twice"),
        ("max-num-seqs: 1\nmax_batch_size: 1", "line 2: max-batch-size is set twice"),
        ("seed:", "seed has no value"),
        ("seed: null", "seed has no value"),
        ("stop: [[a]]", "stop is a list of more than texts"),
        ("- a", "holds no settings: write NAME: VALUE lines"),
        ("a: [", "is not valid YAML"),
        ("a: \x00", "is not valid YAML"),
        ("seed: many", "config sets seed to 'many': "),
        ("prefix-cache: 2", "config sets prefix-cache to '2': "),
        ("dtype: float8", "config sets dtype to 'float8': "),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, text, said):
    with refused(said):
        called(file_of(tmp_path, text))


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"config '.*none.yaml' cannot be read \(No such file"):
        called(f"--config={tmp_path / 'none.yaml'}")


def test_a_run_is_repeated_by_its_file(finished, tmp_path):
    first, second = finished.non_padded, tmp_path / "second"
    printed("generate", f"--config={first / 'config.yaml'}", f"--output={second}")
    texts = [untimed(path / "completions.jsonl") for path in (first, second)]
    assert texts[0] == texts[1]
    manifests = [json.loads((path / "manifest.json").read_text()) for path in (first, second)]
    assert manifests[0]["engine"] == manifests[1]["engine"]
    again = printed("generate", f"--config={second / 'config.yaml'}")
    assert "mean acceptance length" in again, "the same command, finished, prints its report"


@pytest.mark.slow
def test_an_audit_is_repeated_by_its_file(tmp_path):
    asked = ("verify", "--num-prompts=1", "--max-new-tokens=4", "--batch-sizes=1")
    printed(*asked, f"--output={tmp_path / 'a.json'}")
    printed("verify", f"--config={tmp_path / 'a.config.yaml'}", f"--output={tmp_path / 'b.json'}")
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert first["arms"] == second["arms"]
