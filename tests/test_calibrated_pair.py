"""The calibrated pair has the intended text, drafts and acceptance, in the public formats."""

import json
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from calibrated_codes import Codes
from calibrated_cycle import Cycle
from calibrated_shapes import MIXTURES, SHAPES
from calibrated_weights import Source, target_tensors
from make_calibrated_pair import HeadKind, write_pair, write_tensors

from specgen.checkpoints.weight_files import tensor_infos
from specgen.config import SamplingParams
from specgen.core.sequence import Request
from specgen.report.intervals import wilson
from tests.commands import printed, specgen
from tests.engines import Outputs, Pair, generate, load_pair
from tests.marks import mostly_slow

TINY = SHAPES["tiny"]
K = 4
HEADS = ("eagle3", "eagle3-2", "eagle1", "peagle-2")


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """A tiny pair and its text."""

    pair: Pair
    cycle: Cycle

    def generate(self, requests: list[Request], **changes: object) -> Outputs:
        changes = {"num_spec_tokens": K, "max_batch_size": 16, "page_size": 16} | changes
        return generate(self.pair, requests, **changes)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Path]:
    root = tmp_path_factory.mktemp("calibrated")
    for accept in (0.75, 0.5):
        cycle = Cycle.draw(TINY.num_plain_tokens, TINY.draft_vocab_size, accept, seed=3)
        write_pair(root / str(accept), TINY, cycle, Source("cpu", 3))
    return {accept: root / str(accept) for accept in (0.75, 0.5)}


@pytest.fixture(scope="module")
def load(paths: dict[float, Path]):
    @cache
    def loaded(accept: float, dtype: torch.dtype = torch.float32) -> Calibrated:
        return Calibrated(pair=load_pair(paths[accept], dtype), cycle=Cycle.read(paths[accept]))

    return loaded


def slices(cycle: Cycle, count: int = 16, max_tokens: int = 64) -> list[Request]:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [
        Request(id=str(i), prompt_token_ids=cycle.slice(61 * i, 4 + 9 * i), sampling=sampling)
        for i in range(count)
    ]


