"""The engine as a program calls it: prompts in, their texts out as they finish."""

import gc
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from inspect import GEN_RUNNING, getgeneratorstate
from itertools import starmap
from typing import Self

import torch

from specgen.config import EngineConfig, SamplingParams, UserError, require, shown
from specgen.config.errors import DeviceLost
from specgen.core.engine_core import EngineCore, discard, never_stop
from specgen.core.sequence import Completion
from specgen.engine.build import DRAWN, build_engine, most_demanding, require_memory
from specgen.engine.choices import choose_device, require_not_forked, resolve
from specgen.engine.conversations import Conversations, RequestOutput
from specgen.engine.earlier_answers import given_answers
from specgen.engine.generation_config import generation_config
from specgen.engine.loading import Models, load_models, open_checkpoints, over_target
from specgen.engine.step_costs import capture_all
from specgen.prompts import Prompt, Rejected
from specgen.record.record_rows import EngineRow
from specgen.record.startup import phase
from specgen.report.acceptance import metrics_of
from specgen.text.tokenizer import Tokenizer

_NONE: Mapping[str, str] = {}
_ONE_OR_SEVERAL = (
    "use a string or Prompt(id=..., messages=..., text=... or token_ids=...), or an iterable of these"
)
_CAPTURE_DELAY = 64  # steps: a capture takes about 0.1 s, a step of up to twice its rows a millisecond more


