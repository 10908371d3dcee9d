"""``--draft-lm-head fp8``: drafts by a copy of the output layer in FP8, and what that takes and saves."""

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import draft_output
from bound import StepBytes
from torch import Tensor

from specgen.checkpoints.checkpoint import load_target, open_checkpoint
from specgen.config import SamplingParams, UserError
from specgen.core.engine_core import discard
from specgen.device import Ranks
from specgen.engine.build import build_engine
from specgen.engine.loading import OneTarget, load_models, open_checkpoints
from specgen.engine.memory_plan import memory_plans
from specgen.ops import fp8
from specgen.ops.weight import Weight
from tests.commands import printed, specgen
from tests.engines import (
    Pair,
    bundled_requests,
    engine_config,
    generate,
    load_pair,
    random_requests,
    ranks_config,
    resolved,
)
from tests.marks import mostly_slow
from tests.tiny_checkpoints import write_dflash_head, write_eagle1_head, write_head, write_target
from tests.tiny_gemma4 import write_assistant, write_deepspec, write_gemma4
from tests.tiny_latents import write_latent

CPU = torch.device("cpu")
REQUESTS = random_requests(4, 128, SamplingParams(max_tokens=16, ignore_eos=True))
Write = Callable[[Path], object]


def _of_llama(head: Callable[..., None], **settings: Any) -> Write:
    return lambda path: head(path / "drafter", write_target(path / "target"), **settings)


def _of_gemma4(head: Callable[..., None], *arguments: str) -> Write:
    return lambda path: head(path / "drafter", write_gemma4(path / "target"), *arguments)


def _model(path: Path, **settings: Any) -> None:
    write_target(path / "target")
    write_target(path / "drafter", num_layers=2, seed=1, **settings)


# whose output weights the drafter reads: its own, the target's, or its own embedding
DRAFTERS: dict[str, tuple[str, Write]] = {
    "EAGLE3": ("own", _of_llama(write_head)),
    "P-EAGLE": ("own", _of_llama(write_head, num_layers=2, mask_token=("ptd_token_id", 5))),
    "EAGLE-1": ("target's", _of_llama(write_eagle1_head)),
    "DFlash": ("target's", _of_llama(write_dflash_head)),
    "DSpark": ("own", _of_llama(write_dflash_head, dialect="DeepSpec", own=True, markov=("gated", 8))),
    "MTP": ("target's", partial(write_latent, num_mtp=1)),
    "MTP of its own": ("own", partial(write_latent, num_mtp=1, own=True)),
    "assistant": ("own", _of_gemma4(write_assistant)),
    "EAGLE3 Gemma-4": ("own", _of_gemma4(write_deepspec)),
    "draft model": ("own", _model),
    "tied draft model": ("embedding", partial(_model, tied=True)),
}


def pair_of(path: Path, name: str, **settings: Any) -> Pair:
    _, write = DRAFTERS[name]
    if name.startswith("MTP"):
        if not (path / "target").exists():
            write(path / "target")
        return load_pair(path, drafter="mtp", **settings)
    if not (path / "target").exists():
        write(path)
    return load_pair(path, **settings)


def through(x: Tensor) -> Tensor:
    """Rows rounded to e4m3, the largest of each to 448."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def test_each_output_has_a_scale_and_the_largest_of_its_weights_is_kept() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(fp8._ROWS + 100, 48, dtype=torch.bfloat16) * torch.logspace(-3, 3, 48)
    matrix = matrix.to(torch.bfloat16)
    matrix[7] = 0
    copy = fp8.in_fp8(Weight(data=matrix))
    assert (copy.data.dtype, copy.format, copy.activations) == (torch.float8_e4m3fn, "fp8", "token")
    wide, found = matrix.float(), fp8.dequantised(copy)
    largest = wide.abs().amax(-1)
    torch.testing.assert_close(found.abs().amax(-1), largest, rtol=1e-6, atol=0)
    # half a step of three bits behind the point, or of the smallest number
    assert (
        (found - wide).abs() <= 1.001 * torch.maximum(wide.abs() / 16, largest[:, None] / 448 / 1024)
    ).all()
    assert fp8.in_fp8(copy) is copy
    outline = fp8.in_fp8(Weight(data=matrix.to("meta")))
    assert outline.num_bytes == copy.num_bytes == matrix.numel() + 4 * len(matrix)


@torch.inference_mode()
@pytest.mark.parametrize("name", mostly_slow(DRAFTERS, "EAGLE3", "DFlash", "tied draft model"))
def test_drafts_are_of_the_rounded_layer_and_texts_the_target_s(tmp_path: Path, name: str) -> None:
    plain, copied = (pair_of(tmp_path, name, fp8_output=each) for each in (False, True))
    heads = [pair.models.head for pair in (plain, copied)]
    width, cap = heads[0].config.hidden_size, getattr(heads[0].config, "logit_cap", None)
    exact, x = heads[0].logits(torch.eye(width)).T, torch.randn(5, width)
    found = heads[1].logits(x)
    assert not torch.allclose(found, heads[0].logits(x), rtol=1e-3, atol=1e-3)
    if cap is not None:
        exact, found = (cap * (each / cap).atanh() for each in (exact, found))
    torch.testing.assert_close(found, through(x) @ through(exact).T, rtol=1e-3, atol=1e-3)
    alone = generate(copied, REQUESTS, num_spec_tokens=0, drafter=None)
    assert generate(copied, REQUESTS).texts == alone.texts
    hidden = torch.randn(3, copied.models.target.config.hidden_size)
    assert torch.equal(copied.models.target.logits(hidden), plain.models.target.logits(hidden))


@pytest.mark.parametrize("name", mostly_slow(DRAFTERS, "EAGLE3", "EAGLE-1", "tied draft model"))
def test_what_is_held_and_read_is_counted(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix is let go where it is of drafts alone; a target's, or an embedding, stays beside the copy."""
    held = list[weakref.ref[Tensor]]()

    def noted(weight: Weight) -> Weight:
        base = weight.data._base  # an embedding
        held.append(weakref.ref(weight.data if base is None else base))
        return fp8.in_fp8(weight)

    whose, plain = DRAFTERS[name][0], pair_of(tmp_path, name, dtype=torch.bfloat16)
    for place in ("specgen.checkpoints.tensor_reader.in_fp8", "specgen.models.llama.in_fp8"):
        monkeypatch.setattr(place, noted)
    copied = pair_of(tmp_path, name, dtype=torch.bfloat16, fp8_output=True)
    gc.collect()
    assert [each() is None for each in held] == [whose == "own"]

    config = plain.models.head.config
    num_out, width = config.draft_vocab_size, config.hidden_size
    before, after = (StepBytes.of(pair.models) for pair in (plain, copied))
    assert before.head_pass - after.head_pass == num_out * (2 * width - (width + 4))
    assert replace(after, head_pass=0, head_fill=0) == replace(before, head_pass=0, head_fill=0)
    assert after.head_fill - before.head_fill == (after.head_pass - before.head_pass) * config.is_model

    names = plain.names
    weights = [
        memory_plans(*names.values(), 1 << 30, draft_lm_head=asked)[1].weights for asked in ("model", "fp8")
    ]
    assert weights[1] - weights[0] == num_out * (width + 4 - 2 * width * (whose == "own"))


