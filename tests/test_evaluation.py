"""lm-eval on our engine: scores and texts are those of lm-eval's own ``hf`` model on the same checkpoint."""

from collections.abc import Iterator
from inspect import GEN_CLOSED, getgeneratorstate
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from specgen.config import EngineConfig, SamplingParams, UserError
from specgen.core.engine_core import EngineCore
from specgen.engine.loading import Models
from specgen.record.results import RunDirectory
from tests.commands import write_rows
from tests.engines import engine_config, loaded, resolved
from tests.jobs import Silent
from tests.tiny_checkpoints import write_head, write_target
from tests.tiny_tokenizers import write_byte_level

pytestmark = pytest.mark.xdist_group("eval_command")  # which imports as much

SHORT = SamplingParams(max_tokens=12)
QUESTIONS = [
    {"question": "Tom has 12 apples.", "choices": ["12 apples", "3 bags", "tea"], "answer": 0},
    {"question": "Ein Känguru trinkt ", "choices": ["Tee", "süßen Tee für 3 €", "日本語"], "answer": 1},
    {"question": "Stop here, " * 60, "choices": ["please!", "no", "STOP " * 20], "answer": 2},
]
PAGES = [{"page": "Tom buys 3 bags."}, {"page": "Ein Känguru trinkt süßen Tee im Café. " * 12}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    write_head(path / "drafter", write_target(path / "target", vocab_size=320), draft_vocab_size=100)
    write_byte_level(path / "target")
    return path


@pytest.fixture(scope="module")
def config(path: Path) -> EngineConfig:
    return resolved(engine_config(path, num_spec_tokens=3, max_batch_size=4, max_prefill_tokens=100))


@pytest.fixture(scope="module")
def models(config: EngineConfig) -> Models:
    return loaded(config)


def new_lm(config: EngineConfig, models: Models, path: Path) -> Any:
    """The language model with its answers in ``path``."""
    from specgen.experiments.language_model import SpecgenLM

    files = RunDirectory(path)
    return SpecgenLM(config=config, models=models, sampling=SHORT, files=files, progress=Silent())


@pytest.fixture
def lm(config: EngineConfig, models: Models, tmp_path: Path) -> Any:
    return new_lm(config, models, tmp_path / "files")


@pytest.fixture(scope="module")
def hf(path: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(path / "target"), dtype="float32", device="cpu", batch_size=1)


def task(tmp_path: Path, name: str, rows: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """A task over local rows."""
    file = tmp_path / f"{name}.jsonl"
    write_rows(file, rows)
    kwargs = {"data_files": {"test": str(file)}, "cache_dir": str(tmp_path / "cache")}
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": kwargs,
        "test_split": "test",
        "num_fewshot": 0,
    } | settings


def choices(tmp_path: Path, name: str, **settings: Any) -> dict[str, Any]:
    metrics = [
        {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")
    ]
    shape = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": metrics,
    }
    return task(tmp_path, name, QUESTIONS, **(shape | settings))


def pages(tmp_path: Path) -> dict[str, Any]:
    names = ("word_perplexity", "byte_perplexity", "bits_per_byte")
    return task(
        tmp_path,
        "pages",
        PAGES,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{page}}",
        metric_list=[{"metric": name} for name in names],
    )


def written(tmp_path: Path, name: str, **arguments: Any) -> dict[str, Any]:
    return task(
        tmp_path,
        name,
        QUESTIONS,
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="{{choices[answer]}}",
        generation_kwargs=arguments,
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )


def evaluate(lm: Any, *tasks: dict[str, Any], **options: Any) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)  # the index of lm-eval's own tasks takes seconds
    results = simple_evaluate(model=lm, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **options)
    assert results is not None
    return results


def answers(results: dict[str, Any]) -> dict[tuple[str, int], Any]:
    return {
        (name, sample["doc_id"]): sample["resps"]
        for name, samples in results["samples"].items()
        for sample in samples
    }


@pytest.mark.slow
def test_scores_are_those_of_the_hf_model(lm: Any, hf: Any, tmp_path: Path) -> None:
    tasks = [
        choices(tmp_path, "delimited"),
        choices(tmp_path, "joined", target_delimiter=""),
        choices(tmp_path, "without_context", doc_to_text=""),
        pages(tmp_path),
    ]
    ours, theirs = evaluate(lm, *tasks), evaluate(hf, *tasks)
    for key, expected in answers(theirs).items():
        for (found,), (wanted,) in zip(answers(ours)[key], expected, strict=True):
            if isinstance(wanted, float):
                assert found == pytest.approx(wanted, abs=1e-3), key
            else:
                assert found[0] == pytest.approx(wanted[0], abs=1e-3), key
                assert found[1] == wanted[1], key
    for name, metrics in theirs["results"].items():
        numbers = {metric: value for metric, value in metrics.items() if isinstance(value, float)}
        assert len(numbers) >= 2
        assert {m: ours["results"][name][m] for m in numbers} == pytest.approx(numbers, rel=1e-3)


