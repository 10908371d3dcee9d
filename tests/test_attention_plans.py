"""Host-side preparation of the GPU backends: masks, page lists, workspace sizes, and refusals."""

import re
import sys

import pytest
import torch

from specgen.attention import Heads
from specgen.attention.flashinfer_paged import FlashInferBackend
from specgen.attention.hopper import HopperBackend
from specgen.attention.planning import MIB, PassLens, decode_workspace, prefill_bytes, xqa_bytes
from specgen.attention.sdpa import SdpaBackend
from specgen.attention.trtllm import TrtllmBackend, causal_mask
from specgen.config import UserError
from specgen.kv.layout import Layout
from specgen.models.model_config import LatentConfig

LLAMA = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
GPU = torch.device("cuda")


def heads(**changes) -> Heads:
    return Heads(**{**LLAMA, "kv_dtype": torch.bfloat16, "page_size": 32, "max_query_len": 5, **changes})


@pytest.mark.parametrize("query_len", [1, 2, 5, 16, 17, 31, 32])
def test_packed_causal_mask_bits(query_len: int) -> None:
    words = causal_mask(torch.arange(query_len))
    assert words.dtype == torch.uint16
    assert words.shape == (query_len, 2)
    for row, (low, high) in enumerate(words.tolist()):
        seen = [(low | high << 16) >> j & 1 for j in range(32)]
        assert seen == [int(j <= row) for j in range(32)]


def test_packed_masks_restart_at_each_sequence() -> None:
    tables = torch.zeros(3, 4, dtype=torch.int32)
    layout = Layout.ragged(tables, [7, 0, 3], [2, 1, 4], page_size=16)
    words = causal_mask(layout.positions - layout.starts[layout.sequences])[:, 0]
    assert words.tolist() == [1, 3, 1, 1, 3, 7, 15]


def test_page_lists_follow_the_sequences() -> None:
    tables = torch.tensor([[5, 0, 0], [3, 9, 0], [1, 2, 4]], dtype=torch.int32)
    lens = PassLens(Layout.ragged(tables, [0, 15, 40], [16, 2, 1], page_size=16))
    assert lens.pages.tolist() == [5, 3, 9, 1, 2, 4]
    assert lens.first_pages.tolist() == [0, 1, 3, 6]
    assert lens.first_rows.tolist() == [0, 16, 18, 19]
    assert lens.last_page_lens.tolist() == [16, 1, 9]
    assert {x.dtype for x in (lens.pages, lens.first_pages, lens.first_rows, lens.last_page_lens)} == {
        torch.int32
    }


def test_workspace_covers_what_the_kernels_can_touch() -> None:
    # XQA at 132 SMs: a split writes 32 rows of 128 elements of 2 bytes, 32 maxima and 32 sums; 5 x 4 rows are one tile
    assert xqa_bytes(132, rows=20, head_dim=128) >= 8 * MIB + 132 * 32 * (256 + 8)
    assert xqa_bytes(132, rows=65, head_dim=128) > xqa_bytes(132, rows=64, head_dim=128)
    # FA2: 264 blocks at most; 32 heads, 128 rows each, in float32 with a log-sum-exp
    assert prefill_bytes(132, group=4, head_dim=128) >= 264 // 8 * 32 * 128 * 129 * 4


def test_a_shape_beyond_the_workspace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.attention.planning.num_sms", lambda device: 188)
    assert (
        decode_workspace(torch.device("cpu"), max_group=16, max_rows=32, max_head_dim=256).count_nonzero()
        == 0
    )
    with pytest.raises(UserError, match=r"needs 771 MiB .* takes 128: use --attention flashinfer"):
        decode_workspace(torch.device("cpu"), max_group=128, max_rows=32, max_head_dim=256)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"kv_dtype": torch.float8_e4m3fn}, ""),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "a model in float32.*--dtype bfloat16"),
        ({"kv_dtype": torch.float8_e5m2}, "a KV cache in float8_e5m2"),
        ({"page_size": 8}, "pages of 8 positions: use pages of 16, 32 or 64"),
        ({"head_dim": 80}, "heads of 80 elements: use --attention sdpa"),
        ({"num_heads": 136}, "supports 16 heads per KV head, not 17: use"),
        ({"max_query_len": 33}, "31 drafts per step, not 32: use --num-spec-tokens 31"),
    ],
)
def test_unsupported_models_are_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, flashinfer_installed: None, changes: dict[str, object], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    refusal = TrtllmBackend.capabilities.refusal(GPU, heads(**changes))
    assert (refusal or "") == message or (message and re.search(message, refusal or ""))


