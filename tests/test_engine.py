"""The engine's Python API: strings and prompts in, outputs as they finish, failed ones too; what a closed one frees."""

import gc
import json
import subprocess
import sys
import weakref
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import specgen
from specgen import Engine, EngineConfig, Message, Prompt, RequestOutput, SamplingParams
from specgen.checkpoints.checkpoint import open_checkpoint, target_config
from specgen.config.bundled import pair
from specgen.engine.conversations import first_turns
from specgen.prompts import Rejected
from specgen.record.record_rows import EngineRow, PassRow
from specgen.report.display import clip
from specgen.text.tokenizer import load_tokenizer
from tests.commands import refused
from tests.tiny_checkpoints import write_head, write_target
from tests.tiny_tokenizers import write_byte_level

SHORT = SamplingParams(max_tokens=8, ignore_eos=True)

CHAT = Prompt(
    id="chat", messages=(Message(role="user", content="Tom has 12"),), follow_ups=("And now?", "Stop here")
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    write_head(path / "drafter", write_target(path / "target", vocab_size=352), draft_vocab_size=100)
    write_byte_level(path / "target")
    return path


@pytest.fixture(scope="module")
def events() -> list[EngineRow]:
    return []


@pytest.fixture(scope="module")
def engine(path: Path, events: list[EngineRow]) -> Engine:
    config = EngineConfig(model=str(path / "target"), drafter=str(path / "drafter"), device="cpu")
    return Engine(config, record=events.append)


def passes_of(events: list[EngineRow]) -> list[PassRow]:
    return [row for row in events if isinstance(row, PassRow)]


def by_id(outputs: list[RequestOutput]) -> dict[str, RequestOutput]:
    assert len({output.id for output in outputs}) == len(outputs)
    return {output.id: output for output in outputs}


def test_string_prompts_get_their_index_as_id(engine: Engine) -> None:
    outputs = by_id(list(engine.generate(["Tom has", "Stop", "5 bags"], SHORT)))
    assert set(outputs) == {"0", "1", "2"}
    assert outputs["1"].prompt == "Stop"
    assert {(len(output.token_ids), output.finish_reason) for output in outputs.values()} == {(8, "length")}
    metrics = outputs["0"].metrics
    assert metrics.num_spec_steps + metrics.num_accepted_draft_tokens >= 7
    assert list(outputs["0"].to_row())[:3] == ["id", "prompt", "text"]


def test_engines_and_outputs_are_one_short_line(engine: Engine) -> None:
    (good,) = engine.generate(["a"], SamplingParams(max_tokens=90, ignore_eos=True))
    assert good.metrics is not None
    assert repr(good) == (
        f"RequestOutput(id='0', text={clip(good.text, 60)!r}, finish_reason='length', 90 tokens, acceptance length "
        f"{good.metrics.mean_acceptance_length:.2f})"
    )
    assert repr(RequestOutput(id="1", error="too long", finish_reason="error")) == (
        "RequestOutput(id='1', error='too long')"
    )
    assert (
        repr(engine) == f"<Engine: {engine.config.model} with {engine.config.drafter}, K 4, float32 on cpu>"
    )


def test_invalid_prompts_are_returned_as_failed_outputs(engine: Engine) -> None:
    prompts = [
        Prompt(id="ids", token_ids=(400,), where="line 3"),
        "Tom",
        Rejected(id="line 4", reason="line 4: no prompt"),
        Prompt(id="long", text="Tom " * 300, where="line 5"),
    ]
    outputs = by_id(list(engine.generate(prompts, SHORT)))
    assert outputs["1"].error is None
    reasons = {name: str(output.error) for name, output in outputs.items() if output.error}
    assert reasons["line 4"] == "line 4: no prompt"
    assert reasons["ids"].startswith("line 3: token id 400")
    assert reasons["long"].startswith("line 5: the prompt has")
    assert outputs["long"].to_row() == {"id": "long", "error": reasons["long"], "turn": 1}


def test_chats_without_a_chat_template_are_refused_as_a_whole(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_byte_level(tmp_path, chat_template=None)))
    requests, failures = first_turns([Prompt(id="raw", text="Tom")], tokenizer, SHORT)
    assert ([request.id for request in requests], failures) == (["raw"], [])
    with refused("no chat template"):
        first_turns([Prompt(id="raw", text="Tom"), CHAT], tokenizer, SHORT)


