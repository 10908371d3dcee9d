"""Hybrids of Gated DeltaNet and gated attention against ``transformers``: kernels, logits, MTP, planted errors."""

import pytest
import torch

from specgen.kv.layout import Layout
from specgen.ops.reference import torch_ops

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_equal_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

    torch.manual_seed(0)
    ops, x, gate = torch_ops(), torch.randn(9, 4, 64).to(dtype) * 3, torch.randn(9, 4, 64).to(dtype)
    centred, gated = Qwen3_5RMSNorm(64, eps=1e-5), Qwen3_5RMSNormGated(64, eps=1e-5)
    for norm in (centred, gated):
        norm.weight.normal_()
        norm.to(dtype)
    assert torch.equal(ops.rms_norm(1 + centred.weight.float(), 1e-5, True)(x), centred(x))
    assert torch.equal(ops.gated_norm(gated.weight, 1e-5)(x, gate), gated(x, gate))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_numbers_of_a_head_are_rotated_as_in_transformers(dtype: torch.dtype) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb

    torch.manual_seed(0)
    frequencies, qkv = 1e4 ** -(torch.arange(4) / 4), torch.randn(6, 3 + 2 * 2, 32).to(dtype)
    keys, values = torch.zeros(2, 3, 4, 2, 32, dtype=dtype)
    layout = Layout.ragged(torch.tensor([[0, 2]], dtype=torch.int32), [1], [6], 4)
    q = torch_ops().rope(frequencies)(layout)(qkv, keys, values)
    angles = torch.cat((frequencies, frequencies)) * torch.arange(1, 7)[:, None]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = apply_rotary_pos_emb(qkv[:, :3], qkv[:, 3:5], cos, sin, unsqueeze_dim=1)
    assert torch.equal(q, expected[0])
    assert torch.equal(keys.flatten(0, 1)[layout.slots], expected[1])
    assert torch.equal(values.flatten(0, 1)[layout.slots], qkv[:, 5:])
