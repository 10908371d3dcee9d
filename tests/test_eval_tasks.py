"""Tasks over local files: lm-eval loads them, prompts them as it does its own, and scores known answers right."""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import lm_eval.tasks
import pytest
import yaml

from specgen.config.bundled import evaluation_directory
from specgen.experiments import study as tasks
from specgen.experiments.study import find_tasks, local_gsm8k, word_problems_task
from tests.commands import refused

pytestmark = pytest.mark.xdist_group("eval_command")  # which imports as much
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


def scores(task, text: str, answer: str) -> dict[str, float]:
    """The score of ``text`` by filter, where the first document's answer is ``answer``."""
    task.build_all_requests(limit=1, rank=0, world_size=1)
    (instance,) = task.instances
    instance.resps = [text]
    task.apply_filters()
    taken = instance.filtered_resps.items()
    return {name: task.process_results({"answer": answer}, [each])["exact_match"] for name, each in taken}


@pytest.fixture(params=["word_problems", "gsm8k"])
def scored(request, load, tmp_path):
    """Both tasks that are scored as GSM8K is."""
    for split in ROWS:
        write(tmp_path / f"{split}.jsonl", split)
    return load(word_problems_task() if request.param == "word_problems" else local_gsm8k(tmp_path))


def test_word_problems_are_asked_as_in_training(load):
    task = load(word_problems_task())
    first = json.loads((evaluation_directory() / "tasks/word_problems.jsonl").read_text().splitlines()[0])
    assert task.eval_docs[0] == first
    assert len(task.eval_docs) == 250
    ((prompt, settings),) = prompts(task, limit=1)
    assert prompt == first["question"]
    assert settings["do_sample"] is False
    own, ours = yaml.safe_load(OWN_GSM8K.read_text()), word_problems_task()
    same = ("filter_list", "metric_list", "doc_to_target", "output_type")
    assert all(ours[key] == own[key] for key in same), "scored as GSM8K is"


SCORED = [  # lm-eval's own filters, which are tested there
    ("12 * 3 = <<12*3=36>>36 eggs.\n#### 36", "36", 1, 1),
    ("The answer is 36.", "36", 0, 1),
    ("#### 36\nThat is more than 5", "36", 1, 0),
    ("#### 1,234", "1234", 1, 1),
    ("#### 5", "-5", 0, 0),
    ("", "36", 0, 0),
]


def test_known_answers_score(scored):
    for text, answer, strict, flexible in SCORED:
        solution = f"First 99 * 2 = <<99*2=198>>198.\n#### {answer}"
        assert scores(scored, text, solution) == {"strict-match": strict, "flexible-extract": flexible}, text


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
    monkeypatch.chdir("/")  # paths are absolute
    ours = load(config)
    hub = datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in ROWS.items()})
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name: hub)
    own = load(yaml.safe_load(OWN_GSM8K.read_text()))
    assert prompts(ours, limit=12) == prompts(own, limit=12)
    assert prompts(ours, limit=1)[0][0].count("Question:") == 6
    assert ours.VERSION == own.VERSION


def test_gsm8k_that_is_not_there(tmp_path):
    write(tmp_path / "train.jsonl", "train")
    with refused(r"no train and test files of GSM8K: name the directory"):
        local_gsm8k(tmp_path)


@pytest.mark.skipif(not (SHARED / "gsm8k").is_dir(), reason="needs the public GSM8K files")
def test_the_public_files(load, monkeypatch):
    ours = load(local_gsm8k(SHARED / "gsm8k"))
    assert (len(ours.dataset["train"]), len(ours.eval_docs)) == (7473, 1319)
    hub = ours.dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name: hub)
    own = load(yaml.safe_load(OWN_GSM8K.read_text()))
    assert prompts(ours, limit=8) == prompts(own, limit=8)


@pytest.mark.parametrize(
    ("names", "is_local"),
    [
        (["word_problems"], True),
        (["gsm8k", "word_problems"], True),
        (["gsm8k_cot", "arc_easy", "mmlu_anatomy"], True),
        (["mmlu"], False),  # a group
        (["word_problems", "nothing"], False),
    ],
)
def test_only_groups_and_unknown_names_need_the_index_of_all_of_lm_evals_tasks(
    names, is_local, tmp_path, monkeypatch
):
    made = []

    def index(include_defaults=True, include_path=None):
        made.append(include_defaults)
        return lm_eval.tasks.TaskManager(include_defaults=False, include_path=include_path)

    monkeypatch.setattr(tasks, "TaskManager", index)
    loads = tasks._require_loads

    def require_loads(manager, task, runs_code: bool):
        if task == "nothing" or not isinstance(task, str):  # the others' data are on the hub
            loads(manager, task)

    monkeypatch.setattr(tasks, "_require_loads", require_loads)
    for split in ROWS:
        write(tmp_path / f"{split}.jsonl", split)
    unknown = pytest.raises(ValueError, match="task 'nothing' is not one of lm-eval's")
    with nullcontext() if names != ["word_problems", "nothing"] else unknown:
        find_tasks(names, tmp_path if "gsm8k" in names else None)
    assert made == [False] + [True] * (not is_local)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("UNSAFE_CODE", "runs code that a model has written, on this machine: .* --confirm-run-unsafe-code"),
        ("MULTIMODAL", "shows pictures, which is not done here: use one of text alone"),
    ],
)
def test_a_task_of_more_than_text_is_refused(flag: str, words: str) -> None:
    class Manager:
        all_tasks = ("mine",)

        def load(self, names: list[str]) -> dict[str, Any]:
            return {"tasks": {name: SimpleNamespace(**{flag: True}) for name in names}}

    with refused(f"task 'mine' {words}"):
        tasks._require_loads(Manager(), "mine")
