"""Errors to plant where a mixture is read or computed: each must change the logits of a target of ``test_mixtures``."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specgen.attention import LayerAttention
from specgen.attention.sdpa import SdpaBackend
from specgen.kv.layout import Layout
from specgen.models import layers, mixture_targets
from specgen.models.model_config import MixtureConfig, TargetConfig
from specgen.models.rotary import RopeConfig
from specgen.ops import experts as experts_ops
from specgen.ops.experts import Experts, Gating, from_mxfp4
from specgen.ops.weight import Weight
from tests.tiny_mixtures import WINDOW


def wrong(module: object, name: str, value: object) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(module, name, value)


def misread(**changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """The config is read with other settings of its mixture, or of the model."""
    known = MixtureConfig.__dataclass_fields__.keys()
    config_class = MixtureConfig if changes.keys() <= known else None

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        if config_class is not None:
            monkeypatch.setattr(
                mixture_targets, "MixtureConfig", lambda **given: config_class(**given | changes)
            )
        else:
            read = TargetConfig.from_hf
            other = lambda config, **given: replace(read(config, **given), **changes)  # noqa: E731
            monkeypatch.setattr(TargetConfig, "from_hf", other)

    return plant


def _swapped(device: torch.device, right: Any = experts_ops._pairs) -> Tensor:
    return right(device).flip(-1)


def _next_rows_scale(weight: Weight, dtype: torch.dtype) -> Weight:
    assert weight.scale is not None
    return from_mxfp4(replace(weight, scale=weight.scale.roll(1, 1)), dtype)


def _attention(**changes: Callable[[LayerAttention], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        kernel = SdpaBackend.plan

        def plan(self: SdpaBackend, layout: Layout) -> Any:
            attend = kernel(self, layout)
            return lambda layer, *rest: attend(
                replace(layer, **{name: change(layer) for name, change in changes.items()}), *rest
            )

        monkeypatch.setattr(SdpaBackend, "plan", plan)

    return plant


def _rope(**changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    read = RopeConfig.from_hf

    def other(config: Any) -> RopeConfig:
        rope = read(config)
        assert rope.yarn is not None
        return replace(rope, yarn=replace(rope.yarn, **changes))

    return wrong(RopeConfig, "from_hf", other)


def _wider(layer: LayerAttention) -> int | None:
    return layer.window and layer.window + 1


# Of which target, and how.
ERRORS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "gate-and-up-in-halves": (
        "gpt-oss",
        wrong(layers, "_stacked", lambda *args, real=layers._stacked: real(*args[:-1], False)),
    ),
    "sinks-dropped": ("gpt-oss", _attention(sinks=lambda layer: None)),
    "sinks-scaled": ("gpt-oss", _attention(sinks=lambda layer: layer.sinks * layer.scale)),
    "sinks-of-other-heads": ("gpt-oss", _attention(sinks=lambda layer: layer.sinks.roll(1))),
    "window-of-one-more": ("gpt-oss", _attention(window=_wider)),
    "windows-in-the-other-layers": ("gpt-oss", misread(windows=(None, WINDOW, None, WINDOW, None, WINDOW))),
    "truncated-bounds": ("gpt-oss", _rope(truncate=True)),
    "exact-bounds": ("truncated", _rope(truncate=False)),
    "no-concentration": ("gpt-oss", _rope(concentration=1.0)),
    "softmax-over-all": ("gpt-oss", misread(weights="softmax")),
    "one-expert-less": ("gpt-oss", misread(num_chosen=1)),
    "no-biases-of-experts": (
        "gpt-oss",
        wrong(
            layers,
            "Experts",
            lambda gate_up, down, gating: Experts(
                gate_up=replace(gate_up, bias=torch.zeros_like(gate_up.bias)), down=down, gating=gating
            ),
        ),
    ),
    "not-clamped": ("gpt-oss", misread(limit=None)),
    "up-clamped-on-one-side": (
        "gpt-oss",
        wrong(
            Gating,
            "__call__",
            lambda self, gate, up: (
                (up.clamp(max=7) + 1) * gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7))
            ),
        ),
    ),
    "plain-sigmoid": ("gpt-oss", misread(alpha=1.0)),
    "up-not-shifted": ("gpt-oss", misread(shift=0.0)),
    "softmax-over-the-chosen": ("weights-not-normalized", misread(weights="softmax of chosen")),
    "normalized": ("weights-not-normalized", misread(weights="normalized")),
    "not-normalized": ("qwen3-moe", misread(weights="softmax")),
    "up-before-gate": (
        "qwen3-moe",
        wrong(Gating, "__call__", lambda self, gate, up, real=Gating.__call__: real(self, up, gate)),
    ),
    "nibbles-swapped": ("mxfp4", wrong(experts_ops, "_pairs", _swapped)),
    "scales-of-another-row": ("mxfp4", wrong(experts_ops, "from_mxfp4", _next_rows_scale)),
    "scales-of-another-power": ("mxfp4", wrong(experts_ops, "_EXPONENT_BIAS", 126)),
}
