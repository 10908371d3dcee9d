"""On an NVIDIA GPU: attention with sinks equals float32 torch, in prefill and decode, alone and replayed."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specgen.attention import Backend, LayerAttention
from specgen.attention.flashinfer_paged import FlashInferBackend, _PlanKey, _sink_variant
from specgen.attention.hopper import HopperBackend
from specgen.attention.trtllm import TrtllmBackend
from specgen.kv.layout import Layout
from tests.marks import in_turn, on_gpu
from tests.test_attention_gpu import (
    BF16,
    FP8,
    K_SCALE,
    V_SCALE,
    Case,
    World,
    compile_fa3,
    error,
    ragged,
    uniform,
)

pytestmark = on_gpu()
OSS = {"group": 8, "head_dim": 64, "page_size": 64}  # GPT-OSS, of whose 8 KV heads the cases have 2 or 8
WINDOWS = (128, None, 128, None, 16)  # of the layers of one pass
DECODE = {
    "uniform": [
        uniform(6, 1, 700, num_kv_heads=8, **OSS),
        uniform(6, 5, 700, num_kv_heads=8, **OSS),
        uniform(3, 1, 3000, **OSS),
        uniform(1, 5, 3000, **OSS),
        uniform(6, 1, 700, kv_dtype=FP8, **OSS),
        uniform(3, 5, 3000, kv_dtype=FP8, **OSS),
        uniform(130, 5, 700, **OSS),  # without sinks, a pass for the unsplit kernel
    ],
    "packed": [
        ragged([5, 1, 3, 5, 2], 3000, **OSS),
        ragged([1 + i * 7 % 5 for i in range(60)], 900, **OSS),
        ragged([5, 1, 3, 5, 2], 3000, kv_dtype=FP8, **OSS),
    ],
}
PREFILL = [
    ragged([33, 1, 16, 300], 300, **OSS),
    ragged([1000, 24, 1024], 3000, **OSS),
    ragged([1000, 24, 1024], 3000, kv_dtype=FP8, **OSS),
]
OTHER_HEAD = ragged([70, 5], 400, page_size=64)  # of 128 elements
FA2 = ((64, True, BF16), (64, False, BF16), (128, False, BF16), (64, True, FP8), (64, False, FP8))


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Every kernel of this file, compiled in parallel; see ``test_attention_gpu``."""
    from flashinfer.jit.attention.modules import gen_customize_batch_prefill_module
    from flashinfer.jit.xqa import gen_xqa_module

    specs = []
    for window in (False, True):
        for query_len, packed in ((1, False), (5, False), (5, True)):
            specs.append(gen_xqa_module(BF16, BF16, 64, 64, 8, window, BF16, query_len, packed))
        for query_len in (2, 5):
            specs.append(gen_xqa_module(BF16, FP8, 64, 64, 8, window, BF16, query_len, True))
    for head_dim, windowed, kv_dtype in FA2:
        heads = _PlanKey(
            num_heads=8,
            num_kv_heads=1,
            head_dim=head_dim,
            dtype=BF16,
            kv_dtype=kv_dtype,
            scale=1.0,
            window_left=127 if windowed else -1,
            sinks=True,
        )
        _, arguments, options = _sink_variant(heads, windowed=windowed)
        specs.append(gen_customize_batch_prefill_module("fa2", *arguments, **options))
    with ThreadPoolExecutor() as pool:
        built = pool.map(lambda spec: spec.build_and_load(), {spec.name: spec for spec in specs}.values())
        compile_fa3((64,), BF16, sinks=True)
        list(built)


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


def layers_of(case: Case, windows: Sequence[int | None] = WINDOWS) -> list[LayerAttention]:
    """Layers whose sinks range from far below to far above the sum of the scores, each in another order."""
    num_heads = case.group * case.num_kv_heads
    sinks = torch.linspace(-3, 9, num_heads, device="cuda")
    return [
        LayerAttention(
            index=i,
            scale=case.head_dim**-0.5,
            window=window,
            sinks=sinks.roll(3 * i),
            k_scale=K_SCALE,
            v_scale=V_SCALE,
        )
        for i, window in enumerate(windows)
    ]


