"""What will run: ``auto`` becomes a device, number formats, a backend and graphs; the modules that they need."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from specgen.attention import Backend, Gpu, Heads, Use
from specgen.attention.flashinfer_paged import FlashInferBackend
from specgen.attention.hopper import HopperBackend
from specgen.attention.sdpa import SdpaBackend, StaticSdpaBackend
from specgen.attention.trtllm import TrtllmBackend
from specgen.checkpoints.checkpoint import drafter_config, target_config
from specgen.checkpoints.tensor_reader import Checkpoint
from specgen.config import (
    AttentionName,
    DtypeName,
    EngineConfig,
    GraphsName,
    KVDtypeName,
    SamplingParams,
    UserError,
    require,
    shown,
)
from specgen.core.graphs import PassGraphs, Runner, StepGraphs, bucket
from specgen.core.packing import BLOCK, MOST_BLOCKS
from specgen.decoding import sampling
from specgen.device import total_memory, use
from specgen.engine.earlier_answers import require_same_tokens
from specgen.models.fp8_config import FP8 as FP8_SCHEME
from specgen.models.fp8_config import kv_scheme
from specgen.models.model_config import LayerConfig
from specgen.ops import block_fp8, hopper_linear
from specgen.ops.jit_modules import Module, runs_on
from specgen.report.display import several
from specgen.text.chat_template import calls_for_date, today

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FP8 = torch.float8_e4m3fn
Checkpoints = Mapping[str, Checkpoint]  # "model" and, where a head drafts, "drafter"
BACKENDS: dict[AttentionName, type[Backend]] = {
    "hopper": HopperBackend,
    "trtllm": TrtllmBackend,
    "flashinfer": FlashInferBackend,
    "sdpa": SdpaBackend,
    "sdpa-static": StaticSdpaBackend,
}
_AUTO: dict[str, tuple[AttentionName, ...]] = {  # the first that runs the model
    "cpu": ("sdpa",),
    "cuda": ("hopper", "trtllm", "flashinfer", "sdpa"),
}
_ON_CPU, _ON_GPU = 32, 256  # sequences of a batch; more give a GPU little
_USUAL, _ROWS = 1024, 8  # tokens of a sequence, and rows that it has in a step
RUNNERS: dict[GraphsName, type[Runner]] = {"step": StepGraphs, "pass": PassGraphs, "off": Runner}


def resolve(config: EngineConfig, checkpoints: Checkpoints) -> EngineConfig:
    """``config`` with every ``auto`` replaced by what will run; ``UserError`` for what cannot run here.

    Drafts without a checkpoint get their full name, ``ngram:N``, and a chat template that asks for the date gets
    today's. A target with recurrent states has no prefix cache: they are those behind the last position alone.
    """
    device = choose_device(config.device)
    require_devices(device, config.tensor_parallel)
    kind, dtype = device.type, choose_dtype(config.dtype, device)
    kv_dtype = choose_kv_dtype(config.kv_dtype, checkpoints["model"])
    config = replace(config, device=str(device), dtype=dtype, kv_dtype=kv_dtype)
    attention, _ = choose_attention(config, checkpoints)
    capabilities = BACKENDS[attention].capabilities
    graphs = config.cuda_graphs
    if graphs == "auto":
        graphs = "step" if kind == "cuda" and not capabilities.needs_host_lens else "off"
    require(
        graphs == "off" or (kind == "cuda" and not capabilities.needs_host_lens),
        f"cuda-graphs is {graphs!r} but attention {attention!r} on {kind!r} cannot be captured: "
        "use --cuda-graphs off, or on a GPU --attention auto, or in float32 sdpa-static",
    )
    require_same_tokens(config, checkpoints["model"])
    config = replace(config, max_batch_size=config.max_batch_size or choose_batch_size(config, checkpoints))
    dated = calls_for_date(checkpoints["model"].path)
    return replace(
        config,
        chat_template_kwargs=config.template_kwargs.with_date(today()) if dated else config.template_kwargs,
        drafter=config.drafter if config.lookup is None else config.lookup.name,
        attention=attention,
        cuda_graphs=graphs,
        page_size=config.page_size or capabilities.page_size,
        prefix_cache=config.prefix_cache and target_config(checkpoints["model"]).state_spec is None,
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
        f"device is {name!r}: use auto, cpu, cuda or cuda:N",
    )
    require(
        torch.cuda.is_available(),
        f"device is {name!r} but torch {torch.__version__} finds no GPU: use --device cpu",
    )
    index, count = int(number) if number else torch.cuda.current_device(), torch.cuda.device_count()
    require(index < count, f"device is {name!r} and there are {count} GPUs: use cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


@cache
def _first_process() -> int:
    """Where an engine was first made; a forked child has its parent's answer."""
    return os.getpid()


