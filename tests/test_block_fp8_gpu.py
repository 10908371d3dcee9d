"""On an H100: GEMMs of block FP8 by DeepGEMM's kernel equal float64 of what was rounded, for every tile."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.config import SamplingParams
from specgen.engine.build import prefill_logits
from specgen.ops import bind_ops, block_fp8
from specgen.ops.fp8 import dequantised
from specgen.ops.reference import activate_and_mul
from specgen.ops.weight import GROUP, Weight
from tests.engines import Pair, config_of, generate, load_pair, random_requests
from tests.marks import in_turn
from tests.test_fp8_gpu import a_weight
from tests.test_gpu import EXACT
from tests.tiny_checkpoints import write_head, write_target
from tests.tiny_fp8 import quantize

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and block_fp8.can_run(CUDA, GROUP, GROUP)),
        reason="needs compute capability 9.0, FlashInfer and a compiler",
    ),
]
ROWS = [1, 2, 3, 5, 31, 64, 65, 96, 127, 128, 129, 160, 255, 320, 1000, 1024, 1025, 2048]
SHAPES = [(128, 128), (384, 256), (1024, 4096), (6144, 4096), (4096, 1152)]
HALF: dict[str, Any] = {**EXACT, "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def inputs(rows: int, width: int) -> Tensor:
    """Groups of very different size, so that one's scale in the place of another is seen."""
    spread = torch.exp2(torch.randint(-6, 7, (rows, width // GROUP, 1), device=CUDA).float())
    return (torch.randn(rows, width // GROUP, GROUP, device=CUDA) * spread).flatten(1).bfloat16()


def gemm(x: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
    """By the kernel, and in float64 of the same rounded inputs."""
    from specgen.ops.fp8_kernels import rounded_rows

    rows = rounded_rows(x, None, GROUP, multiple=block_fp8.ROWS)
    rows.data.view(torch.uint8)[len(x) :] = 0x7F  # NaN: rows that there are not change no other
    got = block_fp8.block_fp8_linear(rows.data, rows.scale, weight.data, weight.scale[::GROUP].contiguous())
    wide = (rows.data.double() * rows.scale.double().repeat_interleave(GROUP, 1))[: len(x)]
    return got[: len(x)], wide @ dequantised(weight).double().T


@in_turn("rows", ROWS)
@in_turn("shape", SHAPES)
def test_gemms(shape: tuple[int, int], rows: int) -> None:
    weight = a_weight("group", *shape)
    got, exact = gemm(inputs(rows, shape[1]), weight)
    assert got.dtype == torch.bfloat16
    # each row is as far off as rounding to bfloat16, and as the few bits that tensor cores keep of 128 terms
    error = (got.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 2**-8 + 1e-3, error.max()


@in_turn("block_out", block_fp8._BLOCKS_OUT)
@in_turn("rows", [70, 200, 1024])
def test_every_tile_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, rows: int, block_out: int) -> None:
    """A row's sums are made in one order whatever the tile, and whatever the other rows."""
    weight, x = a_weight("group", 1280, 1024), inputs(rows, 1024)
    right, _ = gemm(x, weight)
    monkeypatch.setattr(block_fp8, "tile", lambda *given: (block_out, 1))
    assert torch.equal(gemm(x, weight)[0], right)
    assert torch.equal(gemm(x[:66], weight)[0], right[:66])
    if block_out == 128:
        monkeypatch.setattr(block_fp8, "tile", lambda *given: (128, 2))
        assert torch.equal(gemm(x, weight)[0], right)


@in_turn("rows", [65, 96, 320, 1000])
def test_layers_take_it_and_repeat_exactly_in_graphs(rows: int) -> None:
    ops = bind_ops(CUDA, torch.bfloat16)
    weight, gate_up = a_weight("group", 512, 1024), a_weight("group", 768, 1024)
    linear, gated = ops.linear(weight), ops.gated_linear(gate_up, activation="gelu tanh")
    x, later = inputs(rows, 1024), inputs(rows, 1024)
    linear(x), gated(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, halves = linear(x), gated(x)
    for given in (later, torch.zeros_like(x), later):
        x.copy_(given)
        graph.replay()
        right, exact = gemm(given, weight)
        assert torch.equal(found, right)
        assert torch.equal(linear(given), right)
        assert torch.equal(ops.linear_parts(weight)(given)[0], right)
        both = gemm(given, gate_up)[0]
        assert torch.equal(gated(given), halves)
        activated = activate_and_mul("gelu tanh", both.float())
        torch.testing.assert_close(halves, activated.bfloat16(), rtol=0.02, atol=1e-2)
    assert exact.any()


@in_turn("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_so_and_in_its_row(bad: float) -> None:
    weight, x = a_weight("group", 512, 1024), inputs(130, 1024)
    x[129, 5] = bad
    got, _ = gemm(x, weight)
    assert not got[129].isfinite().any()
    assert got[:129].isfinite().all()


def test_other_weights_stay_with_the_other_kernels() -> None:
    ops, x = bind_ops(CUDA, torch.bfloat16), inputs(100, 1024)
    for weight in (
        a_weight("group", 192, 1024),
        a_weight("group", 512, 1024, torch.randn(512, device=CUDA).bfloat16()),
    ):
        y = ops.linear(weight)(x)
        from specgen.ops.fp8 import rounded

        exact = rounded(x, weight).double() @ dequantised(weight).double().T
        exact = exact if weight.bias is None else exact + weight.bias.double()
        assert (y.double() - exact).norm() / exact.norm() < 2**-8 + 2e-3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("block")
    config = write_target(folder / "target", "qwen3", hidden_size=256, head_dim=64, num_layers=3)
    quantize(folder / "target", "block")
    write_head(folder / "drafter", config)
    return folder


def test_a_whole_model(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits after long prompts are those of the other kernels; graphs of 80 and more rows change no text."""
    requests = random_requests(12, 128, SamplingParams(max_tokens=24), lengths=(80, 180))

    def logits(pair: Pair) -> Tensor:
        after = prefill_logits(config_of(pair, **HALF), pair.models)
        return torch.stack([after(request.prompt_token_ids).cpu() for request in requests])

    half = load_pair(path, torch.bfloat16, "cuda")
    calls: list[int] = []
    linear = block_fp8.block_fp8_linear
    monkeypatch.setattr(
        block_fp8, "block_fp8_linear", lambda x, *rest: calls.append(len(x)) or linear(x, *rest)
    )
    got = logits(half)
    assert len(calls) == len(requests) * 3 * 4, "every GEMM of 3 layers"
    settings = HALF | {"num_spec_tokens": 4, "max_batch_size": 32}
    many = random_requests(40, 128, SamplingParams(max_tokens=24))
    graphs, eager = (generate(half, many, cuda_graphs=each, **settings) for each in ("step", "off"))
    equal = sum(eager.texts[name] == text for name, text in graphs.texts.items())
    assert equal >= 36, "of 40; other numbers of rows round otherwise"
    monkeypatch.setattr(block_fp8, "FEWEST_ROWS", 1 << 20)
    calls.clear()
    right = logits(half)
    assert not calls
    error = (got - right).norm(dim=1) / right.norm(dim=1)
    assert error.median() < 0.1, error
