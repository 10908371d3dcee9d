"""What happens when a pass finds no memory: all are computed again, within lower limits."""

from collections.abc import Callable

import torch

from specgen.core.endings import Endings
from specgen.core.journal import Journal
from specgen.core.passes import Pass
from specgen.core.running_batch import RunningBatch
from specgen.core.scheduler import Scheduler

NO_MEMORY = "no memory for a pass: lower --max-batch-size, --max-prefill-tokens or --gpu-memory-utilization"
_MAX_SHORTAGES = 3  # of a sequence that is alone: a shortage may be another program's, and pass


def attempt(launch: Callable[[], Pass]) -> Pass | None:
    """Launch a pass; None where the device has no memory for it."""
    try:
        return launch()
    except torch.OutOfMemoryError:
        return None  # and let go of the exception, which holds on to the tensors of the pass


class Shortages:
    """Goes on behind a pass that found no memory.

    How far that pass came is unknown, so nothing of the running batch on the device is used again: every sequence
    is computed again from what was read (the prefix cache has most of it).
    """

    def __init__(
        self, *, scheduler: Scheduler, batch: RunningBatch, journal: Journal, endings: Endings
    ) -> None:
        self._scheduler = scheduler
        self._batch = batch
        self._journal = journal
        self._endings = endings

    def of_prefill(self) -> None:
        """After a prefill pass: fewer rows at once, or where it was one already, fewer sequences."""
        num_admitted = self._send_all_back()
        if not self._scheduler.limits.lower_prefill():
            self._fewer_sequences(num_admitted)
        self._note()

    def of_decode(self) -> None:
        """After a decode step: fewer sequences at once."""
        self._fewer_sequences(self._send_all_back())
        self._note()

    def _send_all_back(self) -> int:
        """Queue all that were admitted again; returns how many."""
        sent = self._scheduler.send_all_back()
        for sequence in sent:
            self._journal.preempted(sequence)
        self._batch.reset()
        return len(sent)

    def _fewer_sequences(self, num_admitted: int) -> None:
        """Lower the limit of the batch; of a sequence that was alone there is nothing to lower."""
        if num_admitted > 1:
            self._scheduler.limits.lower_batch(num_admitted)
        elif num_admitted == 1:
            sequence = self._scheduler.waiting[0]
            sequence.num_shortages += 1
            if sequence.num_shortages >= _MAX_SHORTAGES:
                self._scheduler.waiting.remove(sequence)
                sequence.finish_reason = "error"
                self._endings.retire(
                    sequence,
                    "the device has no memory for it even alone: lower --gpu-memory-utilization",
                )

    def _note(self) -> None:
        torch.cuda.empty_cache()
        self._journal.out_of_memory(self._scheduler.limits)
