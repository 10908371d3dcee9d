"""Costs of steps are kept between runs, and used only where all that they depend on is the same."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.checkpoints.cache_files import cache_directory
from specgen.config import DraftLength, EngineConfig, TemplateKwargs
from specgen.core.spec_length import CheapestLength, StepCosts
from specgen.engine import build, step_costs
from specgen.engine.build import build_engine
from specgen.engine.choices import Checkpoints
from specgen.engine.loading import open_checkpoints
from specgen.engine.step_costs import costs_for, forget, key_of
from tests.engines import Pair, config_of
from tests.tiny_checkpoints import write_head, write_target

STATE = {"driver": "580.95", "max_clock_mhz": 1980.0, "power_limit_watts": 700.0}


class Machine:
    """A GPU as the system tells of it; counts how often steps are measured on it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {**STATE, "load": 3.0, "clock_mhz": 1005.0}
        self.device: dict[str, Any] = {"name": "H100", "host": "a"}
        self.versions = {"specgen": "1", "torch": "2"}
        self.source = "abc"
        self.compiles = True
        self.measured = 0
        self.sizes = [1, 2, 3]

    def measure(self) -> StepCosts:
        self.measured += 1
        return StepCosts(
            seconds={(n, k): 0.01 * n + 0.001 * k + self.measured / 7 for n in self.sizes for k in (0, 1, 2)}
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    made = Machine()
    monkeypatch.setattr(step_costs, "machine_state", lambda uuid: made.state)
    monkeypatch.setattr(step_costs, "uuid", lambda name: "GPU-1")
    monkeypatch.setattr(step_costs, "device", lambda name: made.device)
    monkeypatch.setattr(step_costs, "versions", lambda: made.versions)
    monkeypatch.setattr(step_costs, "_source", lambda: made.source)
    monkeypatch.setattr(step_costs, "runs_on", lambda device: made.compiles)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = tmp_path_factory.mktemp("pair")
    write_head(path / "drafter", write_target(path / "target"))
    return EngineConfig(
        model=str(path / "target"),
        drafter=str(path / "drafter"),
        num_spec_tokens=DraftLength(most=2, auto=True),
        max_batch_size=3,
        device="cuda:0",
    )


@pytest.fixture
def checkpoints(pair: EngineConfig) -> Checkpoints:
    return open_checkpoints(pair)


def test_a_later_run_uses_what_an_earlier_one_measured(
    machine: Machine, pair: EngineConfig, checkpoints: Checkpoints
) -> None:
    first = costs_for(pair, checkpoints, machine.measure)
    assert costs_for(pair, checkpoints, machine.measure).seconds == first.seconds
    machine.state = {**STATE, "load": 0.1, "clock_mhz": 1980.0, "gpu_use_percent": 5.0}
    dated = replace(pair, chat_template_kwargs=TemplateKwargs.of({"strftime_now": "2026-01-31"}))
    assert costs_for(dated, checkpoints, machine.measure).seconds == first.seconds
    assert machine.measured == 1
    forget()
    costs_for(pair, checkpoints, machine.measure)
    assert machine.measured == 2


CHANGES: dict[str, Callable[[Machine, pytest.MonkeyPatch], None]] = {
    "compiler": lambda machine, patch: setattr(machine, "compiles", False),
    "driver": lambda machine, patch: machine.state.update(driver="590.1"),
    "power limit": lambda machine, patch: machine.state.update(power_limit_watts=300.0),
    "GPU": lambda machine, patch: machine.device.update(name="H200"),
    "torch": lambda machine, patch: machine.versions.update(torch="3"),
    "source": lambda machine, patch: setattr(machine, "source", "abd"),
    "environment": lambda machine, patch: patch.setenv("CUDA_LAUNCH_BLOCKING", "1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_on_another_machine_they_are_measured_again(
    machine: Machine, pair: EngineConfig, checkpoints: Checkpoints, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = costs_for(pair, checkpoints, machine.measure)
    CHANGES[name](machine, monkeypatch)
    assert costs_for(pair, checkpoints, machine.measure).seconds != first.seconds
    assert machine.measured == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"num_spec_tokens": DraftLength(most=1, auto=True)},
        {"max_batch_size": 4},
        {"dtype": "float16"},
        {"kv_dtype": "fp8"},
        {"cuda_graphs": "off"},
        {"tensor_parallel": 2},
        {"drafter_batch": "non-padded"},
    ],
    ids=str,
)
def test_with_other_settings_they_are_measured_again(
    machine: Machine, pair: EngineConfig, checkpoints: Checkpoints, changed: dict[str, Any]
) -> None:
    costs_for(pair, checkpoints, machine.measure)
    costs_for(replace(pair, **changed), checkpoints, machine.measure)
    assert machine.measured == 2