class Engine:
    """A model pair, loaded and warm, until it is closed. ``UserError`` for what cannot run here.

    ``close``, or the end of a ``with`` block, frees its memory. ``record`` takes a row for every pass, capture of a
    CUDA graph and shortage of memory (see ``record_rows``); an output has the record of its request. ``models`` are
    those of another engine (its ``models``), whose target is used again: model, number format, device and ranks must be
    the same. The head is used again too if it is the one that ``config`` names, and read if not. Without ``models``
    all is read. ``expected`` asks for as much as any request will: on a GPU, passes of greedy decoding alone leave
    more memory to the KV cache.

    ``default_sampling`` is what ``generate`` does without sampling parameters: greedy, with what the checkpoint says
    (see ``EngineConfig.generation_config``).
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        record: Callable[[EngineRow], None] = discard,
        models: Models | None = None,
        expected: SamplingParams = DRAWN,
    ) -> None:
        if not isinstance(config, EngineConfig):
            raise UserError(f"config is {shown(config)}: use EngineConfig(model=..., drafter=...)")
        require(
            not config.synthetic_acceptance,
            "synthetic_acceptance is set: its texts are not the model's, use specgen tune",
        )
        require(
            models is None or isinstance(models, Models),
            f"models is {shown(models)}: use those of an engine, engine.models",
        )
        require_not_forked(choose_device(config.device))
        checkpoints = open_checkpoints(config, {} if models is None else models.checkpoints)
        self.config = resolve(config, checkpoints)
        require_memory(self.config)
        said = generation_config(checkpoints["model"], self.config.generation_config)
        self.default_sampling = said.over(SamplingParams())
        expected = most_demanding([expected, self.default_sampling])
        models = (
            load_models(self.config, checkpoints, expected)
            if models is None
            else over_target(models, self.config, checkpoints)
        )
        self._running: Generator[Completion, None, None] | None = None
        try:
            core = build_engine(self.config, models, record, expected=expected)
            core.warm_up()
            core.learn(given_answers(self.config))
            core.delay_captures(_CAPTURE_DELAY)
        except DeviceLost as lost:
            raise DeviceLost(lost.reason, ()) from lost  # what was tried meanwhile is no caller's request
        self._loaded: tuple[Models, EngineCore] | None = (models, core)

    def __repr__(self) -> str:
        config, k = self.config, self.config.draft_length
        drafts = f"with {config.drafter}, K {k.kind if k.auto else k.most}" if k.most else "alone"
        closed = ", closed" * (self._loaded is None)
        return f"<Engine: {config.model} {drafts}, {config.dtype} on {config.device}{closed}>"

    @property
    def models(self) -> Models:
        """Weights and tokenizer, for another engine over the same target."""
        return self._require_open()[0]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.models.tokenizer

    def close(self) -> None:
        """Free what the engine holds: weights, KV caches, CUDA graphs, workspaces, the processes of other ranks.

        A run that is not exhausted ends, and its iterator raises ``UserError``, as every later call does. What another
        object refers to stays: models that engines share go with the last of them. Closing again does nothing.
        """
        if self._loaded is None:
            return
        if self._running is not None:
            at_work = getgeneratorstate(self._running) == GEN_RUNNING
            require(not at_work, "the engine is at work: close it between two outputs")
            self._running.close()
        self._loaded = self._running = None
        gc.collect()
        if self.config.device != "cpu":
            with suppress(RuntimeError):  # a device that is lost has nothing to give back
                torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def capture_graphs(self) -> None:
        """Capture the CUDA graph of every batch size and K now, which ``generate`` does as it comes to each.

        For greedy requests without logit biases or logprobs; others have their own graphs.
        """
        _, core = self._require_idle()
        with phase("graphs"):
            core.delay_captures(0)
            capture_all(core, self.config.max_batch_size, self.config.draft_length.lengths)
            core.delay_captures(_CAPTURE_DELAY)

    def learn(self, answers: Iterable[Sequence[int]]) -> None:
        """Let drafts come from ``answers``, of token ids, as they do from those that this engine has finished.

        Nothing where the drafter is not ``suffix``. ``UserError`` where the model has no such token.
        """
        _, core = self._require_idle()
        core.learn(answers)

    def generate(
        self,
        prompts: str | Prompt | Iterable[str | Prompt | Rejected | None],
        sampling: SamplingParams | None = None,
        *,
        earlier: Mapping[str, str] = _NONE,
        lost: Mapping[str, Sequence[str]] = _NONE,
        until: Callable[[], bool] = never_stop,
    ) -> Iterator[RequestOutput]:
        """Yield an output for every turn and every sample of every prompt as they finish, in no fixed order.

        ``prompts`` is one prompt or an iterable of prompts, and a prompt is a string or a ``Prompt``; anything else is
        a ``UserError`` (token ids: ``Prompt(id=..., token_ids=...)``). A string is raw text without a chat template;
        its id is its index among ``prompts`` ("0", "1", ...). Prompts are pulled as the batch has room, so they may be
        a stream; None in it says that there is none now, and that more may come while others run. One that cannot be
        run comes as an output with ``error``. ``sampling`` holds what a prompt does not say itself; without it
        ``default_sampling`` does. ``earlier`` has the texts of turns and samples, by name, that were answered before:
        they are not asked again. ``lost`` has why the device was lost while a turn ran (see ``DeviceLost``), by name
        and once for each time: a turn that it was lost with once runs alone, one that it was lost with twice has
        failed. ``until`` is asked between steps; once it is true, what the steps in flight have finished is yielded and
        the rest is dropped.
        ``UserError`` while the engine is at work for another caller, and once it is closed; ``DeviceLost`` where only a
        new process can go on.
        """
        _, core = self._require_open()
        require_not_forked(torch.device(self.config.device))
        if not isinstance(sampling, SamplingParams | None):
            raise UserError(
                f"sampling is {shown(sampling)}: use SamplingParams(...); a prompt's own are Prompt(sampling=...)"
            )
        core.require_possible(sampling or self.default_sampling)
        return self._outputs(_named(prompts), sampling or self.default_sampling, earlier, lost, until)

    def _outputs(
        self,
        prompts: Iterator[Prompt | Rejected | None],
        sampling: SamplingParams,
        earlier: Mapping[str, str],
        lost: Mapping[str, Sequence[str]],
        until: Callable[[], bool],
    ) -> Iterator[RequestOutput]:
        failed: deque[RequestOutput] = deque()
        models, core = self._require_idle()
        num_spec_tokens = self.config.draft_length.most
        conversations = Conversations(prompts, models.tokenizer, sampling, failed.append, earlier, lost)
        self._running = core.generate(conversations.first_turns(), conversations.follow_up, until)
        del models, core  # ``close`` frees them while this is suspended
        try:
            with closing(self._running) as completions:
                for completion in completions:
                    yield from _drained(failed)
                    record = completion.record
                    per_step = (step.accepted for step in record.steps or () if step.drafts)
                    metrics = metrics_of(record.counts, per_step, num_spec_tokens)
                    yield conversations.answer(completion, metrics)
            self._require_open()  # else this is not all of it
            yield from _drained(failed)
        finally:
            self._running = None

    def _require_open(self) -> tuple[Models, EngineCore]:
        if self._loaded is None:
            raise UserError("the engine is closed: make a new one with Engine(config)")
        return self._loaded

    def _require_idle(self) -> tuple[Models, EngineCore]:
        loaded = self._require_open()
        require(
            self._running is None, "the engine is generating already: exhaust or close that iterator first"
        )
        return loaded


def _named(
    prompts: str | Prompt | Iterable[str | Prompt | Rejected | None],
) -> Iterator[Prompt | Rejected | None]:
    """One prompt, or each of several; the types of a list are checked before its first prompt runs."""
    if isinstance(prompts, str | Prompt | Rejected):
        prompts = (prompts,)
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping):
        raise UserError(f"prompts is {shown(prompts)}: {_ONE_OR_SEVERAL}")
    if isinstance(prompts, list | tuple):
        for index, prompt in enumerate(prompts):
            _check(index, prompt)
    return starmap(_prompt, enumerate(prompts))


def _prompt(index: int, prompt: str | Prompt | Rejected | None) -> Prompt | Rejected | None:
    if prompt is None:
        return None
    _check(index, prompt)
    return Prompt(id=str(index), text=prompt) if isinstance(prompt, str) else prompt


def _check(index: int, prompt: object) -> None:
    if not isinstance(prompt, str | Prompt | Rejected):
        raise UserError(f"prompt {index} is {shown(prompt)}: {_ONE_OR_SEVERAL}")


def _drained(outputs: deque[RequestOutput]) -> Iterator[RequestOutput]:
    while outputs:
        yield outputs.popleft()
