"""What generation_config.json says holds, is left or is refused, by name, and every command applies it alike."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specgen.checkpoints.checkpoint import open_checkpoint
from specgen.config import DraftLength, EngineConfig, SamplingParams, UserError
from specgen.config.bundled import data_directory
from specgen.core.sequence import Request
from specgen.decoding.sampling import SamplingForm
from specgen.engine.engine import Engine
from specgen.engine.generation_config import GenerationConfig, generation_config
from specgen.experiments.audit import Judge
from specgen.experiments.heads_job import HeadsJob, HeadsRun
from specgen.experiments.plans import prepare
from specgen.experiments.studies import Study, named_arms
from specgen.experiments.study import StudyJob, StudyRun
from specgen.experiments.tune_job import TuneJob, Workload
from specgen.models.config_keys import LEFT, REFUSED, TAKEN, WITHOUT_EFFECT
from specgen.prompts import Prompt
from specgen.prompts.load import DataSource
from tests.commands import printed, rows, specgen, write_rows
from tests.jobs import Silent
from tests.reference_heads import DenseTarget
from tests.test_asked_texts import with_penalty
from tests.tiny_checkpoints import change_json

DEMO = data_directory() / "demo"
SAID = {
    "repetition_penalty": 1.5,
    "suppress_tokens": [226, 1200],
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "transformers_version": "5.0.0",
    "pad_token_id": 0,
}
HOLDS = {"repetition_penalty": 1.5, "suppress_tokens": (226, 1200), "top_p": 0.8, "top_k": 20}
LINE = (
    "holds: repetition_penalty 1.5, suppress_tokens of 2 tokens; "
    "holds in sampled texts: top_p 0.8, top_k 20; left: do_sample True, temperature 0.7"
)


def saying(path: Path, said: dict[str, Any], **config: Any) -> Path:
    """The bundled target with that generation_config.json, and with changes of its config.json."""
    shutil.copytree(DEMO / "target", path)
    if said:
        (path / "generation_config.json").write_text(json.dumps(said))
    else:
        (path / "generation_config.json").unlink(missing_ok=True)
    change_json(path / "config.json", **config)
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that says something of everything."""
    return saying(tmp_path_factory.mktemp("said") / "target", SAID)


def models(target: Path) -> list[object]:
    return ["--model", target, "--drafter", DEMO / "drafter", "--device", "cpu"]


def generate(target: Path, out: Path, *arguments: object) -> dict[str, tuple[int, ...]]:
    short = ("--num-prompts", 4, "--max-new-tokens", 16, "--output", out)
    printed("generate", *models(target), *short, *arguments)
    return {row["id"]: tuple(row["token_ids"]) for row in rows(out / "completions.jsonl")}


def read(target: Path, which: Any = "model") -> GenerationConfig:
    return generation_config(open_checkpoint(str(target)), which)


def test_every_field_of_transformers_is_on_one_list() -> None:
    import transformers

    lists = (set(TAKEN), set(LEFT), set(REFUSED), WITHOUT_EFFECT)
    fields = set(vars(transformers.GenerationConfig()))
    assert fields - set.union(*lists) == set()
    assert sum(map(len, lists)) == len(set.union(*lists))


def test_the_values_that_mean_nothing_are_those_of_transformers() -> None:
    """What ``generate`` does without a file is nothing to say."""
    import transformers

    defaults = transformers.GenerationConfig._get_default_generation_params()
    plain = {name: value for name, value in defaults.items() if name not in ("top_k",) and value is not None}
    from specgen.checkpoints.tensor_reader import Checkpoint

    checkpoint = Checkpoint(name="x", path=Path(), config={}, generation=plain, tensors={})
    assert generation_config(checkpoint, "model").sentence() == ""


