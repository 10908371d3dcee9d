"""On an NVIDIA GPU: FlashInfer's backends equal the float32 reference on the same values."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from specgen.attention import Backend, LayerAttention, fa3
from specgen.attention.flashinfer_paged import FlashInferBackend
from specgen.attention.hopper import HopperBackend
from specgen.attention.sdpa import SdpaBackend
from specgen.attention.trtllm import TrtllmBackend
from specgen.kv.layout import HostLens, Layout
from specgen.ops.jit_modules import Module, compile_missing
from tests.marks import in_turn, on_gpu

pytestmark = on_gpu()
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
# relative error of a row: kernels round probabilities and outputs to the model's dtype; with FP8 pages some round the
# output again when they multiply it by the scale of values
TOLERANCES = {BF16: 1.5e-2, FP16: 3e-3, FP8: 2e-2}
K_SCALE, V_SCALE = 0.7, 2.6  # of FP8 pages
STALE = 100.0  # left by an earlier sequence in the unused slots of a last page


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pass: the rows and the positions of each sequence, and what the model and its cache are like."""

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    group: int = 4
    num_kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype | None = None  # None: dtype

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.kv_dtype or self.dtype]

    def __str__(self) -> str:
        kv = "-fp8kv" if self.kv_dtype else ""
        lens = sorted(set(self.query_lens))
        return (
            f"b{len(self.query_lens)}-q{'.'.join(map(str, lens))}-to{max(self.kv_lens)}-g{self.group}"
            f"-d{self.head_dim}-p{self.page_size}-{str(self.dtype)[6:]}{kv}"
        )


def lens(batch: int, longest: int, query_len: int) -> tuple[int, ...]:
    """KV lengths around every relevant boundary, random ones, and the longest."""
    borders = [16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 300, 511, 513]
    rng = random.Random(batch * longest + query_len)
    sampled = [rng.choice([rng.choice(borders), rng.randint(1, longest)]) for _ in range(batch - 1)]
    return tuple(max(query_len, min(n, longest)) for n in [longest, *sampled])


def uniform(batch: int, query_len: int, longest: int, **model) -> Case:
    return Case(query_lens=(query_len,) * batch, kv_lens=lens(batch, longest, query_len), **model)


def ragged(query_lens: Sequence[int], longest: int, **model) -> Case:
    kv_lens = lens(len(query_lens), longest, max(query_lens))
    return Case(query_lens=tuple(query_lens), kv_lens=kv_lens, **model)


