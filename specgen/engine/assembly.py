"""An engine put together: caches, drafter, running batch and scheduler over loaded models."""

from collections.abc import Callable

import torch

from specgen.attention import Backend
from specgen.config import EngineConfig
from specgen.core.engine_core import EngineCore
from specgen.core.graphs import Runner
from specgen.core.packing import BLOCK
from specgen.core.running_batch import RunningBatch
from specgen.core.scheduler import Limits, Scheduler
from specgen.core.spec_length import FixedLength
from specgen.core.step import Steps
from specgen.decoding.drafting import (
    Drafter,
    HeadDrafter,
    NoDrafter,
)
from specgen.decoding.ngram import NgramDrafter
from specgen.decoding.outcome import NonPaddedBatch, PackedBatch, PaddedBatch
from specgen.engine.choices import BACKENDS
from specgen.engine.loading import Models
from specgen.engine.number_formats import target_kv_dtype
from specgen.kv.kv_cache import KVCache
from specgen.kv.pages import PageAllocator
from specgen.models.expert_counts import ExpertSize
from specgen.models.model_config import LayerConfig
from specgen.record.record_rows import EngineRow
from specgen.text.reasoning import Followers


def assemble(
    config: EngineConfig, models: Models, num_pages: int, runner: Runner, record: Callable[[EngineRow], None]
) -> EngineCore:
    """An engine of a resolved ``config`` whose cache has ``num_pages`` pages; see ``build.build_engine``."""
    backend = BACKENDS[config.attention](models.target.device)
    allocator = PageAllocator(num_pages, config.page_size, prefix_cache=config.prefix_cache)
    target, step_rows = models.target, max(config.draft_length.most + 1, BLOCK if runner.captures else 0)
    # the last steps of a text may run past its end, and past the pages it has
    longest = min(target.config.max_positions, num_pages * config.page_size) + 3 * step_rows
    num_sequences = min(config.max_batch_size, num_pages)  # each has a page or more
    drafter = _drafter(config, models, backend, allocator)
    return EngineCore(
        config=target.config,
        steps=Steps(
            target=target,
            cache=new_cache(target.config, allocator, target_kv_dtype(config), target.device),
            backend=backend,
            drafter=drafter,
            runner=runner,
            experts=ExpertSize.of(target.config, target.dtype.itemsize),
        ),
        batch=RunningBatch(
            max_rows=runner.num_rows(num_sequences),
            table_width=allocator.pages_for(longest),
            state_columns=drafter.state_columns,
            device=target.device,
        ),
        scheduler=Scheduler(
            allocator=allocator,
            limits=Limits(max_batch_size=num_sequences, max_prefill_tokens=config.max_prefill_tokens),
            step_rows=step_rows,
        ),
        spec_length=FixedLength(config.draft_length.most),
        lookahead=0 if backend.capabilities.needs_host_lens else 1,
        device=target.device,
        followers=Followers(tokenizer=models.tokenizer),
        record=record,
        peers=models.peers,
    )


def new_cache(
    model: LayerConfig, allocator: PageAllocator, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """A cache of ``dtype`` for ``model`` with as many pages as ``allocator`` gives out."""
    return KVCache(
        spec=model.kv_spec,
        num_pages=allocator.num_pages + 1,  # page 0 is for padding rows
        page_size=allocator.page_size,
        dtype=dtype,
        device=device,
    )


def _drafter(config: EngineConfig, models: Models, backend: Backend, allocator: PageAllocator) -> Drafter:
    if config.draft_length.most == 0:
        return NoDrafter()
    if config.ngram is not None:
        return NgramDrafter(
            longest=config.ngram,
            num_pages=allocator.num_pages + 1,  # as in ``new_cache``
            page_size=allocator.page_size,
            device=models.target.device,
        )
    assert models.head is not None
    non_padded = NonPaddedBatch() if backend.capabilities.needs_host_lens else PackedBatch()
    return HeadDrafter(
        head=models.head,
        cache=new_cache(models.head.config, allocator, models.target.dtype, models.target.device),
        backend=backend,
        batch=PaddedBatch() if config.drafter_batch == "padded" else non_padded,
        sampled_drafts=config.draft_sampling != "greedy",
        target_vocab_size=models.target.config.vocab_size,
        dtype=models.target.dtype,
    )
