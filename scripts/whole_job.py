"""A whole job, beside its bound and beside vLLM: prompts all handed over at once, answers with lengths of their own.

    python scripts/make_calibrated_pair.py PAIR --shape llama-3.1-8b --confidence trained
    python scripts/whole_job.py specgen PAIR --arms 0,4,auto --max-batch-size 256 --rows job.jsonl
    python scripts/whole_job.py vllm PAIR --arms 0,2 --max-batch-size 256 --rows job.jsonl

Each arm, a K of which 0 is plain decoding, has a process of its own: it starts, gives the first token of one prompt,
runs a job that warms it up, and then --jobs of them. Every job has --prompts of other texts; lengths are drawn from
--lengths, a JSON object with the lists "prompts" and "answers" (as it comes: ShareGPT's first turns, answers of OASST,
in tokens). All is greedy, without a prefix cache and past EOS. On a pair of make_calibrated_pair.py tokens that are
not the text are counted as wrong; on another one, prompts are random tokens. Behind the last arm the table is printed,
with the rows of the same job that --rows, a file of a JSON object for each arm, held before. A ratio is of two rows of
one machine. vLLM is in an environment of its own, with which this is called.
"""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from beside_vllm import Specgen, Text, Vllm, engine_options
from calibrated_cycle import FILE, Cycle

if TYPE_CHECKING:
    from bench.bound import StepBytes

    from specgen.record.record_rows import EngineRow, RequestRow

Row = dict[str, Any]
Found = TypeVar("Found")
LENGTHS = Path(__file__).with_name("job_lengths.json")
# where compiled kernels, and times that choose among them, are kept
CACHES = (
    "XDG_CACHE_HOME", "FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH",
    "VLLM_CACHE_ROOT",
)  # fmt: skip
PARTS = ("prefill", "full", "filling", "tail", "captures", "idle", "rest")
DEFINITIONS = """\
tokens/s: output tokens over the wall time, from handing over the prompts to the last answer; the median of the jobs
ready, first token: seconds from the start of the process until the engine takes prompts, and until the first token of
  one prompt is there; warm: with what earlier processes have compiled, cold (--cold): with nothing compiled; weights
  are read as the system caches them in both
prefill to rest: seconds of the job in the middle by the device's clock, which add up to its wall time; behind a slash
  the least that part could take
prefill: passes over prompts; the least: the target's GEMMs for all their tokens, at the rate of a large GEMM
full: decode steps, each at what a step of the largest batch takes a sequence; the least: each pass of those steps
  (verify, the head's KV fill, every draft) at the largest batch, as the longer of two: its weights and KV read once at
  the bandwidth of a copy, or its GEMMs at the rate of a large one, a weight of one byte counting as half; with the
  drafts and rows that the steps had, each step shared by a full batch
filling, tail: what smaller batches took beyond that, while prompts waited and when none were left; the least is none
captures: of CUDA graphs; idle: the device had nothing to do; rest: before the first pass and behind the last
bound: the sum of the least; attention's FLOPs, samples, and the head's part of prefill are not in it
wrong tokens: of all jobs, that do not follow the token before them in the pair's text; - where no text is known"""


class Job:
    """The prompts and the lengths of the answers, by seed; the same for every engine."""

    def __init__(self, pair: Path, lengths: Path, num_prompts: int) -> None:
        drawn = json.loads(lengths.read_text(encoding="utf-8"))
        self._lengths, self._answers = (
            [int(each) for each in drawn[name]] for name in ("prompts", "answers")
        )
        if not self._lengths or not self._answers or min(self._answers) < 1:
            raise ValueError(
                f"{lengths} has an empty list, or an answer of no token: give lengths of at least 1"
            )
        self.is_known, self._num_prompts = (pair / FILE).is_file(), num_prompts
        if self.is_known:
            self._cycle = Cycle.read(pair)
        else:
            size = json.loads((pair / "target" / "config.json").read_text(encoding="utf-8"))["vocab_size"]
            self._cycle = Cycle.draw(size, size, 1.0, seed=0)

    def draw(self, seed: int, most: int | None = None) -> tuple[Text, list[list[int]], list[int]]:
        """The prompts of job ``seed``, at most so many, and how many tokens each is to get."""
        text, count = (
            Text(self._cycle, self._lengths, seed),
            min(self._num_prompts, most or self._num_prompts),
        )
        prompts = text.prompts(count, 0)
        return text, prompts, text.lengths(count, self._answers)


