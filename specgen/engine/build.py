"""The composition root: a resolved configuration and loaded models become an engine, with a KV cache that fits."""

import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from specgen.attention import Attend, Backend
from specgen.config import LARGEST_AUTOMATON, POOL_TOKENS, EngineConfig, SamplingParams, require
from specgen.core.engine_core import EngineCore
from specgen.core.graphs import Runner
from specgen.core.running_batch import ROW_BYTES, RunningBatch
from specgen.core.scheduler import Limits, Scheduler
from specgen.core.sequence import Request
from specgen.core.spec_length import BestPlan, FixedPlan, StepPlan
from specgen.core.step import Steps
from specgen.decoding.answer_pool import AnswerPool
from specgen.decoding.automaton_tables import Tables
from specgen.decoding.drafting import Drafter, HeadDrafter, ModelDrafter, NoDrafter
from specgen.decoding.ngram import NgramDrafter
from specgen.decoding.outcome import NonPaddedBatch, PackedBatch, PaddedBatch
from specgen.decoding.sampling import SamplingForm
from specgen.device import HostCopy, total_memory, use
from specgen.engine import step_costs
from specgen.engine.choices import BACKENDS, DTYPES, RUNNERS, needed_modules, target_kv_dtype
from specgen.engine.loading import Models
from specgen.engine.page_budget import PageBudget, rows_behind
from specgen.kv.kv_cache import KVCache, StateCache
from specgen.kv.layout import Layout
from specgen.kv.pages import PageAllocator, Places, StateSlots
from specgen.models.draft_model import DraftModelConfig
from specgen.models.model_config import LayerConfig
from specgen.models.protocols import Target
from specgen.ops import bind_ops
from specgen.ops.jit_modules import compile_missing
from specgen.record.record_rows import EngineRow
from specgen.record.startup import phase
from specgen.report.display import devices

DRAWN = SamplingParams(temperature=1.0)  # what an engine prepares for by default
_GIB = 1 << 30
_CPU_REST = 2 * _GIB  # for engines that take turns, and what they take beside their caches


def build_engine(
    config: EngineConfig,
    models: Models,
    record: Callable[[EngineRow], None],
    mark: Callable[[], None] | None = None,
    expected: SamplingParams = DRAWN,
) -> EngineCore:
    """An engine of a resolved ``config`` over loaded ``models``; ``record`` takes the rows of its passes.

    ``mark`` is called before and after each forward pass of a decode step.
    ``expected`` asks for as much as any request will (see ``most_demanding``): that leaves the cache on a GPU
    all the memory that passes do not need.
    """
    use(models.target.device)
    held = models.peers.ranks.size
    require(
        held == config.tensor_parallel,
        f"tensor-parallel is {config.tensor_parallel} and the models were loaded with {held}: load them with the same",
    )
    runner = RUNNERS[config.cuda_graphs]()
    if mark is not None:
        runner.mark = mark
    compile_missing(needed_modules(config, models.checkpoints, expected))
    peers = models.peers.of_engine(config, expected)
    with phase("memory"):
        pages = peers.assemble(lambda: num_pages(config, models, expected), runner)
        engine = assemble(config, replace(models, peers=peers), pages, runner, record)
    if config.draft_length.auto:
        most = _num_sequences(config, _allocators(page_budget(config, models), pages))
        measure = partial(step_costs.measure, engine, most, config.draft_length)
        with phase("step costs"):  # with marks, steps take longer
            costs = measure() if mark else step_costs.costs_for(config, models.checkpoints, measure)
        engine.spec_length = BestPlan(costs)
    return engine


