"""A smaller model as drafter: its drafts are its own greedy continuation, whatever the engine does."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from bound import StepBytes

from specgen.checkpoints.checkpoint import open_checkpoint
from specgen.config import SamplingParams
from specgen.config.bundled import data_directory
from specgen.core.engine_core import discard
from specgen.engine.build import build_engine
from specgen.engine.loading import load_models, open_checkpoints
from specgen.kv.layout import Layout
from specgen.models.draft_model import DraftModel
from specgen.record import columns
from tests.commands import printed, refused, specgen
from tests.engines import Outputs, Pair, bundled_requests, generate, load_pair, random_requests, ranks_config
from tests.marks import mostly_slow
from tests.tiny_checkpoints import write_target
from tests.tiny_gemma4 import write_gemma4
from tests.tiny_hybrids import write_hybrid
from tests.tiny_mixtures import write_qwen3_moe

REQUESTS = random_requests(6, 128, SamplingParams(max_tokens=30, ignore_eos=True))
HOT = random_requests(6, 128, SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.7, logprobs=1))
DEMO = data_directory() / "demo" / "target"


@pytest.fixture(scope="module")
def itself(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target that drafts for itself."""
    path = tmp_path_factory.mktemp("itself")
    write_target(path / "target")
    write_target(path / "drafter")
    return load_pair(path)


@pytest.fixture(scope="module")
def expected(itself: Pair) -> Outputs:
    return plain(itself)


def plain(pair: Pair) -> Outputs:
    return generate(pair, REQUESTS, num_spec_tokens=0, drafter=None)


ENGINES: dict[str, dict[str, Any]] = {
    "padded": {},
    "non-padded": {"drafter_batch": "non-padded"},
    "static": {"attention": "sdpa-static"},
    "packed": {"attention": "sdpa-static", "drafter_batch": "non-padded"},
    "one draft": {"num_spec_tokens": 1},
    "seven drafts": {"num_spec_tokens": 7},
    "prompts in pieces": {"max_prefill_tokens": 5},
    "no prefix cache": {"prefix_cache": False},
    "preempted": {"kv_memory": 62 * 3072 * 2},
    "auto": {"num_spec_tokens": "auto"},
}


@pytest.mark.parametrize("name", mostly_slow(ENGINES, "padded", "packed", "preempted"))
def test_a_model_that_drafts_for_itself_is_always_right(itself: Pair, expected: Outputs, name: str) -> None:
    """So its keys and values are those of the whole text, of every token once."""
    found = generate(itself, REQUESTS, **ENGINES[name])
    assert found.texts == expected.texts
    assert all(len(drafts) == accepted for steps in found.verified.values() for drafts, accepted, *_ in steps)
    assert sum(found.accepted) >= 90 or name == "auto"  # which drafts what pays on this machine now
    assert (found.num_preempted > 0) == (name == "preempted")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["padded", "packed"])
def test_sampled_drafts_of_the_same_distribution_are_all_accepted(itself: Pair, name: str) -> None:
    found = generate(itself, HOT, draft_sampling="probabilistic", **ENGINES[name])
    missed = sum(
        len(drafts) - accepted for steps in found.verified.values() for drafts, accepted, *_ in steps
    )
    assert missed <= 2  # p over q is 1 up to rounding
    assert sum(found.accepted) > 100


PLANTED: dict[str, tuple[type, str, Any]] = {
    "tokens stand where those before them do": (Layout, "shifted", lambda self: self),
    "a prompt is not taken in": (DraftModel, "write_kv", lambda *_: None),
}


