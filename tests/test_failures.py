"""A failure concerns its own requests only: they are retried once, alone, and all others continue."""

import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.config import SamplingParams
from specgen.config.errors import DeviceLost
from specgen.core.engine_core import EngineCore
from specgen.core.sequence import Request
from specgen.core.step import Steps
from specgen.device import HostCopy
from specgen.engine import build
from specgen.kv.kv_cache import KVCache
from specgen.kv.layout import Layout
from specgen.record.record_rows import OutOfMemory
from tests.engines import (
    Outputs,
    Pair,
    bundled_requests,
    engine_of,
    generate,
    nan_at,
    no_page_leaked,
    random_requests,
)
from tests.marks import mostly_slow

GREEDY = SamplingParams(max_tokens=16)
SAMPLED = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9)
NO_MEMORY = "the device has no memory for it even alone: lower --gpu-memory-utilization"
BAD = 10  # a token that occurs in prompts and texts, and that the head cannot draft
REQUESTS = random_requests(16, 128, GREEDY, lengths=(1, 12))


def fails_at(request: Request, text: tuple[int, ...], token: int) -> int | None:
    """Index of the first output token after ``token``, if ``text`` is the right text."""
    if token in request.prompt_token_ids:
        return 1
    return text.index(token) + 2 if token in text[:-1] else None


def batch_sizes_of(outputs: Outputs, name: str) -> set[int]:
    """Batch sizes of the decode steps of the request's last attempt."""
    sizes = {row.number: row.num_sequences for row in outputs.steps}
    return {sizes[step.number] for step in outputs.completions[name].record.steps or ()}


@pytest.mark.parametrize(
    ("k", "sampling", "batch", "ahead"),
    mostly_slow(
        [
            (0, GREEDY, "padded", False),
            (1, GREEDY, "non-padded", False),
            (4, GREEDY, "padded", True),
            (4, SAMPLED, "non-padded", True),
        ],
        (4, GREEDY, "padded", True),
    ),
    ids={GREEDY: "greedy", SAMPLED: "sampled"}.get,
)
def test_nan_logits_fail_only_their_request(
    random_pair: Pair,
    device_like: Callable[..., None],
    k: int,
    batch: str,
    ahead: bool,
    sampling: SamplingParams,
) -> None:
    requests = [replace(request, sampling=sampling) for request in REQUESTS]
    settings: dict[str, Any] = {"num_spec_tokens": k, "drafter_batch": batch, "max_batch_size": 5}
    right = generate(random_pair, requests, **settings).texts
    device_like(ahead)
    outputs = generate(nan_at(random_pair, BAD), requests, **settings)
    expected = {r.id: fails_at(r, right[r.id], BAD) for r in requests}
    assert {1, None} < set(expected.values()), "some fail at once, some later, some never"
    for name, at in expected.items():
        completion = outputs.completions[name]
        if at is None:
            assert completion.token_ids == right[name]
            assert completion.error is None
        else:
            assert completion.token_ids == right[name][: at - 1]
            assert completion.error == (
                f"the model's logits were not finite (NaN) at output token {at}, and again when tried alone"
            )
            assert outputs.begun[name] == 2
            assert batch_sizes_of(outputs, name) <= {1}


def unused(pair: Pair, requests: Iterable[Request], texts: dict[str, tuple[int, ...]]) -> int:
    """A token that occurs in no prompt and no text, and that the head cannot draft."""
    head = pair.models.head
    seen = {token for request in requests for token in (*request.prompt_token_ids, *texts[request.id])}
    return min(set(range(len(pair.models.target.embedding))) - seen - set(head.draft_to_target.tolist()))


