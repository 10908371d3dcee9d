"""Attention over FP8 pages: keys and values are stored over their scales and read times them, by every backend."""

import sys
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from specgen.attention import Attend, Backend, LayerAttention
from specgen.attention.flashinfer_paged import FlashInferBackend
from specgen.attention.hopper import UnsplitDecode
from specgen.attention.sdpa import SdpaBackend, StaticSdpaBackend
from specgen.attention.trtllm import TrtllmBackend
from specgen.kv.kv_cache import KVCache, KVSpec
from specgen.kv.layout import Layout
from specgen.ops import reference
from specgen.ops.reference import torch_ops
from tests import fake_flashinfer
from tests.fp8_numbers import NUMBERS, rounded, stored
from tests.paged_pass import HEAD_DIM, PagedPass
from tests.test_attention_windows import CALLS, SHAPES, random_pass

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn
SCALES = ((0.7, 1.9), (1.3, 0.4), (1.0, 1.0), (0.011, 3.1))
LAYERS = [
    LayerAttention(
        index=i, scale=HEAD_DIM**-0.5, window=window, sinks=sinks, k_scale=k_scale, v_scale=v_scale
    )
    for i, ((k_scale, v_scale), window, sinks) in enumerate(
        product(SCALES, (None, 16), (None, torch.linspace(-1, 3, 4)))
    )
]
PLAIN = [layer for layer in LAYERS if layer.sinks is None]


@cache
def fp8_pass(shape: str) -> PagedPass:
    world = random_pass(shape)
    return replace(world, keys=world.keys.to(FP8), values=world.values.to(FP8))


@cache
def multiplied(world: PagedPass, layer: LayerAttention) -> PagedPass:
    return replace(
        world, keys=world.keys.float() * layer.k_scale, values=world.values.float() * layer.v_scale
    )


def check(backend: Backend, world: PagedPass, layout: Layout, layers: list[LayerAttention]) -> None:
    for layer, out in zip(layers, world.attend(backend, layout, layers), strict=True):
        want = multiplied(world, layer).expected(layer)
        torch.testing.assert_close(out[: len(want)], want, atol=1e-5, rtol=1e-5)
        assert out.isfinite().all()


