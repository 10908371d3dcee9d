"""The experts that steps touch: counted on the device, told by events, and part of a step's bound."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calibrated_cycle import Cycle
from calibrated_mixture_shapes import MIXTURES, Mixture
from calibrated_mixtures import MixtureLayers
from calibrated_shapes import SHAPES
from calibrated_weights import Source, target_tensors
from make_calibrated_pair import write_pair
from torch import Tensor

from specgen.bench.bound import StepBytes, mean_step_bytes
from specgen.config import SamplingParams
from specgen.core.graphs import Runner, bucket
from specgen.core.sequence import Request
from specgen.engine.build import build_engine
from specgen.events import Event, Prefilled, Stepped, Submitted, Verified
from specgen.models.expert_counts import ExpertCounts, ExpertSize, Tap, num_touched
from tests.engines import Pair, config_of, load_pair

SIZE = ExpertSize(num_layers=2, num_experts=8, num_chosen=2, num_values=100, num_bytes=50)
EXPERTS, CHOSEN = 16, 4


@dataclass(frozen=True)
class FakeMixture:
    """An MLP that chooses experts by its inputs, as a mixture does."""

    mlp: Any
    calls: list[Tensor]
    taps: list[Tap] = field(default_factory=list)

    def __call__(self, x: Tensor) -> Tensor:
        ids = x[:, :EXPERTS].topk(CHOSEN).indices
        self.calls.append(ids)
        for tap in self.taps:
            tap(ids)
        return self.mlp(x)


class PaddedRunner(Runner):
    """Pads the rows as a runner with graphs does."""

    def num_rows(self, num_sequences: int) -> int:
        return bucket(num_sequences) + 1


def fake_config(mixture: Any, **fields: Any) -> Any:
    return SimpleNamespace(mixture=mixture, **fields)


def mixture_of(shape: Mixture, *, mxfp4: bool, biases: bool) -> Any:
    return SimpleNamespace(
        num_experts=shape.num_experts,
        num_chosen=shape.num_chosen,
        width=shape.expert_size,
        layers=(True,) * shape.num_layers,
        mxfp4=mxfp4,
        biases=biases,
    )


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, shape = tmp_path_factory.mktemp("dense"), replace(SHAPES["tiny"], num_layers=7)
    cycle = Cycle.draw(shape.num_plain_tokens, shape.draft_vocab_size, 0.75, seed=0)
    write_pair(path, shape, cycle, Source("cpu", 0))
    return path


def as_mixture(pair: Pair) -> tuple[Pair, list[Tensor]]:
    """``pair`` whose target has fake mixtures in all layers but the first, and the choices that they will make."""
    target, calls = pair.models.target, []
    blocks = [replace(block, mlp=FakeMixture(block.mlp, calls)) for block in target.blocks[1:]]
    config = copy.copy(target.config)
    layers = (False, *[True] * len(blocks))
    fields = {"num_experts": EXPERTS, "num_chosen": CHOSEN, "width": 64, "mxfp4": False, "biases": False}
    object.__setattr__(config, "mixture", SimpleNamespace(layers=layers, **fields))
    faked = replace(target, config=config, blocks=(target.blocks[0], *blocks))
    return replace(pair, models=replace(pair.models, target=faked)), calls


def run(pair: Pair, runner: Runner, **changes: Any) -> list[Event]:
    cycle, events = Cycle.read(pair.path), []
    config = config_of(pair, max_batch_size=4, page_size=16, **changes)
    engine = build_engine(config, pair.models, events.append, lambda _: runner)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    asked = [
        Request(id=str(i), prompt_token_ids=cycle.slice(50 * i, 5 + i), sampling=sampling) for i in range(5)
    ]
    assert len(list(engine.generate(asked))) == 5
    return events


def decode_steps(events: Iterable[Event]) -> list[Stepped]:
    return [event for event in events if isinstance(event, Stepped) and event.kind == "decode"]


def test_an_expert_counts_once_a_layer_and_padding_rows_do_not() -> None:
    ids = torch.tensor([[[0, 1], [1, 2], [7, 6]], [[3, 4], [3, 4], [3, 5]]])
    assert num_touched(ids, torch.tensor([True, True, True]), 8) == 5 + 3
    assert num_touched(ids, torch.tensor([True, True, False]), 8) == 3 + 2
    assert num_touched(ids.int(), torch.tensor([False, False, False]), 8) == 0


def test_a_pass_is_counted_by_taps_that_are_there_during_it_alone() -> None:
    other: list[Tensor] = []
    taps: list[list[Tap]] = [[other.append], []]
    counts = ExpertCounts(SIZE, taps)

    def forward() -> str:
        for layer in taps:
            for tap in layer:
                tap(torch.tensor([[0, 1], [1, 2]]))
        return "result"

    result, touched = counts.of_pass(forward, torch.tensor([True, True]))
    assert (result, touched.item(), taps[1], len(other)) == ("result", 6, [], 1)

    def failing() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        counts.of_pass(failing, torch.tensor([True]))
    assert list(map(len, taps)) == [1, 0]


@pytest.mark.parametrize("changes", [{"num_spec_tokens": 0}, {}, {"drafter_batch": "non-padded"}])
def test_decode_steps_say_what_they_touched(dense: Path, changes: dict[str, Any]) -> None:
    pair, calls = as_mixture(load_pair(dense))
    steps: list[int] = []  # distinct experts of each pass over all layers
    events = run(pair, Runner(), num_spec_tokens=changes.pop("num_spec_tokens", 3), **changes)
    layers = len(pair.models.target.blocks) - 1
    passes = [calls[at : at + layers] for at in range(0, len(calls), layers)]
    kinds = [event.kind for event in events if isinstance(event, Stepped)]
    steps = [sum(ids.unique().numel() for ids in each) for each in passes]
    found = decode_steps(events)
    assert sorted(steps[at] for at in range(len(kinds)) if kinds[at] == "decode") == sorted(
        round(step.experts_touched * layers) for step in found
    )
    size = ExpertSize.of(pair.models.target.config, 4)
    assert size is not None
    assert size.num_bytes == 3 * SHAPES["tiny"].hidden_size * 64 * 4
    assert all(step.expert_bytes == round(step.experts_touched * layers) * size.num_bytes for step in found)
    assert all(
        event.experts_touched is None
        for event in events
        if isinstance(event, Stepped) and event.kind == "prefill"
    )


def test_padding_rows_change_nothing(dense: Path) -> None:
    pair, _ = as_mixture(load_pair(dense))
    plain, padded = (
        [step.experts_touched for step in decode_steps(run(pair, runner, num_spec_tokens=2))]
        for runner in (Runner(), PaddedRunner())
    )
    assert plain == padded


def test_a_dense_target_counts_nothing(dense: Path) -> None:
    pair = load_pair(dense)
    assert ExpertCounts.of(pair.models.target) is None
    assert {step.experts_touched for step in decode_steps(run(pair, Runner(), num_spec_tokens=2))} == {None}


def test_the_experts_of_independent_rows() -> None:
    size = replace(SIZE, num_experts=128, num_chosen=8)
    ids = torch.rand(2000, 5, 128, generator=torch.Generator().manual_seed(0)).topk(8).indices
    drawn = num_touched(ids, torch.tensor([True] * 5), 128) / len(ids)
    assert size.touched_by_chance(1) == pytest.approx(8)
    assert size.touched_by_chance(5) == pytest.approx(drawn.item(), rel=0.01)
    assert size.touched_by_chance(10_000) == pytest.approx(128)


@pytest.mark.parametrize(
    ("name", "mxfp4", "biases"), [("gpt-oss-20b", True, True), ("qwen3-30b-a3b", False, False)]
)
def test_the_bytes_of_experts_are_those_of_their_tensors(name: str, mxfp4: bool, biases: bool) -> None:
    shape = MIXTURES[name]
    config = fake_config(mixture_of(shape, mxfp4=mxfp4, biases=biases), hidden_size=shape.hidden_size)
    layer, cycle = MixtureLayers(shape=shape, common=0.0), Cycle(tokens=(1, 2), unknown=(), accept=1.0)
    tensors = target_tensors(shape, torch.empty(0), cycle, Source("cpu", 0), layer)
    experts = [each for each in tensors if ".mlp.experts." in each.name]
    total = sum(torch.Size(each.shape).numel() * each.dtype.itemsize for each in experts)
    size = ExpertSize.of(config, 2)
    assert size is not None
    assert size.total_bytes == total


def test_a_step_reads_the_experts_that_its_rows_touch() -> None:
    sizes = StepBytes(target=1000, target_kv=3, logits=14, bytes_per_value=2, experts=SIZE)
    assert sizes.step(0, 1, 10) == pytest.approx(1000 + 30 + 2 * 2 * 50)
    by_chance = 8 * (1 - 0.75**6)
    assert sizes.step(2, 2, 10) == pytest.approx(1000 + 60 + 2 * by_chance * 50)
    assert sizes.step(2, 2, 10, touched=2.5) == pytest.approx(1000 + 60 + 2 * 2.5 * 50)
    verify = sizes.parts(2, 2, 10)["verify"]
    assert verify.flops == 6 * (2 * 1000 / 2 + 2 * 100 * 2 * 2)


def test_the_bound_of_a_run_uses_what_its_steps_touched() -> None:
    sizes = StepBytes(target=1000, target_kv=3, logits=14, bytes_per_value=2, experts=SIZE)
    rows = {"target_rows": 4, "first_pass_rows": 0, "first_pass_kept": 0, "loop_rows": 0}
    stepped = Stepped(kind="decode", time=1, seconds=1, num_sequences=2, num_spec_tokens=1, **rows)
    events: list[Event] = []
    for name in "ab":
        events += [
            Submitted(sequence=name, time=0, num_prompt_tokens=7),
            Prefilled(sequence=name, time=0, emitted=1, num_cached=0),
        ]
    events += [Verified(sequence=name, time=1, drafts=(1,), accepted=1, emitted=2) for name in "ab"]
    measured = replace(stepped, experts_touched=3.5, expert_bytes=350)
    assert mean_step_bytes([*events, measured], sizes) == pytest.approx(1000 + 16 * 3 + 350)
    assert mean_step_bytes([*events, stepped], sizes) == pytest.approx(
        1000 + 16 * 3 + 2 * 8 * (1 - 0.75**4) * 50
    )
