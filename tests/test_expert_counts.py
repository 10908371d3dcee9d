"""The experts that steps touch: counted on the device, kept in rows, and part of a step's bound."""

import copy
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench.step import touched_note
from calibrated_cycle import Cycle
from calibrated_mixtures import MixtureLayers
from calibrated_shapes import MIXTURES, SHAPES
from calibrated_shapes import Mixture as MixtureShape
from calibrated_weights import Source, target_tensors
from torch import Tensor

from specgen.config import SamplingParams
from specgen.core.graphs import Runner
from specgen.core.sequence import Request
from specgen.engine import choices
from specgen.engine.build import build_engine
from specgen.engine.warm_engine import Run
from specgen.experiments.bound import KVBytes, StepBytes, mean_step_bytes, mean_touched
from specgen.experiments.matrices import find_matrix
from specgen.experiments.output import BenchTable
from specgen.experiments.plans import Yardstick
from specgen.experiments.rounds import Repeats
from specgen.experiments.throughput import table
from specgen.experiments.turns import repeat_of
from specgen.kv.layout import Layout
from specgen.models.expert_counts import ExpertSize, num_touched
from specgen.models.mlp import Mixture
from specgen.models.model_config import Seen
from specgen.record.record_rows import EngineRow, PassRow, Touched
from specgen.report.report import Report
from specgen.report.tables import experts_table, of_run, page
from specgen.report.terminal import render
from tests.engines import Pair, config_of, load_pair, loaded
from tests.fixtures import Padded
from tests.streams import decode_steps as decode_steps_of
from tests.streams import fold, mixture_steps, pass_row, request
from tests.timed_engines import write_tiny

KV = KVBytes(per_layer=3, seen=(Seen(),))
SIZE = ExpertSize(num_layers=2, num_experts=8, num_chosen=2, num_values=100, num_bytes=50)
EXPERTS, CHOSEN = 16, 4


def touched_of(ids: Tensor, active: list[bool], num_experts: int) -> Tensor:
    """Of a pass in which every sequence has as many rows."""
    tables = torch.zeros(len(active), 1, dtype=torch.int32)
    rows = ids.shape[1] // len(active)
    layout = Layout.uniform(tables, torch.zeros(len(active), dtype=torch.int64), rows, 16)
    return num_touched(ids, layout, torch.tensor(active), num_experts)