@pytest.mark.parametrize("backend", [SdpaBackend, StaticSdpaBackend], ids=lambda backend: backend.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_sdpa(backend: type[Backend], shape: str) -> None:
    world = fp8_pass(shape)
    check(backend(CPU), world, world.known(), LAYERS)
    check(backend(CPU), world, world.packed(), LAYERS)


@pytest.mark.parametrize("call", CALLS)
def test_every_call_of_trtllm(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    major, num_sms, shape, kind = CALLS[call]
    fake_flashinfer.install(monkeypatch, major=major, num_sms=num_sms)
    world, made = fp8_pass(shape), TrtllmBackend(CPU)
    layout = world.packed(num_padding=3) if kind == "packed" else getattr(world, kind)()
    for _ in range(2):  # what the first pass has planned serves the second
        check(made, world, layout, LAYERS)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_paged_wrapper(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    fake_flashinfer.install(monkeypatch, major=9, num_sms=132)
    world, made = fp8_pass(shape), FlashInferBackend(CPU)
    check(made, world, world.packed(num_padding=3), LAYERS)
    check(made, world, world.known(), LAYERS)


@pytest.mark.parametrize("shape", ["decode", "verify"])
def test_xqa_never_rounds_queries_to_fp8(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """FlashInfer's kernel for Hopper does; its ragged call always runs the other one."""
    fake_flashinfer.install(monkeypatch, major=9, num_sms=1)
    world = fp8_pass(shape)

    def uniform_call(*args: object, **kwargs: object) -> None:
        raise AssertionError("not with FP8 pages")

    monkeypatch.setattr(sys.modules["flashinfer"], "trtllm_batch_decode_with_kv_cache", uniform_call)
    check(TrtllmBackend(CPU), world, world.uniform(), LAYERS)


def test_the_unsplit_kernel_refuses_fp8_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch, major=9, num_sms=1)
    world = fp8_pass("verify")
    with pytest.raises(AssertionError, match="scales of FP8"):
        world.attend(UnsplitDecode(CPU), world.uniform(), PLAIN)


def test_pages_of_the_model_have_no_scales() -> None:
    world = PagedPass.random(*SHAPES["verify"], 16)
    for layer, out in zip(PLAIN, world.attend(SdpaBackend(CPU), world.known(), PLAIN), strict=True):
        torch.testing.assert_close(out, world.expected(layer), atol=1e-5, rtol=1e-5)


def test_the_reference_rounds_as_torch_does() -> None:
    codes = torch.arange(127, dtype=torch.uint8)
    assert torch.equal(NUMBERS, codes.view(FP8).float())
    middles = (NUMBERS[1:] + NUMBERS[:-1]) / 2
    x = torch.cat((NUMBERS, middles, middles * 1.001, middles * 0.999, torch.randn(9999) * 100)).clamp(
        -448, 448
    )
    assert torch.equal(rounded(x), x.to(FP8).float())
    assert rounded(torch.tensor([460.0, 1e9, -1e9])).tolist() == [448, 448, -448]


# --- rows on their way into pages and out again ------------------------------------------------

ROWS = 21


def through_pages(layers: list[LayerAttention], k: Tensor, v: Tensor, q: Tensor) -> list[Tensor]:
    """Attention of each layer over ``k`` and ``v`` ``[rows, 2, D]``, which it has stored, without rotation."""
    cache = KVCache(
        spec=KVSpec(num_layers=len(layers), num_planes=2, num_heads=2, head_dim=HEAD_DIM),
        num_pages=9,
        page_size=4,
        dtype=FP8,
        device=CPU,
    )
    table = torch.tensor([[3, 8, 1, 7, 2, 5]], dtype=torch.int32)
    layout = Layout.ragged(table, [0], [ROWS], 4)
    attend = Attend(SdpaBackend(CPU), cache, layout, torch_ops().rope(torch.zeros(HEAD_DIM // 2)))
    qkv = torch.cat((q, k, v), 1)
    return [attend(layer, qkv) for layer in layers]


def wanted(layer: LayerAttention, k: Tensor, v: Tensor, q: Tensor) -> Tensor:
    keys, values = (
        stored(x, scale).repeat_interleave(2, 1) for x, scale in ((k, layer.k_scale), (v, layer.v_scale))
    )
    scores = torch.einsum("qhd,khd->hqk", q, keys) * layer.scale
    scores = scores.masked_fill(torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)


def distance(layers: list[LayerAttention]) -> float:
    """The largest difference of a layer from the reference; infinite for NaN."""
    torch.manual_seed(0)
    k, v, q = (
        torch.randn(ROWS, 2, HEAD_DIM),
        3 * torch.randn(ROWS, 2, HEAD_DIM),
        torch.randn(ROWS, 4, HEAD_DIM),
    )
    pairs = zip(through_pages(layers, k, v, q), (wanted(each, k, v, q) for each in layers), strict=True)
    return max(float((out - want).abs().nan_to_num(torch.inf).max()) for out, want in pairs)


# 0.004: beyond 1.8 a key saturates
STORED = [
    replace(PLAIN[0], index=i, k_scale=k, v_scale=v) for i, (k, v) in enumerate([(0.004, 0.013), (0.9, 0.3)])
]


@pytest.fixture
def unsaturated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too large for FP8 becomes NaN, as in some versions of torch; in others it saturates."""
    convert = torch.Tensor.to

    def to(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        fits = convert(self, *args, **kwargs)
        return convert(self.where(self.abs() < 465, torch.nan), FP8) if args == (FP8,) else fits

    monkeypatch.setattr(torch.Tensor, "to", to)


def test_rows_are_stored_over_their_scales(unsaturated: None) -> None:
    assert distance(STORED) < 1e-5


def swapped(self: LayerAttention, pages: Tensor) -> tuple[float, float]:
    return self.v_scale, self.k_scale


def of_the_next_layer(self: LayerAttention, pages: Tensor) -> tuple[float, float]:
    other = STORED[1 - self.index]
    return other.k_scale, other.v_scale


def unclamped(pages: Tensor, slots: Tensor, rows: Tensor, scale: float) -> None:
    pages.view(torch.uint8).index_copy_(0, slots, (rows / scale).to(FP8).view(torch.uint8))


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (LayerAttention, "kv_scales", swapped),
        (LayerAttention, "kv_scales", of_the_next_layer),
        (LayerAttention, "kv_scales", lambda self, pages: (1.0, 1.0)),
        (reference, "_put", unclamped),
    ],
    ids=["swapped", "of the next layer", "none", "not clamped"],
)
def test_a_wrong_scale_and_a_missing_clamp_are_seen(
    monkeypatch: pytest.MonkeyPatch, unsaturated: None, where: object, name: str, wrong: object
) -> None:
    monkeypatch.setattr(where, name, wrong)
    assert distance(STORED) > 1e-3


def test_a_number_that_is_none_stays_none() -> None:
    pages = torch.zeros(2, 3, 4, 2, HEAD_DIM).to(FP8)
    qkv = torch.ones(1, 8, HEAD_DIM)
    qkv[0, 4:] = torch.nan
    layout = Layout.ragged(torch.tensor([[2]], dtype=torch.int32), [1], [1], 4)
    torch_ops().rope(torch.zeros(HEAD_DIM // 2))(layout)(qkv, pages[0], pages[1], 0.5, 0.5)
    assert pages[:, 2, 1].float().isnan().all()
    assert not pages[:, 2, [0, 2, 3]].float().any()
