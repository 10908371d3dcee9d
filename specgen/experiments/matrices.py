"""The matrices of ``specgen bench throughput`` as data: two axes, whose combinations are the arms, and a workload."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, Self, get_args

from specgen.config import DraftLength, EngineConfig, choices, require
from specgen.config.errors import did_you_mean
from specgen.config.urls import Url
from specgen.engine.arms import DECODING, Arm
from specgen.prompts.formats import AS_IT_IS, Reading

Labels = Mapping[str, str | int]  # value by axis name
RANDOM = "random"  # the data set of random tokens
_LEAST_PROMPTS = 4
OutputLens = Literal["fixed", "data"]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A setting that arms differ in (attention, decoding, cuda_graphs, batch or K) and its values."""

    name: str
    values: tuple[str, ...]

    def __post_init__(self) -> None:
        known = {**choices(EngineConfig), "decoding": tuple(DECODING)}.get(self.name)
        for value in self.values:
            if known is not None:
                require(value in known, f"axis {self.name} has {value!r}: use some of {', '.join(known)}")
            require(self.name != "batch" or value.isdecimal(), f"axis batch has {value!r}: use whole numbers")
            if self.name == "K":
                DraftLength.of(value)

    @property
    def labels(self) -> list[str | int]:
        """The values, numbers as numbers."""
        return [int(value) if value.isdecimal() else value for value in self.values]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts and output length. With ``num_prompts`` None there are ``per_slot`` for each of the batch, at least four.

    All requests wait from the start and the batch is the concurrency: a request that ends makes room for the next.
    ``output_lens`` says how long texts are: ``fixed``, up to ``max_new_tokens`` or an end that the model finds; or
    ``data``, exactly as long as the data set's own answer, later turns included, and at most ``max_new_tokens``.
    ``how`` says how rows become prompts.
    """

    dataset: str
    data_path: Path | Url | None = None
    num_prompts: int | None = None
    per_slot: int = 2
    prompt_tokens: int = 100  # per random prompt
    max_new_tokens: int = 256
    max_batch_size: int = 128  # if it is not an axis
    output_lens: OutputLens = "fixed"
    how: Reading = AS_IT_IS

    def __post_init__(self) -> None:
        require(
            self.output_lens in get_args(OutputLens),
            f"output-lens is {self.output_lens!r}: use one of {', '.join(get_args(OutputLens))}",
        )
        require(
            self.output_lens == "fixed" or self.dataset != RANDOM,
            "output-lens is 'data' but prompts are random: name a data set that has answers",
        )
        require(
            self.how == AS_IT_IS or self.dataset != RANDOM,
            "split, prompt-field, chat or raw is given but prompts are random: name a data set",
        )
        require(
            self.data_path is None or self.dataset != RANDOM,
            f"data-path is {self.data_path} but prompts are random: name a data set",
        )
        for field in ("num_prompts", "prompt_tokens", "max_new_tokens", "max_batch_size"):
            value = getattr(self, field)
            require(value is None or value >= 1, f"{field.replace('_', '-')} is {value}: use at least 1")

    def to_json(self) -> dict[str, Any]:
        """All but the path of the data, which a manifest names itself."""
        found = asdict(self)
        del found["data_path"]
        return found

    @property
    def lengths(self) -> str:
        """How long texts are, for the conditions."""
        if self.output_lens == "data":
            return f"as many new tokens as the data's answers have, at most {self.max_new_tokens}"
        return f"at most {self.max_new_tokens} new tokens"

    @property
    def size(self) -> str:
        """How many prompts there are for each slot, for the conditions; empty where their number is given."""
        return "" if self.num_prompts else f" ({self.per_slot} per batch slot, at least {_LEAST_PROMPTS})"

    def count(self, batch: int) -> int:
        """The number of prompts at this batch size."""
        return self.num_prompts or max(self.per_slot * batch, _LEAST_PROMPTS)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Arms on two axes with one workload; plots are over the first axis, with a line per value of the second.

    ``ratios`` compares each arm with the one that has the given labels in place of its own.
    """

    name: str
    title: str
    axes: tuple[Axis, Axis]
    ratios: Mapping[str, Labels]  # labels of the arm to compare with, by column name
    workload: Workload
    latencies: bool = False  # whether the table has latency columns

    @property
    def arms(self) -> list[Arm]:
        """Every combination of the axes' values, the last axis changing fastest."""
        first, second = self.axes
        pairs = product(first.labels, second.labels)
        each = ({first.name: one, second.name: other} for one, other in pairs)
        return [Arm(name=", ".join(f"{k} {v}" for k, v in labels.items()), changes=labels) for labels in each]

    def with_values(self, texts: Iterable[str]) -> Self:
        """This matrix with other values on some axes, as ``batch=8,32``; ``UserError`` for an unknown axis."""
        axes = {axis.name: axis for axis in self.axes}
        for text in texts:
            name, _, values = text.partition("=")
            require(
                name in axes and bool(values),
                f"axis is {text!r}{did_you_mean(name, axes)}: write NAME=VALUE,VALUE with one of {', '.join(axes)}",
            )
            axes[name] = Axis(name=name, values=tuple(value.strip() for value in values.split(",")))
        first, second = axes.values()
        return replace(self, axes=(first, second))


