"""Answers of an earlier run, or of an earlier process of this one, for a drafter that learns from such."""

from pathlib import Path

from specgen.checkpoints.tensor_reader import Checkpoint
from specgen.config import POOL_TOKENS, EngineConfig, UserError, require, shown
from specgen.config.json_fields import flat, load_json
from specgen.record.files import Rows
from specgen.text.tokenizer import load_tokenizer

_REMEDY = "name the directory of a run of specgen generate"


def given_answers(config: EngineConfig) -> list[list[int]]:
    """Those of the run that ``config`` is to learn from, if it names one: see ``newest_answers``."""
    if config.learn_from is None or not config.learns:
        return []
    rows = Rows(Path(config.learn_from) / "completions.jsonl")
    require(len(rows) > 0, f"learn-from {config.learn_from!r} holds no answers: {_REMEDY}")
    return newest_answers(rows)


def newest_answers(rows: Rows) -> list[list[int]]:
    """Token ids of the last answers in a ``completions.jsonl``, the oldest first: as many as a drafter keeps."""
    found, room = list[list[int]](), POOL_TOKENS
    for name in reversed([*rows]):
        answer = rows[name].get("token_ids")
        if not isinstance(answer, list) or not all(isinstance(token, int) for token in answer):
            raise UserError(f"{rows.path}: the row of {shown(name)} has no token ids: {_REMEDY}")
        room -= len(answer) + 1
        if room < 0:
            break
        found.append(answer)
    return found[::-1]


def require_same_tokens(config: EngineConfig, target: Checkpoint) -> None:
    """``UserError`` unless the run that ``config`` is to learn from, if any, is there and of ``target``'s tokens."""
    if config.learn_from is None or not config.learns:
        return
    path = Path(config.learn_from)
    require(
        (path / "completions.jsonl").is_file(),
        f"learn-from {config.learn_from!r} holds no answers: {_REMEDY}",
    )
    model = dict(flat(load_json(path / "manifest.json", _REMEDY))).get("engine.model")
    if model == config.model:
        return
    try:
        reason = load_tokenizer(str(target.path)).difference(load_tokenizer(str(model)), "earlier model")
    except UserError as error:
        raise UserError(
            f"learn-from {str(path)!r} has answers of {model}, whose tokens cannot be compared ({error}): leave it out"
        ) from error
    require(reason is None, f"learn-from {str(path)!r} has answers of other tokens: {reason}")
