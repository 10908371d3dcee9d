"""How large the KV cache is: what the batch can need, as far as the memory goes."""

import gc
from dataclasses import replace

import torch

from specgen.config import NGRAM_BYTES, EngineConfig, SamplingParams, require
from specgen.core.graphs import Runner
from specgen.core.running_batch import ROW_BYTES
from specgen.core.sequence import Request
from specgen.device import total_memory
from specgen.engine.assembly import assemble
from specgen.engine.loading import Models
from specgen.engine.number_formats import DTYPES, target_kv_dtype
from specgen.models.model_config import LayerConfig
from specgen.report.display import devices

DRAWN = SamplingParams(temperature=1.0)  # what an engine prepares for by default
_GIB = 1 << 30
_CPU_REST = 2 * _GIB  # for engines that take turns, and what they take beside their caches


def require_memory(config: EngineConfig) -> None:
    """``UserError`` where the device of a resolved ``config`` can never hold its KV cache or its rows."""
    total, where = total_memory(torch.device(config.device)), devices(config.device, 1)
    require(
        config.kv_memory is None or config.kv_memory <= total,
        f"kv-memory is {_gib(config.kv_memory or 0)} and {where} has {_gib(total)}: ask for less",
    )
    rows = config.max_batch_size * ROW_BYTES
    require(
        rows <= total,
        f"max-batch-size is {config.max_batch_size:,}, whose rows take {_gib(rows)}, and {where} has {_gib(total)}: "
        "ask for fewer",
    )


def _gib(size: int) -> str:
    return f"{size / _GIB:,.1f} GiB"


def num_pages(config: EngineConfig, models: Models, expected: SamplingParams = DRAWN) -> int:
    """Pages of the KV cache: what ``max_batch_size`` sequences of full length need, as far as the memory goes.

    See ``build_engine`` for ``expected``.

    ``UserError`` if ``kv_memory``, or what ``gpu_memory_utilization`` leaves, does not hold a single page.
    """
    each = kv_page_bytes(config, models)
    memory = config.kv_memory if config.kv_memory is not None else _memory_for_kv(config, models, expected)
    affordable = memory // each
    require(
        affordable >= 1,
        f"{max(memory, 0)} bytes are left for the KV cache and one page of {config.page_size} positions takes "
        f"{each}: raise --kv-memory or --gpu-memory-utilization, or lower --max-prefill-tokens",
    )
    longest = models.target.config.max_positions + config.draft_length.most + 1
    return min(affordable, config.max_batch_size * -(-longest // config.page_size))


def kv_page_bytes(config: EngineConfig, models: Models) -> int:
    """Bytes of a page in the target's cache and in that of what drafts, a head or n-grams."""
    return page_bytes(config, models.target.config, None if models.head is None else models.head.config)


def page_bytes(config: EngineConfig, target: LayerConfig, head: LayerConfig | None) -> int:
    """The same of models that are not loaded."""
    total = target.kv_spec.bytes_per_token(target_kv_dtype(config).itemsize)
    if config.head is not None and head is not None:
        total += head.kv_spec.bytes_per_token(DTYPES[config.dtype].itemsize)
    if config.ngram is not None:
        total += NGRAM_BYTES
    return config.page_size * total


def _memory_for_kv(config: EngineConfig, models: Models, expected: SamplingParams) -> int:
    """1 GiB on a CPU; on a GPU the share that the process may use, less what weights and passes take."""
    if config.device == "cpu":
        return _GIB
    gc.collect()  # an engine that nothing refers to any more may still be there
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(config.device)
    # what earlier engines gave back but the process still holds is as good as free
    free += torch.cuda.memory_reserved(config.device) - torch.cuda.memory_allocated(config.device)
    not_ours = int(total * (1 - config.gpu_memory_utilization))
    # once for passes that the host launches, and once for those in graphs, which keep their memory
    return free - not_ours - 2 * _largest_pass(config, models, expected)


def room_for_turns(config: EngineConfig, models: Models) -> int:
    """Bytes for engines over loaded ``models`` that take turns: half of what weights leave on the fullest device."""
    return models.peers.least(_rest, config, models) // 2


def _rest(config: EngineConfig, models: Models) -> int:
    """Of the share of this rank's device that a process may use."""
    if config.device == "cpu":
        return _CPU_REST
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(config.device)
    return free - int(total * (1 - config.gpu_memory_utilization))


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
    pages = count * -(-(length + 2 * config.draft_length.most + 4) // config.page_size)
    alone = replace(
        config, prefix_cache=False, max_batch_size=count
    )  # the prompts are alike, and all rows are to be computed
    engine = assemble(alone, models, pages, Runner(), lambda event: None)
    before = torch.cuda.memory_allocated(config.device)
    torch.cuda.reset_peak_memory_stats(config.device)
    for _ in engine.generate(requests):
        pass
    return torch.cuda.max_memory_allocated(config.device) - before
