"""Speculation changes no text of a mixture: greedy output is that of ``transformers`` with every kind of drafter."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specgen.checkpoints.inspect_checkpoint import describe
from specgen.config import SamplingParams
from specgen.core.sequence import Request
from specgen.models.model_config import TargetConfig
from tests.engines import Pair, generate, load_pair, random_requests
from tests.reference_heads import DenseTarget, reference_head
from tests.test_heads import wrong_drafts
from tests.test_mixtures import write_mxfp4
from tests.tiny_checkpoints import write_eagle1_head, write_head
from tests.tiny_mixtures import WINDOW, write_gpt_oss, write_qwen3_moe

VOCAB = 8  # so small that random heads are often right
GREEDY = SamplingParams(max_tokens=2 * WINDOW, ignore_eos=True)
eagle3 = partial(write_head, draft_vocab_size=None)
PAIRS: dict[str, tuple[Callable[..., TargetConfig], Callable[[Path, TargetConfig], None]]] = {
    "gpt-oss-eagle3": (
        write_gpt_oss,
        partial(write_head, dialect="speculators", norm_before_residual=True, draft_vocab_size=6, seed=3),
    ),
    "gpt-oss-boundary": (
        write_gpt_oss,
        partial(eagle3, aux_layer_ids=[2, 5, 6], aux_at="eagle_config", norm_before_fc=True, seed=2),
    ),
    "mxfp4-nested": (write_mxfp4, partial(eagle3, aux_layer_ids=[1, 2, 4], aux_at="eagle_config", seed=2)),
    "gpt-oss-eagle-1": (write_gpt_oss, partial(write_eagle1_head, seed=1)),
    "mxfp4-last-state": (write_mxfp4, partial(eagle3, reads_output=True, seed=1)),
    "gpt-oss-windows": (write_gpt_oss, partial(eagle3, num_layers=2, windows=[5, None], seed=1)),
    "qwen3-moe-eagle3": (write_qwen3_moe, partial(eagle3, qk_norm=True, seed=4)),
    "qwen3-moe-eagle-1": (write_qwen3_moe, partial(write_eagle1_head, seed=1)),
}


def requests() -> list[Request]:
    """Prompts shorter and longer than the window; the last three share their first pages."""
    alone = random_requests(6, VOCAB, GREEDY, lengths=(2, 3 * WINDOW))
    prefix = tuple(7 - i % 5 for i in range(13))
    ends = [(3,), (4, 4, 7), (7, 6, 5, 4, 3)]
    shared = [Request(id=f"s{i}", prompt_token_ids=prefix + e, sampling=GREEDY) for i, e in enumerate(ends)]
    return alone + shared


PARAMS = [
    pytest.param(
        name, marks=[pytest.mark.xdist_group(name), *([] if name == "mxfp4-nested" else [pytest.mark.slow])]
    )
    for name in PAIRS
]


@pytest.fixture(scope="module", params=PARAMS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp(request.param)
    target, head = PAIRS[request.param]
    head(path / "drafter", target(path / "target", vocab_size=VOCAB, eos_token_id=0))
    return load_pair(path)


@pytest.fixture(scope="module")
def reference(pair: Pair) -> DenseTarget:
    return DenseTarget(pair.path / "target")


@pytest.fixture(scope="module")
def texts(reference: DenseTarget) -> dict[str, tuple[int, ...]]:
    return {r.id: reference.greedy(r.prompt_token_ids, r.sampling.max_tokens) for r in requests()}


def test_target_and_head_fit(pair: Pair) -> None:
    description = describe(str(pair.path / "target"), str(pair.path / "drafter"))
    assert description.misfits == ()
    assert "Target and head fit" in description.to_text()


@pytest.mark.parametrize("drafter", ["head", "ngram"])
def test_greedy_text_equals_transformers(pair: Pair, texts: dict[str, tuple[int, ...]], drafter: str) -> None:
    changes: dict[str, Any] = {} if drafter == "head" else {"drafter": "ngram"}
    accepted = set[int]()
    for k, batch in ((1, "non-padded"), (3, "padded"), (4, "non-padded")):
        outputs = generate(pair, requests(), num_spec_tokens=k, drafter_batch=batch, **changes)
        assert outputs.texts == texts, (k, batch)
        accepted |= {step[1] for steps in outputs.verified.values() for step in steps}
    assert accepted >= {0, 1, 2}, "drafts must be right and wrong"


@pytest.mark.slow
def test_no_setting_changes_a_text(pair: Pair, texts: dict[str, tuple[int, ...]]) -> None:
    plain = generate(pair, requests(), num_spec_tokens=0)
    assert plain.texts == texts
    some = requests()[5:]
    expected = {r.id: texts[r.id] for r in some}
    for changes in (
        {"max_batch_size": 1},
        {"max_batch_size": 1, "num_spec_tokens": 0},
        {"max_prefill_tokens": 3, "prefix_cache": False, "drafter_batch": "non-padded"},
        {"attention": "sdpa-static", "max_prefill_tokens": 5, "page_size": 16},
    ):
        outputs = generate(pair, some, **changes)
        assert outputs.texts == expected, changes
        cached = outputs.any_cached
        assert cached == ("prefix_cache" not in changes and "page_size" not in changes), changes


@pytest.mark.slow
def test_preemption_changes_no_text(
    pair: Pair, texts: dict[str, tuple[int, ...]], device_like: Callable[[], None]
) -> None:
    head = pair.models.head
    assert head is not None
    layers = pair.models.target.config.num_layers + head.config.num_layers
    page = 4 * layers * 2 * 2 * 16 * 4  # positions, layers, k and v, heads, dim, bytes
    device_like()
    for batch in ("padded", "non-padded"):
        tight = generate(pair, requests(), num_spec_tokens=4, drafter_batch=batch, kv_memory=24 * page)
        assert tight.num_preempted > 0
        assert tight.texts == texts


def test_every_draft_equals_the_reference(pair: Pair, reference: DenseTarget) -> None:
    """So the features that a head reads are those of the right layers."""
    outputs = generate(pair, requests(), num_spec_tokens=4)
    dense = reference_head(pair.path / "drafter", reference)
    assert list(wrong_drafts(outputs, dense)) == []