def test_an_assistant_that_reads_a_few_rows_is_refused(tmp_path: Path) -> None:
    write_assistant(tmp_path / "drafter", write_gemma4(tmp_path / "target"), ordered=(16, 4))
    said = "draft-lm-head is fp8, but a draft reads only 25.0% of its output weights: leave it out"
    with pytest.raises(UserError, match=said):
        load_pair(tmp_path, fp8_output=True)
    with pytest.raises(UserError, match=said):
        memory_plans(str(tmp_path / "target"), str(tmp_path / "drafter"), 1 << 30, draft_lm_head="fp8")


@torch.inference_mode()
def test_ranks_have_their_part_of_the_copy(tmp_path: Path) -> None:
    """Scales are of outputs, which are what is split."""
    write_target(tmp_path)
    whole, *shares = (
        load_target(open_checkpoint(str(tmp_path)), torch.float32, CPU, Ranks(size=size, rank=rank))
        for size, rank in ((1, 0), (2, 0), (2, 1))
    )
    x = torch.randn(3, 64)
    parts = [each.vocabulary.in_fp8().share(x) for each in shares]
    assert torch.equal(torch.cat(parts, 1), whole.vocabulary.in_fp8().share(x))


def test_a_layer_in_fp8_stays_as_it_is(tmp_path: Path) -> None:
    write_target(tmp_path)
    target = load_target(open_checkpoint(str(tmp_path)), torch.float32, CPU)
    copy = target.vocabulary.in_fp8()
    assert copy is not target.vocabulary
    assert copy.in_fp8() is copy


def test_heads_over_one_target_may_draft_with_either(demo_path: Path) -> None:
    """The target is loaded once, and a head kept in each format."""
    shared, found = OneTarget(), []
    for asked in ("fp8", "model", "fp8"):
        config = resolved(engine_config(demo_path, draft_lm_head=asked))
        models = shared.load(config, open_checkpoints(config))
        found.append((models.head.config.fp8_output, id(models.head), id(models.target)))
    assert [each[0] for each in found] == [True, False, True]
    assert found[0] == found[2]
    assert len({target for _, _, target in found}) == 1


def test_a_run_says_so_and_has_the_baseline_s_texts(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ("--num-prompts", 2, "--max-new-tokens", 16, "--draft-lm-head", "fp8", "--baseline")
    assert "a copy in FP8" in printed("generate", *command, "--output", out)
    report = json.loads((out / "report.json").read_text())
    assert report["baseline"]["identical"] == 1.0
    assert json.loads((out / "manifest.json").read_text())["engine"]["draft_lm_head"] == "fp8"
    refusal = specgen("inspect", "--draft-lm-head", "fp8").exception
    assert str(refusal).startswith("--draft-lm-head requires --gpu: add it")


@pytest.mark.scripts
def test_the_script_times_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_output, "ROWS", (1, 3))
    monkeypatch.setattr(draft_output, "num_layers", lambda *_: 2)
    lines = [*draft_output.measured("256x64", CPU)]
    assert [line[:2] for line in lines] == [("256x64", "1"), ("256x64", "3")]
    assert all(float(line[2]) > 0 < float(line[3]) for line in lines)


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_ranks_draft_as_one_process(demo_path: Path) -> None:
    """Of the bundled head, whose output layer every rank has whole, and of one that drafts by the target's."""
    for drafter in ("drafter", "drafter-dflash"):
        found = []
        for num_ranks in (1, 2):
            asked = ranks_config(num_ranks, drafter=str(demo_path / drafter), draft_lm_head="fp8")
            engine = build_engine(asked, load_models(asked, open_checkpoints(asked)), discard)
            requests = bundled_requests(4, SamplingParams(max_tokens=24))
            found.append({done.request.id: done.token_ids for done in engine.generate(requests)})
        assert found[0] == found[1]
