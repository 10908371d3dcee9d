"""The engine as a program calls it: prompts in, their texts out as they finish."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from specgen.config import EngineConfig, SamplingParams, require
from specgen.core.endings import DeviceLost
from specgen.core.engine_core import never_stop
from specgen.core.step_costs import capture_all
from specgen.engine.build import build_engine
from specgen.engine.choices import resolve
from specgen.engine.conversations import Conversations
from specgen.engine.loading import Models, load_models, open_checkpoints
from specgen.engine.memory import DRAWN
from specgen.engine.request_output import RequestOutput
from specgen.events import Event
from specgen.prompts import Prompt, Rejected
from specgen.report.acceptance import fold_request
from specgen.startup import phase
from specgen.text.tokenizer import Tokenizer

_NONE: Mapping[str, str] = {}
_PATIENCE = 64  # steps: a capture takes about 0.1 s, and a step of up to twice its rows a millisecond more


def _unrecorded(event: Event) -> None:
    """Discard the event."""


class Engine:
    """A model pair, loaded and warm. ``UserError`` for what cannot run here.

    ``record`` takes every event of what is generated (see ``events``). ``models`` are weights that another engine of
    the same model and number format has loaded (its ``models``); without them they are read. ``expected`` asks for as
    much as any request will: on a GPU, passes of greedy decoding alone leave more memory to the KV cache.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        record: Callable[[Event], None] = _unrecorded,
        models: Models | None = None,
        expected: SamplingParams = DRAWN,
    ) -> None:
        checkpoints = open_checkpoints(config) if models is None else models.checkpoints
        self.config = resolve(config, checkpoints)
        self.models = (
            load_models(self.config, checkpoints, expected) if models is None else _told(models, self.config)
        )
        self._generating = False
        try:
            self._core = build_engine(self.config, self.models, record, expected=expected)
            self._core.warm_up()
            self._core.be_patient(_PATIENCE)
        except DeviceLost as lost:
            raise DeviceLost(lost.reason, ()) from lost  # what was tried meanwhile is no caller's request

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the target."""
        return self.models.tokenizer

    def capture_graphs(self) -> None:
        """Capture the CUDA graph of every batch size and K now, which ``generate`` does as it comes to each.

        For greedy requests without logit biases or logprobs; others have graphs of their own.
        """
        self._require_idle()
        with phase("graphs"):
            self._core.be_patient(0)
            capture_all(self._core, self.config.max_batch_size, self.config.draft_length.lengths)
            self._core.be_patient(_PATIENCE)

    def generate(
        self,
        prompts: Iterable[str | Prompt | Rejected],
        sampling: SamplingParams | None = None,
        *,
        earlier: Mapping[str, str] = _NONE,
        lost: Mapping[str, Sequence[str]] = _NONE,
        until: Callable[[], bool] = never_stop,
    ) -> Iterator[RequestOutput]:
        """Yield an output for every turn of every prompt as they finish, in no fixed order.

        A string is raw text without a chat template; its id is its index among ``prompts`` ("0", "1", ...). Prompts
        are pulled as the batch has room, so they may be a stream. One that cannot be run comes as an output with
        ``error``. ``sampling`` holds what a prompt does not say itself. ``earlier`` has the texts of turns, by id,
        that were answered before: they are not asked again. ``lost`` has why the device was lost while a turn ran
        (see ``DeviceLost``), by id and once for each time: a turn that it was lost with once runs alone, one that it
        was lost with twice has failed. ``until`` is asked between steps; once it is true, what the steps in flight
        have finished is yielded and the rest is dropped. ``UserError`` while the engine is at work for another
        caller; ``DeviceLost`` where only a new process can go on.
        """
        self._require_idle()
        failed: deque[RequestOutput] = deque()
        conversations = Conversations(
            _named(prompts), self.models.tokenizer, sampling or SamplingParams(), failed.append, earlier, lost
        )
        self._generating = True
        completions = self._core.generate(conversations.first_turns(), conversations.follow_up, until)
        try:
            with closing(completions):
                for completion in completions:
                    yield from _drained(failed)
                    metrics = fold_request(completion.steps, self.config.draft_length.most)
                    yield conversations.answer(completion, metrics)
            yield from _drained(failed)
        finally:
            self._generating = False

    def _require_idle(self) -> None:
        require(
            not self._generating, "the engine is generating already: exhaust or close that iterator first"
        )


def _told(models: Models, config: EngineConfig) -> Models:
    """``models`` of another engine, whose chats are rendered as ``config`` says."""
    if models.tokenizer.template_kwargs == config.template_kwargs:
        return models
    return replace(models, tokenizer=models.tokenizer.with_template_kwargs(config.template_kwargs))


def _named(prompts: Iterable[str | Prompt | Rejected]) -> Iterator[Prompt | Rejected]:
    for index, prompt in enumerate(prompts):
        yield Prompt(id=str(index), text=prompt) if isinstance(prompt, str) else prompt


def _drained(outputs: deque[RequestOutput]) -> Iterator[RequestOutput]:
    while outputs:
        yield outputs.popleft()
