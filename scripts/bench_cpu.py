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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from specgen import Engine, EngineConfig, Prompt, SamplingParams
from specgen.config.bundled import pair
from specgen.prompts import DataSource, prompt_ids

Run = Callable[[], int]  # generates everything, returns the number of output tokens


def first_turns(engine: Engine, data_path: Path | None, count: int) -> list[Prompt]:
    """Of MT-Bench, or of the bundled prompts without a path, as tokens."""
    dataset = "mt-bench" if data_path else "bundled"
    prompts = DataSource(dataset=dataset, data_path=data_path, num_prompts=count).open()
    return [
        Prompt(id=p.id, token_ids=tuple(prompt_ids(p, engine.tokenizer, [])[1]))
        for p in prompts
        if isinstance(p, Prompt)
    ]


def ours(engine: Engine, batch: list[Prompt], sampling: SamplingParams) -> Run:
    """``batch`` through ``engine``."""

    def run() -> int:
        return sum(len(output.token_ids) for output in engine.generate(batch, sampling))

    return run


def theirs(model: Any, batch: list[Prompt], max_tokens: int, batch_size: int) -> Run:
    """``batch`` through ``transformers.generate``: sorted by length, left-padded, ``batch_size`` at a time."""
    ordered = sorted((list(p.token_ids or ()) for p in batch), key=len)

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
def timed_passes(engine: Engine, seconds: dict[str, float]) -> Iterator[None]:
    """Accumulate the time spent in the models' passes."""
    target, head = type(engine.models.target), type(engine.models.head)
    methods = [(target, "forward"), (target, "logits")]
    methods += [(head, name) for name in ("fuse", "forward", "logits")]
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


def profile(engine: Engine, batch: list[Prompt], sampling: SamplingParams) -> dict[str, float]:
    """Each pass's share of the total time, and the engine's own."""
    seconds: dict[str, float] = defaultdict(float)
    with timed_passes(engine, seconds):
        began = time.perf_counter()
        for _ in engine.generate(batch, sampling):
            pass
        total = time.perf_counter() - began
    shares = {name: value / total for name, value in seconds.items()}
    return shares | {"engine overhead": 1 - sum(shares.values())}


def acceptance_length(engine: Engine, batch: list[Prompt], sampling: SamplingParams) -> float:
    """Mean acceptance length over ``batch``."""
    records = [output.record for output in engine.generate(batch, sampling)]
    steps = [step for record in records if record is not None for step in record.steps or ()]
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

    model, drafter = pair()
    config = EngineConfig(model=model, drafter=drafter, num_spec_tokens=4, max_batch_size=1, device="cpu")
    drafting = Engine(config)

    def engine(batch_size: int, k: int) -> Engine:
        return Engine(replace(config, max_batch_size=batch_size, num_spec_tokens=k), models=drafting.models)

    full = SamplingParams(max_tokens=arguments.max_new_tokens, ignore_eos=True)
    batch = first_turns(drafting, arguments.data_path, arguments.num_prompts)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference.generation_config.eos_token_id = None
    threads = torch.get_num_threads()
    print(
        f"{platform.processor() or platform.machine()}, {threads} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}; {len(batch)} prompts, "
        f"{arguments.max_new_tokens} new tokens, median of {arguments.repeats}\n"
    )

    runs = {
        f"transformers.generate, batch {size}": theirs(reference, batch, arguments.max_new_tokens, size)
        for size in arguments.batch_sizes
    }
    plain = {f"specgen plain, batch {size}": ours(engine(size, 0), batch, full) for size in (32, 64)}
    speeds = measure(runs | plain, arguments.repeats)
    for name, speed in speeds.items():
        print(f"{name:36}{speed:9.0f} output tokens/s")
    best = {
        kind: max(v for name, v in speeds.items() if name in group)
        for kind, group in (("theirs", runs), ("ours", plain))
    }
    print(f"plain decoding is {best['ours'] / best['theirs']:.2f}x the best of transformers.generate\n")

    natural = SamplingParams(max_tokens=arguments.max_new_tokens)
    arms = {
        f"K = {k}, {name}, batch 1": ours(engine(1, k), batch, natural)
        for k, name in ((0, "plain"), (2, "EAGLE3"), (3, "EAGLE3"), (4, "EAGLE3"))
    }
    alone = measure(arms, arguments.repeats)
    baseline = alone["K = 0, plain, batch 1"]
    for name, speed in alone.items():
        print(f"{name:36}{speed:9.0f} output tokens/s  {speed / baseline:5.2f}x")
    print(f"mean acceptance length at K = 4: {acceptance_length(drafting, batch, natural):.2f}\n")

    profiles = {k: profile(engine(32, k), batch, full) for k in (0, 4)}
    for k, shares in profiles.items():
        print(f"batch 32, K = {k}: " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items()))
    print(json.dumps({"speeds": speeds, "batch 1": alone, "profiles": profiles}))


if __name__ == "__main__":
    main()
