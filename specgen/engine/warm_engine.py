"""Running a list of requests through the engine of one arm: completions, passes and wall time."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from specgen.config import EngineConfig, UserError
from specgen.core.engine_core import discard, never_stop, no_follow_up
from specgen.core.sequence import Completion, Request
from specgen.device import synchronize
from specgen.engine.build import build_engine, most_demanding
from specgen.engine.earlier_answers import given_answers
from specgen.engine.loading import Models
from specgen.engine.step_costs import capture_all
from specgen.record import columns
from specgen.record.record_rows import EngineRow, RequestRow


@dataclass(frozen=True, kw_only=True)
class Run:
    """One pass over the requests."""

    completions: Mapping[str, Completion]  # by request
    passes: Sequence[EngineRow]
    seconds: float  # wall time of ``generate``, prefill included
    num_spec_tokens: int

    @property
    def requests(self) -> list[RequestRow]:
        """The rows of the requests, as they ended."""
        return [completion.record for completion in self.completions.values()]

    @property
    def columns(self) -> columns.Run:
        """The same as columns, without those that failed."""
        return columns.of(self.requests, self.num_spec_tokens)

    def whole(self) -> Self:
        """This run; ``UserError`` if the engine refused a request of it."""
        refused = [each.error for each in self.completions.values() if each.error]
        if refused:
            raise UserError(f"{len(refused)} requests were refused, the first because {refused[0]}")
        return self


class _Tape:
    """The rows of one run. It knows no engine, so that an engine's memory is free as soon as nothing refers to it."""

    def __init__(self) -> None:
        self.rows: list[EngineRow] = []
        self.on_row: Callable[[EngineRow], None] = discard

    def record(self, row: EngineRow) -> None:
        self.rows.append(row)
        self.on_row(row)


class WarmEngine:
    """An engine of a resolved ``config`` that is ready to run ``requests``, any number of times."""

    def __init__(
        self,
        config: EngineConfig,
        models: Models,
        requests: Sequence[Request],
        mark: Callable[[], None] | None = None,
    ) -> None:
        self.config, self._requests, self._tape = config, requests, _Tape()
        self._given = given_answers(config)
        expected = most_demanding(request.sampling for request in requests)
        self._engine = build_engine(config, models, self._tape.record, mark, expected)
        if config.draft_length.auto:
            capture_all(self._engine, config.max_batch_size, config.draft_length.lengths)
        self._engine.warm_up()

    def run(
        self,
        on_row: Callable[[EngineRow], None] = discard,
        answered: Callable[[Completion], None] = discard,
        until: Callable[[], bool] = never_stop,
    ) -> Run:
        """Generate for all requests; ``on_row`` takes rows, ``answered`` completions as they come.

        Once ``until``, which is asked between steps, is true, the other requests are dropped.
        """
        self._tape.rows, self._tape.on_row = [], on_row
        completions: dict[str, Completion] = {}
        self._engine.forget()  # or drafts would be the answers of the run before
        self._engine.learn(self._given)
        synchronize()
        began = time.perf_counter()
        for completion in self._engine.generate(self._requests, no_follow_up, until):
            completions[completion.request.id] = completion
            answered(completion)
        synchronize()
        return Run(
            completions=completions,
            passes=self._tape.rows,
            seconds=time.perf_counter() - began,
            num_spec_tokens=self.config.draft_length.most,
        )