def fake_mixture(mlp: Any, calls: list[Tensor]) -> Mixture:
    """``mlp`` behind a choice of experts by its inputs, which is also put into ``calls``."""

    def choice(parts: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = parts[0].topk(CHOSEN)
        calls.append(ids)
        return ids, weights

    return Mixture(
        router=lambda x: x[None, :, :EXPERTS],
        choice=choice,
        num_chosen=CHOSEN,
        experts=lambda x, ids, weights: mlp(x)[0],
    )


def fake_config(mixture: Any, **fields: Any) -> Any:
    return SimpleNamespace(mixture=mixture, fp8=None, **fields)


def mixture_of(shape: MixtureShape, *, mxfp4: bool, biases: bool) -> Any:
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
    return write_tiny(tmp_path_factory.mktemp("dense"), num_layers=7)


def as_mixture(pair: Pair) -> tuple[Pair, list[Tensor]]:
    """``pair`` whose target has fake mixtures in all layers but the first, and the choices that they will make."""
    target, calls = pair.models.target, []
    blocks = [replace(block, mlp=fake_mixture(block.mlp, calls)) for block in target.blocks[1:]]
    config = copy.copy(target.config)
    layers = (False, *[True] * len(blocks))
    fields = {"num_experts": EXPERTS, "num_chosen": CHOSEN, "width": 64, "mxfp4": False, "biases": False}
    object.__setattr__(config, "mixture", SimpleNamespace(layers=layers, **fields))
    faked = replace(target, config=config, blocks=(target.blocks[0], *blocks))
    return replace(pair, models=replace(pair.models, target=faked)), calls


def run(pair: Pair, **changes: Any) -> list[EngineRow]:
    cycle, events = Cycle.read(pair.path), []
    config = config_of(pair, max_batch_size=4, page_size=16, **changes)
    engine = build_engine(config, pair.models, events.append)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    asked = [
        Request(id=str(i), prompt_token_ids=cycle.slice(50 * i, 5 + i), sampling=sampling) for i in range(5)
    ]
    assert len(list(engine.generate(asked))) == 5
    return events


def decode_steps(events: Iterable[EngineRow]) -> list[PassRow]:
    return [event for event in events if isinstance(event, PassRow) and event.kind == "decode"]


def test_an_expert_counts_once_a_layer_and_padding_rows_do_not() -> None:
    ids = torch.tensor([[[0, 1], [1, 2], [7, 6]], [[3, 4], [3, 4], [3, 5]]])
    assert touched_of(ids, [True, True, True], 8).tolist() == [5 + 3, 5 + 3]
    assert touched_of(ids, [True, True, False], 8).tolist() == [3 + 2, 3 + 2]
    assert touched_of(ids.int(), [False, False, False], 8).tolist() == [0, 0]


def test_the_first_rows_of_sequences_are_those_of_a_plain_step() -> None:
    rows = [[0, 1], [1, 2], [7, 6], [1, 0], [0, 3], [1, 3]]  # two sequences of three
    ids = torch.tensor([rows])
    assert touched_of(ids, [True, True], 8).tolist() == [6, 2]
    assert touched_of(ids, [False, True], 8).tolist() == [3, 2]
    assert touched_of(ids, [True, False], 8).tolist() == [5, 2]


@pytest.mark.parametrize("changes", [{"num_spec_tokens": 0}, {}, {"drafter_batch": "non-padded"}])
def test_decode_steps_say_what_they_touched(dense: Path, changes: dict[str, Any]) -> None:
    pair, calls = as_mixture(load_pair(dense))
    events = run(pair, **{"num_spec_tokens": 3} | changes)
    size = ExpertSize.of(pair.models.target.config, 4)
    assert size.num_bytes == 3 * SHAPES["tiny"].hidden_size * 64 * 4
    layers = size.num_layers
    passes = [calls[at : at + layers] for at in range(0, len(calls), layers)]
    steps = [row for row in events if isinstance(row, PassRow)]
    # a pass may be read after the next is launched, so they are compared by number and not in order
    expected: Counter[tuple[int, ...]] = Counter()
    for each in passes:
        firsts = [ids[::step_rows] for ids in each if (step_rows := changes.get("num_spec_tokens", 3) + 1)]
        expected[tuple(sum(ids.unique().numel() for ids in rows) for rows in (each, firsts))] += 1
    found = Counter(
        (round(step.experts.experts * layers), round(step.experts.plain * layers))
        for step in steps
        if step.experts
    )
    assert found.total() == len(decode_steps(events)) > 5
    assert found <= expected
    assert {step.experts for step in steps if step.kind == "prefill"} == {None}
    for step in decode_steps(events):
        assert step.experts.num_bytes == round(step.experts.experts * layers) * size.num_bytes
        assert step.experts.num_experts == EXPERTS


def test_padding_rows_change_nothing(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, _ = as_mixture(load_pair(dense))
    plain, padded = [], []
    for found, runner in ((plain, Runner), (padded, Padded)):
        monkeypatch.setitem(choices.RUNNERS, "off", runner)
        found += [step.experts for step in decode_steps(run(pair, num_spec_tokens=2))]
    assert plain == padded


def test_a_dense_target_counts_nothing(dense: Path) -> None:
    pair = load_pair(dense)
    assert ExpertSize.of(pair.models.target.config, 4) is None
    assert {step.experts for step in decode_steps(run(pair, num_spec_tokens=2))} == {None}


def test_the_experts_of_independent_rows() -> None:
    size = replace(SIZE, num_experts=128, num_chosen=8)
    ids = torch.rand(2000, 5, 128, generator=torch.Generator().manual_seed(0)).topk(8).indices
    drawn = touched_of(ids, [True] * 5, 128)[0] / len(ids)
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
    assert size.total_bytes == total


def test_experts_are_no_part_of_what_every_pass_reads(dense: Path, monkeypatch) -> None:
    models = loaded(config_of(load_pair(dense)))
    whole = StepBytes.of(models)
    monkeypatch.setattr(ExpertSize, "of", lambda config, width: SIZE)
    without = StepBytes.of(models)
    assert whole.target - without.target == 2 * 8 * 50
    assert (whole.experts, without.experts) == (None, SIZE)


def test_a_step_reads_the_experts_that_its_rows_touch() -> None:
    sizes = StepBytes(target=1000, target_kv=KV, logits=14, bytes_per_value=2, experts=SIZE)
    assert sizes.step(0, 1, 10) == pytest.approx(1000 + 30 + 2 * 2 * 50)
    by_chance = 8 * (1 - 0.75**6)
    assert sizes.step(2, 2, 10) == pytest.approx(1000 + 60 + 2 * by_chance * 50)
    assert sizes.step(2, 2, 10, touched=2.5) == pytest.approx(1000 + 60 + 2 * 2.5 * 50)
    verify = sizes.parts(2, 2, 10)["verify"]
    assert verify.flops == 6 * (2 * 1000 / 2 + 2 * 100 * 2 * 2)


def test_the_bound_of_a_run_uses_what_its_steps_touched() -> None:
    sizes = StepBytes(target=1000, target_kv=KV, logits=14, bytes_per_value=2, experts=SIZE)
    stepped = pass_row(num_sequences=2, num_spec_tokens=1, target_rows=4)
    requests = [row for name in "ab" for row in request(name, [(1, 1)], num_prompt_tokens=7)]
    measured = replace(stepped, experts=Touched(experts=3.5, plain=2, num_experts=8, num_bytes=350))
    assert mean_step_bytes(requests, [measured], sizes) == pytest.approx(1000 + 16 * 3 + 350)
    assert mean_step_bytes(requests, [stepped], sizes) == pytest.approx(
        1000 + 16 * 3 + 2 * 8 * (1 - 0.75**4) * 50
    )


STEPS = [
    *mixture_steps(1, 4, (6.0, 2.0), (5.0, 2.0)),
    *mixture_steps(1, 0, (2.0, 2.0)),
    *mixture_steps(30, 4, (8.0, 7.0)),
    *mixture_steps(17, 4, (7.0, 5.0)),
]


def test_a_report_says_what_plain_and_verify_steps_touched_by_batch_size() -> None:
    report = json.loads(json.dumps(fold(STEPS, num_spec_tokens=4).to_json()))
    lone, plain, verify = (
        {name: stats[name] for name in ("sequences", "num_steps", "touched", "touched_plain", "num_bytes")}
        for stats in sorted(
            report["experts"], key=lambda stats: (stats["sequences"], -stats["num_spec_tokens"])
        )
    )
    assert lone == {
        "sequences": "1",
        "num_steps": 2,
        "touched": 5.5,
        "touched_plain": 2.0,
        "num_bytes": 5.5e7,
    }
    assert plain["touched"] == plain["touched_plain"] == 2.0
    assert (verify["sequences"], verify["num_steps"], verify["touched"]) == ("17-32", 2, 7.5)
    assert [stats["num_spec_tokens"] for stats in report["experts"]] == [0, 4, 4]
    assert report["experts"][2]["mean_sequences"] == 23.5


def test_terminal_and_page_show_the_experts() -> None:
    report = fold(STEPS, num_spec_tokens=4)
    lines = [" ".join(line.split()) for line in render(of_run(report, {})).splitlines()]
    assert "1 verify, K = 4 2 5.5 2.0 2.75x 0.06" in lines
    assert "1 plain 1 2.0 2.0 1.00x 0.02" in lines
    assert "17-32 verify, K = 4 2 7.5 6.0 1.25x 0.07" in lines
    assert any("experts touched = of the 8 of a layer" in line for line in lines)
    html = page(report, {}, "title")
    assert "Experts touched" in html
    assert "2.75x" in html


def test_the_table_shows_the_most_frequent_kinds_of_steps() -> None:
    events = [
        event for k in range(8) for n in (1, 8) for event in mixture_steps(n, k, *[(4.0, 2.0)] * (k + 1))
    ]
    report = fold(events, num_spec_tokens=7)
    (table,) = experts_table(report)
    assert len(report.experts) == 16
    assert [row["step"] for row in table.rows] == 2 * [f"verify, K = {k}" for k in range(2, 8)]


def test_reports_without_experts_have_no_such_table() -> None:
    report = fold(decode_steps_of(3), num_spec_tokens=3).to_json()
    for each in (report, {name: value for name, value in report.items() if name != "experts"}):
        assert list(experts_table(Report.from_json(each))) == []
        assert "experts" not in render(of_run(Report.from_json(each), {}))


def test_the_throughput_bench_says_what_steps_touched_and_what_that_costs() -> None:
    sizes = StepBytes(target=0, target_kv=KV, logits=0, bytes_per_value=2, experts=SIZE)
    yardstick = Yardstick(sizes=sizes, bytes_per_second=1e10, flops_per_second=1e12, known=None)
    matrix = find_matrix("batch-and-k")

    def shown(events: list[EngineRow]) -> BenchTable:
        run = Run(completions={}, passes=events, seconds=1.0, num_spec_tokens=4)
        repeat = replace(repeat_of(run, yardstick), texts={"a": "1"})
        measured = {matrix.arms[0].name: Repeats(each={"round 1": repeat})}
        return table(matrix, {}, measured, [], yardstick)

    (row,) = shown(list(mixture_steps(1, 4, (6.0, 2.0), (5.0, 2.0)))).rows
    assert (row["experts"], row["experts_plain"]) == (5.5, 2.0)
    assert row["experts_read"] == pytest.approx(1e3 * 5.5e7 / 1e10)
    assert "of the 8 of a layer" in yardstick.conditions["experts"]
    assert "experts" not in shown([]).rows[0]


def test_tokens_behind_the_end_of_a_text_are_none_of_a_step() -> None:
    (ended,) = request("a", [(4, 4), (4, 4)], dropped=3)
    completion: Any = SimpleNamespace(record=ended, token_ids=range(8), request=SimpleNamespace(id="a"))
    passes = [pass_row(number=number) for number in range(2)]
    run = Run(completions={"a": completion}, passes=passes, seconds=1.0, num_spec_tokens=4)
    assert repeat_of(run).tokens_per_step == (5 + 2) / 2


def test_the_mean_is_of_steps_of_the_whole_batch() -> None:
    events = [*mixture_steps(4, 1, (6.0, 3.0), (8.0, 5.0)), *mixture_steps(3, 1, (1.0, 1.0))]
    found = mean_touched(events, 4)
    assert found == Touched(experts=7.0, plain=4.0, num_experts=8, num_bytes=7 * 10**7)
    assert mean_touched(events, 2) is None
    sizes = StepBytes(target=0, target_kv=KV, logits=0, bytes_per_value=2, experts=SIZE)
    text = touched_note(found, sizes, 8, 1e10)
    assert "7.0 of the 8 experts" in text
    assert "(7.2 by chance, 4.0 by a plain step), 0.07 GB in all layers: 7.000 ms" in text
