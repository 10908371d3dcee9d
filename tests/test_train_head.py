"""Heads that the trainer makes draft in the engine as in the trainer's own dense computation, and learn."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from demo_target import Recipe, answer
from dense_heads import HeadConfig, HeadKind
from head_training import Answered, measure_acceptance, read_head, train_head, write_head
from train_head import write_turns
from transformers import LlamaForCausalLM

from specgen import Engine, EngineConfig
from specgen.config import SamplingParams
from specgen.config.bundled import data_directory
from specgen.core.sequence import Request
from specgen.record.record_rows import Step
from tests.engines import engine_of, load_pair
from tests.tiny_checkpoints import write_target

pytestmark = pytest.mark.scripts

RECIPE = Recipe(
    head_row_length=96,
    head_batch_rows=4,
    head_epochs=32,
    head_learning_rate=0.01,
    head_loss_rows=64,
    unrolled_steps=4,
)
CONFIG = HeadConfig(
    kind="EAGLE3",
    num_layers=1,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    draft_vocab_size=96,
    rope_theta=5000.0,
    mask_token=5,
)
KINDS: dict[HeadKind, HeadConfig] = {
    "EAGLE3": CONFIG,
    "P-EAGLE": replace(CONFIG, kind="P-EAGLE", num_layers=2),
    "DFlash": replace(CONFIG, kind="DFlash", num_layers=2, draft_vocab_size=128, block_size=5),
    "EAGLE-1": replace(CONFIG, kind="EAGLE-1", draft_vocab_size=128),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained")
    write_target(
        path / "target", num_layers=8, rope={"rope_type": "default", "rope_theta": CONFIG.rope_theta}
    )
    return path


@pytest.fixture(scope="module")
def answered(target: Path) -> Answered:
    """Of prompts that hold the end token and the id 0, as chats do that begin every message with the same token."""
    model = LlamaForCausalLM.from_pretrained(target / "target").eval()
    model.config.pad_token_id = model.config.eos_token_id
    prompts = torch.randint(128, (24, 9), generator=torch.Generator().manual_seed(1))
    prompts[:, ::4] = torch.tensor([2, 1, 0])
    return list(
        zip(
            prompts.tolist(), answer(model, prompts.tolist(), max_new_tokens=24, temperature=0.0), strict=True
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_head_drafts_in_the_engine_as_in_training(
    target: Path, answered: Answered, kind: HeadKind
) -> None:
    model = LlamaForCausalLM.from_pretrained(target / "target", dtype=torch.float32).eval()
    model.requires_grad_(False)
    *_, trained = train_head(RECIPE, KINDS[kind], model, answered)
    write_head(target / kind, *trained, model)
    head, kept = read_head(target / kind, KINDS[kind], model)
    expected = measure_acceptance(model, head, kept, answered, num_drafts=4)["simulated"]
    engine = engine_of(load_pair(target, drafter=kind), num_spec_tokens=4)
    requests = [
        Request(id=str(n), prompt_token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=24))
        for n, (prompt, _) in enumerate(answered)
    ]
    done = list(engine.generate(requests))
    assert {int(each.request.id): list(each.token_ids) for each in done} == {
        n: text for n, (_, text) in enumerate(answered)
    }
    runs = [run for each in done for run in runs_within(each.record.steps, len(each.token_ids))]
    assert expected["num_drafts"] == len(runs)
    assert expected["joint"] == [round(sum(run > i for run in runs) / len(runs), 4) for i in range(4)]
    assert expected["joint"][0] > 0.3, "it has learnt the texts that it was trained on"


def runs_within(steps: Sequence[Step], num_tokens: int) -> Iterator[int]:
    """The accepted drafts of each step that lie within a text of so many tokens, of which prefill gave the first."""
    room = num_tokens - 1
    for step in steps:
        yield min(step.accepted, room)
        room -= step.accepted + 1


def test_another_seed_writes_other_prompts() -> None:
    """Several processes answer at once, a seed each: what they write must differ."""
    config = EngineConfig(
        model=str(data_directory() / "demo" / "target"),
        drafter=None,
        num_spec_tokens=0,
        max_batch_size=8,
        device="cpu",
    )
    with Engine(config) as engine:
        first, second, again = (set(write_turns(engine, [()] * 8, seed)) for seed in (1, 2, 1))
    assert first == again
    assert len(first & second) < 4
