"""Lower bounds on the time of a decode step and its parts: bytes read over bandwidth, FLOPs over FLOP/s.

The bandwidth and the FLOP/s are those of a large copy within the device's memory and of a large GEMM.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from specgen.checkpoints.checkpoint import build_head, build_target, drafter_config, target_config
from specgen.checkpoints.tensor_reader import TensorReader
from specgen.device import synchronize, use
from specgen.engine.loading import Models
from specgen.models.dflash import DFlashConfig
from specgen.models.eagle import Eagle1Config
from specgen.models.gemma4_assistant import AssistantConfig
from specgen.models.llama4 import EagleLlama4Config, Llama4Config
from specgen.models.model_config import LayerConfig
from specgen.models.mtp import MtpConfig
from specgen.record.record_rows import EngineRow, PassRow, RequestRow

COPIED_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}  # far larger than any cache
_SQUARES = {"cuda": 8192, "cpu": 512}  # sides of the matrices
_REPEATS = 15
_MXFP4_BYTES = 0.5 + 1 / 32  # per value: 4 bits, and a scale of 32 values


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a large copy within the memory of ``device``."""
    use(torch.device(device))  # the one that ``synchronize`` waits for
    num_bytes = COPIED_BYTES[torch.device(device).type]
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _median_seconds(lambda: target.copy_(source))


def shown_bandwidth(bytes_per_second: float) -> str:
    """A bandwidth in TB/s, or in GB/s below 1 TB/s."""
    if bytes_per_second < 1e12:
        return f"{bytes_per_second / 1e9:.3g} GB/s"
    return f"{bytes_per_second / 1e12:.3g} TB/s"


