"""Scheduling: batch slots, pages, prefill budget, preemption."""

from typing import Any

import pytest

from specgen.config import SamplingParams
from specgen.core.scheduler import _QUIET, Limits, Scheduler
from specgen.core.sequence import Request, Sequence
from specgen.kv.pages import PageAllocator, Places, StateSlots


def sequence(name: str, num_prompt: int, max_tokens: int = 8) -> Sequence:
    request = Request(
        id=name, prompt_token_ids=(1,) * num_prompt, sampling=SamplingParams(max_tokens=max_tokens)
    )
    return Sequence(
        request=request,
        tokens=[1] * num_prompt,
        max_length=num_prompt + max_tokens,
        seed=0,
        eos_token_ids=frozenset(),
    )


def scheduler(num_pages: int = 100, max_batch_size: int = 4, max_prefill_tokens: int = 10) -> Scheduler:
    return Scheduler(
        allocators=(PageAllocator(num_pages, 4),),
        slots=StateSlots(None),
        places=Places(8, 64),
        limits=Limits(max_batch_size=max_batch_size, max_prefill_tokens=max_prefill_tokens),
        step_rows=4,
    )


def prefill(sched: Scheduler) -> list[tuple[str, int, int]]:
    """One prefill pass, as in the engine."""
    chunks = sched.next_chunks()
    sched.launched(chunks)
    return [(chunk.sequence.request.id, chunk.start, chunk.num_rows) for chunk in chunks]


def test_prompts_are_chunked_to_the_prefill_budget() -> None:
    sched = scheduler()
    for name, length in (("a", 4), ("b", 13), ("c", 2), ("d", 9)):
        sched.submit(sequence(name, length))
    assert prefill(sched) == [("a", 0, 4), ("b", 0, 6)]
    assert prefill(sched) == [("b", 6, 7), ("c", 0, 2), ("d", 0, 1)]
    assert prefill(sched) == [("d", 1, 8)]
    assert [s.request.id for s in sched.running] == ["a", "b", "c", "d"]
    assert prefill(sched) == []


def test_clear_drops_all_requests_and_frees_their_pages() -> None:
    sched = scheduler(max_batch_size=2)
    for name in "abc":
        sched.submit(sequence(name, 3))
    prefill(sched)
    sched.leave(sched.running[0])
    assert [s.request.id for s in sched.active] == ["b", "a"]
    sched.clear()
    assert sched.idle
    assert sched.active == []
    assert sched._allocators[0].num_free == 100


def test_a_retried_request_runs_alone() -> None:
    sched = scheduler(max_batch_size=3)
    for name in "abcd":
        sched.submit(sequence(name, 1))
    prefill(sched)
    failed = sched.running[1]
    assert sched.discard(failed)
    sched.retry(sequence("b", 1))
    for _ in range(2):
        assert prefill(sched) == []
        sched.retire(sched.running[0])
    assert prefill(sched) == [("b", 0, 1)]
    assert prefill(sched) == []
    assert sched.preempt().request.id == "b"
    assert prefill(sched) == [("b", 0, 1)], "also after a preemption"
    sched.retire(sched.running[0])
    assert prefill(sched) == [("d", 0, 1)]


def test_the_batch_size_limits_running_sequences() -> None:
    sched = scheduler(max_batch_size=2)
    for name in "abc":
        sched.submit(sequence(name, 1))
    assert len(prefill(sched)) == 2
    sched.retire(sched.running[0])
    assert prefill(sched) == [("c", 0, 1)]


@pytest.mark.parametrize(
    ("free", "waiting", "length", "calls"),
    [
        (1, 9, 5, 8),  # a slot that was free for half as many steps as there are slots
        (2, 9, 5, 4),
        (4, 9, 5, 2),
        (1, 1, 5, 1),  # no request follows
        (3, 2, 5, 1),
        (1, 9, 500, 8),  # as many as fill a pass, of which it would have one
        (4, 9, 500, 1),
    ],
)
def test_a_prefill_is_delayed_while_batching_it_costs_less(
    free: int, waiting: int, length: int, calls: int
) -> None:
    sched = scheduler(num_pages=1000, max_batch_size=16, max_prefill_tokens=2000)
    for index in range(16):
        sched.submit(sequence(str(index), 1))
    assert len(prefill(sched)) == 16
    for _ in range(free):
        sched.retire(sched.running[0])
    for index in range(waiting):
        sched.submit(sequence(f"late {index}", length))
    assert [bool(prefill(sched)) for _ in range(calls)] == [False] * (calls - 1) + [True]
    if waiting > free:
        sched.retire(sched.running[0])
        again = [bool(prefill(sched)) for _ in range(8)]
        assert again == [False] * (len(again) - 1) + [True], "the count restarts"


