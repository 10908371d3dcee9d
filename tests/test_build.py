"""From a configuration to an engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import step

from specgen.checkpoints.checkpoint import open_checkpoint
from specgen.checkpoints.tensor_reader import Checkpoint
from specgen.config import MAX_LOGPROBS, SamplingParams
from specgen.core.running_batch import Columns, RunningBatch
from specgen.core.sequence import Request
from specgen.core.step import Steps
from specgen.decoding.sampling import SamplingForm
from specgen.engine import choices
from specgen.engine.build import _largest_pass, build_engine, most_demanding, num_pages
from specgen.engine.choices import choose_batch_size, choose_device
from specgen.jobs.prompt_index import index_prompts
from specgen.jobs.shards import WHOLE
from specgen.prompts import Prompt
from tests.commands import printed
from tests.engines import Pair, config_of


def test_plain_decoding_allocates_no_drafter_kv(random_pair: Pair) -> None:
    # 6 layers of the target and 1 of the head, k and v, 2 KV heads of 16, 4 bytes, pages of 4 positions
    for k, page in ((0, 6 * 2 * 2 * 16 * 4 * 4), (3, 7 * 2 * 2 * 16 * 4 * 4)):
        ten, nine = (
            config_of(random_pair, num_spec_tokens=k, kv_memory=n) for n in (10 * page, 10 * page - 1)
        )
        assert num_pages(ten, random_pair.models) == 10
        assert num_pages(nine, random_pair.models) == 9


def test_num_pages_is_bounded_by_what_the_batch_can_need(random_pair: Pair) -> None:
    longest = random_pair.models.target.config.max_positions + 3 + 1
    config = config_of(random_pair, max_batch_size=2, kv_memory=1 << 30)
    assert num_pages(config, random_pair.models) == 2 * longest // config.page_size


def test_a_batch_has_no_more_rows_than_the_cache_has_pages(
    random_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list[int]()

    def of(*, max_rows: int, **others: Any) -> RunningBatch:
        rows.append(max_rows)
        return RunningBatch(max_rows=max_rows, **others)

    monkeypatch.setattr("specgen.engine.build.RunningBatch", of)
    config = config_of(random_pair, max_batch_size=200_000, kv_memory=1 << 20)
    engine = build_engine(config, random_pair.models, lambda event: None)
    assert rows == [num_pages(config, random_pair.models)]
    assert rows[0] < 300
    requests = (
        Request(id=str(n), prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=3)) for n in range(5)
    )
    assert len(list(engine.generate(requests))) == 5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cpu", "device is 'cpu'"),
        ("cpu:0", "device is 'cpu:0': use auto, cpu, cuda or cuda:N"),
        ("cuda:x", "device is 'cuda:x': use auto, cpu, cuda or cuda:N"),
        ("cuda:", "device is 'cuda:': use auto, cpu, cuda or cuda:N"),
        ("cuda:2", "device is 'cuda:2' and there are 2 GPUs: use cuda:0 to cuda:1"),
    ],
)
def test_device_names_are_normalised(monkeypatch: pytest.MonkeyPatch, name: str, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert str(choose_device("cuda:0")) == "cuda:0"
    assert str(choose_device("cuda")) == str(choose_device("auto")) == "cuda:1"
    if name == "cpu":
        assert str(choose_device(name)) == "cpu"
        return
    with pytest.raises(ValueError, match=r"^device is") as raised:
        choose_device(name)
    assert str(raised.value) == expected


def test_a_batch_is_as_large_as_the_memory_of_a_gpu(
    random_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 at most; each with the KV cache of what it can be long, and twice the logits of its rows."""
    model, files = random_pair.models.target.config, random_pair.models.checkpoints
    weights = sum(file.stat().st_size for file in files["model"].files)
    # keys and values of 6 layers, 2 heads of 16; 8 rows of logits in bfloat16 and float32
    each = 6 * 2 * 2 * 16 * 2 * min(model.max_positions, 1024) + 2 * 8 * model.vocab_size * 6
    config = config_of(random_pair, max_batch_size=0)
    assert config.max_batch_size == 32  # on a CPU
    assert config_of(random_pair, max_batch_size="auto").max_batch_size == 32

    def chosen(memory: float, **changes: Any) -> int:
        monkeypatch.setattr(choices, "total_memory", lambda device: memory)
        asked = replace(config, device="cuda:0", dtype="bfloat16", gpu_memory_utilization=0.5, **changes)
        return choose_batch_size(asked, files)

    assert chosen(2 * (weights + 50.5 * each)) == 50
    assert chosen(2 * (weights + 50.5 * each), num_spec_tokens=0, drafter=None) == 50  # to be compared with
    assert chosen(1e12, num_spec_tokens=0) == 256
    assert chosen(weights) == 1  # what does not fit is told elsewhere
    assert chosen(1e12, kv_memory=3 * each) == 3


def test_the_memory_trial_uses_the_sampling_of_the_job(
    random_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU peak memory is measured with the sampling of the job: greedy needs the least."""
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    forms: list[SamplingForm] = []
    decode = Steps.decode

    def seen(self: Steps, columns: Columns, num_drafts: int) -> object:
        forms.append(columns.sampling.form)
        return decode(self, columns, num_drafts)

    monkeypatch.setattr(Steps, "decode", seen)
    base = SamplingParams(max_tokens=5, stop=("x",))
    for rows, form in (
        ([], SamplingForm("greedy", 0, None)),
        ([{"temperature": 0.1}], SamplingForm("plain", 0, None)),
        ([{"logprobs": 3}, {"temperature": 2.0, "min_p": 0.5}], SamplingForm("filtered", 0, MAX_LOGPROBS)),
        ([{"logit_bias": tuple((n, 1.0) for n in range(300))}], SamplingForm("greedy", 128, None)),
    ):
        forms.clear()
        every = [base, *(replace(base, **row) for row in rows)]
        _largest_pass(config_of(random_pair), random_pair.models, most_demanding(every))
        assert set(forms) == {form}


def test_the_sampling_survey_keeps_one_row_per_kind() -> None:
    rows: list[dict[str, object]] = [{"temperature": 0.1 * n, "seed": n} for n in range(9)]
    rows += [{"logit_bias": ((n, 1.0),)} for n in range(9)] + [{"top_p": 1.0}, {"top_p": 0.3}, {}]
    prompts = [Prompt(id=str(n), text="a", sampling=row) for n, row in enumerate(rows)]
    assert index_prompts("own", prompts, WHOLE).sampling == (rows[0], rows[1], rows[9], rows[18], rows[19])


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--baseline", "--output", "out", "--num-prompts", "2", "--max-new-tokens", "3"],
        pytest.param(
            ["verify", "--num-prompts", "2", "--max-new-tokens", "3", "--batch-sizes", "1"],
            marks=pytest.mark.slow,
        ),
        pytest.param(["step", "--batch-sizes", "1", "--prompt-tokens", "8"], marks=pytest.mark.slow),
        pytest.param(
            ["eval", "word_problems", "--limit", "1", "--apply-chat-template", "--arms", "baseline,padded"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda command: command[0],
)
def test_a_command_opens_each_checkpoint_once(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def counted(name: str) -> Checkpoint:
        opened.append(name)
        return open_checkpoint(name)

    monkeypatch.setattr("specgen.engine.loading.open_checkpoint", counted)
    monkeypatch.chdir(tmp_path)
    if command[0] == "step":
        printed(*command[1:], program=step.app)
    else:
        printed(*command)
    assert [Path(name).name for name in opened] == ["target", "drafter"]