def matrix_flops(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a GEMM of large square matrices."""
    use(torch.device(device))
    side = _SQUARES[torch.device(device).type]
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / _median_seconds(lambda: left @ right)


def _median_seconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The least work of a part of a step."""

    num_bytes: float
    flops: float  # of GEMMs, without attention
    cache_bytes: float = 0.0  # of num_bytes, those of the KV cache and of recurrent states

    def __add__(self, other: "Work") -> "Work":
        return Work(
            num_bytes=self.num_bytes + other.num_bytes,
            flops=self.flops + other.flops,
            cache_bytes=self.cache_bytes + other.cache_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Called with a number of positions, those that the last row sees: all, or of a window or its chunk alone."""

    window: int | None = None
    chunk: int | None = None

    @classmethod
    def of(cls, config: LayerConfig, index: int) -> "Seen":
        """Of layer ``index``."""
        match config:
            case Llama4Config():
                return cls(chunk=config.chunk if config.rotated[index] else None)
            case EagleLlama4Config():
                return cls(chunk=config.chunk)
        return cls(window=config.window(index))

    def __call__(self, context: float) -> float:
        if self.chunk is not None:
            return (context - 1) % self.chunk + 1
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True, kw_only=True)
class KVBytes:
    """The keys and values that a pass reads of one sequence, in bytes."""

    layers: tuple[tuple[int, Seen], ...]  # bytes per position, and which positions

    @classmethod
    def of(cls, config: LayerConfig, bytes_per_value: int) -> "KVBytes":
        """The KV bytes of a target or a head."""
        each = bytes_per_value * config.kv_spec.num_planes
        attending = filter(config.attends, range(config.num_layers))
        return cls(
            layers=tuple((each * prod(config.kv_heads(index)), Seen.of(config, index)) for index in attending)
        )

    def at(self, context: float) -> float:
        """At ``context`` positions; a layer with a window, or in chunks, reads no more than it sees."""
        return sum(num_bytes * seen(context) for num_bytes, seen in self.layers)


@dataclass(frozen=True, kw_only=True)
class ExpertSize:
    """The experts of a target: how many there are, and what one of them takes."""

    num_layers: int  # that are mixtures
    num_experts: int  # of a layer
    num_chosen: int  # by a row in a layer
    num_values: int  # weights of one expert
    num_bytes: int  # that reading one expert takes, its biases included

    @classmethod
    def of(cls, config: LayerConfig, bytes_per_value: int) -> "ExpertSize | None":
        """The experts of a target or a head whose plain weights take ``bytes_per_value``; None for a dense one."""
        mixture = config.mixture
        if mixture is None:
            return None
        num_values = 3 * config.hidden_size * mixture.width  # gate, up and down
        num_biases = 2 * mixture.width + config.hidden_size if mixture.biases else 0
        weights = num_values * (_MXFP4_BYTES if mixture.mxfp4 else bytes_per_value)
        first = f"layers.{mixture.layers.index(True)}.mlp.experts.0.gate_proj"
        if config.fp8 is not None and not config.fp8.ignores(config.prefix + first):
            gate = config.fp8.num_scales(mixture.width, config.hidden_size)
            down = config.fp8.num_scales(config.hidden_size, mixture.width)
            weights = num_values + 4 * (2 * gate + down)
        return cls(
            num_layers=sum(mixture.layers),
            num_experts=mixture.num_experts,
            num_chosen=mixture.num_chosen,
            num_values=num_values,
            num_bytes=int(weights) + num_biases * bytes_per_value,
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of all experts of all layers."""
        return self.num_layers * self.num_experts * self.num_bytes

    def touched(self, num_rows: float) -> float:
        """Experts of a layer that so many rows choose on average: an estimate, as if each chose evenly and by itself.

        Rows that choose alike, as those of one text may, touch fewer.
        """
        left: float = (1 - self.num_chosen / self.num_experts) ** num_rows  # the share that none chooses
        return self.num_experts * (1 - left)

    def work(self, passes: int, num_rows: float) -> "Work":
        """The work of ``passes`` of ``num_rows`` each."""
        return Work(
            num_bytes=passes * self.num_layers * self.touched(num_rows) * self.num_bytes,
            flops=2.0 * passes * self.num_values * self.num_chosen * self.num_layers * num_rows,
        )


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """The least that the passes of a decode step read, in bytes.

    Gathered embedding rows and writes are left out: they are thousands of times smaller, but for recurrent states, each
    of which is read and written once. Of a mixture's experts a pass reads those that its rows touch: see
    ``ExpertSize.touched``.
    """

    target: int  # weights of one pass, without experts
    target_kv: KVBytes
    target_states: int = 0  # of a sequence, read and written
    logits: int  # per row
    lm_head: int = 0  # of ``target``
    bytes_per_value: int
    head_fill: int = 0  # weights of the drafter KV fill: all that the last layer's keys and values need
    head_pass: int = 0  # weights per drafting pass, without experts
    head_experts: ExpertSize | None = None  # of such a pass
    head_is_model: bool = False  # whose KV fill is a whole pass, and gives the first draft
    head_in_parallel: bool = False  # one pass of K rows per sequence drafts them all
    head_draft: int = 0  # weights per draft beside that pass: a Markov head's
    head_kv: KVBytes = KVBytes(layers=())  # per pass
    experts: ExpertSize | None = None

    @classmethod
    def of(cls, models: Models, kv_width: int | None = None) -> "StepBytes":
        """The bytes of a loaded target and its head, if it has one; of a rank's share, what its GPU reads.

        ``kv_width`` is the bytes of a number in the target's KV cache, None for those of the model's dtype, which the
        head's has in any case.
        """
        target, width = models.target.config, models.target.dtype.itemsize
        meta, ranks = torch.device("meta"), models.target.vocabulary.ops.ranks
        readers = {
            role: TensorReader(checkpoint=checkpoint, dtype=models.target.dtype, device=meta, ranks=ranks)
            for role, checkpoint in models.checkpoints.items()
        }
        outline = build_target(target_config(models.checkpoints["model"]), readers["model"])
        lm_head = outline.vocabulary.weight.num_bytes
        experts = ExpertSize.of(target, width)
        sizes = cls(
            target=_read_whole(readers["model"])
            + lm_head * target.tied_embeddings
            - (experts.total_bytes if experts else 0),
            target_kv=KVBytes.of(target, kv_width or width),
            target_states=0 if target.state_spec is None else 2 * target.state_spec.num_bytes,
            logits=len(outline.vocabulary.rows) * width,
            lm_head=lm_head,
            bytes_per_value=width,
            experts=experts,
        )
        if models.head is None:
            return sizes
        head, drafter = models.head.config, readers["drafter"]
        whole = drafter_config(models.checkpoints["drafter"], target.num_layers)
        whole = replace(whole, fp8_output=head.fp8_output)
        build_head(whole, drafter, models.target, models.head.draft_to_target)
        if head.fp8_output:
            lm_head = outline.vocabulary.in_fp8().weight.num_bytes
        each_pass = isinstance(head, Eagle1Config | EagleLlama4Config)  # and not once per accepted row
        fused = 0 if each_pass else _bytes(drafter, "fc.weight")
        borrowed = 0 if _bytes(drafter, "lm_head.weight", "shared_head.head.weight") else lm_head
        if isinstance(head, AssistantConfig):  # its output weights are its embedding
            borrowed = round(_bytes(drafter, "embed_tokens.weight") * head.output_share)
        if head.is_model:
            borrowed = 0 if _bytes(drafter, "lm_head.weight") else _bytes(drafter, "embed_tokens.weight")
        mixtures, turns = ExpertSize.of(head, width), head.num_layers if isinstance(head, MtpConfig) else 1
        kv = KVBytes.of(head, (kv_width if head.reads_target_kv else None) or width)
        per_draft = sum(size for name, size in drafter.taken.items() if name.startswith(_PER_DRAFT))
        own = _read_whole(drafter) - fused - (mixtures.total_bytes if mixtures else 0)
        return replace(
            sizes,
            head_fill=0
            if head.reads_target_kv
            else own + borrowed
            if head.is_model
            else _fill_bytes(drafter, 0 if isinstance(head, DFlashConfig) else head.num_layers - 1),
            head_pass=own // turns + borrowed - per_draft,
            head_draft=per_draft,
            head_experts=None
            if mixtures is None
            else replace(mixtures, num_layers=mixtures.num_layers // turns),
            head_is_model=head.is_model,
            head_in_parallel=models.head.one_pass is not None,
            head_kv=replace(kv, layers=kv.layers[: head.num_layers // turns]),
        )

    def prefill_flops(self, num_rows: int) -> float:
        """FLOPs of the target's GEMMs for ``num_rows`` of prompts; only the last rows have logits, left out."""
        weights = self.target - self.lm_head
        return 2 * weights / self.bytes_per_value * num_rows + _experts(self.experts, 1, num_rows).flops

    def step(self, num_spec_tokens: int, batch: int, context: float) -> float:
        """Bytes read by the passes of a step; ``accept``, which reads the logits, is none."""
        parts = self.parts(num_spec_tokens, batch, context)
        return sum(work.num_bytes for name, work in parts.items() if name != "accept")

    def parts(
        self, num_spec_tokens: int, batch: int, context: float, rows: float | None = None
    ) -> dict[str, Work]:
        """The work of each part of a step of ``batch`` sequences at ``context`` positions each.

        ``rows`` are those that the target verifies, where they are not all of them.
        """
        k = num_spec_tokens
        rows = batch * (k + 1) if rows is None else rows

        def work(weights: float, cache: float, rows_each: float) -> Work:
            flops = 2 * weights / self.bytes_per_value * rows_each
            return Work(num_bytes=weights + cache, flops=flops, cache_bytes=cache)

        cache = batch * (self.target_kv.at(context) + self.target_states)
        parts = {
            "verify": work(self.target, cache, rows) + _experts(self.experts, 1, rows),
            "accept": Work(num_bytes=rows * self.logits, flops=0.0),
        }
        if k == 0 or self.head_pass == 0:
            return parts
        passes, each = (1, batch * k) if self.head_in_parallel else (k - self.head_is_model, batch)
        read = batch * self.head_kv.at(context)
        fill = work(self.head_fill, read * self.head_is_model, rows)
        return parts | {
            "KV fill": fill + _experts(self.head_experts, 1, rows) if self.head_is_model else fill,
            "draft loop": work(passes * self.head_pass, passes * read, each)
            + work(k * self.head_draft, 0, batch)
            + _experts(self.head_experts, passes, each),
        }


def _experts(size: ExpertSize | None, passes: int, num_rows: float) -> Work:
    return Work(num_bytes=0.0, flops=0.0) if size is None else size.work(passes, num_rows)


def decode_steps(
    requests: Iterable[RequestRow], passes: Iterable[EngineRow]
) -> Iterator[tuple[PassRow, float]]:
    """The decode steps of a run, each with the positions that its sequences have on average."""
    positions = Counter[int]()  # by pass: of all its sequences
    for request in requests:
        steps = request.steps or ()
        length = request.num_prompt_tokens + request.num_output_tokens - sum(step.emitted for step in steps)
        for step in steps:
            positions[step.number] += length
            length += step.emitted
    for row in passes:
        if isinstance(row, PassRow) and row.kind == "decode":
            yield row, positions[row.number] / row.num_sequences


def _read_whole(reader: TensorReader) -> int:
    """Bytes of weights that a pass reads: all but the embeddings, of which it gathers rows."""
    gathered = ("embed_tokens.weight", "embed_tokens_per_layer.weight", "markov_w1.weight", "_codebook")
    return sum(reader.taken.values()) - _bytes(reader, *gathered)


def _bytes(reader: TensorReader, *names: str) -> int:
    return sum(num_bytes for name, num_bytes in reader.taken.items() if name.endswith(names))


_PER_DRAFT = (
    "markov_head.markov_w2.",
    "markov_head.gate_proj.",
    "markov_head.joint_proj.",
    "confidence_head.",
)


def _fill_bytes(drafter: TensorReader, num_whole: int) -> int:
    """Bytes of weights that accepted rows need: ``fc``, the first layers whole, and keys and values of the others."""
    whole, rest = (
        tuple(f"layers.{i}." for i in range(num_whole)),
        ("fc.weight", "k_proj.weight", "v_proj.weight"),
    )
    latents = ("eh_proj.weight", "kv_a_proj_with_mqa.weight")  # of every MTP layer, from the target's states
    if _bytes(drafter, *latents):
        return _bytes(drafter, *latents)

    def needed(name: str) -> bool:
        name = name.replace("midlayer.", "layers.0.")
        return name.endswith(rest) or any(part in name for part in whole)

    return sum(num_bytes for name, num_bytes in drafter.taken.items() if needed(name))