def measure(args: argparse.Namespace, arm: str, began: float, only_start: bool) -> Row:
    """The row of an arm, in the process that began at ``began``."""
    args, passes = argparse.Namespace(**vars(args) | {"num_spec_tokens": arm}), list["EngineRow"]()
    ours = args.engine == "specgen"
    most = args.max_batch_size
    engine = Specgen(args, most, passes.append) if ours else Vllm(args, most)
    start = {"ready": time.time() - began}
    job = Job(args.pair, args.lengths, args.prompts)
    engine.generate(job.draw(0, 1)[1], [1])
    start["first_token"] = time.time() - began
    if only_start:
        return start
    _, prompts, lengths = job.draw(0, 2 * most)
    engine.generate(prompts, lengths)
    before, wrong, ran = engine.drafted(), 0, []
    for seed in range(1, args.jobs + 1):
        text, prompts, lengths = job.draw(seed)
        passes.clear()
        clock = time.perf_counter()
        outputs = engine.generate(prompts, lengths)
        seconds = time.perf_counter() - clock
        if [len(each) for each in outputs] != lengths:
            raise SystemExit(f"job {seed} of arm {arm}: answers have other lengths than were asked for")
        wrong += sum(map(text.num_wrong, prompts, outputs))
        ran.append(
            {"seconds": seconds, "output_tokens": sum(lengths), "prompt_tokens": sum(map(len, prompts))}
            | (of_passes(seconds, passes, engine, args.speed) if ours else {})
        )
    steps, accepted = (now - then for now, then in zip(engine.drafted(), before, strict=True))
    speed = statistics.median(each["output_tokens"] / each["seconds"] for each in ran)
    return {
        "engine": args.engine, "arm": arm, "max_batch_size": most, "job": identity(args, ran),
        "tokens_per_second": speed, "tokens_per_gpu_hour": 3600 * speed / args.tensor_parallel,
        "wrong_tokens": wrong if job.is_known else None, "warm": start, "jobs": ran,
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
    }  # fmt: skip


def identity(args: argparse.Namespace, ran: Sequence[Row]) -> Row:
    """What rows have in common that may stand in one table."""
    same = {name: [each[name] for each in ran] for name in ("prompt_tokens", "output_tokens")}
    return {"pair": args.pair.name, "prompts": args.prompts, "gpus": args.tensor_parallel, **same}


def of_passes(
    seconds: float, passes: Sequence["EngineRow"], engine: Specgen, speed: tuple[float, float]
) -> Row:
    """Where the ``seconds`` of a job of specgen went, and the least that its parts could take."""
    from bench.bound import StepBytes

    from specgen.engine.choices import target_kv_dtype
    from specgen.report.timings import PassSums

    sums = PassSums()
    sums.add(passes)
    wall = sums.wall(seconds)
    if wall is None:
        raise SystemExit("a job has no decode step: let answers have two tokens and more")
    found = vars(wall)
    parts = {name: found[name] for name in PARTS if name != "idle"}
    parts["idle"] = found["idle_outside"] + found["idle_engine"]
    sizes = StepBytes.of(engine.engine.models, target_kv_dtype(engine.engine.config).itemsize)
    return {"parts": parts, "least": least(engine.records, passes, sizes, *speed)}


def least(
    requests: Sequence["RequestRow"],
    passes: Sequence["EngineRow"],
    sizes: "StepBytes",
    bandwidth: float,
    flops: float,
) -> dict[str, float]:
    """Seconds that ``prefill`` and ``full`` take at least, see ``DEFINITIONS``; bytes and FLOP/s of one GPU."""
    from bench.bound import decode_steps

    steps = list(decode_steps(requests, passes))
    batch, decode = max(row.num_sequences for row, _ in steps), 0.0
    for row, context in steps:
        k, shared = row.num_spec_tokens, row.num_sequences / batch
        verified = min(row.target_rows / shared, batch * (k + 1))  # fewer where unlikely drafts are left out
        parts = sizes.parts(k, batch, context, verified)
        del parts["accept"]  # it samples, and is no pass
        decode += shared * sum(max(work.num_bytes / bandwidth, work.flops / flops) for work in parts.values())
    prompts = sum(each.num_prompt_tokens - each.num_cached_tokens for each in requests)
    return {"prefill": sizes.prefill_flops(prompts) / flops, "full": decode}


def device_speed() -> tuple[float, float]:
    """Bytes per second of a copy, and FLOP/s of a large GEMM in the dtype of the models, on this device."""
    import torch
    from bench.bound import copy_bandwidth, matrix_flops

    from specgen.engine.choices import choose_device, choose_dtype

    device = choose_device("auto")
    dtype = getattr(torch, choose_dtype("auto", device))
    return copy_bandwidth(str(device)), matrix_flops(str(device), dtype)


