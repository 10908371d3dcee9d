"""On an H100 or H200: GEMMs in bfloat16; those in FP8 are in test_fp8_gpu.py. 20 s, compiled."""

import pytest
import torch
from torch import Tensor

from specgen.ops import bind_ops
from specgen.ops.hopper_linear import FEWEST_ROWS, MOST_ROWS, hopper_linear, hopper_linear_parts
from specgen.ops.jit_modules import runs_on
from specgen.ops.weight import Weight

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not runs_on(CUDA),
        reason="needs an NVIDIA GPU of capability 9.0",
    ),
]
BF16 = torch.bfloat16
ROWS = [1, 6, 16, 17, 32, 40, 48, 63, 64, 65, 96, 97, 127, 128, 160, 161, 191, 192, 193, 400]


def inputs(rows: int, half: int, width: int, *, bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    torch.manual_seed(0)
    x = torch.randn(rows, width, device=CUDA).to(BF16)
    weight = (torch.randn(2 * half, width, device=CUDA) / width**0.5).to(BF16)
    return x, weight, torch.randn(2 * half, device=CUDA).to(BF16) if bias else None


def expected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    gate, up = y.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("half", "width", "bias"), [(64, 64, False), (192, 1024, True), (14336, 4096, False)]
)
def test_gate_and_up(half: int, width: int, bias: bool, rows: int) -> None:
    """Every row, output and block of inputs; the same from run to run, also while graphs replay."""
    x, weight, add = inputs(rows, half, width, bias=bias)
    exact, y = expected(x, weight, add), hopper_linear(x, weight, bias=add, gated=True)
    assert (y.double() - exact).norm() < 0.006 * exact.norm()
    torch.testing.assert_close(y.double(), exact, rtol=0.03, atol=0.01 * float(exact.abs().max()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [hopper_linear(x, weight, bias=add, gated=True) for _ in range(3)]
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(each, y) for each in captured)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("out", "width", "bias"), [(128, 64, True), (384, 1024, True), (4096, 4096, False), (4096, 14336, False)]
)
def test_sums_of_parts(out: int, width: int, bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, width, device=CUDA).to(BF16)
    weight = (torch.randn(out, width, device=CUDA) / width**0.5).to(BF16)
    add = torch.randn(out, device=CUDA).to(BF16) if bias else None
    exact = x.double() @ weight.double().T + (0 if add is None else add.double())
    parts = hopper_linear_parts(x, weight, add)
    assert parts.shape[1:] == (rows, out)
    assert len(parts) in (1, 2, 4)
    torch.testing.assert_close(parts.double().sum(0), exact, rtol=1e-4, atol=2e-4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [hopper_linear_parts(x, weight, add) for _ in range(3)]
    graph.replay()
    assert all(torch.equal(each, parts) for each in captured)


def test_models_use_it_between_few_and_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def counted(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        used.append(len(x))
        return hopper_linear(x, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("specgen.ops.cuda.hopper_linear", counted)
    gated = bind_ops(CUDA, BF16).gated_linear(Weight(data=inputs(1, 256, 512, bias=False)[1]))
    for rows in (FEWEST_ROWS - 1, FEWEST_ROWS, MOST_ROWS, MOST_ROWS + 1):
        x, weight, _ = inputs(rows, 256, 512, bias=False)
        exact = expected(x, weight, None)
        assert (gated(x).double() - exact).norm() < 0.006 * exact.norm()
    assert used == [FEWEST_ROWS, MOST_ROWS]


def test_what_is_not_a_number_stays_in_its_row() -> None:
    x, weight, _ = inputs(160, 256, 512, bias=False)
    x[7, 3] = float("nan")
    y = hopper_linear(x, weight, gated=True)
    assert y[7].isnan().all()
    assert y[:7].isfinite().all()
    assert y[8:].isfinite().all()
