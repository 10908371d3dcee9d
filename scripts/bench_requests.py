"""Two ways of asking one engine for the same, in turns: seconds of both, and their ratio.

    python scripts/make_calibrated_pair.py PAIR --shape llama-3.1-8b
    python scripts/bench_requests.py samples PAIR
    python scripts/bench_requests.py constraint PAIR

``samples``: 8 samples of each of 256 prompts of 1,000 tokens, as ``n = 8`` and as 2,048 rows without a prefix cache;
with ``--engine vllm`` the same ``n = 8`` of vLLM alone. ``constraint``: greedy texts whose every token a regular
expression allows, with it and without. Prints a JSON row for each batch size: tokens per second of each way in every
round, behind one of fewer prompts that captures graphs and compiles; the ratio of their medians, second over first;
and of greedy texts how many tokens are wrong.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from calibrated_cycle import Cycle

Prompts = list[tuple[int, ...]]
Ask = Callable[
    [Prompts], list[Sequence[int]]
]  # the texts, of each prompt those of its samples one after the other

WORDS = "( w[0-9]{1,6})+"  # every text of a calibrated pair


def ways_of_specgen(args: argparse.Namespace, batch: int) -> dict[str, Ask]:
    from specgen import Engine, EngineConfig, Prompt, SamplingParams
    from specgen.config import StructuredOutputs

    config = EngineConfig(
        model=str(args.pair / "target"), drafter=str(args.pair / args.drafter) if args.num_spec_tokens else None,
        num_spec_tokens=args.num_spec_tokens, max_batch_size=batch, max_prefill_tokens=8192, prefix_cache=False,
    )  # fmt: skip
    engine = Engine(config)
    if engine.config.cuda_graphs != "off":
        engine.capture_graphs()

    def way(copies: int = 1, **sampling: Any) -> Ask:
        def ask(prompts: Prompts) -> list[Sequence[int]]:
            rows = [
                Prompt(id=f"{at}-{copy}", token_ids=each)
                for at, each in enumerate(prompts)
                for copy in range(copies)
            ]
            outputs = list(engine.generate(rows, SamplingParams(max_tokens=args.max_tokens, **sampling)))
            failed = [each.error for each in outputs if each.error]
            if failed:
                raise SystemExit(f"a prompt failed: {failed[0]}")
            found = {(each.id, each.sample): each.token_ids for each in outputs}
            return [found[key] for key in sorted(found, key=lambda key: (int(key[0].split("-")[0]), key))]

        return ask

    if args.what == "constraint":
        fits = StructuredOutputs(regex=WORDS)
        return {"plain": way(temperature=0), "constrained": way(temperature=0, structured_outputs=fits)}
    sampled = {"temperature": 1.0, "ignore_eos": True}
    return {"rows": way(args.n, **sampled), "n": way(n=args.n, **sampled)}


def ways_of_vllm(args: argparse.Namespace, batch: int) -> dict[str, Ask]:
    from vllm import LLM, SamplingParams

    drafts = {"method": "eagle3", "model": str(args.pair / args.drafter)}
    llm = LLM(
        model=str(args.pair / "target"), skip_tokenizer_init=True, max_num_seqs=batch, max_model_len=4096,
        speculative_config=drafts | {"num_speculative_tokens": args.num_spec_tokens} if args.num_spec_tokens else None,
        kv_cache_memory_bytes=40 * 2**30,
    )  # fmt: skip
    sampling = SamplingParams(
        n=args.n, temperature=1.0, max_tokens=args.max_tokens, ignore_eos=True, detokenize=False
    )

    def ask(prompts: Prompts) -> list[Sequence[int]]:
        asked = [{"prompt_token_ids": list(each)} for each in prompts]
        outputs = llm.generate(asked, sampling, use_tqdm=False)
        return [each.token_ids for output in outputs for each in output.outputs]

    return {"n": ask}


def measured(ways: dict[str, Ask], cycle: Cycle, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """A row. Every round has prompts of its own, the same for each way; the ways swap places by round."""
    tokens, greedy = cycle.tokens, args.what == "constraint"
    count, length = (max(batch, 2), 87) if greedy else (args.prompts, args.prompt_tokens)
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    wrong = 0
    for turn in range(args.rounds + 1):
        prompts = [
            tuple(tokens[(997 * at + 13 * turn + i) % len(tokens)] for i in range(length))
            for at in range(count if turn else -(-count // 8))
        ]
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            texts = ways[name](prompts)
            seconds = time.perf_counter() - began
            if turn:
                speeds[name].append(round(sum(map(len, texts)) / seconds, 1))
            if greedy:
                wrong += sum(
                    cycle.succ.get(last) != token
                    for prompt, text in zip(prompts, texts, strict=True)
                    for last, token in zip((prompt[-1], *text[:-1]), text, strict=True)
                )
    first, *others = (median(each) for each in speeds.values())
    ratio = {"ratio": round(others[0] / first, 3)} if others else {}
    return {
        "batch": batch,
        "tokens_per_second": speeds,
        **ratio,
        **({"wrong_tokens": wrong} if greedy else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("samples", "constraint"))
    parser.add_argument("pair", type=Path, help="of make_calibrated_pair.py")
    parser.add_argument("--engine", choices=("specgen", "vllm"), default="specgen")
    parser.add_argument("--drafter", default="drafter", help="a directory of the pair")
    parser.add_argument(
        "--batches", help="sequences at once, comma-separated; of a constraint 1,32,128, else 128"
    )
    numbers = {
        "num-spec-tokens": 4,
        "prompts": 256,
        "prompt-tokens": 1000,
        "n": 8,
        "max-tokens": 128,
        "rounds": 3,
    }
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.engine == "vllm" and args.what != "samples":
        parser.error("vllm is measured with samples alone")
    cycle = Cycle.read(args.pair)
    make = ways_of_specgen if args.engine == "specgen" else ways_of_vllm
    batches = list(map(int, (args.batches or ("128" if args.what == "samples" else "1,32,128")).split(",")))
    ways = make(args, max(batches))
    for batch in batches:
        row = measured(ways, cycle, batch, args)
        print(json.dumps({"engine": args.engine, "num_spec_tokens": args.num_spec_tokens, **row}), flush=True)


if __name__ == "__main__":
    main()
