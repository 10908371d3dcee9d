# mypy: allow-untyped-decorators
"""The GEMM of a block of rows with some outputs of an expert: plain weights, FP8, or MXFP4 in words."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.config import require
from specgen.ops.launch import prefetch_l2
from specgen.ops.row_kernels import e4m3_scale, to_e4m3

WORD_BLOCK = 128  # inputs whose values take 16 words of an output, and whose scales take one

# Eight values, four of each of two neighbouring inputs, become four pairs in bfloat16. Sign, exponent and mantissa bit
# of a value must come to where bfloat16 has its sign, the end of its exponent and the start of its mantissa, bits 15,
# 8, 7 and 6 of half a register. That is the value times 2^-126, also of a subnormal one; the scales make up for it.
# So it takes a rotation and a mask where all four bits lie as far apart; by search, the fewest operations are nine:
_TARGETS = (15, 8, 7, 6)
_ROTATIONS = (
    (2, 2, 2, 2),
    (6, 6, 6, 6),
    (12, 12, 12, 12),
    (0, 0, 0, 24),
)  # to the left, of each value's bits
_PAIRS = (
    "shl.b32 m, {word}, 2; and.b32 m, m, 0x81C081C0;",
    "shl.b32 m, {word}, 6; and.b32 m, m, 0x81C081C0;",
    "shf.l.wrap.b32 m, {word}, {word}, 12; and.b32 m, m, 0x81C081C0;",
    "and.b32 t, {word}, 0x81808180; shr.b32 m, {word}, 8; lop3.b32 m, m, 0x00400040, t, 0xEA;",  # (m & mask) | t
)
# A word of four scales: bfloat16 has its exponent in bits 7 to 14.
_UNPACK = tl.constexpr(
    "{ .reg .b32 m, t, even, odd, s<4>; .reg .b16 h<4>;\n"
    "shl.b32 even, $10, 7; and.b32 even, even, 0x7F807F80; shr.b32 odd, $10, 1; and.b32 odd, odd, 0x7F807F80;\n"
    "mov.b32 {h0, h2}, even; mov.b32 {h1, h3}, odd;\n"
    + "".join(f"mov.b32 s{i}, {{h{i}, h{i}}};\n" for i in range(4))
    + "\n".join(
        f"{pair.format(word=word)} mul.rn.bf16x2 ${4 * half + place}, m, s{2 * half + place // 2};"
        for half, word in enumerate(("$8", "$9"))
        for place, pair in enumerate(_PAIRS)
    )
    + "}"
)


@triton.jit
def gemm(
    x: tl.tensor,
    x_scale: tl.tensor,
    x_step: int,
    weight: tl.tensor,
    scale: tl.tensor,
    expert: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    half: int,
    num_out: int,
    width: int,
    GROUPED: tl.constexpr,  # noqa: N803
    BLOCK_IN: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """Outputs ``out`` [M] of an expert for rows ``row`` [R] of ``x``, from weights of any format: float32 [M, R].

    ``first`` is the least of ``out``; of two halves with ``half`` outputs, gate and up, in each of them.
    """
    if scale is None:
        acc = plain_gemm(x, weight, expert, row, inside, out, num_out, width, BLOCK_IN, STAGES)
    elif weight.dtype.element_ty == tl.float8e4nv:
        acc = fp8_gemm(
            x, x_scale, x_step, weight, scale, expert, row, inside, out, first, half, num_out, width,
            GROUPED, BLOCK_IN, STAGES,
        )  # fmt: skip
    else:
        acc = word_gemm(x, weight, scale, expert, row, inside, out, num_out, width, STAGES)
    return acc


@triton.jit
def plain_gemm(
    x: tl.tensor,
    weight: tl.tensor,
    expert: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    out: tl.tensor,
    num_out: int,
    width: int,
    BLOCK_IN: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """Outputs ``out`` [M] of ``weight`` [E, num_out, width] for rows ``row`` [R] of ``x``: float32 [M, R]."""
    inner = tl.arange(0, BLOCK_IN)
    w_start = weight + expert.to(tl.int64) * num_out * width + out[:, None] * width + inner[None, :]
    x_start = x + row[None, :].to(tl.int64) * width + inner[:, None]
    acc = tl.zeros((out.shape[0], row.shape[0]), tl.float32)
    for start in tl.range(0, width, BLOCK_IN, num_stages=STAGES):
        left = width - start
        w = tl.load(w_start + start, inner[None, :] < left, 0)
        columns = tl.load(x_start + start, inside[None, :] & (inner[:, None] < left), 0)
        acc = tl.dot(w, columns, acc, input_precision="ieee")  # of float32
    return acc


@triton.jit
def fp8_gemm(
    x: tl.tensor,
    x_scale: tl.tensor,
    x_step: int,
    weight: tl.tensor,
    scale: tl.tensor,
    expert: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    half: int,
    num_out: int,
    width: int,
    GROUPED: tl.constexpr,  # noqa: N803
    BLOCK_IN: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """As ``gemm``, of weights in e4m3. Sums of BLOCK_IN inputs leave the tensor cores, which keep few bits.

    ``x`` is in e4m3 with ``x_step`` scales for each row: one, or, GROUPED, one for each 128 inputs. In the model's
    dtype it is rounded here: with ``x_scale`` [E], or, GROUPED, with those that are found. GROUPED weights have a scale
    for each block of 128 outputs of a half, of which ``out`` are in the same, and 128 inputs, which BLOCK_IN is.
    """
    inner = tl.arange(0, BLOCK_IN)
    w_start = weight + expert.to(tl.int64) * num_out * width + out[:, None] * width + inner[None, :]
    x_start = x + row[None, :].to(tl.int64) * width + inner[:, None]
    if GROUPED:
        groups, blocks = tl.cdiv(width, 128), tl.cdiv(half, 128)
        scale += (expert.to(tl.int64) * blocks * (num_out // half) + first // 128) * groups
        second = (num_out - half) // half * blocks * groups
    else:
        out_scale = tl.load(scale + expert.to(tl.int64) * num_out + out)
    if x.dtype.element_ty == tl.float8e4nv:
        x_scale += row.to(tl.int64) * x_step
    elif not GROUPED:
        static = tl.load(x_scale + expert)
        inverse = 1.0 / static
    acc = tl.zeros((out.shape[0], row.shape[0]), tl.float32)
    for block in tl.range(0, tl.cdiv(width, BLOCK_IN), num_stages=STAGES):
        left = width - block * BLOCK_IN
        w = tl.load(w_start + block * BLOCK_IN, inner[None, :] < left, 0.0)
        columns = tl.load(x_start + block * BLOCK_IN, inside[None, :] & (inner[:, None] < left), 0.0)
        if GROUPED:
            out_scale = tl.where(out < half, tl.load(scale + block), tl.load(scale + second + block))
            if x.dtype.element_ty != tl.float8e4nv:
                row_scale = e4m3_scale(columns, 0)
                columns = to_e4m3(columns, (1.0 / row_scale)[None, :])
            else:
                row_scale = tl.load(x_scale + block, inside, 0)
            acc += tl.dot(w, columns) * (out_scale[:, None] * row_scale[None, :])
        else:
            if x.dtype.element_ty != tl.float8e4nv:
                columns = to_e4m3(columns, inverse)
            acc += tl.dot(w, columns)
    if not GROUPED:
        if x.dtype.element_ty == tl.float8e4nv:
            acc *= out_scale[:, None] * tl.load(x_scale, inside, 0)[None, :]
        else:
            acc *= (out_scale * static)[:, None]
    return acc


@triton.jit
def word_gemm(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    expert: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    out: tl.tensor,
    num_out: int,
    width: int,
    STAGES: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """As ``plain_gemm``, of what ``as_words`` made; ``x`` is in bfloat16."""
    place, inner = tl.arange(0, 16), tl.arange(0, 128)
    num_blocks = tl.cdiv(width, 128)
    first = expert.to(tl.int64) * num_blocks * num_out
    w_start = words + first * 16 + out[:, None] * 16 + place[None, :]
    s_start = scales + first + out
    x_start = x + row[None, :].to(tl.int64) * width + inner[:, None]
    acc = tl.zeros((out.shape[0], row.shape[0]), tl.float32)
    for block in tl.range(0, num_blocks, num_stages=STAGES):
        w = _unpack(tl.load(w_start + block * num_out * 16), tl.load(s_start + block * num_out))
        # Rows that are not there must not be read: the same address for all would be a bottleneck of the L2 cache.
        there = inside[None, :] & (inner[:, None] < width - block * 128)
        acc = tl.dot(w, tl.load(x_start + block * 128, there, 0), acc)
    return acc


@triton.jit
def prefetch(weight: tl.tensor, expert: tl.tensor, out: tl.tensor, num_out: int, width: int) -> None:
    """Start loading the first inputs' weights, MXFP4 in words or FP8, into the L2 cache."""
    if weight.dtype.element_ty == tl.float8e4nv:
        if width % 16 == 0:
            start = weight + (expert.to(tl.int64) * num_out + out) * width
            prefetch_l2(start, min(width, 256))
    else:
        first = expert.to(tl.int64) * tl.cdiv(width, 128) * num_out
        words = weight + (first + out) * 16
        prefetch_l2(words, 64)
        if width > 128:
            prefetch_l2(words + num_out * 16, 64)


