"""On an NVIDIA GPU: texts and steps equal the CPU's, with and without CUDA graphs and lookahead."""

import gc
import json
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.attention.hopper import HopperBackend
from specgen.config import CONFIDENCE_LEVELS, SamplingParams, UserError
from specgen.core import graphs
from specgen.core.engine_core import EngineCore
from specgen.core.sequence import Request
from specgen.core.spec_length import FixedPlan, SpecLength, StepPlan
from specgen.core.step import Steps
from specgen.decoding.sampling import SamplingBatch, target_probs
from specgen.engine.build import _memory_for_kv, build_engine
from specgen.record.record_rows import Captured, OutOfMemory
from tests.commands import write_rows
from tests.engines import Outputs, Pair, bundled_requests, config_of, generate, load_pair, nan_at
from tests.marks import on_gpu
from tests.test_faults import Setting, require_no_change, run_without_fault
from tests.test_per_request import all_different, answers
from tests.test_step_costs import AnyPlan

pytestmark = on_gpu()
GREEDY = SamplingParams(max_tokens=48)
SAMPLED = SamplingParams(max_tokens=32, temperature=0.8)
COUNT = 20
FLOAT32 = {"device": "cuda", "dtype": "float32"}


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_texts_and_steps_equal_the_cpus(demo_pair: Pair, gpu_pair: Pair, k: int, batch: str) -> None:
    here = generate(demo_pair, bundled_requests(COUNT, GREEDY), num_spec_tokens=k, drafter_batch=batch)
    there = generate(
        gpu_pair, bundled_requests(COUNT, GREEDY), num_spec_tokens=k, drafter_batch=batch, **FLOAT32
    )
    assert sum(map(len, here.texts.values())) > 300
    assert there.texts == here.texts
    assert there.verified == here.verified


@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_a_seed_gives_the_same_text_on_every_device(
    demo_pair: Pair, gpu_pair: Pair, draft_sampling: str
) -> None:
    here = generate(demo_pair, bundled_requests(COUNT, SAMPLED), draft_sampling=draft_sampling)
    there = generate(gpu_pair, bundled_requests(COUNT, SAMPLED), draft_sampling=draft_sampling, **FLOAT32)
    assert sum(map(len, here.texts.values())) > 300
    same = sum(here.texts[name] == there.texts[name] for name in here.texts)
    # a random number may fall between two cumulative sums that are rounded differently
    assert same >= COUNT - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_acceptance(demo_path: Path, gpu_pair: Pair, dtype: torch.dtype) -> None:
    half = load_pair(demo_path, dtype, "cuda")
    name = str(dtype).removeprefix("torch.")

    def length(pair: Pair, dtype_name: str) -> float:
        outputs = generate(pair, bundled_requests(COUNT, GREEDY), device="cuda", dtype=dtype_name)
        steps = [step for steps in outputs.verified.values() for step in steps]
        return 1 + sum(accepted for _, accepted, _ in steps) / len(steps)

    assert length(half, name) == pytest.approx(length(gpu_pair, "float32"), rel=0.1)


EXACT = {**FLOAT32, "attention": "sdpa-static", "page_size": 16}
FAST = {"device": "cuda", "dtype": "bfloat16", "attention": "hopper", "page_size": 0}
MODES = ("step", "pass", "off")


def mixed(sampling: SamplingParams, count: int = 24) -> list[Request]:
    """Texts of 1 to 60 tokens: sequences join and leave at nearly every step, across batch-size buckets and pages."""
    return [
        Request(
            id=request.id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=SamplingParams(
                max_tokens=1 + 13 * index % 60,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
            ),
        )
        for index, request in enumerate(bundled_requests(count, sampling))
    ]


CAPTURED = {  # by mode
    "step": {"prompts", "step"},
    "pass": {"prompts", "propose", "verify", "observe"},
    "off": set[str](),
}


def captured(outputs: Outputs) -> set[str]:
    return {event.what for event in outputs.passes if isinstance(event, Captured) and event.fits}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, SamplingParams(temperature=0.9, top_k=20, top_p=0.9)])
