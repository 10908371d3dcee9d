"""The throughput bench on a CPU: its matrices as data, its prompts, and which arms alternate."""

import gc
import json
import re
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calibrated_cycle import Cycle
from calibrated_shapes import SHAPES
from calibrated_weights import Source
from make_calibrated_pair import write_pair

from specgen.config import DraftLength, EngineConfig, SamplingParams, UserError, acceptance_rates
from specgen.core import step
from specgen.core.engine_core import EngineCore
from specgen.core.sequence import Completion, Request
from specgen.decoding.outcome import NO_DRAFT
from specgen.decoding.verify import accept_by_dice, accept_greedy
from specgen.engine import build, step_costs, warm_engine
from specgen.engine.arms import Arm
from specgen.engine.build import build_engine
from specgen.engine.engine import Engine
from specgen.engine.loading import Models
from specgen.engine.warm_engine import WarmEngine
from specgen.experiments import plans
from specgen.experiments import throughput as bench
from specgen.experiments import workload as workloads
from specgen.experiments.matrices import MATRICES, Axis, Matrix, Workload, find_matrix
from specgen.experiments.plans import Plan, side_by_side
from specgen.experiments.rounds import MedianRange
from specgen.experiments.throughput import ThroughputJob, best_lengths, throughput
from specgen.experiments.workload import KnownText, kv_bytes, make_prompts
from specgen.report.terminal import render
from tests.commands import printed, refused
from tests.engines import Pair, engine_config, loaded, resolved
from tests.streams import RECORD
from tests.timed_engines import install

