"""The engine's scores equal those of transformers for any chunking and packing, and leave no state."""

from itertools import islice

import pytest
import torch

from specgen.config import SamplingParams, UserError
from specgen.core.sequence import ScoreRequest
from tests.engines import Pair, engine_of, random_requests

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


def texts(pair: Pair, count: int, lengths: tuple[int, int] = (2, 60)) -> list[ScoreRequest]:
    """Random texts, with contexts from one token to all but one."""
    vocab_size = pair.models.target.config.vocab_size
    tokens = [r.prompt_token_ids for r in random_requests(count, vocab_size, GREEDY, lengths=lengths)]
    return [
        ScoreRequest(id=f"t{i}", token_ids=ids, num_context=1 + (7 * i) % (len(ids) - 1))
        for i, ids in enumerate(tokens)
    ]


def expected(pair: Pair, request: ScoreRequest) -> tuple[list[float], list[bool]]:
    """The same from ``transformers``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair.path / "target", dtype=torch.float32)
    ids = torch.tensor([request.token_ids])
    with torch.inference_mode():
        logits = model(ids[:, :-1]).logits[0, request.num_context - 1 :]
    wanted = ids[0, request.num_context :]
    log_probs = logits.log_softmax(-1).gather(-1, wanted[:, None])[:, 0]
    return log_probs.tolist(), (logits.argmax(-1) == wanted).tolist()


@pytest.mark.parametrize("max_prefill_tokens", [2048, 7])
def test_scores_equal_transformers(random_pair: Pair, max_prefill_tokens: int) -> None:
    requests = texts(random_pair, 12)
    engine = engine_of(random_pair, max_prefill_tokens=max_prefill_tokens, max_batch_size=5)
    found = {scored.request.id: scored for scored in engine.score(requests)}
    assert found.keys() == {request.id for request in requests}
    for request in requests:
        log_probs, greedy = expected(random_pair, request)
        assert found[request.id].log_probs == pytest.approx(log_probs, abs=1e-4)
        assert list(found[request.id].greedy) == greedy


def test_generated_tokens_are_scored_as_greedy(random_pair: Pair) -> None:
    asked = random_requests(3, random_pair.models.target.config.vocab_size, GREEDY, lengths=(3, 9))
    engine = engine_of(random_pair)
    written = [
        ScoreRequest(id=c.request.id, token_ids=prompt + c.token_ids, num_context=len(prompt))
        for c in engine.generate(asked)
        for prompt in [c.request.prompt_token_ids]
    ]
    changed = ScoreRequest(
        id="changed", token_ids=(*written[0].token_ids[:-1], 0), num_context=written[0].num_context
    )
    greedy = {scored.request.id: scored.greedy for scored in engine.score([*written, changed])}
    assert greedy.pop("changed") == (True,) * 5 + (False,)
    assert set(greedy.values()) == {(True,) * 6}


def test_a_full_context_is_scored_and_one_token_more_is_refused(random_pair: Pair) -> None:
    limit = random_pair.models.target.config.max_positions
    full = ScoreRequest(id="full", token_ids=(5,) * (limit + 1), num_context=1)
    engine = engine_of(random_pair)
    assert [len(scored.log_probs) for scored in engine.score([full])] == [limit]
    longer = ScoreRequest(id="longer", token_ids=(5,) * (limit + 2), num_context=1)
    with pytest.raises(UserError, match="longer: 257 tokens come before the last"):
        list(engine.score([longer]))
    with pytest.raises(UserError, match="token id 128 is not in the vocabulary"):
        list(engine.score([ScoreRequest(id="odd", token_ids=(5, 128), num_context=1)]))


@pytest.mark.parametrize("num_context", [0, 3])
def test_scoring_needs_context_and_tokens_to_score(num_context: int) -> None:
    with pytest.raises(UserError, match="leave at least one on either side"):
        ScoreRequest(id="t", token_ids=(1, 2, 3), num_context=num_context)


def test_pages_are_freed_when_the_iterator_is_closed(random_pair: Pair) -> None:
    engine = engine_of(random_pair)
    (allocator,) = engine._scheduler._allocators
    list(engine.score(texts(random_pair, 9)))
    assert allocator.num_free == allocator.num_pages
    scores = engine.score(texts(random_pair, 9))
    assert len(list(islice(scores, 1))) == 1
    scores.close()
    assert allocator.num_free == allocator.num_pages
    assert len(list(engine.generate(random_requests(2, 100, GREEDY)))) == 2
