"""The attention seam: what a backend is, what it can do, and the one callable that a model sees of it.

May import models, ops and kv.
"""

from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from specgen.attention.expansion import Expansion, SdpaExpanded
from specgen.attention.workspaces import num_sms
from specgen.kv.kv_cache import KVCache
from specgen.kv.layout import HostLens, Layout
from specgen.models.attend import LatentLayer, LayerAttention
from specgen.models.model_config import LatentConfig
from specgen.ops import Rope
from specgen.ops.jit_modules import Module


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
    latent: LatentConfig | None = None  # of what the cache keeps; the rest describes its absorbed form


@dataclass(frozen=True, kw_only=True)
class Use:
    """How the passes of a run attend with one model. What has to be compiled for them depends on nothing else."""

    heads: Heads
    windowed: tuple[bool, ...]  # whether layers have a window; both where layers differ
    query_lens: tuple[int, ...]  # rows per sequence of its uniform passes
    prefills: bool  # whether it attends in passes of any lengths too
    num_sequences: int  # at most in a uniform pass
    chained: bool = False  # as ``Layout.chained``


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


@dataclass(frozen=True, kw_only=True)
class Latents:
    """What a backend can do of latent attention. None: no bound."""

    compute_majors: tuple[int, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    widths: tuple[tuple[int, int], ...] | None = None  # of latents and of rotated keys
    expanded: tuple[tuple[int, int], ...] | None = None  # of a head's keys and values
    max_heads: int | None = None

    def refusal(self, device: torch.device, heads: Heads, latent: LatentConfig) -> str | None:
        """As ``Capabilities.refusal``."""
        major = torch.cuda.get_device_capability(device)[0] if self.compute_majors is not None else 0
        expanded = latent.key_dim, latent.value_dim
        checks: tuple[tuple[object, tuple[object, ...] | None, str], ...] = (
            (major, self.compute_majors, "on GPUs of compute capability {}.x"),
            (heads.dtype, self.dtypes, "in {}"),
            ((latent.rank, latent.rope_dim), self.widths, "with latents and rotated keys of {}"),
            (expanded, self.expanded, "with keys and values of {}"),
        )
        for value, allowed, what in checks:
            if allowed is not None and value not in allowed:
                shown = " + ".join(map(str, value)) if isinstance(value, tuple) else str(value)
                where = what.format(shown.removeprefix("torch."))
                return f"does not support latent attention {where}: use --attention sdpa"
        if self.max_heads is not None and heads.num_heads > self.max_heads:
            return f"supports {self.max_heads} heads of latent attention, not {heads.num_heads}: use --tensor-parallel"
        return None


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend can do; the engine checks it once, at start. None: no bound."""

    devices: tuple[str, ...]  # torch device types
    package: str | None = None  # that is imported when it is used
    uniform_q_max: int | None  # longest query of a decode pass
    needs_host_lens: bool  # reads lengths on the host, so every pass waits for the device
    graphs: bool  # a captured call stays right when lengths change on the device
    page_size: int = 16  # that suits it best
    compute_majors: tuple[int, ...] | None = None  # NVIDIA's compute capability, before the dot
    dtypes: tuple[torch.dtype, ...] | None = None
    kv_dtypes: tuple[torch.dtype, ...] | None = None
    fp8_majors: tuple[int, ...] | None = None  # as compute_majors, with FP8 pages
    page_sizes: tuple[int, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    max_group: int | None = None  # heads per KV head
    sinks: bool = False  # it adds a layer's sinks to the sums of its softmax
    latents: Latents | None = Latents()  # None: none at all

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
        fp8 = heads.kv_dtype.itemsize == 1
        checks: tuple[tuple[object, tuple[object, ...] | None, str, str], ...] = (
            (major, self.compute_majors, "GPUs of compute capability {}.x", "--attention auto"),
            (heads.dtype, self.dtypes, "a model in {}", "--dtype bfloat16 or --attention sdpa"),
            (heads.kv_dtype, self.kv_dtypes, "a KV cache in {}", "--kv-dtype model"),
            (
                major,
                self.fp8_majors if fp8 else None,
                "a KV cache in FP8 on GPUs of compute capability {}.x",
                "--kv-dtype model or --attention sdpa",
            ),
            (heads.page_size, self.page_sizes, "pages of {} positions", "pages of 16, 32 or 64"),
            (heads.head_dim, None if latent else self.head_dims, "heads of {} elements", "--attention sdpa"),
        )
        for value, allowed, what, remedy in checks:
            if allowed is not None and value not in allowed:
                return f"does not support {what.format(str(value).removeprefix('torch.'))}: use {remedy}"
        if latent is not None:
            if self.latents is None:
                return "does not support latent attention: use --attention auto"
            return self.latents.refusal(device, heads, latent)
        group = heads.num_heads // heads.num_kv_heads
        if self.max_group is not None and group > self.max_group:
            return f"supports {self.max_group} heads per KV head, not {group}: use --attention sdpa"
        if heads.sinks and not self.sinks:
            return "does not support attention sinks: use --attention sdpa"
        if self.uniform_q_max is not None and heads.max_query_len > self.uniform_q_max:
            most = self.uniform_q_max - 1
            return f"verifies {most} drafts per step, not {heads.max_query_len - 1}: use --num-spec-tokens {most}"
        return None


Rows = int | Literal["ragged", "prefill"]  # of each sequence; in a ragged pass only the device knows them


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


class ExpandedKernel(Protocol):
    """Latent attention of one layer in its expanded form, planned for sequences of some lengths."""

    def __call__(self, layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q ``[rows, num_heads, key_dim]`` over ``[n, num_heads, key_dim]`` and ``[n, num_heads, value_dim]``.

        These are all positions of each sequence, one sequence behind the other; rows see as for ``Kernel``. Returns
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

    def absorbed(self, layout: Layout) -> Kernel:
        """The same for layers with a ``value_dim``, for backends that attend to latents."""
        return self.plan(layout)

    def expanded(self, host: HostLens) -> ExpandedKernel:
        """For the same backends: of sequences of these lengths."""
        return SdpaExpanded(host)

    def rotating(self, layout: Layout, rope: Rope) -> RotatingKernel | None:
        """A kernel that does more at once, for backends that have one."""
        del layout, rope
        return None


class Attend:
    """Backend, cache and layout of one pass: rotates, writes the rows' KV, then attends."""

    def __init__(self, backend: Backend, cache: KVCache, layout: Layout, rope: Rope) -> None:
        self._backend = backend
        self._cache = cache
        self._layout = layout
        self._store = rope(layout)
        self._rotating = backend.rotating(layout, rope)

    def __call__(self, layer: LayerAttention, qkv: Tensor) -> Tensor:
        """Heads of q, k and v ``[rows, num_heads + 2 * num_kv_heads, head_dim]``; see ``Kernel``."""
        keys, values = self._cache.pages(layer.index)
        if self._rotating is not None and self._rotating.fits(layer, qkv, keys):
            return self._rotating(layer, qkv, keys, values)
        return self._kernel(layer, self.write_kv(layer, qkv), keys, values)

    def write_kv(self, layer: LayerAttention, heads: Tensor) -> Tensor:
        """Heads of k and v, or of q before them, ``[rows, n, head_dim]``; returns the rotated q, if any."""
        keys, values = self._cache.pages(layer.index)
        return self._store(heads, keys, values, *layer.kv_scales(keys))

    def latent(self, layer: LatentLayer, q: Tensor, latent: Tensor, key: Tensor) -> Tensor:
        """Queries ``[rows, num_heads, key_dim]``, latent and key; see ``models.attend.Attend``."""
        (pages,) = self._cache.pages(layer.absorbed.index)
        rows, heads, _ = q.shape
        plain, turned = q.tensor_split((layer.nope_dim,), -1)
        if self._expanded is not None:
            self._store.latents(latent, key, pages, turned, turned)
            expansion, kernel = self._expanded
            return kernel(layer.expanded, q.contiguous(), *expansion.keys_and_values(layer, pages))
        rank = latent.shape[1]
        wide = q.new_empty(rows, heads, pages.shape[-1])
        layer.absorb(plain, wide[..., :rank])
        self._store.latents(latent, key, pages, turned, wide[..., rank:])
        attended = self._absorbed(layer.absorbed, wide, pages, pages)
        return layer.lift(attended.view(rows, heads, rank)).flatten(1)

    def write_latents(self, layer: LatentLayer, latent: Tensor, key: Tensor) -> None:
        """Latents and keys of rows without queries."""
        (pages,) = self._cache.pages(layer.absorbed.index)
        none = key.new_empty(len(key), 0, key.shape[1])
        self._store.latents(latent, key, pages, none, none)

    @cached_property
    def _expanded(self) -> tuple[Expansion, ExpandedKernel] | None:
        """For latents, where that is less work."""
        expansion = Expansion.of(self._layout)
        return None if expansion is None else (expansion, self._backend.expanded(expansion.host))

    @cached_property
    def _absorbed(self) -> Kernel:
        return self._backend.absorbed(self._layout)

    @cached_property
    def _kernel(self) -> Kernel:
        """Planned when something attends: a pass that only writes KV needs none."""
        return self._backend.plan(self._layout)
