"""How much KV cache the requests of a bench need, so that engines get that and no more."""

from collections.abc import Sequence

from specgen.config import EngineConfig
from specgen.core import step_costs
from specgen.core.sequence import Request
from specgen.engine.loading import Models

_WARM_UP = 192  # positions of a sequence while an engine warms up


def kv_bytes(config: EngineConfig, models: Models, requests: Sequence[Request]) -> int:
    """What the longest requests that can be in the batch together take, all of their pages."""
    width, page = models.target.dtype.itemsize, config.page_size
    token_bytes = models.target.config.kv_spec.bytes_per_token(width)
    if config.draft_length.most and models.head is not None:
        token_bytes += models.head.config.kv_spec.bytes_per_token(width)
    least = step_costs.positions(config.draft_length.most) if config.draft_length.auto else _WARM_UP
    lengths = sorted(
        (max(len(r.prompt_token_ids) + r.sampling.max_tokens, least) for r in requests), reverse=True
    )
    pages = [
        -(-(length + config.draft_length.most + 1) // page) for length in lengths[: config.max_batch_size]
    ]
    return sum(pages) * page * token_bytes
