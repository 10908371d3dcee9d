"""Sliding windows: every backend sees of each layer what its window leaves, whatever other layers of the pass see.

What calls FlashInfer is tested here against a stand-in for it, and on a GPU in ``test_attention_gpu.py``.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from specgen.attention import Backend, LayerAttention
from specgen.attention.flashinfer_paged import FlashInferBackend, _PlanKey, _sink_variant
from specgen.attention.hopper import UnsplitDecode
from specgen.attention.sdpa import SdpaBackend, StaticSdpaBackend
from specgen.attention.trtllm import TrtllmBackend
from specgen.kv.layout import Layout
from tests import fake_flashinfer
from tests.fake_flashinfer import BatchPrefillWithPagedKVCacheWrapper
from tests.marks import mostly_slow
from tests.paged_pass import HEAD_DIM, PagedPass

CPU = torch.device("cpu")
WINDOWS = (None, 3, 16, 1000, 1, None, 64, 16)  # of the layers of one pass
LAYERS = [LayerAttention(index=i, scale=HEAD_DIM**-0.5, window=window) for i, window in enumerate(WINDOWS)]
SHAPES = {  # positions and rows of each sequence
    "decode": ([1, 2, 3, 4, 16, 17, 64, 65, 150], [1] * 9),
    "verify": ([5, 9, 20, 67, 68, 69, 150], [5] * 7),
    "ragged": ([2, 40, 9, 16, 131, 70], [2, 1, 5, 3, 5, 4]),
    "prefill": ([33, 1, 16, 150, 80], [33, 1, 16, 40, 80]),
}


@cache
def random_pass(shape: str, page_size: int = 16) -> PagedPass:
    """One for all tests: what is expected of it is computed once."""
    return PagedPass.random(*SHAPES[shape], page_size)


def check(
    backend: Backend, world: PagedPass, layout: Layout, layers: Sequence[LayerAttention] = LAYERS
) -> None:
    """Every layer against dense attention; padding rows are finite."""
    for layer, out in zip(layers, world.attend(backend, layout, layers), strict=True):
        want = world.expected(layer)
        message = f"window {layer.window}"
        torch.testing.assert_close(
            out[: len(want)], want, atol=1e-5, rtol=1e-5, msg=lambda m, at=message: f"{at}: {m}"
        )
        assert out.isfinite().all(), message


@pytest.mark.parametrize("backend", [SdpaBackend, StaticSdpaBackend], ids=lambda backend: backend.name)
@pytest.mark.parametrize("page_size", mostly_slow([4, 16, 64], 16))
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_of_a_pass_have_windows_of_their_own(
    backend: type[Backend], page_size: int, shape: str
) -> None:
    world = random_pass(shape, page_size)
    made = backend(CPU)
    check(made, world, world.known())
    check(made, world, world.packed())
    if len(set(world.query_lens)) == 1:
        check(made, world, world.uniform())


@pytest.mark.parametrize("page_size", [4, 16])
def test_padding_rows_behind_the_table_stay_finite(page_size: int) -> None:
    """30 rows behind the longest sequence, the last: a window of 1 to 16 holds no position of the table there."""
    world = PagedPass.random(*SHAPES["verify"], page_size, spare_pages=0)
    check(StaticSdpaBackend(CPU), world, world.packed(num_padding=30))


def test_a_mask_is_made_once_for_each_window_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    world = random_pass("verify")
    made, zeros = [], torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, **kind: made.append(shape) or zeros(*shape, **kind))
    for layers, masks in ((LAYERS, len(set(WINDOWS))), (LAYERS[:1] * 3, 1)):
        made.clear()
        world.attend(StaticSdpaBackend(CPU), world.uniform(), layers)
        assert len(made) == masks


SINKS = [  # as large as scores are, of every layer its own
    replace(layer, sinks=torch.linspace(-1, 3, 4) - layer.index) for layer in LAYERS
]
CALLS = {  # compute capability, SMs, shape, kind of layout
    "xqa-one-row": (9, 132, "decode", "uniform"),
    "xqa-verify": (9, 132, "verify", "uniform"),
    "unsplit": (9, 1, "verify", "uniform"),
    "xqa-packed": (9, 132, "ragged", "packed"),
    "prefill": (9, 132, "prefill", "known"),
    "trtllm-gen-one-row": (10, 132, "decode", "uniform"),
    "trtllm-gen-verify": (10, 132, "verify", "uniform"),
    "trtllm-gen-packed": (10, 132, "ragged", "packed"),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_of_trtllm_is_given_the_window(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    major, num_sms, shape, kind = CALLS[call]
    fake_flashinfer.install(monkeypatch, major=major, num_sms=num_sms)
    world, made = random_pass(shape), TrtllmBackend(CPU)
    layout = world.packed(num_padding=3) if kind == "packed" else getattr(world, kind)()
    for _ in range(2):  # what the first pass has planned serves the second
        check(made, world, layout)


@pytest.mark.parametrize("call", CALLS)
def test_every_call_of_trtllm_is_given_the_sinks(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    major, num_sms, shape, kind = CALLS[call]
    fake_flashinfer.install(monkeypatch, major=major, num_sms=num_sms)
    world, made = random_pass(shape), TrtllmBackend(CPU)
    layout = world.packed(num_padding=3) if kind == "packed" else getattr(world, kind)()
    for layers in (SINKS, [*SINKS[:2], *LAYERS[:2], *SINKS[2:4]], LAYERS):
        check(made, world, layout, layers)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_paged_wrapper_is_given_the_sinks(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    fake_flashinfer.install(monkeypatch, major=9, num_sms=132)
    world, made = random_pass(shape), FlashInferBackend(CPU)
    for layers in (SINKS, [*SINKS[:2], *LAYERS[:2], *SINKS[2:4]], LAYERS):
        check(made, world, world.packed(num_padding=3), layers)
        check(made, world, world.known(), layers)


def test_layers_with_sinks_share_the_plan_of_their_window(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch, major=9, num_sms=132)
    world, made = random_pass("prefill"), FlashInferBackend(CPU)
    before = BatchPrefillWithPagedKVCacheWrapper.plans
    world.attend(made, world.known(), [*SINKS, *SINKS])
    assert BatchPrefillWithPagedKVCacheWrapper.plans - before == len(set(WINDOWS))


def test_every_kernel_with_sinks_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch, major=9, num_sms=132)
    kinds = product(
        (64, 128), (torch.bfloat16, torch.float16), (torch.bfloat16, torch.float8_e4m3fn), (-1, 127)
    )
    names = {
        _sink_variant(
            kernels,
            _PlanKey(
                num_heads=8,
                num_kv_heads=1,
                head_dim=head_dim,
                dtype=dtype,
                kv_dtype=kv_dtype,
                scale=1.0,
                window_left=window_left,
                sinks=True,
            ),
            windowed=window_left >= 0,
        )[0]
        for head_dim, dtype, kv_dtype, window_left in kinds
        for kernels in ("fa2", "fa3")
    }
    assert len(names) == 32


def test_a_kernel_without_sinks_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch, major=9, num_sms=1)
    world = random_pass("verify")
    with pytest.raises(AssertionError, match="leave them out"):
        world.attend(UnsplitDecode(CPU), world.uniform(), SINKS)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_paged_wrapper_is_given_the_window(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    fake_flashinfer.install(monkeypatch, major=9, num_sms=132)
    world, made = random_pass(shape), FlashInferBackend(CPU)
    other = PagedPass.random([40, 7], [3, 7], 16)
    check(made, world, world.packed(num_padding=3))
    check(made, other, other.known())
    check(made, world, world.known())


def test_the_paged_wrapper_plans_once_for_each_window_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning waits for the device: layers that take turns must not make each other plan again."""
    fake_flashinfer.install(monkeypatch, major=9, num_sms=132)
    world, made = random_pass("prefill"), FlashInferBackend(CPU)
    before = BatchPrefillWithPagedKVCacheWrapper.plans
    for passes in (1, 2):
        world.attend(made, world.known(), LAYERS)
        assert BatchPrefillWithPagedKVCacheWrapper.plans - before == passes * len(set(WINDOWS))


def test_a_window_holds_the_row_itself() -> None:
    with pytest.raises(AssertionError, match="0"):
        LayerAttention(index=0, scale=1.0, window=0)
