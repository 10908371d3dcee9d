"""What tests of model families share: logits by ``transformers`` and by passes over pages, and planted errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.attention import Attend, Backend
from specgen.attention.sdpa import SdpaBackend, StaticSdpaBackend
from specgen.checkpoints.checkpoint import load_target, open_checkpoint
from specgen.kv.kv_cache import KVCache, StateCache
from specgen.kv.layout import Layout
from specgen.models.model_config import TargetConfig
from specgen.models.protocols import Target
from tests.dense import DenseAttend
from tests.tiny_mixtures import WINDOW

CPU = torch.device("cpu")
ROWS = 12 * WINDOW


def ids_of(config: TargetConfig) -> Tensor:
    return torch.randint(0, config.vocab_size, (ROWS,), generator=torch.Generator().manual_seed(3))


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A ``Llama`` or ``Gemma4``."""
    return load_target(open_checkpoint(str(path)), dtype, CPU)


def of_transformers(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Its model, with the epsilon of the config in all norms: two of latents have the default there."""
    import transformers

    (architecture,) = json.loads((path / "config.json").read_text())["architectures"]
    model = getattr(transformers, architecture).from_pretrained(
        path, dtype=dtype, attn_implementation="eager"
    )
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = model.config.rms_norm_eps
    # As the wrapper with images of transformers 5.24 raises without any
    return model.language_model if architecture == "Llama4ForConditionalGeneration" else model


@torch.inference_mode()
def right_logits(path: Path, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return of_transformers(path, dtype)(ids[None]).logits[0]  # type: ignore[no-any-return]


@torch.inference_mode()
def paged_logits(model: Target, ids: Tensor, backend: type[Backend], pieces: list[int]) -> Tensor:
    """Of one sequence, in passes of so many rows over pages of 4 positions; the first pass's lengths are known."""
    config, made, states, start = model.config, backend(CPU), [], 0
    num_pages, slots, states_of = -(-len(ids) // 4), torch.tensor([1]), None
    of: dict[str, Any] = {"dtype": model.dtype, "device": CPU}
    if config.state_spec is not None:
        most = max(pieces[1:], default=1)
        states_of = StateCache(spec=config.state_spec, num_slots=2, step_rows=most, **of)
    cache = KVCache(spec=config.kv_spec, num_pages=num_pages, page_size=4, states=states_of, **of)
    tables = torch.arange(num_pages, dtype=torch.int32).flip(0)[None]
    for piece in pieces:
        rows = ids[start : start + piece]
        layout = Layout.uniform(tables, torch.tensor([start]), len(rows), 4, slots)
        if start == 0:
            layout = Layout.ragged(tables, [0], [len(rows)], 4, [1])
        states.append(model.forward(rows, Attend(made, cache, layout, model.rope))[0])
        start += len(rows)
    return model.logits(torch.cat(states))


@torch.inference_mode()
def check_in_pieces(model: Target, ids: Tensor, expected: Tensor, *pieces: list[int]) -> None:
    """Whole, and in ``pieces``, by both backends of a CPU."""
    assert expected.std() > 0.5  # a flat model would hide mistakes
    for backend in (SdpaBackend, StaticSdpaBackend):
        for each in ([len(ids)], *pieces):
            got = paged_logits(model, ids, backend, each)
            torch.testing.assert_close(got, expected, atol=1e-4 * max(1.0, float(expected.std())), rtol=0)


@torch.inference_mode()
def dense_logits(model: Any, ids: Tensor) -> Tensor:
    """Without pages, in pieces."""
    attend, states = DenseAttend(model), list[Tensor]()
    for start, end in ((0, 40), (40, 41), (41, len(ids))):
        states.append(model.forward(ids[start:end], attend)[0])
    return model.logits(torch.cat(states))


Case = tuple[Path, Tensor, Tensor]  # a target, token ids and their logits by ``transformers``
# Of what, which of its attributes (of a table the key), and what an error makes of that
Error = tuple[Any, Any, Callable[[Any], Any]]


def plant(monkeypatch: pytest.MonkeyPatch, error: Error) -> None:
    owner, name, wrong = error
    if isinstance(owner, dict):
        monkeypatch.setitem(owner, name, wrong(owner[name]))
    else:
        monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))


@torch.inference_mode()
def is_seen(path: Path, ids: Tensor, expected: Tensor) -> bool:
    """Whether the logits of a ``Case`` are others now."""
    got = paged_logits(loaded(path), ids, SdpaBackend, [len(ids)])
    return bool((got - expected).abs().max() > 1e-2)
