"""Calibrated heads of every kind draft what they are made for: by a dense evaluation, and in the engine."""

import json
import random
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from calibrated_cycle import Cycle
from calibrated_shapes import SHAPES
from calibrated_weights import Source
from make_calibrated_pair import HeadKind, main, write_pair

from specgen.config import EngineConfig, SamplingParams
from specgen.core.sequence import Request
from specgen.engine.choices import resolve
from specgen.engine.loading import load_models, open_checkpoints, outline
from specgen.experiments.bound import StepBytes
from specgen.experiments.matrices import RANDOM, Workload
from specgen.experiments.workload import KnownText, make_prompts
from specgen.report.intervals import wilson
from tests.calibrated_reference import DenseHead, DenseTarget
from tests.engines import Outputs, Pair, generate, load_pair
from tests.marks import mostly_slow

TINY = SHAPES["tiny"]
CYCLE = Cycle.draw(TINY.num_plain_tokens, TINY.draft_vocab_size, 0.75, seed=5)
LENGTHS = {"eagle3": 5, "eagle3-3": 5, "eagle1": 5, "peagle": 2, "peagle-2": 4, "peagle-3": 8}  # K


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("heads")
    write_pair(root, TINY, CYCLE, Source("cpu", 5), [HeadKind.find(name) for name in LENGTHS])
    return root


@pytest.fixture(scope="module")
def dense(root: Path) -> DenseTarget:
    return DenseTarget.load(root / "target")


@pytest.fixture(scope="module")
def load(root: Path):
    return cache(lambda name, dtype=torch.float32: load_pair(root, dtype, drafter=name))


def random_texts(count: int, length: int) -> list[tuple[int, ...]]:
    """Tokens of the cycle in any order: only the last of each has a known follower."""
    rng = random.Random(2)
    lasts = [
        *CYCLE.tokens[-2:],
        *rng.sample(CYCLE.tokens, count - 2),
    ]  # the cycle's end goes on to its beginning
    return [(*rng.choices(CYCLE.tokens, k=length - 1), last) for last in lasts]


def expected(name: str, token: int, count: int) -> tuple[int, ...]:
    return (CYCLE.parallel_guesses if "peagle" in name else CYCLE.guesses)(token, count)


def requests(count: int = 16, max_tokens: int = 48, **sampling: float) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    texts = random_texts(count, 40)
    return [
        Request(id=str(i), prompt_token_ids=text[-4 - 2 * i :], sampling=params)
        for i, text in enumerate(texts)
    ]


def run(pair: Pair, name: str, asked: list[Request], **changes: object) -> Outputs:
    settings = {"num_spec_tokens": LENGTHS[name], "max_batch_size": 16, "page_size": 16} | changes
    return generate(pair, asked, **settings)


def known_texts(asked: list[Request]) -> dict[str, tuple[int, ...]]:
    return {r.id: CYCLE.after(r.prompt_token_ids[-1], r.sampling.max_tokens) for r in asked}


@pytest.mark.parametrize("name", mostly_slow(LENGTHS, "peagle-2"))
def test_a_dense_evaluation_drafts_the_guesses(root: Path, dense: DenseTarget, name: str) -> None:
    texts = random_texts(64, 40)
    newest = [CYCLE.succ[text[-1]] for text in texts]
    drafts = DenseHead(root / name, dense).drafts(torch.tensor(texts), torch.tensor(newest), LENGTHS[name])
    assert drafts.tolist() == [list(expected(name, token, LENGTHS[name])) for token in newest]


