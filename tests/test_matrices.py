"""Fixed arms of ``specgen tune``: bundled matrices, settings as axes, all repeats; and drafts accepted by dice."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calibrated_cycle import Cycle
from calibrated_shapes import SHAPES

from specgen.config import DraftLength, EngineConfig, UserError, acceptance_rates
from specgen.config.bundled import matrices
from specgen.core import step
from specgen.decoding.outcome import NO_DRAFT
from specgen.decoding.verify import accept_by_dice, accept_greedy
from specgen.engine import build
from specgen.engine.engine import Engine
from specgen.experiments import plans
from specgen.experiments.output import BenchTable
from specgen.experiments.plans import forecast, prepare
from specgen.experiments.tune import tune
from specgen.experiments.tune_job import TuneJob, Workload
from specgen.report.terminal import render
from tests.commands import printed, refused
from tests.engines import engine_config
from tests.timed_engines import install, job_of

SHAPE = SHAPES["tiny"]
CYCLE = Cycle.draw(SHAPE.num_plain_tokens, SHAPE.draft_vocab_size, 0.75, seed=0)
SMALL = Workload(dataset="random", num_prompts=3, prompt_tokens=9, max_new_tokens=12)


def fixed(tiny_pair: Path, *lengths: int, dice: tuple[float, ...] | float = (), **changes) -> TuneJob:
    """Arms that have all their repeats, one where it is not said otherwise."""
    one = {"batches": (2,), "drafter_batches": ("padded",), "workload": SMALL, "repeats": 1, "precision": 0.0}
    return job_of(
        tiny_pair, draft_lengths=tuple(map(DraftLength.of, lengths)), synthetic=dice, **one | changes
    )


def last(job: TuneJob, output: Path | None = None) -> BenchTable:
    return list(tune(job, output))[-1]


# --- the arms -------------------------------------------------------------------------------------


def asked(monkeypatch: pytest.MonkeyPatch, *words: str) -> TuneJob:
    """What ``specgen tune`` is asked for."""
    jobs: list[TuneJob] = []
    monkeypatch.setattr(plans, "prepare", lambda job, output: jobs.append(job))
    monkeypatch.setattr(plans, "forecast", lambda setup: [])
    printed("tune", *words, "--dry-run")
    return jobs[0]


def names(job: TuneJob) -> list[str]:
    return [arm.name for arm in job.arms]


def test_the_bundled_matrices_are_those_of_the_sources(monkeypatch) -> None:
    jobs = {name: asked(monkeypatch, "--config", name) for name in matrices()}
    assert {name: len(names(job)) for name, job in jobs.items()} == {
        "batch-and-decoding": 6 * 3,
        "batch-and-k": 6 * 9,
        "vllm-19825": 3 * 2,
        "vllm-21477": 3 * 2,
        "vllm-25196": 3 * 3,
    }
    assert {(job.precision, job.repeats) for job in jobs.values()} == {(0, 3)}
    assert names(jobs["vllm-25196"]) == [
        f"batch 128, attention {attention}, {decoding}"
        for attention in ("flashinfer", "trtllm", "hopper")
        for decoding in ("plain", "K 4, non-padded", "K 4, padded")
    ]
    assert names(jobs["vllm-21477"])[1::2] == [
        f"batch 2, cuda_graphs {graphs}, K 4, padded" for graphs in ("off", "pass", "step")
    ]
    assert names(jobs["batch-and-k"])[-1] == "batch 256, K auto, padded"
    source = jobs["vllm-19825"].workload
    assert (source.prompt_tokens, source.max_new_tokens, source.num_prompts) == (100, 1000, 500)
    configs = [arm.configure(job.engine) for job in jobs.values() for arm in job.arms]
    assert {(each.attention, each.cuda_graphs) for each in configs} == {
        *((each, "auto") for each in ("auto", "flashinfer", "trtllm", "hopper")),
        *(("auto", each) for each in ("off", "pass", "step")),
    }


def test_the_command_line_wins_over_a_matrix_and_one_value_is_no_axis(monkeypatch) -> None:
    job = asked(monkeypatch, "--config", "vllm-25196", "--attention", "sdpa", "--batch", "4", "--k", "3")
    assert names(job) == ["batch 4, plain", "batch 4, K 3, non-padded", "batch 4, K 3, padded"]
    assert (job.base.attention, job.workload.num_prompts, job.workload.dataset) == ("sdpa", 200, "sharegpt")
    assert (job.base.draft_length.most, job.base.max_batch_size, job.base.prefix_cache) == (3, 4, False)
    with refused("attention has 'foo': use some of auto, hopper, trtllm"):
        asked(monkeypatch, "--attention", "sdpa,foo")
    with refused(r"config 'vllm-2519' \(did you mean vllm-25196\?\) cannot be read .*: name a YAML file"):
        asked(monkeypatch, "--config", "vllm-2519")


def test_all_arms_of_settings_have_all_repeats_and_their_ratios(tiny_pair: Path, monkeypatch) -> None:
    """Those that would be dropped too; each is a multiple of plain decoding under its own settings."""
    speeds = {"sdpa": 1.0, "sdpa-static": 4.0}

    def took(config: EngineConfig, number: int) -> float:
        drafts = {(2, "padded"): 2.0, (2, "non-padded"): 1.0}
        return (
            60 / speeds[config.attention] / drafts.get((config.draft_length.most, config.drafter_batch), 3.0)
        )

    timed = install(monkeypatch, took)
    job = fixed(tiny_pair, 2, repeats=3, attentions=("sdpa", "sdpa-static"))
    job = replace(job, drafter_batches=("padded", "non-padded"))
    table = last(job)
    assert len(timed.order) == 6 * (1 + 3)
    assert {row["repeats"] for row in table.rows} == {3}
    columns = ("attention", "drafter_batch", "x_plain", "x_sdpa", "x_padded", "verdict")
    assert [tuple(row[name] for name in columns) for row in table.rows] == [
        ("sdpa", "-", 1.0, 1.0, None, "slower"),
        ("sdpa", "padded", pytest.approx(2 / 3), 1.0, 1.0, "slower"),
        ("sdpa", "non-padded", pytest.approx(1 / 3), 1.0, pytest.approx(0.5), "slower"),
        ("sdpa-static", "-", 1.0, pytest.approx(4), None, "best"),
        ("sdpa-static", "padded", pytest.approx(2 / 3), pytest.approx(4), 1.0, "slower"),
        ("sdpa-static", "non-padded", pytest.approx(1 / 3), pytest.approx(4), pytest.approx(0.5), "slower"),
    ]
    (answer,) = [
        text for text in table.answers if text.startswith("At batch 2: attention sdpa-static, plain, ")
    ]
    assert answer.endswith(" tokens/s.")
    assert [(plot.x, plot.series, plot.title) for plot in table.plots] == [
        ("attention", "drafter_batch", "Speed-up over plain decoding"),
        ("attention", "drafter_batch", "Output tokens per second"),
    ]
    assert len(table.plots[0].points(table.rows)["padded"]) == 2
    assert max(map(len, render(table.parts(), 80).splitlines())) <= 80


def test_more_repeats_of_fixed_arms_go_on(tiny_pair: Path, monkeypatch, tmp_path: Path) -> None:
    install(monkeypatch, lambda config, number: 1.0)
    job = fixed(tiny_pair, 3, repeats=2)
    last(job, tmp_path)
    more = replace(job, repeats=5)
    said = render(forecast(prepare(more, tmp_path)))
    assert said.count("  5\n") == 2
    assert " ".join(said.split()).endswith(f" 2 rounds in {tmp_path} will not be measured again.")
    timed = install(monkeypatch, lambda config, number: 1.0)
    assert {row["repeats"] for row in last(more, tmp_path).rows} == {5}
    assert len(timed.order) - len(timed.built) == 2 * 3


def test_fixed_arms_in_groups_have_all_repeats(tiny_pair: Path, monkeypatch) -> None:
    """What others are compared with has more."""
    job = fixed(tiny_pair, 1, 2, 3, repeats=2)
    need = max(plan.num_bytes for plan in prepare(job).plans)
    monkeypatch.setattr(build, "_CPU_REST", 2 * 2 * need)
    install(monkeypatch, lambda config, number: 1.0 + config.draft_length.most)
    assert [row["repeats"] for row in last(job).rows] == [6, 2, 2, 2]


def test_settings_that_cannot_run_are_notes(tiny_pair: Path) -> None:
    job = fixed(tiny_pair, 2, attentions=("trtllm", "sdpa"))
    table = last(job)
    assert [(row["attention"], row["K"]) for row in table.rows] == [("sdpa", 0), ("sdpa", 2)]
    assert [note.partition(":")[0] for note in table.notes if "trtllm" in note] == ["not run"] * 2
    assert table.rows[1]["x_plain"] is not None
    with pytest.raises(UserError, match=r"no arm can run here: .*: use --attention auto"):
        last(replace(job, attentions=("trtllm", "hopper")))


# --- real engines ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_texts_are_the_known_one(tiny_pair: Path) -> None:
    workload = replace(SMALL, num_prompts=4, max_new_tokens=24)
    job = fixed(tiny_pair, 2, 4, batches=(1, 3), workload=workload)
    table = last(job)
    rows = {(row["batch"], row["K"]): row for row in table.rows}
    assert list(rows) == [(batch, k) for batch in (1, 3) for k in (0, 2, 4)]
    for (_, k), row in rows.items():
        assert row["lowest"] == row["speed"] == row["highest"]
        assert (row["same_texts"], row["wrong_tokens"]) == (1, 0)
        assert row["step"] > 0
        assert 0 < row["ttft_median"] <= row["ttft_p99"]
        assert (row["acceptance"] is None) == (k == 0)
        if k:
            assert row["tpot_mean"] < row["itl_mean"], "a step emits several tokens at once"
            rates = [float(rate) for rate in row["acceptance"].split()]
            assert 0.5 < rates[0] < 1
            assert rates == sorted(rates, reverse=True)
            assert len(rates) == k
    assert table.conditions["wrong_tokens"].endswith("the pair's head knows 75.0 % of it")
    assert "weights synthetic" in table.conditions["model"]


@pytest.mark.slow
def test_a_wrong_token_is_counted(tiny_pair: Path, monkeypatch) -> None:
    """One wrong token is planted per run; the text continues from it."""
    planted = CYCLE.tokens[5]

    def wrong(drafts, greedy):
        accepted, tokens = accept_greedy(drafts, greedy)
        if drafts.shape[1] and len(tokens) == 1:  # the last of three prompts decodes alone at the end
            tokens = tokens.clone()
            tokens[0, accepted[0]] = planted
        return accepted, tokens

    monkeypatch.setattr(step, "accept_greedy", wrong)
    plain, drafting = last(fixed(tiny_pair, 4)).rows
    assert plain["wrong_tokens"] == 0, "plain decoding has no drafts"
    assert drafting["wrong_tokens"] > 0
    assert drafting["same_texts"] == 2 / 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_graphs_change_speed_alone() -> None:
    arguments = ["--config=vllm-21477", "--dataset=bundled", "--num-prompts=8", "--repeats=1", "--json"]
    done = printed("tune", *arguments, "--device=cuda", "--dtype=float32", "--attention=sdpa-static")
    rows = json.loads(done)["rows"]
    assert [row["cuda_graphs"] for row in rows] == ["off", "off", "pass", "pass", "step", "step"]
    assert {row["same_texts"] for row in rows} == {1}
    assert len({row["acceptance_length"] for row in rows[1::2]}) == 1
    assert rows[5]["x_off"] > 1


# --- drafts accepted by dice ------------------------------------------------------------------------


@pytest.mark.slow
def test_dice_accept_in_place_of_the_target(tiny_pair: Path, tmp_path: Path) -> None:
    workload = replace(SMALL, num_prompts=8, max_new_tokens=30)
    job = fixed(tiny_pair, 2, batches=(8,), workload=workload, dice=(0.9, 0.5), repeats=2)
    found = last(job, tmp_path)
    assert "0.9, 0.5 by position" in str(found.conditions["synthetic acceptance"])
    assert "same_texts" not in found.conditions
    assert {row["same_texts"] for row in found.rows} == {None}
    assert "wrong_tokens" not in found.rows[0]
    assert not any("specgen generate" in answer for answer in found.answers), "no such head is there to run"
    first, second = map(float, str(found.rows[1]["acceptance"]).split())
    assert 0.8 < first < 1
    assert 0.4 < second / first < 0.6
    with pytest.raises(UserError, match="synthetic_acceptance"):
        last(fixed(tiny_pair, 2, batches=(8,), workload=workload, dice=(0.9, 0.4)), tmp_path)


@pytest.mark.slow
def test_a_synthetic_length_is_the_one_measured_at_each_k(tiny_pair: Path) -> None:
    workload = replace(SMALL, num_prompts=16, max_new_tokens=40)
    found = last(fixed(tiny_pair, 1, 3, batches=(8,), workload=workload, dice=2.5))
    (k3,) = (row["acceptance_length"] for row in found.rows[1:])  # K = 1 cannot have it
    # a chance of 0.6, which any number of drafts would need, gives 2.18
    assert k3 == pytest.approx(2.5, abs=0.15)
    said = "a mean acceptance length of 2.5 at each K (auto: at its largest)"
    assert said in str(found.conditions["synthetic acceptance"])
    assert any("K = 1 drafts yields at most 2 tokens" in note for note in found.notes)


@pytest.mark.parametrize(("length", "k", "chance"), [(1, 3, 0.0), (4, 3, 1.0), (1.8, 1, 0.8), (1.75, 2, 0.5)])
def test_one_chance_is_solved_for_a_synthetic_length(
    tiny_pair: Path, length: float, k: int, chance: float
) -> None:
    config = engine_config(tiny_pair, num_spec_tokens=k, synthetic_acceptance=float(length))
    assert config.synthetic_chances() == pytest.approx((chance,))
    with pytest.raises(UserError, match="n-grams may draft fewer than K tokens"):
        replace(config, drafter="ngram").synthetic_chances()


def test_synthetic_acceptance_is_chances_or_a_length(tiny_pair: Path) -> None:
    given = {"0.8,0.6": (0.8, 0.6), "0,0": (0.0, 0.0), "1": 1.0, "3.2": 3.2}
    assert {text: acceptance_rates(text) for text in given} == given
    for text in ("", "x", "0.5,1.2", "-0.1", "0.8", "0", "nan", "inf", "2,3", "0.5,"):
        with refused("use a mean acceptance length of 1 to K \\+ 1 such as"):
            acceptance_rates(text)
    with refused("synthetic-acceptance is 4.5, but a step of K = 3 drafts yields at most 4"):
        last(fixed(tiny_pair, 3, dice=4.5))
    with refused("its texts are not the model's, use specgen tune"):
        Engine(engine_config(tiny_pair, synthetic_acceptance=(0.5,)))


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