@pytest.mark.parametrize("batch", ["padded", "non-padded"])
@pytest.mark.parametrize("k", [0, 4])
def test_cuda_graphs_change_no_text_and_no_step(
    gpu_pair: Pair, k: int, batch: str, sampling: SamplingParams
) -> None:
    runs = {
        mode: generate(
            gpu_pair,
            mixed(sampling),
            num_spec_tokens=k,
            drafter_batch=batch,
            max_batch_size=7,
            draft_sampling="probabilistic",
            cuda_graphs=mode,
            **EXACT,
        )
        for mode in MODES
    }
    assert {mode: captured(run) for mode, run in runs.items()} == CAPTURED
    assert sum(map(len, runs["off"].texts.values())) > 500
    for mode in ("step", "pass"):
        assert runs[mode].texts == runs["off"].texts
        assert runs[mode].verified == runs["off"].verified


@pytest.mark.parametrize("mode", ["step", "pass"])
def test_captures_that_find_no_memory_change_no_text(
    gpu_pair: Pair, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Six fail, six fit, and so on, as the pieces of a step are captured together or not at all: sizes without a graph
    run in larger ones or in none, until they are tried again."""
    numbers, capture = count(), graphs._capture

    def short(*arguments: Any) -> Any:
        return capture(*arguments) if next(numbers) // 6 % 2 else None

    monkeypatch.setattr(graphs, "_PATIENCE", 8)
    monkeypatch.setattr(graphs, "_capture", short)
    options = {"num_spec_tokens": 4, "max_batch_size": 12, **EXACT}
    plain = generate(gpu_pair, mixed(GREEDY, 40), cuda_graphs="off", **options)
    outputs = generate(gpu_pair, mixed(GREEDY, 40), cuda_graphs=mode, **options)
    tried = [event for event in outputs.passes if isinstance(event, Captured)]
    assert {event.fits for event in tried} == {True, False}
    assert captured(outputs) == CAPTURED[mode]
    assert outputs.texts == plain.texts
    assert outputs.verified == plain.verified


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("mode", MODES)
def test_per_request_parameters_in_a_mixed_batch(gpu_pair: Pair, k: int, batch: str, mode: str) -> None:
    """Biases and log-probabilities of all widths, in graphs captured when the batch needs them."""
    requests = [
        replace(r, sampling=replace(r.sampling, stop=()))  # these pairs have no tokenizer
        for r in all_different(bundled_requests(24, GREEDY))
    ]
    settings: dict[str, Any] = {"num_spec_tokens": k, "drafter_batch": batch, **EXACT}
    alone = answers(generate(gpu_pair, requests, cuda_graphs="off", max_batch_size=1, **settings))
    together = answers(generate(gpu_pair, requests, cuda_graphs=mode, max_batch_size=7, **settings))
    for name, (text, end, logprobs) in alone.items():
        assert together[name][:2] == (text, end)
        assert together[name][2] == (logprobs and pytest.approx(logprobs, abs=2e-3))


def fails_after(requests: list[Request], outputs: Outputs) -> tuple[int, set[str]]:
    """A token after which some texts continue, and their requests; others neither contain nor draft it."""
    for token in range(3, 3072):
        inside = {r.id for r in requests if token in outputs.texts[r.id][:-1]}
        hit = inside | {r.id for r in requests if token in r.prompt_token_ids}
        drafted = {name for name, steps in outputs.verified.items() if any(token in s[0] for s in steps)}
        last = {name for name, text in outputs.texts.items() if token in text[-1:]}
        if inside and len(hit) > 1 and drafted | last <= hit:
            return token, hit
    raise AssertionError("no token will do")


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("mode", MODES)
def test_nan_logits_fail_only_their_request(gpu_pair: Pair, k: int, batch: str, mode: str) -> None:
    requests = mixed(GREEDY)
    settings: dict[str, Any] = {"num_spec_tokens": k, "drafter_batch": batch, "max_batch_size": 7, **EXACT}
    right = generate(gpu_pair, requests, cuda_graphs=mode, **settings)
    token, hit = fails_after(requests, right)
    outputs = generate(nan_at(gpu_pair, token), requests, cuda_graphs=mode, **settings)
    errors = {name: completion.error for name, completion in outputs.completions.items()}
    assert {name for name, error in errors.items() if error is not None} == hit
    assert all("not finite" in (errors[name] or "") for name in hit)
    assert {name: outputs.texts[name] for name in right.texts.keys() - hit} == {
        name: text for name, text in right.texts.items() if name not in hit
    }


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, SamplingParams(temperature=0.9, top_k=20, top_p=0.9)])
def test_nan_prompts_fail_only_their_requests(bfloat16_pair: Pair, sampling: SamplingParams) -> None:
    """Attention and sampling kernels read NaN only in the pages and rows of the failing requests."""
    sampling = replace(sampling, max_tokens=24)
    good = bundled_requests(16, sampling)
    token = next(t for t in range(3, 3072) if not any(t in r.prompt_token_ids for r in good))
    bad = [replace(r, id=f"bad {r.id}", prompt_token_ids=(*r.prompt_token_ids[:4], token)) for r in good[:6]]
    requests = [request for pair in zip(good, [*bad, *good[6:]], strict=True) for request in pair]
    requests = list(dict.fromkeys(requests))
    outputs = generate(nan_at(bfloat16_pair, token), requests, max_batch_size=5, num_spec_tokens=4, **FAST)
    failed = {name for name, completion in outputs.completions.items() if completion.error}
    written = {name for name, text in outputs.texts.items() if token in text}
    assert {r.id for r in bad} <= failed <= {r.id for r in bad} | written
    assert len(outputs.completions) == len(requests)


def test_an_error_during_graph_replay_changes_no_text(
    gpu_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = generate(gpu_pair, mixed(GREEDY), max_batch_size=7, **EXACT).texts
    decode, calls = Steps.decode, [0]

    def fails_once(self: Steps, columns: Any, plan: StepPlan) -> Any:
        calls[0] += 1
        result = decode(self, columns, plan)
        if calls[0] == 5:
            raise RuntimeError("planted")
        return result

    monkeypatch.setattr(Steps, "decode", fails_once)
    assert generate(gpu_pair, mixed(GREEDY), max_batch_size=7, **EXACT).texts == right


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("mode", ["step", "off"])
def test_an_error_at_any_launch_point_changes_no_result(
    gpu_pair: Pair, mode: str, kind: str, k: int, prefix_cache: bool, error: type[RuntimeError]
) -> None:
    """Also where a graph is captured, and where one is replayed."""
    setting = Setting(gpu_pair, kind, k, prefix_cache, settings=EXACT | {"cuda_graphs": mode})
    require_no_change(setting, run_without_fault(setting), error)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu_gives_the_same_texts(demo_path: Path) -> None:
    """Each alone, and both alternately in one process."""
    engines, texts = [], []
    for device in ("cuda:0", "cuda:1"):
        pair = load_pair(demo_path, torch.float32, device)
        config = config_of(pair, **EXACT | {"device": device}, num_spec_tokens=4, max_batch_size=7)
        engines.append(build_engine(config, pair.models, lambda event: None))
    for engine in engines:
        texts.append({c.request.id: c.token_ids for c in engine.generate(mixed(GREEDY))})
    turns = [engine.generate(mixed(GREEDY)) for engine in reversed(engines)]
    texts += [{}, {}]
    for pair_of in zip(*turns, strict=True):
        for found, completion in zip(texts[2:], pair_of, strict=True):
            found[completion.request.id] = completion.token_ids
    assert all(found == texts[0] for found in texts)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_run_on_a_second_gpu_gives_the_same_texts(tmp_path: Path) -> None:
    """With the kernels of a real run, which one process can use on one GPU only."""
    rows = []
    for device in ("cuda:0", "cuda:1"):
        output = tmp_path / device
        options = ["--device", device, "--max-batch-size", "7", "--output", str(output)]
        code = "from specgen.cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, "generate", *options], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert f"{device}, bfloat16" in done.stdout
        rows.append([json.loads(row) for row in (output / "completions.jsonl").open()])
    assert [row["token_ids"] for row in rows[0]] == [row["token_ids"] for row in rows[1]]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu_in_one_process_is_refused(demo_path: Path) -> None:
    HopperBackend(torch.device("cuda:0"))
    with pytest.raises(UserError, match="runs on one GPU of a process and cuda:1 is the second"):
        HopperBackend(torch.device("cuda:1"))


def test_the_kv_cache_gets_the_memory_left_by_the_job(bfloat16_pair: Pair) -> None:
    # prefills of one token each, and attention without copies of the cache, so that logits need the most memory
    config = config_of(bfloat16_pair, **FAST, num_spec_tokens=4, max_batch_size=64, max_prefill_tokens=64)
    greedy = SamplingParams()
    left = [
        _memory_for_kv(config, bfloat16_pair.models, expected)
        for expected in (
            greedy,
            replace(greedy, temperature=1.0),
            replace(greedy, temperature=1.0, top_p=0.9, logprobs=20),
        )
    ]
    # the float32 probabilities of the batch's rows, which greedy decoding does not allocate
    distribution = 64 * 5 * bfloat16_pair.models.target.config.vocab_size * 4
    assert left[0] >= left[1] + 2 * distribution, left
    assert left[1] > left[2], left


_LOSES_THE_DEVICE = """
import sys, pathlib, torch
from specgen.engine.build import build_engine
from specgen.config.errors import DeviceLost
from specgen.core.step import Steps
from tests.engines import bundled_requests, config_of, load_pair
from specgen.config import SamplingParams

pair = load_pair(pathlib.Path(sys.argv[1]), torch.bfloat16, "cuda")
engine = build_engine(config_of(pair, device="cuda", dtype="bfloat16"), pair.models, lambda event: None)
engine.warm_up()
decode = Steps.decode

def breaks(self, columns, num_drafts):
    torch.zeros(1, device="cuda")[torch.full((1,), 5, device="cuda")]
    return decode(self, columns, num_drafts)

Steps.decode = breaks
try:
    list(engine.generate(bundled_requests(4, SamplingParams(max_tokens=8))))
except DeviceLost as error:
    print(error)
"""


def test_a_lost_device_is_named(demo_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOSES_THE_DEVICE, str(demo_path)], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.startswith("the device is lost ("), done.stderr[-2000:]


_LOSES_THE_DEVICE_WITH_ONE = """
import torch
from specgen.cli import main as cli
from specgen.core.step import Steps

decode = Steps.decode

def breaks(self, columns, num_drafts):
    too_long = columns.state.positions.max(0, keepdim=True).values > 120
    torch.zeros(1, device="cuda")[too_long.long() * 5]
    return decode(self, columns, num_drafts)

Steps.decode = breaks
cli.main()
"""


def _answered(code: str, prompts: Path, output: Path) -> tuple[int, str, dict[str, str]]:
    """The exit code, stderr and the texts by id of ``code``, which calls the command line."""
    options = ["--dtype", "float32", "--max-new-tokens", "16", "--max-batch-size", "4", "--ignore-eos"]
    options += ["--max-prefill-tokens", "256"]  # so that prompts of the memory trial are short
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", "--dataset", prompts, "--output", output, *options],
        capture_output=True,
        text=True,
        timeout=600,
    )
    rows = map(json.loads, (output / "completions.jsonl").read_text().splitlines())
    return done.returncode, done.stderr, {row["id"]: row["text"] for row in rows}


def test_a_resumed_run_skips_the_request_that_loses_the_device(tmp_path: Path) -> None:
    prompts = {f"p{n}": f"Tom has {n} apples." if n != 5 else "And " * 200 for n in range(12)}
    path = tmp_path / "prompts.jsonl"
    write_rows(path, ({"id": n, "prompt": text} for n, text in prompts.items()))
    code, said, right = _answered("from specgen.cli.main import main; main()", path, tmp_path / "whole")
    assert code == 0, said
    assert right.pop("p5")
    code, said, texts = _answered(_LOSES_THE_DEVICE_WITH_ONE, path, tmp_path / "run")
    assert code == 3, said
    assert said.count("continuing in a new process") == 2
    assert "specgen: failed: p5: line 6: the device was lost while it ran alone: " in said
    assert texts == right


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
@pytest.mark.parametrize("k", [0, 1, 4, 8])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attention", ["hopper", "trtllm"])
def test_captured_kernels_give_the_reference_texts(
    bfloat16_pair: Pair, attention: str, k: int, batch: str, mode: str
) -> None:
    settings: dict[str, Any] = {"num_spec_tokens": k, "drafter_batch": batch, "max_batch_size": 7}
    reference = generate(bfloat16_pair, mixed(GREEDY), **settings, **FAST | {"attention": "sdpa"})
    outputs = generate(
        bfloat16_pair, mixed(GREEDY), cuda_graphs=mode, **settings, **FAST | {"attention": attention}
    )
    same = sum(outputs.texts[name] == text for name, text in reference.texts.items())
    assert same >= len(reference.texts) - 4  # bfloat16 rounds differently by batch and kernel


@pytest.mark.parametrize("batch", ["padded", "non-padded"])
@pytest.mark.parametrize("mode", MODES)
def test_a_part_of_the_drafts_may_be_verified(gpu_pair: Pair, mode: str, batch: str) -> None:
    """Another part at every step, by chances that say nothing."""
    plain = generate(gpu_pair, mixed(GREEDY), num_spec_tokens=0, max_batch_size=7, **EXACT)
    settings = EXACT | {"cuda_graphs": mode, "drafter_batch": batch}
    config = config_of(gpu_pair, num_spec_tokens=5, max_batch_size=7, **settings)
    engine = build_engine(config, gpu_pair.models, lambda row: None)
    for _ in range(2):  # graphs are captured, and replayed
        engine.spec_length = plans = AnyPlan(5)
        texts = {each.request.id: each.token_ids for each in engine.generate(mixed(GREEDY))}
        assert texts == plain.texts
    assert any(plan.quarters for plan in plans.chosen)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attention", ["hopper", "trtllm"])
def test_captured_kernels_give_the_reference_texts_of_a_part(
    bfloat16_pair: Pair, attention: str, mode: str
) -> None:
    reference = generate(bfloat16_pair, mixed(GREEDY), num_spec_tokens=0, max_batch_size=7, **FAST)
    settings = FAST | {"cuda_graphs": mode, "attention": attention}
    config = config_of(bfloat16_pair, num_spec_tokens=4, max_batch_size=7, **settings)
    engine = build_engine(config, bfloat16_pair.models, lambda row: None)
    engine.spec_length = FixedPlan(PARTIAL)
    texts = {each.request.id: each.token_ids for each in engine.generate(mixed(GREEDY))}
    same = sum(texts[name] == text for name, text in reference.texts.items())
    assert same >= len(reference.texts) - 4  # bfloat16 rounds differently by batch and kernel


PARTIAL = StepPlan(num_drafts=4, quarters=6, chances=((0.5,) * len(CONFIDENCE_LEVELS),) * 4)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


def running_engine(
    pair: Pair, sampling: SamplingParams = LONG, spec_length: SpecLength | None = None, **settings: Any
) -> EngineCore:
    """An engine in steady-state decoding, with its graphs captured."""
    engine = build_engine(config_of(pair, **settings), pair.models, lambda event: None)
    engine.spec_length = spec_length or engine.spec_length
    for request in bundled_requests(8, sampling):
        engine.submit(request)
    for _ in range(4):
        engine.step()
    return engine


def advance_without_sync(engine: EngineCore) -> None:
    """Some steps, not through the handling of device errors; a wait of the host is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            engine._advance()
    finally:
        torch.cuda.set_sync_debug_mode("default")


BIASED = replace(LONG, logit_bias=((5, 1.0), (9, -100.0)), logprobs=5)
PENALISED = replace(LONG, repetition_penalty=1.05, frequency_penalty=0.1, suppress_tokens=(5, 9))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("sampling", "settings"),
    [
        *((sampling, {"drafter_batch": "padded"}) for sampling in (LONG, BIASED)),
        *((sampling, {"drafter_batch": "non-padded"}) for sampling in (LONG, BIASED)),
        *(
            (sampling, {"drafter": "ngram"})
            for sampling in (LONG, replace(LONG, temperature=0.8, logprobs=5))
        ),
        (PENALISED, {"attention": "trtllm"}),
    ],
)
def test_a_steady_state_step_has_no_host_sync(
    bfloat16_pair: Pair, mode: str, sampling: SamplingParams, settings: dict[str, Any]
) -> None:
    asked = FAST | {"cuda_graphs": mode, "num_spec_tokens": 4} | settings
    advance_without_sync(running_engine(bfloat16_pair, sampling, **asked))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", [{}, {"drafter": "ngram"}])
