"""What ``specgen tune`` is asked for: the traffic, and the arms that answer it."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal, get_args

from specgen.config import (
    MOST_DRAFTS,
    DrafterBatchName,
    DraftLength,
    EngineConfig,
    acceptance_rates,
    choices,
    counts,
    option,
    require,
)
from specgen.engine.arms import Arm
from specgen.prompts.formats import AS_IT_IS
from specgen.prompts.load import DataSource

RANDOM = "random"  # the data set of random tokens
SETTINGS = ("attention", "cuda_graphs")  # of the engine that arms may differ in, beside batch size and drafts
OutputLens = Literal["fixed", "data"]
_LONGEST = {"fixed": 256, "data": 4096}  # by output length
_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, kw_only=True)
class Workload(DataSource):
    """Prompts and output length. With ``num_prompts`` None there are ``per_slot`` for each of the batch.

    All requests wait from the start and the batch is the concurrency: a request that ends makes room for the next.
    ``output_lens`` says how long texts are: ``fixed``, up to ``max_new_tokens`` or an end that the model finds; or
    ``data``, exactly as long as the data set's own answer, later turns included, and at most ``max_new_tokens``.
    """

    per_slot: int = 4  # with fewer the batch is seldom full
    prompt_tokens: int = option(100, "Prompts", "Tokens per prompt of --dataset random.")
    output_lens: OutputLens = option(
        "fixed",
        "Sampling",
        "fixed: up to --max-new-tokens or the end that the model finds; data: as many tokens as the data's own answers "
        "have, up to --max-new-tokens, with later turns (sharegpt), or max_tokens of a row.",
        metavar="fixed|data",
    )
    # None becomes that of ``output_lens``
    max_new_tokens: int = option(
        None, "Sampling", "Longest answer in tokens.", shown="256; with --output-lens data 4096"
    )

    def __post_init__(self) -> None:
        require(
            self.output_lens in get_args(OutputLens),
            f"output-lens is {self.output_lens!r}: use one of {', '.join(get_args(OutputLens))}",
        )
        if self.max_new_tokens is None:
            object.__setattr__(self, "max_new_tokens", _LONGEST[self.output_lens])
        of_rows = {
            "output-lens is 'data'": self.output_lens == "data",
            "split, prompt-field, chat or raw is given": self.how != AS_IT_IS,
            f"data-path is {self.data_path}": self.data_path is not None,
        }
        for said, is_given in of_rows.items():
            require(
                not is_given or self.dataset != RANDOM,
                f"{said} but prompts are random: name a data set",
            )
        for field in ("num_prompts", "prompt_tokens", "max_new_tokens"):
            value = getattr(self, field)
            require(value is None or value >= 1, f"{field.replace('_', '-')} is {value}: use at least 1")

    def to_json(self) -> dict[str, Any]:
        """All fields but the path of the data, which a manifest names itself."""
        found = asdict(self)
        del found["data_path"]
        return found

    def count(self, batch: int) -> int:
        """The number of prompts at this batch size."""
        return self.num_prompts or self.per_slot * batch


def draft_lengths(text: str) -> tuple[DraftLength, ...]:
    """The values of ``--k``: ``0-7,auto,uniform``; each once, in order."""
    chosen = ("auto", "uniform")
    found: list[DraftLength] = []
    for part in (part.strip() for part in text.split(",")):
        first, dash, last = part.partition("-")
        ends = (first, last) if dash else (first, first)
        require(
            part in chosen or all(end.isascii() and end.isdecimal() for end in ends),
            f"k is {text!r}: write numbers, ranges, auto and uniform, separated by commas, such as 0-7,auto",
        )
        require(
            part in chosen or int(ends[1]) <= MOST_DRAFTS,
            f"k is {text!r}: use at most {MOST_DRAFTS} in {part}",
        )
        values = [part] if part in chosen else list(range(int(ends[0]), int(ends[1]) + 1))
        require(bool(values), f"k is {text!r}: {part} is empty: write the smaller number first")
        found += [DraftLength.of(value) for value in values]
    return tuple(dict.fromkeys(found))


def seconds(text: str) -> float:
    """The value of ``--budget``: ``90s``, ``10m``, ``2h``."""
    number, unit = text[:-1], text[-1:]
    require(
        unit in _UNITS
        and number.replace(".", "", 1).isdecimal()
        and 0 < float(number) * _UNITS[unit] < math.inf,
        f"budget is {text!r}: write a time such as 90s, 10m or 2h",
    )
    return float(number) * _UNITS[unit]


def _some_of(field: str, text: str) -> tuple[Any, ...]:
    """The values of the option of a ``field`` of ``EngineConfig``, comma-separated; each once, in order."""
    known = choices(EngineConfig)[field]
    asked = [part.strip() for part in text.split(",")]
    for name in asked:
        require(name in known, f"{field.replace('_', '-')} has {name!r}: use some of {', '.join(known)}")
    return tuple(dict.fromkeys(asked))


@dataclass(frozen=True, kw_only=True)
class TuneJob:
    """One run of ``specgen tune``: arms of ``engine``, each with another choice of what there are several of here.

    With a ``precision`` of 0 every arm has all ``repeats``; otherwise a speed-up is measured until its interval is
    plus or minus that share, and arms that cannot win are dropped.
    """

    workload: Workload
    engine: EngineConfig
    batches: tuple[int, ...] = option(
        (1, 8, 32),
        "Table",
        "Batch sizes, comma-separated: how many requests run at once.",
        name="batch",
        parse=lambda text: tuple(dict.fromkeys(counts("batch", text))),
    )
    draft_lengths: tuple[DraftLength, ...] = option(  # that of plain decoding need not be among them
        "1-7,auto",
        "Table",
        "Draft tokens per step, comma-separated: numbers, ranges, auto. Plain is always measured.",
        name="k",
        parse=draft_lengths,
    )
    drafter_batches: tuple[DrafterBatchName, ...] = option(
        ("padded", "non-padded"),
        "Table",
        "Drafter batches, comma-separated.",
        name="drafter_batch",
        parse=partial(_some_of, "drafter_batch"),
    )
    attentions: tuple[str, ...] = option(
        ("auto",),
        "Table",
        "Attention backends as for generate, comma-separated; the first is what others are compared with.",
        name="attention",
        parse=partial(_some_of, "attention"),
    )
    graphs: tuple[str, ...] = option(
        ("auto",),
        "Table",
        "CUDA graphs as for generate, likewise.",
        name="cuda_graphs",
        parse=partial(_some_of, "cuda_graphs"),
    )
    repeats: int = option(10, "Table", "Measurements of an arm, at most.")
    precision: float = option(
        0.02,
        "Table",
        "Measure until the 95 % interval of a speed-up is plus or minus this fraction. 0: every arm has all repeats.",
    )
    budget: float | None = option(
        None,
        "Table",
        "End after this time, such as 90s, 10m or 2h, shared by the batch sizes.",
        shown="no limit",
        parse=seconds,
    )
    synthetic: tuple[float, ...] | float | None = option(
        None,
        "Speculation",
        "What would such a head be worth here? Real passes, but drafts are accepted by dice: a mean acceptance length "
        "at each K (auto: at its largest), such as 3.2, or chances by position behind accepted drafts, such as "
        "0.8,0.7,0.6. The texts are not the model's then.",
        name="synthetic_acceptance",
        shown="by the target",
        parse=acceptance_rates,
    )

    def __post_init__(self) -> None:
        require(self.repeats >= 1, f"repeats is {self.repeats}: use at least 1")
        require(
            0 <= self.precision < 1,
            f"precision is {self.precision}: use a share below 1, such as 0.02, or 0 for all repeats of every arm",
        )
        prompts, largest = self.workload.num_prompts, max(self.batches)
        require(
            prompts is None or prompts >= largest,
            f"num-prompts is {prompts}, which never fill a batch of {largest}: use at least {largest}",
        )
        require(
            any(length.most for length in self.draft_lengths),
            "k is 0 alone, and plain decoding is measured anyway: name a K of at least 1, or auto",
        )

    def _settings(self) -> dict[str, tuple[Any, ...]]:
        return dict(zip(SETTINGS, (self.attentions, self.graphs), strict=True))

    @property
    def settings(self) -> dict[str, tuple[Any, ...]]:
        """The values of those of ``SETTINGS`` in which arms differ."""
        return {name: values for name, values in self._settings().items() if len(values) > 1}

    @property
    def base(self) -> EngineConfig:
        """The configuration that arms change."""
        return replace(
            self.engine,
            num_spec_tokens=max(length.most for length in self.draft_lengths),
            max_batch_size=max(self.batches),
            prefix_cache=False,
            synthetic_acceptance=self.synthetic or (),
            **{name: values[0] for name, values in self._settings().items() if len(values) == 1},
        )

    @property
    def arms(self) -> list[Arm]:
        """Those of one batch size after those of another, plain decoding first."""
        found = []
        for batch, values, drafts in product(self.batches, product(*self.settings.values()), self._drafts()):
            changes = dict(zip(self.settings, values, strict=True)) | drafts
            found.append(Arm(name=f"batch {batch}, {label(changes)}", changes={"batch": batch, **changes}))
        return found

    def _drafts(self) -> Iterator[dict[str, Any]]:
        yield {"K": 0}
        for length in (length for length in self.draft_lengths if length.most):
            k: int | str = length.kind if length.auto else length.most
            # n-grams have no drafter batch
            modes = [{"drafter_batch": mode} for mode in self.drafter_batches if self.base.lookup is None]
            yield from ({"K": k, **mode} for mode in modes or [{}])

    def to_json(self) -> dict[str, Any]:
        """What the manifest of the engine and the data does not say of the job."""
        axes = {"batch": self.batches, "k": self.draft_lengths, "drafter_batch": self.drafter_batches}
        return {
            **{name: ", ".join(map(str, values)) for name, values in (axes | self.settings).items()},
            "workload": self.workload.to_json(),
            "repeats": self.repeats,
            "precision": self.precision,
        }


def label(changes: Mapping[str, Any]) -> str:
    """What an arm changes beside the batch size: ``plain``, ``K 2, padded``, ``attention sdpa, plain``."""
    parts = [f"{name} {changes[name]}" for name in SETTINGS if name in changes]
    parts.append("plain" if changes["K"] == 0 else f"K {changes['K']}")
    return ", ".join([*parts, *([changes["drafter_batch"]] if "drafter_batch" in changes else [])])
