"""What tests plant in the processes of other ranks, which import this module and call it when they are asked to."""

from typing import Any

import torch

from specgen.config import EngineConfig
from specgen.core.engine_core import EngineCore
from specgen.core.passes import Pass
from specgen.core.scheduler import Scheduler
from specgen.core.step import StepOutput, Steps
from specgen.device import Ranks
from specgen.engine.build import _prefill
from specgen.engine.loading import Models


def together(models: Models, plant: Any, config: EngineConfig, *arguments: Any) -> None:
    """Call ``plant`` in the other ranks of ``models`` alone."""
    with models.peers.calling(plant, config, *arguments):
        pass


def compare_every_pass(config: EngineConfig | None, models: Models, patch: Any = setattr) -> None:
    """From now on all ranks meet in every pass, and each compares what it computes with what the others do."""
    ranks, prefill, decode, score = models.peers.ranks, Steps.prefill, Steps.decode, Steps.score

    def checked_prefill(self: Steps, layout: Any, token_ids: Any, *others: Any) -> Any:
        if self._target is models.target:
            compare(ranks, "prefill", token_ids, layout.kv_lens, layout.slots)
        return prefill(self, layout, token_ids, *others)

    def checked_decode(self: Steps, columns: Any, num_drafts: int) -> Any:
        if self._target is models.target:
            state = columns.state
            compare(ranks, f"decode {num_drafts}", state.tokens, state.positions, columns.block_tables)
        return decode(self, columns, num_drafts)

    def checked_score(self: Steps, layout: Any, token_ids: Any, *others: Any) -> Any:
        if self._target is models.target:
            compare(ranks, "score", token_ids, layout.kv_lens, layout.slots)
        return score(self, layout, token_ids, *others)

    patch(Steps, "prefill", checked_prefill)
    patch(Steps, "decode", checked_decode)
    patch(Steps, "score", checked_score)


def prefill_and_compare(config: EngineConfig, models: Models, token_ids: Any) -> torch.Tensor:
    """As what it is put in place of, where all ranks meet."""
    logits = _prefill(config, models, token_ids)
    if models.peers.ranks.size > 1:
        compare(models.peers.ranks, "prefill", logits)
    return logits


def compare(ranks: Ranks, kind: str, *tensors: torch.Tensor) -> None:
    """``AssertionError`` unless all ranks are here with the same."""
    found = [len(tensors), *kind.encode().ljust(16)]
    for tensor in tensors:
        found += [tensor.numel(), int((tensor.flatten() * torch.arange(1, tensor.numel() + 1)).sum())]
    every = ranks.gather(torch.tensor(found))
    assert bool((every == every[0]).all()), every


def find_others(config: EngineConfig, models: Models, what: str) -> None:
    """From now on this rank's host finds another draft or end of a text than the device, or fewer pages."""
    read, reserve = EngineCore._read_decode, Scheduler.reserve

    def lossy(self: Scheduler) -> bool:
        found = reserve(self)
        self._allocators[0]._free.pop()
        return found

    def other(self: EngineCore, done: Pass, found: list[StepOutput], logprobs: Any) -> int:
        for sequence, row in done.sequences:
            assert row is not None
            if what == "draft":
                found[row][0][0] ^= 1  # type: ignore[index]
            elif what == "end":
                sequence.max_length = len(sequence.tokens) + 1
        return read(self, done, found, logprobs)

    EngineCore._read_decode = other  # type: ignore[method-assign]
    if what == "page":
        Scheduler.reserve = lossy  # type: ignore[method-assign]


def fail_in_decode(config: EngineConfig, models: Models, name: str) -> None:
    """From now on decode steps of this rank raise ``name``, before they meet the other ranks."""

    def failing(self: Steps, columns: Any, num_drafts: int) -> Any:
        raise {"memory": torch.OutOfMemoryError, "bug": KeyError}[name]("planted")

    Steps.decode = failing  # type: ignore[method-assign]
