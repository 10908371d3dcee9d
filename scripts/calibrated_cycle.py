"""The known text of a calibrated pair: a cycle of tokens, and those after which its head drafts wrong."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

FILE = "cycle.json"
# Of a trained head (EAGLE3, measured on MT-Bench and GSM8K): the share of its drafts that are right, by tenths of its
# probability; and its AUC, .916 there
RIGHT_BY_TENTH = (0.08, 0.13, 0.21, 0.28, 0.34, 0.46, 0.64, 0.69, 0.81, 0.98)
Confidence = Literal["none", "trained", "perfect"]


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """Every token is followed by the next of ``tokens``, the last by the first."""

    tokens: tuple[int, ...]  # the draft vocabulary, in the order of the text
    unknown: tuple[int, ...]  # the tokens whose follower the head does not know
    accept: float  # the share of ``tokens`` that it does know

    @classmethod
    def draw(cls, vocab_size: int, size: int, accept: float, seed: int, *, near: bool = False) -> "Cycle":
        """``size`` of the ids below ``vocab_size`` in random order; ``ValueError`` for an impossible share.

        Unknown tokens are random too, so that drafts are right independently of each other. Where a draft is wrong, the
        head goes on at any place of the text, or with ``near`` a few tokens ahead.
        """
        if not 0 <= accept <= 1:
            raise ValueError(f"accept is {accept}: use a share from 0 to 1")
        rng = random.Random(seed)
        tokens = rng.sample(range(vocab_size), size)
        unknown = rng.sample(tokens, size - round(accept * size))
        if len(unknown) == 1:
            raise ValueError(f"accept {accept} leaves one token unknown, and a wrong guess takes two: use 1")
        if near:  # the guess after an unknown token is the follower of the next of them
            places = {token: place for place, token in enumerate(tokens)}
            unknown.sort(key=places.__getitem__)
        return cls(tokens=tuple(tokens), unknown=tuple(unknown), accept=accept)

    @classmethod
    def read(cls, pair: Path) -> "Cycle":
        """The cycle of the pair in the directory ``pair``; ``ValueError`` if there is none."""
        file = pair / FILE
        if not file.is_file():
            raise ValueError(f"{pair} has no {FILE}: give a directory that make_calibrated_pair.py wrote")
        fields = json.loads(file.read_text(encoding="utf-8"))
        return cls(tokens=tuple(fields["tokens"]), unknown=tuple(fields["unknown"]), accept=fields["accept"])

    def write(self, pair: Path) -> None:
        """Write ``cycle.json``, as ``read`` expects it."""
        fields = {"accept": self.accept, "tokens": self.tokens, "unknown": self.unknown}
        (pair / FILE).write_text(json.dumps(fields) + "\n", encoding="utf-8")

    @cached_property
    def succ(self) -> Mapping[int, int]:
        """The token after each token."""
        return dict(zip(self.tokens, self.tokens[1:] + self.tokens[:1], strict=True))

    @cached_property
    def guess(self) -> Mapping[int, int]:
        """The head's draft after each token: the followers of unknown tokens are rotated among them."""
        followers = [self.succ[token] for token in self.unknown]
        wrong = zip(self.unknown, followers[1:] + followers[:1], strict=True)
        return {**self.succ, **dict(wrong)}

    def guesses(self, token: int, count: int) -> tuple[int, ...]:
        """The drafts after ``token`` of a head that drafts one at a time: each is the guess after the one before."""
        drafts = []
        for _ in range(count):
            token = self.guess[token]
            drafts.append(token)
        return tuple(drafts)

    def parallel_guesses(self, token: int, count: int) -> tuple[int, ...]:
        """The drafts after ``token`` of a head that drafts all at once: each is the guess after a token of the text."""
        return tuple(self.guess[before] for before in (token, *self.after(token, count - 1)))

    def probabilities(self, confidence: Confidence, seed: int) -> Mapping[int, float]:
        """What a head says of its guess after each token: its own probability of it.

        ``trained``: in the last tenth as many guesses as make ``accept`` of all right, and equally many in the others.
        ``none``: it knows nothing of itself, and is sure. ``perfect``: it knows each guess that is wrong.
        """
        if confidence == "none":
            return dict.fromkeys(self.tokens, 0.999)
        rng, unknown = random.Random(f"confidence {seed}"), set(self.unknown)
        if confidence == "perfect":
            return {token: 0.05 if token in unknown else 0.999 for token in self.tokens}
        *low, last = RIGHT_BY_TENTH
        each = (last - self.accept) / (
            len(low) * last - sum(low)
        )  # share of all guesses in each of the others
        if not 0 <= len(low) * each <= 1:
            raise ValueError(
                f"accept is {self.accept} and confidence 'trained': use {sum(low) / len(low):.2f} to {last}"
            )
        shares = [each] * len(low) + [1 - len(low) * each]
        tenths = range(len(shares))
        right = [share * each for share, each in zip(shares, RIGHT_BY_TENTH, strict=True)]
        wrong = [share - each for share, each in zip(shares, right, strict=True)]
        found = {}
        for token in self.tokens:
            (tenth,) = rng.choices(tenths, wrong if token in unknown else right)
            found[token] = min((tenth + rng.random()) / 10, 0.999)
        return found

    def slice(self, start: int, length: int) -> tuple[int, ...]:
        """``length`` tokens of the cyclic text from position ``start``."""
        size = len(self.tokens)
        return tuple(self.tokens[(start + index) % size] for index in range(length))

    def after(self, token: int, count: int) -> tuple[int, ...]:
        """The ``count`` tokens that follow ``token``."""
        text = []
        for _ in range(count):
            token = self.succ[token]
            text.append(token)
        return tuple(text)

    def accepted(self, token: int, drafts: Sequence[int]) -> int:
        """How many of ``drafts``, proposed after ``token``, are accepted."""
        text = self.after(token, len(drafts))
        return next(
            (i for i, pair in enumerate(zip(drafts, text, strict=True)) if pair[0] != pair[1]), len(text)
        )
