"""``specgen prepare``: what a first run on a machine waits for, done ahead; and where the time of a start goes."""

from typing import Annotated

import typer

from specgen.cli.options import Only, given_fields, with_options
from specgen.cli.progress_bar import QUIET, progress
from specgen.config import EngineConfig, SamplingParams, option


@with_options
def prepare(
    *,
    ctx: typer.Context,
    engine: EngineConfig,
    sampling: Annotated[SamplingParams, Only("temperature top_p top_k min_p")],
    forget: bool = option(
        False,
        "Running",
        "Remove the costs of steps that earlier runs kept for K auto, of every model, and measure anew.",
    ),
    graphs: bool = option(
        False,
        "Running",
        "Capture the CUDA graph of every batch size and K too, to see what that takes; a run does so as it comes to "
        "each.",
    ),
    quiet: bool = QUIET,
) -> None:
    """Compile and warm up before the first run on this machine, and print where the time to a first token goes.

    Compiles the kernels that a run with the same options needs, all of them side by side, loads the weights and
    generates one token. Run a second time it shows what every later run waits for.
    """
    from specgen.engine import step_costs  # imports torch
    from specgen.engine.engine import Engine
    from specgen.engine.generation_config import generation_config
    from specgen.engine.loading import open_checkpoints
    from specgen.record.interrupt import breakable
    from specgen.record.startup import phase, watched

    if forget:
        step_costs.forget()
    with breakable(), watched(progress(quiet).compiling) as startup:
        said = generation_config(open_checkpoints(engine)["model"], engine.generation_config)
        asked = said.over(sampling, given_fields(ctx))
        ready = Engine(engine, expected=asked)
        with phase("first token"):
            (answer,) = ready.generate(["1, 2, 3,"], SamplingParams(max_tokens=1, ignore_eos=True))
        if graphs:
            ready.capture_graphs()
        seconds = startup.take()
    if answer.error is not None:
        raise RuntimeError(answer.error)
    for name, spent in [*seconds.items(), ("in all", sum(seconds.values()))]:
        print(f"{name:<14}{spent:8.1f} s")
