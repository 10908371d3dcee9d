"""The start of a run and its progress, in a terminal and in a file."""

import io
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from specgen.cli import progress_bar
from specgen.cli.printing import print_files
from specgen.cli.progress_bar import progress
from specgen.config import Cluster, EngineConfig, SamplingParams, UserError
from specgen.config.bundled import data_directory
from specgen.config.urls import Url
from specgen.core.engine_core import EngineCore
from specgen.core.running_batch import Columns
from specgen.core.spec_length import StepPlan
from specgen.core.step import StepResult, Steps
from specgen.engine.engine import Engine
from specgen.jobs.ray_engine import _resources
from specgen.ops.jit_modules import Module
from specgen.record.progress import Tally
from specgen.record.record_rows import Captured, EngineRow, OutOfMemory
from specgen.record.startup import phase, startup_line, watched
from specgen.report.display import clock
from tests.commands import printed, specgen
from tests.fixtures import FinishedRuns
from tests.streams import decode_steps, pass_row


def test_phases_and_the_rest_make_up_the_time(own_time: Callable[[float], None]) -> None:
    began = time.perf_counter()
    with watched(lambda done, total, names: None) as startup:
        for _ in range(2):
            with phase("weights"):
                own_time(20.0)
        own_time(30.0)
        with pytest.raises(ValueError, match="lost"), phase("memory"):
            raise ValueError("lost")
        seconds = startup.take()
    total = time.perf_counter() - began
    process = seconds.pop("process")
    assert process > 0.1, "python itself takes longer to start"
    assert [*seconds] == ["weights", "memory", "other"]
    assert seconds == pytest.approx({"weights": 40.0, "memory": 0.0, "other": 30.0}, abs=1.0)
    assert sum(seconds.values()) == pytest.approx(total, abs=1.0)
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
    result = printed("prepare", "--device", "cpu", "--num-spec-tokens", "2", "--quiet")
    seconds = {line[:14].strip(): float(line[14:].removesuffix(" s")) for line in result.splitlines()}
    first = ["process", "ranks", "weights", "memory", "warm-up", "first token", "other", "in all"]
    assert [*seconds] == first
    assert seconds.pop("in all") == pytest.approx(sum(seconds.values()), abs=0.5)


def test_graphs_of_every_size_and_k_are_captured_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int]] = []
    decode = Steps.decode

    def noted(self: Steps, columns: Columns, plan: StepPlan) -> StepResult:
        asked.append((columns.num_rows, plan.num_drafts))
        return decode(self, columns, plan)

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
    printed("prepare", *options)
    assert asked == [(3, False, 0.9)]


def test_a_run_keeps_the_phases_of_its_start(finished: FinishedRuns) -> None:
    seconds = json.loads((finished.padded / "status.json").read_text())["startup_seconds"]
    phases = {"process", "checkpoints", "rows", "fingerprints", "weights", "memory", "warm-up", "other"}
    assert {*seconds} >= phases, "of both engines: those of the baseline are added"
    assert sum(seconds.values()) - seconds["process"] < 60


SHORT = OutOfMemory(time=0.0, max_batch_size=2, max_prefill_tokens=64)
GRAPH = Captured(time=0.0, what="step", num_sequences=8, seconds=1.5, fits=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def followed(
    monkeypatch: pytest.MonkeyPatch, file: io.StringIO, *passes: EngineRow, quiet: bool = False
) -> str:
    """What is written to ``file`` of ten requests, of which three were done and a second goes by between two.

    Before them four modules are compiled, a second apart.
    """
    now = 0.0
    monkeypatch.setattr("sys.stderr", file)
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now)
    monkeypatch.setattr(progress_bar, "_BETWEEN", 3)
    shown, names = progress(quiet), ["FA3", "XQA, 1 row", "XQA, 5 rows", "FA2"]
    for done in range(5):
        shown.compiling(done, 4, names[: 4 - done])
        now += 1
    shown.ready("padded", {"kernels": 88.04, "weights": 5.0})
    shown.warn("look out")
    shown.start("padded", 10, 3)
    for event in (*passes, SHORT, GRAPH):
        shown.update(event)
    for _ in range(7):
        now += 1
        shown.advance()
    shown.finish()
    return file.getvalue()


def test_a_speed_so_far_counts_no_start_of_workers() -> None:
    tally = Tally()
    for ended in (20.0, 16.5, 18.0):
        tally.update(pass_row(time=ended, seconds=0.5, num_tokens=10))
    assert tally.tokens_per_second == 30 / 4
    assert Tally().tokens_per_second is None