def test_turns_after_a_failed_turn_fail(engine: Engine) -> None:
    words = Message(role="user", content="Tom " * 300)
    outputs = by_id(list(engine.generate([Prompt(id="a", messages=(words,), follow_ups=("Why?",))], SHORT)))
    assert outputs["a/turn-2"].error == "turn 1 before it has no answer"
    assert outputs["a/turn-2"].turn == 2


def test_given_answers_are_context_and_not_generated_again(engine: Engine, events: list[EngineRow]) -> None:
    whole = by_id(list(engine.generate([CHAT], SHORT)))
    assert list(whole) == ["chat", "chat/turn-2", "chat/turn-3"]
    events.clear()
    earlier = {name: whole[name].text for name in ("chat", "chat/turn-2")}
    rest = by_id(list(engine.generate([CHAT], SHORT, earlier=earlier)))
    assert rest == {"chat/turn-3": whole["chat/turn-3"]}
    assert sum(row.kind == "prefill" for row in passes_of(events)) == 1, "the last turn's"
    assert list(engine.generate([CHAT], SHORT, earlier=earlier | {"chat/turn-3": "x"})) == []


def test_per_prompt_sampling_params(engine: Engine) -> None:
    prompts = [Prompt(id="a", text="Tom", sampling={"max_tokens": 3}), Prompt(id="b", text="Tom")]
    outputs = by_id(list(engine.generate(prompts, SHORT)))
    assert (len(outputs["a"].token_ids), len(outputs["b"].token_ids)) == (3, 8)


def test_logprobs_are_in_the_row(engine: Engine) -> None:
    prompts = [Prompt(id="a", text="Tom", sampling={"logprobs": 2}), Prompt(id="b", text="Tom")]
    outputs = by_id(list(engine.generate(prompts, SHORT)))
    row = outputs["a"].to_row()
    assert len(row["logprobs"]) == len(row["token_ids"]) == 8
    first = json.loads(json.dumps(row["logprobs"][0]))
    assert first["top"][0] == [row["token_ids"][0], pytest.approx(first["chosen"])]
    assert outputs["a"].token_ids == outputs["b"].token_ids
    assert "logprobs" not in outputs["b"].to_row()


def test_a_stopped_run_yields_finished_outputs_and_drops_the_rest(
    engine: Engine, events: list[EngineRow]
) -> None:
    events.clear()
    prompts = [Prompt(id=str(n), text="Tom", sampling={"max_tokens": n}) for n in (2, 200)]
    outputs = list(engine.generate(prompts, SHORT, until=lambda: len(passes_of(events)) > 1))
    assert [output.id for output in outputs] == ["2"]
    assert len(list(engine.generate(["Tom"], SHORT))) == 1, "the engine is free again"


def test_concurrent_generate_calls_are_refused(engine: Engine) -> None:
    first = engine.generate(["Tom", "Stop", "a", "b"], SHORT)
    next(first)
    with refused("generating already"):
        next(engine.generate(["Tom"]))
    first.close()
    assert len(list(islice(engine.generate(["Tom", "Stop"], SHORT), 1))) == 1
    assert len(list(engine.generate(["Tom", "Stop"], SHORT))) == 2


def test_duplicate_ids_in_flight_are_refused(engine: Engine) -> None:
    outputs = list(engine.generate([Prompt(id="a", text="Tom"), Prompt(id="a", text="Stop")], SHORT))
    assert sorted(str(output.error)[:20] for output in outputs) == ["None", "id 'a' is being answ"]


def test_engines_share_weights(engine: Engine) -> None:
    plain = Engine(engine.config.plain(), models=engine.models)
    ours, theirs = (by_id(list(each.generate(["Tom has"], SHORT))) for each in (engine, plain))
    assert ours["0"].token_ids == theirs["0"].token_ids
    assert plain.models is engine.models


def drafts_of(engine: Engine) -> list[list[list[int]]]:
    """Of every step, by prompt."""
    outputs = by_id(list(engine.generate(["Tom has", "5 bags"], SHORT)))
    assert all(output.record is not None and output.record.steps for output in outputs.values())
    return [[list(step.drafts) for step in outputs[name].record.steps] for name in sorted(outputs)]  # type: ignore[union-attr]


