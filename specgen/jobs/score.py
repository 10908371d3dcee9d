"""``specgen score``: log-probabilities of given completions, row by row into a directory; resumes an earlier run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from math import isfinite
from pathlib import Path
from typing import Any

from specgen.checkpoints.fingerprint import files_of, fingerprint, state_of
from specgen.config import SamplingParams, UserError, require
from specgen.core.engine_core import EngineCore, discard, never_stop
from specgen.core.sequence import Scored, ScoreRequest
from specgen.engine.build import build_engine, require_memory
from specgen.engine.choices import resolve
from specgen.engine.loading import load_models, open_checkpoints
from specgen.jobs.job import Job
from specgen.jobs.prompt_index import REQUESTS, PromptIndex, index_prompts
from specgen.prompts import Prompt, Rejected, failure, prompt_ids
from specgen.prompts.fields import character_string, checked_list
from specgen.record.files import RowFile, write_json_lines
from specgen.record.interrupt import StoppedError
from specgen.record.progress import Progress
from specgen.record.provenance import FREE_IN_A_RUN, manifest, with_recorded_date
from specgen.record.results import directory, rename_aside, require_same
from specgen.text.tokenizer import Tokenizer

FILE, ROWS, ERRORS = "score.json", "scores.jsonl", "errors.jsonl"
_REMEDY = "name another directory, or start over with --restart, which keeps the old one"
_SYNC_EVERY = 256  # rows


@dataclass(frozen=True, kw_only=True)
class _Scorable(Prompt):
    completions: tuple[str, ...]


@dataclass(kw_only=True)
class _Row:
    """A row at work."""

    prompt: _Scorable
    asked: list[ScoreRequest]
    found: dict[str, Scored] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        pairs = zip(self.prompt.completions, self.asked, strict=True)
        return {"id": self.prompt.id, "scores": [_score(text, self.found[each.id]) for text, each in pairs]}


def _score(completion: str, scored: Scored) -> dict[str, Any]:
    tokens = scored.request.token_ids[scored.request.num_context :]
    require(all(map(isfinite, scored.log_probs)), "the model's logits were not finite (NaN)")
    return {
        "completion": completion,
        "logprob": sum(scored.log_probs),
        "num_tokens": len(tokens),
        "greedy": all(scored.greedy),
        "token_ids": list(tokens),
        "logprobs": list(scored.log_probs),
    }


def score(
    job: Job, output: Path | None, progress: Progress, until: Callable[[], bool] = never_stop
) -> tuple[int, list[str]]:
    """Score the completions of the rows of ``job`` in ``output``, or go on there; returns rows done, and failures.

    ``scores.jsonl`` gets a row where all its completions are known, and is in the order of the input at the end. Of
    ``job`` count the model, how it runs, the data and the shard. Once ``until`` is true, ``StoppedError``.
    """
    if output is not None and job.restart:
        rename_aside(output, FILE)
    with directory(output, FILE) as path:
        checkpoints = open_checkpoints(job.engine.plain())
        config = resolve(job.engine.plain(), checkpoints)
        opened = job.data.open()
        prompts = replace(
            opened, row_format=replace(opened.row_format, parse=partial(_parsed, opened.row_format.parse))
        )
        index = index_prompts(prompts.name, prompts, job.shard)
        for sentence in prompts.notes.sentences():
            progress.warn(sentence)
        if index.has_chats:
            config = with_recorded_date(config, job.engine, path / FILE)
        else:  # no prompt has the date in it
            config = replace(config, chat_template_kwargs=job.engine.chat_template_kwargs)
        require_memory(config)
        asked = manifest(
            engine=config,
            sampling=SamplingParams(),
            data={**job.data.to_json(), "sha256": index.digest, "shard": str(job.shard)},
            fingerprints={name: fingerprint(each) for name, each in checkpoints.items()},
            files={name: files_of(each) for name, each in checkpoints.items()}
            | {"prompts": {str(file): state_of(file) for file in prompts.files}},
        )
        if (path / FILE).exists():  # else only once a model is there to answer it
            require_same(path / FILE, asked, free=FREE_IN_A_RUN, remedy=_REMEDY)
        models = load_models(config, checkpoints)
        if index.has_chats:
            models.tokenizer.require_chat_template()
        core = build_engine(config, models, discard, expected=SamplingParams())
        require_same(path / FILE, asked, free=FREE_IN_A_RUN, remedy=_REMEDY)
        if job.shard.count > 1:
            write_json_lines(path / REQUESTS, filter(None, index.rows))
        (path / ERRORS).unlink(missing_ok=True)
        rows, errors = RowFile(path / ROWS), RowFile(path / ERRORS)
        try:
            with closing(errors), closing(rows):
                _work(
                    core,
                    models.tokenizer,
                    prompts.select(index.pending(rows)),
                    rows,
                    errors,
                    progress,
                    index,
                    until,
                )
        finally:
            progress.finish()
        for file in (rows, errors):
            file.arrange(index.ids)
        return len(rows), [failure(name, errors[name]["error"]) for name in errors]


def _work(
    core: EngineCore,
    tokenizer: Tokenizer,
    prompts: Iterator[Prompt | Rejected],
    rows: RowFile,
    errors: RowFile,
    progress: Progress,
    index: PromptIndex,
    until: Callable[[], bool],
) -> None:
    """Every row of ``prompts`` into one of the files."""
    at_work: dict[str, _Row] = {}

    def fail(name: str, where: str, error: object) -> None:
        errors.add({"id": name, "error": f"{where}: {error}" if where else str(error)})
        progress.advance()

    def requests() -> Iterator[ScoreRequest]:
        for prompt in prompts:
            if isinstance(prompt, Rejected):
                fail(prompt.id, "", prompt.reason)
                continue
            assert isinstance(prompt, _Scorable)
            try:
                row = _Row(prompt=prompt, asked=list(_requests(prompt, tokenizer, core.room(1))))
            except UserError as error:
                fail(prompt.id, prompt.where, error)
                continue
            at_work.update((each.id, row) for each in row.asked)
            yield from row.asked

    progress.start("scores", index.num_requests, len(rows))
    for scored in core.score(requests()):
        row = at_work.pop(scored.request.id)
        row.found[scored.request.id] = scored
        if len(row.found) == len(row.asked):
            try:
                rows.add(row.to_json())
                progress.advance()
            except UserError as error:
                fail(row.prompt.id, row.prompt.where, error)
            if len(rows) % _SYNC_EVERY == 0:
                rows.sync()
        if until():
            raise StoppedError(f"interrupted with {len(rows):,} of {index.num_requests:,} rows done")


def _requests(prompt: _Scorable, tokenizer: Tokenizer, room: int) -> Iterator[ScoreRequest]:
    """One for each completion; ``UserError`` where one has no tokens of its own, or the model's context no room."""
    for number, completion in enumerate(prompt.completions):
        name = "completion" if len(prompt.completions) == 1 else f"completion {number + 1}"
        num_context, tokens = _encoded(prompt, completion, tokenizer)
        require(
            num_context < len(tokens), f"{name} has no token of its own: the tokenizer leaves nothing of it"
        )
        require(num_context > 0, f"{name} begins within the first token: write a longer prompt")
        require(
            len(tokens) - 1 <= room,
            f"prompt and {name} have {len(tokens)} tokens and there is room for {room + 1}: shorten the prompt",
        )
        yield ScoreRequest(id=f"{prompt.id}/{number}", token_ids=tuple(tokens), num_context=num_context)


