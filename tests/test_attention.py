"""Every backend equals attention without pages: windows and sinks of each layer, FP8 pages, pages in any order.

What calls FlashInfer is tested here against a stand-in for it, and on a GPU in ``test_attention_gpu.py``.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from specgen.attention import Attend, Backend, Kernel, LayerAttention
from specgen.attention.flashinfer_paged import FlashInferBackend, _PlanKey, _sink_variant
from specgen.attention.hopper import UnsplitDecode
from specgen.attention.sdpa import SdpaBackend, StaticSdpaBackend
from specgen.attention.trtllm import TrtllmBackend
from specgen.kv.kv_cache import KVCache, KVSpec
from specgen.kv.layout import Layout
from specgen.ops import reference
from specgen.ops.reference import torch_ops
from tests import fake_flashinfer
from tests.fake_flashinfer import BatchPrefillWithPagedKVCacheWrapper
from tests.marks import mostly_slow
from tests.paged_pass import HEAD_DIM, PagedPass
from tests.tiny_fp8 import NUMBERS, rounded, stored

STORING_LAYER = LayerAttention(index=1, scale=HEAD_DIM**-0.5)

STORED_SHAPES = {
    "decode": ([1, 17, 64, 65], [1, 1, 1, 1]),
    "verify": ([9, 9, 30, 31], [5, 5, 5, 5]),
    "ragged": ([2, 40, 9, 16, 17], [2, 1, 5, 3, 5]),
    "two and one": ([9, 6], [2, 1]),
    "ones and four": ([5, 3, 8, 20], [1, 1, 1, 4]),
    "prefill": ([33, 1, 16, 100], [33, 1, 16, 40]),
}

unrotated = torch_ops().rope(torch.zeros(HEAD_DIM // 2))  # angles of 0


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows ``q`` ``[n, Hq, D]`` are the last n positions of ``k`` and ``v`` ``[length, Hkv, D]``."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


@pytest.mark.parametrize("backend", [SdpaBackend, StaticSdpaBackend], ids=lambda backend: backend.name)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("shape", STORED_SHAPES)
def test_backend_equals_dense_attention(
    backend: type[Backend], num_kv_heads: int, page_size: int, shape: str
) -> None:
    torch.manual_seed(0)
    made = backend(torch.device("cpu"))
    kv_lens, query_lens = STORED_SHAPES[shape]
    width = -(-max(kv_lens) // page_size)
    num_pages = width * len(kv_lens)
    cache = KVCache(
        spec=KVSpec(num_planes=2, layers=((num_kv_heads, HEAD_DIM),) * 2),
        num_pages=num_pages,
        page_size=page_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    tables = torch.randperm(num_pages, dtype=torch.int32).view(len(kv_lens), width)
    ks, vs = ([torch.randn(n, num_kv_heads, HEAD_DIM) for n in kv_lens] for _ in "kv")
    starts = [n - q for n, q in zip(kv_lens, query_lens, strict=True)]
    for row, start in enumerate(starts):  # the earlier positions
        if start:
            before = Layout.uniform(tables[row : row + 1], torch.tensor([0]), start, page_size)
            qkv = torch.cat([torch.zeros(start, 4, HEAD_DIM), ks[row][:start], vs[row][:start]], 1)
            Attend(made, cache, before, unrotated)(STORING_LAYER, qkv)
    layout = replace(Layout.ragged(tables, starts, query_lens, page_size), host=None)
    q = torch.randn(sum(query_lens), 4, HEAD_DIM)
    new_k, new_v = (torch.cat([x[start:] for x, start in zip(xs, starts, strict=True)]) for xs in (ks, vs))
    out = Attend(made, cache, layout, unrotated)(STORING_LAYER, torch.cat([q, new_k, new_v], 1))
    parts = [dense_attention(*each) for each in zip(q.split(query_lens), ks, vs, strict=True)]
    torch.testing.assert_close(out, torch.cat(parts), atol=1e-5, rtol=1e-5)


CPU = torch.device("cpu")


@pytest.mark.parametrize("backend", [SdpaBackend, StaticSdpaBackend], ids=lambda backend: backend.name)
def test_rows_that_are_not_causal_see_those_behind_them(backend: type[Backend]) -> None:
    """By its own way, and by the one of backends that have none: each row as the last one of a sequence."""
    layout, made = random_pass("verify").uniform(), backend(CPU)
    for kernel in (made.looking_ahead(layout), Backend.looking_ahead(made, layout)):
        check_looking_ahead(kernel, random_pass("verify"))


WINDOWS = (None, 3, 16, 1000, 1, None, 64, 16)  # of the layers of one pass
LAYERS = [LayerAttention(index=i, scale=HEAD_DIM**-0.5, window=window) for i, window in enumerate(WINDOWS)]

SINKS = [  # as large as scores are, of every layer its own
    replace(layer, sinks=torch.linspace(-1, 3, 4) - layer.index) for layer in LAYERS
]

MIXED = [*SINKS[:2], *LAYERS[:2], *SINKS[2:4]]

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


def check_looking_ahead(kernel: Kernel, world: PagedPass) -> None:
    """With windows longer and shorter than the rows of a sequence, and without; all of one plan."""
    for layer in (replace(layer, causal=False) for layer in (*LAYERS, *SINKS[:3])):
        out = kernel(layer, world.q, world.keys, world.values).clone()
        torch.testing.assert_close(out, world.expected(layer), atol=1e-5, rtol=1e-5)


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
def test_layers_of_a_pass_have_windows_and_sinks_of_their_own(
    backend: type[Backend], page_size: int, shape: str
) -> None:
    world, made = random_pass(shape, page_size), backend(CPU)
    layouts = [world.known(), world.packed(num_padding=3 if backend is StaticSdpaBackend else 0)]
    if len(set(world.query_lens)) == 1:
        layouts.append(world.uniform())
    for layout in layouts:
        check(made, world, layout)
        check(made, world, layout, SINKS)


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


@pytest.mark.parametrize("call", mostly_slow(CALLS, *(call for call in CALLS if call != "prefill")))
def test_every_call_of_trtllm_is_given_windows_and_sinks(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    major, num_sms, shape, kind = CALLS[call]
    fake_flashinfer.install(monkeypatch, major=major, num_sms=num_sms)
    world, made = random_pass(shape), TrtllmBackend(CPU)
    layout = world.packed(num_padding=3) if kind == "packed" else getattr(world, kind)()
    for layers in (SINKS, MIXED, LAYERS, LAYERS):  # what a pass has planned serves the next
        check(made, world, layout, layers)


@pytest.mark.parametrize("backend", [TrtllmBackend, FlashInferBackend], ids=lambda backend: backend.name)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_rows_see_those_behind_them_on_kernels_that_are_causal(
    monkeypatch: pytest.MonkeyPatch, backend: type[Backend], kv_dtype: torch.dtype
) -> None:
    """FP8 pages are read by a call that writes every result to the same place."""
    fake_flashinfer.install(monkeypatch, major=9, num_sms=132)
    world = random_pass("verify") if kv_dtype == torch.float32 else fp8_pass("verify")
    kernel = backend(CPU).looking_ahead(world.uniform())
    for layer in (replace(layer, causal=False) for layer in (*LAYERS, *FP8_LAYERS)):
        out = kernel(layer, world.q, world.keys, world.values)
        plain = multiplied(world, layer) if kv_dtype != torch.float32 else world
        torch.testing.assert_close(out, plain.expected(layer), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_paged_wrapper_is_given_windows_and_sinks(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    fake_flashinfer.install(monkeypatch, major=9, num_sms=132)
    world, made = random_pass(shape), FlashInferBackend(CPU)
    other = PagedPass.random([40, 7], [3, 7], 16)
    for layers in (SINKS, MIXED, LAYERS):
        check(made, world, world.packed(num_padding=3), layers)
        check(made, other, other.known(), layers)
        check(made, world, world.known(), layers)


def test_every_kernel_with_sinks_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch, major=9, num_sms=132)
    kinds = product(
        (64, 128), (torch.bfloat16, torch.float16), (torch.bfloat16, torch.float8_e4m3fn), (-1, 127)
    )
    names = {
        _sink_variant(
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
    }
    assert len(names) == 16


def test_a_kernel_without_sinks_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch, major=9, num_sms=1)
    world = random_pass("verify")
    with pytest.raises(AssertionError, match="leave them out"):
        world.attend(UnsplitDecode(CPU), world.uniform(), SINKS)


@pytest.mark.parametrize("layers", [LAYERS, [*SINKS, *SINKS]], ids=["plain", "sinks"])
def test_the_paged_wrapper_plans_once_for_each_window_of_a_pass(
    monkeypatch: pytest.MonkeyPatch, layers: list[LayerAttention]
) -> None:
    """Planning waits for the device: layers that take turns must not make each other plan again."""
    fake_flashinfer.install(monkeypatch, major=9, num_sms=132)
    world, made = random_pass("prefill"), FlashInferBackend(CPU)
    before = BatchPrefillWithPagedKVCacheWrapper.plans
    for passes in (1, 2):
        world.attend(made, world.known(), layers)
        assert BatchPrefillWithPagedKVCacheWrapper.plans - before == passes * len(set(WINDOWS))


def test_a_window_holds_the_row_itself() -> None:
    with pytest.raises(AssertionError, match="0"):
        LayerAttention(index=0, scale=1.0, window=0)


FP8 = torch.float8_e4m3fn
SCALES = ((0.7, 1.9), (1.3, 0.4), (1.0, 1.0), (0.011, 3.1))

FP8_LAYERS = [
    LayerAttention(
        index=i, scale=HEAD_DIM**-0.5, window=window, sinks=sinks, k_scale=k_scale, v_scale=v_scale
    )
    for i, ((k_scale, v_scale), window, sinks) in enumerate(
        product(SCALES, (None, 16), (None, torch.linspace(-1, 3, 4)))
    )
]

PLAIN = [layer for layer in FP8_LAYERS if layer.sinks is None]


@cache
def fp8_pass(shape: str) -> PagedPass:
    world = random_pass(shape)
    return replace(world, keys=world.keys.to(FP8), values=world.values.to(FP8))


@cache
def multiplied(world: PagedPass, layer: LayerAttention) -> PagedPass:
    return replace(
        world, keys=world.keys.float() * layer.k_scale, values=world.values.float() * layer.v_scale
    )


def check_fp8(backend: Backend, world: PagedPass, layout: Layout, layers: list[LayerAttention]) -> None:
    for layer, out in zip(layers, world.attend(backend, layout, layers), strict=True):
        want = multiplied(world, layer).expected(layer)
        torch.testing.assert_close(out[: len(want)], want, atol=1e-5, rtol=1e-5)
        assert out.isfinite().all()


@pytest.mark.parametrize("backend", [SdpaBackend, StaticSdpaBackend], ids=lambda backend: backend.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_pages_by_sdpa(backend: type[Backend], shape: str) -> None:
    world = fp8_pass(shape)
    check_fp8(backend(CPU), world, world.known(), FP8_LAYERS)
    check_fp8(backend(CPU), world, world.packed(), FP8_LAYERS)


@pytest.mark.parametrize("call", CALLS)
def test_every_call_of_trtllm_with_fp8_pages(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    major, num_sms, shape, kind = CALLS[call]
    fake_flashinfer.install(monkeypatch, major=major, num_sms=num_sms)
    world, made = fp8_pass(shape), TrtllmBackend(CPU)
    layout = world.packed(num_padding=3) if kind == "packed" else getattr(world, kind)()
    for _ in range(2):  # what the first pass has planned serves the second
        check_fp8(made, world, layout, FP8_LAYERS)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_paged_wrapper_with_fp8_pages(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    fake_flashinfer.install(monkeypatch, major=9, num_sms=132)
    world, made = fp8_pass(shape), FlashInferBackend(CPU)
    check_fp8(made, world, world.packed(num_padding=3), FP8_LAYERS)
    check_fp8(made, world, world.known(), FP8_LAYERS)


@pytest.mark.parametrize("shape", ["decode", "verify"])
def test_xqa_never_rounds_queries_to_fp8(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """FlashInfer's kernel for Hopper does; its ragged call always runs the other one."""
    fake_flashinfer.install(monkeypatch, major=9, num_sms=1)
    world = fp8_pass(shape)

    def uniform_call(*args: object, **kwargs: object) -> None:
        raise AssertionError("not with FP8 pages")

    monkeypatch.setattr(sys.modules["flashinfer"], "trtllm_batch_decode_with_kv_cache", uniform_call)
    check_fp8(TrtllmBackend(CPU), world, world.uniform(), FP8_LAYERS)


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
        spec=KVSpec(num_planes=2, layers=((2, HEAD_DIM),) * len(layers)),
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