def require_not_forked(device: torch.device) -> None:
    """``UserError`` in a fork of a process that has made an engine: work would wait there for ever, or fail.

    The threads of OpenMP do not come along, and CUDA cannot be used.
    """
    first = _first_process()
    require(
        first == os.getpid() or (device.type == "cpu" and torch.get_num_threads() == 1),
        f"an engine has run in process {first}, of which this one is a fork, so none can run here: leave num_proc out "
        "(one engine answers whole batches), start processes by spawn, or make the first engine in them"
        + (", or set OMP_NUM_THREADS=1 before the start" if device.type == "cpu" else ""),
    )


def require_devices(first: torch.device, count: int) -> None:
    """``UserError`` unless there are ``count`` GPUs from ``first`` on; a CPU is as many devices as one likes."""
    if first.type == "cuda":
        there = torch.cuda.device_count() - (first.index or 0)
        require(
            count <= there,
            f"tensor-parallel is {count} and from {first} on there {'is' if there == 1 else 'are'} {there} of this "
            f"machine's GPUs: use --tensor-parallel {there}, or another --device",
        )


def choose_dtype(name: DtypeName, device: torch.device) -> DtypeName:
    """The number format ``name`` stands for on ``device``."""
    if name == "auto":
        return "float32" if device.type == "cpu" else "bfloat16"
    return name


def choose_kv_dtype(name: KVDtypeName, target: Checkpoint) -> KVDtypeName:
    """What ``name`` stands for with this target; ``UserError`` where the scales of its KV cache are not for FP8."""
    scheme = kv_scheme(target.config)
    if name == "auto":
        return "fp8" if scheme == FP8_SCHEME else "model"
    require(
        name == "model" or scheme in (None, FP8_SCHEME),
        f"kv-dtype is {name!r} but {target.name} has scales for a KV cache of {shown(scheme)}: use --kv-dtype model",
    )
    return name


def choose_batch_size(config: EngineConfig, checkpoints: Checkpoints) -> int:
    """Sequences of a batch that pay on the device of ``config``, whose device and number formats are resolved.

    On a GPU no more than its memory holds with ``_USUAL`` tokens each beside the weights: by an estimate of KV cache,
    recurrent states and logits (which are reserved twice) from the target's files. What drafts does not count, so that
    all arms over a target, plain decoding too, have as many and can be compared.
    """
    device = torch.device(config.device)
    if device.type == "cpu":
        return _ON_CPU
    target = target_config(checkpoints["model"]).shared(config.tensor_parallel)
    width = DTYPES[config.dtype].itemsize
    kv = target.kv_spec.bytes_per_token(width) * min(_USUAL, target.max_positions)
    states = target.state_spec.bytes_per_sequence(_ROWS, width) if target.state_spec is not None else 0
    weights = sum(file.stat().st_size for file in checkpoints["model"].files)
    left = total_memory(device) * config.gpu_memory_utilization - weights / config.tensor_parallel
    beside = states + 2 * _ROWS * target.vocab_size * (width + 4)
    most = left / (kv + beside) if config.kv_memory is None else config.kv_memory / (kv + states)
    return int(min(max(most, 1), _ON_GPU))


def target_kv_dtype(config: EngineConfig) -> torch.dtype:
    """Of the pages of the target in a resolved ``config``; those of a head are in the model's own format.

    A head has few layers, and no checkpoint says what its keys and values are to be divided by.
    """
    assert config.kv_dtype != "auto", "kv_dtype is not resolved"
    return FP8 if config.kv_dtype == "fp8" else DTYPES[config.dtype]


def kv_note(config: EngineConfig, asked: EngineConfig, checkpoints: Checkpoints) -> dict[str, str]:
    """What a report says of the KV cache of a resolved ``config``; nothing where it is in the model's format."""
    if config.kv_dtype != "fp8":
        return {}
    why = "as asked" if asked.kv_dtype == "fp8" else "as the checkpoint says"
    drafter = None if config.head is None else drafter_config(checkpoints["drafter"], None)
    head = "" if drafter is None or drafter.reads_target_kv else f"; the head's in {config.dtype}"
    return {"KV cache": f"FP8 (e4m3), {why}{head}"}