def test_what_holds_and_what_is_left(target: Path) -> None:
    found = read(target)
    assert found.taken == HOLDS
    assert found.sentence() == LINE
    asked = SamplingParams(max_tokens=7, repetition_penalty=1.0, temperature=0.5)
    assert found.over(asked) == replace(asked, **HOLDS)
    given = {"repetition_penalty", "top_k", "temperature"}
    assert found.over(asked, given) == replace(asked, suppress_tokens=(226, 1200), top_p=0.8)
    assert "; overridden: repetition_penalty 1.5, top_k 20; left" in found.sentence(given)
    none = read(target, "none")
    assert none.over(asked) == asked
    assert none.sentence().startswith("left: repetition_penalty 1.5, suppress_tokens")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_change_greedy_texts_and_is_not_supported_is_refused(tmp_path: Path, name: str) -> None:
    path = saying(tmp_path / "target", {name: [[5]] if name.endswith("ids") else 3})
    with pytest.raises(UserError, match=rf"generation_config\.json says {name} .*--generation-config none"):
        read(path)
    assert name in read(path, "none").sentence()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"repetition_penalty": "1.1"}, "repetition_penalty is '1.1': use a number"),
        ({"repetition_penalty": 0}, "repetition-penalty is 0: use 0.01"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens must be integers of 0 or more"),
        ({"top_p": 7}, "top-p is 7"),
        ({"stop_strings": 5}, "stop is not a list"),
    ],
)
def test_values_that_are_none_are_refused(tmp_path: Path, said: dict[str, Any], message: str) -> None:
    path = saying(tmp_path / "target", said)
    with pytest.raises(UserError, match=f"generation_config.json: {message}"):
        read(path)
    assert read(path, "none").taken == {}


def test_old_checkpoints_say_it_in_their_config(tmp_path: Path) -> None:
    """As in transformers, where there is no generation_config.json; settings of other things are not looked at."""
    old = {"repetition_penalty": 1.2, "temperature": 0.6, "max_length": 4096, "use_cache": True}
    found = read(saying(tmp_path / "old", {}, **old))
    assert found == GenerationConfig(
        taken={"repetition_penalty": 1.2}, left={"temperature": 0.6, "max_length": 4096}
    )
    both = saying(tmp_path / "both", {"eos_token_id": 1}, **old)
    assert read(both) == GenerationConfig()


def test_a_vision_language_model_says_it_in_its_text_config_too(tmp_path: Path) -> None:
    text = {"repetition_penalty": 1.4, "suppress_tokens": [3], "no_repeat_ngram_size": None, "top_k": 5}
    path = saying(tmp_path / "target", {}, text_config=text, top_k=7)
    assert read(path).taken == {"repetition_penalty": 1.4, "suppress_tokens": (3,), "top_k": 7}
    change_json(path / "config.json", text_config={**text, "no_repeat_ngram_size": 3})
    with pytest.raises(UserError, match="says no_repeat_ngram_size 3, which is not supported"):
        read(path)


def test_an_empty_file_is_one_that_says_nothing(tmp_path: Path) -> None:
    path = saying(tmp_path / "target", {}, repetition_penalty=1.4)
    (path / "generation_config.json").write_text("{}")
    assert read(path) == GenerationConfig()


def test_suppressed_tokens_that_no_text_can_have_change_nothing(tmp_path: Path) -> None:
    path = saying(tmp_path / "target", {"suppress_tokens": [151000, 3]})
    assert read(path).taken == {"suppress_tokens": (3,)}
    (path / "generation_config.json").write_text(json.dumps({"suppress_tokens": [151000]}))
    assert read(path) == GenerationConfig()


def test_stop_strings_end_texts(tmp_path: Path) -> None:
    found = read(saying(tmp_path / "target", {"stop_strings": ["\n", "###"]}))
    assert found.over(SamplingParams()).stop == ("\n", "###")
    assert found.over(SamplingParams(stop=("x",)), {"stop"}).stop == ("x",)


def test_unknown_settings_are_named(tmp_path: Path) -> None:
    found = read(saying(tmp_path / "target", {"new_penalty": 3, "top_k": None, "suppress_tokens": []}))
    assert found.sentence() == "left: new_penalty 3"


