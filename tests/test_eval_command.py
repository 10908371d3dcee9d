"""``specgen eval``: the arms that run, what is printed and written, and what is refused before anything runs."""

import json
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from specgen.config import EngineConfig, UserError
from specgen.config.bundled import data_directory
from specgen.core import step
from specgen.decoding.verify import accept_greedy
from specgen.engine.arms import Arm
from specgen.experiments.studies import Study
from specgen.record.files import RowFile
from specgen.record.record_rows import Captured, RequestRow
from specgen.record.results import RunDirectory
from specgen.report.references import load_results
from specgen.report.report import load
from tests.commands import printed, specgen
from tests.jobs import HOW_IT_WENT, Silent

pytestmark = pytest.mark.xdist_group("eval_command")  # one study for all

SMALL = ("word_problems", "--apply-chat-template", "--limit", 6, "--num-spec-tokens", 2)


def call(*arguments: object) -> str:
    """What ``specgen eval`` prints; a ``UserError`` comes through."""
    return printed("eval", *arguments, columns=80)


def study_job(*arms: Arm, tasks: tuple[str, ...] = ("word_problems",), limit: int = 4) -> Any:
    from specgen.experiments.study import StudyJob

    demo = data_directory() / "demo"
    return StudyJob(
        study=Study(name="test", source="", tasks=tasks, arms=arms, limit=limit),
        engine=EngineConfig(model=str(demo / "target"), drafter=str(demo / "drafter"), device="cpu"),
        apply_chat_template=True,
    )


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory and output of a run of three arms. A test that changes them takes a copy."""
    path = tmp_path_factory.mktemp("study") / "out"
    return path, call(*SMALL, "--output", path, "--log-samples")


@pytest.mark.slow
def test_an_evaluation_is_repeated_by_its_file_and_quiet_on_request(
    study: tuple[Path, str], tmp_path: Path
) -> None:
    path = shutil.copytree(study[0], tmp_path / "copy")
    again = ["eval", f"--config={path / 'config.yaml'}", f"--output={path}", "--quiet"]
    result = specgen(*again, columns=80)
    # lm-eval's own bars are switched off where tqdm is not imported before, as it is by other tests here
    ours = [line for line in re.split("[\r\n]", result.stderr) if line and "it/s" not in line]
    assert (result.exit_code, ours) == (0, []), result.output
    assert result.stdout == study[1], "the same study: all its answers are known"


def test_three_arms_answer_alike_and_leave_their_numbers(study: tuple[Path, str]) -> None:
    path, printed = study
    assert [line for line in printed.splitlines() if line in ("padded", "non-padded", "baseline")] == [
        "padded",
        "non-padded",
        "baseline",
    ]
    tables = [line.split() for line in printed.splitlines() if line.startswith("Tasks ")]
    assert tables == [["Tasks", "Version", "Filter", "n-shot", "Metric", "Value", "Stderr"]] * 3
    assert max(map(len, printed.splitlines())) <= 80
    assert "Significant differences in accuracy from baseline: 0 of 4 (" in " ".join(printed.split())
    comparison = json.loads((path / "comparison.json").read_text())
    assert [each["num_identical"] for each in comparison["against"]] == [6, 6]
    page = (path / "report.html").read_text()
    assert "<dt>arms</dt> <dd>padded · non-padded · baseline</dd>" in page
    assert "<h1>demo/target on word_problems</h1>" in page
    for arm, k in (("padded", 2), ("non-padded", 2), ("baseline", 0)):
        files = path / arm
        said = json.loads((files / "manifest.json").read_text())["settings"]
        assert (said["arm"], said["draft tokens (K)"], said["tasks"]) == (arm, str(k), "word_problems")
        assert said.get("drafter batch") == {"baseline": None}.get(arm, arm)
        assert ("none" in said["drafter"]) == (arm == "baseline")
        report, _ = load(files)
        assert report.num_spec_tokens == k
        texts = (files / "report.html").read_text()
        assert texts.count("<summary>word_problems ") == texts.count(" stop · ") == 6
        assert f"<h1>{arm}: demo/target " in texts
        first, *_ = RowFile(files / "completions.jsonl").values()
        assert first["title"] == "word_problems 0"
        assert "Noah sold 76 balloons" in first["prompt"]
        assert ("<i class=correction" in texts) == (arm != "baseline")
        assert report.num_requests == 6
        document = json.loads((files / "results.json").read_text())
        asked = document["config"]
        assert (asked["model"], asked["limit"], asked["device"], asked["fewshot_seed"]) == (
            "specgen",
            6,
            "cpu",
            1234,
        )
        assert asked["model_args"]["num_spec_tokens"] == str(k)
        assert (
            (path / "study.json").stat().st_mtime - 60
            < document["date"]
            < (files / "results.json").stat().st_mtime
        )
        results = document["results"]["word_problems"]
        samples = json.loads((files / "samples_word_problems.json").read_text())
        strict = [row["exact_match"] for row in samples if row["filter"] == "strict-match"]
        assert len(strict) == 6
        assert results["exact_match,strict-match"] == sum(strict) / 6
        assert results["exact_match,strict-match"] >= 5 / 6, "the bundled pair knows these problems"
        assert load_results(files)["n-samples"]["word_problems"]["effective"] == 6


@pytest.mark.slow
def test_answers_without_the_template_are_called_empty() -> None:
    result = specgen("eval", "word_problems", "--limit", 2, "--arms", "padded", columns=80)
    printed = " ".join(result.stdout.split())
    assert result.exit_code == 1, "nothing was tested"
    assert "Add --apply-chat-template to ask them as a chat" in result.stderr
    assert (
        "Empty answers: 2 of 2 of padded; the model has a chat template: add --apply-chat-template."
        in printed
    )


@pytest.mark.slow
def test_the_reports_name_what_ran_as_seen_from_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from specgen.experiments.study import StudyRun

    monkeypatch.chdir(data_directory())
    run = StudyRun(
        study_job(Arm(name="a, b", changes={"num_spec_tokens": 2}), Arm(name="c"), limit=1),
        tmp_path,
        Silent(),
    )
    run.compare([*run.arms()])
    settings = run.settings()
    assert settings["model"] == str(Path("demo") / "target")
    assert settings["drafter"] == str(Path("demo") / "drafter")
    assert (settings["arms"], settings["draft tokens (K)"]) == ("a, b · c", "2 or 4")
    assert settings["runs on"] == "cpu, float32"
    assert settings["samples"] == "the first 1 of a task"
    page = (tmp_path / "report.html").read_text()
    assert "demo/target" in page
    assert "<dt>machine</dt>" in page


def test_an_arm_that_fails_leaves_its_files_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specgen.experiments import study

    def fails(model: Any, tasks: Any, **options: Any) -> None:
        model._files.record(Captured(time=0.0, what="step", num_sequences=1, seconds=0.5, fits=True))
        raise ZeroDivisionError

    monkeypatch.setattr(study, "evaluate", fails)
    with pytest.raises(ZeroDivisionError) as failed:
        next(study.StudyRun(study_job(Arm(name="a")), tmp_path, Silent()).arms())
    assert failed, "and holds on to all that was open"
    assert '{"row":"capture"' in (tmp_path / "a" / "passes.jsonl").read_text()


@pytest.mark.slow
def test_several_tasks_run_one_after_the_other_with_figures_each(tmp_path: Path) -> None:
    row = {"question": "Tom has 3 apples and buys 4. How many?", "answer": "3 + 4 = 7\n#### 7"}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * 4)
    arguments = ("--data-path", tmp_path, "--num-fewshot", 1, "--limit", 3, "--arms", "padded,baseline")
    out = tmp_path / "out"
    printed = call("word_problems,gsm8k", "--apply-chat-template", *arguments, "--output", out)
    assert re.search(r"^gsm8k +padded +\d\.\d\d ", printed, re.MULTILINE)
    assert re.search(r"^gsm8k +3 +flexible-extract +1 +exact_match ", printed, re.MULTILINE)
    padded, _ = (arm["tasks"] for arm in json.loads((out / "comparison.json").read_text())["arms"])
    categories = load(out / "padded")[0].categories
    assert {task: each["num_requests"] for task, each in padded.items()} == {"word_problems": 3, "gsm8k": 3}
    for task, figures in padded.items():
        assert figures["mean_acceptance_length"] == categories[task].mean_acceptance_length
        assert figures["ratio"] > 0
    spans: dict[str, list[float]] = {}
    for row in RowFile(out / "padded" / "completions.jsonl").values():
        spans.setdefault(row["category"], []).extend((row["record"]["arrival"], row["record"]["ended"]))
    first, second = sorted(spans.values(), key=min)
    assert max(first) < min(second), "one is done before the other begins"
    assert len(first) == len(second) == 6


@pytest.mark.slow
def test_prompts_that_lost_their_start_are_counted(tmp_path: Path) -> None:
    rows = [
        {"question": f"{'Tom has 3 apples. ' * number}How many?", "answer": "#### 3"}
        for number in (400, 4, 400)
    ]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("--data-path", tmp_path, "--num-fewshot", 0, "--arms", "padded,baseline")
    out = tmp_path / "out"
    printed = call("gsm8k", *arguments, "--output", out)
    sentence = (
        "Prompts too long for the context lost their start: 2 of gsm8k to 1,792 tokens; lower --num-fewshot."
    )
    assert sentence in " ".join(printed.split())
    assert json.loads((out / "comparison.json").read_text())["sentence"].endswith(sentence)
    (tmp_path / "main").mkdir()
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").rename(tmp_path / "main" / f"{split}.jsonl")
    again = ("gsm8k", "--data-path", tmp_path / "main", *arguments[2:], "--output", out)
    assert call(*again) == printed, "the same rows by another path"
    (tmp_path / "main" / "test.jsonl").write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(UserError, match=r"differs in (--data-path|the prompts)"):
        call(*again)


@pytest.mark.slow
def test_an_arm_may_sample_and_a_study_file_names_it(tmp_path: Path) -> None:
    arms = [{"name": "hot", "temperature": 2.0}, {"name": "cold"}]
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"source": "here", "tasks": ["word_problems"], "limit": 6, "arms": arms}))
    call("--study", file, "--apply-chat-template", "--output", tmp_path / "out")
    (hot,) = json.loads((tmp_path / "out" / "comparison.json").read_text())["against"]
    assert hot["name"] == "cold", "the first arm is the reference where none is named baseline"
    assert hot["num_compared"] == 6
    assert hot["num_identical"] < 6


def test_choices_are_compared_by_the_best_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks import TaskManager

    from specgen.experiments import study
    from specgen.experiments.study import Tasks
    from tests.test_evaluation import choices, pages

    tasks = Tasks(
        manager=TaskManager(include_defaults=False), configs=[choices(tmp_path, "choices"), pages(tmp_path)]
    )
    monkeypatch.setattr(study, "find_tasks", lambda names, data_path, **_: tasks)
    (result,) = study.StudyRun(
        study_job(Arm(name="baseline", changes={"num_spec_tokens": 0})), tmp_path / "out", Silent()
    ).arms()
    assert {tuple(answer.scores) for answer in result.answers.values()} == {("acc,none", "acc_norm,none")}
    for sample, row in zip(result.answers.values(), result.results["samples"]["choices"], strict=True):
        likelihoods = [response[0][0] for response in row["resps"]]
        assert sample.text == f"choice {likelihoods.index(max(likelihoods))}"
        assert sample.scores["acc,none"] == (sample.text == f"choice {row['doc']['answer']}")
        assert sample.question == row["doc"]["question"]
    assert result.seconds > 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "no task is given"),
        pytest.param(  # reads the index of lm-eval's own
            ("word_problem",),
            r"task 'word_problem' is not one of lm-eval's \(did you mean word_problems\?\)",
            marks=pytest.mark.slow,
        ),
        (
            ("word_problems", "--arms", "padded,fast"),
            "arm 'fast' is unknown: use padded, non-padded, baseline",
        ),
        (("word_problems", "--arms", "padded,padded"), "give each its own name"),
        (("word_problems", "--arms", "nonpadded"), r"'nonpadded' is unknown \(did you mean non-padded\?\)"),
        (("word_problems", "--limit", 0), "limit is 0"),
        (("word_problems", "--log-samples"), "log-samples needs a directory"),
        (("word_problems", "--data-path", "."), "only gsm8k is read from there"),
        (("--study", "nothing"), "name a JSON file, or one of fp8-kv, vllm-25196"),
    ],
)
def test_what_cannot_run_is_refused(arguments: tuple[object, ...], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        call(*arguments)


def cut_after(number: int, path: Path) -> None:
    """Truncate an arm's files as a kill in the middle of a line does, while rows are in the order of their ends."""
    lines = (path / "completions.jsonl").read_text().splitlines(keepends=True)
    rows = sorted(lines, key=lambda line: json.loads(line)["record"]["ended"])
    assert rows != lines, "they ended in another order than they were asked in"
    (path / "completions.jsonl").write_text("".join([*rows[:number], rows[number][:-9]]))
    (path / "report.json").unlink()


