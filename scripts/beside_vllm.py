"""Speed beside vLLM: one engine a process, on a synthetic pair whose text is known.

    python scripts/make_calibrated_pair.py PAIR --shape llama-3.1-8b
    python scripts/beside_vllm.py vllm PAIR --num-spec-tokens 4 --cells 1,8,32,8x2000
    python scripts/beside_vllm.py specgen PAIR --num-spec-tokens 4 --cells 1,8,32,8x2000

Both get the same prompts in the same order, greedy, without a prefix cache, with KV caches of --kv-memory and CUDA
graphs captured before the clock. Prints a JSON row for each cell: a batch size and, behind an x, the tokens of every
prompt instead of the lengths in --lengths. Two prompts for each place in the batch, at the largest batch given at
once and else one batch behind the other; of 8,000 tokens and more one prompt a place. A ratio is of two rows of one
machine. vLLM is not among specgen's dependencies: have it in an environment of its own.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calibrated_cycle import Cycle

if TYPE_CHECKING:
    from specgen.record.record_rows import RequestRow

Prompt = list[int]
_LONG = 8000  # tokens of a prompt
_MOST_DRAWN = 1024  # tokens of a prompt of --lengths
_MEAN = 87  # of ShareGPT's first turns


class Specgen:
    """``record`` takes the engine's rows; ``records`` are those of the requests of the last call."""

    def __init__(
        self, args: argparse.Namespace, most: int, record: Callable[[object], None] = lambda row: None
    ) -> None:
        from specgen import Engine, EngineConfig

        mtp, spec = args.drafter == "mtp", args.num_spec_tokens
        drafter = None if spec == "0" else "mtp" if mtp else str(args.pair / args.drafter)
        config = EngineConfig(
            model=str(args.pair / "target"), drafter=drafter, num_spec_tokens=int(spec) if spec.isdigit() else spec,
            max_batch_size=most, max_prefill_tokens=8192, prefix_cache=False, kv_memory=int(args.kv_memory * 2**30),
            tensor_parallel=args.tensor_parallel,
        )  # fmt: skip
        self.engine, self._num_prompts, self._steps, self._accepted = Engine(config, record=record), 0, 0, 0
        self.records: list[RequestRow] = []

    def capture_graphs(self) -> None:
        """Those of all batch sizes, as vLLM does at its start."""
        if self.engine.config.cuda_graphs != "off":
            self.engine.capture_graphs()

    def generate(self, prompts: Sequence[Prompt], num_tokens: Sequence[int]) -> list[Sequence[int]]:
        from specgen import Prompt, SamplingParams

        first, self._num_prompts = self._num_prompts, self._num_prompts + len(prompts)
        asked = [
            Prompt(id=str(first + i), token_ids=tuple(each), sampling={"max_tokens": most})
            for i, (each, most) in enumerate(zip(prompts, num_tokens, strict=True))
        ]
        greedy = SamplingParams(temperature=0, ignore_eos=True)
        found = {output.id: output for output in self.engine.generate(asked, greedy)}
        failed = [output.error for output in found.values() if output.error]
        if failed:
            raise SystemExit(f"a prompt failed: {failed[0]}")
        self._steps += sum(output.metrics.num_spec_steps for output in found.values())
        self._accepted += sum(output.metrics.num_accepted_draft_tokens for output in found.values())
        self.records = [output.record for output in found.values()]
        return [found[prompt.id].token_ids for prompt in asked]

    def drafted(self) -> tuple[int, int]:
        """Steps with drafts so far, and accepted drafts."""
        return self._steps, self._accepted


class Vllm:
    def __init__(self, args: argparse.Namespace, most: int) -> None:
        from vllm import LLM

        target, num_drafts, drafts = str(args.pair / "target"), args.num_spec_tokens, None
        if num_drafts != "0":
            how = {"method": "mtp", "model": target} if args.drafter == "mtp" else {
                "method": args.method, "model": str(args.pair / args.drafter)
            }  # fmt: skip
            drafts = {**how, "num_speculative_tokens": int(num_drafts)}
        self._llm = LLM(
            model=target, skip_tokenizer_init=True, speculative_config=drafts, max_model_len=args.max_model_len,
            enable_prefix_caching=False, max_num_seqs=most, tensor_parallel_size=args.tensor_parallel,
            kv_cache_memory_bytes=int(args.kv_memory * 2**30), disable_log_stats=False,
        )  # fmt: skip

    def capture_graphs(self) -> None:
        """It has captured them."""

    def generate(self, prompts: Sequence[Prompt], num_tokens: Sequence[int]) -> list[Sequence[int]]:
        from vllm import SamplingParams

        greedy = [
            SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
            for most in num_tokens
        ]
        asked = [{"prompt_token_ids": each} for each in prompts]
        return [each.outputs[0].token_ids for each in self._llm.generate(asked, greedy, use_tqdm=False)]

    def drafted(self) -> tuple[int, int]:
        """Steps with drafts so far, and accepted drafts."""
        found = {each.name: getattr(each, "value", 0) for each in self._llm.get_metrics()}
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        return found.get(names[0], 0), found.get(names[1], 0)


