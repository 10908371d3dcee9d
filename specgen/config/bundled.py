"""Paths of the bundled data: inside the package in a wheel, next to it in a checkout."""

from pathlib import Path

from specgen.config import DraftLength, NumSpecTokens, UserError, lookup_of, require

_PACKAGE = Path(__file__).resolve().parents[1]


def data_directory() -> Path:
    """The directory with ``prompts/`` (the bundled prompts) and ``demo/`` (the bundled model pair)."""
    return _directory("data")


def evaluation_directory() -> Path:
    """The directory with tasks and studies of ``eval``, matrices of ``tune`` and published figures."""
    return _directory("eval")


def matrices() -> dict[str, Path]:
    """The bundled settings of ``specgen tune``, by name."""
    return {path.stem: path for path in sorted((evaluation_directory() / "matrices").glob("*.yaml"))}


def pair(
    model: str | None = None, drafter: str | None = None, length: NumSpecTokens | None = None
) -> tuple[str, str | None]:
    """Target and drafter as given, or the bundled pair's if no target is: directories or hub ids.

    ``length`` is K, as ``EngineConfig.num_spec_tokens``: 0 needs no drafter; None where it is not asked for. N-grams
    draft for the bundled target too.
    ``UserError`` where a target or a drafter is missing.
    """
    if model is None:
        require(
            drafter is None or lookup_of(drafter) is not None,
            f"drafter {drafter!r} is given without a model: name its target with --model",
        )
        demo = data_directory() / "demo"
        return str(demo / "target"), drafter or str(demo / "drafter")
    plain = "" if length is None else ", or use --num-spec-tokens 0"
    require(
        drafter is not None or (length is not None and DraftLength.of(length).most == 0),
        f"model {model!r} has no drafter: name one with --drafter (ngram needs no checkpoint){plain}",
    )
    return model, drafter


def heads() -> tuple[str, ...]:
    """The heads that are bundled for the bundled target."""
    demo = data_directory() / "demo"
    return tuple(str(demo / name) for name in ("drafter", "drafter-two-layers", "drafter-eagle1"))


def _directory(name: str) -> Path:
    for directory in (_PACKAGE / name, _PACKAGE.parent / name):
        if directory.is_dir():
            return directory
    raise UserError(f"the bundled {name}/ is not in {_PACKAGE} or next to it: install specgen again")