def test_cached_tokens_do_not_trigger_a_prefill() -> None:
    sched = Scheduler(
        allocators=(PageAllocator(2000, 4, prefix_cache=True),),
        slots=StateSlots(None),
        places=Places(8, 64),
        limits=Limits(max_batch_size=16, max_prefill_tokens=2000),
        step_rows=4,
    )
    for index in range(16):
        sched.submit(sequence(str(index), 601))  # all prompts are equal
    assert [len(prefill(sched)) for _ in range(2)] == [16, 0]
    sched.retire(sched.running[0])
    for index in range(9):
        sched.submit(sequence(f"late {index}", 601))
    assert [bool(prefill(sched)) for _ in range(8)] == [False] * 7 + [True]


class Counted(dict[bytes, int]):
    """Counts its look-ups."""

    num_asked = 0

    def get(self, key: bytes, default: Any = None) -> Any:
        self.num_asked += 1
        return super().get(key, default)


def test_what_waiting_prompts_share_is_looked_up_once() -> None:
    sched = scheduler(num_pages=30000, max_batch_size=200, max_prefill_tokens=12_000)
    (allocator,) = sched._allocators = (PageAllocator(30000, 4, prefix_cache=True),)
    for index in range(200):
        sched.submit(sequence(str(index), 401, max_tokens=40))
    while sched.waiting or sched.prefilling:
        prefill(sched)
    for _ in range(32):
        sched.retire(sched.running[0])
    for index in range(33):
        sched.submit(sequence(f"late {index}", 403))
    asked = allocator._page_of = Counted(allocator._page_of)
    counts = []
    for _ in range(2):
        assert prefill(sched) == [], "3 rows each are no pass"
        counts.append(asked.num_asked)
        asked.num_asked = 0
    assert counts[0] >= 32 * 100
    assert counts[1] <= 32 * 3
    allocator.forget()
    assert prefill(sched), "nothing is known any more"


def test_a_prefill_is_not_delayed_while_nothing_decodes() -> None:
    sched = scheduler(max_batch_size=64)
    sched.submit(sequence("a", 3))
    assert prefill(sched) == [("a", 0, 3)]


def test_admission_waits_for_pages_in_order() -> None:
    sched = scheduler(num_pages=5)
    for name, length in (("a", 8), ("b", 9), ("c", 1)):
        sched.submit(sequence(name, length))
    assert prefill(sched) == [("a", 0, 8)]  # b does not fit; c would, but does not overtake it
    sched.retire(sched.running[0])
    assert [name for name, *_ in prefill(sched)] == ["b"]


def test_the_newest_sequence_is_preempted_and_readmitted_first() -> None:
    sched = scheduler(num_pages=6, max_prefill_tokens=12)
    for name in "abc":
        sched.submit(sequence(name, 4))
    prefill(sched)
    oldest, _, youngest = sched.running
    sched.submit(sequence("d", 4))
    oldest.tokens.append(1)  # its next step needs a third page, and all six are in use
    assert not sched.reserve()
    assert sched.preempt() is youngest
    assert sched.reserve()
    assert youngest.pages == []
    assert [s.request.id for s in sched.waiting] == ["c", "d"]
    assert prefill(sched) == []
    sched.retire(oldest)
    assert prefill(sched) == [("c", 0, 4), ("d", 0, 4)]


def test_a_step_in_flight_reserves_pages_up_to_the_last_token() -> None:
    sched = scheduler(num_pages=5)
    sched.submit(sequence("a", 4, max_tokens=8))
    prefill(sched)
    (only,) = sched.running
    assert (sched.reserve(), len(only.pages)) == (True, 2)
    only.in_flight_max = 4
    assert (sched.reserve(), len(only.pages)) == (True, 3)
    only.tokens += [1] * 7
    only.in_flight_max = 8
    assert (sched.reserve(), len(only.pages)) == (True, 4)  # 12 tokens at the end and a step


def test_a_sequence_will_finish_when_the_minimum_in_flight_fills_it() -> None:
    seq = sequence("a", 2, max_tokens=3)
    seq.in_flight_min, seq.in_flight_max = 2, 8
    assert not seq.will_finish
    seq.in_flight_min, seq.in_flight_max = 3, 12
    assert seq.will_finish


