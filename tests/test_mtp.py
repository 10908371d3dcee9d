"""MTP layers of the target's own checkpoint against a dense reference in plain torch, at every step of a generation."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bound import StepBytes
from safetensors.torch import load_file
from torch import Tensor

from specgen.attention import Attend
from specgen.attention.hopper import HopperBackend
from specgen.attention.sdpa import SdpaBackend
from specgen.checkpoints.checkpoint import load_drafter, load_target, open_checkpoint
from specgen.config import EngineConfig, SamplingParams, UserError
from specgen.engine.choices import BACKENDS
from specgen.engine.loading import open_checkpoints
from specgen.kv.kv_cache import KVCache
from specgen.kv.layout import Layout
from specgen.models.mtp import MtpHead, MtpLayer
from tests import fake_flashinfer
from tests.engines import Pair, generate, load_pair
from tests.reference_heads import DenseTarget
from tests.test_heads import MTP, glm, requests
from tests.tiny_latents import write_latent
from tests.tiny_mixtures import change


def pair_of(path: Path, write: Callable[[Path], object]) -> Pair:
    """The target that ``write`` writes, with its MTP layers."""
    write(path / "target")
    return load_pair(path, drafter="mtp")


@torch.inference_mode()
@pytest.mark.parametrize("family", ["glm", "deepseek"])
def test_a_pass_equals_that_of_transformers(tmp_path: Path, family: Any) -> None:
    """Whose own MTP model drafts one token."""
    from transformers.modeling_layers import MtpModel

    write_latent(tmp_path / "target", family, num_mtp=1, own=False, rms_norm_eps=1e-6)
    dense = DenseTarget(tmp_path / "target").model
    dense.config.num_mtp_layers, dense.config.mtp_mlp_layer_types = 1, ["sparse"]
    # it knows the published number alone
    dense._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\..*"]
    theirs: Any = MtpModel.from_pretrained(dense)
    ids = torch.randint(0, 128, (30,), generator=torch.Generator().manual_seed(3))
    hidden = dense.model(ids[None]).last_hidden_state[:, :-1]
    out = theirs.forward_layer(0, hidden, torch.arange(1, 30)[None], None, input_ids=ids[None, 1:])
    head = load_pair(tmp_path, drafter="mtp").models.head
    spec, tables = head.config.kv_spec, torch.arange(1, 9, dtype=torch.int32)[None]
    cache = KVCache(spec=spec, num_pages=9, page_size=4, dtype=torch.float32, device=out.device)
    attend = Attend(SdpaBackend(out.device), cache, Layout.ragged(tables, [0], [29], 4), head.rope)
    got = head.logits(head.forward(ids[1:], hidden[0], attend)[1])
    torch.testing.assert_close(got, theirs._project_to_logits(out)[0], atol=1e-4, rtol=0)


def test_the_other_rule_of_what_is_fed_back_drafts_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some engines feed back the state before the norm: the first draft is the same, later ones are not."""
    pair = pair_of(tmp_path, MTP["mtp-glm"])
    right = generate(pair, requests()[:2], num_spec_tokens=4)

    def before_the_norm(
        self: MtpLayer, token_ids: Tensor, hidden: Tensor, attend: Any
    ) -> tuple[Tensor, Tensor]:
        stream = self.project(self.inputs(token_ids, hidden))
        return self.norm.add(*self.block(stream, self.input_norm(stream), attend))

    monkeypatch.setattr(MtpLayer, "forward", before_the_norm)
    other = generate(pair, requests()[:2], num_spec_tokens=4)
    assert other.texts == right.texts
    first = {name: steps[0][0] for name, steps in right.verified.items()}
    again = {name: steps[0][0] for name, steps in other.verified.items()}
    assert {name: drafts[0] for name, drafts in first.items()} == {
        name: drafts[0] for name, drafts in again.items()
    }
    assert right.verified != other.verified


@pytest.mark.slow
@pytest.mark.parametrize("name", MTP)
def test_sampled_drafts_and_texts_do_not_depend_on_the_drafter_batch(tmp_path: Path, name: str) -> None:
    pair = pair_of(tmp_path, MTP[name])
    drawn = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8)
    asked = [replace(r, sampling=drawn) for r in requests()[:3]]
    padded, non_padded = (
        generate(pair, asked, num_spec_tokens=4, drafter_batch=batch, draft_sampling="probabilistic")
        for batch in ("padded", "non-padded")
    )
    assert padded.verified == non_padded.verified
    assert padded.texts == non_padded.texts