UNIFORM = [  # every value of batch, query length, context, page, group, head size and dtype meets most others
    uniform(1, 1, 300, page_size=64),
    uniform(130, 5, 700, page_size=64),
    uniform(8, 1, 32_768, page_size=16),
    uniform(8, 5, 32_767, page_size=16),
    uniform(33, 5, 513, page_size=32),
    uniform(64, 1, 1025, page_size=32),
    uniform(3, 9, 65, group=1, dtype=FP16, num_kv_heads=8),
    uniform(17, 1, 2049, group=8, head_dim=64, page_size=64, dtype=FP16),
    uniform(5, 3, 129, head_dim=64, page_size=32),
    uniform(2, 8, 32_768, group=1, head_dim=64, page_size=64),
    uniform(33, 6, 257, group=8, page_size=32, dtype=FP16),
    uniform(4, 4, 48, group=8, head_dim=64, dtype=FP16),
    uniform(1, 7, 32_000, group=8, page_size=64, num_kv_heads=1),
    uniform(130, 2, 31, group=1, page_size=32),
    uniform(2, 17, 400, group=8),
    uniform(16, 1, 900, page_size=64, kv_dtype=FP8),
    uniform(6, 5, 600, page_size=64, kv_dtype=FP8),
    uniform(9, 9, 300, group=8, head_dim=64, dtype=FP16, kv_dtype=FP8),
    uniform(
        130, 1, 700, page_size=64, kv_dtype=FP8
    ),  # the next fill the GPU with a block per sequence and KV head
    uniform(130, 5, 700, page_size=64, kv_dtype=FP8),
    uniform(3, 5, 32_768, group=8, page_size=64, kv_dtype=FP8),  # 40 rows of a KV head
]
RAGGED = [
    ragged([2, 1], 40),
    ragged([5, 1, 3, 5, 2], 32_768, page_size=64),
    ragged([1, 1, 1, 4], 300, group=8, head_dim=64, page_size=32, dtype=FP16),
    ragged([1 + i * 7 % 5 for i in range(130)], 600, page_size=64),
    ragged([9, 1, 2, 9, 5, 8], 257, group=8),
    ragged([2, 1, 2], 70, group=1, head_dim=64, page_size=64),
    ragged([5, 1, 2, 4], 700, page_size=64, kv_dtype=FP8),
    ragged([1 + i * 7 % 5 for i in range(130)], 600, group=8, page_size=64, kv_dtype=FP8),
]
PREFILL = [
    ragged([33, 1, 16, 300], 300),
    ragged([1000, 24, 1024], 4096, page_size=64),
    ragged([700, 5], 900, group=8, head_dim=64, page_size=32, dtype=FP16),
    ragged([256, 31, 2], 512, group=1, head_dim=64, page_size=64),
    ragged([128, 65], 400, page_size=64, kv_dtype=FP8),
    ragged([1000, 24, 1024], 4096, group=8, page_size=64, kv_dtype=FP8),
]
FLASHINFER = [
    case
    for case in UNIFORM + RAGGED
    if (case.dtype, case.head_dim, case.kv_dtype)
    in {(BF16, 128, None), (BF16, 64, None), (FP16, 64, None), (BF16, 128, FP8)}
]
WIDE = {  # heads of 512, on a kernel that takes all passes
    "uniform": [
        uniform(1, 1, 300, group=16, num_kv_heads=1, head_dim=512, page_size=64),
        uniform(1, 5, 32_767, group=16, num_kv_heads=1, head_dim=512, page_size=64),
        uniform(8, 5, 3000, group=8, head_dim=512, page_size=64),
        uniform(33, 2, 700, group=8, num_kv_heads=4, head_dim=512, page_size=16),
        uniform(130, 1, 700, group=4, head_dim=512, page_size=64, dtype=FP16),
        uniform(6, 5, 900, group=8, head_dim=512, page_size=64, kv_dtype=FP8),
    ],
    "packed": [
        ragged([5, 1, 3, 5, 2], 3000, group=16, num_kv_heads=1, head_dim=512, page_size=64),
        ragged([1 + i * 7 % 5 for i in range(130)], 600, group=8, head_dim=512, page_size=64),
    ],
    "prefill": [
        ragged([33, 1, 16, 300], 300, group=8, head_dim=512, page_size=64),
        ragged([1000, 24, 1024], 4096, group=16, num_kv_heads=1, head_dim=512, page_size=64),
    ],
}
WINDOWS = (128, None, 16, 1000, 1, 128)  # of the layers of one pass
WINDOWED = {
    "uniform": [
        uniform(33, 1, 3000, page_size=64),
        uniform(3, 1, 3000, page_size=64, head_dim=64),
        uniform(4, 5, 3000, page_size=64),
        uniform(40, 5, 3000, page_size=64),
        uniform(4, 5, 3000, page_size=64, head_dim=64),
        uniform(130, 5, 3000, page_size=64),
        uniform(130, 5, 700, page_size=64, head_dim=64),
        uniform(2, 17, 2000, group=8),
        uniform(6, 5, 3000, page_size=64, kv_dtype=FP8),
        uniform(6, 1, 3000, page_size=64, kv_dtype=FP8),
    ],
    "packed": [
        ragged([5, 1, 3, 5, 2], 3000, page_size=64),
        ragged([1 + i * 7 % 5 for i in range(60)], 2000, page_size=64, head_dim=64),
        ragged([5, 1, 2, 4], 3000, page_size=64, kv_dtype=FP8),
    ],
    "prefill": [
        ragged([33, 1, 16, 300], 300),
        ragged([1000, 24, 1024], 3000, page_size=64),
        ragged([700, 5], 900, page_size=64, head_dim=64),
        ragged([700, 5], 900, page_size=64, kv_dtype=FP8),
    ],
}


