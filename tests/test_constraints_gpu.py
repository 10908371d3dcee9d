"""Constraints on an NVIDIA GPU: walked inside the captured step, without a sync, and the same texts as on the CPU."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specgen.config import SamplingParams, StructuredOutputs
from specgen.core.sequence import Request
from specgen.decoding.automaton_tables import Tables
from specgen.engine.build import build_engine
from specgen.ops import bind_ops
from specgen.ops.reference import torch_ops
from specgen.text.tokenizer import load_tokenizer
from tests.engines import Pair, bundled_requests, config_of, generate
from tests.marks import on_gpu
from tests.test_structured import MANY, check, fuzzed

pytestmark = on_gpu()
EXACT = {"device": "cuda", "dtype": "float32", "page_size": 16, "attention": "sdpa-static"}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"structured_outputs": StructuredOutputs(regex=r'\{"answer": -?[0-9]{1,4}, "unit": "[a-z]{3,12}"\}')},
    {"bad_words_ids": tuple((token, token + 1) for token in range(200, 900)), "repetition_penalty": 1.1},
    {"structured_outputs": StructuredOutputs(json_object=True), "temperature": 0.8},
    {"allowed_token_ids": tuple(range(1, 3072, 2)), "logprobs": 2},
    {"structured_outputs": StructuredOutputs(choice=("The answer is 12.", "The answer is 8.", "none"))},
)


def asked() -> list[Request]:
    found = []
    for number, request in enumerate(bundled_requests(18, SamplingParams())):
        kind = {"max_tokens": 12 + 5 * number % 30, "seed": number} | KINDS[number % len(KINDS)]
        found.append(replace(request, sampling=SamplingParams(**kind)))
    return found


def with_tokenizer(pair: Pair) -> Pair:
    return replace(pair, models=replace(pair.models, tokenizer=load_tokenizer(str(pair.path / "target"))))


@pytest.mark.parametrize("mode", ["step", "pass", "off"])
@pytest.mark.parametrize("batch", ["padded", "non-padded"])
@pytest.mark.parametrize("drafting", [{"num_spec_tokens": 0}, {}, {"drafter": "ngram:2"}])
def test_captured_steps_give_the_texts_of_the_cpu(
    demo_pair: Pair, gpu_pair: Pair, drafting: dict[str, Any], batch: str, mode: str
) -> None:
    """Rows of several automata join, leave and move between replays; greedy ones are compared."""
    settings: dict[str, Any] = {"num_spec_tokens": 4, "drafter_batch": batch, "max_batch_size": 5} | drafting
    here = generate(with_tokenizer(demo_pair), asked(), **settings)
    there = generate(with_tokenizer(gpu_pair), asked(), cuda_graphs=mode, **settings, **EXACT)
    greedy = [each.id for each in asked() if each.sampling.temperature == 0]
    assert {name: there.texts[name] for name in greedy} == {name: here.texts[name] for name in greedy}
    assert all(each.error is None for each in there.completions.values())


def test_preemption_and_a_second_run_of_one_engine(demo_pair: Pair, gpu_pair: Pair) -> None:
    """Captured steps find the tables at the same addresses in a later run, with other automata in them."""
    settings: dict[str, Any] = {"num_spec_tokens": 4, "max_batch_size": 4}
    greedy = [each for each in asked() if each.sampling.temperature == 0]
    expected = generate(with_tokenizer(demo_pair), greedy, **settings).texts
    page = 16 * (12 + 1) * 2 * 2 * 64 * 4  # positions, layers of target and head, k and v, heads, dim, bytes
    config = config_of(gpu_pair, cuda_graphs="step", kv_memory=14 * page, **settings, **EXACT)
    engine = build_engine(config, with_tokenizer(gpu_pair).models, lambda event: None)
    for requests in (greedy, greedy[::-1]):
        assert {each.request.id: each.token_ids for each in engine.generate(requests)} == expected


def test_a_constrained_step_waits_for_nothing(gpu_pair: Pair) -> None:
    config = config_of(gpu_pair, cuda_graphs="off", num_spec_tokens=4, **EXACT)
    engine = build_engine(config, with_tokenizer(gpu_pair).models, lambda event: None)
    for request in asked()[1:6]:
        engine.submit(replace(request, sampling=replace(request.sampling, max_tokens=60)))
    for _ in range(3):
        engine.step()
    columns = engine._batch.columns(len(engine._batch.sequences))
    plan = engine.spec_length.choose(columns.num_rows, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            engine._steps._decode(columns, plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
def test_many_answers_fit(gpu_pair: Pair, batch: str) -> None:
    """As many as SPECGEN_FUZZ says: captured steps, random schemas and regexes in each batch."""
    pair = with_tokenizer(gpu_pair)
    settings: dict[str, Any] = {"num_spec_tokens": 4, "max_batch_size": 64}
    settings |= {"drafter_batch": batch, "cuda_graphs": "step"} | EXACT
    outputs, requests = fuzzed(pair, MANY // 2, 900, **settings)
    assert check(pair, outputs, requests) > MANY // 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_look_ups_equal_the_reference(dtype: torch.dtype) -> None:
    """Random automata, columns with strides, a draft vocabulary or none; a padding row's automaton allows all."""
    rng, device = np.random.default_rng(3), torch.device("cuda")
    there, ops = bind_ops(device, dtype), torch_ops()
    for vocab_size in (5, 300, 4096, 128_256):
        tables = Tables(4, 400, vocab_size, device, walk=there.walk, mask=there.mask)
        starts = [0]
        for number in range(1, 5):
            starts.append(2 + 70 * (number - 1))
            table = rng.integers(-1, min(9, vocab_size), (9, 7))
            tables.fill(number, starts[-1], rng.integers(0, 6, vocab_size), table)
        for batch, n in ((1, 1), (7, 5), (40, 3)):
            automata = torch.from_numpy(rng.integers(0, 5, (batch, 3))).to(device)[:, 2]
            states = torch.tensor([starts[a] + (7 * rng.integers(9) if a else 0) for a in automata.tolist()])
            tokens = torch.from_numpy(rng.integers(-1, vocab_size, (batch, n))).to(device)
            walked = tables.walk(automata, states.to(device), tokens)
            expected = ops.walk(tables.classes, tables.successors, automata, states.to(device), tokens)
            assert torch.equal(walked, expected), (vocab_size, batch)
            few = torch.from_numpy(rng.permutation(vocab_size)[: max(1, vocab_size // 4)]).to(device)
            ids: Tensor | None
            for ids in (None, few):
                size = vocab_size if ids is None else len(ids)
                logits = torch.randn(batch, n + 3, size, dtype=dtype, device=device)[:, 1 : n + 2]
                for least, rows in ((float("-inf"), slice(None)), (-1e4, slice(1, 2))):
                    given = (automata, walked[:, rows], least, ids)
                    expected = ops.mask(logits[:, rows], tables.classes, tables.successors, *given)
                    assert torch.equal(tables.mask(logits[:, rows], *given), expected), (
                        vocab_size,
                        ids is None,
                    )
