"""An engine as a function of batches of columns, as pipelines call one: Ray Data, ``datasets``, Daft, Spark."""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from hashlib import blake2b
from itertools import chain, count
from math import isnan
from typing import TYPE_CHECKING, Any

from specgen.config import EngineConfig, SamplingParams, UserError, first_line, require, shown
from specgen.jobs.shared_engine import SharedEngine
from specgen.prompts import Prompt, Rejected
from specgen.prompts.fields import SAMPLING_FIELDS
from specgen.prompts.own import CONTENT_FIELDS, parse_own
from specgen.prompts.prompt import sample_ids
from specgen.record.record_rows import EngineRow, copy_id, drawn_as

if TYPE_CHECKING:
    import pyarrow

    from specgen.engine.conversations import RequestOutput
    from specgen.engine.engine import Engine

_SAMPLING = "sampling_params"
_READ = (*CONTENT_FIELDS, _SAMPLING)
_METRICS = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "mean_acceptance_length")
COLUMNS = (
    *(
        "sample",
        "generated_text",
        "reasoning",
        "generated_tokens",
        "num_input_tokens",
        "num_generated_tokens",
    ),
    *("finish_reason", *_METRICS, "error"),
)


class BatchGenerator:
    """Answers batches of rows: ``generator(batch)`` is ``batch`` with the columns ``COLUMNS`` beside its own.

    A batch is a dict of columns of one length: ``messages``, ``prompt`` or ``prompt_token_ids``, and optionally
    ``sampling_params``, for each row a dict or None of the fields of ``SamplingParams`` that differ from ``sampling``.
    All other columns come back as they are. A row that cannot be answered has its reason in ``error``, and None or 0 in
    the other columns; it never fails a batch. ``UserError`` for a batch that is no such dict; ``DeviceLost`` where only
    a new process can go on. What ends the engine's run ends all calls that are in it.

    The engine is made by the first call, so that this can be pickled before, and is there until the process ends.
    Threads may call it at once: rows of all calls share the engine's batch, in the order of the calls. What is drawn
    for a row depends on its prompt and its seed (its own, or that of ``sampling``) and on nothing else: rows that say
    the same get the same draws. Where ``n`` asks for several samples of a row, it comes back so many times, one behind
    the other, and ``sample`` counts them from 0.
    """

    def __init__(self, config: EngineConfig, sampling: SamplingParams | None = None) -> None:
        if not isinstance(config, EngineConfig):
            raise UserError(f"config is {shown(config)}: use EngineConfig(model=..., drafter=...)")
        if not isinstance(sampling, SamplingParams | None):
            raise UserError(f"sampling is {shown(sampling)}: use SamplingParams(...)")
        self._config, self._sampling = config, sampling
        self._start()

    def _start(self) -> None:
        self._engine = SharedEngine(self._make, self._sampling)
        self._numbers = count()  # of the rows of all calls
        self._has_warned = False

    def _make(self, *, record: Callable[[EngineRow], None]) -> "Engine":
        from specgen.engine.engine import Engine

        return Engine(self._config, record=record)

    def __getstate__(self) -> dict[str, Any]:
        return {"_config": self._config, "_sampling": self._sampling}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @staticmethod
    def schema(rows: "pyarrow.Schema") -> "pyarrow.Schema":
        """That of ``rows`` with the columns ``COLUMNS``.

        For what takes the types of columns from the first rows that it sees: there a column may be None alone.
        """
        import pyarrow

        text, number = pyarrow.string(), pyarrow.int64()
        types = dict.fromkeys(("generated_text", "reasoning", "finish_reason", "error"), text)
        types |= {"generated_tokens": pyarrow.list_(number), "mean_acceptance_length": pyarrow.float64()}
        return pyarrow.schema([*rows, *(pyarrow.field(name, types.get(name, number)) for name in COLUMNS)])

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """``batch`` with an answer for each row; see the class."""
        prompts = [_prompt(next(self._numbers), content) for content in _rows(batch, _num_rows(batch))]
        self._warn_of_copies(prompts)
        seen: list[RequestOutput | EngineRow] = []
        self._engine.answer(prompts, seen.append)
        outputs = {each.name: each for each in seen if not isinstance(each, EngineRow)}
        names = [sample_ids(prompt, self._sampling or SamplingParams()) for prompt in prompts]
        found = [_columns(outputs[name]) for name in chain.from_iterable(names)]
        if len(found) > len(prompts):
            rows = [row for row, samples in enumerate(names) for _ in samples]
            batch = {name: [column[row] for row in rows] for name, column in _lists(batch).items()}
        return {**batch, **{name: [row[name] for row in found] for name in COLUMNS}}

    def _warn_of_copies(self, prompts: Sequence[Prompt | Rejected]) -> None:
        """Say once that sampled rows get one text, as whoever repeats a prompt may want several."""
        default = 0.0 if self._sampling is None else self._sampling.temperature
        drawn = [
            (drawn_as(each.id), each.sampling.get("seed"))
            for each in prompts
            if isinstance(each, Prompt) and each.sampling.get("temperature", default) > 0
        ]
        copies = len(drawn) - len(set(drawn))
        if copies and not self._has_warned:
            self._has_warned = True
            text = "%d sampled rows repeat the prompt and the seed of another, and get the same draws: for several "
            text += "samples of a prompt, set n in sampling_params, or give each row its own seed"
            logging.getLogger("specgen").warning(text, copies)


