"""Which modules a configuration needs compiled, from the headers of its checkpoints."""

import torch

from specgen.attention import Gpu
from specgen.attention.workspaces import num_sms
from specgen.checkpoints.checkpoint import target_config
from specgen.config import EngineConfig, SamplingParams
from specgen.decoding.sampling import sampling_modules
from specgen.device import use
from specgen.engine.choices import BACKENDS, attention_uses
from specgen.engine.number_formats import DTYPES, Checkpoints
from specgen.ops import cuda_source, hopper_linear
from specgen.ops.jit_modules import Module
from specgen.ranks import Ranks


def needed_modules(config: EngineConfig, checkpoints: Checkpoints, expected: SamplingParams) -> list[Module]:
    """Those of a resolved ``config`` on its GPU; none on a CPU. ``expected`` as for ``build_engine``."""
    device = torch.device(config.device)
    if device.type != "cuda":
        return []
    use(device)
    gpu = Gpu(major=torch.cuda.get_device_capability(device)[0], num_sms=num_sms(device))
    found = modules_of(config, checkpoints, expected, gpu)
    if cuda_source.runs_on(device):
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
    """Those of ``hopper_linear``, where it runs."""
    if config.dtype != "bfloat16":
        return []
    fp8 = target_config(checkpoints["model"]).fp8
    in_fp8 = fp8 is not None and fp8.activations != "group"
    return [*hopper_linear.modules("bf16"), *(hopper_linear.modules("fp8") if in_fp8 else ())]
