"""Study files say what is run, and a wrong one is refused before anything is loaded."""

import json

import pytest

from specgen.config import DraftLength, EngineConfig
from specgen.engine.arms import Arm
from specgen.experiments.studies import load_study
from tests.commands import refused

STUDIED = EngineConfig(
    model="target", drafter="head", num_spec_tokens=3, drafter_batch="non-padded", dtype="float32"
)
GOOD = {"source": "here", "tasks": ["word_problems"], "arms": [{"name": "padded"}]}


def load(tmp_path, **changes):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(GOOD | changes))
    return load_study(str(path))


def test_the_arms_of_the_bundled_studies():
    study = load_study("vllm-25196")
    assert (study.tasks, study.limit, study.num_fewshot, study.max_batch_size) == (("gsm8k",), 500, 5, 128)
    engines = {arm.name: arm.configure(STUDIED) for arm in (*study.arms, *load_study("fp8-kv").arms[:2])}
    found = {
        name: (engine.draft_length.most, engine.drafter_batch, engine.attention, engine.kv_dtype)
        for name, engine in engines.items()
    }
    assert found == {
        "padded": (4, "padded", "auto", "auto"),
        "non-padded": (4, "non-padded", "auto", "auto"),
        "baseline": (0, "non-padded", "auto", "auto"),
        "baseline-sdpa": (0, "non-padded", "sdpa", "auto"),
        "kv-model": (3, "non-padded", "auto", "model"),
        "kv-fp8": (3, "non-padded", "auto", "fp8"),
    }
    for engine in engines.values():
        assert (engine.model, engine.drafter, engine.dtype) == ("target", "head", "float32")
    plain = {arm.name: arm.configure(STUDIED) for arm in load_study("fp8-kv").arms[2:]}
    assert {name: (each.draft_length.most, each.kv_dtype) for name, each in plain.items()} == {
        "baseline": (0, "model"),
        "baseline-fp8": (0, "fp8"),
    }


def test_an_arm_changes_what_it_names_and_nothing_else():
    assert Arm(name="as it is").configure(STUDIED) == STUDIED
    changes = {
        "drafter_batch": "padded",
        "num_spec_tokens": 1,
        "attention": "sdpa",
        "cuda_graphs": "off",
        "dtype": "float16",
        "temperature": 0.5,  # the requests'
    }
    changed = Arm(name="all", changes=changes).configure(STUDIED)
    assert (changed.drafter_batch, changed.draft_length.most, changed.attention) == ("padded", 1, "sdpa")
    assert (changed.cuda_graphs, changed.dtype) == ("off", "float16")


def test_an_arm_may_choose_its_draft_length_by_cost():
    chosen = Arm(name="auto", changes={"num_spec_tokens": "auto"}).configure(STUDIED)
    assert chosen.draft_length == DraftLength(most=7, kind="auto")
    for k in (0, 3):
        fixed = Arm(name="fixed", changes={"num_spec_tokens": k}).configure(chosen)
        assert fixed.draft_length == DraftLength(most=k)
    assert Arm(name="as it is").configure(chosen) == chosen
    plain = chosen.plain()
    assert (plain.draft_length, plain.drafter) == (DraftLength(most=0), None)


def test_a_file_of_ones_own(tmp_path):
    study = load(tmp_path, limit=10)
    assert (study.name, study.limit, study.num_fewshot) == ("mine", 10, None)
    assert study.arms == (Arm(name="padded"),)
    (tmp_path / "other.json").write_text(json.dumps({name: GOOD[name] for name in ("tasks", "arms")}))
    assert load_study(str(tmp_path / "other.json")).source == ""


def test_a_study_is_kept_with_every_setting(tmp_path):
    """``study.json`` also has the settings an arm does not set; an evaluation resumes only if it is unchanged."""
    first = {"name": "a", "num_spec_tokens": "auto", "dtype": None, "temperature": 0.5}
    arms = [first, {"name": "b"}, {"name": "c", "kv_dtype": "fp8"}]
    settings = ("drafter_batch", "num_spec_tokens", "attention", "cuda_graphs", "dtype", "temperature")
    kept = load(tmp_path, arms=arms, limit=3).to_json()
    assert kept == {
        "name": "mine",
        "source": "here",
        "tasks": ["word_problems"],
        "limit": 3,
        "num_fewshot": None,
        "max_batch_size": None,
        "arms": [dict.fromkeys(settings) | arm for arm in arms],
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": []}, "tasks is empty"),
        ({"arms": []}, "arms is empty"),
        ({"arms": [{"name": "a"}, {"name": "a"}]}, "give each its own name"),
        ({"arms": [{"name": ""}]}, "an arm is named '': use the name of a directory"),
        ({"arms": [{"name": "../escaped"}]}, "an arm is named '../escaped': use the name of a directory"),
        ({"arms": ["padded"]}, "arms is .*: use a list of objects"),
        ({"tasks": "gsm8k"}, "tasks is 'gsm8k': use a list of names"),
        ({"limit": "5"}, "limit is '5': use a whole number"),
        ({"limit": 2.7}, "limit is 2.7: use a whole number"),
        ({"arms": [{"name": "a", "temperature": "hot"}]}, "temperature of arm 'a' is 'hot': use a number"),
        ({"arms": [{"name": "a", "drafter_batch": "nonpadded"}]}, "use one of padded, non-padded"),
        ({"arms": [{"name": "a", "attention": "flash"}]}, "use one of auto, hopper, trtllm"),
        ({"arms": [{"name": "a", "cuda_graphs": "on"}]}, "use one of auto, step"),
        ({"arms": [{"name": "a", "dtype": "fp8"}]}, "use one of auto, float32"),
        ({"arms": [{"name": "a", "kv_dtype": "int8"}]}, "use one of auto, model, fp8"),
        ({"arms": [{"name": "a", "num_spec_tokens": 17}]}, "num-spec-tokens is 17"),
        (
            {"arms": [{"name": "a", "num_spec_tokens": "many"}]},
            "num-spec-tokens is 'many': use 1 to 16, 0 .* auto or uniform",
        ),
        ({"arms": [{"name": "a", "num_spec_tokens": -1}]}, "num-spec-tokens is -1"),
        ({"arms": [{"name": "a", "temperature": -1}]}, "use 0 .greedy. or more"),
        ({"arms": [{"name": "a", "draft_batch": "padded"}]}, "draft_batch is not known"),
        ({"arms": [{"num_spec_tokens": 2}]}, "name is missing"),
        ({"limit": 0}, "limit is 0: use at least 1"),
        ({"num_fewshot": -1}, "num-fewshot is -1: use at least 0"),
        ({"max_batch_size": -1}, "max-batch-size is -1"),
        ({"limit": "all"}, "is not a study"),
        (
            {"arms": [{"name": "quick", "num_spec_token": 3}]},
            r"of the arm \{.*'quick'.*\} num_spec_token is not known \(did you mean num_spec_tokens\?\): use att",
        ),
        ({"limits": 3}, r"limits is not known \(did you mean limit\?\): use arms, limit"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path, changes, message):
    with refused(message) as caught:
        load(tmp_path, **changes)
    assert "mine.json is not a study" in str(caught.value)


def test_an_unknown_name_lists_the_bundled_ones():
    with refused(r"study is 'mine': name a JSON file, or one of fp8-kv, vllm-25196$"):
        load_study("mine")