def test_a_killed_evaluation_resumes(study: tuple[Path, str], tmp_path: Path) -> None:
    whole, killed = study[0], tmp_path / "killed"
    shutil.copytree(whole, killed)
    cut_after(2, killed / "padded")
    shutil.rmtree(killed / "baseline")
    printed = call(*SMALL, "--output", killed)
    assert "Significant differences in accuracy from baseline: 0 of 4 (" in " ".join(printed.split())
    for arm in ("padded", "non-padded", "baseline"):
        ours, theirs = (load(path / arm)[0].to_json() for path in (killed, whole))
        for timed in {*HOW_IT_WENT} - {"num_cached_tokens", "busy"}:
            del ours[timed], theirs[timed]
        assert ours == theirs
        rows = [
            list(map(without_time, RowFile(path / arm / "completions.jsonl").values()))
            for path in (killed, whole)
        ]
        assert rows[0] == rows[1]
        logged = json.loads((whole / arm / "samples_word_problems.json").read_text())
        texts = {each["doc_id"]: each["resps"][0][0] for each in logged}  # under every metric
        assert [row["text"] for row in rows[0]] == [texts[doc_id] for doc_id in sorted(texts)]
        pages = [(path / arm / "report.html").read_text() for path in (killed, whole)]
        assert len({tuple(re.findall(r"word_problems \d+", page)) for page in pages}) == 1
    resumed = RowFile(killed / "padded" / "completions.jsonl").values()
    sessions = sorted(row["record"]["session"] for row in resumed)
    assert sessions == ["0/1-0"] * 2 + ["0/1-1"] * (len(sessions) - 2), "what was done is not asked again"


