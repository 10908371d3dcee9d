"""Every backend equals a direct implementation of attention, with pages in any order."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specgen.attention import Attend, Backend, LayerAttention
from specgen.attention.sdpa import SdpaBackend, StaticSdpaBackend
from specgen.kv.kv_cache import KVCache, KVSpec
from specgen.kv.layout import Layout
from specgen.ops.reference import torch_ops

HEAD_DIM = 16
LAYER = LayerAttention(index=1, scale=HEAD_DIM**-0.5)
SHAPES = {
    "decode": ([1, 17, 64, 65], [1, 1, 1, 1]),
    "verify": ([9, 9, 30, 31], [5, 5, 5, 5]),
    "ragged": ([2, 40, 9, 16, 17], [2, 1, 5, 3, 5]),
    "two and one": ([9, 6], [2, 1]),
    "ones and four": ([5, 3, 8, 20], [1, 1, 1, 4]),
    "prefill": ([33, 1, 16, 100], [33, 1, 16, 40]),
}


unrotated = torch_ops().rope(torch.zeros(HEAD_DIM // 2))  # angles of 0


def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows ``q`` ``[n, Hq, D]`` are the last n positions of ``k`` and ``v`` ``[length, Hkv, D]``."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


@pytest.mark.parametrize("backend", [SdpaBackend, StaticSdpaBackend], ids=lambda backend: backend.name)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_backend_equals_dense_attention(
    backend: type[Backend], num_kv_heads: int, page_size: int, shape: str
) -> None:
    torch.manual_seed(0)
    made = backend(torch.device("cpu"))
    kv_lens, query_lens = SHAPES[shape]
    width = -(-max(kv_lens) // page_size)
    num_pages = width * len(kv_lens)
    cache = KVCache(
        spec=KVSpec(num_layers=2, num_planes=2, num_heads=num_kv_heads, head_dim=HEAD_DIM),
        num_pages=num_pages,
        page_size=page_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    tables = torch.randperm(num_pages, dtype=torch.int32).view(len(kv_lens), width)
    ks, vs = ([torch.randn(n, num_kv_heads, HEAD_DIM) for n in kv_lens] for _ in "kv")
    starts = [n - q for n, q in zip(kv_lens, query_lens, strict=True)]
    for row, start in enumerate(starts):  # the earlier positions
        if start:
            before = Layout.uniform(tables[row : row + 1], torch.tensor([0]), start, page_size)
            qkv = torch.cat([torch.zeros(start, 4, HEAD_DIM), ks[row][:start], vs[row][:start]], 1)
            Attend(made, cache, before, unrotated)(LAYER, qkv)
    layout = replace(Layout.ragged(tables, starts, query_lens, page_size), host=None)
    q = torch.randn(sum(query_lens), 4, HEAD_DIM)
    new_k, new_v = (torch.cat([x[start:] for x, start in zip(xs, starts, strict=True)]) for xs in (ks, vs))
    out = Attend(made, cache, layout, unrotated)(LAYER, torch.cat([q, new_k, new_v], 1))
    parts = [expected(*each) for each in zip(q.split(query_lens), ks, vs, strict=True)]
    torch.testing.assert_close(out, torch.cat(parts), atol=1e-5, rtol=1e-5)
