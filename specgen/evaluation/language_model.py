"""The engine as lm-eval sees a language model: text in, text and log-likelihoods out."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from specgen.build import Models
from specgen.config import SamplingParams, require
from specgen.engine import Engine
from specgen.scoring import ScoreRequest
from specgen.sequence import Completion, Request
from specgen.tokenizer import Message, StopStrings

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")  # generation arguments that are fields of ours
_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0}  # harmless at these values
_Scorable = tuple[Any, list[int], list[int]]  # key of the cache or None, context, continuation


class SpecgenLM(TemplateLM):  # type: ignore[misc]
    """lm-eval's ``LM`` over an engine; prompts are encoded and cut as its ``hf`` model does it.

    ``sampling`` holds what a task's generation arguments leave open. After a run ``token_ids`` has what was generated
    for a task's document, by the task's name and the document's number; an answer from lm-eval's cache has none.
    """

    def __init__(self, *, engine: Engine, models: Models, sampling: SamplingParams) -> None:
        super().__init__()
        self._engine = engine
        self._models = models
        self._text = models.tokenizer
        self._sampling = sampling
        self._num_asked = 0  # names requests, so that each has its own random draws
        self.seconds = 0.0  # that the engine has worked
        self.token_ids: dict[tuple[str, int], tuple[int, ...]] = {}

    # --- what lm-eval asks about the model --------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end of text, or where it names none the model's."""
        own = self._text.eos_token_id
        return self._models.target.config.eos_token_ids[0] if own is None else own

    @property
    def prefix_token_id(self) -> int:
        """What a text without context is scored behind."""
        own = self._text.bos_token_id
        return self.eot_token_id if own is None else own

    @property
    def max_length(self) -> int:
        """Positions of the model's context."""
        return self._models.target.config.max_positions

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in lm-eval's caches of requests."""
        return str(Path(self._models.checkpoints["model"].path)).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the template, for lm-eval's records; None where it is not to be used."""
        return self._text.chat_template if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a chat; without a system message where the template refuses one."""
        messages = [Message(role=each["role"], content=each["content"]) for each in chat_history]
        render = self._text.render_chat if add_generation_prompt else self._text.render_open_chat
        rest = [message for message in messages if message.role != "system"]
        try:
            return render(messages)
        except ValueError:
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
        """The texts in the order of ``requests``, which the engine is given all at once."""
        asked = {request.id: (at, request) for at, request in enumerate(map(self._request, requests))}
        texts, began = [""] * len(requests), time.perf_counter()
        with tqdm(total=len(requests), desc="generating", unit="req", disable=disable_tqdm) as bar:
            for completion in self._engine.generate(request for _, request in asked.values()):
                at, _ = asked[completion.request.id]
                texts[at] = self._answer(requests[at], completion)
                self.cache_hook.add_partial("generate_until", requests[at].args, texts[at])
                bar.update()
        self.seconds += time.perf_counter() - began
        return texts

    def _request(self, instance: Instance) -> Request:
        context, arguments = instance.args
        sampling = self._sampling_of(arguments)
        room = self.max_length - sampling.max_tokens
        require(
            room > 0,
            f"max_gen_toks is {sampling.max_tokens} and the model's context is {self.max_length}: "
            "lower it, so that a prompt has room",
        )
        self._num_asked += 1
        return Request(
            id=str(self._num_asked),
            prompt_token_ids=tuple(self.tok_encode(context)[-room:]),
            sampling=sampling,
            category=instance.task_name,
        )

    def _sampling_of(self, arguments: Mapping[str, Any]) -> SamplingParams:
        """Our parameters for a task's generation arguments; ``ValueError`` for one that the engine cannot follow."""
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

    def _answer(self, instance: Instance, completion: Completion) -> str:
        """The text before the first stop string or special token that ends it."""
        require(completion.error is None, f"{instance.task_name}, {instance.doc_id}: {completion.error}")
        stops = completion.request.sampling.stop
        ends = {self.eot_token_id, *(self._text.special_token_id(stop) for stop in stops)}
        ids = completion.token_ids
        end = next((at for at, token in enumerate(ids) if token in ends), len(ids))
        self.token_ids[instance.task_name, instance.doc_id] = ids[:end]
        return StopStrings(self._text, stops).text(ids[:end])

    # --- scores -----------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: list[_Scorable], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Sum of log-probabilities of every continuation, and whether greedy decoding would write it."""
        answers, began = [(0.0, True)] * len(requests), time.perf_counter()
        with tqdm(total=len(requests), desc="scoring", unit="req", disable=disable_tqdm) as bar:
            for scored in self._engine.score(self._score_requests(requests)):
                at = int(scored.request.id)
                answers[at] = (sum(scored.log_probs), all(scored.greedy))
                if requests[at][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[at][0], answers[at])
                bar.update()
        self.seconds += time.perf_counter() - began
        return answers

    def _score_requests(self, requests: list[_Scorable]) -> Iterator[ScoreRequest]:
        for at, (_, context, continuation) in enumerate(requests):
            tokens = (context + continuation)[-(self.max_length + 1) :]  # the last one needs no position
            require(
                0 < len(continuation) < len(tokens),
                f"a continuation of {len(continuation)} tokens cannot be scored in a context of {self.max_length}: "
                "it needs one token or more, and room for itself",
            )
            yield ScoreRequest(
                id=str(at), token_ids=tuple(tokens), num_context=len(tokens) - len(continuation)
            )

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, each token given all that fits before it."""
        windows = [self._windows(instance.args[0]) for instance in requests]
        scores = iter(
            self._loglikelihood_tokens([window for each in windows for window in each], disable_tqdm)
        )
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