MATRICES = {
    matrix.name: matrix
    for matrix in (
        Matrix(
            name="vllm-25196",
            title="Padded and non-padded drafter batches, as in vLLM's PR 25196",
            axes=(
                Axis(name="attention", values=("hopper", "trtllm", "flashinfer")),
                Axis(name="decoding", values=("plain", "padded", "non-padded")),
            ),
            ratios={"x_plain": {"decoding": "plain"}, "x_non_padded": {"decoding": "non-padded"}},
            workload=Workload(dataset="sharegpt", num_prompts=200),
        ),
        Matrix(
            name="vllm-19825",
            title="TensorRT-LLM's decode kernels against FlashInfer's wrapper, as in vLLM's PR 19825",
            axes=(
                Axis(name="attention", values=("hopper", "trtllm", "flashinfer")),
                Axis(name="decoding", values=("plain", "padded")),
            ),
            ratios={"x_flashinfer": {"attention": "flashinfer"}, "x_plain": {"decoding": "plain"}},
            workload=Workload(dataset=RANDOM, num_prompts=500, prompt_tokens=100, max_new_tokens=1000),
        ),
        Matrix(
            name="vllm-21477",
            title="The gain of CUDA graphs, as in vLLM's PR 21477",
            axes=(
                Axis(name="cuda_graphs", values=("off", "pass", "step")),
                Axis(name="decoding", values=("padded",)),
            ),
            ratios={"x_off": {"cuda_graphs": "off"}},
            workload=Workload(dataset="mt-bench", num_prompts=80, max_batch_size=2),
            latencies=True,
        ),
        Matrix(
            name="batch-and-decoding",
            title="Plain decoding, padded and non-padded drafter batches at each batch size",
            axes=(
                Axis(name="batch", values=("1", "8", "32", "64", "128", "256")),
                Axis(name="decoding", values=tuple(DECODING)),
            ),
            ratios={"x_plain": {"decoding": "plain"}},
            workload=Workload(dataset="sharegpt"),
        ),
        Matrix(
            name="batch-and-k",
            title="The best K at each batch size, and where speculation stops paying",
            axes=(
                Axis(name="batch", values=("1", "8", "32", "64", "128", "256")),
                Axis(name="K", values=(*map(str, range(8)), "auto")),
            ),
            ratios={"x_plain": {"K": 0}},
            workload=Workload(dataset="sharegpt", max_new_tokens=128),
        ),
    )
}


def find_matrix(name: str) -> Matrix:
    """The matrix of that name; ``UserError`` lists the known ones."""
    require(
        name in MATRICES,
        f"matrix is {name!r}{did_you_mean(name, MATRICES)}: use one of {', '.join(MATRICES)}",
    )
    return MATRICES[name]
