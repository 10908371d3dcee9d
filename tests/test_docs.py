"""What the README, CONTRIBUTING and docs/ point at is there, and what they show runs.

Python is executed and has right types, commands are parsed by the real ones. A Python block that cannot run here (it
needs a GPU, the hub) has ``<!-- not run: REASON -->`` on the line before it, which no page shows; its types are checked
all the same.
"""

import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cli_reference
import pytest
from bench import experts, kernels, step
from typer.main import get_command

from specgen.cli.main import app
from specgen.config import VLLM_NAMES, UserError

ROOT = Path(__file__).parents[1]
# by the name of its file
PROGRAMS: dict[str, Any] = {
    "specgen": get_command(app),
    **{Path(each.__file__).name: get_command(each.app) for each in (kernels, experts, step)},
}
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]

OF_OTHERS = {
    *{"--index-url", "--no-index", "--find-links"},  # pip's
    *{"--headless", "--hide-scrollbars", "--window-size", "--screenshot"},  # chromium's
    *{"--array", "--requeue", "--wrap", "--gpus", "--ntasks", "--gpus-per-task"},  # Slurm's
    *{"--num-jobs"},  # SkyPilot's
    *{"--no-python", "--nproc-per-node", "--virtual-local-rank"},  # torchrun's
    *{"--speculator-type", "--verifier-name-or-path", "--on-missing", "--draft-vocab-size"},  # speculators'
    *{"--save-path", "--target-layer-ids", "--draft-attn-impl", "--loss-implementation"},
    "--hidden-states-dtype",
    *{"--to", "--checkpoint", "--draft-config", "--vocab-mapping", "--embedding-source"},  # SpecForge's
    "--output-dir",
}

OF_SCRIPTS = {
    "--layers",
    "--experts",
    "--expert-overlap",
    "--weights",
    "--head",
    "--shape",
    "--accept",
    "--confidence",
    "--cells",
    "--lengths",
    *{"--jobs", "--cold", "--speed"},
}

OF_ALL = {"--help"}
OF_VLLM = {f"--{name.replace('_', '-')}" for name in VLLM_NAMES} | {
    *{"--kv-cache-dtype", "--no-enable-prefix-caching", "--enforce-eager"}
}


def anchor(heading: str) -> str:
    """The name that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def options() -> set[str]:
    """The options of every command."""
    commands = [*PROGRAMS.values()]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
    return {
        name for command in commands for each in command.params for name in each.opts + each.secondary_opts
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, _, name in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", page.read_text()):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if name else []
        assert not name or name in map(anchor, headings), f"{target}#{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_options_exist(page):
    text = page.read_text()
    for path in re.findall(r"\b((?:tests|scripts|docs|eval|data)/[\w/.-]*\w)", text):
        assert (ROOT / path).exists(), path
    assert (
        set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
        <= options() | OF_VLLM | OF_OTHERS | OF_SCRIPTS | OF_ALL
    )


def test_the_reference_of_commands_is_what_help_prints():
    found = cli_reference.PAGE.read_text(encoding="utf-8")
    assert found == cli_reference.reference(), "run python scripts/cli_reference.py"


def test_the_reference_names_every_option_under_its_command_and_explains_it_once():
    page = cli_reference.PAGE.read_text(encoding="utf-8")
    parts = dict(re.findall(r"^## ([^\n]*)\n+```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    for ctx in cli_reference.contexts():
        names = {name for each in ctx.command.params for name in each.opts}
        assert {name for name in names if name not in parts[ctx.command_path]} == set()
    counts = Counter(line for line in page.splitlines() if re.match("  -.{80}", line))
    assert [line for line, count in counts.items() if count > 1] == []


def test_every_page_is_found_from_the_readme_and_from_contributing():
    for start in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / start).read_text()
        assert [page.name for page in DOCS if f"(docs/{page.name})" not in text] == []


def test_the_map_names_every_package_and_files_that_are_there():
    rows = re.findall(r"^\| `(\w+)/` \|.*\| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == {
        path.parent.name for path in (ROOT / "specgen").glob("*/__init__.py")
    }
    for package, files in rows:
        for file in re.findall(r"`(.*?)`", files):
            assert (ROOT / "specgen" / package / file).exists(), f"{package}/{file}"


BLOCK = re.compile(r"(?:^<!-- not run: (.+) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:specgen |(?:python )?scripts/bench/)[^`]*)`")
ENDS_A_COMMAND = {"|", ">", "<", "&&", "||", ";", "&", "2>"}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int  # of its first line in the page
    language: str
    text: str
    not_run: str | None  # why

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str, text: str, language: str) -> list[Block]:
    return [
        Block(
            page=page,
            line=text.count("\n", 0, found.start(3)) + 1,
            language=language,
            text=found[3],
            not_run=found[1],
        )
        for found in BLOCK.finditer(text)
        if found[2] == language
    ]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each line of a shell from the name of one of ``PROGRAMS`` that it runs."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        starts = [at for at, word in enumerate(words) if Path(word).name in PROGRAMS]
        for start in starts:
            rest = [Path(words[start]).name, *words[start + 1 :]]
            end = next((at for at, word in enumerate(rest) if word in ENDS_A_COMMAND), len(rest))
            yield rest[:end]


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that ``words`` name, and the words behind its name."""
    command, words = PROGRAMS[words[0]], words[1:]
    while words and words[0] in getattr(command, "commands", ()):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def parse(words: list[str]) -> None:
    """Read ``words`` as their program does, options, values and arguments, and run nothing."""
    command, rest = command_of(words)
    assert not hasattr(command, "commands"), words
    command.make_context("specgen", rest)


