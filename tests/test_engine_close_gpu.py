"""Engines one after the other on a GPU: a closed one gives back its memory, graphs and workspaces included."""

import weakref

import pytest
import torch

from specgen import Engine, EngineConfig, SamplingParams
from specgen.config.bundled import pair

pytestmark = pytest.mark.gpu
MODEL, DRAFTER = pair()
GIB = 1 << 30
# cuBLAS's workspaces and FlashInfer's own buffers, which are made once in a process
OF_THE_PROCESS = 128 << 20


def after_one(attention: str, cuda_graphs: str) -> tuple[int, int]:
    """Bytes allocated and reserved behind an engine that was opened, used and closed."""
    config = EngineConfig(
        model=MODEL,
        drafter=DRAFTER,
        device="cuda",
        kv_memory=GIB,
        max_batch_size=256,
        attention=attention,  # type: ignore[arg-type]
        cuda_graphs=cuda_graphs,  # type: ignore[arg-type]
    )
    with Engine(config) as engine:
        weights = weakref.ref(engine.models.target.embedding)
        sampling = SamplingParams(max_tokens=32, ignore_eos=True)
        outputs = list(engine.generate([f"Tom has {number} apples" for number in range(16)], sampling))
        assert [output.error for output in outputs] == [None] * 16
        half_read = engine.generate(["Tom", "Stop"], sampling)
        next(half_read)
        assert torch.cuda.memory_allocated() > OF_THE_PROCESS
    assert weights() is None
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.mark.parametrize(
    ("attention", "cuda_graphs"), [("auto", "auto"), ("auto", "pass"), ("flashinfer", "off"), ("sdpa", "off")]
)
def test_memory_is_back_to_what_it_was(attention: str, cuda_graphs: str) -> None:
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    first = after_one(attention, cuda_graphs)
    assert first[0] - allocated < OF_THE_PROCESS
    assert first[1] - reserved < 2 * OF_THE_PROCESS
    assert after_one(attention, cuda_graphs) == first
