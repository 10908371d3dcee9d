"""Samples of a prompt against as many rows of their own: seconds of both, in turns, and their ratio.

On a GPU: ``python scripts/bench_samples.py --model MODEL --drafter HEAD`` asks 256 prompts of 1,000 random tokens with
n = 8, and the same as 2,048 rows without a prefix cache. ``--n-alone`` leaves the rows out, for a run beside another
engine's.
"""

import argparse
import json
import random
import time
from statistics import median

from specgen import Engine, EngineConfig, Prompt, SamplingParams
from specgen.config.bundled import pair


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--model", "--drafter"):
        parser.add_argument(name)
    parser.add_argument("--device", default="auto")
    for name, default in (("prompts", 256), ("tokens", 1000), ("n", 8), ("max-tokens", 128), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--max-batch-size", type=int, default=128)
    parser.add_argument("--num-spec-tokens", type=int, default=4)
    parser.add_argument("--n-alone", action="store_true")
    args = parser.parse_args()
    model, drafter = pair(args.model, args.drafter, args.num_spec_tokens)
    config = EngineConfig(
        model=model,
        drafter=drafter if args.num_spec_tokens else None,
        num_spec_tokens=args.num_spec_tokens,
        max_batch_size=args.max_batch_size,
        max_prefill_tokens=8192,
        device=args.device,
        prefix_cache=False,
    )
    sampling = SamplingParams(n=args.n, temperature=1.0, max_tokens=args.max_tokens, ignore_eos=True)
    draw = random.Random(0)
    with Engine(config) as engine:
        size = min(engine.tokenizer.vocab_size, 1000)
        ids = [tuple(draw.randrange(10, size) for _ in range(args.tokens)) for _ in range(args.prompts)]
        several = [Prompt(id=f"{at}", token_ids=each) for at, each in enumerate(ids)]
        rows = [
            Prompt(id=f"{at}-{k}", token_ids=each, sampling={"n": 1})
            for at, each in enumerate(ids)
            for k in range(args.n)
        ]
        arms = {"n": several} if args.n_alone else {"n": several, "rows": rows}
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(args.rounds + 1):  # the first captures graphs and compiles
            for name, prompts in arms.items():
                began = time.perf_counter()
                outputs = list(engine.generate(prompts, sampling))
                assert len(outputs) == args.prompts * args.n
                assert not any(each.error for each in outputs)
                if turn:
                    seconds[name].append(time.perf_counter() - began)
    found = {name: median(each) for name, each in seconds.items()}
    ratio = found["rows"] / found["n"] if "rows" in found else None
    print(json.dumps({**vars(args), "seconds": found, "all": seconds, "rows / n": ratio}))


if __name__ == "__main__":
    main()
