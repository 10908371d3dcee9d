"""Whether weights are numbers: a damaged file, or one of a training that diverged, has NaN or infinities in it."""

import torch
from torch import Tensor

_PIECE = 1 << 24  # elements that are looked at together where that takes memory
_NAN = 0x7F  # of e4m3, which has no infinity; and the same with the sign bit
_NO_SCALE = 0xFF  # NaN of e8m0, in which MXFP4 has its scales


def is_finite(tensor: Tensor) -> bool:
    """Whether ``tensor`` has neither NaN nor infinities; bytes are taken for scales of MXFP4.

    Weights are looked at where they lie once they are loaded, at about the bandwidth of that memory.
    """
    if tensor.numel() == 0:
        return True
    if tensor.dtype == torch.uint8:
        return int(tensor.max()) != _NO_SCALE
    if tensor.dtype == torch.float8_e4m3fn:
        pieces = torch.split(tensor.flatten().view(torch.uint8), _PIECE)
        return not any(bool(((piece & _NAN) == _NAN).any()) for piece in pieces)
    low, high = tensor.aminmax()  # NaN where there is one, without a copy of the tensor
    return bool(low.isfinite() & high.isfinite())
