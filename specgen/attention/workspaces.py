"""The scratch memory of FlashInfer's attention kernels, sized by what the kernels use."""

import torch
from torch import Tensor

from specgen.config import UserError

MIB = 1 << 20
# XQA counts its finished blocks in the first 8 MiB, trtllm-gen asks for 128 MiB in all
_COUNTERS = 8 * MIB
DECODE_BYTES = 128 * MIB


def decode_workspace(device: torch.device, *, max_group: int, max_rows: int, max_head_dim: int) -> Tensor:
    """Zeros for the TensorRT-LLM decode kernels on ``device``, which leave the counters at zero after every call.

    Two calls that run at once must not share it. ``UserError`` if kernels of that shape need more than there is.
    """
    need = xqa_bytes(num_sms(device), rows=max_group * max_rows, head_dim=max_head_dim)
    if need > DECODE_BYTES:
        raise UserError(
            f"XQA needs {need // MIB} MiB of scratch memory on this GPU and takes "
            f"{DECODE_BYTES // MIB}: use --attention flashinfer"
        )
    return torch.zeros(DECODE_BYTES, dtype=torch.uint8, device=device)


def xqa_bytes(num_sms: int, *, rows: int, head_dim: int) -> int:
    """What XQA writes at most for ``rows`` query rows of one KV head: query length times heads per KV head.

    A sequence is split only while all splits of all sequences together have an SM each, so neither the batch nor
    the context matters. A split keeps its rows' output in 2 bytes an element, their maxima and their sums; rows
    come in tiles of up to 64 that may be half empty.
    """
    tiled = 2 * -(-rows // 64) * 64
    return _COUNTERS + num_sms * tiled * (2 * head_dim + 8)


def prefill_bytes(num_sms: int, *, group: int, head_dim: int) -> int:
    """What FlashInfer's FA2 prefill writes at most for ``group`` heads per KV head.

    It splits a sequence only while there are no more than two blocks per SM; a block keeps the output and the
    log-sum-exp of up to 128 rows of each of its heads in float32.
    """
    return 2 * num_sms * group * 128 * (head_dim + 1) * 4 + MIB


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
