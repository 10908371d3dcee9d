"""The attention seam: what a layer says of itself, what a backend is and can do, and the one callable of models.

Models import nothing of this package but what this file holds. May import ops and kv.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from importlib.util import find_spec
from typing import Literal, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from specgen.attention.chunks import Temperature as Temperature
from specgen.attention.chunks import chunked
from specgen.attention.gated_delta import DeltaLayer as DeltaLayer
from specgen.attention.gated_delta import recur
from specgen.attention.planning import spread
from specgen.kv.kv_cache import KVCache
from specgen.kv.layout import HostLens, Layout
from specgen.ops import Rope, Store
from specgen.ops.jit_modules import Module, num_sms


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """A layer's attention parameters: all that an attention backend knows of the layer."""

    index: int  # of its planes in the KV cache
    scale: float  # of q . k
    window: int | None = None  # a row sees those less than this from its own; None: all
    causal: bool = True  # a row sees none behind its own; else, in a uniform pass, those of its sequence
    sinks: Tensor | None = None  # [Hq] float32: logits of no position, in the softmax's sum alone (GPT-OSS)
    k_scale: float = 1.0  # a key is its number in an FP8 page times this; see ``kv_scales``
    v_scale: float = 1.0
    value_dim: int | None = None  # values are the first numbers of the keys, so many (latents); None: stored
    rope: Rope | None = None  # that turns q and k; None: the model's
    stores: bool = True  # keys and values of its own; else it has q alone, and sees what another layer stored

    def __post_init__(self) -> None:
        assert self.window is None or self.window >= 1, self.window
        assert self.k_scale > 0, self.k_scale
        assert self.v_scale > 0, self.v_scale

    @property
    def window_left(self) -> int:
        """How many positions before its own a row sees; -1: all."""
        return -1 if self.window is None else self.window - 1

    def kv_scales(self, pages: Tensor) -> tuple[float, float]:
        """What keys and values are divided by on their way into ``pages`` and multiplied by on their way out.

        Pages in the model's number format hold them as they are.
        """
        return (self.k_scale, self.v_scale) if pages.dtype.itemsize == 1 else (1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class LatentLayer:
    """A layer's latent attention, in two forms that give the same up to rounding.

    Expanded, latents become a key and a value of each head: less work where a pass has about as many rows as positions.
    Absorbed, queries become as wide as latents, which are the keys and values of all heads, and are read once.
    """

    expanded: LayerAttention
    absorbed: LayerAttention
    up: Tensor  # [Hq, nope_dim + value_dim, rank]: from a latent to a head's key, without positions, and its value
    nope_dim: int

    def absorb(self, q: Tensor, out: Tensor) -> None:
        """Queries without positions [rows, Hq, nope_dim] as queries of latents, into ``out`` [rows, Hq, rank]."""
        torch.bmm(q.transpose(0, 1), self.up[:, : self.nope_dim], out=out.transpose(0, 1))

    def lift(self, attended: Tensor) -> Tensor:
        """What the absorbed form attended to, [rows, Hq, rank], as values [rows, Hq, value_dim]."""
        values = self.up[:, self.nope_dim :]
        out = attended.new_empty(*attended.shape[:2], values.shape[1])
        torch.bmm(attended.transpose(0, 1), values.mT, out=out.transpose(0, 1))
        return out

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated latents [n, width] as keys [n, Hq, key_dim] and values [n, Hq, value_dim], whose rows are strided."""
        latent, rotated = latents[:, : self.up.shape[2]], latents[:, None, self.up.shape[2] :]
        heads = F.linear(latent, self.up.flatten(0, 1)).view(len(latent), *self.up.shape[:2])
        keys, values = heads.tensor_split((self.nope_dim,), -1)
        return torch.cat((keys, rotated.expand(-1, len(self.up), -1)), -1), values


@dataclass(frozen=True, kw_only=True)
class LatentDims:
    """The widths of multi-head latent attention (DeepSeek-V2, 2024): a position stores one latent for all heads.

    A head's key is ``nope_dim`` numbers made of the latent and ``rope_dim`` rotated ones, which all heads share; its
    value is made of the latent too.
    """

    rank: int  # of the latent
    nope_dim: int
    rope_dim: int
    value_dim: int  # of a head

    @property
    def key_dim(self) -> int:
        """Of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def width(self) -> int:
        """Numbers that are stored of a position."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class Heads:
    """What a model and its cache ask of attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of the pages
    page_size: int
    max_query_len: int  # rows per sequence of a decode pass
    sinks: bool = False  # see LayerAttention
    chunk: int = 0  # see Attend.chunked; 0: there are none
    latent: LatentDims | None = None  # of what the cache keeps; the rest describes its absorbed form

    @property
    def group(self) -> int:
        """Heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def fp8_pages(self) -> bool:
        return self.kv_dtype.itemsize == 1


@dataclass(frozen=True, kw_only=True)
class Use:
    """How the passes of a run attend with one model. What has to be compiled for them depends on nothing else."""

    heads: Heads
    windowed: tuple[bool, ...]  # whether layers have a window; both where layers differ
    query_lens: tuple[int, ...]  # rows per sequence of its uniform passes
    prefills: bool  # whether it attends in passes of any lengths too
    num_sequences: int  # at most in a uniform pass
    chained: bool = False  # as ``Layout.chained``
    stores: bool = True  # see LayerAttention
    # whether steps may verify a part of their drafts: fewer rows than the longest, by sequence
    partial: bool = False

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        """Rows per sequence of the calls that attend in chunks, which no kernel that rotates serves; see ``chunks``."""
        return tuple(sorted({1, *self.query_lens})) if self.heads.chunk else ()


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What the choice of a kernel depends on; zeros for a CPU."""

    major: int  # of its compute capability
    num_sms: int

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """What ``device`` is."""
        if device.type != "cuda":
            return cls(major=0, num_sms=0)
        return cls(major=torch.cuda.get_device_capability(device)[0], num_sms=num_sms(device))


Check = tuple[object, tuple[object, ...] | None, str, str]


def refused(*checks: Check) -> str | None:
    """The first value that is not among those allowed (None: all are), by what it is of, and what to use instead."""
    for value, allowed, what, remedy in checks:
        if allowed is not None and value not in allowed:
            shown = " + ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            return f"does not support {what.format(shown.removeprefix('torch.'))}: use {remedy}"
    return None


def any_latents(device: torch.device, heads: Heads, latent: LatentDims) -> str | None:
    """For ``Capabilities.latents``: no bound."""
    del device, heads, latent
    return None


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend can do; the engine checks it once, at start. None: no bound."""

    devices: tuple[str, ...]  # torch device types
    package: str | None = None  # that is imported when it is used
    uniform_q_max: int | None  # longest query of a decode pass
    # Reads lengths on the host: every pass waits for the device, and no captured call stays right
    needs_host_lens: bool
    page_size: int = 16  # that suits it best
    compute_majors: tuple[int, ...] | None = None  # NVIDIA's compute capability, before the dot
    dtypes: tuple[torch.dtype, ...] | None = None
    kv_dtypes: tuple[torch.dtype, ...] | None = None
    fp8_majors: tuple[int, ...] | None = None  # as compute_majors, with FP8 pages
    page_sizes: tuple[int, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    max_group: int | None = None  # heads per KV head
    sinks: bool = False  # it adds a layer's sinks to the sums of its softmax
    # Of latent attention, as ``refusal``; None: there is none at all
    latents: Callable[[torch.device, Heads, LatentDims], str | None] | None = any_latents

    def refusal(self, device: torch.device, heads: Heads) -> str | None:
        """Why this cannot run ``heads`` on ``device`` and what to use instead, to follow its name; None if it can."""
        if device.type not in self.devices:
            return f"does not run on {device.type}: use --attention auto"
        latent = heads.latent
        if latent is not None and heads.kv_dtype != heads.dtype:
            return "does not support latents in FP8: use --kv-dtype model"
        if self.package is not None and find_spec(self.package) is None:
            install = f"pip install {self.package}-python"
            return f"needs {self.package}, which is not installed: {install}, or use --attention sdpa"
        major = torch.cuda.get_device_capability(device)[0] if self.compute_majors is not None else 0
        reason = refused(
            (major, self.compute_majors, "GPUs of compute capability {}.x", "--attention auto"),
            (heads.dtype, self.dtypes, "a model in {}", "--dtype bfloat16 or --attention sdpa"),
            (heads.kv_dtype, self.kv_dtypes, "a KV cache in {}", "--kv-dtype model"),
            (
                major,
                self.fp8_majors if heads.fp8_pages else None,
                "a KV cache in FP8 on GPUs of compute capability {}.x",
                "--kv-dtype model or --attention sdpa",
            ),
            (heads.page_size, self.page_sizes, "pages of {} positions", "pages of 16, 32 or 64"),
            (heads.head_dim, None if latent else self.head_dims, "heads of {} elements", "--attention sdpa"),
        )
        if reason is not None:
            return reason
        if heads.chunk % heads.page_size:
            return (
                f"does not cut pages of {heads.page_size} positions into chunks of {heads.chunk}: use a --page-size "
                "that divides these"
            )
        if latent is not None:
            if self.latents is None:
                return "does not support latent attention: use --attention auto"
            return self.latents(device, heads, latent)
        if self.max_group is not None and heads.group > self.max_group:
            return f"supports {self.max_group} heads per KV head, not {heads.group}: use --attention sdpa"
        if heads.sinks and not self.sinks:
            return "does not support attention sinks: use --attention sdpa"
        if self.uniform_q_max is not None and heads.max_query_len > self.uniform_q_max:
            most = self.uniform_q_max - 1
            return f"verifies {most} drafts per step, not {heads.max_query_len - 1}: use --num-spec-tokens {most}"
        return None


# Of each sequence; in the others only the device knows them: there may be padding rows in a ragged pass, and in a
# partial one, which verifies a part of the drafts, there are none
Rows = int | Literal["ragged", "partial", "prefill"]


class Kernel(Protocol):
    """Attention of one layer, planned for one layout."""

    def __call__(self, layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q ``[rows, num_heads, head_dim]`` over pages ``[num_pages, page_size, num_kv_heads, head_dim]``.

        Row r sees the positions of its own sequence up to its own, of these the last ``layer.window``; layers of one
        pass may differ in it. The sum of a head's softmax has its ``layer.sinks`` beside these positions. What pages
        hold is to be multiplied by ``layer.kv_scales``. Where ``layer.value_dim`` is set, keys and values are the same
        pages and a value is the first numbers of a key; else values may be of another width than keys. Returns
        ``[rows, num_heads * value_dim]``.
        """
        ...


class RotatingKernel(Protocol):
    """``Attend.__call__`` in one kernel, planned for one layout: it rotates, stores and attends."""

    def fits(self, layer: LayerAttention, qkv: Tensor, keys: Tensor) -> bool:
        """Whether it can do these, and fastest."""
        ...

    def __call__(self, layer: LayerAttention, qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Heads of q, k and v as for ``Attend``, pages as for ``Kernel``."""
        ...


def expansion(layout: Layout) -> tuple[Tensor, HostLens] | None:
    """All positions of a pass, sequence by sequence: slots of the cache [n] int64, and the sequences' lengths.

    None where absorbed queries of latents are better than their expanded form: in decode passes, and where most
    positions are not of this pass. So no more positions are expanded than twice the rows of a prefill.
    """
    if layout.host is None or 2 * layout.num_rows < sum(layout.host.starts) + layout.num_rows:
        return None
    sequences, positions = spread(layout.kv_lens, sum(layout.host.kv_lens))
    pages = layout.block_tables[sequences, positions // layout.page_size].long()
    return pages * layout.page_size + positions % layout.page_size, layout.host


class SdpaExpanded:
    """``Backend.expanded`` with PyTorch's attention, one sequence after another."""

    def __init__(self, host: HostLens) -> None:
        self._host = host

    def __call__(self, layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        lens = self._host.kv_lens
        split = torch.split_with_sizes
        each = zip(split(q, self._host.query_lens), split(keys, lens), split(values, lens), strict=True)
        return torch.cat([_attend_densely(layer.scale, *some) for some in each])


def _attend_densely(scale: float, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Of one sequence, whose last positions are the rows."""
    rows, positions = len(q), len(keys)
    q, keys, values = (each.transpose(0, 1)[None] for each in (q, keys, values))
    seen = None
    if rows < positions:
        seen = torch.ones(rows, positions, dtype=torch.bool, device=q.device).tril(positions - rows)
    out = F.scaled_dot_product_attention(q, keys, values, seen, is_causal=seen is None, scale=scale)
    return out[0].transpose(0, 1).flatten(1)


class Backend(Protocol):
    """A way to compute attention over the paged cache."""

    name: str
    summary: str  # why one would choose it
    capabilities: Capabilities

    def __init__(self, device: torch.device) -> None: ...

    @staticmethod
    def modules(gpu: Gpu, use: Use) -> list[Module]:
        """What ``use`` needs compiled; one that is missing here is compiled at its first use."""
        ...

    @staticmethod
    def kernel(gpu: Gpu, use: Use, rows: Rows, num_sequences: int) -> str:
        """The name of the kernel that runs in passes of so many sequences."""
        ...

    def plan(self, layout: Layout) -> Kernel:
        """Whatever depends on the layout alone, once per pass instead of once per layer."""
        ...

    def looking_ahead(self, layout: Layout) -> Kernel:
        """The same for layers that are not ``causal``, in a uniform pass: each row as the last one of a sequence.

        A window then counts from the last row that a row sees, so the n-th rows of all sequences have a call of their
        own where there is one.
        """
        num_rows = layout.uniform_q
        assert num_rows is not None, "which rows are a sequence's last is known of uniform passes alone"

        @cache
        def ending(last: int, times: int) -> Kernel:
            """For sequences that end with row ``last``, each ``times`` times."""
            tables, starts = (
                each.repeat_interleave(times, 0) for each in (layout.block_tables, layout.starts)
            )
            return self.plan(Layout.uniform(tables, starts + last, 1, layout.page_size))

        def kernel(layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            if layer.window is None:
                return ending(num_rows - 1, num_rows)(layer, q, keys, values)
            rows = q.view(-1, num_rows, *q.shape[1:])
            out = q.new_empty(*rows.shape[:2], q.shape[1] * (layer.value_dim or values.shape[-1]))
            for row in range(num_rows):
                ahead = min(num_rows - 1 - row, layer.window - 1)
                reaching = replace(layer, causal=True, window=layer.window + ahead)
                out[:, row] = ending(row + ahead, 1)(reaching, rows[:, row].contiguous(), keys, values)
            return out.flatten(0, 1)

        return kernel

    def absorbed(self, layout: Layout) -> Kernel:
        """The same for layers with a ``value_dim``, for backends that attend to latents."""
        return self.plan(layout)

    def expanded(self, host: HostLens) -> Kernel:
        """For the same backends, of latents in their expanded form in sequences of these lengths.

        q ``[rows, num_heads, key_dim]`` is over keys and values ``[n, num_heads, key_dim or value_dim]`` and no pages:
        all positions of each sequence, one sequence behind the other.
        """
        return SdpaExpanded(host)

    def rotating(self, layout: Layout, rope: Rope) -> RotatingKernel | None:
        """A kernel that does more at once, for backends that have one."""
        del layout, rope
        return None


class Attend:
    """Attention over the sequences of one pass: all that a model knows of positions, cache and batching.

    Backend, cache and layout of the pass: it rotates, writes the rows' KV, then attends.
    """

    def __init__(
        self, backend: Backend, cache: KVCache, layout: Layout, rope: Rope, *, windowed: bool = False
    ) -> None:
        """``windowed``: over a layout of the layers that have pages of their own in the cache."""
        self._backend = backend
        self._cache = cache
        self._layout = layout
        self._rope = rope
        self._is_windowed = windowed
        self._others: dict[Rope, tuple[Store, RotatingKernel | None]] = {}

    @property
    def uniform_q(self) -> int:
        """Rows of each sequence, in a uniform pass."""
        assert self._layout.uniform_q is not None
        return self._layout.uniform_q

    def __call__(self, layer: LayerAttention, qkv: Tensor) -> Tensor:
        """Rotate q and k, store k and v, attend to all stored positions.

        ``qkv`` are the heads of q, k and v ``[rows, num_heads + 2 * num_kv_heads, head_dim]``, or of q alone where the
        layer stores none; the result is ``[rows, num_heads * head_dim]``.
        """
        if self._cache.windowed(layer.index) != self._is_windowed:
            return self._windowed(layer, qkv)
        store, rotating = self._rotation(layer.rope)
        keys, values = self._cache.pages(layer.index)
        if layer.stores and rotating is not None and rotating.fits(layer, qkv, keys):
            return rotating(layer, qkv, keys, values)
        into = (keys, values) if layer.stores else (keys[:, :, :0], values[:, :, :0])  # no head of them
        kernel = self._kernel if layer.causal else self._looking_ahead
        return kernel(layer, store(qkv, *into, *layer.kv_scales(keys)), keys, values)

    def _rotation(self, rope: Rope | None) -> tuple[Store, RotatingKernel | None]:
        """Of a layer's; planned once per pass."""
        if rope is None:
            return self._own
        if rope not in self._others:
            self._others[rope] = rope(self._layout), self._backend.rotating(self._layout, rope)
        return self._others[rope]

    @cached_property
    def _own(self) -> tuple[Store, RotatingKernel | None]:
        """Of the model's rotation."""
        return self._rope(self._layout), self._backend.rotating(self._layout, self._rope)

    @property
    def _store(self) -> Store:
        return self._own[0]

    @cached_property
    def _windowed(self) -> "Attend":
        """Of the layers whose pages go back behind a window."""
        return Attend(self._backend, self._cache, self._layout.windowed, self._rope, windowed=True)

    def chunked(self, layer: LayerAttention, size: int, qkv: Tensor) -> Tensor:
        """The same, but a row sees no position before its chunk of ``size``, a multiple of a page's."""
        if self._layout.most_positions <= size:
            return self(layer, qkv)
        keys, values = self._cache.pages(layer.index)
        return self._chunks(size)(layer, self.write_kv(layer, qkv), keys, values)

    def tempered(self, layer: LayerAttention, temperature: Temperature | None, qkv: Tensor) -> Tensor:
        """The same of a layer whose q may have a temperature: it is written to then."""
        if temperature is not None and self._layout.most_positions >= temperature.floor:
            num_heads = qkv.shape[1] - 2 * self._cache.pages(layer.index)[0].shape[2]
            qkv[:, :num_heads] *= self._factors(temperature)
        return self(layer, qkv)

    def write_kv(self, layer: LayerAttention, heads: Tensor) -> Tensor:
        """Store rotated keys and values without attending.

        ``heads`` are those of k and v, or of q before them, ``[rows, n, head_dim]``; returns the rotated q, if any.
        """
        if self._cache.windowed(layer.index) != self._is_windowed:
            return self._windowed.write_kv(layer, heads)
        keys, values = self._cache.pages(layer.index)
        return self._store(heads, keys, values, *layer.kv_scales(keys))

    def latent(self, layer: LatentLayer, q: Tensor, latent: Tensor, key: Tensor) -> Tensor:
        """The same of latent attention: rotate q and key, store latent and key, attend to all stored positions.

        ``q`` is ``[rows, num_heads, key_dim]``, which may be written to, ``latent`` ``[rows, rank]`` and ``key``
        ``[rows, rope_dim]``; the result is ``[rows, num_heads * value_dim]``.
        """
        (pages,) = self._cache.pages(layer.absorbed.index)
        rows, heads, _ = q.shape
        plain, turned = q.tensor_split((layer.nope_dim,), -1)
        if self._expanded is not None:
            self._store.latents(latent, key, pages, turned, turned)
            slots, kernel = self._expanded
            keys, values = layer.expand(pages.flatten(0, 2).index_select(0, slots))
            return kernel(layer.expanded, q.contiguous(), keys, values)
        rank = latent.shape[1]
        wide = q.new_empty(rows, heads, pages.shape[-1])
        layer.absorb(plain, wide[..., :rank])
        self._store.latents(latent, key, pages, turned, wide[..., rank:])
        attended = self._absorbed(layer.absorbed, wide, pages, pages)
        return layer.lift(attended.view(rows, heads, rank)).flatten(1)

    def write_latents(self, layer: LatentLayer, latent: Tensor, key: Tensor) -> None:
        """Store latent and rotated key without attending."""
        (pages,) = self._cache.pages(layer.absorbed.index)
        none = key.new_empty(len(key), 0, key.shape[1])
        self._store.latents(latent, key, pages, none, none)

    def recur(self, layer: DeltaLayer, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The rows' inputs through the convolution into the state of each sequence, and what they read there.

        ``mixed`` is ``[rows, channels]`` in front of the convolution, ``a`` and ``b`` ``[rows, Hv]`` set how much of
        the state decays and is overwritten; the result is ``[rows, Hv, value_dim]``.
        """
        states = self._cache.states
        assert states is not None, "the cache was made for layers that attend"
        return recur(states, self._layout, layer, mixed, a, b)

    @cached_property
    def _expanded(self) -> tuple[Tensor, Kernel] | None:
        """For latents, where that is less work: the slots of their positions, and what attends to them."""
        found = expansion(self._layout)
        return None if found is None else (found[0], self._backend.expanded(found[1]))

    @cached_property
    def _absorbed(self) -> Kernel:
        return self._backend.absorbed(self._layout)

    @cached_property
    def _looking_ahead(self) -> Kernel:
        return self._backend.looking_ahead(self._layout)

    @cached_property
    def _chunks(self) -> Callable[[int], Kernel]:
        return cache(partial(chunked, self._backend.plan, self._layout))

    @cached_property
    def _factors(self) -> Callable[[Temperature], Tensor]:
        """Of a temperature, for q: [rows, 1, 1]."""
        return cache(lambda temperature: temperature.of(self._layout.positions)[:, None, None])

    @cached_property
    def _kernel(self) -> Kernel:
        """Planned when something attends: a pass that only writes KV needs none."""
        return self._backend.plan(self._layout)
