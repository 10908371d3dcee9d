"""The engine as a language model of lm-eval: generation and log-likelihoods of texts."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from specgen.config import EngineConfig, SamplingParams, UserError, require
from specgen.core.engine_core import EngineCore
from specgen.core.sequence import Completion, Request, Scored, ScoreRequest
from specgen.engine.build import build_engine, most_demanding
from specgen.engine.loading import Models
from specgen.experiments.study_comparison import Generated
from specgen.record.files import sample_id
from specgen.record.progress import Progress
from specgen.record.record_rows import EngineRow
from specgen.record.results import RunDirectory
from specgen.text.reasoning import answer_of
from specgen.text.tokenizer import Message

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)  # generation arguments that are fields of SamplingParams
_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1}  # no effect at these values
_Row = dict[str, Any]  # an answer
_Asked = TypeVar("_Asked", Request, ScoreRequest)
_Found = TypeVar("_Found")  # what an engine returns
_Scorable = tuple[Any, list[int], list[int]]  # lm-eval's cache key or None, context, continuation


class SpecgenLM(TemplateLM):  # type: ignore[misc]
    """lm-eval's ``LM`` over an engine; prompts are encoded and truncated as by lm-eval's ``hf`` model.

    Without ``may_cut`` a prompt that leaves no room for the tokens asked for is a ``UserError``.

    ``sampling`` holds defaults for a task's generation arguments. Every answer is written to ``files`` as it arrives,
    under a hash of the request; requests with an answer are not run again, and the engine is built only when needed.
    ``progress`` follows every task under its name and the arm's ``name``. ``generated`` has the first generation for
    every document, by task and document number.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        models: Models,
        sampling: SamplingParams,
        files: RunDirectory,
        progress: Progress,
        name: str = "engine",
        may_cut: bool = True,
    ) -> None:
        super().__init__()
        self._config = config
        self._engine: EngineCore | None = None
        self._models = models
        self._text = models.tokenizer
        self._sampling = sampling
        self._files = files
        self._progress = progress
        self._name = name
        self._may_cut = may_cut
        self.cut: dict[str, tuple[int, int]] = {}  # by task: prompts that were cut, to so many tokens
        self._answers = files.completions
        self.generated: dict[tuple[str, int], Generated] = {}
        self._names: dict[str, _Row] = {}  # what a row says of its request: of one of several samples, which
        self._asked: dict[str, None] = {}  # ids, in the order of the input

    @property
    def seconds(self) -> float:
        """Engine time of all answers, earlier runs included."""
        return float(sum(row["seconds"] for row in self._answers.values()))

    def order(self) -> Iterator[str]:
        """The ids of all answers in the order in which lm-eval asks, whoever answered when."""
        yield from dict.fromkeys((*self._asked, *self._answers))

    def _answer(
        self,
        asked: Iterable[_Asked],
        run: Callable[[EngineCore, Iterator[_Asked]], Iterator[_Found]],
        row_of: Callable[[_Found], tuple[str, _Row]],
        expected: SamplingParams,
        name: str = "scores",
    ) -> Iterator[tuple[str, _Row]]:
        """The answers to ``asked``: of earlier runs, then the rows of what ``run`` yields, written as they arrive.

        ``expected`` is for building the engine (see ``build_engine``), ``name`` for the progress.
        """
        wanted = {each.id: each for each in asked}
        self._asked |= dict.fromkeys(wanted)
        known = [each for each in wanted if each in self._answers]
        self._progress.start(f"{self._name}, {name}", len(wanted), len(known))
        try:
            yield from ((each, self._answers[each]) for each in known)
            if len(known) == len(wanted):
                return
            if self._engine is None:
                self._engine = build_engine(self._config, self._models, self._record, expected=expected)
                self._engine.warm_up()
            last = time.perf_counter()  # the engine's start does not count as time of the answers
            others = (each for each in wanted.values() if each.id not in self._answers)
            with closing(cast("Generator[_Found]", run(self._engine, others))) as found:
                for each in found:
                    answered, row = row_of(each)
                    now = time.perf_counter()
                    whole = {"id": answered, **row, "seconds": now - last}
                    self._files.add_completion(whole, each.record if isinstance(each, Completion) else None)
                    last = now
                    self._progress.advance()
                    yield answered, row
        finally:
            self._progress.finish()

    def _record(self, row: EngineRow) -> None:
        self._files.record(row)
        self._progress.update(row)

    # --- what lm-eval asks about the model --------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's EOS token, or else the model's."""
        own = self._text.eos_token_id
        return self._models.target.config.eos_token_ids[0] if own is None else own

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that is scored without context."""
        own = self._text.bos_token_id
        return self.eot_token_id if own is None else own

    @property
    def max_length(self) -> int:
        """Positions of the model's context."""
        return self._models.target.config.max_positions

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name in lm-eval's request caches."""
        return str(Path(self._models.checkpoints["model"].path)).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's source, for lm-eval's records; None if it is not used."""
        return self._text.chat_template if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a chat; without the system message if the template refuses it."""
        messages = [Message(role=each["role"], content=each["content"]) for each in chat_history]
        render = self._text.render_chat if add_generation_prompt else self._text.render_open_chat
        rest = [message for message in messages if message.role != "system"]
        try:
            return render(messages)
        except UserError:
            if len(rest) == len(messages):
                raise
            return render(rest)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids; None adds the tokenizer's special tokens unless the text begins with its first one."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._text.decode_with_special([self.prefix_token_id]))
        return self._text.encode_text(string) if add_special_tokens else self._text.encode_rendered(string)

    # --- generation -------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The texts in the order of ``requests``; the engine gets a task at a time, all of it at once."""
        asked = self._requests(requests)
        index = {request.id: at for at, request in enumerate(asked)}
        texts = [""] * len(requests)
        for name, row in self._by_task(asked):
            at = index[name]
            texts[at], instance = row["text"], requests[at]
            self.cache_hook.add_partial("generate_until", instance.args, texts[at])
        for request, instance in zip(asked, requests, strict=True):
            answer = Generated(
                prompt_token_ids=request.prompt_token_ids,
                token_ids=tuple(self._answers[request.id]["token_ids"]),
                sampling=request.sampling,
            )
            self.generated.setdefault((instance.task_name, instance.doc_id), answer)
        return texts

    def _by_task(self, asked: list[Request]) -> Iterator[tuple[str, _Row]]:
        """The answers to ``asked``, task by task, so that each has its own speed."""
        expected = most_demanding(request.sampling for request in asked)
        tasks: dict[str, list[Request]] = {}
        for request in asked:
            tasks.setdefault(str(request.category), []).append(request)
        for task, wanted in tasks.items():
            yield from self._answer(wanted, EngineCore.generate, self._row, expected, task)

    def _requests(self, instances: list[Instance]) -> list[Request]:
        """Requests whose ids name what is asked and how often it was asked before, so that samples differ."""
        names = [f"{_name('generate_until', *instance.args)}-1" for instance in instances]
        total, times, asked = Counter(names), Counter[str](), list[Request]()
        for name, instance in zip(names, instances, strict=True):
            sample, several = times[name], total[name] > 1
            times[name] += 1
            request = self._request(sample_id(name, sample), instance, share=name if several else "")
            self._names[request.id] = {
                **({"id": name, "sample": sample} if several else {}),
                "title": f"{instance.task_name} {instance.doc_id}",
                "prompt": instance.args[0],
            }
            asked.append(request)
        return asked

    def _request(self, name: str, instance: Instance, share: str) -> Request:
        context, arguments = instance.args
        sampling = self._sampling_of(arguments)
        room = self.max_length - sampling.max_tokens
        require(
            room > 0,
            f"max_gen_toks is {sampling.max_tokens} and the model's context is {self.max_length}: "
            "lower it to leave room for a prompt",
        )
        prompt = self.tok_encode(context)
        require(
            self._may_cut or len(prompt) <= room,
            f"max-new-tokens is {sampling.max_tokens} and a prompt of {instance.task_name} has {len(prompt)} tokens, "
            f"in a context of {self.max_length}: lower it, or --num-fewshot",
        )
        if len(prompt) > room:
            number, _ = self.cut.get(instance.task_name, (0, 0))
            self.cut[instance.task_name] = number + 1, room
        return Request(
            id=name,
            prompt_token_ids=tuple(prompt[-room:]),
            sampling=sampling,
            category=instance.task_name,
            share=share,
        )

    def _sampling_of(self, arguments: Mapping[str, Any]) -> SamplingParams:
        """The sampling parameters of a task's generation arguments; ``UserError`` for unsupported ones."""
        known = normalize_gen_kwargs(dict(arguments), self._sampling.max_tokens)
        max_tokens, sample = known.pop("max_gen_toks"), known.pop("do_sample")
        stops = handle_stop_sequences(known.pop("until"), eos=None)
        given = {name: known.pop(name) for name in _SAMPLING if name in known}
        for name, value in known.items():
            require(
                _NEUTRAL.get(name) == value,
                f"generation argument {name} is {value!r}: the engine has only max_gen_toks, until, do_sample, "
                + ", ".join(_SAMPLING),
            )
        temperature = float(given.get("temperature", 0.0)) if sample else 0.0
        stop = tuple(stop for stop in stops if stop)
        return replace(
            self._sampling, **{**given, "temperature": temperature}, max_tokens=max_tokens, stop=stop
        )

    def _row(self, completion: Completion) -> tuple[str, _Row]:
        """The id, and a row with all tokens and the answer before the first stop string or the end token.

        A task scores the answer alone, so its reasoning is in a separate field.
        """
        request = completion.request
        require(completion.error is None, f"a prompt of {request.category} cannot be run: {completion.error}")
        ids = completion.token_ids
        end = [*ids, self.eot_token_id].index(self.eot_token_id)
        parts, text = answer_of(self._text, request.prompt_token_ids, ids[:end], request.sampling)
        reasoning = {} if parts.reasoning is None else {"reasoning": parts.reasoning}
        return request.id, {
            **self._names[request.id],
            **reasoning,
            "text": text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "num_prompt_tokens": len(request.prompt_token_ids),
            "category": request.category,
        }

    # --- scores -----------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: list[_Scorable], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Sum of log-probabilities of every continuation, and whether greedy decoding gives it.

        An empty one, as where a tokenizer joins it with its context, is certain, as it is with lm-eval's own models.
        """
        names = [_name("loglikelihood", context, continuation) for _, context, continuation in requests]
        asked = {name: request for name, request in zip(names, requests, strict=True) if request[2]}
        texts = (self._score_request(*each) for each in asked.items())
        found: dict[str, tuple[float, bool]] = {}
        for name, row in self._answer(texts, EngineCore.score, _score, SamplingParams()):
            found[name] = (row["log_prob"], row["greedy"])
            if (key := asked[name][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", key, found[name])
        return [found.get(name, (0.0, True)) for name in names]

    def _score_request(self, name: str, request: _Scorable) -> ScoreRequest:
        _, context, continuation = request
        tokens = (context + continuation)[-(self.max_length + 1) :]  # the last one needs no position
        require(
            len(continuation) < len(tokens),
            f"a continuation of {len(continuation)} tokens cannot be scored in a context of {self.max_length}: "
            "it must fit",
        )
        return ScoreRequest(id=name, token_ids=tuple(tokens), num_context=len(tokens) - len(continuation))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, with as much context per token as fits."""
        windows = [self._windows(instance.args[0]) for instance in requests]
        scores = iter(self._loglikelihood_tokens([window for each in windows for window in each]))
        totals = [sum(next(scores)[0] for _ in each) for each in windows]
        for instance, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", instance.args, total)
        return totals

    def _windows(self, text: str) -> list[_Scorable]:
        pairs = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return [(None, *make_disjoint_window(pair)) for pair in pairs]


def _name(*asked: object) -> str:
    """A hash of a request, the same in every run."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:20]


def _score(scored: Scored) -> tuple[str, _Row]:
    return scored.request.id, {"log_prob": sum(scored.log_probs), "greedy": all(scored.greedy)}
