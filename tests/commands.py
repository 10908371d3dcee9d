"""The command line as tests call it, and the rows of the files that it reads and leaves."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from specgen.cli.main import app
from specgen.config import UserError


def specgen(*arguments: object, columns: int = 100, program: typer.Typer = app) -> Result:
    """Of a terminal so wide; ``program`` may be a script's."""
    return CliRunner().invoke(program, [str(each) for each in arguments], env={"COLUMNS": str(columns)})


def printed(*arguments: object, columns: int = 100, program: typer.Typer = app) -> str:
    """What a command that succeeds prints; the error of one that does not comes through."""
    result = specgen(*arguments, columns=columns, program=program)
    if isinstance(result.exception, Exception):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@contextmanager
def refused(reason: str) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """What is done there is a ``UserError`` of one line, in which the pattern ``reason`` is."""
    with pytest.raises(UserError, match=reason) as caught:
        yield caught
    assert "\n" not in str(caught.value)


def rows(path: Path) -> list[dict[str, Any]]:
    """Of a file with a JSON object on each line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