def test_heads_of_512_are_one_backends(monkeypatch: pytest.MonkeyPatch, flashinfer_installed: None) -> None:
    """Gemma 4's in layers without a window."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    shape = heads(num_heads=16, num_kv_heads=1, head_dim=512)
    assert HopperBackend.capabilities.refusal(GPU, shape) is None
    for other in (TrtllmBackend, FlashInferBackend):
        assert "heads of 512 elements" in (other.capabilities.refusal(GPU, shape) or "")


GLM = {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
DEEPSEEK = GLM | {"qk_nope_head_dim": 128, "v_head_dim": 128}


@pytest.mark.parametrize(
    ("latent", "changes", "message"),
    [
        (GLM, {}, ""),
        (DEEPSEEK, {"num_heads": 128}, ""),
        (GLM, {"dtype": torch.float32, "kv_dtype": torch.float32}, "a model in float32"),
        (GLM, {"kv_dtype": torch.float8_e4m3fn}, "latents in FP8: use --kv-dtype model"),
        (GLM, {"page_size": 8}, "pages of 8 positions"),
        (GLM, {"num_heads": 129}, "supports 128 heads of latent attention, not 129: use --tensor-parallel"),
        (GLM, {"max_query_len": 33}, ""),
        (
            GLM | {"kv_lora_rank": 256},
            {},
            r"with latents and rotated keys of 256 \+ 64: use --attention sdpa",
        ),
        (GLM | {"v_head_dim": 128}, {}, r"with keys and values of 256 \+ 128: use --attention sdpa"),
    ],
)
def test_latents_that_its_kernels_do_not_take_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    flashinfer_installed: None,
    latent: dict[str, object],
    changes: dict[str, object],
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    shape = {"num_heads": 20, "num_kv_heads": 1, "head_dim": 576, "latent": LatentConfig.from_hf(latent)}
    asked = heads(**shape | changes)
    refusal = HopperBackend.capabilities.refusal(GPU, asked)
    assert (refusal or "") == message or (message and re.search(message, refusal or ""))
    assert TrtllmBackend.capabilities.refusal(GPU, heads(**shape)) == (
        "does not support latent attention: use --attention auto"
    )


def test_old_gpus_and_cpus_are_refused(monkeypatch: pytest.MonkeyPatch, flashinfer_installed: None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert TrtllmBackend.capabilities.refusal(GPU, heads()) == (
        "does not support GPUs of compute capability 8.x: use --attention auto"
    )
    assert FlashInferBackend.capabilities.refusal(GPU, heads()) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert TrtllmBackend.capabilities.refusal(GPU, heads()) is None
    assert HopperBackend.capabilities.refusal(GPU, heads()) == (
        "does not support GPUs of compute capability 10.x: use --attention auto"
    )
    assert TrtllmBackend.capabilities.refusal(torch.device("cpu"), heads()) == (
        "does not run on cpu: use --attention auto"
    )
    assert SdpaBackend.capabilities.refusal(torch.device("cpu"), heads(dtype=torch.float32)) is None


def test_a_backend_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    for backend in (TrtllmBackend, FlashInferBackend):
        assert backend.capabilities.refusal(GPU, heads()) == (
            "needs flashinfer, which is not installed: pip install flashinfer-python, or use --attention sdpa"
        )
    assert SdpaBackend.capabilities.refusal(GPU, heads()) is None
