# mypy: allow-untyped-decorators
"""The product of a block of rows with some outputs of an expert, from plain weights or MXFP4 in words."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgen.config import require

WORD_BLOCK = 128  # inputs whose values take 16 words of an output, and whose scales take one

# Two words of 8 values each become eight pairs in bfloat16. Sign, exponent and mantissa bit of a value must come to
# where bfloat16 has its sign, the end of its exponent and the start of its mantissa, bits 15, 8, 7 and 6. That is the
# value times 2^-126, also of a subnormal one, and the scales make up for it. The four values of half a word lie so
# that most need one shift: by 0, by 3, by 6, and the bits that are left.
_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 10, 11))
_UNPACK = tl.constexpr(
    "{ .reg .b32 lo, hi, s, m;\n"
    "prmt.b32 lo, $8, $9, 0x5410; prmt.b32 hi, $8, $9, 0x7632;\n"
    + "\n".join(
        f"{bits.format(word)} mul.rn.bf16x2 ${4 * half + place}, m, ${10 + 2 * half + place // 2};"
        for half, word in enumerate(("lo", "hi"))
        for place, bits in enumerate(
            (
                "and.b32 m, {0}, 0x81C081C0;",
                "shl.b32 m, {0}, 3; and.b32 m, m, 0x81C081C0;",
                "shl.b32 m, {0}, 6; and.b32 m, m, 0x81C081C0;",
                "shl.b32 s, {0}, 1; and.b32 s, s, 0x80008000; "
                "shr.b32 m, {0}, 5; lop3.b32 s, m, 0x01400140, s, 0xEA; "  # and, or
                "shr.b32 m, {0}, 3; lop3.b32 m, m, 0x00800080, s, 0xEA;",
            )
        )
    )
    + "}"
)


@triton.jit
def plain_product(
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
def word_product(
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
    """As ``plain_product``, of what ``as_words`` made; ``x`` is in bfloat16."""
    place = tl.arange(0, 16)
    num_blocks = tl.cdiv(width, 128)
    first = expert.to(tl.int64) * num_blocks * num_out
    w_start = words + first * 16 + out[:, None] * 16 + place[None, :]
    s_start = scales + first + out
    x_start = x + row[None, :].to(tl.int64) * width + place[:, None]
    acc = tl.zeros((out.shape[0], row.shape[0]), tl.float32)
    for block in tl.range(0, num_blocks, num_stages=STAGES):
        w = tl.load(w_start + block * num_out * 16)
        s = tl.load(s_start + block * num_out)
        w0, w1, w2, w3, w4, w5, w6, w7 = _unpack(w, s)
        x_block, left = x_start + block * 128, width - block * 128
        acc = tl.dot(w0, tl.load(x_block, inside[None, :] & (place[:, None] < left), 0), acc)
        acc = tl.dot(w1, tl.load(x_block + 16, inside[None, :] & (place[:, None] < left - 16), 0), acc)
        acc = tl.dot(w2, tl.load(x_block + 32, inside[None, :] & (place[:, None] < left - 32), 0), acc)
        acc = tl.dot(w3, tl.load(x_block + 48, inside[None, :] & (place[:, None] < left - 48), 0), acc)
        acc = tl.dot(w4, tl.load(x_block + 64, inside[None, :] & (place[:, None] < left - 64), 0), acc)
        acc = tl.dot(w5, tl.load(x_block + 80, inside[None, :] & (place[:, None] < left - 80), 0), acc)
        acc = tl.dot(w6, tl.load(x_block + 96, inside[None, :] & (place[:, None] < left - 96), 0), acc)
        acc = tl.dot(w7, tl.load(x_block + 112, inside[None, :] & (place[:, None] < left - 112), 0), acc)
    return acc


@triton.jit
def _unpack(words: tl.tensor, scales: tl.tensor) -> tuple[tl.tensor, ...]:
    """Words [M, 16] and a word of scales for each output [M]: eight matrices [M, 16], one of 16 inputs each."""
    s0, s1 = _power(scales & 0xFF, words), _power((scales >> 8) & 0xFF, words)
    s2, s3 = _power((scales >> 16) & 0xFF, words), _power((scales >> 24) & 0xFF, words)
    return tl.inline_asm_elementwise(  # type: ignore[no-any-return]
        _UNPACK,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r",
        [words, s0, s1, s2, s3],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _power(exponents: tl.tensor, words: tl.tensor) -> tl.tensor:
    """2^(exponent - 127), exact in bfloat16, in the shape of ``words``."""
    power = (exponents << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.broadcast_to(power[:, None], words.shape)


def as_words(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4 in the order in which ``word_product`` reads: the 16 words of one output and 128 inputs at once.

    ``data`` uint8 [E, out, in / 2], the first of two values in the low half, and ``scale`` uint8 [E, out, in / 32]
    become int32 [E, B, out, 16] and [E, B, out], B blocks of 128 inputs, the last filled up with zeros. Word c of a
    block has inputs c, 16 + c, ..., 112 + c, the first four in its low half; see ``_BITS``. ``UserError`` if a scale is
    above 2.
    """
    num_experts, num_out, half = data.shape
    num_blocks = -(-2 * half // WORD_BLOCK)
    largest = int(scale.max())
    require(
        largest <= 128,
        f"the scale of an MXFP4 block is 2^{largest - 127}, above 2, which no trained weight needs: "
        "use a checkpoint in bfloat16",
    )
    scattered = [
        [sum((value >> (3 - i) & 1) << bit for i, bit in enumerate(bits)) for value in range(16)]
        for bits in _BITS
    ]
    tables = torch.tensor(
        scattered, dtype=torch.int32, device=data.device
    )  # [4, 16]: of the four in half a word
    words = torch.empty(num_experts, num_blocks, num_out, 16, dtype=torch.int32, device=data.device)
    for bytes_of, into in zip(data, words, strict=True):  # one by one, to need little memory
        values = torch.zeros(num_out, num_blocks * WORD_BLOCK, dtype=torch.int32, device=data.device)
        values[:, : 2 * half] = torch.stack((bytes_of & 15, bytes_of >> 4), -1).flatten(1)
        first, second, third, fourth = values.view(num_out, num_blocks, 2, 4, 16).unbind(3)
        halves = tables[0][first] | tables[1][second] | tables[2][third] | tables[3][fourth]
        into.copy_((halves[:, :, 0] | halves[:, :, 1] << 16).transpose(0, 1))
    exponents = torch.zeros(num_experts, num_out, num_blocks * 4, dtype=torch.uint8, device=data.device)
    exponents[..., : scale.shape[-1]] = scale + 126  # what the values lack, and bfloat16's bias
    return words, exponents.view(torch.int32).transpose(1, 2).contiguous()
