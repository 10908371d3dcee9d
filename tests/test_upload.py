"""Weights on their way to a GPU go through a few pinned buffers, none of which is written before it was fetched."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.checkpoints import tensor_reader
from specgen.checkpoints.checkpoint import build_target, open_checkpoint, target_config
from specgen.checkpoints.tensor_reader import TensorReader, Upload, uploading
from tests.tiny_checkpoints import write_target

CPU = torch.device("cpu")


class Slow:
    """The event of a GPU that takes its time to fetch; it spoils a buffer that is written before."""

    def __init__(self) -> None:
        self.fetched = threading.Event()
        self.fetched.set()
        self.num_recorded = 0

    def record(self, stream: Any) -> None:
        assert self.fetched.is_set(), "the buffer was taken before it was fetched"
        self.num_recorded += 1
        self.fetched.clear()
        threading.Timer(0.02, self.fetched.set).start()

    def synchronize(self) -> None:
        self.fetched.wait()


@pytest.fixture
def events() -> list[Slow]:
    return []


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, events: list[Slow]) -> Upload:
    """Three buffers of 100 bytes."""
    return with_buffers(100, monkeypatch, events)


def with_buffers(size: int, monkeypatch: pytest.MonkeyPatch, events: list[Slow]) -> Upload:
    monkeypatch.setattr(tensor_reader, "_PIECE", size)
    monkeypatch.setattr(tensor_reader, "_SMALL", 50)
    monkeypatch.setattr(tensor_reader, "_THREADS", 3)

    def event() -> Slow:
        events.append(Slow())
        return events[-1]

    return Upload(lambda size: torch.zeros(size, dtype=torch.uint8), event)


@pytest.mark.parametrize("shape", [(), (0, 5), (7,), (50,), (3, 41, 5)])
def test_every_byte_arrives(small: Upload, shape: tuple[int, ...]) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool):
        source = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        target = torch.full(shape, 1).to(dtype)
        small.into(target, source, None)
        found, expected = (each.view(torch.uint8) if shape else each for each in (target, source))
        assert torch.equal(found, expected), dtype


def test_a_buffer_is_written_only_when_it_was_fetched(small: Upload, events: list[Slow]) -> None:
    source = torch.arange(5000, dtype=torch.int16)
    target = torch.zeros_like(source)
    began = time.monotonic()
    small.into(target, source, None)
    assert torch.equal(target, source)
    assert len(events) == 3
    assert sum(event.num_recorded for event in events) == 100
    assert time.monotonic() - began > 0.02 * (100 / 3 - 2), "each of three buffers is waited for"


def test_a_failed_piece_fails_the_whole_and_gives_its_buffer_back(small: Upload) -> None:
    class Lost(Tensor):
        """Of a device that is gone."""

        def copy_(self, *given: Any, **named: Any) -> Any:
            raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="the device is lost"):
        small.into(
            torch.zeros(1000, dtype=torch.uint8).as_subclass(Lost), torch.ones(1000, dtype=torch.uint8), None
        )
    target = torch.zeros(1000, dtype=torch.uint8)
    small.into(target, torch.ones(1000, dtype=torch.uint8), None)
    assert target.all()


def test_a_model_is_the_same_through_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Slow]
) -> None:
    write_target(tmp_path, num_layers=2)
    checkpoint = open_checkpoint(str(tmp_path))
    reader = TensorReader(checkpoint=checkpoint, dtype=torch.bfloat16, device=CPU)
    plain = build_target(target_config(checkpoint), reader)
    reader = replace(reader, upload=with_buffers(5000, monkeypatch, events), taken={})
    through = build_target(target_config(checkpoint), reader)
    assert sum(event.num_recorded for event in events) > 50
    assert torch.equal(plain.embedding, through.embedding)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert torch.equal(plain.logits(hidden), through.logits(hidden))


def test_weights_for_a_cpu_stay_in_their_file() -> None:
    with uploading(CPU) as upload:
        assert upload is None
