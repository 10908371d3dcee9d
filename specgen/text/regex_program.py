"""A program: the regular expression on its standard input becomes a byte automaton on its standard output (``.npz``).

On its own, because an expression may have more states than any memory: it runs within limits, and imports little.
"""

import io
import resource
import sys

import numpy as np

_MEMORY, _SECONDS = 4 << 30, 20  # beyond, the system ends it
_MOST = 1 << 16  # states
_END = 256


def compiled(regex: str) -> tuple[np.ndarray, np.ndarray]:
    """Successors ``[S, 256]``, -1 for none, and whether a text may end ``[S]``, of state 0 and those behind it.

    outlines-core is asked for the tokens of a vocabulary of single bytes. Its automata prefer what an alternative finds
    first (``a|ab`` takes no ``ab``) unless the end of the text is asked for, and without a byte in front some take
    time that doubles with every repetition, so both are, and the byte is left out again.
    """
    from outlines_core import Index, Vocabulary

    index = Index(rf"\x00(?:{regex})\z", Vocabulary(_END, {bytes([value]): [value] for value in range(_END)}))
    transitions = index.get_transitions()
    if len(transitions) > _MOST:
        raise ValueError(f"it has {len(transitions):,} states, and {_MOST:,} are the most")
    begin = transitions[index.get_initial_state()][0]
    number_of = {
        state: number
        for number, state in enumerate(sorted(transitions, key=lambda each: (each != begin, each)))
    }
    successors = np.full((len(number_of), _END), -1)
    for state, row in transitions.items():
        values = [value for value in row if value != _END]
        successors[number_of[state], values] = [number_of[row[value]] for value in values]
    finals = [number_of[state] for state in index.get_final_states()]
    return successors, np.isin(np.arange(len(number_of)), finals)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    try:
        successors, final = compiled(sys.stdin.buffer.read().decode())
    except ValueError as error:
        sys.exit("no text matches it" if "no transitions" in str(error) else str(error).partition("\n")[0])
    found = io.BytesIO()
    np.savez_compressed(found, successors=successors, final=final)
    sys.stdout.buffer.write(found.getvalue())


if __name__ == "__main__":
    main()
