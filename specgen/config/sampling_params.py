"""How the tokens of one answer are chosen, as vLLM's ``SamplingParams`` names it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import nextafter
from typing import Any, NoReturn

from specgen.config.errors import UserError, is_text, require, shown
from specgen.config.field_types import check_types, number, option, strings, whole, whole_numbers
from specgen.config.structured import StructuredOutputs

_LARGEST_COUNT = 2**31 - 1  # of tokens
_SEEDS = (
    "use a number of 64 bits, and not -1, which is a new seed for every request elsewhere: a resumed run must give the "
    "same texts"
)
_HOTTEST = 1_000_000  # all tokens are equally likely long before
MAX_LOGIT_BIASES = 1024  # per request
MAX_LOGPROBS = 20  # per token
_MAX_SAMPLES = 10_000  # per prompt
_CONSTRAINTS = (  # fields of ``SamplingParams`` that say which tokens may come next
    *("allowed_token_ids", "bad_words", "bad_words_ids", "begin_suppress_tokens", "structured_outputs"),
)
_MAX_PENALTY = 2.0  # presence and frequency, as OpenAI and vLLM have it
_OTHER_PENALTIES = f"use {-_MAX_PENALTY} to {_MAX_PENALTY}; 0 switches it off"
_REPETITION = (0.01, 100.0)  # beyond, logits would leave what float32 holds
# A field, its least and largest value, and the remedy
_RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("max_tokens", 1, _LARGEST_COUNT, f"ask for at least 1, at most {_LARGEST_COUNT}"),
    ("temperature", 0, _HOTTEST, f"use 0 (greedy) or more, up to {_HOTTEST}"),
    ("top_p", nextafter(0, 1), 1, "use a share in (0, 1]; 1 switches it off"),
    ("top_k", 0, _LARGEST_COUNT, f"use 0 (off) or a number of tokens, at most {_LARGEST_COUNT}"),
    ("min_p", 0, 1, "use a share in [0, 1]; 0 switches it off"),
    ("seed", -(2**63), 2**63 - 1, _SEEDS),
    ("n", 1, _MAX_SAMPLES, f"ask for 1 to {_MAX_SAMPLES} samples of a prompt"),
    ("logprobs", 0, MAX_LOGPROBS, f"use 0 (only the chosen token's) to {MAX_LOGPROBS}"),
    ("prompt_logprobs", 0, MAX_LOGPROBS, f"use 0 (only the prompt's) to {MAX_LOGPROBS}"),
    ("repetition_penalty", *_REPETITION, f"use {_REPETITION[0]} to {_REPETITION[1]}; 1 switches it off"),
    ("presence_penalty", -_MAX_PENALTY, _MAX_PENALTY, _OTHER_PENALTIES),
    ("frequency_penalty", -_MAX_PENALTY, _MAX_PENALTY, _OTHER_PENALTIES),
)
# Where messages call a field by another name than its option's
_NAMES = {"max_tokens": "max_tokens (--max-new-tokens)", "prompt_logprobs": "prompt_logprobs"}


def _token_ids(text: str) -> tuple[int, ...]:
    """``13,198``; also as ``str`` writes a tuple."""
    ids = [each.strip() for each in text.strip("()").split(",") if each.strip()]
    require(
        all(each.isascii() and each.isdecimal() for each in ids),
        f"stop-token-ids is {shown(text)}: write token ids such as 13,198",
    )
    return tuple(map(int, ids))


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request, as vLLM's ``SamplingParams``. ``UserError`` for a value that is wrong.

    ``max_tokens`` counts output tokens; ``stop`` is one string or several, before which the text ends; with
    ``ignore_eos`` only they and ``max_tokens`` end it.
    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch the filter off. ``seed`` and the
    request's id determine all its random numbers. ``n`` samples of a prompt are requests of their own: sample 0 is what
    ``n`` 1 gives, and each other one is drawn by its number too. ``logit_bias`` has pairs of token id and bias.
    ``logprobs`` asks for the log-probability of every output token and of that many top tokens, computed from the raw
    logits before bias, penalties, temperature and filters (vLLM's default, ``raw_logprobs``). ``prompt_logprobs`` asks
    for the same of the prompt's tokens, which are then computed in full, whatever the prefix cache has.

    ``stop_token_ids`` end a text as the model's end tokens do, also with ``ignore_eos``; ``token_ids`` have the one
    that did, the text has not. Before a text has ``min_tokens`` tokens, neither these nor the end tokens are chosen,
    and a stop string that is complete by then ends nothing.

    ``repetition_penalty`` divides the logits above 0 of tokens that the prompt or the output so far has, and multiplies
    others; 1 is off. ``presence_penalty`` and ``frequency_penalty`` are taken off the logits of tokens that the output
    so far has, the second once for each time; 0 is off. ``suppress_tokens`` are never chosen. Drafts are not penalised:
    a token is accepted as the penalties of the text up to it say.

    ``allowed_token_ids`` are the only tokens that an answer has, its end token included. ``bad_words`` never occur in
    it, alone or behind a space, and neither do the token sequences ``bad_words_ids``: of each the last token is not
    chosen; one of these may begin in the prompt. An answer does not begin with ``begin_suppress_tokens``. It fits
    ``structured_outputs``, whose tokens alone are allowed, and an end token only where it does.
    """

    max_tokens: int = option(128, "Sampling", "Longest answer in tokens.", name="max_new_tokens")
    temperature: float = option(0.0, "Sampling", "0 is greedy.")
    top_p: float = option(1.0, "Sampling", "Nucleus; 1 is off.")
    top_k: int = option(0, "Sampling", "Sample from the K most likely tokens; 0 is off.")
    min_p: float = option(0.0, "Sampling", "Drop tokens below this share of the most likely one; 0 is off.")
    repetition_penalty: float = option(
        1.0, "Sampling", "Above 1, tokens of the prompt and of the output so far are less likely; 1 is off."
    )
    presence_penalty: float = option(
        0.0, "Sampling", "Taken off the logits of tokens that the output so far has, as OpenAI's; 0 is off."
    )
    frequency_penalty: float = option(
        0.0, "Sampling", "The same once for each time that the output so far has the token; 0 is off."
    )
    seed: int = option(0, "Sampling", "With the request's id it determines all random numbers.")
    n: int = option(
        1,
        "Sampling",
        "Samples of every prompt, each a row of its own; with --temperature. Run again with more, a finished run only "
        "adds those that are missing.",
    )
    stop: str | Sequence[str] = option(
        (), "Sampling", "Stop at this string, which is left out; may be repeated."
    )
    ignore_eos: bool = option(False, "Sampling", "Generate to the full length.")
    stop_token_ids: tuple[int, ...] = option(
        (),
        "Sampling",
        "Stop at these token ids too, such as 13,198; their text is left out.",
        metavar="IDS",
        shown="none",
        parse=_token_ids,
    )
    min_tokens: int = option(
        0, "Sampling", "Shortest answer in tokens: before it has them, nothing but --max-new-tokens ends it."
    )
    logit_bias: tuple[tuple[int, float], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = option(
        (), "Sampling", "A word that no answer has; may be repeated.", name="bad_word"
    )
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        check_types(self)
        for name, least, most, remedy in _RANGES:
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                _refuse(_NAMES.get(name, name.replace("_", "-")), value, remedy)
        if self.seed == -1:
            _refuse("seed", self.seed, _SEEDS)
        if self.n > 1 and self.temperature == 0:
            _refuse(
                "n", self.n, "samples at temperature 0 are all the same: set a temperature, or leave n out"
            )
        require(all(self.stop_strings), "an empty stop string would end every text at once: remove it")
        for stop in self.stop_strings:
            if not is_text(stop):
                _refuse("stop", stop, "it holds a lone surrogate, which is not a character")
        if not 0 <= self.min_tokens <= self.max_tokens:
            _refuse(
                "min-tokens", self.min_tokens, f"use 0 to max_tokens (--max-new-tokens), {self.max_tokens}"
            )
        self._check_logit_bias()
        if self.constrained:
            self._check_constraints()

    @property
    def constrained(self) -> bool:
        """Whether not every token may come next."""
        return (
            self.structured_outputs is not None
            or self.allowed_token_ids is not None
            or bool(self.bad_words or self.bad_words_ids or self.begin_suppress_tokens)
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return strings(self.stop, "stop")

    @property
    def penalised(self) -> bool:
        """Whether tokens of the text so far are less, or more, likely."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def to_json(self) -> dict[str, Any]:
        """For a manifest; what is off is not named where earlier versions did not know it, so that a run goes on."""
        fields, off = asdict(self), SamplingParams()
        newer = (
            *("repetition_penalty", "presence_penalty", "frequency_penalty", "suppress_tokens", "n"),
            *("stop_token_ids", "min_tokens", "prompt_logprobs", *_CONSTRAINTS),
        )
        return {
            name: value for name, value in fields.items() if name not in newer or value != getattr(off, name)
        }

    def in_words(self) -> str:
        """How tokens are chosen, and how many, as a report says it."""
        how = "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"
        how += f", {self.n} samples a prompt" if self.n > 1 else ""
        return f"{how}, {self.besides()}, seed {self.seed}"

    def besides(self) -> str:
        """What decides texts beside temperature and seed: ``top p 0.9, 2 logit biases, at most 128 new tokens``."""
        off, filters = SamplingParams(), ("top_p", "top_k", "min_p") if self.temperature > 0 else ()
        found = [
            f"{name.replace('_', ' ')} {getattr(self, name):g}"
            for name in (*filters, "repetition_penalty", "presence_penalty", "frequency_penalty")
            if getattr(self, name) != getattr(off, name)
        ]
        found += [
            f"{name.replace('_', ' ')} ({len(each)})"
            for name in (
                "logit_bias",
                "suppress_tokens",
                "stop_strings",
                "stop_token_ids",
                *_CONSTRAINTS[:-1],
            )
            if (each := getattr(self, name))
        ]
        found += [f"at least {self.min_tokens}"] if self.min_tokens else []
        found += [] if self.structured_outputs is None else [f"answers of {self.structured_outputs}"]
        return ", ".join([*found, f"{'' if self.ignore_eos else 'at most '}{self.max_tokens} new tokens"])

    def _check_constraints(self) -> None:
        object.__setattr__(self, "structured_outputs", StructuredOutputs.of(self.structured_outputs))
        words = self.bad_words_ids
        if isinstance(words, str) or not isinstance(words, Sequence):
            _refuse("bad_words_ids", words, "use a list of lists of token ids")
        checked = tuple(whole_numbers(each, "an element of bad_words_ids") for each in words)
        object.__setattr__(self, "bad_words_ids", checked)
        require(all(self.bad_words) and all(checked), "bad_words has an empty word: remove it")
        require(
            self.allowed_token_ids != (),
            "allowed_token_ids is empty: name at least one token, or leave it out",
        )
        require(
            self.structured_outputs is None or not self.ignore_eos,
            "ignore_eos is set, and an answer that fits structured outputs ends with an end token: leave one of them "
            "out",
        )

    def _check_logit_bias(self) -> None:
        pairs = self.logit_bias
        if not isinstance(pairs, tuple) or not all(
            isinstance(pair, tuple) and len(pair) == 2 for pair in pairs
        ):
            raise UserError(
                f"logit_bias is {shown(pairs)}: use a tuple of pairs (token id, bias), such as tuple(biases.items())"
            )
        checked = tuple(
            (whole(token, "a token id of logit_bias"), number(bias, f"logit_bias of token {token}"))
            for token, bias in pairs
        )
        object.__setattr__(self, "logit_bias", checked)
        ids = [token_id for token_id, _ in self.logit_bias]
        require(
            len(ids) <= MAX_LOGIT_BIASES,
            f"logit-bias names {len(ids)} tokens: use at most {MAX_LOGIT_BIASES}",
        )
        all_ids = len(ids) + len(self.suppress_tokens)
        require(
            all_ids <= MAX_LOGIT_BIASES,
            f"suppress-tokens and logit-bias name {all_ids} tokens: use at most {MAX_LOGIT_BIASES}",
        )
        require(len(set(ids)) == len(ids), "logit-bias names a token twice: give every token one bias")
        for token_id, bias in self.logit_bias:
            if not -100 <= bias <= 100:
                _refuse(f"logit-bias of token {shown(token_id)}", bias, "use -100 to 100")


def check_own(fields: Mapping[str, Any]) -> None:
    """``UserError`` for wrong ``fields`` of ``SamplingParams`` beside which others are not known yet."""
    least = fields.get("min_tokens", 1)
    # where a row only says how many samples, or the least of a length
    runs = {"temperature": 1.0, "max_tokens": least if isinstance(least, int) and least > 0 else 1}
    SamplingParams(**{**runs, **fields})


def _refuse(name: str, value: object, remedy: str) -> NoReturn:
    raise UserError(f"{name} is {shown(value)}: {remedy}")
