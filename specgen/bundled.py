"""Where the bundled data lies: inside the package in a wheel, beside it in a checkout."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_directory() -> Path:
    """The directory with ``prompts/`` (the bundled prompts) and ``demo/`` (the bundled model pair)."""
    for directory in (_PACKAGE / "data", _PACKAGE.parent / "data"):
        if directory.is_dir():
            return directory
    raise ValueError(f"the bundled data/ is not in {_PACKAGE} or beside it: install specgen again")