SHAPE = SHAPES["tiny"]
CYCLE = Cycle.draw(SHAPE.num_plain_tokens, SHAPE.draft_vocab_size, 0.75, seed=0)
SMALL = Workload(dataset="random", num_prompts=3, prompt_tokens=9, max_new_tokens=12, max_batch_size=2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    write_pair(path, SHAPE, CYCLE, Source("cpu", 0))
    config = path / "target" / "config.json"
    assert json.loads(config.read_text())["synthetic_weights"]
    return path


def engine_of(pair: Path, **changes) -> EngineConfig:
    settings = {"page_size": 4, "device": "cpu", "prefix_cache": False} | changes
    return engine_config(pair, **settings)


@pytest.fixture(scope="module")
def models(pair: Path) -> Models:
    return loaded(engine_of(pair))


def job_of(
    pair: Path, name: str, *values: str, workload: Workload = SMALL, repeats: int = 2
) -> ThroughputJob:
    matrix = find_matrix(name).with_values(values)
    engine = engine_of(pair, max_batch_size=workload.max_batch_size)
    return ThroughputJob(matrix=matrix, workload=workload, engine=engine, repeats=repeats)


# --- matrices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=list(MATRICES))
def test_every_arm_is_a_configuration_of_its_own(matrix: Matrix) -> None:
    engine = EngineConfig(model="target", drafter="head")
    configs = [arm.configure(engine) for arm in matrix.arms]
    assert len(set(configs)) == len({arm.name for arm in matrix.arms}) == len(configs)
    names = {axis.name for axis in matrix.axes}
    assert all(labels.keys() <= names for labels in matrix.ratios.values())


def test_the_arms_of_the_sources() -> None:
    arms = {name: [arm.name for arm in matrix.arms] for name, matrix in MATRICES.items()}
    assert arms["vllm-25196"] == [
        f"attention {attention}, decoding {decoding}"
        for attention in ("hopper", "trtllm", "flashinfer")
        for decoding in ("plain", "padded", "non-padded")
    ]
    assert arms["vllm-21477"] == [
        f"cuda_graphs {graphs}, decoding padded" for graphs in ("off", "pass", "step")
    ]
    assert len(arms["batch-and-k"]) == 6 * 9
    last = MATRICES["batch-and-k"].arms[-1].configure(EngineConfig(model="target", drafter="head"))
    assert (last.max_batch_size, last.draft_length) == (256, DraftLength(most=7, kind="auto"))
    source = MATRICES["vllm-19825"].workload
    assert (source.prompt_tokens, source.max_new_tokens, source.num_prompts) == (100, 1000, 500)


def test_other_values_on_an_axis() -> None:
    matrix = find_matrix("batch-and-k").with_values(["K=0, 3", "batch=16"])
    assert [dict(arm.changes) for arm in matrix.arms] == [{"batch": 16, "K": 0}, {"batch": 16, "K": 3}]
    assert find_matrix("batch-and-k").axes[1].values[-1] == "auto"
    for wrong, reason in (
        ("k=3", r"axis is 'k=3' \(did you mean K\?\): write NAME=VALUE,VALUE with one of batch, K"),
        ("batch", "axis is 'batch': write"),
        ("bach=8", r"axis is 'bach=8' \(did you mean batch\?\): write"),
    ):
        with pytest.raises(UserError, match=reason):
            matrix.with_values([wrong])
    with pytest.raises(UserError, match="axis decoding has 'fast': use some of plain, padded, non-padded"):
        find_matrix("vllm-25196").with_values(["decoding=fast"])
    with pytest.raises(UserError, match="axis attention has 'foo': use some of auto, hopper, trtllm"):
        Axis(name="attention", values=("sdpa", "foo"))
    with pytest.raises(UserError, match="axis batch has 'x': use whole numbers"):
        Axis(name="batch", values=("x",))
    with refused("num-spec-tokens is 'x': use 1 to 16, 0 for plain decoding, auto or uniform"):
        find_matrix("batch-and-k").with_values(["K=x"])
    with pytest.raises(UserError, match="matrix is 'x': use one of vllm-25196, "):
        find_matrix("x")
    with pytest.raises(UserError, match="num-prompts is 0: use at least 1"):
        replace(SMALL, num_prompts=0)


# --- prompts --------------------------------------------------------------------------------------


def test_random_prompts_are_of_the_draft_vocabulary(models: Models) -> None:
    prompts = make_prompts(SMALL, models, 40)
    assert [len(request.prompt_token_ids) for request in prompts.requests] == [9] * 40
    drawn = {token for request in prompts.requests for token in request.prompt_token_ids}
    assert drawn <= set(CYCLE.tokens)
    assert len(drawn) > 20
    assert len({request.prompt_token_ids for request in prompts.requests}) == 40
    assert make_prompts(SMALL, models, 40) == prompts
    assert prompts.requests[0].sampling == SamplingParams(max_tokens=12, ignore_eos=True)


def test_synthetic_weights_get_random_tokens_as_long_as_the_texts(models: Models, tmp_path: Path) -> None:
    rows = [
        {"id": str(i), "prompt": " ".join(["a"] * length)}
        for i, length in enumerate((3, 7, SHAPE.max_positions - 100))
    ]
    data = tmp_path / "own.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    prompts = make_prompts(replace(SMALL, dataset=str(data), max_new_tokens=200), models, 5)
    assert [len(request.prompt_token_ids) for request in prompts.requests] == [3, 7, 3, 7, 3]
    assert len({request.prompt_token_ids for request in prompts.requests}) == 5
    limit = SHAPE.max_positions
    assert prompts.notes == (f"left out: 1 prompts that with 200 new tokens exceed a context of {limit}",)
    assert prompts.description == f"random tokens, as long as 2 first turns of {data}, repeated to 5"
    with pytest.raises(UserError, match=r"no prompt of .* can run: left out: 3 prompts"):
        make_prompts(replace(SMALL, dataset=str(data), max_new_tokens=limit), models, 5)


# --- turns ----------------------------------------------------------------------------------------


def plan(name: str, need: int, overhead: int = 0) -> Plan:
    config = EngineConfig(model="target", drafter="head")
    return Plan(arm=Arm(name=name), config=config, requests=(), kv_bytes=need, overhead=overhead)


@pytest.mark.parametrize(
    ("needs", "groups"),
    [
        ([4, 4, 2], [[4, 4, 2]]),
        ([4, 4, 3, 7], [[4, 4], [3, 7]]),
        ([11, 1, 9], [[11], [1, 9]]),
        ([10, 1], [[10], [1]]),
        ([], []),
    ],
)
def test_neighbours_take_turns_as_far_as_their_caches_fit(needs: list[int], groups: list[list[int]]) -> None:
    found = side_by_side([plan(str(i), need) for i, need in enumerate(needs)], 10)
    assert [[each.kv_bytes for each in group] for group in found] == groups
    for each in (each for group in found for each in group):
        assert each.config.kv_memory == (each.kv_bytes if each.kv_bytes <= 10 else None)


def test_memory_beside_the_cache_counts() -> None:
    found = side_by_side([plan(str(i), 3, overhead=2) for i in range(3)], 10)
    assert [len(group) for group in found] == [2, 1]
    assert {each.config.kv_memory for group in found for each in group} == {3}
    (alone,) = side_by_side([plan("0", 9, overhead=2)], 10)
    assert alone[0].config.kv_memory is None


def test_the_cache_is_as_large_as_the_requests_need(pair: Path, models: Models, monkeypatch) -> None:
    monkeypatch.setattr(workloads, "_WARM_UP", 1)
    config = resolved(engine_of(pair, max_batch_size=2, num_spec_tokens=3))
    sampling = SamplingParams(max_tokens=6)
    lengths = (5, 30, 1)
    requests = [
        Request(id=str(i), prompt_token_ids=(0,) * length, sampling=sampling)
        for i, length in enumerate(lengths)
    ]
    token_bytes = 2 * SHAPE.kv_size * 4 * (SHAPE.num_layers + 1)
    pages = 10 + 4  # of four positions: 30 and 5 prompt tokens, 6 new ones, 4 rows per step
    assert kv_bytes(config, models, requests) == pages * 4 * token_bytes
    auto = replace(config, num_spec_tokens="auto", max_batch_size=1)
    need = kv_bytes(auto, models, requests)
    engine = build_engine(replace(auto, kv_memory=need, num_spec_tokens=7), models, lambda event: None)
    costs = step_costs.measure(engine, 1, DraftLength(most=7, kind="auto"))
    assert costs.lengths == tuple(range(8)), "short requests leave room to time the steps"


@pytest.mark.slow
def test_arms_take_turns_within_a_repeat(pair: Path, monkeypatch) -> None:
    order: list[tuple[int, bool]] = []
    generate = EngineCore.generate

    def watched(self: EngineCore, requests, *rest):
        given = list(requests)
        if not given[0].id.startswith("warm-up"):
            order.append(id(self))
        return generate(self, given, *rest)

    monkeypatch.setattr(EngineCore, "generate", watched)
    job = job_of(pair, "batch-and-k", "batch=2", "K=0,2")
    tables = list(throughput(job))
    assert [[row["repeats"] for row in table.rows] for table in tables] == [[1, 1], [2, 2], [2, 2]]
    for row in tables[-1].details[0].rows:  # where the wall time went adds up
        parts = ("prefill", "full", "filling", "tail", "idle", "captures", "rest")
        assert sum(row[part] for part in parts) == pytest.approx(1)
        assert 0 < row["of_gemms"] < row["prefill"]
        assert row["passes"] == 2  # three prompts, two at a time
    assert len(order) == 2 * 3
    first, second = order[:2]
    assert order == [first, second, first, second, second, first], "warm-ups, then each begins a round"
    order.clear()
    monkeypatch.setattr(build, "_CPU_REST", 0)
    apart = list(throughput(job))
    assert apart[-1].conditions["arms that took turns"] == "1; 1"
    assert apart[-1].conditions["CUDA graphs"] == "off"
    assert not {"draft tokens (K)", "batch"} & apart[-1].conditions.keys(), "the axes say it"
    assert [len(set(order[:3])), len(set(order[3:]))] == [1, 1]


def test_a_stopped_bench_goes_on(pair: Path, monkeypatch, tmp_path: Path) -> None:
    """The round that was cut off is measured again as a whole, so that its ratios are of one process."""
    job = job_of(pair, "batch-and-k", "batch=2", "K=0,2", repeats=3)

    def stopped(config: EngineConfig, number: int) -> float:
        if len(timed.order) == 2 + 2 + 2:  # warm-ups, a round, and the second arm of the next
            raise KeyboardInterrupt
        return 1.0 + number

    timed = install(monkeypatch, stopped)
    with pytest.raises(KeyboardInterrupt):
        list(throughput(job, tmp_path))
    timed = install(monkeypatch, lambda config, number: 3.0)
    table = list(throughput(job, tmp_path))[-1]
    assert len(timed.order) - len(timed.built) == 2 * 2
    assert [row["repeats"] for row in table.rows] == [3, 3]
    assert [(row["lowest"], row["highest"]) for row in table.rows] == 2 * [(100.0, 150.0)]
    assert table.rows[1]["x_plain_lowest"] == table.rows[1]["x_plain_highest"] == 1
    timed = install(monkeypatch, lambda config, number: 2.0)
    assert list(throughput(job, tmp_path))[-1].rows == table.rows
    assert timed.built == []
    with pytest.raises(UserError, match=r"differs in bench.axes.K 0, 2 -> 0, 3: name a new directory"):
        list(throughput(job_of(pair, "batch-and-k", "batch=2", "K=0,3", repeats=3), tmp_path))
    (tmp_path / "throughput-batch-and-k.settings.json").unlink()
    table.write(tmp_path)
    with pytest.raises(UserError, match="without the rounds that it is of: name a new directory"):
        list(throughput(job, tmp_path))


@pytest.mark.slow
def test_dice_accept_in_place_of_the_target(pair: Path, tmp_path: Path) -> None:
    workload = replace(SMALL, num_prompts=8, max_new_tokens=30)
    job = job_of(pair, "batch-and-k", "batch=8", "K=0,2", workload=workload, repeats=1)
    job, other = (
        replace(job, engine=replace(job.engine, synthetic_acceptance=rates))
        for rates in ((0.9, 0.5), (0.9, 0.4))
    )
    *_, found = throughput(job, tmp_path)
    assert "0.9, 0.5 by position" in str(found.conditions["synthetic acceptance"])
    assert "same_texts" not in found.conditions
    assert {row["same_texts"] for row in found.rows} == {row["wrong_tokens"] for row in found.rows} == {None}
    first, second = map(float, str(found.rows[1]["acceptance"]).split())
    assert 0.8 < first < 1
    assert 0.4 < second / first < 0.6
    with pytest.raises(UserError, match="synthetic_acceptance"):
        list(throughput(other, tmp_path))


@pytest.mark.slow
def test_a_synthetic_length_is_the_one_measured_at_each_k(pair: Path) -> None:
    workload = replace(SMALL, num_prompts=16, max_new_tokens=40)
    job = job_of(pair, "batch-and-k", "batch=8", "K=1,3", workload=workload, repeats=1)
    *_, found = throughput(replace(job, engine=replace(job.engine, synthetic_acceptance=2.5)), None)
    (k3,) = (row["acceptance_length"] for row in found.rows)  # K = 1 cannot have it
    assert k3 == pytest.approx(
        2.5, abs=0.15
    )  # a chance of 0.6, which any number of drafts would need, gives 2.18
    said = "a mean acceptance length of 2.5 at each K (auto: at its largest)"
    assert said in str(found.conditions["synthetic acceptance"])
    assert any("K = 1 drafts yields at most 2 tokens" in note for note in found.notes)


@pytest.mark.parametrize(("length", "k", "chance"), [(1, 3, 0.0), (4, 3, 1.0), (1.8, 1, 0.8), (1.75, 2, 0.5)])
def test_one_chance_is_solved_for_a_synthetic_length(
    pair: Path, length: float, k: int, chance: float
) -> None:
    config = engine_of(pair, num_spec_tokens=k, synthetic_acceptance=float(length))
    assert config.synthetic_chances() == pytest.approx((chance,))
    with pytest.raises(UserError, match="n-grams may draft fewer than K tokens"):
        replace(config, drafter="ngram").synthetic_chances()


def test_a_synthetic_length_that_no_arm_can_have_is_refused(pair: Path) -> None:
    job = job_of(pair, "batch-and-k", "batch=2", "K=0,3", repeats=1)
    with pytest.raises(
        UserError, match=r"synthetic-acceptance is 4.5, but a step of K = 3 drafts yields at most 4"
    ):
        list(throughput(replace(job, engine=replace(job.engine, synthetic_acceptance=4.5)), None))


@pytest.mark.parametrize(
    ("text", "rates"), [("0.8,0.6", (0.8, 0.6)), ("0,0", (0.0, 0.0)), ("1", 1.0), ("3.2", 3.2)]
)
def test_synthetic_acceptance_is_chances_or_a_length(text: str, rates: tuple[float, ...] | float) -> None:
    assert acceptance_rates(text) == rates


@pytest.mark.parametrize("text", ["", "x", "0.5,1.2", "-0.1", "0.8", "0", "nan", "inf", "2,3", "0.5,"])
def test_other_synthetic_acceptances_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="use a mean acceptance length of 1 to K \\+ 1 such as"):
        acceptance_rates(text)


