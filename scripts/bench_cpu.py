"""CPU benchmark: against ``transformers.generate``, EAGLE3 against plain decoding, and the time of each pass.

    python scripts/bench_cpu.py --data-path .../mt_bench/question.jsonl

All runs alternate in one process, greedy in float32; medians over the repeats are printed. Times include prefill, not
loading. The last line is one JSON document.
"""

import argparse
import json
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from specgen.config import EngineConfig, SamplingParams
from specgen.config.bundled import data_directory
from specgen.core.sequence import Request
from specgen.engine.build import build_engine
from specgen.engine.choices import resolve
from specgen.engine.loading import Models, load_models, open_checkpoints
from specgen.models.eagle import Eagle3Head
from specgen.models.llama import Llama
from specgen.prompts import DataSource, Prompt, prompt_ids

Run = Callable[[], int]  # generates everything, returns the number of output tokens


def requests(models: Models, data_path: Path | None, count: int, sampling: SamplingParams) -> list[Request]:
    """First turns of MT-Bench, or of the bundled prompts without a path."""
    dataset = "mt-bench" if data_path else "bundled"
    prompts = DataSource(dataset=dataset, data_path=data_path, num_prompts=count).open()
    return [
        Request(id=p.id, prompt_token_ids=tuple(prompt_ids(p, models.tokenizer, [])[1]), sampling=sampling)
        for p in prompts
        if isinstance(p, Prompt)
    ]


def ours(config: EngineConfig, models: Models, batch: list[Request]) -> Run:
    """``batch`` through an engine of ``config``."""
    engine = build_engine(config, models, lambda row: None)

    def run() -> int:
        return sum(len(completion.token_ids) for completion in engine.generate(batch))

    return run


def theirs(model: Any, batch: list[Request], batch_size: int) -> Run:
    """``batch`` through ``transformers.generate``: sorted by length, left-padded, ``batch_size`` at a time."""
    ordered = sorted((list(r.prompt_token_ids) for r in batch), key=len)
    max_tokens = batch[0].sampling.max_tokens

    def run() -> int:
        num_tokens = 0
        for start in range(0, len(ordered), batch_size):
            prompts = ordered[start : start + batch_size]
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
            )
            num_tokens += out.shape[0] * (out.shape[1] - width)
        return num_tokens

    return run


def measure(runs: dict[str, Run], repeats: int) -> dict[str, float]:
    """Median output tokens per second of each run; the runs alternate, after one warm-up round."""
    speeds: dict[str, list[float]] = defaultdict(list)
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            num_tokens = run()
            if repeat:
                speeds[name].append(num_tokens / (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in speeds.items()}


@contextmanager
def timed_passes(seconds: dict[str, float]) -> Iterator[None]:
    """Accumulate the time spent in the models' passes."""
    methods = [(Llama, "forward"), (Llama, "logits")]
    methods += [(Eagle3Head, name) for name in ("fuse", "forward", "logits")]
    originals = [getattr(owner, name) for owner, name in methods]

    def wrap(label: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*inputs: Any) -> Any:
            began = time.perf_counter()
            result = original(*inputs)
            seconds[label] += time.perf_counter() - began
            return result

        return timed

    for (owner, name), original in zip(methods, originals, strict=True):
        setattr(owner, name, wrap(f"{owner.__name__}.{name}", original))
    try:
        yield
    finally:
        for (owner, name), original in zip(methods, originals, strict=True):
            setattr(owner, name, original)


def profile(config: EngineConfig, models: Models, batch: list[Request]) -> dict[str, float]:
    """Each pass's share of the total time, and the engine's own."""
    engine = build_engine(config, models, lambda row: None)
    seconds: dict[str, float] = defaultdict(float)
    with timed_passes(seconds):
        began = time.perf_counter()
        for _ in engine.generate(batch):
            pass
        total = time.perf_counter() - began
    shares = {name: value / total for name, value in seconds.items()}
    return shares | {"engine overhead": 1 - sum(shares.values())}


def acceptance_length(config: EngineConfig, models: Models, batch: list[Request]) -> float:
    """Mean acceptance length over ``batch``."""
    completions = build_engine(config, models, lambda row: None).generate(batch)
    steps = [step for completion in completions for step in completion.record.steps or ()]
    return 1 + sum(step.accepted for step in steps) / len(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data-path", type=Path, help="MT-Bench question.jsonl; without it the bundled prompts"
    )
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4, 8, 16, 32], help="of transformers")
    arguments = parser.parse_args()

    demo = data_directory() / "demo"
    names = {"model": str(demo / "target"), "drafter": str(demo / "drafter")}
    checkpoints = open_checkpoints(EngineConfig(**names))

    def config(batch_size: int, k: int) -> EngineConfig:
        asked = EngineConfig(**names, num_spec_tokens=k, max_batch_size=batch_size, device="cpu")
        return resolve(asked, checkpoints)

    models = load_models(config(1, 4), checkpoints)
    full = SamplingParams(max_tokens=arguments.max_new_tokens, ignore_eos=True)
    batch = requests(models, arguments.data_path, arguments.num_prompts, full)
    reference = transformers.AutoModelForCausalLM.from_pretrained(config(1, 4).model, dtype=torch.float32)
    reference.generation_config.eos_token_id = None
    threads = torch.get_num_threads()
    print(
        f"{platform.processor() or platform.machine()}, {threads} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}; {len(batch)} prompts, "
        f"{arguments.max_new_tokens} new tokens, median of {arguments.repeats}\n"
    )

    runs = {
        f"transformers.generate, batch {size}": theirs(reference, batch, size)
        for size in arguments.batch_sizes
    }
    plain = {f"specgen plain, batch {size}": ours(config(size, 0), models, batch) for size in (32, 64)}
    speeds = measure(runs | plain, arguments.repeats)
    for name, speed in speeds.items():
        print(f"{name:36}{speed:9.0f} output tokens/s")
    best = {
        kind: max(v for name, v in speeds.items() if name in group)
        for kind, group in (("theirs", runs), ("ours", plain))
    }
    print(f"plain decoding is {best['ours'] / best['theirs']:.2f}x the best of transformers.generate\n")

    natural = SamplingParams(max_tokens=arguments.max_new_tokens)
    single = requests(models, arguments.data_path, arguments.num_prompts, natural)
    arms = {
        f"K = {k}, {name}, batch 1": ours(config(1, k), models, single)
        for k, name in ((0, "plain"), (2, "EAGLE3"), (3, "EAGLE3"), (4, "EAGLE3"))
    }
    alone = measure(arms, arguments.repeats)
    baseline = alone["K = 0, plain, batch 1"]
    for name, speed in alone.items():
        print(f"{name:36}{speed:9.0f} output tokens/s  {speed / baseline:5.2f}x")
    print(f"mean acceptance length at K = 4: {acceptance_length(config(1, 4), models, single):.2f}\n")

    profiles = {k: profile(config(32, k), models, batch) for k in (0, 4)}
    for k, shares in profiles.items():
        print(f"batch 32, K = {k}: " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items()))
    print(json.dumps({"speeds": speeds, "batch 1": alone, "profiles": profiles}))


if __name__ == "__main__":
    main()
