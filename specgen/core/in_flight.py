"""Passes in flight: what each has found is read in the order of launch, and handed to its sequences."""

from collections import deque
from collections.abc import Sequence as Items

from specgen.core.endings import Endings
from specgen.core.journal import Journal
from specgen.core.passes import Pass
from specgen.core.peers import Peers
from specgen.core.sequence import Sequence
from specgen.core.spec_length import SpecLength
from specgen.core.waits import Waits
from specgen.decoding.draft_state import NO_DRAFT


class InFlight:
    """The passes that were launched and not read yet, oldest first.

    ``spec_length`` sees drafts and accepted drafts of every verified sequence; a draft that was missing counts there
    as a rejected one, for its row cost as much.
    """

    def __init__(
        self, *, journal: Journal, endings: Endings, spec_length: SpecLength, waits: Waits, peers: Peers
    ) -> None:
        self._peers = peers
        self._waits = waits
        self._journal = journal
        self._endings = endings
        self.spec_length = spec_length
        self._passes: deque[Pass] = deque()

    def __len__(self) -> int:
        return len(self._passes)

    def add(self, launched: Pass) -> None:
        """``launched`` will be read later; nothing in here can fail, so host and device agree."""
        for sequence, row in launched.sequences:
            if row is not None:
                sequence.add_in_flight(1, launched.num_drafts + 1)
        self._passes.append(launched)

    def clear(self) -> None:
        """Forget all passes without reading them."""
        self._passes.clear()
        self._waits.forget()

    def read_all_but(self, num_newest: int) -> None:
        """Read passes, the oldest first, until so many are left."""
        while len(self._passes) > num_newest:
            self.read()

    def read(self) -> None:
        """Wait for the oldest pass and hand out its tokens; a sequence that ended before gets none."""
        done, num_kept = self._passes[0], 0
        self._peers.wait(done.numbers)
        numbers = done.numbers.read()
        logprobs = done.logprobs.read() if done.logprobs is not None else [()] * len(numbers)
        for sequence, row in done.sequences:
            if sequence.finish_reason is not None:
                continue
            if row is None:
                self._commit_first(sequence, [], ())
            elif done.kind == "prefill":
                self._commit_first(sequence, numbers[row], logprobs[row])
            else:
                num_kept += self._commit(sequence, numbers[row], logprobs[row], done.num_drafts)
            if sequence.finish_reason == "error":
                at = sequence.num_output_tokens + 1
                self._endings.fail(sequence, f"the model's logits were not finite (NaN) at output token {at}")
            elif sequence.finish_reason is not None:
                self._endings.retire(sequence)
        idle = self._waits.before(done.launch, done.numbers.done)
        self._journal.stepped(done, num_kept, idle, numbers[0][-2:] if done.result.experts else [])
        self._passes.popleft()  # not before: its sequences fail with it

    def _commit_first(self, sequence: Sequence, tokens: list[int], logprobs: Items[Items[float]]) -> None:
        """A prompt is in the cache, with the first token of the text unless that was known."""
        emitted = 0
        if tokens:
            sequence.remove_in_flight(1, 1)
            emitted = sequence.append(tokens, logprobs)
            self._peers.see(*tokens)
        self._journal.prefilled(sequence, emitted)

    def _commit(self, sequence: Sequence, row: list[int], logprobs: Items[Items[float]], k: int) -> int:
        """What a step with ``k`` drafts found for ``sequence``; returns how many of its rows were accepted."""
        drafts, accepted, tokens = row[:k], row[k], row[k + 1 :]
        sequence.remove_in_flight(1, k + 1)
        emitted = sequence.append(tokens[: accepted + 1], logprobs)
        self._peers.see(*drafts, accepted, *tokens[: accepted + 1])
        self.spec_length.see(k, accepted)
        proposed = drafts[: drafts.index(NO_DRAFT)] if NO_DRAFT in drafts else drafts
        sequence.steps.append(self._journal.verified(sequence, proposed, accepted, emitted))
        return accepted + 1
