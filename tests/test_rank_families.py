"""Two ranks of mixtures, FP8 targets and all kinds of heads: texts, drafts and passes are those of one process."""

from dataclasses import replace
from pathlib import Path

import pytest
from calibrated_cycle import Cycle
from calibrated_weights import Source
from make_calibrated_pair import HeadKind, chosen_cycle, chosen_layer, chosen_shape, write_pair

from specgen.config import EngineConfig, SamplingParams
from specgen.core.sequence import Request
from specgen.engine.build import build_engine
from specgen.engine.choices import resolve
from specgen.engine.loading import load_models, open_checkpoints
from specgen.record.record_rows import EngineRow
from tests.test_tensor_parallel import as_rows

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]
PAIRS = {
    "tiny-gpt-oss": ("bf16", "eagle3"),
    "tiny-qwen3-moe": ("bf16", "eagle3-2"),
    "tiny": ("fp8", "eagle3-2"),
    "own vocabulary": ("fp8", "eagle1"),
    "one pass": ("bf16", "peagle-2"),
}


def written(path: Path, name: str) -> Cycle:
    weights, head = PAIRS[name]
    shape = chosen_shape(name if name.startswith("tiny") else "tiny", None, None)
    cycle, layer = chosen_cycle(shape, 0.75, 0), chosen_layer(shape, None, weights)
    write_pair(path, shape, cycle, Source("cpu", 3), [HeadKind.find(head)], layer)
    return cycle


def found(
    path: Path, cycle: Cycle, num_ranks: int, batch: str
) -> tuple[dict[str, tuple[int, ...]], list[dict[str, object]]]:
    asked = EngineConfig(
        model=str(path / "target"),
        drafter=str(path / "drafter"),
        num_spec_tokens=3,
        drafter_batch=batch,  # type: ignore[arg-type]
        max_batch_size=4,
        page_size=16,
        device="cpu",
        tensor_parallel=num_ranks,
    )
    checkpoints, events = open_checkpoints(asked), list[EngineRow]()
    config = resolve(asked, checkpoints)
    engine = build_engine(config, load_models(config, checkpoints), events.append)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = [
        Request(id=str(n), prompt_token_ids=cycle.slice(7 * n, 5 + n), sampling=params) for n in range(6)
    ]
    completions = list(engine.generate(prompts))
    texts = {each.request.id: each.token_ids for each in completions}
    for event in (rows := as_rows(events)):
        if (touched := event.get("experts")) is not None:
            event["experts"] = replace(touched, num_bytes=0)  # a rank reads its share
    return texts, rows, [each.record.steps for each in completions]


@pytest.mark.parametrize("name", PAIRS)
def test_texts_drafts_and_passes_are_those_of_one_process(tmp_path: Path, name: str) -> None:
    cycle = written(tmp_path, name)
    for batch in ("padded", "non-padded"):
        one, two = (found(tmp_path, cycle, num_ranks, batch) for num_ranks in (1, 2))
        assert two == one
        assert one[0] == {str(n): cycle.slice(7 * n + 5 + n, 24) for n in range(6)}, "the known text"
