"""Mistakes on the command line: one line that names the value and the remedy, exit code 2, and nothing is left."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from specgen.cli import main as cli
from specgen.config import UserError


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
        ("bench kernls", "unknown command 'kernls' (did you mean kernels?)"),
        ("bench kernels --head-dim 0", "head-dim is '0': use at least 1"),
        ("report", "directories is missing: give it, as `root report -h` says"),
        ("--verzion", "unknown option --verzion (did you mean --version?)"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, arguments.split())
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
    result = CliRunner().invoke(cli.app, ["generate", "--shard", "x", *arguments.split()])
    assert "shard is 'x'" in str(result.exception)
    assert result.stderr == said


def test_inspect_without_a_path_is_of_the_bundled_pair() -> None:
    result = CliRunner().invoke(cli.app, ["inspect", "--gpu", "80GiB"])
    assert result.exit_code == 0, result.output
    assert "Target and head fit" in result.stdout
    assert "GiB" in result.stdout