def without_time(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("seconds", "record")}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_ends_it_in_one_line_and_what_is_answered_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    def add_completion(self: RunDirectory, row: dict[str, Any], record: RequestRow) -> None:
        add(self, row, record)
        if len(self.completions) == 3:
            signal.raise_signal(number)

    before, add = signal.getsignal(number), RunDirectory.add_completion
    monkeypatch.setattr(RunDirectory, "add_completion", add_completion)
    result = specgen("eval", *map(str, SMALL), "--output", str(tmp_path))
    assert result.exit_code == code
    assert result.stderr.splitlines()[-1] == "specgen: interrupted; the same command resumes the run"
    assert len(RowFile(tmp_path / "padded" / "completions.jsonl")) == 3
    assert signal.getsignal(number) == before
    monkeypatch.setattr(RunDirectory, "add_completion", add)
    assert "6 of 6" in call(*SMALL, "--output", tmp_path)


def test_only_the_same_evaluation_resumes(study: tuple[Path, str], tmp_path: Path) -> None:
    path = Path(shutil.copytree(study[0], tmp_path / "copy"))
    with pytest.raises(UserError, match=r"differs in study\.limit 6 -> 5: name a new directory"):
        call(*SMALL, "--limit", 5, "--output", path)
    manifest = path / "padded" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"torch": "', '"torch": "older than '))
    with pytest.raises(UserError, match=r"differs in versions\.torch older than"):
        call(*SMALL, "--output", path)


