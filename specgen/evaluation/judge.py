"""Builds a ``Judge`` from the target of a configuration."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specgen.attention import Attend
from specgen.config import EngineConfig
from specgen.engine.assembly import new_cache
from specgen.engine.choices import BACKENDS
from specgen.engine.loading import Models
from specgen.evaluation.divergence import Judge
from specgen.kv.layout import Layout
from specgen.kv.pages import PageAllocator


def judge(config: EngineConfig, models: Models) -> Judge:
    """A judge of greedy texts of the target of a resolved ``config``."""
    return Judge(
        logits_after=prefill_logits(config, models),
        dtype=models.target.dtype,
        token_text=lambda token: models.tokenizer.decode_with_special([token]),
    )


def prefill_logits(config: EngineConfig, models: Models) -> Callable[[Sequence[int]], Tensor]:
    """A function from token ids to the target's next-token logits after them, ``[V]`` float32.

    Each call is one prefill through the attention of a resolved ``config``, with its own KV cache.
    """
    target, backend = models.target, BACKENDS[config.attention](models.target.device)

    @torch.inference_mode()
    def logits(token_ids: Sequence[int]) -> Tensor:
        pages = PageAllocator(-(-len(token_ids) // config.page_size), config.page_size)
        cache = new_cache(config, target.config, pages, target.device)
        table = torch.arange(1, pages.num_pages + 1, dtype=torch.int32, device=target.device)
        layout = Layout.ragged(table[None], [0], [len(token_ids)], config.page_size)
        rows = torch.tensor(token_ids, device=target.device)
        hidden, _ = target.forward(rows, Attend(backend, cache, layout, target.rope))
        return target.logits(hidden[-1:])[0].float()

    return logits
