"""Who runs: the waiting and running queues, admission by pages and tokens, preemption. Free of torch."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from specgen.core.sequence import Sequence
from specgen.kv.pages import PageAllocator, Places, StateSlots, common_digests, extend_digests
from specgen.record.record_rows import OutOfMemory

# rows: a prefill of fewer takes hardly less time, as reading the weights is what it waits for
_LEAST_PIECE = 512
_QUIET = 256  # passes without a shortage before more is tried


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of one prompt for the next prefill pass."""

    sequence: Sequence
    start: int
    num_rows: int
    state_source: int = 0  # slot whose state is copied to the sequence's before the pass ...
    state_copy: int = 0  # ... and to which the sequence's is copied behind it; 0: none

    @property
    def last(self) -> bool:
        """Whether the prompt is complete after this chunk."""
        return self.start + self.num_rows == self.sequence.num_prefill_tokens


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

    def row(self, now: float) -> OutOfMemory:
        """A pass found no memory; what holds from here on."""
        return OutOfMemory(
            time=now, max_batch_size=self.max_batch_size, max_prefill_tokens=self.max_prefill_tokens
        )

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

    def record_pass(self) -> bool:
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


class Scheduler:
    """Continuous batching: sequences join and leave at every step.

    A sequence is admitted when a slot for its recurrent state, a place for its automaton, and pages for all it holds
    and one step ahead are free; of layers with a window, whose pages go back as it moves on, those for a piece of its
    prompt. ``allocators`` are that of all layers, or of all others and of those with a window.
    One that begins like another takes the pages of that, and where there are states a copy of that behind them.
    Without a prefix cache only those that ``share`` do, and in the same run.
    When a running one cannot grow, the one admitted last gives its pages back and is computed again later; the oldest
    always can go on, because a request that would not fit alone is refused (``refusal``). The limits may change while
    it runs. One that is to run alone (``retry``) waits until all others have left, and they wait for it.

    A prefill pass is begun by ``next_chunks`` and ends in ``launched`` or ``preempt_all``; until then its pages are
    shared with no other sequence.
    """

    def __init__(
        self,
        *,
        allocators: tuple[PageAllocator, ...],
        slots: StateSlots,
        places: Places,
        limits: Limits,
        step_rows: int,
    ) -> None:
        self._allocators = allocators
        self._places = places
        self._slots = slots
        self.limits = limits
        self._step_rows = step_rows  # that a pass may write behind a sequence's tokens
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self.draining: list[Sequence] = []  # out of the batch; passes in flight will end them
        self._hashed: tuple[bytes, Sequence | None] = b"", None  # the newest that has digests, and their root
        self._idle_slots = 0  # free batch slots, summed over steps in which prompts waited for more prompts

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return self._allocators[0].page_size

    @property
    def counts(self) -> tuple[int, ...]:
        """What decides the next pass, in short: ranks that differ in it would launch different ones."""
        free = (each.num_free for each in self._allocators)
        return len(self.waiting), len(self.prefilling), len(self.running), *free

    @property
    def num_admitted(self) -> int:
        """Sequences that hold pages and a batch slot."""
        return len(self.prefilling) + len(self.running)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.waiting or self.prefilling or self.running)

    @property
    def active(self) -> list[Sequence]:
        """All that hold pages."""
        return [*self.prefilling, *self.running, *self.draining]

    @property
    def wants_request(self) -> bool:
        """Whether to pull a request: until there is one more than the batch holds, to know whether more follow."""
        return len(self.waiting) + self.num_admitted <= self.limits.max_batch_size

    def room(self, num_sequences: int) -> int:
        """Tokens that each of so many sequences may have when it ends."""
        return min(each.room(num_sequences, self._step_rows) for each in self._allocators)

    def refusal(self, sequence: Sequence) -> str | None:
        """Why ``sequence`` could never finish, or None."""
        if sequence.max_length <= self.room(1):
            return None
        needed, capacity = sequence.max_length + self._step_rows, self.room(1) + self._step_rows
        return (
            f"prompt and new tokens need {needed} positions of KV cache and all of it has {capacity}: "
            "raise --kv-memory or lower --max-new-tokens"
        )

    def submit(self, sequence: Sequence) -> None:
        """Queue ``sequence`` last."""
        self.waiting.append(sequence)

    def retry(self, sequence: Sequence) -> None:
        """Queue ``sequence`` first, to run alone."""
        sequence.alone = True
        self.waiting.appendleft(sequence)

    def next_chunks(self) -> list[Chunk]:
        """Prompts, or pieces of them, for one prefill pass of at most ``limits.max_prefill_tokens`` rows."""
        budget = self.limits.max_prefill_tokens
        chunks: list[Chunk] = []
        for sequence in self.prefilling:
            if budget:
                budget -= self._add_chunk(chunks, sequence, budget)
        if len(chunks) < len(self.prefilling):  # the pages that some wait for are not for those behind them
            assert chunks or self.running or self.draining, "a sequence that is alone has pages for a piece"
            return chunks
        if not chunks and not self._worth_a_pass():
            return []
        while budget and self.waiting and self._admit(self.waiting[0], budget):
            sequence = self.waiting.popleft()
            self.prefilling.append(sequence)
            budget -= self._add_chunk(chunks, sequence, budget)
            self._idle_slots = 0
        return chunks

    def _worth_a_pass(self) -> bool:
        """Whether prompts should stop the decoding now, or wait for more prompts.

        However few its rows, a pass takes about half a step's time (of an 8B on an H200 an estimated 8 ms). So slots
        stay free until what that has cost, in slots times steps, comes near it. A full pass has nothing to wait for,
        nor have the last prompts. What prompts share before a pass has computed it counts in each of them.
        """
        free = self.limits.max_batch_size - self.num_admitted
        if free <= 0:
            return False
        self._idle_slots += min(free, len(self.waiting))
        last = self.wants_request
        waited = 2 * self._idle_slots >= self.limits.max_batch_size
        return not self.running or last or waited or self._fills_a_pass(free)

    def _fills_a_pass(self, num_sequences: int) -> bool:
        rows = 0
        for sequence in islice(self.waiting, num_sequences):
            rows += self._rows_to_compute(sequence)
            if rows >= self.limits.max_prefill_tokens:
                return True
        return False

    def _admit(self, sequence: Sequence, budget: int) -> bool:
        # of those that were admitted one that is to run alone is the first, as there is no other
        alone = sequence.alone or any(each[0].alone for each in (self.prefilling, self.running) if each)
        if self.num_admitted >= (1 if alone else self.limits.max_batch_size) or not self._slots.available:
            return False
        digests = self._digests(sequence, sequence.num_reusable)
        if self._slots.expects(digests):  # with the next pass it need not compute what this one does
            return False
        cached = self._num_cached(digests)
        whole, first = len(sequence.tokens) + self._step_rows, self._allocators[0]
        if first.pages_for(whole) - cached > first.num_free:  # as in step after step while pages are short
            return False
        for allocator, pages in self._pages(sequence):
            allocator.reuse(pages, digests[:cached])
        if not (
            first.grow(sequence.pages, whole)
            and self._take_piece(sequence, cached * self.page_size, budget)
            and self._take_place(sequence)
        ):
            for allocator, pages in self._pages(sequence):
                allocator.release(pages)
            return False
        sequence.num_computed = sequence.num_cached = cached * self.page_size
        sequence.state_source = self._slots.copy_of(digests[cached - 1]) if cached else 0
        sequence.state_slot = self._slots.take()
        return True

    def _num_cached(self, digests: list[bytes]) -> int:
        """Behind how many of these pages, at most, a sequence can begin: all layers have what it sees of them."""
        known, others = self._allocators[0].num_known(digests), self._allocators[1:]
        while True:
            some = digests[:known]
            fewer = min(self._slots.num_known(some), *(each.num_known(some) for each in others), known)
            if fewer == known:
                return known
            known = fewer  # of which one may know less

    def _take_piece(self, sequence: Sequence, start: int, budget: int) -> int:
        """Give ``sequence`` pages for rows of its prompt from ``start`` on; returns how many, 0 where it is to wait.

        Layers with a window have pages for a piece at a time. A small one waits while others may give some back.
        """
        wanted, behind = min(budget, sequence.num_prefill_tokens - start), self._step_rows
        reach = min(allocator.reach(pages) for allocator, pages in self._pages(sequence))
        rows = min(wanted, reach - start - behind)
        others = self.running or self.draining or self.prefilling[:1] not in ([], [sequence])
        if rows < (min(wanted, _LEAST_PIECE) if others else 1):
            return 0
        for allocator, pages in self._pages(sequence):
            allocator.grow(pages, start + rows + behind)
        return rows

    def _take_place(self, sequence: Sequence) -> bool:
        """For its automaton, if any."""
        if sequence.automaton is not None:
            sequence.place = self._places.take(sequence.automaton, sequence.automaton.num_entries)
        return sequence.automaton is None or sequence.place is not None

    def _pages(self, sequence: Sequence) -> Iterator[tuple[PageAllocator, list[int]]]:
        """Its lists of pages, and which allocator each is of."""
        return zip(self._allocators, sequence.page_lists, strict=False)

    def _add_chunk(self, chunks: list[Chunk], sequence: Sequence, budget: int) -> int:
        """A piece of ``sequence``; those that come after it, in this pass even, take its pages."""
        start = sequence.num_computed
        num_rows = self._take_piece(sequence, start, budget)
        if not num_rows:
            return 0
        source, sequence.state_source, copy = sequence.state_source, 0, 0
        # the last page border of its prompt, where others may begin
        border = (len(sequence.request.prompt_token_ids) - 1) // self.page_size * self.page_size
        if start < border <= start + num_rows and (digests := self._digests(sequence, border)):
            copy = self._slots.expect(digests[-1])
            num_rows = border - start if copy else num_rows
        chunks.append(
            Chunk(sequence=sequence, start=start, num_rows=num_rows, state_source=source, state_copy=copy)
        )
        # pages in front are known, or were expected before
        first, digests = start // self.page_size, self._digests(sequence, start + num_rows)
        for allocator, pages in self._pages(sequence):
            allocator.expect(pages[first:], digests[first:])
        return num_rows

    def _rows_to_compute(self, sequence: Sequence) -> int:
        digests = self._digests(sequence, sequence.num_reusable)
        sequence.num_known = self._allocators[0].num_known(digests, sequence.num_known)
        return sequence.num_prefill_tokens - sequence.num_known * self.page_size

    def _digests(self, sequence: Sequence, num_positions: int) -> list[bytes]:
        """What names the pages that the first ``num_positions`` fill; none where nothing is shared."""
        root = sequence.prefix_root
        if not self._allocators[0].prefix_cache:
            if not sequence.request.share:
                return []
            root = sequence.request.share.encode()
        if not sequence.digests:
            known_root, known = self._hashed
            if known is not None and known_root == root:
                sequence.digests = common_digests(
                    known.digests, known.tokens, sequence.tokens, self.page_size
                )
            self._hashed = root, sequence
        extend_digests(sequence.digests, sequence.tokens, self.page_size, root)
        return sequence.digests[: num_positions // self.page_size]

    def launched(self, chunks: list[Chunk]) -> None:
        """The pass over ``chunks`` is on its way: its pages may be shared, and sequences with complete prompts decode.

        Texts to score are complete then, once the pass is read.
        """
        for allocator in self._allocators:
            allocator.confirm()
        self._slots.confirm()
        for chunk in chunks:
            chunk.sequence.num_computed += chunk.num_rows
            for allocator, pages in self._pages(chunk.sequence):
                allocator.slide(pages, chunk.sequence.num_computed)
            if chunk.last:
                self.prefilling.remove(chunk.sequence)
                scored = chunk.sequence.request.text is not None
                (self.draining if scored else self.running).append(chunk.sequence)

    def reserve(self) -> bool:
        """Give every running sequence pages for the next step; False if there are too few, and some may have theirs.

        A step in flight may add tokens first, but none behind the step that ends the text is ever looked at. No row of
        the next step stands before the newest token that was read.
        """
        size, behind, running = self.page_size, self._step_rows, self.running
        needed = [min(len(each.tokens) + each.in_flight_max, each.max_length) + behind for each in running]
        for number, allocator in enumerate(self._allocators):
            for sequence, positions in zip(running, needed, strict=True):
                pages = sequence.page_lists[number]
                if allocator.window is not None:
                    allocator.slide(pages, len(sequence.tokens) - 1)
                if positions > len(pages) * size and not allocator.grow(pages, positions):
                    return False
        return True

    def preempt(self) -> Sequence:
        """Send the youngest sequence back to the head of the queue; those still prefilling are the youngest."""
        if self.prefilling:
            victim = self.prefilling.pop()
            self._give_back(victim)  # ``launched`` has recorded what its passes computed
        else:
            victim = self.running.pop()
            self._release(victim)
        victim.num_computed = 0
        self.waiting.appendleft(victim)
        return victim

    def preempt_all(self) -> list[Sequence]:
        """A pass has failed or is not wanted: those who prefill or run are computed again, from the oldest on.

        What it was to compute is shared with none. Returns them, the youngest first.
        """
        for each in self._allocators:
            each.drop_expected()
        self._slots.forget()
        return [self.preempt() for _ in range(self.num_admitted)]

    def clear(self) -> None:
        """Drop all requests; what passes in flight will find is dropped."""
        self.preempt_all()
        for sequence in self.draining:
            self._release(sequence)
        self.draining.clear()
        self.waiting.clear()
        if not self._allocators[0].prefix_cache:  # what shares the same in a later run is another
            for each in self._allocators:
                each.forget()

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch that passes in flight will end; its pages stay until it retires."""
        self.running.remove(sequence)
        self.draining.append(sequence)

    def retire(self, sequence: Sequence) -> None:
        """Take a finished sequence out, wherever it is, and free its pages."""
        self._remove(sequence)
        self._release(sequence)

    def discard(self, sequence: Sequence) -> list[list[int]]:
        """Take a failed sequence out, wherever it is, and share nothing that it may have spoilt.

        Returns, for each allocator, the pages that it alone had; of the layers with a window, which it may have given
        back before, all that nobody has.
        """
        self._remove(sequence)
        for allocator in self._allocators:
            allocator.forget()
        self._slots.forget()
        own = self._give_back(sequence)
        return [own, *(each.unused for each in self._allocators[1:])]

    def _remove(self, sequence: Sequence) -> None:
        for queue in (self.prefilling, self.running, self.draining):
            if sequence in queue:
                queue.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Give back the pages of one that ran, and tell what they hold; passes in flight write behind that."""
        for allocator, pages in self._pages(sequence):
            allocator.keep(pages, self._digests(sequence, len(sequence.tokens) - 1))
        self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> list[int]:
        """Its pages, its slot and its automaton's place, if any; returns the pages that it alone had."""
        if sequence.automaton is not None and sequence.place is not None:
            self._places.give_back(sequence.automaton)
            sequence.place = None
        self._slots.give_back(sequence.state_slot)
        sequence.state_slot = 0
        own, *_ = [allocator.release(pages) for allocator, pages in self._pages(sequence)]
        return own