def apart(work: Callable[..., Found], *args: object) -> Found:
    """The result of ``work`` in a process of its own, which starts as this one did."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


@contextmanager
def empty_caches() -> Iterator[None]:
    """Processes that start meanwhile find no compiled kernel."""
    before = dict(os.environ)
    with TemporaryDirectory() as folder:
        os.environ |= {name: f"{folder}/{name}" for name in CACHES}
        yield
    os.environ.clear()
    os.environ |= before


def middle(row: Row) -> Row:
    """The job of an arm whose time is the median; of two the slower."""
    jobs: list[Row] = sorted(row["jobs"], key=lambda each: each["seconds"] / each["output_tokens"])
    return jobs[len(jobs) // 2]


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of Markdown: a column for each of ``rows``."""
    job = rows[0]["job"]
    yield (
        f"{job['prompts']:,} prompts all handed over at once ({job['prompt_tokens'][0]:,} tokens), answers of "
        f"{job['output_tokens'][0]:,} tokens; {job['pair']} on {job['gpus']} device{'s' * (job['gpus'] > 1)}; "
        f"the first of {len(job['prompt_tokens'])} jobs, the others draw other lengths"
    )
    names = [f"{row['engine']} {'plain' if row['arm'] == '0' else 'K = ' + row['arm']}" for row in rows]
    yield from ("", line("", names), line("---", ["---"] * len(rows)))
    for title, cell in CELLS.items():
        yield line(title, [cell(row) for row in rows])
    for part in PARTS:
        yield line(f"{part}, s", [_part(middle(row), part) for row in rows])
    yield line("bound, s", [_number(_bound(row), 2) for row in rows])
    over = [middle(row)["seconds"] / bound if (bound := _bound(row)) else None for row in rows]
    yield line("wall / bound", [_number(each, 2) for each in over])


def line(title: str, cells: Sequence[str]) -> str:
    return f"| {' | '.join([title, *cells])} |"


def _number(number: float | None, digits: int = 0) -> str:
    return "-" if number is None or math.isnan(number) else f"{number:,.{digits}f}"


def _start(name: str) -> Callable[[Row], str]:
    return lambda row: " / ".join(
        _number(row[when].get(name) if when in row else None, 1) for when in ("cold", "warm")
    )


def _part(job: Row, part: str) -> str:
    if "parts" not in job:
        return "-"
    least = f" / {job['least'][part]:.2f}" if part in job["least"] else ""
    return f"{job['parts'][part]:.2f}{least}"


def _bound(row: Row) -> float | None:
    job = middle(row)
    return sum(job["least"].values()) if "least" in job else None


CELLS: Mapping[str, Callable[[Row], str]] = {
    "sequences at once, at most": lambda row: str(row["max_batch_size"]),
    "tokens/s": lambda row: _number(row["tokens_per_second"]),
    "million tokens per GPU hour": lambda row: _number(row["tokens_per_gpu_hour"] / 1e6, 2),
    "mean acceptance length": lambda row: _number(row["mean_acceptance_length"], 2),
    "wrong tokens": lambda row: _number(row["wrong_tokens"]),
    "ready cold / warm, s": _start("ready"),
    "first token cold / warm, s": _start("first_token"),
    "wall, s": lambda row: _number(middle(row)["seconds"], 2),
}


def arguments() -> argparse.Namespace:
    parser = engine_options(__doc__)
    parser.set_defaults(kv_memory=36.0, max_model_len=2304)
    parser.add_argument(
        "--arms", default="0,4,auto", help="K of each, 0: plain; of specgen auto and uniform as well"
    )
    parser.add_argument("--max-batch-size", type=int, default=256, help="sequences at once")
    parser.add_argument("--prompts", type=int, default=2048)
    parser.add_argument("--jobs", type=int, default=3, help="behind the one that warms up")
    parser.add_argument("--lengths", type=Path, default=LENGTHS)
    parser.add_argument("--cold", action="store_true", help="start each arm without compiled kernels, too")
    parser.add_argument("--rows", type=Path, help="a file that the rows are added to")
    parser.add_argument(
        "--speed",
        type=float,
        nargs=2,
        metavar=("BYTES", "FLOPS"),
        help="of a GPU a second; else measured (specgen)",
    )
    args = parser.parse_args()
    args.arms = args.arms.split(",")
    for arm in args.arms:
        if not arm.isdigit() and (args.engine == "vllm" or arm not in ("auto", "uniform")):
            parser.error(
                f"arms has {arm!r}: use numbers{'' if args.engine == 'vllm' else ', auto or uniform'}"
            )
    for name in ("max_batch_size", "prompts", "jobs", "tensor_parallel"):
        if getattr(args, name) < 1:
            parser.error(f"{name.replace('_', '-')} is {getattr(args, name)}: use at least 1")
    try:  # before an engine starts
        Job(args.pair, args.lengths, 1)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{type(error).__name__}: {error}")
    return args


def main() -> None:
    args = arguments()
    if args.speed is None and args.engine == "specgen":
        args.speed = apart(device_speed)
    before = args.rows.read_text(encoding="utf-8").splitlines() if args.rows and args.rows.exists() else []
    rows = [json.loads(each) for each in before]
    for arm in args.arms:
        cold = {}
        if args.cold:
            with empty_caches():
                cold = {"cold": apart(measure, args, arm, time.time(), True)}
        row = cold | apart(measure, args, arm, time.time(), False)
        rows.append(row)
        if args.rows:
            with args.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    print(*table([row for row in rows if row["job"] == rows[-1]["job"]]), "", DEFINITIONS, sep="\n")
    if args.speed:
        print("least: at {:.3g} bytes and {:.3g} FLOP a second of each GPU".format(*args.speed))


if __name__ == "__main__":
    main()
