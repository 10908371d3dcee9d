"""The token automaton of what an answer has to fit, and a program that makes one.

On its own, because an expression may have more states than any memory, and because what compiles holds Python's lock
for most of the time: the program runs within limits, beside the threads that decode.
"""

import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from importlib.util import find_spec
from operator import mul

import numpy as np

from specgen.config import StructuredOutputs, UserError, first_line, require, shown
from specgen.text.automaton import (
    NOT_ALLOWED,
    Automaton,
    ByteAutomaton,
    Numbers,
    Thoughts,
    TokenBytes,
    anything,
    require_size,
)
from specgen.text.json_schema import json_object_regex, json_regex, without_anchors

_MEMORY, _SECONDS = 4 << 30, 20  # beyond, the system ends it
_MOST = 1 << 16  # states of an expression
_END = 256
_BOUNDS, _OPENS, _CLOSES = 1, 2, 3  # marks of ``json_schema``: the bounds of a length, the string that has it
_Within = tuple[int, int, float] | None  # characters so far, the fewest and the most of them


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Text that fits ``asked``, written in ``tokens`` and ended by one of ``ends``."""

    asked: StructuredOutputs
    tokens: TokenBytes
    ends: Sequence[int]
    drops_space: bool  # a decoder leaves out a space at the beginning of a text
    thoughts: Thoughts | None  # that may come before it


def compiled(vocab_size: int, words: Sequence[Automaton], answer: Answer | None) -> Automaton:
    """What ``words`` allow of ``answer``, or without one of any text. ``UserError`` where nothing is left of it."""
    parts = [*words]
    if answer is not None:
        texts = byte_automaton(answer.asked, answer.drops_space)
        fitting = texts.over_tokens(answer.tokens, answer.ends)
        parts.append(fitting.behind(answer.thoughts, answer.ends) if answer.thoughts else fitting)
    found = (
        reduce(mul, parts).trimmed(() if answer is None else answer.ends) if parts else anything(vocab_size)
    )
    found = found if answer is None else found.with_forced(answer.tokens)
    require_size(len(found.successors), 1 + found.successors.shape[1])
    return replace(
        found, classes=found.classes.astype(np.int16), successors=found.successors.astype(np.int32)
    )


def compiled_apart(vocab_size: int, words: Sequence[Automaton], answer: Answer | None) -> Automaton:
    """The same, in a process of its own. ``UserError`` also where it takes too long, or too much memory."""
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "specgen.text.answer_automaton"],
        input=pickle.dumps((vocab_size, words, answer)),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        capture_output=True,
        check=False,
        process_group=0,  # a terminal's signals are for this process: an interrupted run has refused nothing
    )
    if ended.returncode < 0:
        raise UserError(
            f"it takes more than {_SECONDS} s or {_MEMORY >> 30} GiB to compile: ask for less of it"
        )
    if ended.returncode:
        raise RuntimeError(ended.stderr.decode(errors="replace"))
    found: Automaton | str = pickle.loads(ended.stdout)  # written by ``main``
    if isinstance(found, str):
        raise UserError(found)
    return found


def byte_automaton(asked: StructuredOutputs, drops_space: bool = False) -> ByteAutomaton:
    """The texts that fit ``asked``, also with a space before them that a decoder ``drops``. ``UserError`` for none."""
    if asked.choice:
        found = _of_choices([choice.encode() for choice in asked.choice])
    elif asked.regex is not None:
        found = _of_regex(asked.regex)
    else:
        found = _counted(
            _of_regex(json_object_regex() if asked.json is None else json_regex(str(asked.json)))
        )
    if not drops_space:
        return found
    begin = np.where(found.successors[:1] < 0, NOT_ALLOWED, found.successors[:1] + 1)
    begin[0, ord(" ")] = 1  # where the text really begins
    moved = np.where(found.successors < 0, NOT_ALLOWED, found.successors + 1)
    return ByteAutomaton(
        successors=np.concatenate((begin, moved)), final=np.concatenate((found.final[:1], found.final))
    )


def _of_choices(choices: Sequence[bytes]) -> ByteAutomaton:
    """A tree of their bytes."""
    begun = sorted({choice[:size] for choice in choices for size in range(len(choice) + 1)})
    number_of = {each: number for number, each in enumerate(begun)}
    successors = np.full((len(begun), 256), NOT_ALLOWED)
    for each, number in number_of.items():
        if each:
            successors[number_of[each[:-1]], each[-1]] = number
    return ByteAutomaton(
        successors=successors, final=np.isin(np.arange(len(begun)), [number_of[each] for each in choices])
    )


def _of_regex(regex: str) -> ByteAutomaton:
    """Of an expression that matches whole texts.

    outlines-core is asked for the tokens of a vocabulary of single bytes. Its automata prefer what an alternative finds
    first (``a|ab`` takes no ``ab``) unless the end of the text is asked for, so it is. They are also made for a search
    from every byte on, which doubles the time with every repetition (``.{30}``) unless nothing at all matches, too: the
    search then ends where it began. For that two bytes stand in front, and are left out again.
    """
    require(
        find_spec("outlines_core") is not None,
        "regular expressions and JSON schemas need outlines-core: pip install '.[structured]'",
    )
    from outlines_core import Index, Vocabulary

    whole = without_anchors(regex)
    try:
        index = Index(
            rf"\x00(?:\x00(?:{whole})|)\z|",
            Vocabulary(_END, {bytes([value]): [value] for value in range(_END)}),
        )
    except ValueError as error:
        require(
            "no transitions" not in str(error),
            f"{shown(regex)}: no text matches it: remove what excludes every character",
        )
        raise UserError(
            f"{shown(regex)} cannot be compiled ({first_line(error)}): write it in Rust's syntax, without look-around, "
            "back-references and word boundaries, and ranges with the smaller end first ({2,8})"
        ) from error
    transitions = index.get_transitions()
    require(
        len(transitions) <= _MOST,
        f"{shown(regex)} has {len(transitions):,} states, and {_MOST:,} are the most: ask for less of it",
    )
    begin = transitions[transitions[index.get_initial_state()][0]][0]
    number_of = {
        state: number
        for number, state in enumerate(sorted(transitions, key=lambda each: (each != begin, each)))
    }
    successors = np.full((len(number_of), _END), NOT_ALLOWED)
    for state, row in transitions.items():
        values = [value for value in row if value != _END]
        successors[number_of[state], values] = [number_of[row[value]] for value in values]
    finals = [number_of[state] for state in index.get_final_states()]
    return ByteAutomaton(successors=successors, final=np.isin(np.arange(len(number_of)), finals))


def _counted(texts: ByteAutomaton) -> ByteAutomaton:
    """``texts`` without their marks around strings with a length (see ``json_schema``), which is kept.

    A state of the result is a set of pairs: a state of ``texts``, and within such a string its length so far and its
    bounds. Bytes that all states take alike, and that begin a character or do not, are one kind.
    """
    if not (texts.successors[:, _BOUNDS] >= 0).any():
        return texts
    values = np.arange(_END)
    begins = (values < 0x80) | (values >= 0xC0)
    columns, kind_of = np.unique(np.vstack((texts.successors, begins)), axis=1, return_inverse=True)
    kind_of = kind_of.reshape(-1)
    kinds = [
        [(kind, int(columns[state, kind])) for kind in np.nonzero(columns[state] >= 0)[0].tolist()]
        for state in range(len(texts.successors))
    ]
    begun = [_opened(texts.successors, state) for state in range(len(texts.successors))]

    def also(state: int, within: _Within) -> set[tuple[int, _Within]]:
        """``state``, and where marks lead from there."""
        found = {(state, within)}
        found |= {(behind, (0, *bounds)) for behind, bounds in begun[state]}
        for behind, inner in [*found]:
            closed = int(texts.successors[behind, _CLOSES])
            if inner is not None and closed >= 0 and inner[0] >= inner[1]:
                found |= also(closed, None)
        return found

    marks = {int(kind_of[each]) for each in (_BOUNDS, _OPENS, _CLOSES)}
    start = frozenset(also(0, None))
    number_of, rows = {start: 0}, list[Numbers]()
    for current in (waiting := [start]):
        reached: dict[int, set[tuple[int, _Within]]] = {}
        for state, within in current:
            for kind, behind in kinds[state]:
                if kind in marks:
                    continue
                inner = _longer(within, int(columns[-1, kind]))
                if inner is None and within is not None:
                    continue
                reached.setdefault(kind, set()).update(also(behind, inner))
        row = np.full(columns.shape[1], NOT_ALLOWED)
        for kind, found in reached.items():
            row[kind] = number_of.setdefault(frozenset(found), len(number_of))
            if row[kind] == len(waiting):
                waiting.append(frozenset(found))
        rows.append(row)
        require(len(waiting) <= _MOST, f"the schema has more than {_MOST:,} states: ask for less of it")
    final = [any(within is None and texts.final[state] for state, within in each) for each in waiting]
    require(
        any(final),
        "no text fits the schema: a pattern or format and the lengths beside it exclude each other",
    )
    return ByteAutomaton(successors=np.array(rows)[:, kind_of], final=np.array(final))


def _opened(successors: Numbers, state: int) -> list[tuple[int, tuple[int, float]]]:
    """Where marks that open a string with a length lead from ``state``, each with the least and the largest length."""
    found, reading = [], [(int(successors[state, _BOUNDS]), "")]
    while reading:
        at, text = reading.pop()
        if at < 0:
            continue
        reading += [(int(successors[at, ord(each)]), text + each) for each in "0123456789,"]
        if (behind := int(successors[at, _OPENS])) >= 0:
            least, most = text.split(",")
            found.append((behind, (int(least), float(most or "inf"))))
    return found


def _longer(within: _Within, num_characters: int) -> _Within:
    """``within`` behind so many more; None: outside of such a string, or too long."""
    if within is None:
        return None
    size, least, most = within
    size += num_characters
    if size > most:
        return None
    return (size if most < float("inf") else min(size, least), least, most)


def main() -> None:
    """From standard input to standard output."""
    vocab_size, words, answer = pickle.load(sys.stdin.buffer)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    found: Automaton | str
    try:
        found = compiled(vocab_size, words, answer)
    except UserError as error:
        found = str(error)
    except MemoryError:
        found = f"it takes more than {_MEMORY >> 30} GiB to compile: ask for less of it"
    pickle.dump(found, sys.stdout.buffer)


if __name__ == "__main__":
    main()
