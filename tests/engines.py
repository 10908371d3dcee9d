"""Engines over small pairs: build one, run requests, return completions and events."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from specgen.checkpoints.checkpoint import load_drafter, load_target
from specgen.config import EngineConfig, SamplingParams
from specgen.config.bundled import data_directory
from specgen.core.engine_core import EngineCore, discard
from specgen.core.sequence import Completion, Request, Sequence
from specgen.engine.build import build_engine
from specgen.engine.choices import resolve
from specgen.engine.loading import Models, load_models, open_checkpoints
from specgen.prompts import DataSource, Prompt, prompt_ids
from specgen.record import columns
from specgen.record.record_rows import EngineRow, PassRow, RequestRow
from specgen.report.report import Report, report_of
from specgen.text.tokenizer import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A loaded target and head, and their directory."""

    path: Path
    models: Models
    drafter: str = "drafter"  # a directory in ``path``, or mtp

    @property
    def names(self) -> dict[str, str]:
        """As options name the checkpoints."""
        drafter = self.drafter if self.drafter == "mtp" else str(self.path / self.drafter)
        return {"model": str(self.path / "target"), "drafter": drafter}


def engine_config(path: Path, **settings: Any) -> EngineConfig:
    """Of the target and the head in ``path``, on a CPU."""
    names = {"model": str(path / "target"), "drafter": str(path / "drafter")}
    return EngineConfig(**names | {"device": "cpu"} | settings)


class NoTokenizer:
    """For engines that are asked for token ids alone."""

    def added_token_id(self, text: str) -> None:
        """No token marks reasoning."""


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Completions and passes of a run."""

    completions: dict[str, Completion]
    passes: list[EngineRow]
    begun: Counter[str] = field(default_factory=Counter)  # how often each request was

    @property
    def texts(self) -> dict[str, tuple[int, ...]]:
        return {name: completion.token_ids for name, completion in self.completions.items()}

    @property
    def requests(self) -> list[RequestRow]:
        """The records of the requests, as they ended."""
        return [completion.record for completion in self.completions.values()]

    @property
    def verified(self) -> dict[str, list[tuple[Any, ...]]]:
        """Each sequence's steps without their passes."""
        return {
            row.name: [(tuple(step.drafts), *step[2:4]) for step in row.steps or ()] for row in self.requests
        }

    @property
    def accepted(self) -> list[int]:
        """Drafts accepted, by step."""
        return [step[1] for steps in self.verified.values() for step in steps]

    @property
    def steps(self) -> list[PassRow]:
        """The passes that were no prefills."""
        return [row for row in self.passes if isinstance(row, PassRow) and row.kind == "decode"]

    @property
    def any_cached(self) -> bool:
        """Whether a prompt was found in the prefix cache."""
        return any(row.num_cached_tokens for row in self.requests)

    @property
    def num_preempted(self) -> int:
        return sum(row.num_preempted for row in self.passes if isinstance(row, PassRow))

    def report(self, num_spec_tokens: int) -> Report:
        return report_of(columns.of(self.requests, num_spec_tokens), self.passes)


def load_pair(
    path: Path,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    drafter: str = "drafter",
    *,
    fp8_output: bool = False,
) -> Pair:
    """The target in ``path/target`` with ``path/drafter``, or with MTP layers of its own, without a tokenizer."""
    no_models: Any = None
    pair = Pair(path=path, models=no_models, drafter=drafter)
    checkpoints = open_checkpoints(EngineConfig(**pair.names))
    target = load_target(checkpoints["model"], dtype, torch.device(device))
    head = load_drafter(checkpoints["drafter"], target, fp8_output)
    no_tokenizer: Any = NoTokenizer()
    models = Models(target=target, head=head, tokenizer=no_tokenizer, checkpoints=checkpoints)
    return replace(pair, models=models)


def nan_at(pair: Pair, token: int) -> Pair:
    """``pair`` with a target whose logits after ``token`` are NaN."""
    embedding = pair.models.target.embedding.clone()
    embedding[token] = float("nan")
    target = replace(pair.models.target, embedding=embedding)
    return replace(pair, models=replace(pair.models, target=target))


def config_of(pair: Pair, **changes: Any) -> EngineConfig:
    """A configuration with small pages, so that texts cross page boundaries."""
    settings = {"page_size": 4, "num_spec_tokens": 3, "max_batch_size": 8, "device": "cpu"} | changes
    return resolve(EngineConfig(**pair.names | settings), pair.models.checkpoints)


def resolved(config: EngineConfig) -> EngineConfig:
    """``config`` with ``auto`` resolved for this machine."""
    return resolve(config, open_checkpoints(config))


def ranks_config(num_ranks: int, **changes: Any) -> EngineConfig:
    """Of the bundled pair in several ranks."""
    settings = {
        "page_size": 4,
        "num_spec_tokens": 3,
        "max_batch_size": 4,
        "tensor_parallel": num_ranks,
    } | changes
    return resolved(engine_config(data_directory() / "demo", **settings))


@lru_cache(maxsize=4)
def loaded(config: EngineConfig) -> Models:
    """The models of ``config``, shared: do not modify."""
    checkpoints = open_checkpoints(config)
    return load_models(resolve(config, checkpoints), checkpoints)


def page_bytes(pair: Pair) -> int:
    """Of the KV cache of such a configuration."""
    parts = (pair.models.target, pair.models.head)
    return 4 * sum(part.config.kv_spec.bytes_per_token(4) for part in parts if part is not None)


def engine_of(pair: Pair, record: Callable[[EngineRow], None] = discard, **changes: Any) -> EngineCore:
    """One of ``config_of(pair, **changes)``."""
    return build_engine(config_of(pair, **changes), pair.models, record)


def no_page_leaked(engine: EngineCore) -> bool:
    return all(
        each.num_free == each.num_pages and not any(each._num_users) for each in engine._scheduler._allocators
    )


def generate(pair: Pair, requests: Iterable[Request], **changes: Any) -> Outputs:
    """Run ``requests`` through such an engine."""
    passes: list[EngineRow] = []
    engine = engine_of(pair, passes.append, **changes)
    new_sequence, begun = engine._new_sequence, Counter[str]()

    def begin(request: Request) -> Sequence:
        begun[request.id] += 1
        return new_sequence(request)

    engine._new_sequence = begin  # type: ignore[method-assign]
    completions = {completion.request.id: completion for completion in engine.generate(requests)}
    return Outputs(completions=completions, passes=passes, begun=begun)


@cache
def bundled_requests(count: int, sampling: SamplingParams) -> tuple[Request, ...]:
    """The first ``count`` bundled prompts, for the bundled pair."""
    tokenizer = load_tokenizer(str(data_directory() / "demo" / "target"))
    prompts = DataSource(dataset="bundled", num_prompts=count).open()
    return tuple(
        Request(id=p.id, prompt_token_ids=tuple(prompt_ids(p, tokenizer, [])[1]), sampling=sampling)
        for p in prompts
        if isinstance(p, Prompt)
    )


def random_requests(
    count: int,
    vocab_size: int,
    sampling: SamplingParams,
    *,
    lengths: tuple[int, int] = (1, 40),
    seed: int = 0,
) -> list[Request]:
    """Requests with random prompts of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for index in range(count):
        length = int(torch.randint(lengths[0], lengths[1] + 1, (1,), generator=generator))
        prompt = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
        requests.append(Request(id=f"r{index}", prompt_token_ids=tuple(prompt), sampling=sampling))
    return requests
