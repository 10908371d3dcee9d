"""The composition root: a configuration becomes an engine, and ``auto`` is resolved, here and nowhere else."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from specgen.attention import Backend, Heads
from specgen.attention.flashinfer_paged import FlashInferBackend
from specgen.attention.sdpa import SdpaBackend, StaticSdpaBackend
from specgen.attention.trtllm import TrtllmBackend
from specgen.checkpoints.checkpoint import (
    Checkpoint,
    drafter_config,
    load_drafter,
    load_target,
    open_checkpoint,
    target_config,
)
from specgen.config import EngineConfig, SamplingParams, UserError, require
from specgen.core import step_costs
from specgen.core.engine_core import EngineCore
from specgen.core.graphs import Eager, PassGraphs, Runner, StepGraphs
from specgen.core.limits import Limits
from specgen.core.running_batch import RunningBatch
from specgen.core.scheduler import Scheduler
from specgen.core.sequence import Request
from specgen.core.spec_length import CheapestLength, FixedLength
from specgen.core.step import Steps
from specgen.decoding.drafting import (
    Drafter,
    Eagle3Drafter,
    GreedyDrafts,
    NoDrafter,
    NonPaddedBatch,
    PackedBatch,
    PaddedBatch,
    SampledDrafts,
)
from specgen.device import use
from specgen.display import from_here
from specgen.events import Event
from specgen.kv.kv_cache import KVCache
from specgen.kv.pages import PageAllocator
from specgen.kv.prefix_cache import PrefixCache
from specgen.models.eagle3 import Eagle3Head
from specgen.models.llama import Llama
from specgen.models.model_config import Eagle3Config, TargetConfig, kv_bytes_per_token
from specgen.text.tokenizer import StopStrings, Tokenizer, load_tokenizer

BACKENDS: dict[str, type[Backend]] = {
    "trtllm": TrtllmBackend,
    "flashinfer": FlashInferBackend,
    "sdpa": SdpaBackend,
    "sdpa-static": StaticSdpaBackend,
}
_AUTO = {"cpu": ("sdpa",), "cuda": ("trtllm", "flashinfer", "sdpa")}  # the first that runs the model
_RUNNERS: dict[str, type[Runner]] = {"step": StepGraphs, "pass": PassGraphs, "off": Eager}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GIB = 1 << 30
Checkpoints = Mapping[str, Checkpoint]  # "model" and, where any drafts are asked for, "drafter"
DRAWN = SamplingParams(temperature=1.0)  # what an engine makes ready for where nobody says what will be asked


@dataclass(frozen=True, kw_only=True)
class Models:
    """Weights and tokenizer: what engines over the same pair share, and the checkpoints they came from."""

    target: Llama
    head: Eagle3Head | None
    tokenizer: Tokenizer
    checkpoints: Checkpoints

    def described(self, model: str) -> str:
        """``model`` as a report names it: whether its weights were only written to be timed belongs to it."""
        return described(model, self.checkpoints["model"])

    @property
    def synthetic(self) -> bool:
        """Whether the target says that its weights were made for measurements and not trained."""
        return _is_synthetic(self.checkpoints["model"])


def described(model: str, checkpoint: Checkpoint) -> str:
    """See ``Models.described``."""
    return from_here(model) + (" (synthetic weights)" if _is_synthetic(checkpoint) else "")


def _is_synthetic(checkpoint: Checkpoint) -> bool:
    return bool(checkpoint.config.get("synthetic_weights", False))


def resolve(config: EngineConfig, checkpoints: Checkpoints) -> EngineConfig:
    """``config`` with every ``auto`` replaced by what will run; ``UserError`` for what cannot run here."""
    device = choose_device(config.device)
    kind, dtype = device.type, choose_dtype(config.dtype, device)
    attention, _ = choose_attention(replace(config, device=str(device), dtype=dtype), checkpoints)
    capabilities = BACKENDS[attention].capabilities
    graphs = config.cuda_graphs
    if graphs == "auto":
        graphs = "step" if kind == "cuda" and capabilities.graphs else "off"
    require(graphs in _RUNNERS, f"cuda-graphs is {graphs!r}: use one of {', '.join(_RUNNERS)}")
    require(
        graphs == "off" or (kind == "cuda" and capabilities.graphs),
        f"cuda-graphs is {graphs!r} but attention {attention!r} on {kind!r} cannot be captured: "
        "use --cuda-graphs off, or on a GPU --attention trtllm, or in float32 sdpa-static",
    )
    return replace(
        config,
        device=str(device),
        dtype=dtype,
        attention=attention,
        cuda_graphs=graphs,
        page_size=config.page_size or capabilities.page_size,
    )


def choose_device(name: str) -> torch.device:
    """The device ``name`` stands for, ``cpu`` or ``cuda:N``; ``UserError`` for one that is not here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    kind, _, number = name.partition(":")
    require(
        kind == "cuda" and (name == "cuda" or number.isdecimal()),
        f"device is {name!r}: use cpu, cuda or cuda:N",
    )
    require(
        torch.cuda.is_available(),
        f"device is {name!r} but torch {torch.__version__} finds no GPU: use --device cpu",
    )
    index, count = int(number) if number else torch.cuda.current_device(), torch.cuda.device_count()
    require(index < count, f"device is {name!r} and there are {count} GPUs: use cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


def choose_dtype(name: str, device: torch.device) -> str:
    """The number format ``name`` stands for on ``device``; ``UserError`` for one that is not known."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    require(name in DTYPES, f"dtype is {name!r}: use one of {', '.join(DTYPES)}")
    return name


def choose_attention(config: EngineConfig, checkpoints: Checkpoints) -> tuple[str, str]:
    """The backend that ``config``, whose device and dtype are resolved, runs on, and why that one."""
    device = torch.device(config.device)
    names = _AUTO[device.type] if config.attention == "auto" else (config.attention,)
    require(
        names[0] in BACKENDS,
        f"attention is {config.attention!r}: use one of auto, {', '.join(BACKENDS)}",
    )
    heads, passed_over = _heads(config, checkpoints), list[str]()
    for name in names:
        backend = BACKENDS[name]
        page_size = config.page_size or backend.capabilities.page_size
        refusals = (
            backend.capabilities.refusal(device, replace(each, page_size=page_size)) for each in heads
        )
        reason = next((reason for reason in refusals if reason), None)
        if reason is None:
            if config.attention != "auto":
                return name, "as asked"
            return name, "; ".join([*passed_over, backend.merit])
        passed_over.append(f"{name} {reason.partition(':')[0]}")
        if config.attention != "auto":
            raise UserError(f"attention {name!r} {reason}")
    raise AssertionError("the last choice runs everything")


def _heads(config: EngineConfig, checkpoints: Checkpoints) -> list[Heads]:
    """What target and head ask of attention, from their checkpoints' headers."""
    models: list[TargetConfig | Eagle3Config] = [target_config(checkpoints["model"])]
    if config.num_spec_tokens:
        models.append(drafter_config(checkpoints["drafter"], None))
    dtype = DTYPES[config.dtype]
    return [
        Heads(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=dtype,
            kv_dtype=dtype,
            page_size=config.page_size,
            max_query_len=config.num_spec_tokens + 1,
        )
        for model in models
    ]


def open_checkpoints(config: EngineConfig) -> Checkpoints:
    """The checkpoints of ``config``, headers only; of a hub id, what is downloaded. Once in a command is enough."""
    names = {"model": config.model, "drafter": config.drafter if config.num_spec_tokens else None}
    return {role: open_checkpoint(name) for role, name in names.items() if name is not None}


def load_models(config: EngineConfig, checkpoints: Checkpoints) -> Models:
    """Read target, head (if any drafts are asked for) and tokenizer of a resolved ``config``."""
    device, dtype = torch.device(config.device), DTYPES[config.dtype]
    use(device)
    target, head = load_target(checkpoints["model"], dtype, device), None
    if config.num_spec_tokens:
        head = load_drafter(checkpoints["drafter"], target, dtype, device)
    tokenizer = load_tokenizer(str(checkpoints["model"].path))
    return Models(target=target, head=head, tokenizer=tokenizer, checkpoints=checkpoints)


def build_engine(
    config: EngineConfig,
    models: Models,
    record: Callable[[Event], None],
    around: Callable[[Runner], Runner] = lambda runner: runner,
    expected: SamplingParams = DRAWN,
) -> EngineCore:
    """An engine of a resolved ``config`` over loaded ``models``; events go to ``record``.

    ``around`` may put a runner of its own around the one that ``config`` names, to watch the pieces of a step.
    ``expected`` asks for as much as any request will (see ``sampling.most_demanding``): that leaves the cache on a GPU
    all the memory that passes do not need.
    """
    use(models.target.device)
    runner = around(_RUNNERS[config.cuda_graphs]())
    engine = _engine(config, models, num_pages(config, models, expected), runner, record)
    if config.spec_length == "auto":
        costs = step_costs.measure(engine, config.max_batch_size, config.num_spec_tokens)
        engine.spec_length = CheapestLength(costs)
    return engine


def num_pages(config: EngineConfig, models: Models, expected: SamplingParams = DRAWN) -> int:
    """Pages of the KV cache: what ``max_batch_size`` sequences of full length need, as far as the memory goes.

    ``UserError`` if ``kv_memory``, or what ``gpu_memory_utilization`` leaves, does not hold a single page.
    """
    page_bytes = kv_page_bytes(config, models)
    memory = config.kv_memory if config.kv_memory is not None else _memory_for_kv(config, models, expected)
    affordable = memory // page_bytes
    require(
        affordable >= 1,
        f"{max(memory, 0)} bytes are left for the KV cache and one page of {config.page_size} positions takes "
        f"{page_bytes}: raise --kv-memory or --gpu-memory-utilization, or lower --max-prefill-tokens",
    )
    longest = models.target.config.max_positions + config.num_spec_tokens + 1
    return min(affordable, config.max_batch_size * -(-longest // config.page_size))


def kv_page_bytes(config: EngineConfig, models: Models) -> int:
    """Bytes of a page in the caches of the target and, where any drafts are asked for, of the head."""
    configs: list[TargetConfig | Eagle3Config] = [models.target.config]
    if config.num_spec_tokens and models.head is not None:
        configs.append(models.head.config)
    return config.page_size * sum(kv_bytes_per_token(each, DTYPES[config.dtype].itemsize) for each in configs)


def _memory_for_kv(config: EngineConfig, models: Models, expected: SamplingParams) -> int:
    """1 GiB on a CPU; on a GPU the share that the process may use, less what weights and passes take."""
    if config.device == "cpu":
        return _GIB
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(config.device)
    # what earlier engines gave back but the process still holds is as good as free
    free += torch.cuda.memory_reserved(config.device) - torch.cuda.memory_allocated(config.device)
    not_ours = int(total * (1 - config.gpu_memory_utilization))
    # once for passes that the host launches, and once for those in graphs, which keep their memory
    return free - not_ours - 2 * _largest_pass(config, models, expected)


def _largest_pass(config: EngineConfig, models: Models, expected: SamplingParams) -> int:
    """Bytes that the largest prefill and a decode step of the whole batch take beside weights and KV, by trial."""
    count = min(config.max_batch_size, config.max_prefill_tokens)
    length = min(config.max_prefill_tokens // count, models.target.config.max_positions - 2)
    biases = expected.logit_bias[: models.target.config.vocab_size]
    sampling = replace(
        expected, max_tokens=2, ignore_eos=True, stop=(), logit_bias=biases
    )  # a first and a decode step
    requests = (
        Request(id=f"trial {i}", prompt_token_ids=(0,) * length, sampling=sampling) for i in range(count)
    )
    pages = count * -(-(length + 2 * config.num_spec_tokens + 4) // config.page_size)
    alone = replace(config, prefix_cache=False)  # the prompts are alike, and all rows are to be computed
    engine = _engine(alone, models, pages, Eager(), lambda event: None)
    before = torch.cuda.memory_allocated(config.device)
    torch.cuda.reset_peak_memory_stats(config.device)
    for _ in engine.generate(requests):
        pass
    return torch.cuda.max_memory_allocated(config.device) - before


def _engine(
    config: EngineConfig, models: Models, num_pages: int, runner: Runner, record: Callable[[Event], None]
) -> EngineCore:
    backend = BACKENDS[config.attention](models.target.device)
    allocator = (PrefixCache if config.prefix_cache else PageAllocator)(num_pages, config.page_size)
    target, step_rows = models.target, config.num_spec_tokens + 1
    # the last steps of a text may run past its end, and past the pages it has
    longest = min(target.config.max_positions, num_pages * config.page_size) + 3 * step_rows
    return EngineCore(
        config=target.config,
        steps=Steps(
            target=target,
            cache=new_cache(config, target.config, allocator, target.device),
            backend=backend,
            drafter=_drafter(config, models, backend, allocator),
            runner=runner,
        ),
        batch=RunningBatch(
            max_rows=runner.num_rows(config.max_batch_size),
            table_width=allocator.pages_for(longest),
            hidden_size=models.head.config.hidden_size if models.head and config.num_spec_tokens else 0,
            dtype=target.dtype,
            device=target.device,
        ),
        scheduler=Scheduler(
            allocator=allocator,
            limits=Limits(max_batch_size=config.max_batch_size, max_prefill_tokens=config.max_prefill_tokens),
            num_spec_tokens=config.num_spec_tokens,
        ),
        spec_length=FixedLength(config.num_spec_tokens),
        lookahead=0 if backend.capabilities.needs_host_lens else 1,
        device=target.device,
        stop_finder=lambda stops: StopStrings(models.tokenizer, stops),
        record=record,
    )


def new_cache(
    config: EngineConfig, model: TargetConfig | Eagle3Config, allocator: PageAllocator, device: torch.device
) -> KVCache:
    """A cache for ``model`` with as many pages as ``allocator`` gives out."""
    return KVCache(
        num_layers=model.num_layers,
        num_pages=allocator.num_pages + 1,  # page 0 belongs to nobody
        page_size=allocator.page_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=DTYPES[config.dtype],
        device=device,
    )


def _drafter(config: EngineConfig, models: Models, backend: Backend, allocator: PageAllocator) -> Drafter:
    if config.num_spec_tokens == 0:
        return NoDrafter()
    assert models.head is not None
    non_padded = NonPaddedBatch() if backend.capabilities.needs_host_lens else PackedBatch()
    return Eagle3Drafter(
        head=models.head,
        cache=new_cache(config, models.head.config, allocator, models.target.device),
        backend=backend,
        batch=PaddedBatch() if config.drafter_batch == "padded" else non_padded,
        choice=GreedyDrafts(models.head.argmax) if config.draft_sampling == "greedy" else SampledDrafts(),
        target_vocab_size=models.target.config.vocab_size,
    )