def test_texts_by_dice_are_for_the_bench_alone(pair: Path) -> None:
    with pytest.raises(UserError, match="its texts are not the model's, use specgen bench throughput"):
        Engine(engine_of(pair, synthetic_acceptance=(0.5,)))


def test_dice_decide_on_drafts_behind_accepted_ones() -> None:
    drafts = torch.tensor([[5, 6, 7], [5, 6, 7], [5, NO_DRAFT, NO_DRAFT]])
    greedy = torch.tensor([[1, 2, 3, 4]] * 3)
    dice = torch.tensor([[0.1, 0.9, 0.1], [0.4, 0.4, 0.1], [0.1, 0.0, 0.0]])
    accepted, tokens = accept_by_dice(drafts, greedy, torch.tensor([0.5, 0.5, 0.2]), dice)
    assert accepted.tolist() == [1, 3, 1]
    assert [row[: count + 1] for row, count in zip(tokens.tolist(), accepted.tolist(), strict=True)] == [
        [5, 2],
        [5, 6, 7, 4],
        [5, 2],
    ]


def test_an_engine_frees_its_memory_at_once(pair: Path, models: Models) -> None:
    """Even without garbage collection before the next engine, which takes all free memory."""
    requests = make_prompts(SMALL, models, 2).requests
    gc.disable()
    try:
        engine = WarmEngine(resolved(engine_of(pair)), models, requests)
        core, runs = weakref.ref(engine._engine), [engine.run(), engine.run()]
        del engine
        assert core() is None
    finally:
        gc.enable()
    for run in runs:  # each has its own rows
        assert len({row.number for row in run.passes}) == len(run.passes) > 0
        assert len(run.requests) == 2