def wrong_token_once(monkeypatch: pytest.MonkeyPatch, number: int, token: int, place: int = 0) -> None:
    """The target's pass of that number reads ``token`` for every token of the sequence at ``place``."""
    forward, count = Steps._forward, [0]

    def planted(self: Steps, token_ids: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        count[0] += 1
        if count[0] == number:
            token_ids = token_ids.masked_fill(layout.sequences == place % layout.num_sequences, token)
        return forward(self, token_ids, layout)

    monkeypatch.setattr(Steps, "_forward", planted)


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[KVCache]:
    """The caches of all engines that are built."""
    made: list[KVCache] = []

    def make(**sizes: Any) -> KVCache:
        made.append(KVCache(**sizes))
        return made[-1]

    monkeypatch.setattr(build, "KVCache", make)
    return made


@pytest.mark.parametrize(
    ("batch", "ahead", "number"),
    mostly_slow(
        [("padded", True, 5), ("non-padded", False, 1), ("non-padded", True, 5)], ("non-padded", True, 5)
    ),
)
def test_a_retried_request_gives_the_right_text(
    demo_pair: Pair,
    device_like: Callable[..., None],
    caches: list[KVCache],
    monkeypatch: pytest.MonkeyPatch,
    batch: str,
    ahead: bool,
    number: int,
) -> None:
    requests = bundled_requests(10, GREEDY)
    settings: dict[str, Any] = {"num_spec_tokens": 4, "drafter_batch": batch, "max_batch_size": 6}
    right = generate(demo_pair, requests, **settings)
    token = unused(demo_pair, requests, right.texts)
    device_like(ahead)
    monkeypatch.setattr(build, "NonPaddedBatch", build.PackedBatch)  # padding rows repeat the last sequence
    wrong_token_once(monkeypatch, number, token, place=0 if ahead else -1)
    outputs = generate(nan_at(demo_pair, token), requests, **settings)
    assert outputs.texts == right.texts
    (failed,) = [name for name in right.texts if outputs.begun[name] > 1]
    assert batch_sizes_of(outputs, failed) == {1}
    assert outputs.verified == right.verified
    assert all(bool(each.isfinite().all()) for cache in caches for each in cache._storage.values()), (
        "what is not a number stays in a page"
    )


def test_pages_of_a_failed_sequence_are_not_shared(
    random_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many share a prefix, and the first, whose pages the others would share, fails in the pass that computes them."""
    prefix = random_requests(1, 128, GREEDY, lengths=(30, 30))[0].prompt_token_ids
    requests = [Request(id=f"{n}", prompt_token_ids=(*prefix, n + 3), sampling=GREEDY) for n in range(8)]
    right = generate(random_pair, requests).texts
    token = unused(random_pair, requests, right)
    wrong_token_once(monkeypatch, 1, token)
    failing = nan_at(random_pair, token)
    engine = engine_of(failing)
    found = {each.request.id: (each.token_ids, each.error) for each in engine.generate(requests)}
    assert found == {name: (text, None) for name, text in right.items()}
    assert no_page_leaked(engine)


class Broken:
    """Replaces a method of ``Steps``: a device error where ``fails`` says so."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        where: str,
        fails: Callable[[int, Any], bool],
        error: type[RuntimeError] = RuntimeError,
    ) -> None:
        work, self.calls = getattr(Steps, where), 0

        def planted(steps: Steps, first: Any, *rest: Any) -> Any:
            self.calls += 1
            result = work(steps, first, *rest)
            if fails(self.calls, first):
                raise error("planted\nand more")
            return result

        monkeypatch.setattr(Steps, where, planted)


@pytest.mark.parametrize(
    ("error", "reason", "num_shortages"),  # of memory: one in a batch, and three alone
    [
        (RuntimeError, "the device failed: planted, and again when tried alone", 0),
        (torch.OutOfMemoryError, NO_MEMORY, 1 + 3),
    ],
)
def test_a_request_that_breaks_every_pass_fails_alone(
    demo_pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    error: type[RuntimeError],
    reason: str,
    num_shortages: int,
) -> None:
    Broken(monkeypatch, "decode", lambda calls, columns: int(columns.state.positions.max()) > 120, error)
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    requests = [Request(id=f"{n}", prompt_token_ids=(9,) * n, sampling=sampling) for n in (30, 119, 31)]
    outputs = generate(demo_pair, requests, num_spec_tokens=0)
    found = {name: (each.finish_reason, each.error) for name, each in outputs.completions.items()}
    assert found == {"30": ("length", None), "119": ("error", reason), "31": ("length", None)}
    assert sum(isinstance(event, OutOfMemory) for event in outputs.passes) == num_shortages


def test_a_device_that_always_fails_fails_all_requests_and_ends_the_run(
    random_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Broken(monkeypatch, "prefill", lambda calls, first: True)
    outputs = generate(random_pair, REQUESTS[:6], max_batch_size=3)
    assert {completion.finish_reason for completion in outputs.completions.values()} == {"error"}
    assert all(outputs.begun[r.id] == 2 for r in REQUESTS[:6])
    assert broken.calls == 2 + 6, "two passes of three, and everybody alone"


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_error_at_start_up_fails_no_request(
    random_pair: Pair, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    def lost(device: torch.device) -> None:
        raise RuntimeError("no answer")

    def fails(calls: int, columns: Any) -> bool:
        if is_lost:
            monkeypatch.setattr(engine, "device", torch.device("cuda"))
        return True

    engine = engine_of(random_pair)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    Broken(monkeypatch, "decode", fails)
    with pytest.raises(
        DeviceLost if is_lost else RuntimeError, match=None if is_lost else "planted"
    ) as raised:
        engine.warm_up()
    assert getattr(raised.value, "requests", ()) == ()


def test_a_lost_device_ends_the_run_and_names_the_requests_in_flight(
    random_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered\nand much more")

    engine = engine_of(random_pair)
    engine._lookahead = 1
    for request in REQUESTS[:3]:
        engine.submit(request)
    engine.step()
    assert engine._in_flight, "with results that can no longer be read"
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(HostCopy, "read", lost)
    Broken(monkeypatch, "decode", lambda calls, first: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    engine.device = torch.device("cuda")
    with pytest.raises(DeviceLost) as raised:
        engine.step()
    error = pickle.loads(pickle.dumps(raised.value))  # as between processes
    expected = "the device is lost (an illegal memory access was encountered): continue in a new process"
    assert str(error) == expected
    assert error.requests == tuple(request.id for request in REQUESTS[:3])
    engine.abandon()


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_retried_alone_is_the_only_one_in_flight(
    random_pair: Pair, device_like: Callable[..., None], monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    right = generate(random_pair, REQUESTS).texts
    add, num_passes = EngineCore._add, [0, 0]

    def watched(self: EngineCore, *arguments: Any) -> None:
        add(self, *arguments)
        admitted = {each.request.id for each in (*self._scheduler.prefilling, *self._scheduler.running)}
        in_flight = {each.request.id for launched in self._in_flight for each, _ in launched.sequences}
        alone = not suspects.isdisjoint(admitted)
        num_passes[alone] += 1
        assert not alone or admitted == in_flight | admitted == {min(admitted)}

    monkeypatch.setattr(EngineCore, "_add", watched)
    device_like(ahead)
    suspects = {request.id for request in REQUESTS[5:]}
    requests = [replace(request, alone=request.id in suspects) for request in REQUESTS]
    assert generate(random_pair, requests, max_batch_size=4).texts == right
    assert min(num_passes) > 10


def test_numbers_on_their_way_to_the_host_outlive_their_tensor() -> None:
    source = torch.tensor([1, 2])
    copy = HostCopy(source)
    source.zero_()
    assert copy.read() == [1, 2]