def _num_rows(batch: object) -> int:
    """The length of each column; ``UserError`` where ``batch`` has none that can be answered."""
    if not isinstance(batch, Mapping):
        raise UserError(f"the batch is {shown(batch)}: use a dict of columns")
    single = [
        str(name)
        for name, column in batch.items()
        if not hasattr(column, "__len__") or isinstance(column, str | bytes | Mapping | Set)
    ]
    require(not single, f"the batch has no value for each row in {', '.join(single)}: use a list of them")
    lengths = {str(name): len(column) for name, column in batch.items()}
    require(
        any(name in batch for name in CONTENT_FIELDS),
        f"the batch has the columns {', '.join(lengths) or 'none'}: one of {', '.join(CONTENT_FIELDS)} is needed",
    )
    require(len(set(lengths.values())) == 1, f"columns have different lengths: {lengths}")
    taken = [name for name in COLUMNS if name in batch]
    require(not taken, f"the batch has a column {', '.join(taken)} already: rename it, answers go there")
    return next(iter(lengths.values()))


def _rows(batch: Mapping[str, Sequence[Any]], num_rows: int) -> list[dict[str, Any]]:
    """What each row says of its prompt."""
    columns = _lists({name: batch[name] for name in _READ if name in batch})
    return [{name: _plain(column[index]) for name, column in columns.items()} for index in range(num_rows)]


def _lists(batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """The columns by order: one of pandas would look up labels."""
    return {name: list(column) for name, column in batch.items()}


def _prompt(number: int, content: Mapping[str, Any]) -> Prompt | Rejected:
    """Of a row, the ``number``-th of all; its id says what is drawn for it, by its prompt however that is spelled."""
    own = content.get(_SAMPLING)
    try:
        require(
            own is None or isinstance(own, dict),
            f"{_SAMPLING} is {shown(own)}: use a dict of its fields, or None",
        )
        asked = {name: value for name, value in (own or {}).items() if value is not None}
        unknown = sorted(asked.keys() - {*SAMPLING_FIELDS})
        require(not unknown, f"{_SAMPLING} has {shown(', '.join(unknown))}: use fields of SamplingParams")
        given = {name: value for name, value in content.items() if name != _SAMPLING and value is not None}
        require(
            bool(given), f"no prompt: {' and '.join(name for name in content if name != _SAMPLING)} is None"
        )
        prompt = parse_own("", given | asked)
    except UserError as error:
        return Rejected(id=copy_id("", number), reason=first_line(error))
    messages = [(message.role, message.text) for message in prompt.messages]
    said = repr((messages, prompt.text, prompt.token_ids))
    return replace(prompt, id=copy_id(blake2b(said.encode(), digest_size=12).hexdigest(), number))


def _plain(value: Any) -> Any:  # noqa: ANN401
    """Lists, dicts, numbers, strings and None, of what arrays of columns hold."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    elif hasattr(value, "as_py"):  # of Arrow
        value = value.as_py()
    pandas = sys.modules.get("pandas")
    if (isinstance(value, float) and isnan(value)) or (
        pandas and any(value is each for each in (pandas.NA, pandas.NaT))
    ):
        return None  # which numpy and pandas say in these ways
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _columns(output: "RequestOutput") -> dict[str, Any]:
    failed, metrics = output.error is not None, output.metrics
    return {
        "sample": output.sample,
        "generated_text": None if failed else output.text,
        "reasoning": output.reasoning,
        "generated_tokens": list(output.token_ids),
        "num_input_tokens": output.num_prompt_tokens,
        "num_generated_tokens": len(output.token_ids),
        "finish_reason": output.finish_reason,
        **{name: None if metrics is None else getattr(metrics, name) for name in _METRICS},
        "error": output.error,
    }