@pytest.mark.parametrize(
    ("name", "batch", "dtype"),
    mostly_slow(
        product(LENGTHS, ("padded", "non-padded"), (torch.float32, torch.bfloat16)),
        ("eagle3-3", "non-padded", torch.float32),
    ),
)
def test_the_engine_drafts_the_guesses_and_writes_the_known_text(
    load, name: str, batch: str, dtype: torch.dtype
) -> None:
    asked = requests()
    dtype_name = str(dtype).removeprefix("torch.")
    outputs = run(load(name, dtype), name, asked, drafter_batch=batch, dtype=dtype_name)
    assert outputs.texts == known_texts(asked)
    for request in asked:
        newest = CYCLE.succ[request.prompt_token_ids[-1]]
        for drafts, accepted, _ in outputs.verified[request.id]:
            assert drafts == expected(name, newest, len(drafts))
            newest = CYCLE.after(newest, accepted + 1)[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle1", "eagle3-3", "peagle-2"])
def test_acceptance_is_a_power_of_the_known_share(load, name: str) -> None:
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    asked = [
        Request(id=str(place), prompt_token_ids=CYCLE.slice(place, 3), sampling=params)
        for place in range(0, len(CYCLE.tokens), 64)  # every token of the cycle once
    ]
    steps = accepted_counts(run(load(name), name, asked, num_spec_tokens=4))
    for position in range(4):
        low, high = wilson(sum(count > position for count in steps) / len(steps), len(steps))
        assert low <= CYCLE.accept ** (position + 1) <= high


@pytest.mark.slow
def test_a_parallel_head_knows_no_more_than_its_layers_can_pass_on(load) -> None:
    steps = accepted_counts(run(load("peagle"), "peagle", requests(), num_spec_tokens=4))
    assert max(steps) == 2


def accepted_counts(outputs: Outputs) -> list[int]:
    return outputs.accepted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle1", "eagle3-3", "peagle-2"])
def test_sampling_at_temperature_1_gives_the_known_text(load, name: str) -> None:
    asked = requests(count=4, temperature=1.0)
    outputs = run(load(name), name, asked, draft_sampling="probabilistic")
    assert outputs.texts == known_texts(asked)
    assert max(accepted_counts(outputs)) == LENGTHS[name]


@pytest.mark.parametrize("name", ["eagle1", "peagle-2"])
def test_wrong_tokens_are_counted_with_any_head_of_the_pair(load, name: str) -> None:
    known = KnownText.of(load(name).models)
    asked = requests(count=2, max_tokens=9)
    outputs = run(load(name), name, asked)
    assert known.num_wrong(outputs.completions.values()) == 0
    assert known.num_wrong(replace(done, token_ids=()) for done in outputs.completions.values()) == 18


def test_prompts_of_a_bench_have_tokens_with_a_known_follower_alone(load) -> None:
    workload = Workload(dataset=RANDOM, prompt_tokens=200, max_new_tokens=4)
    made = make_prompts(workload, load("eagle1").models, None, 8)
    asked = {token for request in made.requests for token in request.prompt_token_ids}
    assert asked <= set(CYCLE.tokens)
    assert made == make_prompts(workload, load("eagle3").models, None, 8)


def test_one_head_is_the_drafter_and_several_have_their_names(tmp_path: Path, monkeypatch) -> None:
    def written(*arguments: str) -> set[str]:
        out = tmp_path / str(len(arguments))
        monkeypatch.setattr("sys.argv", ["make", str(out), "--shape", "tiny", "--device", "cpu", *arguments])
        main()
        return {path.name for path in out.iterdir() if path.is_dir()}

    assert written("--head", "eagle1") == {"target", "drafter"}
    assert written("--head", "eagle3", "peagle-2") == {"target", "eagle3", "peagle-2"}
    config = json.loads((tmp_path / "2" / "drafter" / "config.json").read_text())
    assert config["synthetic_weights"]
    assert "draft_vocab_size" not in config


@pytest.mark.parametrize("name", ["eagle2", "eagle1-2", "eagle3-0", "peagle-x", "peagle-"])
def test_an_unknown_head_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no head"):
        HeadKind.find(name)


@pytest.mark.parametrize("name", mostly_slow(LENGTHS, "peagle-2"))
def test_an_outline_knows_a_pair_before_its_weights_are_read(root: Path, name: str) -> None:
    config = EngineConfig(model=str(root / "target"), drafter=str(root / name), device="cpu")
    checkpoints = open_checkpoints(config)
    resolved = resolve(config, checkpoints)
    drawn, loaded = outline(resolved, checkpoints), load_models(resolved, checkpoints)
    assert drawn.target.device.type == "meta"
    assert StepBytes.of(drawn) == StepBytes.of(loaded)
    assert KnownText.of(drawn) == KnownText.of(loaded) is not None
    assert drawn.head.draft_to_target.tolist() == loaded.head.draft_to_target.tolist()
