"""One engine that several threads call at once: prompts of all calls share its running batch."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Condition
from typing import TYPE_CHECKING, Protocol

from specgen.config import SamplingParams
from specgen.prompts import Prompt, Rejected
from specgen.prompts.prompt import sample_ids
from specgen.record.record_rows import EngineRow

if TYPE_CHECKING:
    from specgen.engine.conversations import RequestOutput
    from specgen.engine.engine import Engine

_NONE: Mapping[str, str] = {}
_NEVER_LOST: Mapping[str, Sequence[str]] = {}


class _Make(Protocol):
    def __call__(self, *, record: Callable[[EngineRow], None]) -> "Engine": ...


@dataclass(kw_only=True, eq=False)
class _Call:
    """What one caller waits for."""

    receive: Callable[["RequestOutput | EngineRow"], None]
    waiting: deque[Prompt | Rejected]  # those that the engine has not taken
    unanswered: set[str]  # names of turns and samples
    failed: BaseException | None = None  # what ended the run that its prompts were in

    @property
    def is_open(self) -> bool:
        """Whether turns have no output and may still get one."""
        return self.failed is None and bool(self.unanswered)


class SharedEngine:
    """The engine that ``make`` makes, for threads that call it at once: prompts of all calls share its batch.

    They are taken in the order of the calls. The thread of one call runs the engine for all of them; when that call is
    answered, the thread of another one does. What ends the engine's run ends all calls that are in it. ``sampling`` and
    ``lost`` are as in ``Engine.generate``.
    """

    def __init__(
        self,
        make: _Make,
        sampling: SamplingParams | None,
        lost: Mapping[str, Sequence[str]] = _NEVER_LOST,
    ) -> None:
        self._make, self._sampling, self._lost = make, sampling, lost
        self._engine: Engine | None = None
        self._calls: list[_Call] = []  # the oldest first
        self._owners: dict[str, _Call] = {}  # of turns and samples, by their names
        self._earlier: dict[str, str] = {}  # of all calls
        self._outputs: Iterator[RequestOutput] = iter(())
        self._changed = Condition()  # guards what is here; whoever runs the engine holds ``_at_work`` instead
        self._at_work = False

    def start(self) -> "Engine":
        """Make the engine now, which otherwise the first call with a prompt does."""
        if self._engine is None:
            self._engine = self._make(record=self._record)
        return self._engine

    def answer(
        self,
        prompts: Sequence[Prompt | Rejected],
        receive: Callable[["RequestOutput | EngineRow"], None],
        earlier: Mapping[str, str] = _NONE,
    ) -> None:
        """Answer ``prompts``, whose ids no other call has; ``earlier`` has texts of their turns, as for ``Engine``.

        ``receive`` receives an output for every other turn, and every row that the engine records meanwhile. Errors are
        those of ``Engine``.
        """
        sampling = self._sampling or self.start().default_sampling if prompts else SamplingParams()
        turns = [turn for prompt in prompts for turn in sample_ids(prompt, sampling)]
        unanswered = {turn for turn in turns if turn not in earlier}
        call = _Call(receive=receive, waiting=deque(prompts), unanswered=unanswered)
        with self._changed:
            self._calls.append(call)
            self._owners.update(dict.fromkeys(turns, call))
            self._earlier.update(earlier)
        try:
            while self._goes_first(call):
                self._run_for(call)
            if call.failed is not None:
                raise call.failed
        finally:
            with self._changed:
                self._calls.remove(call)
                for turn in turns:
                    del self._owners[turn]
                    self._earlier.pop(turn, None)

    def _goes_first(self, call: _Call) -> bool:
        """Whether this thread is to run the engine now; waits while another does. False once ``call`` is answered."""
        with self._changed:
            while call.is_open and self._at_work:
                self._changed.wait()
            self._at_work = self._at_work or call.is_open
            return call.is_open

    def _run_for(self, call: _Call) -> None:
        """Run the engine until ``call`` is answered, and to the end of the run if no other call waits."""
        try:
            engine = self.start()
            while call.is_open or not self._has_others(call):
                output = next(self._outputs, None)
                if output is not None:
                    self._deliver(output)
                elif call.is_open:  # a run ends when it has nothing to do
                    self._outputs = engine.generate(
                        self._prompts(), self._sampling, earlier=self._earlier, lost=self._lost
                    )
                else:
                    break
        except BaseException as error:
            with self._changed:  # prompts of other calls were in that run
                for each in self._calls:
                    each.failed = error
                    each.waiting.clear()
            raise
        finally:
            with self._changed:
                self._at_work = False
                self._changed.notify_all()

    def _has_others(self, call: _Call) -> bool:
        with self._changed:
            return any(each.is_open for each in self._calls if each is not call)

    def _deliver(self, output: "RequestOutput") -> None:
        with self._changed:
            owner = self._owners.get(output.name)  # None: its call has been broken off
            if owner is not None:
                owner.receive(output)
                owner.unanswered.discard(output.name)
                if not owner.is_open:
                    self._changed.notify_all()

    def _record(self, row: EngineRow) -> None:
        with self._changed:
            for call in self._calls:
                call.receive(row)

    def _prompts(self) -> Iterator[Prompt | Rejected | None]:
        """Those of all calls, the oldest first; None while there are none."""
        while True:
            with self._changed:
                waiting = next((each.waiting for each in self._calls if each.waiting), None)
                prompt = None if waiting is None else waiting.popleft()
            yield prompt