@pytest.mark.parametrize("name", PLANTED)
def test_keys_and_values_in_wrong_places_are_seen(
    itself: Pair, expected: Outputs, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(*PLANTED[name])
    found = generate(itself, REQUESTS)
    assert any(len(drafts) > accepted for steps in found.verified.values() for drafts, accepted, *_ in steps)


SMALLER: dict[str, Callable[[Path], object]] = {
    "smaller": partial(write_target, num_layers=2, hidden_size=32, seed=1),
    "more rows than tokens": partial(write_target, num_layers=2, vocab_size=140, tied=True, seed=1),
    "fewer rows than the target": partial(write_target, num_layers=2, vocab_size=120, seed=1),
    "qwen3": partial(write_target, family="qwen3", num_layers=2, seed=1),
    "mixture": partial(write_qwen3_moe, vocab_size=128),
}


@pytest.mark.parametrize("name", mostly_slow(SMALLER, "more rows than tokens"))
def test_drafts_are_the_greedy_continuation_of_the_model(tmp_path: Path, name: str) -> None:
    import transformers

    write_target(tmp_path / "target")
    SMALLER[name](tmp_path / "drafter")
    pair = load_pair(tmp_path)
    found, texts = generate(pair, REQUESTS), plain(pair).texts
    assert found.texts == texts
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "drafter", dtype=torch.float32
    ).eval()
    for request in REQUESTS[:3]:
        text, num_kept = [*request.prompt_token_ids, *texts[request.id]], len(request.prompt_token_ids) + 1
        for drafts, accepted, *_ in found.verified[request.id]:
            ids = text[:num_kept]
            for draft in drafts:
                with torch.inference_mode():
                    known = torch.tensor([ids]).clamp(max=model.config.vocab_size - 1)
                    logits = model(known).logits[0, -1, :128]
                assert draft == int(logits.argmax())
                ids.append(draft)
            num_kept += accepted + 1
        assert num_kept >= len(text)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (partial(write_hybrid, vocab_size=128), "has recurrent states"),
        (partial(write_gemma4, size="31b"), "a Gemma4ForCausalLM as drafter is not built"),
    ],
)
def test_models_that_cannot_draft_are_refused(
    tmp_path: Path, write: Callable[..., object], reason: str
) -> None:
    write_target(tmp_path / "target")
    write(tmp_path / "drafter")
    with refused(reason):
        load_pair(tmp_path)


def test_another_vocabulary_is_refused_by_its_first_token(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    (piece,) = (piece for piece, number in words.items() if number == 700)
    words["@@@"] = words.pop(piece)
    tokenizer["model"]["merges"] = [
        each for each in tokenizer["model"]["merges"] if piece not in ("".join(each), *each)
    ]
    file.write_text(json.dumps(tokenizer))
    reason = f"token 700 is '@@@' in the draft model's tokenizer and {piece!r} in the target's: use a model"
    with refused(re.escape(reason)):
        printed("generate", "--model", DEMO, "--drafter", tmp_path / "other")
    assert reason in " ".join(specgen("inspect", DEMO, tmp_path / "other").stdout.split())


def test_inspect_says_what_it_costs() -> None:
    found = printed("inspect", DEMO, DEMO)
    assert "a draft model" in found
    assert "Target and draft model fit; together 12,288 bytes of KV cache per token." in found


def test_inspect_plans_the_memory_of_a_target_that_drafts_for_itself() -> None:
    """It is named twice, and the plan is of both, by K."""
    found = json.loads(printed("inspect", DEMO, DEMO, "--gpu", "80GiB", "--json"))
    assert [each["kv_bytes_per_token"] for each in found["memory_plan"]] == [6144, *[2 * 6144] * 7]
    assert [each["kind"] for each in found["checkpoints"]] == ["target", "draft model"]


def test_the_bytes_of_a_step(itself: Pair) -> None:
    """The KV fill reads all of the model and gives the first draft; each other draft reads it again."""
    sizes = StepBytes.of(itself.models)
    tensors = open_checkpoint(itself.names["drafter"]).tensors.items()
    read = 4 * sum(prod(info.shape) for name, info in tensors if "embed" not in name)
    cache = (
        2 * 6 * 2 * 2 * 16 * 4 * 10.0
    )  # of two sequences at position 10: six layers, k and v, two heads of 16
    parts = sizes.parts(3, 2, 10)
    assert parts["KV fill"].num_bytes == read + cache
    assert parts["draft loop"].num_bytes == 2 * (read + cache)
    assert sizes.parts(1, 2, 10)["draft loop"].num_bytes == 0


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_every_rank_has_the_model_whole() -> None:
    """The bundled target drafts for its own shares: texts of one process, and nearly all drafts are accepted."""
    texts = {}
    for num_ranks in (1, 2):
        asked = ranks_config(num_ranks, drafter=str(DEMO))
        engine = build_engine(asked, load_models(asked, open_checkpoints(asked)), discard)
        found = list(engine.generate(bundled_requests(4, SamplingParams(max_tokens=24))))
        texts[num_ranks] = {each.request.id: each.token_ids for each in found}
        counts = columns.of([each.record for each in found], 3).counts
        assert counts.num_accepted.sum() > 0.97 * counts.drafted.sum()
    assert texts[1] == texts[2]


def test_a_context_that_is_shorter_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_target(tmp_path / "target")
    write_target(tmp_path / "drafter", num_layers=2, max_positions=64)
    pair = load_pair(tmp_path)
    assert generate(pair, REQUESTS).texts == plain(pair).texts
    (said,) = caplog.messages
    assert said.startswith("the draft model's context is 64 tokens and the target's 256: behind it")