ALL = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
PYTHON = [block for page, text in ALL.items() for block in blocks(page, text, "python")]

SHELL = [
    block for page, text in ALL.items() for name in ("sh", "console") for block in blocks(page, text, name)
]


def test_blocks_are_found_with_their_reason() -> None:
    page = "a\n\n<!-- not run: needs a GPU -->\n```python\n1 + 1\n```\n\n```python\n2\n```\n```sh\nls\n```\n"
    found = blocks("page.md", page, "python")
    assert [(each.line, each.text, each.not_run) for each in found] == [
        (5, "1 + 1\n", "needs a GPU"),
        (9, "2\n", None),
    ]
    assert "docs/engine.md" in {block.page for block in PYTHON}
    lines = (
        "a | .venv/bin/specgen generate --seed 1 \\\n  --raw > out  # specgen report\nls\n$ specgen report A\n"
        "python scripts/bench/step.py --batch-sizes 8"
    )
    assert list(commands(lines)) == [
        ["specgen", "generate", "--seed", "1", "--raw"],
        ["specgen", "report", "A"],
        ["step.py", "--batch-sizes", "8"],
    ]
    assert len(SHELL) > 10
    assert sum(len(INLINE.findall(text)) for text in ALL.values()) > 50


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_runs(block: Block, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if block.not_run is not None:
        pytest.skip(block.not_run)
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})


@pytest.mark.slow  # mypy reads all that the snippets import; ``test_python_runs`` is the quick one
def test_python_has_right_types(tmp_path: Path) -> None:
    """As mypy --strict sees it in a program of the reader's."""
    for number, block in enumerate(PYTHON):
        page = re.sub(r"\W", "_", block.page)
        (tmp_path / f"{page}_{number}.py").write_text("\n" * (block.line - 1) + block.text, encoding="utf-8")
    mypy = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        *sorted(map(str, tmp_path.iterdir())),
    ]
    done = subprocess.run(mypy, cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0), done.stdout + done.stderr


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_of_blocks_are_read(block: Block) -> None:
    for words in commands(block.text):
        parse(words)


@pytest.mark.parametrize("page", ALL)
def test_commands_in_sentences_have_these_options(page: str) -> None:
    for code in INLINE.findall(ALL[page]):
        for words in commands(code):
            command, rest = command_of(words)
            if "..." in rest:  # of several commands; ``test_docs`` looks at their options
                continue
            known = {name for each in command.params for name in each.opts + each.secondary_opts}
            used = {word.partition("=")[0] for word in rest if word.startswith("--")}
            assert used <= known | {"--help"}, code
            assert not hasattr(command, "commands") or not rest or rest[0].startswith("-"), code


@pytest.mark.parametrize(
    "wrong", ["generate --num-promts 8", "generate --max-prefill-tokens x", "tune --k", "merge runs/all"]
)
def test_a_wrong_command_is_found(wrong: str) -> None:
    with pytest.raises((UserError, AssertionError)):
        parse(["specgen", *wrong.split()])
