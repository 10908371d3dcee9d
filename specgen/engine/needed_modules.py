"""Which modules a configuration needs compiled, from the headers of its checkpoints."""

import torch

from specgen.attention import Gpu
from specgen.checkpoints.checkpoint import target_config
from specgen.config import EngineConfig, SamplingParams
from specgen.decoding.sampling import sampling_modules
from specgen.device import Ranks, use
from specgen.engine.choices import BACKENDS, attention_uses
from specgen.engine.number_formats import DTYPES, Checkpoints
from specgen.models.model_config import LayerConfig
from specgen.ops import block_fp8, hopper_linear
from specgen.ops.jit_modules import Module, runs_on


def needed_modules(config: EngineConfig, checkpoints: Checkpoints, expected: SamplingParams) -> list[Module]:
    """Those of a resolved ``config`` on its GPU; none on a CPU. ``expected`` as for ``build_engine``."""
    device = torch.device(config.device)
    if device.type != "cuda":
        return []
    use(device)
    found = modules_of(config, checkpoints, expected, Gpu.of(device))
    if runs_on(device):
        found += modules_of_products(config, checkpoints)
    if config.tensor_parallel > 1:
        from specgen.ops.fused_sum import can_fuse, fused_sum_module  # of GPUs alone

        if can_fuse(Ranks(size=config.tensor_parallel), device, DTYPES[config.dtype]):
            found.append(fused_sum_module())
    return found


def modules_of(
    config: EngineConfig, checkpoints: Checkpoints, expected: SamplingParams, gpu: Gpu
) -> list[Module]:
    """The same of a rank alone, on any ``gpu``."""
    backend = BACKENDS[config.attention]
    attending = (backend.modules(gpu, each) for each in attention_uses(config, checkpoints))
    return [*(module for modules in attending for module in modules), *sampling_modules(expected)]


def modules_of_products(config: EngineConfig, checkpoints: Checkpoints) -> list[Module]:
    """Those of ``hopper_linear``, where it runs, and of products of block FP8 that a pass is long enough for."""
    if config.dtype != "bfloat16":
        return []
    layers = target_config(checkpoints["model"]).shared(config.tensor_parallel)
    in_fp8 = layers.fp8 is not None and layers.fp8.activations != "group"
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
    inner = {layers.intermediate_size if each is None else each.shared_width for each in mixtures}
    for width in sorted(inner - {0}):
        shapes += [(2 * width, hidden), (hidden, width)]
    return list(dict.fromkeys(shapes))


def _attention_shapes(layers: LayerConfig) -> list[tuple[int, int]]:
    hidden, latent = layers.hidden_size, layers.latent
    if latent is None:
        heads = layers.num_heads * layers.head_dim
        qkv = heads + 2 * layers.num_kv_heads * layers.head_dim
        return [(hidden, heads), *([] if layers.qkv_bias else [(qkv, hidden)])]
    queries, out = layers.num_heads * latent.key_dim, (hidden, layers.num_heads * latent.value_dim)
    if latent.query_rank is None:
        return [(queries + latent.width, hidden), out]
    return [(latent.query_rank + latent.width, hidden), (queries, latent.query_rank), out]
