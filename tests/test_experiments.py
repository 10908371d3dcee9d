"""The same pair is measured alike by every command: the same turns, the same record of rounds, the same speeds."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.config import DraftLength, EngineConfig, SamplingParams
from specgen.config.bundled import data_directory, heads
from specgen.engine.warm_engine import Run, WarmEngine
from specgen.experiments import turns
from specgen.experiments.heads_job import HeadsJob, HeadsRun
from specgen.experiments.rounds import PLAIN
from specgen.experiments.tune import tune
from specgen.experiments.tune_job import TuneJob, Workload
from specgen.prompts.load import DataSource
from tests.commands import write_rows
from tests.jobs import Silent

ENGINE = EngineConfig(
    model=str(data_directory() / "demo" / "target"),
    drafter=heads()[0],
    num_spec_tokens=2,
    drafter_batch="padded",
    device="cpu",
    max_batch_size=2,
    prefix_cache=False,
)
SECONDS = {0: 2.0, 2: 1.0}  # of a run, by K
OF_TIME = {"seconds", "ttft", "tpot", "itl", "step_seconds"}


def compared(data: Path, out: Path, repeats: int) -> dict[str, Any]:
    """The rounds of ``specgen compare``, and the speed of the head over plain decoding."""
    job = HeadsJob(
        engine=ENGINE,
        drafters=(heads()[0],),
        sampling=SamplingParams(max_tokens=6),
        data=(DataSource(dataset=str(data), num_prompts=3),),
        repeats=repeats,
    )
    run = HeadsRun(job, out, lambda name: Silent(), lambda: False)
    speeds = run.measure(run.generate())
    return {"ratio": speeds["prompts"].speedup("drafter", PLAIN), **rounds(out / "compare.rounds.jsonl")}


def tuned(data: Path, out: Path, repeats: int) -> dict[str, Any]:
    """Those of ``specgen tune``."""
    job = TuneJob(
        batches=(2,),
        draft_lengths=(DraftLength(most=2),),
        drafter_batches=("padded",),
        workload=Workload(dataset=str(data), num_prompts=3, max_new_tokens=6),
        engine=ENGINE,
        repeats=repeats,
        precision=0.0,
    )
    *_, table = tune(job, out)
    return {"ratio": table.rows[1]["x_plain"], **rounds(out / "tune.rounds.jsonl")}


def rounds(path: Path) -> dict[str, Any]:
    return {"rounds": [list(json.loads(line)["arms"].values()) for line in path.read_text().splitlines()]}


@pytest.mark.slow
def test_the_same_pair_is_measured_alike_by_compare_and_tune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[Any, ...]] = []

    class Watched(WarmEngine):
        def run(self, **asked: Any) -> Run:
            config = self.config
            prompts = sorted(request.prompt_token_ids for request in self._requests)
            runs.append((config.draft_length.most, config.max_batch_size, config.kv_memory, prompts))
            return replace(super().run(**asked), seconds=SECONDS[config.draft_length.most])

    monkeypatch.setattr(turns, "WarmEngine", Watched)
    data = tmp_path / "prompts.jsonl"
    write_rows(data, ({"prompt": f"Tom has {n} apples."} for n in (3, 40, 500)))
    both: list[Callable[[Path, Path, int], dict[str, Any]]] = [compared, tuned]
    found, order = [], []
    for number, measured in enumerate(both):
        runs.clear()
        measured(data, tmp_path / str(number), 2)
        found.append(measured(data, tmp_path / str(number), 3))  # goes on with the third round
        order.append(list(runs))
    assert order[0] == order[1], (
        "the same prompts, tokenised before, in the same turns with the same KV cache"
    )
    assert [k for k, *_ in order[0]] == [0, 2, 0, 2, 2, 0, 0, 2, 0, 2], (
        "warm-ups; another begins in each round"
    )
    assert found[0]["ratio"].value == pytest.approx(found[1]["ratio"])
    assert len(found[0]["rounds"]) == len(found[1]["rounds"]) == 3
    for one, other in zip(found[0]["rounds"], found[1]["rounds"], strict=True):
        for mine, theirs in zip(one, other, strict=True):
            alike = mine.keys() - OF_TIME - {"num_wrong", "texts"}  # no text is known to a comparison
            assert {name: mine[name] for name in alike} == {name: theirs[name] for name in alike}
            assert sorted(mine["texts"].values()) == sorted(theirs["texts"].values())
    drafted = found[0]["rounds"][0][1]
    assert drafted["acceptance_length"] > 1