def other_head(path: Path, directory: Path, seed: int) -> str:
    """Writes one for the target of ``path``."""
    write_head(
        directory, target_config(open_checkpoint(str(path / "target"))), draft_vocab_size=100, seed=seed
    )
    return str(directory)


def test_a_head_beside_a_loaded_target_is_that_of_the_config(
    engine: Engine, path: Path, tmp_path: Path
) -> None:
    config = replace(engine.config, drafter=other_head(path, tmp_path / "other", 5))
    alone = drafts_of(Engine(config))
    assert alone != drafts_of(engine), "the heads differ"
    beside = Engine(config, models=engine.models)
    assert drafts_of(beside) == alone
    assert beside.models.target is engine.models.target
    assert Engine(config, models=beside.models).models is beside.models, "the same head is not read again"
    other_head(path, tmp_path / "other", 6)  # as a training loop writes the next one
    later = Engine(config, models=beside.models)
    assert drafts_of(later) == drafts_of(Engine(config)) != alone


def test_models_of_another_target_are_refused(engine: Engine, path: Path, tmp_path: Path) -> None:
    copytree(path / "target", tmp_path / "target")
    differing: list[tuple[dict[str, Any], str]] = [
        (
            {"model": str(tmp_path / "target")},
            "model is .*/target and the models were loaded with .*/target: use",
        ),
        ({"model": "/nope"}, "'/nope' is neither a directory"),
        ({"drafter": "/nope"}, "'/nope' is neither a directory"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16 and the models were loaded with float32: use the same"),
        ({"tensor_parallel": 2}, "tensor-parallel is 2 and the models were loaded with 1: use the same"),
    ]
    for changed, reason in differing:
        with refused(reason):
            Engine(replace(engine.config, **changed), models=engine.models)
    with refused(r"models is <Engine.*: use those of an engine, engine\.models"):
        Engine(engine.config, models=engine)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json"])
def test_the_same_weights_with_other_files_beside_them_are_another_model(
    engine: Engine, path: Path, tmp_path: Path, name: str
) -> None:
    for file in (path / "target").iterdir():
        (tmp_path / file.name).symlink_to(file)
    Engine(replace(engine.config, model=str(tmp_path)), models=engine.models)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).write_text('{"eos_token_id": 2}')
    with refused(r"model is .* and the models were loaded with"):
        Engine(replace(engine.config, model=str(tmp_path)), models=engine.models)


def test_a_head_beside_a_loaded_target_says_what_nothing_reads(
    engine: Engine, path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = Path(other_head(path, tmp_path, 5))
    said = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(said | {"strange_key": 7}))
    Engine(replace(engine.config, drafter=str(directory)), models=engine.models)
    assert "nothing reads strange_key in config.json" in caplog.text


def test_a_target_that_was_written_anew_is_not_shared(path: Path, tmp_path: Path) -> None:
    copytree(path, tmp_path, dirs_exist_ok=True)
    config = EngineConfig(model=str(tmp_path / "target"), drafter=str(tmp_path / "drafter"), device="cpu")
    with Engine(config) as engine:
        write_target(tmp_path / "target", vocab_size=352)
        with refused(r"the files of model .*/target have changed since they were loaded"):
            Engine(config, models=engine.models)


def test_a_head_in_memory_drafts_beside_a_loaded_target(engine: Engine, path: Path, tmp_path: Path) -> None:
    directory = Path(other_head(path, tmp_path, 5))
    config, tensors = (
        json.loads((directory / "config.json").read_text()),
        load_file(directory / "model.safetensors"),
    )
    tensors["fc.weight"] = tensors["fc.weight"].clone().requires_grad_()
    with specgen.saved_head(config, tensors) as drafter:
        ours = Engine(replace(engine.config, drafter=drafter), models=engine.models)
    assert not Path(drafter).exists()
    assert drafts_of(ours) == drafts_of(Engine(replace(engine.config, drafter=str(directory))))
    with refused("state_dict"), specgen.saved_head(config, {"fc": 3}):  # type: ignore[dict-item]
        pass
    with refused("no JSON"), specgen.saved_head({"dtype": torch.float32}, tensors):
        pass