# --- the table ------------------------------------------------------------------------------------


def test_a_range_is_that_of_the_repeats() -> None:
    assert MedianRange.of([3.0, 1.0, 2.5]) == MedianRange(median=2.5, lowest=1.0, highest=3.0)


@pytest.mark.slow
def test_batch_and_k(pair: Path) -> None:
    workload = replace(SMALL, num_prompts=None)
    job = job_of(pair, "batch-and-k", "batch=1,3", "K=0,2,4", workload=workload, repeats=1)
    table = list(throughput(job))[-1]
    assert [(row["batch"], row["K"]) for row in table.rows] == [(b, k) for b in (1, 3) for k in (0, 2, 4)]
    rows = {(row["batch"], row["K"]): row for row in table.rows}
    for (_, k), row in rows.items():
        assert row["lowest"] <= row["speed"] <= row["highest"]
        assert row["same_texts"] == 1
        assert (row["x_plain"] is None) == (row["acceptance_length"] is None) == (k == 0)
        if k:
            assert row["x_plain_lowest"] <= row["x_plain"] <= row["x_plain_highest"]
            read, plain = row["bound"], rows[row["batch"], 0]["bound"]
            # the last step of a text may have accepted more than the text has
            assert 0.7 < row["x_plain_bound"] / (row["acceptance_length"] * plain / read) < 1
            assert 1 < row["x_plain_bound"] < row["acceptance_length"] <= k + 1
        else:
            assert row["x_plain_bound"] is None
    assert rows[1, 2]["acceptance_length"] < rows[1, 4]["acceptance_length"]
    assert [note.split(":")[0] for note in table.answers] == ["batch 1", "batch 3"]
    assert "weights synthetic" in table.conditions["model"]
    assert "6 prompts of 9 random tokens" in table.conditions["prompts"]
    assert "Output tokens per second" in table.to_html()
    assert max(map(len, render(table.parts(), 80).splitlines())) <= 80


