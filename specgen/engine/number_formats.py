"""The number formats of a configuration as torch has them, and the checkpoints that it names."""

from collections.abc import Mapping

import torch

from specgen.checkpoints.tensor_reader import Checkpoint
from specgen.config import EngineConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FP8 = torch.float8_e4m3fn
Checkpoints = Mapping[str, Checkpoint]  # "model" and, where a head drafts, "drafter"


def target_kv_dtype(config: EngineConfig) -> torch.dtype:
    """Of the pages of the target in a resolved ``config``; those of a head are in the model's own format.

    A head has few layers, and no checkpoint says what its keys and values are to be divided by.
    """
    assert config.kv_dtype != "auto", "kv_dtype is not resolved"
    return FP8 if config.kv_dtype == "fp8" else DTYPES[config.dtype]