def test_a_continuation_without_tokens_is_certain(lm: Any) -> None:
    empty, one = lm._loglikelihood_tokens([(("a", ""), [5, 6], []), (("a", "b"), [5, 6], [7])])
    assert empty == (0.0, True)
    assert one[0] < 0


@pytest.mark.slow
def test_texts_are_those_of_the_hf_model(lm: Any, hf: Any, tmp_path: Path) -> None:
    tasks = [
        written(tmp_path, "long", until=[], max_gen_toks=60),
        written(tmp_path, "stopped", until=["e", "a", "\n"], max_gen_toks=40, do_sample=False),
        written(tmp_path, "special", until=["<|user|>", "<|system|>"], max_gen_toks=60, temperature=0.0),
    ]
    expected, found = answers(evaluate(hf, *tasks)), answers(evaluate(lm, *tasks))
    assert found == expected
    lengths = {name: len(written.token_ids) for name, written in lm.generated.items()}
    assert lengths.keys() == expected.keys()
    assert len(set(lengths.values())) > 3, "texts end for several reasons"


@pytest.mark.slow
def test_chats_are_those_of_the_hf_model(lm: Any, hf: Any, tmp_path: Path) -> None:
    shots = {"num_fewshot": 2, "fewshot_split": "test", "fewshot_config": {"sampler": "first_n"}}
    chat = written(tmp_path, "chat", until=["<|end|>"], max_gen_toks=20) | shots
    options = {"apply_chat_template": True, "system_instruction": "Count.", "limit": 2}
    ours, theirs = evaluate(lm, chat, **options), evaluate(hf, chat, **options)
    assert answers(ours) == answers(theirs)
    (context, _), prompt = ours["samples"]["chat"][1]["arguments"][0], theirs["samples"]["chat"][1]
    assert context == prompt["arguments"][0][0]
    assert context.count("<|assistant|>") == 3
    begun = [{"role": "user", "content": "Tom?"}, {"role": "assistant", "content": "He has"}]
    opened = lm.apply_chat_template(begun, add_generation_prompt=False)
    assert opened == hf.apply_chat_template(begun, add_generation_prompt=False)
    assert opened.endswith("He has")


def dies_after(number: int, work: Any) -> Any:
    def dying(engine: EngineCore, requests: Any) -> Iterator[Any]:
        yield from islice(work(engine, requests), number)
        raise KeyboardInterrupt

    return dying


@pytest.mark.parametrize("work", ["generate", "score"])
def test_a_failure_closes_the_iterator_of_the_engine(
    lm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    """Even if something else keeps a reference to it."""
    made, original = [], getattr(EngineCore, work)

    def held(engine: EngineCore, requests: Any) -> Iterator[Any]:
        made.append(original(engine, requests))
        return made[-1]

    def fail(*answer: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(EngineCore, work, held)
    monkeypatch.setattr(lm.cache_hook, "add_partial", fail)
    asked = written(tmp_path, "texts", max_gen_toks=4) if work == "generate" else choices(tmp_path, "choices")
    with pytest.raises(ZeroDivisionError):
        evaluate(lm, asked)
    assert [getgeneratorstate(each) for each in made] == [GEN_CLOSED]


@pytest.mark.parametrize("cache", [pytest.param("lm-eval's", marks=pytest.mark.slow), "ours"])
def test_a_killed_run_resumes(
    config: EngineConfig, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    tasks = [written(tmp_path, "killed", until=[], max_gen_toks=8), choices(tmp_path, "scored")]
    theirs = cache == "lm-eval's"
    options = {"use_cache": str(tmp_path / "answers")} if theirs else {}
    whole = answers(evaluate(new_lm(config, models, tmp_path / "whole"), *tasks))
    for work, number in (("generate", 2), ("score", 4)):
        lm = new_lm(config, models, tmp_path / (f"files {work}" if theirs else "files"))
        with monkeypatch.context() as patched:
            patched.setattr(EngineCore, work, dies_after(number, getattr(EngineCore, work)))
            with pytest.raises(KeyboardInterrupt):
                evaluate(lm, *tasks, **options)
    last = new_lm(config, models, tmp_path / ("new files" if theirs else "files"))
    known = len(last._answers)
    assert answers(evaluate(last, *tasks, **options)) == whole
    assert len(last._answers) - known == 9 - 4, "three texts and four scores were known"


def test_generation_arguments_become_sampling_parameters(lm: Any) -> None:
    sampled = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "until": ["a", ""], "num_beams": 1}
    assert lm._sampling_of(sampled) == SamplingParams(max_tokens=12, temperature=0.7, top_p=0.9, stop=("a",))
    assert lm._sampling_of({"do_sample": False, "temperature": 0.7, "max_gen_toks": 5}).temperature == 0
    assert lm._sampling_of({"repetition_penalty": 1.1}).repetition_penalty == 1.1
    with pytest.raises(UserError, match=r"generation argument no_repeat_ngram_size is 3"):
        lm._sampling_of({"no_repeat_ngram_size": 3})


def test_a_context_without_room_for_a_prompt_is_refused(lm: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="max_gen_toks is 256 and the model's context is 256"):
        evaluate(lm, written(tmp_path, "full", max_gen_toks=256))
