"""Automata of token lists against what the lists mean; see ``test_asked_texts`` for the texts."""

import random

import pytest

from specgen.config import UserError
from specgen.text.automaton import allowing, not_first, without


def naive_without(sequences: list[tuple[int, ...]], text: list[int], token: int) -> bool:
    """Whether ``token`` may follow ``text``, by the definition."""
    whole = [*text, token]
    return not any(whole[-len(each) :] == list(each) for each in sequences if len(each) <= len(whole))


@pytest.mark.parametrize("seed", range(20))
def test_sequences_that_overlap_are_kept_out(seed: int) -> None:
    rng = random.Random(seed)
    sequences = [tuple(rng.choices(range(3), k=rng.randint(1, 4))) for _ in range(rng.randint(1, 4))]
    before = rng.choices(range(3), k=5)
    automaton = without(5, sequences, before)
    for _ in range(30):
        text, state = list(before), automaton.start
        for _ in range(12):
            allowed = [token for token in range(5) if automaton.after(state, token) >= 0]
            assert allowed == [token for token in range(5) if naive_without(sequences, text, token)]
            text.append(rng.choice(allowed))
            state = automaton.after(state, text[-1])


def test_a_product_allows_what_both_allow() -> None:
    rng = random.Random(3)
    first, second = without(6, [(1, 2), (2, 2, 3)]), without(6, [(2, 1), (3,)])
    both = first * second * allowing(6, [0, 1, 2, 3, 5]) * not_first(6, [0])
    for _ in range(50):
        text = rng.choices(range(6), k=rng.randint(1, 8))
        alone = first.walk(text) >= 0 and second.walk(text) >= 0 and 4 not in text and text[0] != 0
        assert (both.walk(text) >= 0) == alone


def test_a_state_that_leads_nowhere_is_left_out() -> None:
    dead = allowing(4, [0, 1, 2]) * without(
        4, [(0, 0), (0, 1), (2, 0, 2), (0, 2)]
    )  # behind 0 nothing is left
    trimmed = dead.trimmed()
    assert [trimmed.after(trimmed.start, token) >= 0 for token in range(4)] == [False, True, True, False]
    assert trimmed.walk([1, 2, 2, 0]) == -1
    assert trimmed.walk([1, 2, 2, 1]) >= 0
    with pytest.raises(UserError, match="no text fits"):
        (allowing(3, [0]) * without(3, [(0,)])).trimmed()
