"""Calibrated pairs, in the public formats, have the intended text, drafts and acceptance with heads of every kind."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from bound import StepBytes
from calibrated_cycle import Cycle
from calibrated_shapes import SHAPES
from calibrated_weights import Source, target_tensors
from make_calibrated_pair import HeadKind, main, write_pair, write_tensors

from specgen.checkpoints.weight_files import tensor_infos
from specgen.config import EngineConfig, SamplingParams
from specgen.core.sequence import Request
from specgen.engine.choices import resolve
from specgen.engine.loading import load_models, open_checkpoints, outline
from specgen.experiments.plans import KnownText, make_prompts
from specgen.experiments.tune_job import RANDOM, Workload
from tests.commands import printed, write_rows
from tests.engines import Outputs, Pair, generate, load_pair
from tests.marks import mostly_slow

pytestmark = pytest.mark.scripts

TINY = SHAPES["tiny"]
CYCLE = Cycle.draw(TINY.num_plain_tokens, TINY.draft_vocab_size, 0.75, seed=5)
LENGTHS = {"eagle3": 5, "eagle3-3": 5, "eagle1": 5, "peagle": 2, "peagle-2": 4, "peagle-3": 8}  # K
LENGTHS |= {"dflash-4": 8, "dspark-3": 8}
DRAFT_MODEL = "tiny-draft"
HEADS = tuple(LENGTHS)  # without draft models
LENGTHS |= {DRAFT_MODEL: 5}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("heads")
    write_pair(root, TINY, CYCLE, Source("cpu", 5), [HeadKind.find(name) for name in LENGTHS])
    return root


@pytest.fixture(scope="module")
def load(root: Path):
    return cache(lambda name, dtype=torch.float32: load_pair(root, dtype, drafter=name))


def random_texts(count: int, length: int) -> list[tuple[int, ...]]:
    """Tokens of the cycle in any order: only the last of each has a known follower."""
    rng = random.Random(2)
    # the cycle's end goes on to its beginning
    lasts = [*CYCLE.tokens[-2:], *rng.sample(CYCLE.tokens, count - 2)]
    return [(*rng.choices(CYCLE.tokens, k=length - 1), last) for last in lasts]


def expected(name: str, token: int, count: int, cycle: Cycle = CYCLE) -> tuple[int, ...]:
    at_once = name.startswith(("peagle", "dflash", "dspark"))
    return (cycle.parallel_guesses if at_once else cycle.guesses)(token, count)


def check_drafts(name: str, asked: list[Request], outputs: Outputs, cycle: Cycle = CYCLE) -> None:
    """Every draft is the guess after the one before it, and what is right of them is accepted."""
    for request in asked:
        newest = cycle.succ[request.prompt_token_ids[-1]]
        for drafts, accepted, _ in outputs.verified[request.id]:
            assert drafts == expected(name, newest, len(drafts), cycle)
            assert accepted == cycle.accepted(newest, drafts)
            newest = cycle.after(newest, accepted + 1)[-1]


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


@pytest.mark.parametrize(
    ("name", "batch", "dtype"),
    mostly_slow(
        [
            *((name, "padded", torch.bfloat16) for name in [*LENGTHS][::2]),
            *((name, "non-padded", torch.float32) for name in (*[*LENGTHS][1::2], DRAFT_MODEL)),
        ],
        ("eagle3-3", "non-padded", torch.float32),
        (DRAFT_MODEL, "non-padded", torch.float32),
    ),
)
def test_the_engine_drafts_the_guesses_and_writes_the_known_text(
    load, name: str, batch: str, dtype: torch.dtype
) -> None:
    asked, settings = requests(), {"drafter_batch": batch, "dtype": str(dtype).removeprefix("torch.")}
    outputs = run(load(name, dtype), name, asked, **settings)
    assert outputs.texts == known_texts(asked)
    check_drafts(name, asked, outputs)


@pytest.mark.slow
def test_a_parallel_head_knows_no_more_than_its_layers_can_pass_on(load) -> None:
    steps = run(load("peagle"), "peagle", requests(), num_spec_tokens=4).accepted
    assert max(steps) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle1", "eagle3-3", "peagle-2"])
def test_sampling_at_temperature_1_gives_the_known_text(load, name: str) -> None:
    asked = requests(count=4, temperature=1.0)
    outputs = run(load(name), name, asked, draft_sampling="probabilistic")
    assert outputs.texts == known_texts(asked)
    assert max(outputs.accepted) == LENGTHS[name]


@pytest.mark.parametrize("name", ["eagle1", "peagle-2"])
def test_wrong_tokens_are_counted_with_any_head_of_the_pair(load, name: str) -> None:
    known = KnownText.of(load(name).models)
    asked = requests(count=2, max_tokens=9)
    outputs = run(load(name), name, asked)
    assert known.num_wrong(outputs.completions.values()) == 0
    assert known.num_wrong(replace(done, token_ids=()) for done in outputs.completions.values()) == 18


def test_prompts_of_a_bench_have_tokens_with_a_known_follower_alone(load) -> None:
    workload = Workload(dataset=RANDOM, prompt_tokens=200, max_new_tokens=4)
    made = make_prompts(workload, load("eagle1").models, 8)
    asked = {token for request in made.requests for token in request.prompt_token_ids}
    assert asked <= set(CYCLE.tokens)
    assert made == make_prompts(workload, load("eagle3").models, 8)


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


def test_a_draft_model_runs_by_itself_and_writes_its_guesses(root: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = root / DRAFT_MODEL
    model, found = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(found.values())
    assert model.config.num_hidden_layers == SHAPES[DRAFT_MODEL].num_layers != TINY.num_layers
    texts = torch.tensor([CYCLE.tokens[:256]])
    with torch.no_grad():
        assert model(texts).logits[0].argmax(-1).tolist() == [
            CYCLE.guess[each] for each in CYCLE.tokens[:256]
        ]
    ours, theirs = (AutoTokenizer.from_pretrained(each).get_vocab() for each in (path, root / "target"))
    assert ours == theirs


def test_the_cli_runs_the_pair_and_reports_synthetic_weights(root: Path, tmp_path: Path) -> None:
    target, drafter = root / "target", root / "eagle3"
    assert "Target and head fit" in printed("inspect", target, drafter)
    data = write_rows(tmp_path / "own.jsonl", [{"id": "1", "prompt": "any words will do"}])
    models = ("--model", target, "--drafter", drafter, "--max-new-tokens", 8)
    assert "(synthetic weights)" in printed("generate", *models, "--dataset", data)
    for path in (target, drafter):
        assert json.loads((path / "config.json").read_text())["synthetic_weights"]


def test_sharded_and_single_file_checkpoints_hold_the_same_tensors(tmp_path: Path) -> None:
    cycle = Cycle.draw(TINY.num_plain_tokens, TINY.draft_vocab_size, 0.5, seed=0)
    for name, shard_bytes in (("one", 1 << 40), ("many", 1 << 20)):
        source = Source("cpu", 0)
        embedding = source.stretches(TINY.vocab_size, TINY.hidden_size, TINY.head_dim)
        (tmp_path / name).mkdir()
        write_tensors(tmp_path / name, list(target_tensors(TINY, embedding, cycle.succ, source)), shard_bytes)
    one, many = tensor_infos(tmp_path / "one"), tensor_infos(tmp_path / "many")
    assert len({info.file for info in many.values()}) > 5
    assert max(file.stat().st_size for file in (tmp_path / "many").glob("*.safetensors")) < (1 << 20) + 4096
    assert {name: info.shape for name, info in one.items()} == {n: i.shape for n, i in many.items()}


def test_cycle_round_trip(tmp_path: Path) -> None:
    cycle = Cycle.draw(100, 60, 0.7, seed=1)
    cycle.write(tmp_path)
    assert Cycle.read(tmp_path) == cycle
    assert sorted(cycle.succ) == sorted(cycle.succ.values()) == sorted(cycle.tokens)
    assert {t for t in cycle.tokens if cycle.guess[t] != cycle.succ[t]} == set(cycle.unknown)
    assert sorted(cycle.guess.values()) == sorted(cycle.tokens)
    assert len(cycle.unknown) == 18
    assert cycle.slice(59, 3) == (cycle.tokens[59], *cycle.tokens[:2])
    assert cycle.after(cycle.tokens[58], 2) == cycle.slice(59, 2)


WRONG: list[tuple[Callable[..., object], tuple[object, ...], str]] = [
    (Cycle.draw, (200, 100, 1.1, 0), "from 0 to 1"),
    (Cycle.draw, (200, 100, 0.99, 0), "leaves one token unknown"),
    (Cycle.read, (Path("none"),), r"has no cycle\.json"),
    *(
        (HeadKind.find, (name,), "no head")
        for name in ("eagle2", "eagle1-2", "eagle3-0", "peagle-x", "peagle-")
    ),
]


@pytest.mark.parametrize(("call", "given", "reason"), WRONG)
def test_what_is_impossible_is_refused(
    call: Callable[..., object], given: tuple[object, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        call(*given)
