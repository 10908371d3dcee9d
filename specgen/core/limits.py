"""How many sequences and prefill rows run at once: reduced after an out-of-memory error, then restored."""

_QUIET = 256  # passes without a shortage before more is tried


class Limits:
    """``max_batch_size`` and ``max_prefill_tokens`` as they are now; both begin at their most.

    A shortage halves one of them. What was short may have been another program's doing, so after quiet passes both
    are doubled again, up to what was asked for; where that was too early, the next time waits twice as long.
    """

    def __init__(self, *, max_batch_size: int, max_prefill_tokens: int) -> None:
        self.max_batch_size = self._most_sequences = max_batch_size
        self.max_prefill_tokens = self._most_rows = max_prefill_tokens
        self._patience = _QUIET
        self._quiet = 0  # passes since the last change
        self._was_raised = False  # by the last change

    def lower_prefill(self) -> bool:
        """Half as many rows in a prefill; False where it is one already."""
        if self.max_prefill_tokens == 1:
            return False
        self._note_shortage()
        self.max_prefill_tokens //= 2
        return True

    def lower_batch(self, num_sequences: int) -> None:
        """Half of the ``num_sequences`` that were too many, at least one."""
        self._note_shortage()
        self.max_batch_size = max(num_sequences // 2, 1)

    def see_pass(self) -> bool:
        """A pass found memory; whether the limits have risen with it."""
        self._quiet += 1
        return self._quiet >= self._patience and self._raise()

    def _raise(self) -> bool:
        now = self.max_batch_size, self.max_prefill_tokens
        self.max_batch_size = min(2 * self.max_batch_size, self._most_sequences)
        self.max_prefill_tokens = min(2 * self.max_prefill_tokens, self._most_rows)
        self._was_raised = now != (self.max_batch_size, self.max_prefill_tokens)
        self._quiet = 0
        return self._was_raised

    def _note_shortage(self) -> None:
        if self._was_raised:
            self._patience *= 2
        self._quiet, self._was_raised = 0, False
