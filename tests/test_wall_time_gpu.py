"""On an NVIDIA GPU: the wall time by the device's clock, and graphs that wait until a size has been asked for often."""

import time
from dataclasses import asdict

import pytest
import torch

from specgen.config import SamplingParams
from specgen.device import DeviceEvent, HostCopy
from specgen.engine.build import build_engine
from specgen.record.record_rows import Captured, EngineRow
from specgen.report.timings import WallTime
from tests.engines import Pair, bundled_requests, config_of
from tests.marks import on_gpu
from tests.streams import fold

pytestmark = on_gpu()
EXACT = {"device": "cuda", "dtype": "float32", "attention": "sdpa-static", "page_size": 16}


def test_moments_are_of_the_device_and_not_of_the_host() -> None:
    device = torch.device("cuda")
    begun = DeviceEvent(device)
    torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s, for which the host does not wait
    launched = time.perf_counter()
    copy = HostCopy(torch.zeros(3, device=device))
    time.sleep(0.3)
    assert copy.ready
    assert copy.read() == [0.0] * 3
    later = DeviceEvent(device)
    later.wait()
    assert 0.05 < copy.done.since(begun) < 0.25
    assert later.since(copy.done) == pytest.approx(
        time.perf_counter() - launched - copy.done.since(begun), abs=0.02
    )


def test_parts_add_up_and_graphs_are_captured_once_in_a_while(gpu_pair: Pair) -> None:
    events: list[EngineRow] = []
    engine = build_engine(config_of(gpu_pair, max_batch_size=16, **EXACT), gpu_pair.models, events.append)
    requests = bundled_requests(24, SamplingParams(max_tokens=40))

    def run(pause: float = 0.0) -> tuple[dict[str, tuple[int, ...]], WallTime, int]:
        events.clear()
        began, texts = time.perf_counter(), {}
        for completion in engine.generate(requests):
            texts[completion.request.id] = completion.token_ids
            time.sleep(pause if len(texts) == 1 else 0.0)
        wall = fold(events, num_spec_tokens=3).wall
        captures = sum(isinstance(event, Captured) for event in events)
        return texts, wall.of_whole(time.perf_counter() - began), captures

    engine.warm_up()
    engine.delay_captures(10**6)
    patient, wall, few = run()
    assert wall.captures > 0
    engine.delay_captures(0)
    first, wall, more = run()
    assert few >= 1
    assert more >= 1, "sizes that ran in larger ones until now"
    again, wall, none = run(pause=0.2)
    assert (none, wall.captures) == (0, 0.0)
    assert patient == first == again
    assert 0.15 < wall.idle_outside < 0.25
    assert min(asdict(wall).values()) > -0.02  # steps of larger batches may be faster
    assert wall.rest < 0.1
