"""Where the bundled data lies: inside the package in a wheel, beside it in a checkout."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_directory() -> Path:
    """The directory with ``prompts/`` (the bundled prompts) and ``demo/`` (the bundled model pair)."""
    return _directory("data")


def evaluation_directory() -> Path:
    """The directory with ``tasks/`` and ``studies/`` of ``specgen eval`` and ``reference/`` (published figures)."""
    return _directory("eval")


def _directory(name: str) -> Path:
    for directory in (_PACKAGE / name, _PACKAGE.parent / name):
        if directory.is_dir():
            return directory
    raise ValueError(f"the bundled {name}/ is not in {_PACKAGE} or beside it: install specgen again")