def test_a_step_that_verifies_a_part_has_no_host_sync(
    bfloat16_pair: Pair, mode: str, drafter: dict[str, Any]
) -> None:
    asked = FAST | {"cuda_graphs": mode, "num_spec_tokens": 4} | drafter
    advance_without_sync(running_engine(bfloat16_pair, LONG, FixedPlan(PARTIAL), **asked))


def test_the_host_sync_check_detects_a_sync(bfloat16_pair: Pair) -> None:
    engine = running_engine(bfloat16_pair, num_spec_tokens=4, **FAST | {"attention": "sdpa"})
    with pytest.raises(RuntimeError, match="synchroniz"):
        advance_without_sync(engine)


@pytest.mark.parametrize("mode", MODES)
def test_texts_reach_the_context_limit(bfloat16_pair: Pair, mode: str) -> None:
    limit = bfloat16_pair.models.target.config.max_positions
    requests = [
        Request(
            id=f"r{n}",
            prompt_token_ids=(5,) * (limit - n),
            sampling=SamplingParams(max_tokens=999, ignore_eos=True),
        )
        for n in (1, 2, 3, 9, 40)
    ]
    outputs = generate(bfloat16_pair, requests, num_spec_tokens=4, cuda_graphs=mode, **FAST)
    torch.cuda.synchronize()
    assert [len(text) for text in outputs.texts.values()] == [1, 2, 3, 9, 40]