def test_other_weights_are_measured_again(machine: Machine, pair: EngineConfig) -> None:
    costs_for(pair, open_checkpoints(pair), machine.measure)
    weights = Path(pair.model) / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    costs_for(pair, open_checkpoints(pair), machine.measure)
    config = Path(pair.model) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "some": "thing"}))
    costs_for(pair, open_checkpoints(pair), machine.measure)
    assert machine.measured == 3


SPOILT = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "foreign": lambda text: '["another program\'s"]',
    "other key": lambda text: text.replace("580.95", "580.96"),
    "other points": lambda text: json.dumps({**json.loads(text), "seconds": json.loads(text)["seconds"][1:]}),
    "zero": lambda text: json.dumps({**json.loads(text), "seconds": with_first(text, 0)}),
    "nan": lambda text: json.dumps({**json.loads(text), "seconds": with_first(text, float("nan"))}),
    "text": lambda text: json.dumps({**json.loads(text), "seconds": with_first(text, "fast")}),
}


def with_first(text: str, seconds: object) -> list[list[object]]:
    (n, k, _), *others = json.loads(text)["seconds"]
    return [[n, k, seconds], *others]


@pytest.mark.parametrize("name", SPOILT)
def test_a_file_that_is_not_what_was_written_is_said_and_replaced(
    machine: Machine,
    pair: EngineConfig,
    checkpoints: Checkpoints,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    costs_for(pair, checkpoints, machine.measure)
    (file,) = cache_directory("step-costs").iterdir()
    file.write_text(SPOILT[name](file.read_text()))
    second = costs_for(pair, checkpoints, machine.measure)
    assert machine.measured == 2
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith(f"costs of steps kept in {file} not used (")
    assert costs_for(pair, checkpoints, machine.measure).seconds == second.seconds
    assert machine.measured == 2


def test_where_nothing_can_be_written_a_run_goes_on(
    machine: Machine,
    pair: EngineConfig,
    checkpoints: Checkpoints,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "cache").write_text("a file")
    assert costs_for(pair, checkpoints, machine.measure).seconds
    assert "cannot be kept in" in caplog.text


def test_nothing_is_left_of_a_file_that_could_not_be_written_whole(
    machine: Machine, pair: EngineConfig, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert costs_for(pair, checkpoints, machine.measure).seconds
    assert [*cache_directory("step-costs").iterdir()] == []


def test_a_user_without_a_home_goes_on_too(
    machine: Machine,
    pair: EngineConfig,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    forget()
    assert costs_for(pair, checkpoints, machine.measure).seconds
    assert [each.getMessage().split(" in ")[0] for each in caplog.records] == [
        "costs of steps cannot be kept"
    ]


def test_what_is_not_whole_is_not_kept(
    machine: Machine, pair: EngineConfig, checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    machine.sizes = [1, 2]  # the cache has no room for three
    costs_for(pair, checkpoints, machine.measure)
    costs_for(pair, checkpoints, machine.measure)
    assert machine.measured == 2
    assert not caplog.records


def test_nothing_is_kept_of_a_cpu_or_where_no_driver_is_known(
    machine: Machine, pair: EngineConfig, checkpoints: Checkpoints
) -> None:
    assert key_of(pair, checkpoints) is not None
    assert key_of(replace(pair, device="cpu"), checkpoints) is None
    del machine.state["driver"]
    assert key_of(pair, checkpoints) is None


def test_the_source_of_this_package_is_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_costs, "files", lambda package: tmp_path)
    (tmp_path / "a").mkdir()
    seen = set()
    first = ("a/b.py", "1")
    for name, text in (first, *((f"a/{name}", "2") for name in ("b.py", "c.py", "e.cu", "f.toml", "d.txt"))):
        (tmp_path / name).write_text(text)
        seen.add(step_costs._source())
    assert len(seen) == 5, "and nothing else is"


def test_an_engine_takes_what_is_kept(
    random_pair: Pair, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(random_pair, num_spec_tokens=DraftLength(most=2, auto=True), max_batch_size=3)
    monkeypatch.setattr(step_costs, "key_of", lambda config, checkpoints: {"all": "the same"})
    first = build_engine(config, random_pair.models, lambda event: None).spec_length
    monkeypatch.setattr(build.step_costs, "measure", lambda *asked: pytest.fail("measured again"))
    second = build_engine(config, random_pair.models, lambda event: None).spec_length
    assert isinstance(first, CheapestLength)
    assert isinstance(second, CheapestLength)
    assert first._costs.seconds == second._costs.seconds
    with pytest.raises(pytest.fail.Exception):  # watched steps take longer than others, and are not kept
        build_engine(config, random_pair.models, lambda event: None, lambda runner: runner)