def assemble(
    config: EngineConfig,
    models: Models,
    num_pages: int,
    runner: Runner,
    record: Callable[[EngineRow], None],
    num_windowed: int | None = None,
) -> EngineCore:
    """An engine of a resolved ``config`` whose cache has ``num_pages`` pages; see ``build_engine``.

    Of layers with a window it has ``num_windowed``; None: as many as ``PageBudget`` says.
    """
    backend = BACKENDS[config.attention](models.target.device)
    target, num_rows = models.target, rows_behind(config)
    allocators = _allocators(page_budget(config, models), num_pages, num_windowed)
    allocator = allocators[0]
    # the last steps of a text may run past its end, and past the pages it has
    longest = min(target.config.max_positions, num_pages * config.page_size) + 3 * num_rows
    num_sequences = _num_sequences(config, allocators)
    states = _states(config, target.config, num_sequences, target.device)
    cache = new_cache(target.config, allocators, target_kv_dtype(config), target.device, states)
    drafter = _drafter(config, models, backend, allocator, cache)
    # passes in flight will end some
    places = Places(num_state_slots(num_sequences), LARGEST_AUTOMATON)
    ops = bind_ops(target.device, target.dtype)
    return EngineCore(
        config=target.config,
        steps=Steps(
            target=target,
            cache=cache,
            backend=backend,
            drafter=drafter,
            runner=runner,
            verification=config.verification,
            synthetic_acceptance=config.synthetic_chances(),
        ),
        batch=RunningBatch(
            max_rows=runner.num_rows(num_sequences),
            table_width=allocator.pages_for(longest),
            num_tables=len(allocators),
            state_columns=drafter.state_columns,
            device=target.device,
            end_tokens=target.config.eos_token_ids,
            tables=Tables(
                *(places.most, places.num_entries, target.config.vocab_size, target.device),
                walk=ops.walk,
                mask=ops.mask,
            ),
        ),
        scheduler=Scheduler(
            allocators=allocators,
            slots=StateSlots(None if states is None else num_state_slots(num_sequences)),
            places=places,
            limits=Limits(max_batch_size=num_sequences, max_prefill_tokens=config.max_prefill_tokens),
            step_rows=num_rows,
        ),
        spec_length=FixedPlan(StepPlan(num_drafts=config.draft_length.most)),
        lookahead=0 if backend.capabilities.needs_host_lens else 1,
        device=target.device,
        tokenizer=models.tokenizer,
        record=record,
        peers=models.peers,
    )


def _allocators(
    budget: PageBudget, num_pages: int, num_windowed: int | None = None
) -> tuple[PageAllocator, ...]:
    """Of ``num_pages``, and where layers have a window, of theirs."""
    config, window = budget.config, budget.window
    make = partial(PageAllocator, page_size=config.page_size, prefix_cache=config.prefix_cache)
    if window is None:
        return (make(num_pages),)
    number = budget.windowed(num_pages) if num_windowed is None else num_windowed
    return make(num_pages), make(number, window=window)


def _num_sequences(config: EngineConfig, allocators: Iterable[PageAllocator]) -> int:
    """Of a batch: each has a page or more."""
    return min(config.max_batch_size, *(each.num_pages for each in allocators))