class World:
    """Random pages and queries for a case, with NaN wherever no sequence may read."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.kv_dtype = case.kv_dtype or case.dtype
        counts = [-(-n // case.page_size) for n in case.kv_lens]
        num_pages = sum(counts) + 8
        shape = (num_pages, case.page_size, case.num_kv_heads, case.head_dim)
        generator = torch.Generator("cuda").manual_seed(num_pages)
        order = (torch.randperm(num_pages - 1, generator=generator, device="cuda") + 1).int()
        self.tables = torch.zeros(len(counts), max(counts) + 3, dtype=torch.int32, device="cuda")
        self.keys, self.values = (torch.full(shape, torch.nan, device="cuda") for _ in "kv")
        for row, (count, length) in enumerate(zip(counts, case.kv_lens, strict=True)):
            pages, order = order[:count], order[count:]
            self.tables[row, :count] = pages
            for cache in (self.keys, self.values):
                part = torch.randn(count * case.page_size, *shape[2:], generator=generator, device="cuda")
                part[length:] = STALE
                cache[pages] = part.view(count, *shape[1:])
        self.keys, self.values = self.keys.to(self.kv_dtype), self.values.to(self.kv_dtype)
        num_rows = sum(case.query_lens)
        num_heads = case.group * case.num_kv_heads
        self.q = torch.randn(num_rows, num_heads, case.head_dim, generator=generator, device="cuda").to(
            case.dtype
        )

    def host(self) -> HostLens:
        case = self.case
        starts = tuple(n - q for n, q in zip(case.kv_lens, case.query_lens, strict=True))
        return HostLens(starts=starts, query_lens=case.query_lens)

    def uniform(self) -> Layout:
        starts = torch.tensor(self.host().starts, device="cuda")
        return Layout.uniform(self.tables, starts, self.case.query_lens[0], self.case.page_size)

    def packed(self) -> Layout:
        """A ragged layout known only on the device, with the same capacity for every sequence."""
        longest = max(self.case.query_lens)
        return replace(self.prefill(), host=None, num_rows=longest * len(self.tables), max_query_len=longest)

    def prefill(self) -> Layout:
        return Layout.ragged(self.tables, *self.lens(), self.case.page_size)

    def lens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.host().starts, self.host().query_lens

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values in float32, as they were before they were stored; what is NaN there is 0."""
        scales = (K_SCALE, V_SCALE) if self.kv_dtype == FP8 else (1.0, 1.0)
        return tuple(  # type: ignore[return-value]
            cache.float().nan_to_num() * scale
            for cache, scale in zip((self.keys, self.values), scales, strict=True)
        )

    def reference(self, window: int | None = None) -> Tensor:
        keys, values = self.dense()
        kernel = SdpaBackend(torch.device("cuda")).plan(self.prefill())
        return kernel(one_layer(self.q, window), self.q.float(), keys, values)


def one_layer(q: Tensor, window: int | None = None) -> LayerAttention:
    return LayerAttention(index=0, scale=q.shape[-1] ** -0.5, window=window, k_scale=K_SCALE, v_scale=V_SCALE)


def attend(backend: Backend, world: World, layout: Layout) -> Tensor:
    """The rows of the case's sequences; every element not written shows as NaN."""
    return attend_layers(backend, world, layout, (None,))[0]


def attend_layers(
    backend: Backend, world: World, layout: Layout, windows: Sequence[int | None]
) -> list[Tensor]:
    """``attend`` for layers of one pass with those windows."""
    q = world.q
    if len(q) < layout.num_rows:
        q = torch.cat((q, torch.full_like(q[:1], torch.nan).expand(layout.num_rows - len(q), -1, -1)))
    kernel = backend.plan(layout)
    poison = [torch.full_like(q, torch.nan) for _ in range(3)]
    del poison  # its memory is reused for the kernel's output
    return [
        kernel(one_layer(q, window), q, world.keys, world.values)[: len(world.q)].clone()
        for window in windows
    ]