# --- commands --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected(target: Path) -> Callable[[dict[str, tuple[int, ...]], Path], dict[str, tuple[int, ...]]]:
    """The texts by ``transformers.generate``, which reads the file itself."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)

    def texts(found: dict[str, tuple[int, ...]], out: Path) -> dict[str, tuple[int, ...]]:
        assert model.generation_config.repetition_penalty == 1.5
        engine = Engine(EngineConfig(model=str(target), drafter=None, num_spec_tokens=0, device="cpu"))
        result = {}
        for row in rows(out / "completions.jsonl"):
            ids = torch.tensor([engine.tokenizer.encode_text(row["prompt"])])
            text = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False
            )
            result[row["id"]] = tuple(text[0, ids.shape[1] :].tolist())
        return result

    return texts


def test_texts_of_a_run_are_those_of_transformers_with_the_same_file(
    target: Path, expected: Any, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    prompts = tmp_path / "prompts.jsonl"
    write_rows(prompts, ({"prompt": f"Tom has {n} bags"} for n in range(4)))
    found = generate(target, out, "--dataset", prompts, "--baseline")
    assert found == expected(found, out)
    assert json.loads((out / "report.json").read_text())["baseline"]["identical"] == 1.0
    manifest = json.loads((out / "manifest.json").read_text())
    assert (
        manifest["sampling"].items() >= (HOLDS | {"suppress_tokens": [226, 1200], "temperature": 0}).items()
    )
    assert manifest["settings"]["generation config"] == LINE
    assert (
        "greedy, repetition penalty 1.5, suppress tokens (2), at most 16 new tokens"
        in manifest["settings"]["sampling"]
    )
    assert "holds: repetition_penalty 1.5" in (out / "report.html").read_text()


def test_the_line_at_the_start_and_a_resume(target: Path, tmp_path: Path) -> None:
    command = ["generate", *models(target), "--num-prompts", 1, "--max-new-tokens", 4]
    out = ["--output", tmp_path / "run"]
    assert f"specgen: generation_config.json: {LINE}\n" in specgen(*command, *out).stderr
    assert LINE not in specgen(*command, "--quiet").stderr
    printed(*command, *out)
    other = specgen(*command, *out, "--generation-config", "none")
    assert other.exit_code != 0
    assert "--repetition-penalty 1.5 -> not given" in str(other.exception)


@pytest.mark.slow
def test_options_and_rows_win(target: Path, tmp_path: Path) -> None:
    plain = generate(DEMO / "target", tmp_path / "plain")
    assert generate(target, tmp_path / "none", "--generation-config", "none") == plain
    prompts = tmp_path / "prompts.jsonl"
    own = {"repetition_penalty": 1, "suppress_tokens": []}
    written = [
        json.loads(line) for line in (tmp_path / "plain" / "completions.jsonl").read_text().splitlines()
    ]
    write_rows(prompts, ({"prompt": row["prompt"], **own} for row in written))
    without = generate(DEMO / "target", tmp_path / "rows of none", "--dataset", prompts)
    assert generate(target, tmp_path / "rows", "--dataset", prompts) == without
    held = generate(target, tmp_path / "held", "--dataset", prompts, "--repetition-penalty", "1.0")
    assert held == without
    given = json.loads((tmp_path / "held" / "manifest.json").read_text())["sampling"]
    assert "repetition_penalty" not in given
    assert given["suppress_tokens"] == [226, 1200]
    printed("generate", "--config", tmp_path / "held" / "config.yaml", "--output", tmp_path / "again")
    assert json.loads((tmp_path / "again" / "manifest.json").read_text())["sampling"] == given


def test_sampled_rows_are_filtered_as_the_file_says(target: Path) -> None:
    engine = Engine(EngineConfig(model=str(target), drafter=None, num_spec_tokens=0, device="cpu"))
    assert engine.default_sampling == replace(SamplingParams(), **HOLDS)
    seen: list[Request] = []
    core = engine._require_open()[1]
    submit = core.submit
    core.submit = lambda request: (seen.append(request), submit(request))[1]  # type: ignore[method-assign]
    row = Prompt(id="a", text="Tom", sampling={"temperature": 1.0, "max_tokens": 2})
    list(engine.generate([row]))
    list(engine.generate([row], SamplingParams()))
    assert seen[0].sampling == replace(SamplingParams(temperature=1.0, max_tokens=2), **HOLDS)
    assert seen[1].sampling == SamplingParams(temperature=1.0, max_tokens=2)


@pytest.mark.slow
def test_verify_judges_with_the_same_settings(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "audit.json"
    short = ("--num-prompts", 3, "--max-new-tokens", 8, "--batch-sizes", "1,3", "--output", out)
    result = specgen("verify", *models(target), *short)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["manifest"]["sampling"]["repetition_penalty"] == 1.5
    assert found["manifest"]["settings"] == {"generation config": LINE}
    assert {arm["identical"] for arm in found["arms"]} == {1.0}
    assert f"specgen: generation_config.json: {LINE}" in result.stderr


def test_a_divergence_is_judged_by_penalised_logits() -> None:
    """Token 1 is chosen because token 0 was said: that token 0 has the largest logit explains nothing."""
    judge = Judge(
        logits_after=lambda tokens: torch.tensor([4.0, 3.0, 2.999, -1.0]), dtype=torch.float32, token_text=str
    )
    sampling = SamplingParams(repetition_penalty=2.0)
    near = judge.first_divergence("a", (0,), (1,), (2,), sampling)
    wrong = judge.first_divergence("a", (0,), (1,), (0,), sampling)
    assert (near.gap, wrong.gap) == pytest.approx((0.001, 1.0), abs=1e-5)
    assert wrong.logit == 2.0
    assert not wrong.explained
    raw = judge.first_divergence("a", (0,), (1,), (2,))
    assert near.rounding == 2 * raw.rounding
    suppressed = judge.first_divergence("a", (), (1,), (2,), SamplingParams(suppress_tokens=(0,)))
    assert (suppressed.gap, suppressed.rounding) == pytest.approx((0.001, raw.rounding), abs=1e-5)


def test_a_tune_and_a_bench_run_with_them(target: Path) -> None:
    config = EngineConfig(model=str(target), drafter=str(DEMO / "drafter"), device="cpu")
    workload = Workload(dataset="bundled", max_new_tokens=8, num_prompts=4)
    job = TuneJob(engine=config, workload=workload, batches=(2,), draft_lengths=(DraftLength(most=2),))
    ready = prepare(job)
    assert {request.sampling for request in ready.prompts.requests} == {SamplingParams(max_tokens=8, **HOLDS)}
    assert f"generation_config.json: {LINE}" in ready.notes
    none = prepare(replace(job, engine=replace(config, generation_config="none")))
    assert {request.sampling for request in none.prompts.requests} == {SamplingParams(max_tokens=8)}


def test_a_comparison_s_runs_and_speeds_have_the_same(target: Path, tmp_path: Path) -> None:
    job = HeadsJob(
        EngineConfig(model=str(target), drafter="ngram", device="cpu"),
        ("ngram",),
        SamplingParams(max_tokens=4, top_k=5),
        (DataSource(dataset="bundled", num_prompts=2),),
        0,
        frozenset({"top_k", "max_tokens"}),
    )
    run = HeadsRun(job, tmp_path / "out", lambda name: Silent(), lambda: False)
    held = HOLDS | {"top_k": 5}
    found = run.generate()
    timed, *_ = run._requests(found, *next(iter(job.sources.items())))
    assert timed.sampling == SamplingParams(max_tokens=4, **held)
    assert found.runs[0].manifest["sampling"] == json.loads(
        json.dumps(SamplingParams(max_tokens=4, **held).to_json())
    )


def test_an_evaluation_has_them_too(target: Path, tmp_path: Path) -> None:
    job = StudyJob(
        study=Study(name="one", tasks=("word_problems",), arms=named_arms("padded"), limit=1),
        engine=EngineConfig(model=str(target), drafter=str(DEMO / "drafter"), device="cpu"),
        apply_chat_template=False,
        max_new_tokens=6,
    )
    study = StudyRun(job, tmp_path / "out", Silent())
    (result,) = study.arms()
    (sample, *_) = result.answers.values()
    sampling = sample.generated.sampling
    assert sampling.repetition_penalty == 1.5
    assert study.settings()["generation config"] == LINE
    request = Request(
        id="a",
        prompt_token_ids=sample.generated.prompt_token_ids,
        sampling=SamplingParams(max_tokens=6, repetition_penalty=1.5),
    )
    reference = DenseTarget(DEMO / "target")
    reference.model.generation_config.suppress_tokens = [226, 1200]
    text = sample.generated.token_ids
    assert reference.texts([request], with_penalty)["a"][: len(text)] == text


def test_an_engine_expects_what_the_file_says(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is measured, and kernels are compiled, for penalties that every request has."""
    from specgen.engine import engine as engine_module

    build, asked = engine_module.build_engine, []

    def seen(*given: Any, expected: SamplingParams) -> Any:
        asked.append(SamplingForm.of([expected]))
        return build(*given, expected=expected)

    monkeypatch.setattr(engine_module, "build_engine", seen)
    Engine(EngineConfig(model=str(target), drafter=None, num_spec_tokens=0, device="cpu"))
    assert asked == [SamplingForm("plain", 16, None, penalised=True)]