def known_texts(cycle: Cycle, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    return {r.id: cycle.after(r.prompt_token_ids[-1], r.sampling.max_tokens) for r in requests}


@pytest.mark.parametrize(
    ("changes", "dtype"),
    mostly_slow(
        product(
            ({"num_spec_tokens": 0}, {}, {"drafter_batch": "non-padded"}), (torch.float32, torch.bfloat16)
        ),
        ({}, torch.float32),
    ),
)
def test_generated_tokens_are_the_known_text(load, changes: dict[str, object], dtype: torch.dtype) -> None:
    calibrated = load(0.75, dtype)
    requests = slices(calibrated.cycle)
    outputs = calibrated.generate(requests, dtype=str(dtype).removeprefix("torch."), **changes)
    assert outputs.texts == known_texts(calibrated.cycle, requests)


@pytest.mark.slow
def test_sampling_at_temperature_1_gives_the_known_text(load) -> None:
    calibrated = load(0.75)
    requests = [
        replace(r, sampling=replace(r.sampling, temperature=1.0)) for r in slices(calibrated.cycle, count=4)
    ]
    outputs = calibrated.generate(requests, draft_sampling="probabilistic")
    assert outputs.texts == known_texts(calibrated.cycle, requests)


@pytest.mark.slow
@pytest.mark.parametrize("accept", [0.75, 0.5])
def test_every_draft_is_the_guess_after_the_previous_draft(load, accept: float) -> None:
    calibrated = load(accept)
    cycle, requests = calibrated.cycle, slices(calibrated.cycle)
    outputs = calibrated.generate(requests)
    for request in requests:
        newest = cycle.succ[request.prompt_token_ids[-1]]
        for drafts, accepted, _ in outputs.verified[request.id]:
            assert drafts == cycle.guesses(newest, K)
            assert accepted == cycle.accepted(newest, drafts)
            newest = cycle.after(newest, accepted + 1)[-1]


@pytest.mark.slow
@pytest.mark.parametrize("accept", [0.75, 0.5])
def test_acceptance_is_a_power_of_the_known_share(load, accept: float) -> None:
    calibrated = load(accept)
    steps = calibrated.generate(slices(calibrated.cycle, max_tokens=128)).accepted
    for position in range(K):
        low, high = wilson(sum(accepted > position for accepted in steps) / len(steps), len(steps))
        assert low <= accept ** (position + 1) <= high


@pytest.mark.slow
def test_transformers_generates_the_same_text(paths: dict[float, Path]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cycle = Cycle.read(paths[0.75])
    model = AutoModelForCausalLM.from_pretrained(paths[0.75] / "target", dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(paths[0.75] / "target")
    prompt = cycle.slice(1000, 40)
    ids = tokenizer(" ".join(f"w{token}" for token in prompt), return_tensors="pt").input_ids
    assert ids[0].tolist() == list(prompt)
    text = model.generate(ids, max_new_tokens=32, do_sample=False, pad_token_id=0)[0, 40:]
    assert text.tolist() == list(cycle.after(prompt[-1], 32))


def test_the_cli_runs_the_pair_and_reports_synthetic_weights(paths, tmp_path: Path) -> None:
    target, drafter = str(paths[0.75] / "target"), str(paths[0.75] / "drafter")
    inspected = specgen("inspect", target, drafter)
    assert "Target and head fit" in inspected.output
    data = tmp_path / "own.jsonl"
    data.write_text(json.dumps({"id": "1", "prompt": "any words will do"}) + "\n")
    models = ["--model", target, "--drafter", drafter, "--max-new-tokens", "8"]
    result = printed("generate", *models, "--dataset", str(data))
    assert "(synthetic weights)" in result
    assert all(
        json.loads((path / "config.json").read_text())["synthetic_weights"]
        for path in map(Path, (target, drafter))
    )


def test_sharded_and_single_file_checkpoints_hold_the_same_tensors(tmp_path: Path) -> None:
    cycle = Cycle.draw(TINY.num_plain_tokens, TINY.draft_vocab_size, 0.5, seed=0)
    for name, shard_bytes in (("one", 1 << 40), ("many", 1 << 20)):
        source = Source("cpu", 0)
        embedding = source.stretches(TINY.vocab_size, TINY.hidden_size, TINY.head_dim)
        (tmp_path / name).mkdir()
        write_tensors(tmp_path / name, list(target_tensors(TINY, embedding, cycle, source)), shard_bytes)
    one, many = tensor_infos(tmp_path / "one"), tensor_infos(tmp_path / "many")
    assert len({info.file for info in many.values()}) > 5
    assert max(file.stat().st_size for file in (tmp_path / "many").glob("*.safetensors")) < (1 << 20) + 4096
    assert {name: info.shape for name, info in one.items()} == {n: i.shape for n, i in many.items()}


@pytest.mark.parametrize("name", sorted(SHAPES.keys() - MIXTURES.keys()))
def test_tensors_have_the_shapes_of_the_config(name: str) -> None:
    shape = SHAPES[name]
    cycle = Cycle.draw(shape.num_plain_tokens, shape.draft_vocab_size, 0.75, seed=0)
    assert not set(cycle.tokens) & {shape.bos_token_id, *shape.eos_token_ids}
    nothing, source = torch.empty(0, shape.hidden_size), Source("cpu", 0)
    codes = Codes(embedding=nothing, turns=torch.zeros(shape.kv_size // 2))
    heads = [HeadKind.find(head).tensors(shape, codes, cycle, source) for head in HEADS]
    for tensors in (target_tensors(shape, nothing, cycle, source), *heads):
        for named in tensors:
            if (
                torch.Size(named.shape).numel() <= 1 << 20
                and "lm_head" not in named.name
                and "embed" not in named.name
            ):
                assert named.make().shape == named.shape, named.name


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


@pytest.mark.parametrize(("accept", "reason"), [(1.1, "from 0 to 1"), (0.99, "leaves one token unknown")])
def test_an_impossible_share_is_refused(accept: float, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Cycle.draw(200, 100, accept, seed=0)


def test_a_directory_without_a_cycle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no cycle\.json"):
        Cycle.read(tmp_path)