def error(out: Tensor, expected: Tensor, case: Case) -> float:
    """The largest relative error of a row of a head; infinite for NaN."""
    out, expected = (x.float().view(-1, case.head_dim) for x in (out, expected))
    return ((out - expected).norm(dim=1) / expected.norm(dim=1)).nan_to_num(torch.inf).max().item()


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Every kernel of this file, compiled in parallel: one by one they take many minutes.

    Each in its own directory: what FlashInfer's ``build_jit_specs`` has built is built again at first use.
    """
    from flashinfer.jit.attention.modules import gen_batch_prefill_module
    from flashinfer.jit.xqa import gen_xqa_module

    specs = []
    for cases, packed, windows in (
        (UNIFORM, False, [False]),
        (RAGGED, True, [False]),
        (WINDOWED["uniform"], False, [False, True]),
        (WINDOWED["packed"], True, [False, True]),
    ):
        for case, window in product(cases, windows):
            kv = case.kv_dtype or case.dtype
            shape = (case.dtype, kv, case.page_size, case.head_dim, case.group, window, case.dtype)
            longest = max(case.query_lens)
            ragged_call = packed or kv == FP8
            specs.append(gen_xqa_module(*shape, max(longest, 2) if ragged_call else longest, ragged_call))
    wrapped = [(case.dtype, case.kv_dtype or case.dtype, case.head_dim, False) for case in FLASHINFER]
    wrapped += [(BF16, BF16, head_dim, True) for head_dim in (64, 128)] + [(BF16, FP8, 128, True)]
    for dtype, kv, head_dim, window in wrapped:
        sizes = (head_dim, head_dim, 0, window, False, False)
        specs.append(gen_batch_prefill_module("fa2", dtype, kv, dtype, torch.int32, *sizes))
    with ThreadPoolExecutor() as pool:
        built = pool.map(lambda spec: spec.build_and_load(), {spec.name: spec for spec in specs}.values())
        compile_fa3((64, 128), BF16)
        list(built)


def compile_fa3(head_dims: Sequence[int], *dtypes: torch.dtype, sinks: bool = False) -> None:
    """FA3's kernels for these, with windows and without."""
    if torch.cuda.get_device_capability()[0] == 9:
        shapes = product(head_dims, dtypes, (False, True))
        compile_missing(
            Module(what="", spec=partial(fa3._spec, fa3_shape(dim, dtype, windowed=windowed, sinks=sinks)))
            for dim, dtype, windowed in shapes
        )


def fa3_shape(head_dim: int, dtype: torch.dtype, *, windowed: bool, sinks: bool = False) -> fa3._Shape:
    return fa3._Shape(
        paged=True, key_dim=head_dim, value_dim=head_dim, dtype=dtype, windowed=windowed, sinks=sinks
    )


@pytest.fixture(scope="module", params=[TrtllmBackend, HopperBackend], ids=lambda backend: backend.name)
def decoder(request: pytest.FixtureRequest) -> Backend:
    """Each backend whose calls can be captured."""
    majors = request.param.capabilities.compute_majors
    if torch.cuda.get_device_capability()[0] not in majors:
        pytest.skip(f"needs a GPU of compute capability {majors}")
    return request.param(torch.device("cuda"))


@pytest.fixture(scope="module")
def flashinfer() -> FlashInferBackend:
    return FlashInferBackend(torch.device("cuda"))


@in_turn("case", UNIFORM)
def test_uniform_decode_passes(decoder: Backend, case: Case) -> None:
    world = World(case)
    assert error(attend(decoder, world, world.uniform()), world.reference(), case) < case.tolerance


@in_turn("case", RAGGED)
def test_ragged_decode_passes(decoder: Backend, case: Case) -> None:
    world = World(case)
    assert error(attend(decoder, world, world.packed()), world.reference(), case) < case.tolerance