def cells(text: str) -> list[tuple[int, int]]:
    """Batch sizes, and tokens of every prompt or 0."""
    return [
        (int(batch), int(length or 0))
        for batch, _, length in (each.partition("x") for each in text.split(","))
    ]


class Text:
    """The only text that the target writes."""

    def __init__(self, cycle: Cycle, lengths: Sequence[int], seed: int = 0) -> None:
        self._cycle, self._lengths, self._random = cycle, lengths, random.Random(seed)

    def prompts(self, count: int, length: int) -> list[Prompt]:
        """Pieces of the text, of ``length`` tokens or, where that is 0, of lengths that are drawn."""
        found, tokens = [], self._cycle.tokens
        for _ in range(count):
            first = self._random.randrange(len(tokens))
            size = length or max(4, min(_MOST_DRAWN, self._random.choice(self._lengths)))
            found.append([tokens[(first + i) % len(tokens)] for i in range(size)])
        return found

    def lengths(self, count: int, lengths: Sequence[int]) -> list[int]:
        """How many tokens so many answers are to have, drawn from ``lengths``."""
        return self._random.choices(lengths, k=count)

    def num_wrong(self, prompt: Prompt, output: Sequence[int]) -> int:
        before = [prompt[-1], *output[:-1]]
        return sum(self._cycle.succ.get(last) != token for last, token in zip(before, output, strict=True))


def measured(
    engine: Specgen | Vllm, text: Text, batch: int, length: int, most: int, args: argparse.Namespace
) -> dict:
    """A row: the cell is run once before the clock, with other prompts."""
    count = batch if length >= _LONG else 3 if batch == 1 else 2 * batch
    prompts = text.prompts(count, length)
    engine.generate(text.prompts(batch, length), [args.max_new_tokens] * batch)
    at_once = count if batch == most and batch > 1 else batch
    before, seconds, wrong = engine.drafted(), [], 0
    for _ in range(args.repeats):
        began, outputs = time.perf_counter(), []
        for first in range(0, count, at_once):
            some = prompts[first : first + at_once]
            outputs += engine.generate(some, [args.max_new_tokens] * len(some))
        seconds.append(time.perf_counter() - began)
        wrong += sum(map(text.num_wrong, prompts, outputs))
    steps, accepted = (now - then for now, then in zip(engine.drafted(), before, strict=True))
    tokens = sum(map(len, outputs))
    return {
        "engine": args.engine, "pair": args.pair.name, "num_spec_tokens": args.num_spec_tokens, "batch": batch,
        "prompt_tokens": length or "drawn", "prompts": count, "handed_over_at_once": at_once, "output_tokens": tokens,
        "seconds": [round(each, 3) for each in seconds],
        "tokens_per_second": round(tokens / statistics.median(seconds), 1), "wrong_tokens": wrong,
        "mean_acceptance_length": round(1 + accepted / steps, 3) if steps else None,
    }  # fmt: skip


def engine_options(description: str) -> argparse.ArgumentParser:
    """A parser of what ``Specgen`` and ``Vllm`` read, but for --num-spec-tokens."""
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=how)
    parser.add_argument("engine", choices=("specgen", "vllm"))
    parser.add_argument("pair", type=Path, help="a directory of make_calibrated_pair.py")
    parser.add_argument("--drafter", default="drafter", help="a directory of the pair, or mtp")
    parser.add_argument(
        "--method", default="eagle3", help="vLLM's name for a drafter in a directory: draft_model, dflash"
    )
    parser.add_argument("--kv-memory", type=float, default=18.0, help="GiB of each GPU")
    parser.add_argument("--max-model-len", type=int, default=9000, help="of vLLM")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    return parser


def main() -> None:
    parser = engine_options(__doc__)
    parser.add_argument("--num-spec-tokens", default="0", help="K; of specgen auto and uniform as well")
    parser.add_argument("--cells", type=cells, default="1,8,32")
    parser.add_argument(
        "--lengths", type=Path, help=f"JSON list of prompt lengths; else all are {_MEAN} tokens"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.engine == "vllm" and not args.num_spec_tokens.isdigit():
        parser.error(f"num-spec-tokens is {args.num_spec_tokens!r}: vLLM takes a number")
    try:  # before an engine starts
        lengths = json.loads(args.lengths.read_text()) if args.lengths else [_MEAN]
        text = Text(Cycle.read(args.pair), lengths)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    most = max(batch for batch, _ in args.cells)
    engine = (Specgen if args.engine == "specgen" else Vllm)(args, most)
    engine.capture_graphs()
    for batch, length in args.cells:
        print(json.dumps(measured(engine, text, batch, length, most, args)), flush=True)


if __name__ == "__main__":
    main()