def num_state_slots(num_sequences: int) -> int:
    """For a batch of so many, and some for those that passes in flight will end."""
    return num_sequences + -(-num_sequences // 8)


def _states(
    config: EngineConfig, target: LayerConfig, num_sequences: int, device: torch.device
) -> StateCache | None:
    """Of the target's recurrent layers; None: it has none."""
    if target.state_spec is None:
        return None
    return StateCache(
        spec=target.state_spec,
        num_slots=num_state_slots(num_sequences) + 1,  # slot 0 is for padding rows
        step_rows=config.draft_length.most + 1,
        dtype=DTYPES[config.dtype],
        device=device,
    )


def state_bytes(config: EngineConfig, target: LayerConfig, num_sequences: int) -> int:
    """Of the recurrent states of a batch of so many sequences."""
    if target.state_spec is None:
        return 0
    each = target.state_spec.bytes_per_sequence(config.draft_length.most + 1, DTYPES[config.dtype].itemsize)
    return (num_state_slots(num_sequences) + 1) * each


def new_cache(
    model: LayerConfig,
    allocators: tuple[PageAllocator, ...],
    dtype: torch.dtype,
    device: torch.device,
    states: StateCache | None = None,
) -> KVCache:
    """A cache of ``dtype`` for ``model`` with as many pages as ``allocators`` give out.

    The second, if any, is of the layers with a window, whose pages go back behind it; else they keep theirs.
    """
    num_pages, *windowed = [each.num_pages + 1 for each in allocators]  # page 0 is for padding rows
    return KVCache(
        spec=model.kv_spec,
        num_pages=num_pages,
        num_windowed_pages=windowed[0] if windowed else None,
        page_size=allocators[0].page_size,
        dtype=dtype,
        device=device,
        states=states,
    )


def _drafter(
    config: EngineConfig, models: Models, backend: Backend, allocator: PageAllocator, target_cache: KVCache
) -> Drafter:
    if config.draft_length.most == 0:
        return NoDrafter()
    if (lookup := config.lookup) is not None:
        device = models.target.device
        pool = (
            AnswerPool(longest=lookup.longest, capacity=POOL_TOKENS, device=device) if lookup.learns else None
        )
        return NgramDrafter(
            longest=lookup.longest,
            num_pages=allocator.num_pages + 1,  # as in ``new_cache``
            page_size=allocator.page_size,
            device=device,
            ends=models.target.config.eos_token_ids,
            pool=pool,
        )
    assert models.head is not None
    trained, asked = models.head.config.most_drafts, config.draft_length.most
    if trained is not None and asked > trained:
        text = (
            "the head was trained to draft %d tokens and num-spec-tokens is %d: the last drafts will be poor"
        )
        logging.getLogger("specgen").warning(text, trained, asked)
    if isinstance(of_head := models.head.config, DraftModelConfig):
        short, long = of_head.model.max_positions, models.target.config.max_positions
        if short < long:
            text = "the draft model's context is %s tokens and the target's %s: behind it drafts will be poor"
            logging.getLogger("specgen").warning(text, f"{short:,}", f"{long:,}")
    non_padded = NonPaddedBatch() if backend.capabilities.needs_host_lens else PackedBatch()
    of_target = models.target
    cache = target_cache
    if not of_head.reads_target_kv:
        cache = new_cache(of_head, (allocator,), of_target.dtype, of_target.device)
    return (ModelDrafter if of_head.is_model else HeadDrafter)(
        head=models.head,
        cache=cache,
        backend=backend,
        batch=PaddedBatch() if config.drafter_batch == "padded" else non_padded,
        sampled_drafts=config.draft_sampling != "greedy",
        target_vocab_size=models.target.config.vocab_size,
        dtype=models.target.dtype,
    )


def most_demanding(params: Iterable[SamplingParams]) -> SamplingParams:
    """Parameters that make a pass compute all that any of ``params`` asks for."""
    params = list(params)
    form = SamplingForm.of(params, end_tokens=(0,))  # whose number makes no difference
    asked = [each.prompt_logprobs for each in params if each.prompt_logprobs is not None]
    return SamplingParams(
        temperature=0.0 if form.kind == "greedy" else 1.0,
        top_p=0.9 if form.kind == "filtered" else 1.0,
        logit_bias=tuple((token, 0.0) for token in range(form.num_biases)),
        logprobs=form.num_logprobs,
        prompt_logprobs=max(asked, default=None),
        presence_penalty=1.0 if form.penalised else 0.0,
        allowed_token_ids=(0,) if form.constrained else None,
    )


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

    Those of layers with a window are beside them: see ``PageBudget``. See ``build_engine`` for ``expected``.

    ``UserError`` if ``kv_memory``, or what ``gpu_memory_utilization`` leaves, does not hold a single page.
    """
    budget = page_budget(config, models)
    memory = config.kv_memory if config.kv_memory is not None else _memory_for_kv(config, models, expected)
    states = state_bytes(config, models.target.config, config.max_batch_size)
    affordable = budget.within(memory - states)
    beside = (
        f"the recurrent states of {config.max_batch_size} sequences take {states}, and " if states else ""
    )
    fewer = " or --max-batch-size" if states else ""
    require(
        affordable >= 1,
        f"{max(memory, 0)} bytes are left for the KV cache and {beside}one page of {config.page_size} positions takes "
        f"{budget.page_bytes}: raise --kv-memory or --gpu-memory-utilization, or lower --max-prefill-tokens{fewer}",
    )
    return min(affordable, budget.most_pages)


def page_budget(config: EngineConfig, models: Models) -> PageBudget:
    """Of loaded models."""
    head = None if models.head is None else models.head.config
    return PageBudget(config=config, target=models.target.config, head=head)


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
    pool = 0 if config.lookup is None else config.lookup.pool_bytes
    return free - not_ours - pool - 2 * _largest_pass(config, models, expected)


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
    # a first and a decode step
    sampling = replace(expected, max_tokens=2, ignore_eos=True, stop=(), logit_bias=biases)
    requests = (
        Request(id=f"trial {i}", prompt_token_ids=(0,) * length, sampling=sampling) for i in range(count)
    )
    pages = count * -(-(length + 2 * config.draft_length.most + 4) // config.page_size)
    # the prompts are alike, and all rows are to be computed
    uncached = replace(config, prefix_cache=False, max_batch_size=count, cuda_graphs="off")
    engine = assemble(uncached, models, pages, Runner(), lambda event: None, num_windowed=pages)
    before = torch.cuda.memory_allocated(config.device)
    torch.cuda.reset_peak_memory_stats(config.device)
    for _ in engine.generate(requests):
        pass
    return torch.cuda.max_memory_allocated(config.device) - before


def prefill_logits(config: EngineConfig, models: Models) -> Callable[[Sequence[int]], Tensor]:
    """A function from token ids to the target's next-token logits after them, ``[V]`` float32 on the CPU.

    Each call is one prefill through the attention of a resolved ``config``, with its own KV cache.
    """

    def logits(token_ids: Sequence[int]) -> Tensor:
        with models.peers.calling(_prefill, config, token_ids):
            found = HostCopy(_prefill(config, models, token_ids))
            models.peers.wait(found)
            return found.tensor()

    return logits


@torch.inference_mode()
def _prefill(config: EngineConfig, models: Models, token_ids: Sequence[int]) -> Tensor:
    hidden, _ = prefill(config, models.target, [token_ids], target_kv_dtype(config))
    return models.target.logits(hidden[-1:])[0].float()


@torch.inference_mode()
def prefill(
    config: EngineConfig,
    target: Target,
    texts: Sequence[Sequence[int]],
    kv_dtype: torch.dtype,
    layers: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """The rows of all ``texts``, one behind the other, in one pass of a resolved ``config`` with its own KV cache.

    Those behind the final norm ``[rows, H]``, and the inputs of ``layers`` ``[rows, layers * H]``.
    """
    device, size = target.device, config.page_size
    num_pages = [-(-len(text) // size) for text in texts]
    tables = torch.zeros(len(texts), max(num_pages), dtype=torch.int32, device=device)
    for row, first, number in zip(tables, accumulate(num_pages, initial=1), num_pages, strict=False):
        row[:number] = torch.arange(first, first + number)
    pages, states = PageAllocator(sum(num_pages), size), _states(config, target.config, len(texts), device)
    cache = new_cache(target.config, (pages,), kv_dtype, device, states)
    lengths, slots = [len(text) for text in texts], range(1, len(texts) + 1)
    layout = Layout.ragged(tables, [0] * len(texts), lengths, size, [*slots])
    attend = Attend(BACKENDS[config.attention](device), cache, layout, target.rope)
    rows = torch.tensor([token for text in texts for token in text], device=device)
    return target.forward(rows, attend, layers)
