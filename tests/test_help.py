"""What ``--help`` and ``--version`` print."""

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from specgen import __version__
from specgen.cli import main as cli

COMMANDS = (
    *(
        ("generate",),
        ("report",),
        ("compare",),
        ("merge",),
        ("verify",),
        ("eval",),
        ("tune",),
        ("inspect",),
        ("prepare",),
    ),
    *(("bench", "kernels"), ("bench", "experts"), ("bench", "throughput"), ("bench", "step")),
)


def helped(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("command", [(), ("bench",), *COMMANDS], ids=" ".join)
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


def test_commands_are_listed_with_whole_sentences() -> None:
    assert "Say what a checkpoint is, how it is read, and whether target and head fit." in " ".join(
        helped("-h").split()
    )


def test_the_version() -> None:
    assert helped("--version") == f"specgen {__version__}\n"


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "specgen", "--version"]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        == f"specgen {__version__}\n"
    )


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["bench", "st"], ["step"]),
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
    def interrupted(path: str, other: str | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specgen.checkpoints.inspect_checkpoint.describe", interrupted)
    result = CliRunner().invoke(cli.app, ["inspect", "a"])
    assert (result.exit_code, result.stderr) == (130, "specgen: interrupted\n")
