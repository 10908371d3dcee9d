"""Shared by the benches of the engine: latencies, windows of steps, and bounds."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calibrated_cycle import Cycle
from calibrated_shapes import MIXTURES, SHAPES
from calibrated_weights import Source
from make_calibrated_pair import write_pair

from specgen.experiments.bound import (
    DeviceSpeed,
    KVBytes,
    StepBytes,
    Work,
    copy_bandwidth,
    matrix_flops,
    mean_step_bytes,
)
from specgen.experiments.explain import Window, step_seconds
from specgen.experiments.turns import inter_token_seconds
from specgen.models import mixture_targets
from specgen.record.record_rows import EngineRow, OutOfMemory, PassRow
from tests.engines import config_of, load_pair, loaded
from tests.streams import pass_row, request


def kv(num_bytes: int) -> KVBytes:
    """One layer that sees all positions."""
    return KVBytes(per_layer=num_bytes, windows=(None,))


SIZES = StepBytes(
    target=1000, head_fill=100, head_pass=60, target_kv=kv(3), head_kv=kv(1), logits=7 * 2, bytes_per_value=2
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, shape = tmp_path_factory.mktemp("tiny"), SHAPES["tiny"]
    cycle = Cycle.draw(shape.num_plain_tokens, shape.draft_vocab_size, 0.75, seed=0)
    write_pair(path, shape, cycle, Source("cpu", 0))
    return path


def test_a_step_reads_weights_once_a_pass_and_the_cache_of_every_sequence() -> None:
    assert SIZES.step(0, batch=2, context=10.5) == 1000 + 2 * 10.5 * 3
    assert SIZES.step(1, batch=2, context=10.5) == 1000 + 2 * 10.5 * (3 + 1) + 100 + 60
    assert SIZES.step(4, batch=2, context=10.5) == 1000 + 2 * 10.5 * (3 + 4) + 100 + 4 * 60


def test_layers_with_a_window_read_no_more_than_that() -> None:
    sizes = replace(
        SIZES,
        target_kv=KVBytes(per_layer=3, windows=(8, None, 8)),
        head_kv=KVBytes(per_layer=1, windows=(8,)),
    )
    assert sizes.step(0, batch=2, context=5) == 1000 + 2 * 3 * 15
    assert sizes.step(0, batch=2, context=100) == 1000 + 2 * 3 * (8 + 100 + 8)
    assert sizes.step(4, batch=2, context=100) == 1000 + 2 * (3 * 116 + 4 * 8) + 100 + 4 * 60
    shape = MIXTURES["tiny-gpt-oss"]
    of_gpt_oss = KVBytes.of(mixture_targets.read_gpt_oss(shape.target_config()), 2)
    assert of_gpt_oss.at(1000) == 2 * 2 * shape.kv_size * 4 * (16 + 1000)


def test_the_bytes_of_a_pair_are_its_matrices(tiny: Path) -> None:
    shape = SHAPES["tiny"]
    sizes = StepBytes.of(loaded(config_of(load_pair(tiny), dtype="bfloat16")))
    hidden, inner, norms = shape.hidden_size, shape.intermediate_size, 2 * shape.hidden_size
    attention = 2 * hidden * shape.q_size + 2 * hidden * shape.kv_size
    layer = attention + 3 * hidden * inner + norms
    assert sizes.target == 2 * (shape.num_layers * layer + hidden + shape.vocab_size * hidden)
    wide = attention + hidden * (shape.q_size + 2 * shape.kv_size)  # q, k and v take two hidden states
    head = wide + 3 * hidden * inner + norms + hidden + hidden + shape.draft_vocab_size * hidden
    assert sizes.head_pass == 2 * head
    assert sizes.head_fill == 2 * (3 * hidden * hidden + 2 * shape.kv_size * 2 * hidden)
    assert sizes.target_kv.at(1) == 2 * 2 * shape.num_layers * shape.kv_size
    assert sizes.head_kv.at(1) == 2 * 2 * shape.kv_size
    assert (sizes.logits, sizes.bytes_per_value) == (2 * shape.vocab_size, 2)


def stepped(time: float, kind: str = "decode", num_sequences: int = 4) -> PassRow:
    return pass_row(kind, time=time, seconds=0.0, num_sequences=num_sequences)


def test_only_time_between_neighbouring_full_decode_steps_counts() -> None:
    events: list[EngineRow] = [
        stepped(0, "prefill"),
        stepped(1),
        stepped(3),
        OutOfMemory(time=3.0, max_batch_size=4, max_prefill_tokens=64),
        stepped(6),
        stepped(10, "prefill"),
        stepped(11),
        stepped(12, num_sequences=3),
        stepped(13, num_sequences=3),
    ]
    assert step_seconds(events, batch=4) == [2, 3]


def test_a_window_sees_full_decode_steps_only() -> None:
    seen: list[str] = []

    class Recorder:
        def start(self) -> None:
            seen.append("start")

        def stop(self) -> None:
            seen.append("stop")

    window = Window(4, Recorder(), skipped=2, num_steps=3)
    for time in range(4):
        window.see(stepped(time, "prefill"))
        window.see(stepped(time, num_sequences=3))
        window.see(stepped(time))
    assert seen == ["start"]
    assert not window.complete
    window.see(stepped(9))
    assert window.complete
    window.see(stepped(10))
    assert seen == ["start", "stop"]


def test_parts_do_together_what_the_step_does() -> None:
    for k in (0, 1, 4):
        parts = SIZES.parts(k, batch=2, context=10.5)
        assert list(parts) == ["verify", "accept", "KV fill", "draft loop"][: 4 if k else 2]
        assert parts.pop("accept") == Work(num_bytes=2 * (k + 1) * 7 * 2, flops=0)
        assert sum(work.num_bytes for work in parts.values()) == SIZES.step(k, batch=2, context=10.5)
        assert parts["verify"].without_cache.num_bytes == 1000, "the weights, and the rest is the cache"
        assert parts["verify"].cache.num_bytes == 2 * SIZES.target_kv.at(10.5)
    assert parts["verify"].flops == 2 * (1000 / 2) * 2 * 5
    assert parts["KV fill"].flops == 2 * (100 / 2) * 2 * 5  # for all rows of verification
    assert parts["draft loop"].flops == 2 * (4 * 60 / 2) * 2


def test_the_longer_of_reading_and_computing_is_the_bound() -> None:
    work = Work(num_bytes=30.0, flops=100.0)
    assert work.seconds(DeviceSpeed(bytes_per_second=10.0, flops_per_second=100.0)) == 3.0
    assert work.seconds(DeviceSpeed(bytes_per_second=100.0, flops_per_second=10.0)) == 10.0


def test_copies_and_gemms_are_timed() -> None:
    assert 1e8 < copy_bandwidth("cpu") < 1e13
    assert 1e8 < matrix_flops("cpu", torch.float32) < 1e14


def test_a_step_reads_the_cache_of_the_sequences_in_it() -> None:
    """Not of sequences in prefill, waiting or finished."""
    (a,) = request("a", [(4, 2), (4, 1), (4, 0)], num_prompt_tokens=10)
    (b,) = request("b", [(4, 0)], num_prompt_tokens=10)
    (waiting,) = request("c", [], num_prompt_tokens=10)
    requests = [b.moved(0.0, 1), a.moved(0.0, 1), waiting]
    sizes = {0: 1, 1: 2, 2: 1, 3: 1}
    passes = [
        pass_row("decode" if number else "prefill", number=number, num_sequences=sizes[number])
        for number in sizes
    ]
    found = mean_step_bytes(requests, passes, SIZES)
    assert found == sum(SIZES.step(0, number, context) for number, context in ((2, 11), (1, 14), (1, 16))) / 3
    drafting = [replace(row, num_spec_tokens=4) for row in passes]
    assert mean_step_bytes(requests, drafting, SIZES) == pytest.approx(
        sum(SIZES.step(4, number, context) for number, context in ((2, 11), (1, 14), (1, 16))) / 3
    )
    assert mean_step_bytes(requests, passes[:1], SIZES) is None


def test_a_step_is_one_gap_however_many_tokens_it_emits() -> None:
    """Also where a preemption came between, and where the end of the text dropped all that a step gave."""
    times = (1.0, 1.5, 2.0, 3.0, 6.0)
    passes = [pass_row(number=number, time=time) for number, time in enumerate(times)]
    (a,) = request("a", [(2, 2), (2, 0)], first_token=1.0)
    (b,) = request("b", [(2, 1), (2, 0), (2, 0)], first_token=2.0, dropped=1)
    a, b = (
        replace(
            row, steps=[step._replace(number=at) for step, at in zip(row.steps or (), numbers, strict=True)]
        )
        for row, numbers in ((a, (1, 3)), (b, (3, 4, 4)))
    )
    assert list(inter_token_seconds([a, b], passes)) == [0.5, 1.5, 1.0, 3.0]
