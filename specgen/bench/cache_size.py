"""How much KV cache the requests of a bench need, so that engines get that and no more."""

from collections.abc import Sequence

from specgen.build import Models
from specgen.config import EngineConfig
from specgen.models.config import kv_bytes_per_token
from specgen.sequence import Request

LEAST = (
    192  # positions of a sequence: an engine also runs something of its own to warm up and to time its steps
)


def kv_bytes(config: EngineConfig, models: Models, requests: Sequence[Request]) -> int:
    """What the longest requests that can be in the batch together take, all of their pages."""
    width, page = models.target.dtype.itemsize, config.page_size
    token_bytes = kv_bytes_per_token(models.target.config, width)
    if config.num_spec_tokens and models.head is not None:
        token_bytes += kv_bytes_per_token(models.head.config, width)
    lengths = sorted(
        (max(len(r.prompt_token_ids) + r.sampling.max_tokens, LEAST) for r in requests), reverse=True
    )
    pages = [-(-(length + config.num_spec_tokens + 1) // page) for length in lengths[: config.max_batch_size]]
    return sum(pages) * page * token_bytes