@in_turn("case", PREFILL)
def test_prefill(flashinfer: FlashInferBackend, case: Case) -> None:
    world = World(case)
    assert error(attend(flashinfer, world, world.prefill()), world.reference(), case) < case.tolerance


@in_turn("case", [c for c in PREFILL if (c.dtype, c.head_dim) == (BF16, 128)])
def test_prefill_on_the_device_specific_kernel(decoder: Backend, case: Case) -> None:
    world = World(case)
    assert error(attend(decoder, world, world.prefill()), world.reference(), case) < case.tolerance


@in_turn("case", FLASHINFER)
def test_flashinfer_wrapper_with_mixed_passes(flashinfer: FlashInferBackend, case: Case) -> None:
    world = World(case)
    for layout in (world.prefill(), world.packed()):
        assert error(attend(flashinfer, world, layout), world.reference(), case) < case.tolerance


def test_a_wrong_mask_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_visible(offsets: Tensor) -> Tensor:
        return torch.full((len(offsets), 1), -1, dtype=torch.int32, device="cuda").view(torch.uint16)

    monkeypatch.setattr("specgen.attention.trtllm.causal_mask", all_visible)
    for case, world in ((case, World(case)) for case in (UNIFORM[4], RAGGED[3])):
        layout = world.uniform() if case in UNIFORM else world.packed()
        out = attend(TrtllmBackend(torch.device("cuda")), world, layout)
        assert error(out, world.reference(), case) > 2 * case.tolerance


@in_turn("kind", ["uniform", "packed", "prefill"])
def test_wrong_scales_are_detected(decoder: Backend, flashinfer: FlashInferBackend, kind: str) -> None:
    """Each scale 10 % off, and the two swapped."""
    case = ragged([128, 65], 400, page_size=64, kv_dtype=FP8)
    if kind != "prefill":
        case = uniform(6, 5, 600, page_size=64, kv_dtype=FP8)
    world, layer = World(case), one_layer(torch.empty(1, 128))
    for backend in (decoder, flashinfer):
        kernel = backend.plan(getattr(world, kind)())
        for k_scale, v_scale in ((1.1 * K_SCALE, V_SCALE), (K_SCALE, 1.1 * V_SCALE), (V_SCALE, K_SCALE)):
            wrong = replace(layer, k_scale=k_scale, v_scale=v_scale)
            out = kernel(wrong, world.q, world.keys, world.values)
            assert error(out, world.reference(), case) > 1.5 * case.tolerance


def test_a_row_alone_is_the_row_of_a_verify_pass(decoder: Backend) -> None:
    """With FP8 pages both must be rounded alike, or speculation would change texts: no kernel rounds queries to FP8."""
    case = uniform(16, 5, 900, page_size=64, kv_dtype=FP8)
    world = World(case)
    together = attend(decoder, world, world.uniform()).view(16, 5, -1)
    starts = torch.tensor(world.host().starts, device="cuda")
    for row in range(5):
        layout = Layout.uniform(world.tables, starts + row, 1, 64)
        q = world.q.view(16, 5, -1, 128)[:, row].contiguous()
        alone = decoder.plan(layout)(one_layer(q), q, world.keys, world.values)
        assert error(alone, together[:, row], case) < TOLERANCES[BF16]


def check_windows(backend: Backend, case: Case, kind: str, windows: Sequence[int | None] = WINDOWS) -> None:
    """Layers of one pass, whose windows differ."""
    world = World(case)
    outs = attend_layers(backend, world, getattr(world, kind)(), windows)
    for window, out in zip(windows, outs, strict=True):
        assert error(out, world.reference(window), case) < case.tolerance, window


@in_turn(("kind", "case"), [(kind, case) for kind in WINDOWED for case in WINDOWED[kind]])
def test_windows(decoder: Backend, kind: str, case: Case) -> None:
    check_windows(decoder, case, kind)


