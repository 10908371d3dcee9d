"""What an engine sends to the processes that run the model with it; here there are none, and nothing is sent."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVarTuple

from specgen.config import EngineConfig, SamplingParams
from specgen.core.graphs import Runner
from specgen.device import SINGLE_RANK, HostCopy, Ranks

if TYPE_CHECKING:
    from specgen.core.engine_core import EngineCore

Ts = TypeVarTuple("Ts")
_NOTHING = nullcontext()


class Peers:
    """The other ranks of a model. Each has its own engine, which receives every call that changes this one.

    Ranks take all decisions from requests and from numbers that are the same on each, so a call needs no answer. A
    model that one process holds has none: every method does nothing.
    """

    ranks: Ranks = SINGLE_RANK

    def broadcast(self, call: "Callable[[EngineCore, *Ts], object]", *arguments: *Ts) -> None:
        """Have the peers' engines do ``call``, a method of theirs; raises nothing."""

    def working(self, call: "Callable[[EngineCore], object]") -> AbstractContextManager[object]:
        """``broadcast``, around the work that the peers share: it may wait for them."""
        return _NOTHING

    def loading(self, config: EngineConfig) -> AbstractContextManager[object]:
        """Around the loading of a model or a head; at the end ``UserError`` with what a peer has refused."""
        return _NOTHING

    def calling(
        self, function: Callable[..., object], config: EngineConfig, *arguments: object
    ) -> AbstractContextManager[object]:
        """The same around ``function(config, models, *arguments)``; one that the peers can import."""
        return _NOTHING

    def of_engine(self, config: EngineConfig, expected: SamplingParams) -> "Peers":
        """The peers of an engine that is now built everywhere; the arguments are those of ``build.num_pages``."""
        return self

    def assemble(self, num_pages: Callable[[], int], runner: Runner) -> int:
        """Let the peers build it too; returns the pages that every rank has room for, here ``num_pages()``."""
        return num_pages()

    def least(self, number: Callable[..., int], config: EngineConfig, models: object) -> int:
        """The smallest ``number(config, models)`` of any rank; a function that they can import."""
        return number(config, models)

    def wait(self, numbers: HostCopy) -> None:
        """Until ``numbers`` are there, where a peer may never give its share: then ``RuntimeError``."""

    def record(self, numbers: Iterable[int]) -> None:
        """``numbers`` were found or decided here, which must be the same on all ranks; alone, nobody looks at them."""

    def require_recoverable(self, error: RuntimeError) -> None:
        """A pass has failed: recoverable on one rank; peers wait inside it, so with them ``error`` is raised."""

    def agree(self, requests: Iterable[str]) -> None:
        """``DeviceLost`` with ``requests``, all in hand, unless the peers have seen what was seen here until now."""

    def require(self, error: RuntimeError, requests: tuple[str, ...] = ()) -> None:
        """Work has failed with ``error``: with peers, who are not where this process is, ``DeviceLost``."""