@triton.jit
def _unpack(words: tl.tensor, scales: tl.tensor) -> tl.tensor:
    """Words [M, 16] and a word of scales for each output [M]: the outputs' weights [M, 128] in bfloat16."""
    w0, w1, w2, w3, w4, w5, w6, w7 = tl.inline_asm_elementwise(
        _UNPACK,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
        [words, tl.broadcast_to(scales[:, None], words.shape)],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )
    # Each is 16 inputs in the registers where the tensor cores want them, so that none of this moves a value.
    even, odd = tl.join(tl.join(w0, w4), tl.join(w2, w6)), tl.join(tl.join(w1, w5), tl.join(w3, w7))
    parts = tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1))
    return tl.reshape(parts, (words.shape[0], 128))


def as_words(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4 in the order in which ``word_gemm`` reads: the 16 words of one output and 128 inputs at once.

    ``data`` uint8 [E, out, in / 2], the first of two values in the low half, and ``scale`` uint8 [E, out, in / 32]
    become int32 [E, B, out, 16] and [E, B, out], B blocks of 128 inputs, the last filled up with zeros. Words 2 * c and
    2 * c + 1 of a block have inputs 2 * c and 2 * c + 1 of each 16, the even word of the first 64 inputs, the odd one
    of the others; see ``_TARGETS`` for a word. ``UserError`` if a scale is above 2.
    """
    num_experts, num_out, half = data.shape
    num_blocks = -(-2 * half // WORD_BLOCK)
    largest = int(scale.max())
    require(
        largest <= 128,
        f"the scale of an MXFP4 block is 2^{largest - 127}, above 2, which no trained weight needs: "
        "use a checkpoint in bfloat16",
    )
    tables = _tables().to(data.device)
    words = torch.empty(num_experts, num_blocks, num_out, 16, dtype=torch.int32, device=data.device)
    for bytes_of, into in zip(data, words, strict=True):  # one by one, to need little memory
        values = torch.zeros(num_out, num_blocks * WORD_BLOCK, dtype=torch.int32, device=data.device)
        values[:, : 2 * half] = torch.stack((bytes_of & 15, bytes_of >> 4), -1).flatten(1)
        scattered = torch.zeros(num_out, num_blocks, 8, 2, dtype=torch.int32, device=data.device)
        parts = values.view(num_out, num_blocks, 2, 4, 8, 2).permute(3, 5, 0, 1, 4, 2)  # [4, 2, out, B, 8, 2]
        for place in range(4):
            for side in range(2):
                scattered |= tables[place, side][parts[place, side]]
        into.copy_(scattered.flatten(2).transpose(0, 1))
    exponents = torch.zeros(num_experts, num_out, num_blocks * 4, dtype=torch.uint8, device=data.device)
    exponents[..., : scale.shape[-1]] = scale + 126  # what the values lack, and bfloat16's bias
    return words, exponents.view(torch.int32).transpose(1, 2).contiguous()


def _tables() -> Tensor:
    """The bits of each value in a word, int32 [4 values of an input, 2 inputs, 16]."""
    tables = torch.zeros(4, 2, 16, dtype=torch.int64)
    for place, rotations in enumerate(_ROTATIONS):
        for side in range(2):
            for bit, (target, rotation) in enumerate(zip(_TARGETS, rotations, strict=True)):
                at = (target + 16 * side - rotation) % 32
                tables[place, side] |= (torch.arange(16) >> (3 - bit) & 1) << at
    return tables.to(torch.int32)  # bit 31 is the sign
