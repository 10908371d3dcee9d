"""``specgen inspect --gpu``: what a pair takes of a GPU's memory, and how many sequences that leaves room for."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from specgen.attention.planning import DECODE_BYTES
from specgen.attention.trtllm import TrtllmBackend
from specgen.checkpoints.checkpoint import build_head, build_target, fitting_config, target_config
from specgen.checkpoints.tensor_reader import Checkpoint, TensorReader
from specgen.config import LARGEST_AUTOMATON, DraftLmHeadName, EngineConfig, KVDtypeName
from specgen.decoding.automaton_tables import table_bytes
from specgen.device import Ranks
from specgen.engine.build import num_state_slots, state_bytes
from specgen.engine.choices import DTYPES, choose_kv_dtype
from specgen.engine.loading import open_checkpoints
from specgen.engine.page_budget import PageBudget
from specgen.models.model_config import HeadConfig, TargetConfig
from specgen.models.protocols import Target, no_target
from specgen.report.display import count
from specgen.report.table import Column, Table
from specgen.report.terminal import Part

_LONGEST = 2048  # tokens of a sequence, prompt and output
_USUAL = 4096  # of one whose bytes are said
_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7)  # K
_CONTEXT = 512 << 20  # bytes: CUDA itself and the code of the kernels
_META = torch.device("meta")  # reads no weights
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory of one K, in bytes; only ``passes`` and CUDA's own are estimates."""

    config: EngineConfig
    total: int  # of the GPU
    weights: int  # as loaded: of the target and, where it drafts, the head
    target: TargetConfig
    head: HeadConfig | None

    @property
    def kv_bytes_per_token(self) -> int:
        """In the caches of target and drafter."""
        return self._budget(1).page_bytes // self.config.page_size

    @property
    def workspace(self) -> int:
        """Of the attention kernels, what CUDA itself takes, and of answers that drafts come from."""
        lookup = self.config.lookup
        return DECODE_BYTES + _CONTEXT + (0 if lookup is None else lookup.pool_bytes)

    @property
    def length(self) -> int:
        """Tokens of the sequences that are counted: 2,048, or as many as the target can take."""
        return min(_LONGEST, self.target.max_positions)

    @cached_property
    def num_sequences(self) -> int:
        """The most sequences of ``length`` tokens, of which every one more also makes passes larger."""
        most = max(self._kv_cache(1), 0) // self.bytes_of_sequence(self.length)
        return bisect_left(range(1, most + 1), True, key=lambda n: n > self._room(n))

    @property
    def passes(self) -> int:
        """Of the largest pass, twice as the engine reserves it: as launched, and in CUDA graphs. An estimate.

        The engine measures its passes when it starts.
        """
        return self._passes(max(self.num_sequences, 1))

    @property
    def states(self) -> int:
        """Of recurrent layers, for that many sequences."""
        return state_bytes(self.config, self.target, max(self.num_sequences, 1))

    @property
    def constraints(self) -> int:
        """Of the tables of constraints, which a run has if one of its rows is constrained: not in the plan."""
        slots = num_state_slots(max(self.num_sequences, 1))
        return table_bytes(slots, LARGEST_AUTOMATON, self.target.vocab_size)

    @property
    def kv_cache(self) -> int:
        """What is left for the KV cache; below 0 where weights and passes do not fit."""
        return self._kv_cache(max(self.num_sequences, 1))

    @property
    def num_pages(self) -> int:
        return self._budget(self.num_sequences).within(self.kv_cache)

    @property
    def windowed_pages(self) -> int:
        """Of the layers with a window, which keep those of the last positions alone."""
        return self._budget(self.num_sequences).windowed(self.num_pages)

    def bytes_of_sequence(self, num_tokens: int) -> int:
        """Of KV cache that a sequence has at most, but for layers with a window while its prompt is computed."""
        budget = self._budget(1)
        return budget.bytes_of(*budget.of_sequence(num_tokens))

    def _budget(self, num_sequences: int) -> PageBudget:
        config = replace(self.config, max_batch_size=max(num_sequences, 1))
        return PageBudget(config=config, target=self.target, head=self.head)

    def _kv_cache(self, num_sequences: int) -> int:
        ours = int(self.total * self.config.gpu_memory_utilization)
        states = state_bytes(self.config, self.target, num_sequences)
        return ours - self.weights - self.workspace - states - self._passes(num_sequences)

    def _room(self, num_sequences: int) -> int:
        """Sequences for which there are pages, beside the passes of ``num_sequences``."""
        budget = self._budget(num_sequences)
        pages = budget.within(self._kv_cache(num_sequences))
        each, windowed = budget.of_sequence(self.length)
        room = pages // each
        return min(room, budget.windowed(pages) // windowed) if windowed else room

    def _passes(self, num_sequences: int) -> int:
        """A layer's inputs and outputs of all rows, and the logits of those that are sampled, also in float32."""
        model, width = self.target, DTYPES[self.config.dtype].itemsize
        sampled = num_sequences * (self.config.draft_length.most + 1)
        rows = max(sampled, self.config.max_prefill_tokens)
        mixture = model.mixture
        inner = model.intermediate_size if mixture is None else mixture.num_chosen * mixture.width
        features = 3 * model.hidden_size if self.config.head is not None else 0
        layer = rows * width * (2 * model.hidden_size + max(3 * inner, _of_heads(model)) + features)
        return 2 * (layer + sampled * model.vocab_size * (width + 8))

    @property
    def columns(self) -> tuple[Column, ...]:
        """Of a table of plans; states, and pages of layers with a window, where the target has some."""
        left_out = {
            *(("states",) if self.target.state_spec is None else ()),
            *(("windowed_pages",) if self.target.kv_spec.window is None else ()),
        }
        return tuple(column for column in _COLUMNS if column.name not in left_out)

    def to_json(self) -> dict[str, Any]:
        """The numbers; the sizes in bytes."""
        names = [column.name for column in self.columns[1:]]
        return {"num_spec_tokens": self.config.draft_length.most} | {
            each: getattr(self, each) for each in names
        }


def _of_heads(model: TargetConfig) -> int:
    """Numbers of a row's queries, keys, values and output in all heads.

    A prefill of latents expands twice as many positions as it has rows: first one matrix, then keys beside values.
    """
    if model.latent is None:
        heads = map(model.kv_heads, range(model.num_layers))
        return max(2 * (model.num_heads + num_kv_heads) * width for num_kv_heads, width in heads)
    latent = model.latent
    expanded = latent.nope_dim + latent.value_dim + latent.key_dim
    return model.num_heads * (latent.key_dim + latent.value_dim + 2 * expanded)


def memory_plans(
    model: str,
    drafter: str | None,
    total: int,
    kv_dtype: KVDtypeName = "auto",
    tensor_parallel: int = 1,
    draft_lm_head: DraftLmHeadName = "model",
) -> tuple[MemoryPlan, ...]:
    """The plans by K on a GPU of ``total`` bytes, else as by default; without ``drafter`` that of plain decoding.

    With ``tensor_parallel`` it is each of so many GPUs. ``UserError`` for a pair that does not fit together, or for a
    target that they cannot share.
    """
    lengths = _LENGTHS if drafter is not None else _LENGTHS[:1]
    configs = [replace(_config(model, drafter, k), draft_lm_head=draft_lm_head) for k in lengths]
    checkpoints = open_checkpoints(configs[-1])
    kv_dtype = choose_kv_dtype(kv_dtype, checkpoints["model"])
    configs = [replace(config, kv_dtype=kv_dtype, tensor_parallel=tensor_parallel) for config in configs]
    target, weights = _target(checkpoints["model"], configs[0])
    head = _head(checkpoints["drafter"], configs[0], target) if "drafter" in checkpoints else None
    return tuple(
        MemoryPlan(
            config=config,
            total=total,
            weights=weights + (head[1] if head is not None and config.head is not None else 0),
            target=target.config,
            head=None if head is None else head[0],
        )
        for config in configs
    )


def _config(model: str, drafter: str | None, num_spec_tokens: int) -> EngineConfig:
    return EngineConfig(
        model=model,
        drafter=drafter,
        num_spec_tokens=num_spec_tokens,
        dtype="bfloat16",
        page_size=TrtllmBackend.capabilities.page_size,
        cuda_graphs="step",  # as on a GPU
    )


def _target(checkpoint: Checkpoint, config: EngineConfig) -> tuple[Target, int]:
    """The outline of a target, or a rank's share, and the bytes of its weights as loaded, from its files' headers."""
    reader = replace(_reader(checkpoint, config), ranks=Ranks(size=config.tensor_parallel))
    return build_target(target_config(checkpoint), reader), sum(reader.taken.values())


def _head(checkpoint: Checkpoint, config: EngineConfig, target: Target) -> tuple[HeadConfig, int]:
    """The config of a head, and such bytes of its own, a copy of the target's output weights among them."""
    ranks, nothing = Ranks(size=config.tensor_parallel), torch.empty(0, device=_META)
    reader = replace(_reader(checkpoint, config), ranks=ranks)
    known = fitting_config(checkpoint, target.config, ranks.size, config.draft_lm_head == "fp8")
    build_head(known, reader, no_target(), nothing)
    copy = target.vocabulary.in_fp8()
    copied = known.fp8_output and not known.own_lm_head and copy is not target.vocabulary
    return known.shared(ranks.size), sum(reader.taken.values()) + copied * copy.weight.num_bytes


def _reader(checkpoint: Checkpoint, config: EngineConfig) -> TensorReader:
    return TensorReader(checkpoint=checkpoint, dtype=DTYPES[config.dtype], device=_META)


_COLUMNS = (
    Column(name="num_spec_tokens", title="K"),
    *(
        Column(name=name, title=title, unit="GiB", show=lambda size: f"{size / _GIB:.2f}")
        for name, title in (
            ("weights", "weights"),
            ("workspace", "CUDA, workspace"),
            ("passes", "passes"),
            ("states", "states"),
            ("kv_cache", "KV cache"),
        )
    ),
    Column(name="kv_bytes_per_token", title="bytes per token"),
    Column(name="num_pages", title="pages"),
    Column(name="windowed_pages", title="of windows"),
    Column(name="num_sequences", title="sequences"),
)


def of_plans(plans: tuple[MemoryPlan, ...]) -> Iterator[Part]:
    """What a terminal shows of the plans."""
    first, config = plans[0], plans[0].config
    each = "" if config.tensor_parallel == 1 else f" on each of {config.tensor_parallel} GPUs"
    share = f"{config.gpu_memory_utilization:g} of {first.total / _GIB:,.1f} GiB{each}"
    yield (
        f"Memory plan for {share} (--gpu-memory-utilization), {config.formats}, pages of {config.page_size} positions, "
        f"prefill of {count(config.max_prefill_tokens)} tokens:"
    )
    yield Table(title="Memory plan", columns=first.columns, rows=tuple(plan.to_json() for plan in plans))
    if (window := first.target.kv_spec.window) is not None:
        usual = min(_USUAL, first.target.max_positions)
        taken = first.bytes_of_sequence(usual)
        yield (
            f"Pages of layers with a window go back behind its {count(window)} positions: a sequence of "
            f"{count(usual)} tokens takes {taken / _GIB:.2f} GiB of KV cache, "
            f"not {usual * first.kv_bytes_per_token / _GIB:.2f}."
        )
    most = max(plan.num_sequences for plan in plans)
    yield (
        f"sequences = of {count(first.length)} tokens, prompt and output, at once: what --max-batch-size can be. "
        "Passes are estimated here; an engine measures them when it starts. Where answers have to fit something, "
        f"its tables take {max(plan.constraints for plan in plans) / _GIB:.2f} GiB more of what the KV cache has here."
        if most
        else f"Not one sequence of {count(first.length)} tokens fits: a larger GPU is needed, or --tensor-parallel."
    )
