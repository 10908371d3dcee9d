"""The composition root: a configuration becomes an engine, and ``auto`` is resolved, here and nowhere else."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from specgen.attention import Backend
from specgen.attention.sdpa import SdpaBackend
from specgen.checkpoint import Checkpoint, load_drafter, load_target, open_checkpoint
from specgen.config import EngineConfig, require
from specgen.drafting import (
    Drafter,
    DrafterBatch,
    Eagle3Drafter,
    GreedyDrafts,
    NoDrafter,
    NonPaddedBatch,
    PaddedBatch,
    SampledDrafts,
)
from specgen.engine import Engine
from specgen.events import Event
from specgen.kv_cache import KVCache
from specgen.models.config import Eagle3Config, TargetConfig, kv_bytes_per_token
from specgen.models.eagle3 import Eagle3Head
from specgen.models.llama import Llama
from specgen.pages import PageAllocator
from specgen.scheduler import Scheduler
from specgen.tokenizer import StopStrings, Tokenizer, load_tokenizer

_BACKENDS: dict[str, type[Backend]] = {"sdpa": SdpaBackend}
_BATCHES: dict[str, type[DrafterBatch]] = {"padded": PaddedBatch, "non-padded": NonPaddedBatch}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Models:
    """Weights and tokenizer: what engines over the same pair share, and the checkpoints they came from."""

    target: Llama
    head: Eagle3Head | None
    tokenizer: Tokenizer
    checkpoints: Mapping[str, Checkpoint]  # "model" and, with a head, "drafter"


def resolve(config: EngineConfig) -> EngineConfig:
    """``config`` with every ``auto`` replaced by what will run; ``ValueError`` for what cannot run here."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = device.partition(":")[0]
    require(kind in ("cpu", "cuda"), f"device is {device!r}: use cpu, cuda or cuda:N")
    require(
        kind == "cpu" or torch.cuda.is_available(),
        f"device is {device!r} but torch {torch.__version__} finds no GPU: use --device cpu",
    )
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if kind == "cpu" else "bfloat16"
    require(dtype in _DTYPES, f"dtype is {dtype!r}: use one of {', '.join(_DTYPES)}")
    attention = "sdpa" if config.attention == "auto" else config.attention
    require(attention in _BACKENDS, f"attention is {attention!r}: use one of {', '.join(_BACKENDS)}")
    capabilities = _BACKENDS[attention].capabilities
    require(
        kind in capabilities.devices,
        f"attention {attention!r} does not run on {kind!r}: use --attention auto",
    )
    require(
        capabilities.ragged_q, f"attention {attention!r} cannot prefill prompts of mixed lengths: use another"
    )
    return replace(config, device=device, dtype=dtype, attention=attention)


def load_models(config: EngineConfig) -> Models:
    """Read target, head (if any drafts are asked for) and tokenizer of a resolved ``config``."""
    device, dtype = torch.device(config.device), _DTYPES[config.dtype]
    checkpoints = {"model": open_checkpoint(config.model)}
    target, head = load_target(checkpoints["model"], dtype, device), None
    if config.num_spec_tokens:
        assert config.drafter is not None
        checkpoints["drafter"] = open_checkpoint(config.drafter)
        head = load_drafter(checkpoints["drafter"], target, dtype, device)
    tokenizer = load_tokenizer(str(checkpoints["model"].path))
    return Models(target=target, head=head, tokenizer=tokenizer, checkpoints=checkpoints)


def build_engine(config: EngineConfig, models: Models, record: Callable[[Event], None]) -> Engine:
    """An engine of a resolved ``config`` over loaded ``models``; events go to ``record``."""
    backend = _BACKENDS[config.attention]()
    allocator = PageAllocator(num_pages(config, models), config.page_size)
    return Engine(
        target=models.target,
        cache=_cache(config, models.target.config, allocator, models.target.device),
        backend=backend,
        drafter=_drafter(config, models, backend, allocator),
        scheduler=Scheduler(
            allocator=allocator,
            max_batch_size=config.max_batch_size,
            max_prefill_tokens=config.max_prefill_tokens,
            num_spec_tokens=config.num_spec_tokens,
        ),
        stop_finder=lambda stops: StopStrings(models.tokenizer, stops),
        record=record,
    )


def num_pages(config: EngineConfig, models: Models) -> int:
    """Pages of the KV cache: what ``max_batch_size`` sequences of full length need, as far as the memory goes.

    ``ValueError`` if ``kv_memory`` does not hold a single page.
    """
    width = _DTYPES[config.dtype].itemsize
    token_bytes = kv_bytes_per_token(models.target.config, width)
    if config.num_spec_tokens and models.head is not None:
        token_bytes += kv_bytes_per_token(models.head.config, width)
    page_bytes = config.page_size * token_bytes
    memory = config.kv_memory if config.kv_memory is not None else _default_memory(config)
    affordable = memory // page_bytes
    require(
        affordable >= 1,
        f"kv-memory is {memory} bytes and one page of {config.page_size} positions takes {page_bytes}: raise it",
    )
    longest = models.target.config.max_positions + config.num_spec_tokens + 1
    return min(affordable, config.max_batch_size * -(-longest // config.page_size))


def _default_memory(config: EngineConfig) -> int:
    """1 GiB on a CPU; on a GPU most of what is free once the weights are there."""
    if config.device == "cpu":
        return _GIB
    free, _ = torch.cuda.mem_get_info(config.device)
    # what an earlier engine's cache gave back stays reserved by the process, and is as good as free
    reusable = torch.cuda.memory_reserved(config.device) - torch.cuda.memory_allocated(config.device)
    return int((free + reusable) * 0.8)


def _cache(
    config: EngineConfig, model: TargetConfig | Eagle3Config, allocator: PageAllocator, device: torch.device
) -> KVCache:
    return KVCache(
        num_layers=model.num_layers,
        num_pages=allocator.num_pages,
        page_size=allocator.page_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=_DTYPES[config.dtype],
        device=device,
    )


def _drafter(config: EngineConfig, models: Models, backend: Backend, allocator: PageAllocator) -> Drafter:
    if config.num_spec_tokens == 0:
        return NoDrafter()
    assert models.head is not None
    return Eagle3Drafter(
        head=models.head,
        cache=_cache(config, models.head.config, allocator, models.target.device),
        backend=backend,
        batch=_BATCHES[config.drafter_batch](),
        choice=GreedyDrafts() if config.draft_sampling == "greedy" else SampledDrafts(),
        num_spec_tokens=config.num_spec_tokens,
        target_vocab_size=models.target.config.vocab_size,
    )
