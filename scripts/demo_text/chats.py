"""Writes short simple chats from templates.

A chat is a list of turns that alternate between the user and the assistant, the user first.
"""

from collections.abc import Callable
from random import Random

from demo_text.chats_in_writing import (
    choice,
    day_plan,
    letter,
    poem,
    roleplay,
    scene,
    sides,
    small_talk,
    story,
)
from demo_text.chats_of_puzzles import extraction, order, program, rewriting, series, sums, words
from demo_text.chats_on_topics import compare, explain, facts, listing, summarize, tips
from demo_text.phrases import Chat

TEMPLATES: tuple[Callable[[Random], Chat], ...] = (
    *(explain, explain, explain, facts, facts, summarize, compare, tips, tips, listing, story, story),
    *(poem, letter),
    *(roleplay, program, program, extraction, order, order, sums, series, words, words, choice),
    *(rewriting, small_talk, scene, day_plan, sides),
)


def generate(rng: Random) -> Chat:
    """A random chat of a random template: user and assistant texts in turn."""
    return rng.choice(TEMPLATES)(rng)
