"""Tasks over local files: lm-eval loads them, prompts them as it does its own, and scores known answers right."""

import json
import os
from pathlib import Path

import datasets
import lm_eval.tasks
import pytest
import yaml

from specgen.bundled import evaluation_directory
from specgen.evaluation.tasks import local_gsm8k, word_problems_task

SHARED = Path(os.environ.get("SPECGEN_DATASETS", Path(__file__).parents[2] / "shared" / "datasets"))
OWN_GSM8K = Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml"
ROWS = {
    split: [
        {"question": f"What is {i} + {n}?", "answer": f"{i} + {n} = <<{i}+{n}={i + n}>>{i + n}\n#### {i + n}"}
        for i in range(12)
    ]
    for split, n in (("train", 1), ("test", 100))
}


@pytest.fixture(scope="module")
def manager() -> lm_eval.tasks.TaskManager:
    return lm_eval.tasks.TaskManager(include_defaults=False)


@pytest.fixture
def load(manager, tmp_path, monkeypatch):
    """Tasks as lm-eval builds them, in another working directory and with an own cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def build(config):
        (task,) = manager.load([config])["tasks"].values()
        task.set_fewshot_seed(seed=1234)
        return task

    return build


def write(path: Path, split: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = datasets.Dataset.from_list(ROWS[split])
    rows.to_parquet(path) if path.suffix == ".parquet" else rows.to_json(path)


def prompts(task, *, limit: int) -> list[tuple[object, ...]]:
    """The arguments of the first requests, as a model gets them at the task's own number of examples."""
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    return [instance.args for instance in task.instances]


def scores(task, text: str) -> dict[str, float]:
    """The score of ``text`` as the answer to the first document, by filter."""
    task.build_all_requests(limit=1, rank=0, world_size=1)
    (instance,) = task.instances
    instance.resps = [text]
    task.apply_filters()
    return {
        name: task.process_results(instance.doc, [answer])["exact_match"]
        for name, answer in instance.filtered_resps.items()
    }


def test_word_problems_are_asked_as_in_training(load):
    task = load(word_problems_task())
    first = json.loads((evaluation_directory() / "tasks/word_problems.jsonl").read_text().splitlines()[0])
    assert task.eval_docs[0] == first
    assert len(task.eval_docs) == 250
    ((prompt, settings),) = prompts(task, limit=1)
    assert prompt == first["question"]
    assert settings["do_sample"] is False


@pytest.mark.parametrize(
    ("answer", "strict", "flexible"),
    [
        ("They hold 12 * 3 = <<12*3=36>>36 eggs.\n#### {}", 1, 1),
        ("The answer is {}.", 0, 1),
        ("The answer is ${}", 0, 1),
        ("#### {}\nThat is more than 5", 1, 0),
        ("#### 1{}", 0, 0),
        ("I do not know", 0, 0),
        ("", 0, 0),
    ],
)
@pytest.mark.parametrize("name", ["word_problems", "gsm8k"])
def test_the_two_filters(load, tmp_path, name, answer, strict, flexible):
    for split in ROWS:
        write(tmp_path / f"{split}.jsonl", split)
    task = load(word_problems_task() if name == "word_problems" else local_gsm8k(tmp_path))
    right = task.eval_docs[0]["answer"].split("#### ")[1]
    found = scores(task, answer.format(right))
    assert found == {"strict-match": strict, "flexible-extract": flexible}


def test_word_problems_score_as_gsm8k_does():
    own, ours = yaml.safe_load(OWN_GSM8K.read_text()), word_problems_task()
    assert all(
        ours[key] == own[key] for key in ("filter_list", "metric_list", "doc_to_target", "output_type")
    )


@pytest.mark.parametrize(
    "files",
    [
        ("train.jsonl", "test.jsonl"),
        ("main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"),
    ],
)
def test_gsm8k_from_files_is_gsm8k(load, tmp_path, monkeypatch, files):
    for split, file in zip(ROWS, files, strict=True):
        write(tmp_path / "local" / file, split)
    config = local_gsm8k(Path("local"))
    monkeypatch.chdir("/")  # what was found stays found
    ours = load(config)
    hub = datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in ROWS.items()})
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name: hub)
    own = load(yaml.safe_load(OWN_GSM8K.read_text()))
    assert prompts(ours, limit=12) == prompts(own, limit=12)
    assert prompts(ours, limit=1)[0][0].count("Question:") == 6
    assert ours.VERSION == own.VERSION


def test_gsm8k_that_is_not_there(tmp_path):
    write(tmp_path / "train.jsonl", "train")
    with pytest.raises(ValueError, match=r"no train and test files of GSM8K: name the directory"):
        local_gsm8k(tmp_path)


@pytest.mark.skipif(not (SHARED / "gsm8k").is_dir(), reason="needs the public GSM8K files")
def test_the_public_files(load, monkeypatch):
    ours = load(local_gsm8k(SHARED / "gsm8k"))
    assert (len(ours.dataset["train"]), len(ours.eval_docs)) == (7473, 1319)
    hub = ours.dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name: hub)
    own = load(yaml.safe_load(OWN_GSM8K.read_text()))
    assert prompts(ours, limit=8) == prompts(own, limit=8)
