"""The composition root: a resolved configuration and loaded models become an engine."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from specgen.config import EngineConfig, SamplingParams, require
from specgen.core import step_costs
from specgen.core.engine_core import EngineCore
from specgen.core.graphs import Runner
from specgen.core.spec_length import CheapestLength
from specgen.device import use
from specgen.engine.assembly import assemble
from specgen.engine.cached_costs import costs_for
from specgen.engine.choices import RUNNERS
from specgen.engine.loading import Models
from specgen.engine.memory import DRAWN, num_pages
from specgen.engine.needed_modules import needed_modules
from specgen.ops.jit_modules import compile_missing
from specgen.record.record_rows import EngineRow
from specgen.record.startup import phase


def build_engine(
    config: EngineConfig,
    models: Models,
    record: Callable[[EngineRow], None],
    around: Callable[[Runner], Runner] | None = None,
    expected: SamplingParams = DRAWN,
) -> EngineCore:
    """An engine of a resolved ``config`` over loaded ``models``; ``record`` takes the rows of its passes.

    ``around`` may wrap the runner that ``config`` names, to watch the pieces of a step.
    ``expected`` asks for as much as any request will (see ``sampling.most_demanding``): that leaves the cache on a GPU
    all the memory that passes do not need.
    """
    use(models.target.device)
    held = models.peers.ranks.size
    require(
        held == config.tensor_parallel,
        f"tensor-parallel is {config.tensor_parallel} and the models were loaded with {held}: load them with the same",
    )
    runner = RUNNERS[config.cuda_graphs]()
    compile_missing(needed_modules(config, models.checkpoints, expected))
    peers = models.peers.of_engine(config, expected)
    with phase("memory"):
        pages = peers.assemble(lambda: num_pages(config, models, expected), runner)
        engine = assemble(
            config, replace(models, peers=peers), pages, around(runner) if around else runner, record
        )
    if config.draft_length.auto:
        most = min(config.max_batch_size, pages)
        measure = partial(step_costs.measure, engine, most, config.draft_length.most)
        with phase("step costs"):  # with a runner around it, steps take longer
            costs = measure() if around else costs_for(config, models.checkpoints, measure)
        engine.spec_length = CheapestLength(costs)
    return engine