@on_gpu(hopper=True)[1]
@in_turn(("kind", "case"), [(kind, case) for kind in WIDE for case in WIDE[kind]])
def test_wide_heads(kind: str, case: Case) -> None:
    check_windows(HopperBackend(torch.device("cuda")), case, kind, [None, 128, 1000])


@in_turn("case", WINDOWED["prefill"] + WINDOWED["packed"][:2])
def test_windows_of_the_flashinfer_wrapper(flashinfer: FlashInferBackend, case: Case) -> None:
    check_windows(flashinfer, case, "packed")


@on_gpu(hopper=True)[1]
def test_prefill_where_some_warps_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's template lets warps that are early copy what is no output yet: see fa3_prefill.cu."""
    late = partial(fa3._spec, LATE=1)
    sizes = {64: 8, 128: 8, 256: 2}  # KV heads: more tiles than there are blocks
    compile_missing(
        Module(what="", spec=partial(late, fa3_shape(head_dim, BF16, windowed=True))) for head_dim in sizes
    )
    monkeypatch.setattr(fa3, "_spec", late)
    for head_dim, num_kv_heads in sizes.items():
        for _ in range(5):
            check_windows(
                FlashInferBackend(torch.device("cuda"), "fa3"),
                ragged(
                    [700, 24, 1024], 3000, group=8, num_kv_heads=num_kv_heads, page_size=64, head_dim=head_dim
                ),
                "prefill",
                [1000, 128],
            )


def test_a_window_off_by_one_is_detected(decoder: Backend) -> None:
    """The tolerance tells a window of 16, 128 or 1000 from its neighbours, which are further off than it allows."""
    for case in (case for case in WINDOWED["uniform"] if len(case.query_lens) in {33, 40, 130}):
        world = World(case)
        windows = [window for window in (16, 128, 1000) if window < max(case.kv_lens)]
        outs = attend_layers(decoder, world, world.uniform(), windows)
        for window, out in zip(windows, outs, strict=True):
            for wrong in (window - 1, window + 1):
                assert error(out, world.reference(wrong), case) > 2 * case.tolerance, (window, wrong)


def capture(
    backend: Backend, layout: Layout, world: World, window: int | None = None
) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
    """A graph of one pass over ``layout``'s tensors, the queries it reads and the output it writes."""
    num_heads = world.case.group * world.case.num_kv_heads
    q = torch.zeros(layout.num_rows, num_heads, world.case.head_dim, dtype=world.case.dtype, device="cuda")
    graph = torch.cuda.CUDAGraph()
    fresh = replace(layout)  # cached tensors of the layout must be computed inside the graph
    layer = one_layer(q, window)
    backend.plan(replace(layout))(layer, q, world.keys, world.values)
    with torch.cuda.graph(graph):
        out = backend.plan(fresh)(layer, q, world.keys, world.values)
    return graph, q, out


REPLAYED = {
    "uniform": [(5,) * 8] * 4,
    "unsplit": [(5,) * 8] * 4,
    "packed": [(5, 1, 3, 5, 2, 1, 1, 4), (1,) * 8, (5,) * 8, (2, 1, 1, 1, 4, 5, 3, 1)],
}


