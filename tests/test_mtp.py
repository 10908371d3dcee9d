"""MTP layers of the target's own checkpoint against a dense reference in plain torch, at every step of a generation."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specgen.attention import Attend
from specgen.attention.hopper import HopperBackend
from specgen.attention.sdpa import SdpaBackend
from specgen.checkpoints.checkpoint import load_drafter, load_target, open_checkpoint
from specgen.config import EngineConfig, SamplingParams, UserError
from specgen.core.sequence import Request
from specgen.engine.build import build_engine
from specgen.engine.choices import BACKENDS, resolve
from specgen.engine.loading import Models, open_checkpoints
from specgen.experiments.bound import StepBytes
from specgen.kv.kv_cache import KVCache
from specgen.kv.layout import Layout
from specgen.models.mtp import MtpHead, MtpLayer
from specgen.record.record_rows import EngineRow
from tests import fake_flashinfer
from tests.engines import NoTokenizer, Outputs
from tests.reference_heads import DenseTarget
from tests.reference_mtp import ReferenceMtp
from tests.test_heads import VOCAB, requests, wrong_drafts
from tests.tiny_latents import write_latent
from tests.tiny_mixtures import change

DEEPEST = 7
glm = partial(write_latent, vocab_size=VOCAB, rms_norm_eps=1e-6)
PAIRS: dict[str, Callable[[Path], object]] = {
    "glm": partial(glm, num_mtp=1, seed=3),
    "glm-own": partial(glm, num_mtp=1, own=True, seed=1),
    "deepseek": partial(glm, family="deepseek", num_mtp=1, seed=3),
    "three-layers": partial(glm, num_mtp=3, own=True, seed=45),
}


RARE = {"glm", "glm-own", "deepseek"}  # their parts are in other pairs and tests too
PARAMS = [
    pytest.param(
        name, marks=[pytest.mark.xdist_group(f"mtp-{name}"), *([pytest.mark.slow] if name in RARE else [])]
    )
    for name in PAIRS
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A target with MTP layers, its reference, and one run of it."""

    path: Path
    models: Models
    target: DenseTarget
    reference: ReferenceMtp
    outputs: Outputs


def load(path: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Models:
    checkpoints = open_checkpoints(EngineConfig(model=str(path), drafter="mtp"))
    target = load_target(checkpoints["model"], dtype, torch.device(device))
    head = load_drafter(checkpoints["drafter"], target)
    no_tokenizer: Any = NoTokenizer()
    return Models(target=target, head=head, tokenizer=no_tokenizer, checkpoints=checkpoints)


def generate(path: Path, models: Models, asked: list[Request], **changes: Any) -> Outputs:
    settings = {"page_size": 4, "num_spec_tokens": 4, "max_batch_size": 8, "device": "cpu"} | changes
    config = resolve(EngineConfig(model=str(path), drafter="mtp", **settings), models.checkpoints)
    events: list[EngineRow] = []
    engine = build_engine(config, models, events.append)
    return Outputs(completions={each.request.id: each for each in engine.generate(asked)}, passes=events)


def wrong(outputs: Outputs, reference: ReferenceMtp) -> Iterator[tuple[str, int]]:
    alike: Any = reference
    return wrong_drafts(outputs, alike)


@pytest.fixture(scope="module", params=PARAMS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp("mtp")
    PAIRS[request.param](path)
    models, target = load(path), DenseTarget(path)
    return Case(
        path=path,
        models=models,
        target=target,
        reference=ReferenceMtp(path, target),
        outputs=generate(path, models, requests()),
    )


def test_every_draft_equals_the_reference_and_no_text_changes(case: Case) -> None:
    plain = generate(case.path, case.models, requests(), num_spec_tokens=0)
    ragged = {"drafter_batch": "non-padded", "max_batch_size": 3, "max_prefill_tokens": 3}
    non_padded = generate(case.path, case.models, requests(), **ragged)
    assert case.outputs.verified == non_padded.verified
    assert case.outputs.texts == non_padded.texts == plain.texts
    first = requests()[0]
    assert plain.texts[first.id] == case.target.greedy(first.prompt_token_ids, first.sampling.max_tokens)
    assert list(wrong(case.outputs, case.reference)) == []
    accepted = {step[1] for steps in case.outputs.verified.values() for step in steps}
    assert accepted >= {0, 1, 3}, "rows of several drafts must be taken in"
    assert case.outputs.any_cached


def test_rows_as_on_a_device_and_preemption_change_no_draft(
    case: Case, device_like: Callable[[], None]
) -> None:
    head = case.models.head
    page = 4 * (3 + head.config.num_layers) * (24 + 8) * 4  # positions, layers, latent and key, bytes
    device_like()
    some = requests()[3:]
    for batch in ("padded", "non-padded"):
        tight = generate(case.path, case.models, some, drafter_batch=batch, kv_memory=19 * page)
        assert tight.num_preempted > 0
        assert tight.texts == {r.id: case.outputs.texts[r.id] for r in some}
        assert tight.verified == {r.id: case.outputs.verified[r.id] for r in some}


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "sdpa-static"])
def test_every_number_of_drafts_gives_the_reference_s(case: Case, attention: str) -> None:
    """K of 1 to 7 with batches that change as texts end, longer than there are layers."""
    reference = ReferenceMtp(case.path, case.target, DEEPEST)
    some = [
        replace(r, sampling=replace(r.sampling, max_tokens=4 + 3 * number))
        for number, r in enumerate(requests()[4:])
    ]
    for k in range(1, DEEPEST + 1):
        batch = "padded" if k % 2 else "non-padded"
        found = generate(
            case.path, case.models, some, num_spec_tokens=k, drafter_batch=batch, attention=attention
        )
        assert list(wrong(found, reference)) == [], k
        assert found.texts == {r.id: case.outputs.texts[r.id][: r.sampling.max_tokens] for r in some}