def test_a_preempted_sequence_is_recomputed_up_to_its_newest_token() -> None:
    seq = sequence("a", 5)
    assert seq.num_prefill_tokens == 5
    seq.append([7, 8])
    assert seq.num_prefill_tokens == 6


def test_all_pages_are_freed() -> None:
    allocator = PageAllocator(10, 4)
    first: list[int] = []
    second: list[int] = []
    assert allocator.grow(first, 17)
    assert allocator.grow(second, 20)
    assert not allocator.grow(first, 21)
    assert sorted(first + second) == list(range(1, 11))
    allocator.release(first)
    allocator.release(second)
    assert allocator.num_free == 10


def test_a_request_that_never_fits_is_refused() -> None:
    sched = scheduler(num_pages=3)
    assert sched.refusal(sequence("a", 4, max_tokens=4)) is None
    assert "needs" not in (reason := sched.refusal(sequence("a", 5, max_tokens=4)) or "")
    assert "13 positions" in reason
    assert "12" in reason
    assert "--kv-memory" in reason


def test_finish_reasons_eos_stop_string_and_length() -> None:
    class StopAtNine:
        def feed(self, token_ids: list[int]) -> int | None:
            return token_ids.index(9) + 1 if 9 in token_ids else None

    def ended(tokens: list[int]) -> tuple[int, str | None]:
        seq = sequence("a", 2, max_tokens=3)
        seq.eos_token_ids = frozenset([5])
        seq.stop = StopAtNine()
        return seq.append(tokens), seq.finish_reason

    assert ended([7, 7]) == (2, None)
    assert ended([7, 5, 7]) == (2, "stop")
    assert ended([9, 5, 7]) == (1, "stop")
    assert ended([5, 9, 7]) == (1, "stop")
    assert ended([7, 7, 7, 7]) == (3, "length")
    assert ended([7, 7, 5, 7]) == (3, "stop")
    assert ended([7, 7, 7, 5]) == (3, "length")


# --- limits ---


def passes(limits: Limits, count: int) -> None:
    for _ in range(count):
        limits.record_pass()


def test_out_of_memory_halves_one_limit() -> None:
    limits = Limits(max_batch_size=100, max_prefill_tokens=5)
    limits.lower_batch(31)
    assert (limits.max_batch_size, limits.max_prefill_tokens) == (15, 5)
    assert limits.lower_prefill()
    assert limits.lower_prefill()
    assert (limits.max_batch_size, limits.max_prefill_tokens) == (15, 1)
    assert not limits.lower_prefill()
    limits.lower_batch(1)
    assert limits.max_batch_size == 1


def test_successful_passes_double_limits_up_to_the_configured_ones() -> None:
    limits = Limits(max_batch_size=8, max_prefill_tokens=100)
    limits.lower_batch(6)
    limits.lower_prefill()
    passes(limits, _QUIET - 1)
    assert (limits.max_batch_size, limits.max_prefill_tokens) == (3, 50)
    passes(limits, 1)
    assert (limits.max_batch_size, limits.max_prefill_tokens) == (6, 100)
    passes(limits, _QUIET)
    assert (limits.max_batch_size, limits.max_prefill_tokens) == (8, 100)
    for _ in range(3):
        limits.lower_prefill()
    assert limits.max_prefill_tokens == 12
    passes(limits, 2 * _QUIET)  # after a raise that failed
    assert limits.max_prefill_tokens == 24


def test_only_a_pass_with_which_limits_rise_says_so() -> None:
    limits = Limits(max_batch_size=8, max_prefill_tokens=100)
    assert not any(limits.record_pass() for _ in range(3 * _QUIET)), "they are at their most"
    limits.lower_batch(8)
    assert [limits.record_pass() for _ in range(_QUIET)] == [False] * (_QUIET - 1) + [True]
    assert not any(limits.record_pass() for _ in range(2 * _QUIET))


def test_a_raise_that_failed_is_retried_later() -> None:
    limits = Limits(max_batch_size=8, max_prefill_tokens=100)
    limits.lower_batch(8)
    passes(limits, _QUIET)
    assert limits.max_batch_size == 8
    limits.lower_batch(8)
    limits.lower_batch(4)  # the same out-of-memory error
    assert limits.max_batch_size == 2
    passes(limits, 2 * _QUIET - 1)
    assert limits.max_batch_size == 2
    passes(limits, 1)
    assert limits.max_batch_size == 4