def expected(world: World, layer: LayerAttention) -> Tensor:
    """[rows, Hq, D] in float32, sequence by sequence."""
    case, outs, first = world.case, [], 0
    for table, kv_len, query_len in zip(world.tables, case.kv_lens, case.query_lens, strict=True):
        pages = table[: -(-kv_len // case.page_size)].long()
        keys, values = (
            cache[pages].flatten(0, 1)[:kv_len].repeat_interleave(case.group, 1) for cache in world.dense()
        )
        scores = torch.einsum("qhd,khd->hqk", world.q[first : first + query_len].float(), keys) * layer.scale
        behind = torch.arange(kv_len - query_len, kv_len, device="cuda")[:, None] - torch.arange(
            kv_len, device="cuda"
        )
        seen = (behind >= 0) & (behind < (layer.window or kv_len))
        scores = scores.masked_fill(~seen, -torch.inf)
        column = layer.sinks.view(-1, 1, 1).expand(-1, query_len, 1)
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :kv_len]
        outs.append(torch.einsum("hqk,khd->qhd", weights, values))
        first += query_len
    return torch.cat(outs)


def attend(backend: Backend, world: World, layout: Layout, layers: Sequence[LayerAttention]) -> list[Tensor]:
    """Every layer of one pass; padding rows hold NaN."""
    spare = layout.num_rows - len(world.q)
    q = torch.cat((world.q, torch.full_like(world.q[:1], torch.nan).expand(spare, -1, -1)))
    kernel = backend.plan(layout)
    return [kernel(layer, q, world.keys, world.values)[: len(world.q)].clone() for layer in layers]


def check(backend: Backend, case: Case, kind: str) -> None:
    world, layers = World(case), layers_of(case)
    for layer, out in zip(layers, attend(backend, world, getattr(world, kind)(), layers), strict=True):
        assert error(out, expected(world, layer), case) < case.tolerance, layer.window


@in_turn(("kind", "case"), [(kind, case) for kind in DECODE for case in DECODE[kind]])
def test_decode(decoder: Backend, kind: str, case: Case) -> None:
    check(decoder, case, kind)


@in_turn("case", PREFILL)
def test_prefill(decoder: Backend, flashinfer: FlashInferBackend, case: Case) -> None:
    check(decoder, case, "prefill")
    check(flashinfer, case, "prefill")


@in_turn("case", [*DECODE["uniform"][:3], *DECODE["packed"][:1]])
def test_the_flashinfer_backend_decodes(flashinfer: FlashInferBackend, case: Case) -> None:
    check(flashinfer, case, "packed")


def test_two_sizes_of_heads_in_one_process(flashinfer: FlashInferBackend) -> None:
    for case in (PREFILL[0], OTHER_HEAD, PREFILL[0]):
        world, layers = World(case), layers_of(case, (None,))
        (out,) = attend(flashinfer, world, world.prefill(), layers)
        assert error(out, expected(world, layers[0]), case) < case.tolerance


def test_layers_with_and_without_sinks_take_turns(decoder: Backend) -> None:
    for case, kind in ((DECODE["uniform"][-1], "uniform"), (PREFILL[0], "prefill")):
        world, layers = World(case), layers_of(case, (None, 128))
        bare = [replace(layer, sinks=None) for layer in layers]
        outs = attend(decoder, world, getattr(world, kind)(), [layers[0], bare[0], layers[1], bare[1]])
        for layer, out in zip(layers, outs[::2], strict=True):
            assert error(out, expected(world, layer), case) < case.tolerance
        for layer, out in zip(bare, outs[1::2], strict=True):
            assert error(out, world.reference(layer.window), case) < case.tolerance


def test_sinks_of_another_head_are_detected(decoder: Backend) -> None:
    """The tolerance tells a head's sink from its neighbour's, which is 0.8 away, and from none."""
    for case, kind in (
        (DECODE["uniform"][2], "uniform"),
        (DECODE["packed"][0], "packed"),
        (PREFILL[0], "prefill"),
    ):
        world, (layer,) = World(case), layers_of(case, (None,))
        (out,) = attend(decoder, world, getattr(world, kind)(), [layer])
        for sinks in (layer.sinks.roll(1), layer.sinks - 0.4, torch.full_like(layer.sinks, -torch.inf)):
            assert error(out, expected(world, replace(layer, sinks=sinks)), case) > 2 * case.tolerance


@in_turn("mode", ["uniform", "packed"])
def test_a_captured_graph_is_right_for_other_lengths(decoder: Backend, mode: str) -> None:
    case = Case(query_lens=(5,) * 8, kv_lens=(4096,) * 8, **OSS)
    first, layers = World(case), layers_of(case)
    tables = torch.zeros(8, 64, dtype=torch.int32, device="cuda")
    starts, query_lens = (torch.ones(8, dtype=torch.int64, device="cuda") for _ in range(2))
    layout = Layout.uniform(tables, starts, 5, 64)
    if mode == "packed":
        layout = replace(layout, uniform_q=None, ragged_lens=query_lens)
    q = torch.zeros(40, 16, 64, dtype=BF16, device="cuda")
    warm = decoder.plan(replace(layout))
    for layer in layers:
        warm(layer, q, first.keys, first.values)
    graph, fresh = torch.cuda.CUDAGraph(), replace(layout)
    with torch.cuda.graph(graph):
        kernel = decoder.plan(fresh)
        outs = [kernel(layer, q, first.keys, first.values).clone() for layer in layers]
    for turn, longest in enumerate((4000, 40, 700)):
        lens = (5, 1, 3, 5, 2, 1, 1, 4) if mode == "packed" else (5,) * 8
        other = ragged(lens[turn:] + lens[:turn], longest, **OSS)
        world = World(other)
        tables.zero_()
        tables[:, : world.tables.shape[1]] = world.tables[:, :64]
        starts.copy_(torch.tensor(world.host().starts))
        query_lens.copy_(torch.tensor(other.query_lens))
        first.keys[: len(world.keys)], first.values[: len(world.values)] = world.keys, world.values
        q.fill_(1)
        q[: len(world.q)] = world.q
        graph.replay()
        for layer, out in zip(layers, outs, strict=True):
            assert error(out[: len(world.q)], expected(world, layer), other) < other.tolerance, layer.window
