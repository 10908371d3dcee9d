"""The phases before a first request: timed, and said."""

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specgen.cli import main as cli
from specgen.config import EngineConfig, SamplingParams, UserError
from specgen.config.bundled import data_directory
from specgen.core.engine_core import EngineCore
from specgen.core.running_batch import Columns
from specgen.core.step import StepResult, Steps
from specgen.engine.engine import Engine
from specgen.ops.jit_modules import Module
from specgen.record.startup import phase, startup_line, watched


def test_phases_and_the_rest_make_up_the_time() -> None:
    began = time.perf_counter()
    with watched(lambda done, total, names: None) as startup:
        for _ in range(2):
            with phase("weights"):
                time.sleep(0.02)
        time.sleep(0.03)
        with pytest.raises(ValueError, match="lost"), phase("memory"):
            raise ValueError("lost")
        seconds = startup.take()
    total = time.perf_counter() - began
    process = seconds.pop("process")
    assert process > 0.1, "python itself takes longer to start"
    assert [*seconds] == ["weights", "memory", "other"]
    assert seconds["weights"] >= 0.04 > seconds["memory"]
    assert seconds["other"] >= 0.03
    assert sum(seconds.values()) == pytest.approx(total, abs=0.01)
    assert [*startup.take()] == ["other"], "what was taken is not counted again"


def test_nobody_has_to_watch() -> None:
    with phase("weights"):
        """Nothing is shown."""
    with watched(lambda done, total, names: None) as startup:
        """Nor to the next one."""
    with phase("memory"):
        """Nor to an earlier one."""
    assert [*startup.take()] == ["process", "other"]


def test_a_line_names_the_phases_that_took_time() -> None:
    assert (
        startup_line({"process": 3.12, "kernels": 0.04, "weights": 5.0}) == "8.2 s (process 3.1, weights 5.0)"
    )


def test_prepare_prints_where_the_time_to_a_first_token_goes() -> None:
    result = CliRunner().invoke(cli.app, ["prepare", "--device", "cpu", "--num-spec-tokens", "2", "--quiet"])
    assert result.exit_code == 0, result.output
    seconds = {line[:14].strip(): float(line[14:].removesuffix(" s")) for line in result.stdout.splitlines()}
    first = ["process", "ranks", "weights", "memory", "warm-up", "first token", "other", "in all"]
    assert [*seconds] == first
    assert seconds.pop("in all") == pytest.approx(sum(seconds.values()), abs=0.5)


def test_graphs_of_every_size_and_k_are_captured_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int]] = []
    decode = Steps.decode

    def noted(self: Steps, columns: Columns, num_drafts: int) -> StepResult:
        asked.append((columns.num_rows, num_drafts))
        return decode(self, columns, num_drafts)

    monkeypatch.setattr(Steps, "decode", noted)
    monkeypatch.setattr(EngineCore, "sizes", lambda self, most: [1, 2, most])
    pair = [str(data_directory() / "demo" / name) for name in ("target", "drafter")]
    engine = Engine(
        EngineConfig(model=pair[0], drafter=pair[1], num_spec_tokens=2, max_batch_size=3, device="cpu")
    )
    asked.clear()
    engine.capture_graphs()
    assert set(asked) == {(1, 2), (2, 2), (3, 2)}
    answers = engine.generate(["1, 2,"], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(next(answers).token_ids) == 2
    with pytest.raises(UserError, match="the engine is generating already"):
        engine.capture_graphs()


def test_prepare_compiles_what_a_run_with_the_same_options_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool, float]] = []

    def needed(config: EngineConfig, checkpoints: object, expected: SamplingParams) -> list[Module]:
        asked.append((config.draft_length.most, config.draft_length.auto, expected.top_p))
        return []

    monkeypatch.setattr("specgen.engine.build.needed_modules", needed)
    options = ["--num-spec-tokens=3", "--temperature=1", "--top-p=.5", "--device=cpu", "--quiet"]
    assert CliRunner().invoke(cli.app, ["prepare", *options]).exit_code == 0
    assert asked == [(3, False, 0.9)]


def test_a_run_keeps_the_phases_of_its_start(tmp_path: Path) -> None:
    arguments = [
        "generate",
        "--output",
        str(tmp_path / "run"),
        "--num-prompts=1",
        "--max-new-tokens=2",
        "--quiet",
    ]
    result = CliRunner().invoke(cli.app, [*arguments, "--device=cpu", "--baseline"])
    assert result.exit_code == 0, result.output
    seconds = json.loads((tmp_path / "run" / "status.json").read_text())["startup_seconds"]
    phases = {"process", "checkpoints", "rows", "fingerprints", "weights", "memory", "warm-up", "other"}
    assert {*seconds} >= phases, "of both engines: those of the baseline are added"
    assert sum(seconds.values()) - seconds["process"] < 10
