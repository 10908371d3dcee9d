"""The projections around multi-head latent attention of one layer."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from specgen.models.attend import Attend, LatentLayer, LayerAttention
from specgen.models.model_config import LatentConfig, LayerConfig
from specgen.models.take import Take
from specgen.ops import Map, Norm, Ops
from specgen.ops.fp8 import plain_matrix


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """As ``layers.Attention``, for the latents that ``LatentConfig`` describes; rotary pairs are halves here."""

    enter: Map  # [rows, H] -> queries or their latent beside the latent that is stored, in one matrix
    input_scale: Tensor | None  # of its inputs in FP8; see Weight.static_scale
    queries: tuple[Norm, Map] | None  # from their latent to [rows, Hq * key_dim]
    norm: Norm  # of the first ``rank`` numbers of what is stored
    out: Map  # [rows, Hq * value_dim] -> [parts, rows, H]
    layer: LatentLayer
    config: LatentConfig

    @classmethod
    def build(
        cls, config: LayerConfig, index: int, width: int, prefix: str, take: Take, ops: Ops
    ) -> "LatentAttention":
        """Load ``{prefix}self_attn.*`` of layer ``index``, whose inputs are ``width`` wide."""
        latent, heads, prefix = config.latent, config.num_heads, f"{prefix}self_attn."
        assert latent is not None
        rank, q_rank, q_rows = latent.rank, latent.query_rank, heads * latent.key_dim
        first = {f"{prefix}q_proj": q_rows} if q_rank is None else {f"{prefix}q_a_proj": q_rank}
        enter = take.linear({**first, f"{prefix}kv_a_proj_with_mqa": latent.width}, width)
        order = [*range(q_rank)] if q_rank is not None else [*_of_queries(latent, heads)]
        enter = enter.reordered([*order, *(len(order) + row for row in _halves(latent, latent.rank))])

        kv_norm, queries = take(f"{prefix}kv_a_layernorm.weight", (rank,)), None
        if q_rank is not None:
            norm = ops.rms_norm(take(f"{prefix}q_a_layernorm.weight", (q_rank,)), config.rms_norm_eps)
            weight = take.linear({f"{prefix}q_b_proj": q_rows}, q_rank)
            queries = norm, ops.linear(weight.reordered([*_of_queries(latent, heads)]))
        up = take.linear({f"{prefix}kv_b_proj": heads * (latent.nope_dim + latent.value_dim)}, rank)
        out = take.linear({f"{prefix}o_proj": config.hidden_size}, heads * latent.value_dim)
        return cls(
            enter=ops.linear(enter),
            input_scale=enter.static_scale,
            queries=queries,
            norm=ops.rms_norm(kv_norm, config.rms_norm_eps),
            out=ops.linear_parts(out),
            layer=_layer(latent, index, plain_matrix(up, kv_norm.dtype)),  # else the forms would differ
            config=latent,
        )

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        """Project, attend, project back: [rows, width] -> [parts, rows, H]; see ``Ops.linear_parts``."""
        entered = self.enter(x)
        q = entered[:, : -self.config.width]
        if self.queries is not None:
            norm, project = self.queries
            q = project(norm(q))
        heads = q.view(len(q), -1, self.config.key_dim)
        return self.out(attend.latent(self.layer, heads, *self._stored(entered)))

    def write_kv(self, x: Tensor, attend: Attend) -> None:
        """Store the latents of [rows, width] without attending."""
        attend.write_latents(self.layer, *self._stored(self.enter(x)))

    def _stored(self, entered: Tensor) -> tuple[Tensor, Tensor]:
        """The latent behind its norm [rows, rank], and the key that all heads share [rows, rope_dim], not rotated."""
        latent, key = entered[:, -self.config.width :].tensor_split((self.config.rank,), -1)
        return self.norm(latent), key


def _layer(config: LatentConfig, index: int, up: Tensor) -> LatentLayer:
    layer = LayerAttention(index=index, scale=config.scale)
    return LatentLayer(
        expanded=layer,
        absorbed=replace(layer, value_dim=config.rank),
        up=up.view(-1, config.nope_dim + config.value_dim, config.rank),
        nope_dim=config.nope_dim,
    )


def _of_queries(config: LatentConfig, num_heads: int) -> Iterator[int]:
    """The rows of all heads' queries in the order that is computed with."""
    for head in range(num_heads):
        yield from (head * config.key_dim + row for row in _halves(config, config.nope_dim))


def _halves(config: LatentConfig, num_plain: int) -> list[int]:
    """``num_plain`` rows as they are, and behind them those of rotary pairs, the first of every pair first."""
    pairs = range(num_plain, num_plain + config.rope_dim)
    return [*range(num_plain), *([*pairs[::2], *pairs[1::2]] if config.interleaved else pairs)]