def test_a_file_gets_a_line_now_and_then(monkeypatch):
    assert followed(monkeypatch, io.StringIO()).split("\n") == [
        "compiling kernels, once on this machine: 0 of 4 modules; to do: FA3; XQA, 1 row; XQA, 5 rows; FA2",
        "compiling kernels, once on this machine: 3 of 4 modules; to do: FA3",
        "compiling kernels, once on this machine: 4 of 4 modules",
        "padded: ready after 93.0 s (kernels 88.0, weights 5.0)",
        "specgen: warning: look out",
        "padded: 3 of 10 requests",
        "out of GPU memory: continuing with a batch of 2 and 64 prefill tokens",
        "CUDA graph of a step of 8 sequences: captured in 1.5 s",
        "padded: 6 of 10 requests in 0:03, 0:04 to go",
        "padded: 9 of 10 requests in 0:06, 0:01 to go",
        "padded: 10 of 10 requests in 0:07, 0:00 to go",
        "",
    ]
    assert followed(monkeypatch, Terminal(), quiet=True) == (
        "specgen: warning: look out\nout of GPU memory: continuing with a batch of 2 and 64 prefill tokens\n"
    )


def test_a_terminal_gets_bars(monkeypatch):
    compiled, drawn = followed(monkeypatch, Terminal()).split("padded: ready after 93.0 s")
    assert re.search("0/4.*FA3; XQA, 1 row; XQA, 5 rows; FA2", compiled)
    assert "4/4" in compiled
    assert re.search(r"\rpadded: 100%.*10/10 .*0:00 to go\]", drawn)
    assert "look out\n" in drawn


def test_no_time_left_is_told_from_the_shortest_texts_of_a_batch(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    step = pass_row(num_sequences=4, num_tokens=4)
    lines = followed(monkeypatch, io.StringIO(), step).split("\n")[8:-1]
    assert [re.sub(", .*(?=to go)| tok/s.*", "", line) for line in lines] == [
        "padded: 6 of 10 requests in 0:03, 40",
        "padded: 9 of 10 requests in 0:06to go, 40",
        "padded: 10 of 10 requests in 0:07to go, 40",
    ]
    drawn = followed(monkeypatch, Terminal(), step)
    assert not re.search("[3-6]/10 [^\r]*to go", drawn)
    assert re.search(r"10/10 \[[^\r]*0:00 to go", drawn)


def test_a_narrow_terminal_has_room_for_the_numbers(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    (step,) = decode_steps(4)
    step = replace(step, num_drafting=2, num_accepted=3, num_tokens=5, seconds=1.0)
    drawn = followed(monkeypatch, Terminal(), step)
    assert re.search(r"\r10/10 \[\S+, 0:00 to go, 5 tok/s, length 2\.50\]", drawn)
    monkeypatch.setenv("COLUMNS", "120")
    assert "5 tok/s, acceptance length 2.50]" in followed(monkeypatch, Terminal(), step)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")]
)
def test_seconds_as_on_a_clock(seconds, text):
    assert clock(seconds) == text


def test_a_quiet_command_prints_its_result_alone(tmp_path):
    asked = ["generate", "--num-prompts=1", "--max-new-tokens=4", "--quiet"]
    result = specgen(*asked, f"--output={tmp_path}")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Prompt:" not in result.stdout
    assert "mean acceptance length" in result.stdout
    loud = specgen(*asked[:-1], f"--output={tmp_path}")
    assert "Prompt:" in loud.stdout
    assert f"Files are in {tmp_path}; open {tmp_path / 'report.html'} in a browser." in loud.stderr


def test_no_browser_is_asked_to_open_a_bucket(capsys):
    print_files(Url("s3://lake/out"), "report.html")
    assert capsys.readouterr().err == "Files are in s3://lake/out; report.html there is the page.\n"


def test_rows_on_stdout_are_not_shown_again_beside_them():
    result = specgen("generate", "--num-prompts=1", "--max-new-tokens=4", "--output=-")
    assert json.loads(result.stdout.splitlines()[0])["text"]
    assert "Prompt:" not in result.stderr
    assert "\r" not in result.stderr
    assert re.search(r"speculative decoding: \d+ of \d+ requests in \d+:\d\d", result.stderr)


def test_cores_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {5, 9}, raising=False)
    monkeypatch.setattr("specgen.config.find_spec", lambda name: True)
    config = EngineConfig(model="m", drafter=None, num_spec_tokens=0, device="cpu")
    assert _resources(Cluster(num_workers=2), config) == {"num_cpus": 1}
