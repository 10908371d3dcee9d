"""The automata of constraints on the device, where a step looks up what may come next."""

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

NOT_ALLOWED = -1  # in place of a state
_NONE = 2  # entries of the automaton that allows everything


def table_bytes(most: int, num_entries: int, vocab_size: int) -> int:
    """What ``Tables`` take of the device once a sequence has an automaton."""
    return 2 * (most + 1) * vocab_size + 4 * (_NONE + num_entries)


class Tables:
    """Automata on the device, at addresses that stay; there is memory for them once a sequence has one.

    A state is the index of its forced token, behind which its successors are, so one look-up by state and class gives
    the next. The state of the automaton that allows everything is 0, and its class of every token 1.
    """

    def __init__(
        self,
        most: int,
        num_entries: int,
        vocab_size: int,
        device: torch.device,
        *,
        walk: Callable[..., Tensor],  # these two as of ``Ops``
        mask: Callable[..., Tensor],
    ) -> None:
        self._shape, self._num_entries = (most + 1, vocab_size), num_entries
        self._device, self._walk, self._mask = device, walk, mask
        self._tensors: tuple[Tensor, Tensor] | None = None

    @property
    def classes(self) -> Tensor:
        """[automata, V] int16."""
        return self._made()[0]

    @property
    def successors(self) -> Tensor:
        """[entries] int32: states, or NOT_ALLOWED; at a state, the token that is forced there, or NOT_ALLOWED."""
        return self._made()[1]

    def walk(self, automata: Tensor, states: Tensor, tokens: Tensor) -> Tensor:
        """The states ``[B, n + 1]`` before and behind each of ``tokens`` ``[B, n]``, from ``states`` ``[B]`` on.

        A token that the automaton ``[B]`` does not allow, or that is missing (below 0), leaves the state as it is.
        """
        return self._walk(self.classes, self.successors, automata, states, tokens)

    def mask(
        self, logits: Tensor, automata: Tensor, states: Tensor, least: float, ids: Tensor | None
    ) -> Tensor:
        """Logits ``[B, n, Vd]`` with ``least`` for what is not allowed in the state ``[B, n]`` of their row.

        They are of the tokens ``ids`` ``[Vd]``, or of all.
        """
        return self._mask(logits, self.classes, self.successors, automata, states, least, ids)

    def fill(self, number: int, first: int, classes: NDArray[Any], table: NDArray[Any]) -> None:
        """Put that of ``classes`` ``[V]`` and ``table`` ``[S, 1 + C]`` at ``number`` and from entry ``first`` on.

        The table has forced tokens in front of successors. Behind the passes that are in flight.
        """
        states = first + table * table.shape[1]
        states[:, 0] = table[:, 0]
        states[table < 0] = NOT_ALLOWED
        states = states.reshape(-1)
        self.classes[number].copy_(self._staged(1 + classes, torch.int16), non_blocking=True)
        self.successors[first : first + len(states)].copy_(
            self._staged(states, torch.int32), non_blocking=True
        )

    def _staged(self, numbers: NDArray[Any], dtype: torch.dtype) -> Tensor:
        found = torch.from_numpy(numbers).to(dtype)
        return found if self._device.type == "cpu" else found.pin_memory()

    def _made(self) -> tuple[Tensor, Tensor]:
        if self._tensors is None:
            classes = torch.ones(self._shape, dtype=torch.int16, device=self._device)
            successors = torch.zeros(_NONE + self._num_entries, dtype=torch.int32, device=self._device)
            successors[0] = NOT_ALLOWED
            self._tensors = classes, successors
        return self._tensors