def plant(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """A wrong bonus token in this share of the verify steps that have drafts."""
    draw = random.Random(0)

    def accept(drafts: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor]:
        accepted, tokens = accept_greedy(drafts, greedy)
        if drafts.shape[1]:
            for row in range(len(tokens)):
                if draw.random() < share:
                    tokens[row, accepted[row]] = 100 + draw.randrange(400)
        return accepted, tokens

    monkeypatch.setattr(step, "accept_greedy", accept)


@pytest.mark.slow
def test_a_wrong_bonus_token_in_three_steps_of_a_hundred_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, 0.03)
    few = ("--limit", 80, "--arms", "padded,baseline", "--output", tmp_path)
    result = specgen("eval", "word_problems", "--apply-chat-template", *few)
    assert result.exit_code == 1, result.output
    assert "decoding is wrong there" in " ".join(result.stdout.split())
    assert re.search(
        r"from baseline: [12] of 2 \(smallest p after Holm .*: padded -", " ".join(result.stdout.split())
    )
    found = json.loads((tmp_path / "comparison.json").read_text())
    (against,) = found["against"]
    differing = against["num_compared"] - against["num_identical"]
    assert found["num_unexplained"] == differing > 10
    assert all(each["first"]["gap"] > each["first"]["rounding"] for each in against["differences"])


def test_an_output_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not empty"):
        call(*SMALL, "--output", tmp_path)
