"""Where ``auto`` becomes what will run: device, number format, attention backend, CUDA graphs, page size."""

from dataclasses import replace

import torch

from specgen.attention import Backend, Heads
from specgen.attention.flashinfer_paged import FlashInferBackend
from specgen.attention.sdpa import SdpaBackend, StaticSdpaBackend
from specgen.attention.trtllm import TrtllmBackend
from specgen.checkpoints.checkpoint import drafter_config, target_config
from specgen.config import AttentionName, DtypeName, EngineConfig, GraphsName, UserError, require
from specgen.core.graphs import PassGraphs, Runner, StepGraphs
from specgen.device import choose_device, require_devices
from specgen.engine.loading import DTYPES, Checkpoints
from specgen.models.model_config import LayerConfig
from specgen.text.chat_template import calls_for_date, today

BACKENDS: dict[AttentionName, type[Backend]] = {
    "trtllm": TrtllmBackend,
    "flashinfer": FlashInferBackend,
    "sdpa": SdpaBackend,
    "sdpa-static": StaticSdpaBackend,
}
_AUTO: dict[str, tuple[AttentionName, ...]] = {  # the first that runs the model
    "cpu": ("sdpa",),
    "cuda": ("trtllm", "flashinfer", "sdpa"),
}
RUNNERS: dict[GraphsName, type[Runner]] = {"step": StepGraphs, "pass": PassGraphs, "off": Runner}


def resolve(config: EngineConfig, checkpoints: Checkpoints) -> EngineConfig:
    """``config`` with every ``auto`` replaced by what will run; ``UserError`` for what cannot run here.

    N-gram drafts get their full name, ``ngram:N``, and a chat template that asks for the date is told today's.
    """
    device = choose_device(config.device)
    require_devices(device, config.tensor_parallel)
    kind, dtype = device.type, choose_dtype(config.dtype, device)
    attention, _ = choose_attention(replace(config, device=str(device), dtype=dtype), checkpoints)
    capabilities = BACKENDS[attention].capabilities
    graphs = config.cuda_graphs
    if graphs == "auto":
        graphs = "step" if kind == "cuda" and capabilities.graphs else "off"
    require(
        graphs == "off" or (kind == "cuda" and capabilities.graphs),
        f"cuda-graphs is {graphs!r} but attention {attention!r} on {kind!r} cannot be captured: "
        "use --cuda-graphs off, or on a GPU --attention trtllm, or in float32 sdpa-static",
    )
    dated = calls_for_date(checkpoints["model"].path)
    return replace(
        config,
        chat_template_kwargs=config.template_kwargs.with_date(today()) if dated else config.template_kwargs,
        drafter=config.drafter if config.ngram is None else f"ngram:{config.ngram}",
        device=str(device),
        dtype=dtype,
        attention=attention,
        cuda_graphs=graphs,
        page_size=config.page_size or capabilities.page_size,
    )


def choose_dtype(name: DtypeName, device: torch.device) -> DtypeName:
    """The number format ``name`` stands for on ``device``."""
    if name == "auto":
        return "float32" if device.type == "cpu" else "bfloat16"
    return name


def choose_attention(config: EngineConfig, checkpoints: Checkpoints) -> tuple[AttentionName, str]:
    """The backend that ``config``, whose device and dtype are resolved, runs on, and why that one."""
    device = torch.device(config.device)
    names = _AUTO[device.type] if config.attention == "auto" else (config.attention,)
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
            return name, "; ".join([*passed_over, backend.summary])
        passed_over.append(f"{name} {reason.partition(':')[0]}")
        if config.attention != "auto":
            raise UserError(f"attention {name!r} {reason}")
    raise AssertionError("the last choice runs everything")


def _heads(config: EngineConfig, checkpoints: Checkpoints) -> list[Heads]:
    """What target and, where one drafts, head ask of attention, from their checkpoints' headers."""
    models: list[LayerConfig] = [target_config(checkpoints["model"])]
    if config.head is not None:
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
            max_query_len=config.draft_length.most + 1,
            sinks=model.sinks,
        )
        for model in models
    ]
