"""On an NVIDIA GPU: the kernels of experts equal a float32 loop over experts, and read no expert in vain.

About four minutes with an empty cache of Triton's.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from specgen.checkpoints.checkpoint import load_target, open_checkpoint
from specgen.config import UserError
from specgen.models.llama import Llama
from specgen.models.mlp import Mixture
from specgen.ops import bind_ops, fp8
from specgen.ops.experts import Experts, ExpertsMap, Gating
from specgen.ops.weight import Weight
from tests.marks import in_turn, on_gpu
from tests.tiny_fp8 import quantize
from tests.tiny_hybrids import write_hybrid
from tests.tiny_latents import GLM, write_latent
from tests.tiny_llama4 import one_by_one, write_llama4

pytestmark = on_gpu()
CUDA, BF16, FP16 = torch.device("cuda"), torch.bfloat16, torch.float16
TOLERANCES = {BF16: 2e-2, FP16: 2e-3, torch.float32: 1e-5}
PLAIN = Gating()
GELU = Gating(activation="gelu tanh")
CLAMPED = Gating(alpha=1.702, shift=1.0, limit=7.0)
ROWS = [0, 1, 2, 5, 8, 16, 17, 32, 40, 64, 128, 160, 320, 640, 3000]
E4M3, NOT_A_NUMBER = torch.float8_e4m3fn, 0x7F  # of its bytes
Fp8 = Literal["static", "token", "group"]
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of MXFP4's low three bits; the fourth is the sign


@dataclass(frozen=True, kw_only=True)
class Shape:
    num_experts: int
    hidden: int
    inner: int
    k: int
    mxfp4: bool = False
    fp8: Fp8 | None = None
    gating: Gating = PLAIN
    dtype: torch.dtype = BF16

    def __str__(self) -> str:
        kind = "mxfp4" if self.mxfp4 else str(self.dtype).removeprefix("torch.")
        kind += f"-fp8-{self.fp8}" if self.fp8 else ""
        return f"{self.num_experts}x{self.hidden}x{self.inner}-top{self.k}-{kind}"


SMALL = [
    Shape(num_experts=8, hidden=320, inner=192, k=2),
    Shape(num_experts=8, hidden=320, inner=192, k=2, gating=GELU),
    Shape(num_experts=8, hidden=320, inner=192, k=2, dtype=torch.float32, gating=GELU),
    Shape(num_experts=8, hidden=320, inner=192, k=2, fp8="group", gating=GELU),
    Shape(num_experts=8, hidden=320, inner=192, k=2, dtype=FP16, gating=CLAMPED),
    Shape(num_experts=8, hidden=320, inner=192, k=2, dtype=torch.float32, gating=CLAMPED),
    Shape(num_experts=16, hidden=256, inner=96, k=3, gating=CLAMPED),
    Shape(num_experts=4, hidden=72, inner=40, k=1),
    Shape(num_experts=8, hidden=320, inner=192, k=2, mxfp4=True, gating=CLAMPED),
    Shape(num_experts=16, hidden=256, inner=96, k=3, mxfp4=True),
    Shape(num_experts=8, hidden=320, inner=192, k=2, fp8="group"),
    Shape(num_experts=8, hidden=320, inner=192, k=2, fp8="token"),
    Shape(num_experts=8, hidden=320, inner=192, k=2, fp8="static"),
    Shape(num_experts=16, hidden=256, inner=96, k=3, fp8="group", dtype=FP16),
    Shape(num_experts=4, hidden=200, inner=136, k=1, fp8="group", dtype=torch.float32, gating=CLAMPED),
    Shape(num_experts=4, hidden=200, inner=136, k=1, fp8="token", dtype=torch.float32),
    Shape(num_experts=4, hidden=200, inner=136, k=1, fp8="static", dtype=torch.float32),
]
LARGE = [
    Shape(num_experts=32, hidden=2880, inner=2880, k=4, gating=CLAMPED),
    Shape(num_experts=128, hidden=2048, inner=768, k=8),
    Shape(num_experts=128, hidden=2816, inner=704, k=8, gating=GELU),
    Shape(num_experts=32, hidden=2880, inner=2880, k=4, mxfp4=True, gating=CLAMPED),
    Shape(num_experts=128, hidden=2048, inner=768, k=8, fp8="group"),
    Shape(num_experts=128, hidden=2048, inner=768, k=8, fp8="token"),
    Shape(num_experts=64, hidden=2048, inner=1536, k=4, fp8="group"),
]


class World:
    """Random experts; ``dense`` are their matrices in float32."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.generator = torch.Generator(CUDA).manual_seed(shape.hidden + shape.inner)
        self.weights = (self._weight(2 * shape.inner, shape.hidden), self._weight(shape.hidden, shape.inner))
        self.dense = [dequantised(weight) for weight in self.weights]

    def _weight(self, num_out: int, width: int) -> Weight:
        shape = self.shape
        bias = None if shape.gating == PLAIN else self.normal(shape.num_experts, num_out)
        if shape.fp8:
            return self._in_fp8(num_out, width, bias)
        if not shape.mxfp4:
            data = self.normal(shape.num_experts, num_out, width) * width**-0.5
            return Weight(data=data.to(shape.dtype), bias=bias)
        data, scale = (
            torch.randint(
                low,
                high,
                (shape.num_experts, num_out, width // per),
                dtype=torch.uint8,
                device=CUDA,
                generator=self.generator,
            )
            for low, high, per in ((0, 256, 2), (116, 124, 32))
        )
        scale[:, :, 0] = torch.arange(num_out, device=CUDA) % 129  # every scale that is allowed
        return Weight(data=data, scale=scale, bias=bias, format="mxfp4")

    def _in_fp8(self, num_out: int, width: int, bias: Tensor | None) -> Weight:
        """Scales differ by up to 4, so that one in the place of another is seen."""
        shape, activations = self.shape, self.shape.fp8
        parts = 2 if width == shape.hidden else 1  # of gate and up both begin a block
        blocks, columns = (-(-num_out // parts // 128), -(-width // 128))
        sizes = (parts, blocks, columns) if activations == "group" else (parts, num_out // parts, 1)
        scale = torch.rand(shape.num_experts, *sizes, device=CUDA, generator=self.generator) * 3 + 1
        scale *= width**-0.5 / 150
        if activations == "group":
            scale = scale.repeat_interleave(128, 2)[:, :, : num_out // parts]
        values = torch.randn(shape.num_experts, num_out, width, device=CUDA, generator=self.generator)
        inputs = torch.linspace(0.0063, 0.0119, shape.num_experts, device=CUDA)
        return Weight(
            data=values.mul_(60).clamp_(-448, 448).to(E4M3),
            scale=scale.flatten(1, 2),
            bias=bias,
            format="fp8",
            activations=activations,
            input_scale=inputs if activations == "static" else None,
        )

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=CUDA, generator=self.generator).to(self.shape.dtype)

    @property
    def experts(self) -> Experts:
        gate_up, down = self.weights
        return Experts(gate_up=gate_up, down=down, gating=self.shape.gating)

    def loaded(self) -> ExpertsMap:
        return bind_ops(CUDA, self.shape.dtype).experts(self.experts)

    def rows(self, rows: int, among: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, experts from the first ``among`` and their weights; a fourth of the rows choose the same."""
        shape = self.shape
        among = among or shape.num_experts
        scores = torch.rand(rows, among, device=CUDA, generator=self.generator)
        scores[: rows // 4] = scores[:1]
        weights = torch.rand(rows, shape.k, device=CUDA, generator=self.generator).to(shape.dtype)
        return self.normal(rows, shape.hidden), scores.topk(shape.k).indices, weights

    def reference(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """What the experts return in sum, [rows, H] in float32, and the sum of its absolute values."""
        out = torch.zeros(len(x), self.shape.hidden, device=CUDA)
        size = out.clone()
        for expert in ids.unique().tolist():
            row, slot = (ids == expert).nonzero(as_tuple=True)
            gate, up = self._linear(0, expert, x[row]).chunk(2, -1)
            result = self._linear(1, expert, self.shape.gating(gate, up).to(x.dtype))
            part = result * weights[row, slot, None].float()
            out.index_add_(0, row, part)
            size.index_add_(0, row, part.abs())
        return out, size

    def _linear(self, which: int, expert: int, x: Tensor) -> Tensor:
        """In float32; of FP8 gate and up in the dtype of ``x``, in which they are gated before e4m3 rounds that."""
        weight, inputs = self.weights[which], x.float()
        if weight.input_scale is not None:
            inputs = fp8.through_e4m3(inputs, weight.input_scale[expert])
        elif self.shape.fp8:
            inputs = fp8.rounded(x, weight)
        out = inputs @ self.dense[which][expert].T
        out = out if weight.bias is None else out + weight.bias[expert].float()
        return out.to(x.dtype) if self.shape.fp8 and which == 0 else out


def dequantised(weight: Weight) -> Tensor:
    if weight.format == "plain":
        return weight.data.float()
    if weight.format == "fp8":
        return fp8.dequantised(weight)
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=CUDA)
    values = torch.stack((table[weight.data.int() & 15], table[weight.data.int() >> 4]), -1).flatten(-2)
    return values * torch.exp2(weight.scale.float() - 127).repeat_interleave(32, -1)


@pytest.fixture(scope="module")
def worlds() -> dict[str, World]:
    return {}


def world_of(worlds: dict[str, World], shape: Shape) -> World:
    if str(shape) not in worlds:
        worlds.clear()  # several of the large ones do not fit together
        worlds[str(shape)] = World(shape)
    return worlds[str(shape)]


def check(got: Tensor, reference: tuple[Tensor, Tensor], shape: Shape) -> None:
    """Against the size of the parts, which are rounded: their sum may be far smaller than they are."""
    expected, size = reference
    assert got.shape[1:] == expected.shape
    if len(expected):
        error, tolerance = got.float().sum(0) - expected, TOLERANCES[shape.dtype]
        relative = error.norm(dim=1) / size.norm(dim=1)
        if (
            shape.fp8
        ):  # a last bit may move the scale of a group, and with it all that is rounded; few rows have it
            assert len(expected) < 16 or relative.median() < 1e-2
            tolerance = 6e-2
        assert relative.max() < tolerance
        usual = size.square().mean(0).sqrt() + size.square().mean(1, keepdim=True).sqrt()
        assert (error.abs() <= tolerance * (2 * size + 5 * usual)).all()


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@in_turn("shape", SMALL + LARGE)
def test_every_number_of_rows(worlds: dict[str, World], shape: Shape) -> None:
    world = world_of(worlds, shape)
    experts = world.loaded()
    for rows in ROWS:
        inputs = world.rows(rows)
        check(experts(*inputs), world.reference(*inputs), shape)


@in_turn("shape", SMALL)
def test_all_rows_may_choose_the_same(worlds: dict[str, World], shape: Shape) -> None:
    world = world_of(worlds, shape)
    experts = world.loaded()
    for rows in (5, 16, 17, 100, 700):
        inputs = world.rows(rows, among=shape.k)
        check(experts(*inputs), world.reference(*inputs), shape)


@in_turn("shape", [shape for shape in SMALL + LARGE if not shape.mxfp4 and shape.k > 1])
def test_all_rows_may_choose_the_last_as_well(worlds: dict[str, World], shape: Shape) -> None:
    """As they do a shared expert, behind those that each has chosen."""
    world = world_of(worlds, shape)
    experts, last = world.loaded(), shape.num_experts - 1
    for rows in ROWS:
        x, ids, weights = world.rows(rows, among=last)
        inputs = (
            x,
            torch.cat((ids, torch.full_like(ids[:, :1], last)), 1),
            torch.cat((weights, weights[:, :1]), 1),
        )
        check(experts(*inputs), world.reference(*inputs), shape)


@pytest.mark.parametrize("form", [None, "block", "dynamic", "modelopt"])
@pytest.mark.parametrize("family", ["hybrid", "glm", "llama-4"])
def test_mixtures_with_a_shared_expert_are_those_of_torch(
    tmp_path: Path, family: str, form: str | None
) -> None:
    """In bfloat16; of the same experts, as logits that round otherwise may choose others."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 1024, "moe_intermediate_size": 128, "std": 0.04}
    if family == "glm":
        write_latent(tmp_path, **sizes | GLM | {"intermediate_size": 256})
    elif family == "llama-4":
        del sizes["moe_intermediate_size"]
        write_llama4(tmp_path, head_dim=64, intermediate_size=128, intermediate_size_mlp=256, **sizes)
        one_by_one(tmp_path)
    else:
        sizes |= dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 128)
        layers = {"layer_types": None, "full_attention_interval": 2}
        write_hybrid(tmp_path, "Qwen3NextForCausalLM", shared_expert_intermediate_size=128, **sizes, **layers)
    if form is not None:
        quantize(tmp_path, form)
    mine, right = (mixture_of(tmp_path, device) for device in (CUDA, torch.device("cpu")))
    among = family != "llama-4"  # which weighs the inputs of the others
    assert (mine.beside is None) is (right.beside is None) is among
    torch.manual_seed(0)
    for rows in (1, 5, 16, 17, 70, 400):
        x = torch.randn(rows, 1024).bfloat16()
        ids, weights = right.choice(right.router(x))
        found = mine.choice(mine.router(x.cuda()))
        assert torch.equal(found[0][:, mine.num_chosen :].cpu(), ids[:, mine.num_chosen :])
        shared = (each[:, mine.num_chosen :].float().cpu() for each in (found[1], weights))
        torch.testing.assert_close(*shared, atol=0.01, rtol=0.02)
        got = mine.experts(x.cuda(), ids.cuda(), weights.bfloat16().cuda()).float().sum(0).cpu()
        expected = right.experts(x, ids, weights.bfloat16()).float().sum(0)
        apart = (got - expected).norm(dim=1) / expected.norm(dim=1)
        # An input that differs by one rounding of bfloat16 makes 0.009, in FP8 0.044.
        assert apart.median() < (0.02 if form is None else 0.05)
        assert apart.max() < (0.03 if form is None else 0.1)


def mixture_of(path: Path, device: torch.device) -> Mixture:
    model = load_target(open_checkpoint(str(path)), BF16, device)
    assert isinstance(model, Llama)
    return next(block.mlp for block in model.blocks if isinstance(block.mlp, Mixture))


@in_turn("shape", [shape for shape in SMALL if not shape.mxfp4])
def test_an_expert_that_no_row_chose_is_not_read(shape: Shape) -> None:
    world = World(shape)
    among = max(shape.num_experts // 2, shape.k)
    for weight in world.weights:
        if shape.fp8:
            weight.data.view(torch.uint8)[among:] = NOT_A_NUMBER
        else:
            weight.data[among:] = torch.nan
        if weight.bias is not None:
            weight.bias[among:] = torch.nan
    experts = world.loaded()
    for rows in (1, 5, 16, 17, 40, 160, 640):
        inputs = world.rows(rows, among)
        check(experts(*inputs), world.reference(*inputs), shape)


@in_turn("shape", SMALL + LARGE)
def test_the_same_inputs_give_the_same_bits(worlds: dict[str, World], shape: Shape) -> None:
    world = world_of(worlds, shape)
    experts = world.loaded()
    for rows in (1, 5, 40, 160, 640):
        inputs = world.rows(rows)
        first = experts(*inputs)
        assert all(torch.equal(experts(*inputs), first) for _ in range(10))


@in_turn("shape", SMALL + LARGE)
def test_a_row_does_not_depend_on_the_others(worlds: dict[str, World], shape: Shape) -> None:
    """Verification sees the bits of plain decoding: every tile adds in the same order."""
    world = world_of(worlds, shape)
    experts = world.loaded()
    most = 100 * shape.num_experts // shape.k  # of more rows, plain weights go through another GEMM
    x, ids, weights = world.rows(min(640, most))
    together = experts(x, ids, weights)
    for rows in (1, 5, 16, 17, 40, 160):
        assert torch.equal(experts(x[:rows], ids[:rows], weights[:rows]), together[:, :rows])


@in_turn("shape", SMALL)
@in_turn("rows", [1, 5, 16, 40, 160])
def test_a_captured_pass_follows_new_routes(worlds: dict[str, World], shape: Shape, rows: int) -> None:
    world = world_of(worlds, shape)
    experts = world.loaded()
    inputs = world.rows(rows)
    experts(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(*inputs)
    for among in (shape.num_experts, shape.k, shape.num_experts):
        for buffer, values in zip(inputs, world.rows(rows, among), strict=True):
            buffer.copy_(values)
        out.fill_(torch.nan)
        graph.replay()
        check(out, world.reference(*inputs), shape)


def test_matrices_may_be_transposed(worlds: dict[str, World]) -> None:
    world = world_of(worlds, SMALL[0])
    gate_up, down = (replace(weight, data=weight.data.mT.contiguous().mT) for weight in world.weights)
    experts = bind_ops(CUDA, BF16).experts(Experts(gate_up=gate_up, down=down, gating=PLAIN))
    for rows in (5, 40, 3000):
        inputs = world.rows(rows)
        check(experts(*inputs), world.reference(*inputs), SMALL[0])


def test_nothing_waits_for_the_device(worlds: dict[str, World]) -> None:
    for shape in SMALL:
        world = world_of(worlds, shape)
        experts, inputs = world.loaded(), [world.rows(rows) for rows in (1, 16, 40, 640)]
        for each in inputs:
            experts(*each)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for each in inputs:
                experts(*each)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_what_mxfp4_cannot_run_is_refused() -> None:
    world = World(next(shape for shape in SMALL if shape.mxfp4))
    with pytest.raises(UserError, match="run in bfloat16 on a GPU, not float16: use --dtype bfloat16"):
        bind_ops(CUDA, FP16).experts(world.experts)
    (gate_up, _) = world.weights
    gate_up.scale[1, 2, 3] = 129
    with pytest.raises(UserError, match=r"2\^2, above 2"):
        world.loaded()