@in_turn("mode", REPLAYED)
@in_turn(("num_padding", "window"), [(0, None), (3, None), (3, 128)])
@in_turn(("kv_dtype", "head_dim"), [(None, 128), (FP8, 128), (None, 512)])
def test_a_captured_graph_is_right_for_other_lengths_tables_and_offsets(
    decoder: Backend,
    mode: str,
    num_padding: int,
    window: int | None,
    kv_dtype: torch.dtype | None,
    head_dim: int,
) -> None:
    """Captured once at 8 sequences of up to 32,768 positions; padding sequences use page 0."""
    if head_dim not in (decoder.capabilities.head_dims or ()):
        return
    longest = 4096 if mode == "unsplit" else 32_768
    num_kv_heads = 20 if mode == "unsplit" else 2  # 160 blocks without splitting a sequence
    model = {"page_size": 64, "num_kv_heads": num_kv_heads, "kv_dtype": kv_dtype, "head_dim": head_dim}
    first = World(Case(query_lens=(5,) * 8, kv_lens=(longest,) * 8, **model))
    tables = torch.zeros(8, longest // 64, dtype=torch.int32, device="cuda")
    starts, query_lens = (torch.ones(8, dtype=torch.int64, device="cuda") for _ in range(2))
    layout = Layout.uniform(tables, starts, 5, 64)
    if mode == "packed":
        layout = replace(layout, uniform_q=None, ragged_lens=query_lens)
    graph, q, out = capture(decoder, layout, first, window)
    for turn, lens_of_turn in enumerate(REPLAYED[mode]):
        num_real = 8 - num_padding
        top = [longest - 7, 40, 3000, longest - 7][turn]
        case = ragged(lens_of_turn[:num_real], top, **model)
        world = World(case)
        tables.zero_(), starts.zero_(), query_lens.fill_(1)
        width = min(world.tables.shape[1], tables.shape[1])
        tables[:num_real, :width] = world.tables[:, :width]
        starts[:num_real] = torch.tensor(world.host().starts)
        query_lens[:num_real] = torch.tensor(case.query_lens)
        pages = world.keys.shape[0]
        for mine, theirs in ((first.keys, world.keys), (first.values, world.values)):
            mine.view(torch.uint8).zero_()
            mine[1:pages] = theirs[1:]
        q.fill_(1), out.fill_(torch.nan)
        q[: len(world.q)] = world.q
        for _ in range(3):
            graph.replay()
        assert error(out[: len(world.q)], world.reference(window), case) < case.tolerance
        assert out.isfinite().all()


def test_prefill_between_replays_of_the_longest_context(decoder: Backend) -> None:
    """8 x 32,768 positions: decode graph and prefill kernel in one process, each with its own workspace."""
    world = World(Case(query_lens=(5,) * 8, kv_lens=(32_768,) * 8, page_size=64))
    chunk = World(Case(query_lens=(512,) * 8, kv_lens=(8192,) * 8, page_size=64))
    layout = world.uniform()  # the graph reads its tensors
    graph, q, out = capture(decoder, layout, world)
    q.copy_(world.q)
    for _ in range(4):
        graph.replay()
        prefilled = attend(decoder, chunk, chunk.prefill())
    assert error(out, world.reference(), world.case) < world.case.tolerance
    assert error(prefilled, chunk.reference(), chunk.case) < chunk.case.tolerance


def test_plans_do_not_overwrite_each_other(flashinfer: FlashInferBackend) -> None:
    """Passes are queued behind a busy device, over two layouts and two windows alternately."""
    worlds = [World(PREFILL[0]), World(ragged([100, 1, 7, 90, 64], 900))]
    kernels = [flashinfer.plan(world.prefill()) for world in worlds]
    torch.cuda._sleep(200_000_000)
    turns = list(product([0, 1, 0], [None, 128]))
    outs = [
        kernels[turn](one_layer(world.q, window), world.q, world.keys, world.values)
        for turn, window in turns
        for world in [worlds[turn]]
    ]
    for (turn, window), out in zip(turns, outs, strict=True):
        assert error(out, worlds[turn].reference(window), worlds[turn].case) < TOLERANCES[BF16]


def test_no_host_sync(decoder: Backend) -> None:
    fp8 = uniform(6, 5, 3000, page_size=64, kv_dtype=FP8)
    worlds = [World(UNIFORM[1]), World(fp8), World(RAGGED[1]), World(PREFILL[1])]
    windows = (None, 128)
    for world, kind in zip(worlds, ("uniform", "uniform", "packed", "prefill"), strict=True):
        attend_layers(decoder, world, getattr(world, kind)(), windows)
    layouts = [worlds[0].uniform(), worlds[1].uniform(), worlds[2].packed(), worlds[3].prefill()]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for world, layout in zip(worlds, layouts, strict=True):
            attend_layers(decoder, world, layout, windows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