@pytest.mark.slow
def test_modes_are_beside_their_bound_and_the_known_text(pair: Path) -> None:
    workload = replace(SMALL, num_prompts=4, max_new_tokens=24)
    job = job_of(pair, "vllm-25196", "attention=sdpa", workload=workload, repeats=1)
    table = list(throughput(job))[-1]
    plain, padded, non_padded = table.rows
    for row in table.rows:
        assert row["over_bound"] == pytest.approx(row["step"] / row["bound"])
        assert row["over_bound"] > 1
    assert plain["bound"] < padded["bound"] == non_padded["bound"], "the head has weights too"
    assert plain["acceptance"] is None
    assert padded["acceptance"] == non_padded["acceptance"]
    rates = [float(rate) for rate in padded["acceptance"].split()]
    assert 0.5 < rates[0] < 1
    assert rates == sorted(rates, reverse=True)
    assert len(rates) == 4
    assert [row["wrong_tokens"] for row in table.rows] == [0, 0, 0]
    assert table.conditions["wrong_tokens"].endswith("the pair's head knows 75.0 % of it")


@pytest.mark.slow
def test_a_wrong_token_is_counted(pair: Path, monkeypatch) -> None:
    """One wrong token is planted per run; the text continues from it."""
    planted = CYCLE.tokens[5]

    def wrong(drafts, greedy):
        accepted, tokens = accept_greedy(drafts, greedy)
        if drafts.shape[1] and len(tokens) == 1:  # the last of three prompts decodes alone at the end
            tokens = tokens.clone()
            tokens[0, accepted[0]] = planted
        return accepted, tokens

    monkeypatch.setattr(step, "accept_greedy", wrong)
    table = list(throughput(job_of(pair, "vllm-25196", "attention=sdpa", repeats=1)))[-1]
    wrong_tokens = [row["wrong_tokens"] for row in table.rows]
    assert wrong_tokens[0] == 0, "plain decoding has no drafts"
    assert min(wrong_tokens[1:]) > 0
    assert {row["same_texts"] for row in table.rows[1:]} == {2 / 3}


