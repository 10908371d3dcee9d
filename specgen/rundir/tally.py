"""Live counts of a run: tokens, seconds, acceptance."""

from specgen.events import Event, Prefilled, Stepped, Verified


class Tally:
    """Counts of the events of one engine."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.seconds = 0.0
        self._num_steps = 0
        self._num_accepted = 0

    def see(self, event: Event) -> None:
        match event:
            case Prefilled(emitted=emitted):
                self.num_tokens += emitted
            case Verified(drafts=drafts, accepted=accepted, emitted=emitted):
                self.num_tokens += emitted
                self._num_steps += bool(drafts)
                self._num_accepted += accepted
            case Stepped(time=time):
                self.seconds = time
            case _:
                pass

    @property
    def tokens_per_second(self) -> float | None:
        """None before the first step."""
        return self.num_tokens / self.seconds if self.seconds > 0 else None

    @property
    def acceptance_length(self) -> float | None:
        """Pooled over the steps with drafts; None without any."""
        return 1 + self._num_accepted / self._num_steps if self._num_steps else None