def test_out_of_memory_on_a_gpu_lowers_the_batch_size(gpu_pair: Pair) -> None:
    def run() -> Outputs:
        return generate(
            gpu_pair, bundled_requests(COUNT, GREEDY), max_batch_size=16, kv_memory=64 << 20, **EXACT
        )

    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    plain = run()
    needed = torch.cuda.max_memory_allocated() - before
    gc.collect()  # the engine's, or it has its memory still
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 0.8 * needed) / total)
    try:
        short = run()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any(isinstance(event, OutOfMemory) for event in short.passes)
    assert short.texts == plain.texts


@pytest.mark.parametrize("num_rows", [1, 3])  # of a prefill, and of a verify
@pytest.mark.parametrize("vocab_size", [1000, 32000])
def test_gpu_filters_keep_the_same_tokens_as_the_cpus(vocab_size: int, num_rows: int) -> None:
    params = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for temperature in (0.0, 0.7, 1.3)
        for top_k in (0, 1, 20)
        for top_p in (0.1, 0.9, 1.0)
        for min_p in (0.0, 0.05)
    ]
    seeds = list(range(len(params)))
    logits = 3 * torch.randn(len(params), num_rows, vocab_size, generator=torch.Generator().manual_seed(0))
    greedy = logits.argmax(-1)
    here = target_probs(logits, greedy, SamplingBatch.of(params, seeds, torch.device("cpu")))
    on_gpu = SamplingBatch.of(params, seeds, torch.device("cuda"))
    there = target_probs(logits.cuda(), greedy.cuda(), on_gpu).cpu()
    torch.testing.assert_close(there, here, atol=1e-5, rtol=1e-3)
    assert ((there > 0) == (here > 0)).float().mean() > 0.9999
