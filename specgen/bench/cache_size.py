"""How much KV cache the requests of a bench need, so that engines get that and no more."""

from collections.abc import Sequence

from specgen.config import EngineConfig
from specgen.core import step_costs
from specgen.core.sequence import Request
from specgen.engine.loading import Models
from specgen.engine.memory import kv_page_bytes

_WARM_UP = 192  # positions of a sequence while an engine warms up


def kv_bytes(config: EngineConfig, models: Models, requests: Sequence[Request]) -> int:
    """What the longest requests that can be in the batch together take, all of their pages."""
    least = step_costs.positions(config.num_spec_tokens) if config.spec_length == "auto" else _WARM_UP
    lengths = sorted(
        (max(len(r.prompt_token_ids) + r.sampling.max_tokens, least) for r in requests), reverse=True
    )
    longest = [length + config.num_spec_tokens + 1 for length in lengths[: config.max_batch_size]]
    return sum(-(-length // config.page_size) for length in longest) * kv_page_bytes(config, models)