def test_a_target_without_mtp_layers_says_so(tmp_path: Path) -> None:
    write_latent(tmp_path)
    with pytest.raises(UserError, match="has no MTP layer"):
        open_checkpoints(EngineConfig(model=str(tmp_path), drafter="mtp"))
    assert set(open_checkpoints(EngineConfig(model=str(tmp_path), drafter="mtp", num_spec_tokens=0))) == {
        "model"
    }


def test_mtp_layers_may_lie_in_a_checkpoint_of_their_own(tmp_path: Path) -> None:
    write_latent(tmp_path / "both", num_mtp=1, own=True)
    stored = load_file(tmp_path / "both" / "model.safetensors")
    shutil.copytree(tmp_path / "both", tmp_path / "alone")
    alone = {name: None for name in stored if not name.startswith("model.layers.3.")}
    change(tmp_path / "alone", dict[str, Tensor | None](alone))
    target = load_target(open_checkpoint(str(tmp_path / "both")), torch.float32, torch.device("cpu"))
    assert isinstance(load_drafter(open_checkpoint(str(tmp_path / "alone")), target), MtpHead)
    kinds = ["dense", *["sparse"] * 3]
    change(tmp_path / "alone", {}, num_hidden_layers=4, mlp_layer_types=kinds)
    with pytest.raises(UserError, match="has 4 layers and no MTP layer has the next number"):
        load_drafter(open_checkpoint(str(tmp_path / "alone")), target)


def test_a_layer_that_is_neither_the_target_s_nor_mtp_is_refused(tmp_path: Path) -> None:
    """Else a config of too few layers would generate wrong text."""
    write_latent(tmp_path)
    change(tmp_path, {}, num_hidden_layers=2, mlp_layer_types=["dense", "sparse"])
    with pytest.raises(UserError, match=r"unknown tensors, such as 'model\.layers\.2"):
        load_target(open_checkpoint(str(tmp_path)), torch.float32, torch.device("cpu"))


def test_the_bytes_of_a_drafting_pass_are_those_of_one_layer_and_the_experts_it_touches(
    tmp_path: Path,
) -> None:
    sizes = StepBytes.of(pair_of(tmp_path, partial(write_latent, num_mtp=2)).models)
    attention = 32 * 64 + 32 + 4 * 20 * 32 + 32 * 64 + 24 + 4 * 32 * 24 + 64 * 80
    layer = 64 * 128 + 5 * 64 + attention + 8 * 64 + 8 + 3 * 64 * 32  # the last is the shared expert
    assert sizes.head_pass == 4 * (layer + 128 * 64)
    assert sizes.head_fill == 2 * 4 * (64 * 128 + 32 * 64)
    assert sizes.head_kv.at(1) == 32 * 4
    one = sizes.parts(1, 1, 0)["draft loop"].num_bytes
    assert one == sizes.head_pass + 2 * 4 * 3 * 64 * 32  # two of eight experts
    assert sizes.parts(3, 1, 0)["draft loop"].num_bytes == 3 * one


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["padded", "non-padded"])
def test_an_engine_on_the_kernels_of_gpus_drafts_and_writes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: str
) -> None:
    """Of a model as wide as they are built for, through what stands for FlashInfer on a CPU."""
    widths = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256}
    pair = pair_of(tmp_path, partial(glm, num_mtp=1, seed=8, hidden_size=32, num_hidden_layers=2, **widths))
    settings = {"num_spec_tokens": 3, "drafter_batch": batch, "max_prefill_tokens": 9}
    some = [
        replace(each, sampling=replace(each.sampling, max_tokens=5 + i))
        for i, each in enumerate(requests()[3:9])
    ]
    right = generate(pair, some, **settings)
    fake_flashinfer.install(monkeypatch, major=9, num_sms=6)

    class OnCpu(HopperBackend):
        name, capabilities = "sdpa", SdpaBackend.capabilities

    monkeypatch.setitem(BACKENDS, "sdpa", OnCpu)
    found = generate(pair, some, **settings)
    assert found.verified == right.verified
    assert found.texts == right.texts
    assert max(right.accepted) >= 2