def test_wrong_missing_and_surplus_tokens_are_counted(models: Models) -> None:
    known = KnownText.of(models)
    prompt = CYCLE.slice(7, 4)
    request = Request(id="a", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=5))
    text = CYCLE.after(prompt[-1], 5)

    def num_wrong(*token_ids: int) -> int:
        done = Completion(request=request, token_ids=token_ids, finish_reason="length", record=RECORD)
        return known.num_wrong([done, done])

    assert known.accept == 0.75
    assert num_wrong(*text) == 0
    assert num_wrong(*text[:3]) == 4
    assert num_wrong(*text, text[0]) == 2
    assert num_wrong(text[1], *text[1:]) == 2
    at_the_end = replace(known, max_positions=len(prompt) + 3)
    done = Completion(request=request, token_ids=text[:3], finish_reason="length", record=RECORD)
    assert at_the_end.num_wrong([done]) == 0, "the context ends the text"


def test_a_text_that_is_not_known_is_not_judged(models: Models, demo_pair: Pair) -> None:
    assert KnownText.of(demo_pair.models) is None
    other = replace(models, head=demo_pair.models.head)  # drafts tokens outside of the cycle
    assert KnownText.of(other) is None


def test_the_best_length_of_a_batch() -> None:
    def row(batch: int, k: int | str, speed: float, ratio: float | None) -> dict[str, object]:
        return {"batch": batch, "K": k, "speed": speed, "x_plain": ratio}

    rows = [row(1, 0, 100.0, None), row(1, 3, 250.0, 2.5), row(1, 5, 200.0, 2.0), row(1, "auto", 240.0, 2.4)]
    rows += [row(64, 0, 900.0, None), row(64, 3, 800.0, 0.9), row(8, "auto", 5.0, None)]
    assert list(best_lengths(rows)) == [
        "batch 1: K 3 is best, 250 tokens/s, 2.50x plain decoding; auto has 96.0 % of it.",
        "batch 64: K 0 is best, 900 tokens/s.",
    ]
    assert list(best_lengths([{"attention": "sdpa"}])) == []


@pytest.mark.slow
def test_an_arm_that_cannot_run_or_fails_is_a_note(pair: Path, monkeypatch) -> None:
    build = warm_engine.build_engine

    def broken(config: EngineConfig, *rest):
        if config.drafter_batch == "non-padded":
            raise RuntimeError("no kernel")
        return build(config, *rest)

    monkeypatch.setattr(warm_engine, "build_engine", broken)
    table = list(throughput(job_of(pair, "vllm-25196", "attention=trtllm,sdpa", repeats=1)))[-1]
    assert [(row["attention"], row["decoding"]) for row in table.rows] == [
        ("sdpa", "plain"),
        ("sdpa", "padded"),
    ]
    assert [note.split(":")[0] for note in table.notes] == ["not run"] * 3 + ["failed"]
    assert table.notes[-1] == "failed: attention sdpa, decoding non-padded: RuntimeError: no kernel"
    assert table.rows[1]["x_plain"] is not None
    assert table.rows[1]["x_non_padded"] is None
    here = "use --attention auto; attention and decoding are set here as in --axis attention=VALUE"
    with pytest.raises(UserError, match=f"no arm can run here: .*: {here}"):
        list(throughput(job_of(pair, "vllm-25196")))