Plant = Callable[[Any], None]


def _set(**changes: Callable[[Any], Any]) -> Plant:
    def plant(reference: Any) -> None:
        for name, replaced in changes.items():
            setattr(reference, name, replaced(reference))

    return plant


def _late(num_rows: int, num_drafted: int) -> Tensor:
    """One position between the rows of the text and those of the drafts; a shift of all would change nothing."""
    at = torch.arange(num_rows + num_drafted)
    return at + (at >= num_rows)


def _without(name: str) -> Plant:
    return _set(
        norm=lambda r: lambda x, index, which, real=r.norm: x if which == name else real(x, index, which)
    )


ERRORS: dict[str, Plant] = {
    "state before embedding": _set(
        joined=lambda r: lambda embedded, hidden: torch.cat([hidden, embedded], -1)
    ),
    "no norm of the embedding": _without("enorm"),
    "no norm of the state": _without("hnorm"),
    "no norm behind the layer": _without("shared_head.norm"),
    "recycled before the norm": _set(recycled=lambda r: lambda out, index: out),
    "state before the target's norm": _set(hidden=lambda r: lambda streams, output: streams[-1]),
    "tokens not shifted": _set(rows=lambda r: lambda ids, hidden: (ids[:-1], hidden[:-1])),
    "states shifted": _set(rows=lambda r: lambda ids, hidden: (ids[1:], hidden[1:])),
    "late drafts": _set(positions=lambda r: _late),
}
ONLY: dict[str, tuple[str, Plant]] = {
    "always the first layer": ("three-layers", _set(turn=lambda r: lambda step: 0)),
    "layers backwards": ("three-layers", _set(turn=lambda r: lambda step: -step)),
    "the target's output weights": ("glm-own", _set(lm_head=lambda r: lambda index: r.target.lm_head)),
}


def test_planted_errors_are_caught(case: Case, request: pytest.FixtureRequest) -> None:
    """An error that changes no draft of these texts would not be seen in the engine either."""
    here = request.node.callspec.params["case"]
    plants = ERRORS | {name: plant for name, (pair, plant) in ONLY.items() if pair == here}
    missed = []
    for name, plant in plants.items():
        spoilt = ReferenceMtp(case.path, case.target)
        plant(spoilt)
        missed += [] if any(wrong(case.outputs, spoilt)) else [name]
    assert missed == []