def choose_attention(config: EngineConfig, checkpoints: Checkpoints) -> tuple[AttentionName, str]:
    """The backend that ``config``, whose device and number formats are resolved, runs on, and why that one."""
    device = torch.device(config.device)
    names = _AUTO[device.type] if config.attention == "auto" else (config.attention,)
    uses, passed_over = attention_uses(config, checkpoints), list[str]()
    for name in names:
        backend = BACKENDS[name]
        page_size = config.page_size or backend.capabilities.page_size
        refusals = (
            backend.capabilities.refusal(device, replace(each.heads, page_size=page_size)) for each in uses
        )
        reason = next((reason for reason in refusals if reason), None)
        if reason is None:
            if config.attention != "auto":
                return name, "as asked"
            return name, "; ".join([*passed_over, backend.summary])
        passed_over.append(f"{name} {reason.partition(':')[0]}")
    raise UserError(f"attention {names[-1]!r} {reason}")


def attention_note(config: EngineConfig, checkpoints: Checkpoints) -> str:
    """What a report says of the attention of a resolved ``config``: the backend, and on a GPU its kernels by pass.

    As in ``trtllm (XQA: 1 row, 5 rows; FlashInfer FA3: prefill)``, where rows are those of a sequence.
    """
    backend, device = BACKENDS[config.attention], torch.device(config.device)
    if device.type == "cpu":
        return config.attention
    gpu = Gpu.of(device)
    passes: dict[str, dict[str, None]] = {}  # by kernel, in order

    def runs(kernel: str, what: str) -> None:
        passes.setdefault(kernel, {})[what] = None

    for each in attention_uses(config, checkpoints):
        for rows in sorted(set(each.query_lens)):
            what = "short prefill" if each.chained else several(rows, "row")
            alone, most = (backend.kernel(gpu, each, rows, count) for count in (1, each.num_sequences))
            runs(alone, what)
            if most != alone:
                runs(most, f"{what} of many sequences")
        for rows in each.chunk_rows:  # as a chained pass, on a kernel that does not rotate
            kernel = backend.kernel(gpu, replace(each, chained=True), rows, each.num_sequences)
            runs(kernel, f"{several(rows, 'row')} in chunks")
        if each.partial:
            runs(backend.kernel(gpu, each, "partial", each.num_sequences), "a part of the drafts")
        if each.prefills:
            runs(backend.kernel(gpu, each, "prefill", 1), "prefill")
    kernels = "; ".join(f"{kernel}: {', '.join(found)}" for kernel, found in passes.items())
    return f"{config.attention} ({kernels})"


def attention_uses(config: EngineConfig, checkpoints: Checkpoints) -> list[Use]:
    """How passes attend with the target and, where one drafts, the head, from their checkpoints' headers."""
    lengths = config.draft_length.lengths
    target = target_config(checkpoints["model"]).shared(config.tensor_parallel)
    rows = tuple(1 + num_drafts for num_drafts in lengths)
    main = _uses(config, target, target_kv_dtype(config), rows, prefills=True)
    uses = [replace(each, partial=config.draft_length.kind == "auto") for each in main]
    if config.cuda_graphs in ("step", "pass") and target.prompts_in_blocks:
        short = _uses(config, target, target_kv_dtype(config), (BLOCK,), prefills=False)
        uses += [replace(each, num_sequences=MOST_BLOCKS, chained=True) for each in short]
    if config.head is not None:
        head = drafter_config(checkpoints["drafter"], None).shared(config.tensor_parallel)
        # its prefill writes keys and values alone, unless it is a model
        of_head = {head.pass_rows(each) for each in lengths if each} | set(rows if head.is_model else ())
        pages = target_kv_dtype(config) if head.reads_target_kv else DTYPES[config.dtype]
        found = _uses(config, head, pages, tuple(sorted(of_head)), prefills=head.is_model)
        uses += [replace(each, stores=not head.reads_target_kv) for each in found]
    return uses


def _uses(
    config: EngineConfig, model: LayerConfig, kv_dtype: torch.dtype, rows: tuple[int, ...], *, prefills: bool
) -> list[Use]:
    """One for each shape of heads that layers have."""
    windows: dict[tuple[int, int], set[bool]] = {}
    for index in range(model.num_layers):
        windows.setdefault(model.kv_heads(index), set()).add(model.window(index) is not None)
    return [
        Use(
            heads=Heads(
                num_heads=model.num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                dtype=DTYPES[config.dtype],
                kv_dtype=kv_dtype,
                page_size=config.page_size,
                max_query_len=config.draft_length.most + 1,
                sinks=model.sinks,
                chunk=model.chunk,
                latent=model.latent,
            ),
            windowed=tuple(sorted(windowed)),
            query_lens=rows,
            prefills=prefills,
            num_sequences=bucket(config.max_batch_size),
        )
        for (num_kv_heads, head_dim), windowed in windows.items()
    ]


