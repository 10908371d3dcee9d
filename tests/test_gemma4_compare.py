"""One tiny Gemma 4 with every kind of drafter: ``specgen compare``, and several ranks."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.attention import Attend
from specgen.attention.sdpa import SdpaBackend
from specgen.checkpoints.checkpoint import load_drafter, load_target, open_checkpoint
from specgen.config import SamplingParams
from specgen.core.sequence import Request
from specgen.decoding.drafting import HeadDrafter
from specgen.decoding.outcome import Outcome, PaddedBatch
from specgen.decoding.sampling import SamplingBatch
from specgen.device import SINGLE_RANK, Ranks
from specgen.engine.build import build_engine
from specgen.engine.choices import resolve
from specgen.engine.loading import load_models, open_checkpoints
from specgen.kv.kv_cache import KVCache
from specgen.kv.layout import Layout
from specgen.record.record_rows import EngineRow
from tests.commands import printed, write_rows
from tests.engines import engine_config, random_requests
from tests.rank_threads import together
from tests.test_tensor_parallel import as_rows
from tests.tiny_checkpoints import write_dflash_head, write_head
from tests.tiny_gemma4 import write_assistant, write_deepspec, write_gemma4
from tests.tiny_tokenizers import write_channel

CPU = torch.device("cpu")
VOCAB = 328
HEADS = ("assistant", "dflash", "eagle3", "deepspec")


def written(path: Path, size: str) -> None:
    """The target, with a tokenizer, and the heads in ``path``."""
    vocabulary = {"vocab_size": VOCAB}
    if size != "12b":
        vocabulary["vocab_size_per_layer_input"] = VOCAB
    target = write_gemma4(path / "target", size, max_position_embeddings=512, **vocabulary)
    write_channel(path / "target")
    write_assistant(path / "assistant", target, ordered=(8, 3) if size == "e2b" else (0, 0))
    write_dflash_head(path / "dflash", target, draft_vocab_size=64)
    write_head(path / "eagle3", target, "speculators", draft_vocab_size=64)
    write_deepspec(path / "deepspec", target)


def test_compare_has_them_side_by_side(tmp_path: Path) -> None:
    written(tmp_path, "12b")
    write_rows(tmp_path / "test.jsonl", [{"question": f"{n} + 1?", "answer": "#### 1"} for n in range(4)])
    drafters = [option for name in HEADS[:3] for option in ("--drafter", str(tmp_path / name))]
    text = printed(
        *("compare", "--model", str(tmp_path / "target"), *drafters, "--drafter", "ngram"),
        *("--dataset", f"gsm8k={tmp_path / 'test.jsonl'}", "--max-new-tokens", "8", "--num-spec-tokens", "3"),
        *("--repeats", "0", "--output", tmp_path / "out"),
        columns=160,
    )
    names = (*HEADS[:3], "ngram")
    for name in names:
        assert re.search(rf"^gsm8k +{name}\S* ", text, re.MULTILINE), name
    runs = [(tmp_path / "out").glob(f"*/{name}*/completions.jsonl") for name in names]
    texts = [{row["id"]: row["token_ids"] for row in map(json.loads, next(found).open())} for found in runs]
    assert all(found == texts[0] for found in texts)
    assert len(texts[0]) == 4


# ---- several ranks


@torch.inference_mode()
def drafts(path: Path, head: str, ranks: Ranks) -> torch.Tensor:
    """Four behind each of two texts, by the target's and the head's share, and how likely each is: [2, 2, 4]."""
    target = load_target(open_checkpoint(str(path / "target")), torch.float32, CPU, ranks)
    loaded, backend = load_drafter(open_checkpoint(str(path / head)), target), SdpaBackend(CPU)
    size: dict[str, Any] = {"num_pages": 9, "page_size": 8, "dtype": torch.float32, "device": CPU}
    cache = KVCache(spec=target.config.kv_spec, **size)
    drafter = HeadDrafter(
        head=loaded,
        cache=cache if loaded.config.reads_target_kv else KVCache(spec=loaded.config.kv_spec, **size),
        backend=backend,
        batch=PaddedBatch(),
        sampled_drafts=False,
        target_vocab_size=VOCAB,
        dtype=torch.float32,
    )
    tables = torch.arange(1, 9, dtype=torch.int32).view(2, 4)
    ids = torch.randint(0, VOCAB, (32,), generator=torch.Generator().manual_seed(3))
    layout = Layout.ragged(tables, [0, 0], [12, 19], 8)
    hidden, features = target.forward(
        ids[:31], Attend(backend, cache, layout, target.rope), drafter.aux_layers
    )
    outcome = Outcome(
        features=hidden if drafter.reads_output else features,
        next_tokens=ids[1:],
        layout=layout,
        keep=layout.query_lens,
        all_kept=True,
    )
    state, _ = drafter.observe(outcome)
    found = drafter.propose(state, 4, tables, SamplingBatch.of([SamplingParams()] * 2, [0, 0], CPU))
    return torch.stack((found.tokens.float(), found.confidence))


@pytest.mark.parametrize("size", ["e2b", "12b"])
def test_drafts_of_ranks_are_those_of_one(tmp_path: Path, size: str) -> None:
    """Of a head that reads the target's share of keys and values its own share of queries fits."""
    written(tmp_path, size)
    for head in HEADS:
        alone = drafts(tmp_path, head, SINGLE_RANK)
        assert len(alone[1].unique()) == 8
        for count in (2, 4):
            found = together(count, lambda ranks, head=head: drafts(tmp_path, head, ranks))  # type: ignore[misc]
            for each in found:
                torch.testing.assert_close(each, alone, atol=1e-5, rtol=1e-4, msg=f"{head}, {count} ranks")


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_texts_and_steps_of_ranks_are_those_of_one(tmp_path: Path, head: str) -> None:
    written(tmp_path, "e2b")
    requests = random_requests(4, VOCAB, SamplingParams(max_tokens=16, ignore_eos=True), lengths=(3, 40))
    one, two = (engine_of_ranks(tmp_path, head, requests, num_ranks) for num_ranks in (1, 2))
    assert two == one


def engine_of_ranks(path: Path, head: str, requests: list[Request], num_ranks: int) -> tuple[Any, ...]:
    """Texts, passes and steps."""
    settings = {"num_spec_tokens": 3, "max_batch_size": 3, "page_size": 16, "tensor_parallel": num_ranks}
    asked = replace(engine_config(path, **settings), drafter=str(path / head))
    checkpoints = open_checkpoints(asked)
    config, events = resolve(asked, checkpoints), list[EngineRow]()
    engine = build_engine(config, load_models(config, checkpoints), events.append)
    found = {each.request.id: each for each in engine.generate(requests)}
    steps = {name: each.record.steps for name, each in found.items()}
    return {name: each.token_ids for name, each in found.items()}, as_rows(events), steps
