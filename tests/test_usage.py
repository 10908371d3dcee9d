"""Mistakes on the command line are one line with value, remedy and the nearest name, exit code 2; what help prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specgen import __version__
from specgen.cli import main as cli
from specgen.config import UserError
from specgen.config.errors import did_you_mean, nearest
from specgen.prompts import DataSource
from tests.commands import specgen


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            "generate --dtype fp16",
            "dtype is 'fp16' (did you mean float16?): use one of auto, float32, bfloat16, float16",
        ),
        (
            "generate --num-promts 3",
            "unknown option --num-promts (did you mean --num-prompts?): `root generate -h`",
        ),
        ("generate --num-prompts x", "num-prompts is 'x': use a whole number"),
        ("generate --temperature hot", "temperature is 'hot': use a number"),
        ("generate extra", "got unexpected extra argument(s) (extra): `root generate -h` says what it takes"),
        ("generate --output", "option '--output' requires an argument: `root generate -h` says"),
        ("generate --num-spec-tokens=", "num-spec-tokens is '': use 1 to 16"),
        ("generate --restart", "restart keeps the directory of --output"),
        ("generate --restart --output -", "restart keeps the directory of --output"),
        ("generate --shard 0/2", "shard is 0/2 and no file is kept to merge: add --output DIR"),
        ("generate --device gpu", "device is 'gpu': use auto, cpu, cuda or cuda:N"),
        ("genrate", "unknown command 'genrate' (did you mean generate?): `root -h` lists them"),
        ("report", "directories is missing: give it, as `root report -h` says"),
        ("--verzion", "unknown option --verzion (did you mean --version?)"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = specgen(*arguments.split())
    assert isinstance(result.exception, UserError), result.output
    message = str(result.exception).replace("`specgen", "`root")
    assert message.startswith(line)
    assert "\n" not in message
    assert (result.output, list(tmp_path.iterdir())) == ("", [])


def test_main_prints_it_with_exit_code_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["specgen", "generate", "--num-prompts", "x"])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert exited.value.code == 2
    assert capsys.readouterr().err == "specgen: num-prompts is 'x': use a whole number\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--seed 1 --seed=2", "specgen: warning: seed is given 2 times, as '1' and '2': the last counts\n"),
        (
            "--chat --quiet --raw",
            "specgen: warning: chat is given 2 times, as 'on' and 'off': the last counts\n",
        ),
        ("--seed 1 --seed=1 --stop a --stop b", ""),
    ],
)
def test_an_option_with_two_values_is_said(arguments: str, said: str) -> None:
    result = specgen("generate", "--shard", "x", *arguments.split())
    assert "shard is 'x'" in str(result.exception)
    assert result.stderr == said


COMMANDS = ("generate", "report", "compare", "merge", "verify", "eval", "tune", "inspect", "prepare")


def helped(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("command", [(), *zip(COMMANDS, strict=True)], ids=" ".join)
def test_help_can_be_copied(command: tuple[str, ...]) -> None:
    printed = helped(*command, "-h")
    assert printed == helped(*command, "--help")
    assert max(map(len, printed.splitlines())) <= 80
    assert not re.search(r"…|\w\.\.\.$|<bool>|\(all\)", printed, re.MULTILINE)


def test_long_options_are_whole_and_in_their_groups() -> None:
    printed = helped("generate", "--help")
    for option in ("--max-prefill-tokens <int>", "--gpu-memory-utilization <float>", "--no-prefix-cache"):
        assert option in printed
    assert "<auto|hopper|trtllm|flashinfer|sdpa|sdpa-static>" in printed
    groups = ["Models", "Prompts", "Speculation", "Sampling", "Running", "Results", "Options"]
    assert re.findall(r"^(\w+):$", printed, re.MULTILINE) == groups
    assert "[default: all]" in printed
    whole = "Say what a checkpoint is, how it is read, and whether target and head fit."
    assert whole in " ".join(helped("-h").split())


def test_the_package_runs_as_a_module_and_has_a_version() -> None:
    assert helped("--version") == f"specgen {__version__}\n"
    command = [sys.executable, "-m", "specgen", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"specgen {__version__}\n"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["tu"], ["tune"]),
        (["generate", "--drafter-b"], ["--drafter-batch"]),
        (["generate", "--config", "not-yet.yaml", "--drafter-batch", ""], ["padded", "non-padded"]),
    ],
    ids=" ".join,
)
def test_a_shell_completes_commands_options_and_values(typed: list[str], offered: list[str]) -> None:
    words = {"COMP_WORDS": " ".join(["specgen", *typed]), "COMP_CWORD": str(len(typed))}
    env = {**words, "_SPECGEN_COMPLETE": "complete_bash"}
    assert CliRunner().invoke(cli.app, env=env, prog_name="specgen").stdout.split() == offered


def test_an_interrupted_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*asked: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specgen.checkpoints.inspect_checkpoint.describe", interrupted)
    result = specgen("inspect", "a")
    assert (result.exit_code, result.stderr) == (130, "specgen: interrupted\n")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("mtbench", "mt-bench"), ("mt_bench", "mt-bench"), ("MT-Bench", "mt-bench"), ("gsm8", "gsm8k")),
        *(("human_eval", "humaneval"), ("bundeld", "bundled"), ("xyz", None)),
    ],
)
def test_a_data_set_is_suggested(name: str, meant: str | None) -> None:
    with pytest.raises(UserError) as refused:
        list(DataSource(dataset=name).open())
    hint = "" if meant is None else f" (did you mean {meant}?)"
    assert str(refused.value).startswith(
        f"dataset is {name!r}, neither a known name nor a file{hint}: use bundled"
    )


def test_a_row_without_a_prompt_says_how_to_name_its_field(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"a": "x"}\n{"id": 1, "prompt": null}\n')
    rejected, null = DataSource(dataset=str(file)).open()
    assert "name a field with --prompt-field; this one has 'a'" in rejected.reason
    assert "this one has 'id, prompt (null)'" in null.reason


def test_case_and_hyphens_do_not_count_and_a_known_name_is_no_mistake() -> None:
    assert nearest("Top_P", ["top-k", "top-p"]) == "top-p"
    assert nearest("top_q", ["top_p"], likeness=0.9) is None
    assert did_you_mean("batch", ["batch", "batches"]) == ""