def _encoded(prompt: _Scorable, completion: str, tokenizer: Tokenizer) -> tuple[int, Sequence[int]]:
    """How many tokens are the prompt's, and all tokens.

    As lm-eval encodes a pair: both texts together, so that a word's space is part of its token, and spaces at the end
    of a prompt that is raw text are the completion's. A token that the tokenizer makes of the end of the prompt and the
    beginning of the completion is the completion's, where lm-eval would cut the text.
    """
    text, ids = prompt_ids(prompt, tokenizer, ())
    if prompt.token_ids:
        return len(ids), [*ids, *tokenizer.encode_rendered(completion)]
    encode = tokenizer.encode_rendered if prompt.messages else tokenizer.encode_text
    if prompt.text is not None:
        ids = encode(text.rstrip())
    whole = encode(text + completion)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, whole, strict=False))), whole


def _parsed(parse: Callable[[str, Mapping[str, Any]], Prompt], row_id: str, row: Mapping[str, Any]) -> Prompt:
    """A row has ``completion``, a text, or ``completions``, several."""
    given = [name for name in ("completion", "completions") if row.get(name) is not None]
    if len(given) != 1:
        raise UserError(
            f"{' and '.join(given) or 'no completion'}: a row to score takes one of completion, completions"
        )
    name, value = given[0], row[given[0]]
    texts = checked_list(value, name) if name == "completions" else [value]
    completions = tuple(
        character_string(text, f"a text of {name}" if len(texts) > 1 else name) for text in texts
    )
    if not all(completions):
        raise UserError(f"{name} is empty")
    prompt = parse(row_id, row)
    if prompt.follow_ups:
        raise UserError("a row of several turns has no place for a completion: give messages")
    # how a row would be sampled is nothing to its scores, and how often not either
    return _Scorable(**{**vars(prompt), "sampling": {}}, completions=completions)