def test_public_names_are_imported_lazily() -> None:
    assert {getattr(specgen, name).__name__ for name in specgen.__all__} == set(specgen.__all__)
    assert set(dir(specgen)) == {*specgen.__all__, "__version__"}
    with pytest.raises(AttributeError, match=r"no attribute 'engin' \(did you mean Engine\?\)$"):
        specgen.engin  # noqa: B018
    code = "import sys, specgen; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


MODEL, DRAFTER = pair()
CONFIG = EngineConfig(model=MODEL, drafter=DRAFTER, device="cpu", max_batch_size=2)
SHORTER = SamplingParams(max_tokens=4, ignore_eos=True)
CLOSED = "the engine is closed: make a new one"


def num_tensors() -> int:
    """All that Python refers to, weights and caches included."""
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def num_after_one() -> int:
    """Tensors that are left behind an engine that was opened, used and closed."""
    with Engine(CONFIG) as engine:
        weights = weakref.ref(engine.models.target.embedding)
        assert len(list(engine.generate(["Tom has", "5 bags"], SHORTER))) == 2
        assert weights() is not None
        assert num_tensors() > 50
    assert weights() is None
    return num_tensors()


@pytest.mark.usefixtures("weights_of_its_own")
def test_one_engine_after_the_other_leaves_no_tensor() -> None:
    first = num_after_one()  # what is made once in a process stays
    assert num_after_one() == first


def test_a_closed_engine_says_so_and_closes_again() -> None:
    engine = Engine(CONFIG)
    engine.close()
    engine.close()
    for use in (
        lambda: engine.generate("Tom"),
        engine.capture_graphs,
        lambda: engine.models,
        lambda: engine.tokenizer,
    ):
        with refused(CLOSED):
            use()
    assert engine.config.model == MODEL


@pytest.mark.usefixtures("weights_of_its_own")
def test_an_engine_that_fails_within_with_is_closed() -> None:
    seen = []

    def fail() -> None:
        with Engine(CONFIG) as engine:
            seen.append(weakref.ref(engine.models.target.embedding))
            for _ in engine.generate(["Tom", "Stop", "5 bags"], SHORTER):
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen[0]() is None


@pytest.mark.usefixtures("weights_of_its_own")
def test_what_is_not_answered_when_it_is_closed_is_no_silent_end() -> None:
    engine = Engine(CONFIG)
    never_asked = engine.generate("Tom", SHORTER)
    outputs = engine.generate((f"{number} bags" for number in count()), SHORTER)
    weights = weakref.ref(engine.models.target.embedding)
    next(outputs)
    engine.close()
    assert weights() is None, "a half-read iterator holds no weights"
    for iterator in (outputs, never_asked):
        with refused(CLOSED):
            next(iterator)


def test_an_engine_is_not_closed_while_it_works() -> None:
    with Engine(CONFIG) as engine:

        def until() -> bool:
            engine.close()
            return False

        with refused("the engine is at work: close it between two outputs"):
            list(engine.generate("Tom", SHORTER, until=until))
        assert len(list(engine.generate("Tom", SHORTER))) == 1


@pytest.mark.usefixtures("weights_of_its_own")
def test_shared_weights_go_with_the_last_engine() -> None:
    first = Engine(CONFIG)
    second = Engine(CONFIG.plain(), models=first.models)
    weights = weakref.ref(first.models.target.embedding)
    first.close()
    assert weights() is not None
    assert len(list(second.generate("Tom", SHORTER))) == 1
    second.close()
    assert weights() is None


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_the_processes_of_other_ranks_end() -> None:
    config = EngineConfig(
        model=MODEL, drafter=None, num_spec_tokens=0, device="cpu", tensor_parallel=2, max_batch_size=2
    )
    with Engine(config) as engine:
        processes = [each.process for each in engine.models.peers._workers._supervisor.workers]  # type: ignore[attr-defined]
        assert len(list(engine.generate("Tom", SHORTER))) == 1
        assert [each.poll() for each in processes] == [None]
    assert [each.poll() for each in processes] != [None]
    with Engine(CONFIG) as alone:  # also where this process was a rank
        assert len(list(alone.generate("Tom", SHORTER))) == 1