def needed_modules(config: EngineConfig, checkpoints: Checkpoints, expected: SamplingParams) -> list[Module]:
    """Those of a resolved ``config`` on its GPU; none on a CPU. ``expected`` as for ``build_engine``."""
    device = torch.device(config.device)
    if device.type != "cuda":
        return []
    use(device)
    found = modules_of(config, checkpoints, expected, Gpu.of(device))
    if runs_on(device):
        found += gemm_modules(config, checkpoints)
    return found


def modules_of(
    config: EngineConfig, checkpoints: Checkpoints, expected: SamplingParams, gpu: Gpu
) -> list[Module]:
    """The same of a rank alone, on any ``gpu``."""
    backend = BACKENDS[config.attention]
    attending = (backend.modules(gpu, each) for each in attention_uses(config, checkpoints))
    return [*(module for modules in attending for module in modules), *sampling_modules(expected)]


def sampling_modules(expected: SamplingParams) -> list[Module]:
    """FlashInfer's, where top-k or top-p are asked for."""

    def spec() -> Any:  # noqa: ANN401
        from flashinfer.jit.sampling import gen_sampling_module

        return gen_sampling_module()

    filtered = sampling.HAS_FLASHINFER and sampling.SamplingForm.of([expected]).kind == "filtered"
    return [Module(what="top-k and top-p", spec=spec)] if filtered else []


def gemm_modules(config: EngineConfig, checkpoints: Checkpoints) -> list[Module]:
    """Those of ``hopper_linear``, where it runs, and of the GEMMs of block FP8 that a pass is long enough for."""
    if config.dtype != "bfloat16":
        return []
    layers = target_config(checkpoints["model"]).shared(config.tensor_parallel)
    in_fp8 = layers.fp8 is not None and layers.fp8.activations != "group"
    in_fp8 |= config.head is not None and config.draft_lm_head == "fp8"
    found = [*hopper_linear.modules("bf16"), *(hopper_linear.modules("fp8") if in_fp8 else ())]
    in_blocks = layers.fp8 is not None and layers.fp8.activations == "group"
    rows = max(config.max_prefill_tokens, config.max_batch_size * (config.draft_length.most + 1))
    if in_blocks and rows >= block_fp8.FEWEST_ROWS:
        found += [block_fp8.module(*shape) for shape in _shapes(layers) if block_fp8.fits(*shape)]
    return found


def _shapes(layers: LayerConfig) -> list[tuple[int, int]]:
    """[outputs, inputs] of the layers' weights, but of experts; of MTP layers all but one are the target's."""
    shapes, hidden = _attention_shapes(layers), layers.hidden_size
    mixtures = [layers.mixture_of(index) for index in range(layers.num_layers)]
    dense = {layers.intermediate_size for each in mixtures if each is None}
    beside = {each.shared_width for each in mixtures if each is not None and each.num_like_experts != 1}
    for width in sorted((dense | beside) - {0}):
        shapes += [(2 * width, hidden), (hidden, width)]
    return list(dict.fromkeys(shapes))


def _attention_shapes(layers: LayerConfig) -> list[tuple[int, int]]:
    hidden, latent = layers.hidden_size, layers.latent
    if latent is None:
        found = list[tuple[int, int]]()
        for num_kv_heads, width in dict.fromkeys(map(layers.kv_heads, range(layers.num_layers))):
            heads = layers.num_heads * width
            qkv = heads * (2 if layers.query_gates else 1) + 2 * num_kv_heads * width
            found += [(hidden, heads), *([] if layers.qkv_bias else [(qkv, hidden)])]
        delta = layers.delta
        if delta is not None and any(delta.layers):
            values = delta.num_value_heads * delta.value_dim
            found += [(delta.num_channels + values, hidden), (hidden, values)]
        return found
    queries, out = layers.num_heads * latent.key_dim, (hidden, layers.num_heads * latent.value_dim)
    if latent.query_rank is None:
        return [(queries + latent.width, hidden), out]
    return [(latent.query_rank + latent.width, hidden), (queries, latent.query_rank), out]