def test_the_command_writes_its_files(pair: Path, tmp_path: Path) -> None:
    files = {"model": pair / "target", "drafter": pair / "drafter", "output": tmp_path}
    arguments = [f"--{name}={path}" for name, path in files.items()]
    arguments += ["--device=cpu", "--dataset=random", "--prompt-tokens=5", "--num-prompts=3", "--repeats=1"]
    arguments = ["bench", "throughput", "--matrix=vllm-21477", *arguments, "--max-new-tokens=20", "--json"]
    done = printed(*arguments)
    document = json.loads(done)
    assert document == json.loads((tmp_path / "throughput-vllm-21477.json").read_text())
    (row,) = document["rows"]
    assert row["cuda_graphs"] == "off"
    assert 0 < row["ttft_median"] <= row["ttft_p99"]
    # a step emits several tokens at once
    assert 0 < row["tpot_mean"] < row["itl_mean"]
    assert [note.split(":")[0] for note in document["notes"]] == ["not run", "not run"]
    assert len((tmp_path / "throughput-vllm-21477.csv").read_text().splitlines()) == 2


@pytest.mark.slow
def test_the_bounds_of_a_bench_that_goes_on_are_of_one_bandwidth(
    pair: Path, monkeypatch, tmp_path: Path
) -> None:
    """That of the copy which the table names, also for the rounds of the first command."""

    def bounds(bandwidth: float, repeats: int, values: tuple[str, ...]) -> list[float]:
        monkeypatch.setattr(plans, "copy_bandwidth", lambda device: bandwidth)
        job = job_of(pair, "vllm-25196", *values, repeats=repeats)
        table = list(throughput(job, tmp_path))[-1]
        assert f"over {bandwidth / 1e9:.3g} GB/s of a copy" in table.conditions["bound"]
        assert [row["repeats"] for row in table.rows] == [repeats] * 2
        return [row["bound"] for row in table.rows]

    values = ("attention=sdpa", "decoding=plain,padded")
    first = bounds(1e10, 1, values)
    assert first[1] > first[0] > 0
    assert bounds(4e10, 2, values) == pytest.approx([bound / 4 for bound in first])


def test_a_dry_run_lists_the_arms(pair: Path, monkeypatch) -> None:
    timed = install(monkeypatch, lambda config, number: 1.0)
    monkeypatch.setattr(plans, "copy_bandwidth", lambda device: 11.7e9)
    monkeypatch.setattr(plans, "machine_state", lambda: {"load": 5.0, "cpus": 2})
    arguments = ["bench", "throughput", "--matrix=batch-and-k", "--axis=batch=2", "--axis=K=0,3"]
    arguments += [f"--model={pair / 'target'}", f"--drafter={pair / 'drafter'}", "--device=cpu"]
    done = printed(*arguments, "--dataset=random", "--dry-run")
    assert timed.built == []
    assert "batch 2, K 3" in done
    assert re.search(r"2 arms, with a warm-up each: about \d+ s, if every step", " ".join(done.split()))
    busy = "11.7 GB/s of a copy; BUSY: load 5 of other programs in the last minute on 2 CPUs, so speeds are doubtful)"
    assert busy in " ".join(done.split())
    assert len(re.findall(r"  3$", done, re.MULTILINE)) == 2


def test_a_dry_run_of_a_bench_counts_what_is_kept(pair: Path, monkeypatch, tmp_path: Path) -> None:
    install(monkeypatch, lambda config, number: 1.0)
    job = job_of(pair, "batch-and-k", "batch=2", "K=0,3", repeats=2)
    list(throughput(job, tmp_path))
    more = render(bench.forecast_of(replace(job, repeats=5), tmp_path))
    assert len(re.findall(r"  3$", more, re.MULTILINE)) == 2
    assert "No repeat is left" in render(bench.forecast_of(job, tmp_path))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_graphs_change_speed_alone() -> None:
    arguments = ["bench", "throughput", "--matrix=vllm-21477", "--dataset=bundled", "--num-prompts=8"]
    arguments += ["--device=cuda", "--dtype=float32", "--attention=sdpa-static", "--repeats=1", "--json"]
    done = printed(*arguments)
    rows = json.loads(done)["rows"]
    assert [row["cuda_graphs"] for row in rows] == ["off", "pass", "step"]
    assert {row["same_texts"] for row in rows} == {1}
    assert len({row["acceptance_length"] for row in rows}) == 1
    assert rows[2]["x_off"] > 1
