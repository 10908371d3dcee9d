"""Answers that have ended, and a table of what followed their n-grams most often, for drafts of later requests.

After SuffixDecoding (Oliaro et al., 2024, arXiv 2411.04975): the longest match counts, and of its continuations the
most frequent at every token. In place of a suffix tree there is a table on the device of all n-grams up to N, made anew
between steps, so that a step looks up in shapes that depend on nothing and stays one CUDA graph.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specgen.config import MOST_DRAFTS
from specgen.decoding.outcome import NO_DRAFT
from specgen.device import on_device

_GROWTH = 4  # the table is made anew when the answers have grown by one part in so many
_AHEAD = 8  # tokens of a continuation that are counted; behind them it is the latest of equal ones
_NO_KEY = torch.iinfo(torch.int64).max  # in place of keys behind the last
# Of a polynomial modulo 2^64. Two n-grams of a pool have the same key once in some ten million pools: a poor draft
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


class Table(NamedTuple):
    """Of every n-gram of a text, n being 1 to N, in rows by n: its key, ascending, and what follows it most often.

    A row has as many entries as the text has tokens, the last of them empty (``_NO_KEY``).
    """

    keys: Tensor  # [N, size] int64, see ``_keys``
    places: Tensor  # [N, size] int32: where a continuation begins, at every token the most frequent one
    shares: Tensor  # [N, size] float32: c / (n + 1) where c of n occurrences have its first token; 0: none goes on


class AnswerPool:
    """The newest answers, up to ``capacity`` tokens, at addresses on ``device`` that stay, as captured steps read them.

    ``longest`` is N. What the host has been given gets there with ``refresh``.
    """

    def __init__(self, *, longest: int, capacity: int, device: torch.device) -> None:
        self._capacity, self._device = capacity, device
        self._answers = deque[Sequence[int]]()  # the oldest first, each with NO_DRAFT behind it
        self._num_tokens = 0  # of ``_answers``
        self._num_fresh = 0  # that came since ``refresh``
        self._num_held = 0  # that the device has
        shape = longest, capacity
        self._tokens = torch.full((capacity + MOST_DRAFTS,), NO_DRAFT, dtype=torch.int32, device=device)
        self._table = Table(
            keys=torch.full(shape, _NO_KEY, dtype=torch.int64, device=device),
            places=torch.zeros(shape, dtype=torch.int32, device=device),
            shares=torch.zeros(shape, dtype=torch.float32, device=device),
        )

    def add(self, answers: Iterable[Sequence[int]]) -> None:
        """Take in the token ids of ``answers``; the oldest make room for them."""
        for answer in answers:
            kept = [*answer[1 - self._capacity :], NO_DRAFT]
            self._answers.append(kept)
            self._num_tokens += len(kept)
            self._num_fresh += len(kept)
        while self._num_tokens > self._capacity:
            self._num_tokens -= len(self._answers.popleft())

    def clear(self) -> None:
        """Forget every answer."""
        self._answers.clear()
        self._num_tokens, self._num_fresh = 0, self._num_held + 1  # ``refresh`` has something to do

    def refresh(self) -> None:
        """Replace what the device has, if a good part is new. Between steps; nothing here waits for the device."""
        if self._num_fresh * _GROWTH <= self._num_held:
            return
        tokens = on_device([*chain.from_iterable(self._answers)], self._device)
        size, longest = len(tokens), len(self._table.keys)
        made = table_of(tokens, longest)
        self._tokens[:size] = tokens
        for whole, part in zip(self._table, made, strict=True):
            whole[:, :size] = part
        self._table.keys[:, size:] = _NO_KEY
        self._num_fresh, self._num_held = 0, size  # last: what failed here is done again

    def lookup(self, texts: Tensor, lengths: Tensor, num_drafts: int) -> tuple[Tensor, Tensor, Tensor]:
        """What followed the most last tokens of the first ``lengths`` ``[B]`` of ``texts`` ``[B, L]`` int32.

        The drafts ``[B, K]``, of which NO_DRAFT is the end of an answer, and means nothing behind it; how many last
        tokens the match has ``[B]``, 0 where there is none; and its share ``[B]``, see ``Table``.
        """
        table, longest = self._table, len(self._table.keys)
        sizes = torch.arange(1, longest + 1, device=texts.device)
        last = lengths[:, None] - sizes
        keys = _keys(texts.gather(1, last.clamp(min=0)).long())
        found = torch.searchsorted(table.keys, keys.T.contiguous()).clamp(max=table.keys.shape[1] - 1)
        shares = table.shares.gather(1, found)
        hits = (table.keys.gather(1, found) == keys.T) & (shares > 0) & (last.T >= 0)
        matched = (hits * sizes[:, None]).amax(0)
        best = (matched - 1).clamp(min=0)[None]
        places = table.places.gather(1, found).gather(0, best)[0]
        ahead = torch.arange(num_drafts, device=texts.device)
        drafts = self._tokens[places[:, None] + ahead].long()
        drafts = torch.where((matched == 0)[:, None], NO_DRAFT, drafts)
        return drafts, matched, shares.gather(0, best)[0]


def _keys(newest_first: Tensor) -> Tensor:
    """Of the n-grams of 1 to N tokens that end with the first of ``newest_first`` ``[B, N]`` int64: ``[B, N]``."""
    powers = torch.full_like(newest_first[0], _FACTOR).cumprod(0)
    return ((newest_first + 1) * powers).cumsum(1)


def table_of(tokens: Tensor, longest: int) -> Table:
    """The table of ``tokens`` ``[size]`` int64, where NO_DRAFT stands behind every answer, for N = ``longest``.

    From long n-grams to short ones: the best continuation of one is its most frequent next token, and behind that the
    best continuation of the n-gram that is longer by this token.
    """
    size, most, device = len(tokens), longest + _AHEAD, tokens.device
    table = Table(
        keys=torch.full((longest, size), _NO_KEY, device=device),
        places=torch.zeros(longest, size, dtype=torch.int32, device=device),
        shares=torch.zeros(longest, size, device=device),
    )
    places = torch.arange(size, device=device)
    after, following = F.pad(tokens[1:], (0, 1), value=NO_DRAFT), (places + 1).clamp(max=size - 1)
    padded, powers = F.pad(tokens, (most - 1, 0), value=NO_DRAFT) + 1, [_FACTOR]
    while len(powers) < most:
        powers.append((powers[-1] * _FACTOR + (1 << 63)) % (1 << 64) - (1 << 63))
    keys = torch.zeros_like(tokens)
    for n in range(1, most + 1):
        keys += padded[most - n : most - n + size] * powers[n - 1]
    # by place the number of its n-gram; by number how often it occurs, and where its best continuation begins
    number, counts, begins = places, torch.ones_like(places), places + 1
    for n in range(most, 0, -1):
        longer, longer_counts, longer_begins = number[following], counts, begins
        ordered, order = keys.sort()
        numbers = F.pad((ordered[1:] != ordered[:-1]).cumsum(0), (1, 0))[:size]
        number = torch.empty_like(places).scatter_(0, order, numbers)
        counts = torch.zeros_like(places).scatter_add_(0, numbers, torch.ones_like(places))
        # the most frequent next token and, of equal ones, the latest place; 0 times where the answer ends
        times = longer_counts[longer].masked_fill(after == NO_DRAFT, 0)
        best = torch.zeros_like(places).scatter_reduce_(0, number, times * size + places, "amax")
        chosen = best % size
        begins = torch.where(best >= size, longer_begins[longer[chosen]] - 1, chosen + 1)
        if n <= longest:
            table.keys[n - 1].scatter_(0, numbers, ordered)
            table.places[n - 1], table.shares[n - 1] = begins, best // size / (counts + 1)
        keys -= padded[most - n : most - n + size] * powers[n - 1]
    return table
