"""Attention sinks: logits of no position that take their share of a softmax, in layers with and without windows."""

import pytest
import torch

from specgen.attention import Backend, LayerAttention
from specgen.attention.sdpa import SdpaBackend, StaticSdpaBackend
from tests.marks import mostly_slow
from tests.paged_pass import HEAD_DIM
from tests.test_attention_windows import SHAPES, random_pass

CPU = torch.device("cpu")
SINKS = torch.tensor([-3.0, 0.5, 2.0, 9.0])  # of the four heads: from hardly any share to nearly all
LAYERS = [
    LayerAttention(index=index, scale=HEAD_DIM**-0.5, window=window, sinks=sinks)
    for index, (window, sinks) in enumerate(
        [(None, SINKS), (3, SINKS.flip(0)), (None, None), (16, SINKS), (1, SINKS), (16, None), (1000, SINKS)]
    )
]


@pytest.mark.parametrize("backend", [SdpaBackend, StaticSdpaBackend], ids=lambda backend: backend.name)
@pytest.mark.parametrize("page_size", mostly_slow([4, 16], 4))
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_of_a_pass_have_sinks_of_their_own(backend: type[Backend], page_size: int, shape: str) -> None:
    world, made = random_pass(shape, page_size), backend(CPU)
    layouts = [world.known(), world.packed(num_padding=3 if backend is StaticSdpaBackend else 0)]
    for layout in layouts:
        for layer, out in zip(LAYERS, world.attend(made, layout, LAYERS), strict=True):
            want = world.expected(layer)
            torch.testing.assert_close(out[: len(want)], want, atol=1e-5, rtol=1e-5)
            assert out.isfinite().all()


def test_the_sinks_of_this_test_matter() -> None:
    world = random_pass("verify")
    with_sinks, without = world.expected(LAYERS[0]), world.expected(LAYERS[2])
    shares = (with_sinks / without).view(-1, 4, HEAD_DIM).median(-1).values.mean(0)
    assert shares[0] > 0.95
    assert shares[3] < 0.05