@torch.inference_mode()
@pytest.mark.parametrize("family", ["glm", "deepseek"])
def test_a_pass_equals_that_of_transformers(tmp_path: Path, family: Any) -> None:
    """Whose own MTP model drafts one token."""
    from transformers.modeling_layers import MtpModel

    write_latent(tmp_path, family, num_mtp=1, own=False, rms_norm_eps=1e-6)
    dense = DenseTarget(tmp_path).model
    dense.config.num_mtp_layers, dense.config.mtp_mlp_layer_types = 1, ["sparse"]
    dense._keys_to_ignore_on_load_unexpected = [
        r"model\.layers\.3\..*"
    ]  # it knows the published number alone
    theirs: Any = MtpModel.from_pretrained(dense)
    ids = torch.randint(0, 128, (30,), generator=torch.Generator().manual_seed(3))
    hidden = dense.model(ids[None]).last_hidden_state[:, :-1]
    out = theirs.forward_layer(0, hidden, torch.arange(1, 30)[None], None, input_ids=ids[None, 1:])
    head = load(tmp_path).head
    spec, tables = head.config.kv_spec, torch.arange(1, 9, dtype=torch.int32)[None]
    cache = KVCache(spec=spec, num_pages=9, page_size=4, dtype=torch.float32, device=out.device)
    attend = Attend(SdpaBackend(out.device), cache, Layout.ragged(tables, [0], [29], 4), head.rope)
    got = head.logits(head.forward(ids[1:], hidden[0], attend)[1])
    torch.testing.assert_close(got, theirs._project_to_logits(out)[0], atol=1e-4, rtol=0)


def test_the_other_rule_of_what_is_fed_back_drafts_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some engines feed back the state before the norm: the first draft is the same, later ones are not."""
    PAIRS["glm"](tmp_path)
    models = load(tmp_path)
    right = generate(tmp_path, models, requests()[:2])

    def before_the_norm(
        self: MtpLayer, token_ids: Tensor, hidden: Tensor, attend: Any
    ) -> tuple[Tensor, Tensor]:
        stream = self.project(self.inputs(token_ids, hidden))
        return self.norm.add(*self.block(stream, self.input_norm(stream), attend))

    monkeypatch.setattr(MtpLayer, "forward", before_the_norm)
    other = generate(tmp_path, models, requests()[:2])
    assert other.texts == right.texts
    first = {name: steps[0][0] for name, steps in right.verified.items()}
    again = {name: steps[0][0] for name, steps in other.verified.items()}
    assert {name: drafts[0] for name, drafts in first.items()} == {
        name: drafts[0] for name, drafts in again.items()
    }
    assert right.verified != other.verified


@pytest.mark.slow
def test_sampled_drafts_and_texts_do_not_depend_on_the_drafter_batch(case: Case) -> None:
    drawn = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8)
    asked = [replace(r, sampling=drawn) for r in requests()[:3]]
    padded, non_padded = (
        generate(case.path, case.models, asked, drafter_batch=batch, draft_sampling="probabilistic")
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
    change(tmp_path / "alone", {}, num_hidden_layers=4)
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
    write_latent(tmp_path, num_mtp=2)
    sizes = StepBytes.of(load(tmp_path))
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
    glm(tmp_path, num_mtp=1, seed=8, hidden_size=32, num_hidden_layers=2, **widths)
    models, settings = load(tmp_path), {"num_spec_tokens": 3, "drafter_batch": batch, "max_prefill_tokens": 9}
    some = [
        replace(each, sampling=replace(each.sampling, max_tokens=5 + i))
        for i, each in enumerate(requests()[3:9])
    ]
    right = generate(tmp_path, models, some, **settings)
    fake_flashinfer.install(monkeypatch, major=9, num_sms=6)

    class OnCpu(HopperBackend):
        name, capabilities = "sdpa", SdpaBackend.capabilities

    monkeypatch.setitem(BACKENDS, "sdpa", OnCpu)
    found = generate(tmp_path, models, some, **settings)
    assert found.verified == right.verified
    assert found.texts == right.texts
    assert max(step[1] for steps in right.verified.values() for step in steps) >= 2
