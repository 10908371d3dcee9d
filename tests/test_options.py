"""Options: what a configuration's fields become on the command line, and what the command line becomes."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pytest
import typer
from bench import experts, kernels, step
from typer.testing import CliRunner

from specgen.cli.evaluating import evaluate, features, score, verify
from specgen.cli.help import Command
from specgen.cli.main import app
from specgen.cli.measuring import tune
from specgen.cli.options import Only, with_options
from specgen.config import (
    VLLM_NAMES,
    DraftLength,
    EngineConfig,
    SamplingParams,
    bundled,
    counts,
    option,
    parse_bytes,
)
from tests.commands import refused, specgen

SEEN: dict[str, object] = {}


def given(command, *arguments: str) -> dict[str, object]:
    """What ``command``, which returns its parameters, is called with."""
    app = typer.Typer()
    app.command(cls=Command)(with_options(command))
    SEEN.clear()
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return dict(SEEN)


def _words(names: dict[str, int]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in names.items()]


def whole(*, engine: EngineConfig, sampling: SamplingParams):
    SEEN.update(engine=engine, sampling=sampling)


def test_without_options_a_configuration_is_its_defaults():
    made = given(whole)
    assert made["sampling"] == SamplingParams()
    engine = made["engine"]
    default = EngineConfig(model=engine.model, drafter=engine.drafter)
    assert engine.to_json() == default.to_json()
    assert engine.model.endswith("demo/target")


def test_every_field_arrives():
    names = {"model": "a", "drafter": "b", "drafter_batch": "non-padded", "draft_sampling": "probabilistic"}
    names |= {"max_batch_size": 3, "max_prefill_tokens": 5, "device": "cpu", "dtype": "float16"}
    names |= {"attention": "sdpa", "cuda_graphs": "pass", "gpu_memory_utilization": 0.25}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in names.items()]
    arguments += ["--num-spec-tokens=auto", "--kv-memory=2KiB", "--no-prefix-cache"]
    expected = EngineConfig(**names, num_spec_tokens="auto", kv_memory=2048, prefix_cache=False)
    sampled = SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.75,
        top_k=2,
        min_p=0.25,
        repetition_penalty=1.05,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=9,
        stop=("x", "y"),
        ignore_eos=True,
    )
    arguments += ["--max-new-tokens=7", "--temperature=0.5", "--top-p=0.75", "--top-k=2", "--min-p=0.25"]
    arguments += ["--repetition-penalty=1.05", "--presence-penalty=0.5", "--frequency-penalty=-0.5"]
    made = given(whole, *arguments, "--seed=9", "--stop=x", "--stop=y", "--ignore-eos")
    assert made["engine"].to_json() == expected.to_json()
    assert made["sampling"] == sampled


def test_vllms_names_are_taken_beside_ours_and_help_has_one_of_each():
    theirs = {name: at for at, name in enumerate(VLLM_NAMES, start=2)}
    ours = {VLLM_NAMES[name]: at for name, at in theirs.items()}
    assert (
        given(whole, *_words(theirs))["engine"].to_json() == given(whole, *_words(ours))["engine"].to_json()
    )
    config = EngineConfig(model="m", drafter="d", **theirs)
    assert config == EngineConfig(model="m", drafter="d", **ours)
    assert {name: getattr(config, name) for name in theirs} == theirs
    assert replace(config, num_spec_tokens=7).num_speculative_tokens == 7
    with refused(r"^max_num_seqs and max_batch_size are the same setting: give one"):
        EngineConfig(model="m", drafter="d", max_num_seqs=32, max_batch_size=32)
    assert not any(name.replace("_", "-") in specgen("generate", "--help").stdout for name in theirs)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--max-num-seqs=2", "--max-batch-size=2"),
            "max-num-seqs and max-batch-size are the same option: give",
        ),
        (("--max-num-seqs=x",), "max-batch-size is 'x': use a whole number, or auto"),
        (("--max-num-batched-tokens=x",), "max-num-batched-tokens is 'x': use a whole number"),
    ],
)
def test_wrong_values_of_vllms_names_are_one_line(words, said):
    with refused(f"^{said}"):
        raise specgen("generate", *words).exception


def test_a_command_may_have_some_fields_and_defaults_of_its_own():
    def some(
        *,
        batch: int | None = option(None, "Running", "Its own.", name="max-batch-size"),
        engine: Annotated[EngineConfig, Only("max_prefill_tokens dtype", {"max_prefill_tokens": 99})],
    ):
        SEEN.update(engine=engine, batch=batch)

    command = with_options(some)
    assert list(command.__annotations__) == ["batch", "max_prefill_tokens", "dtype", "config", "return"]
    made = given(some, "--max-batch-size=4", "--dtype=float16")
    assert (made["batch"], made["engine"].max_prefill_tokens, made["engine"].dtype) == (4, 99, "float16")
    assert given(some, "--max-prefill-tokens=7")["engine"].max_prefill_tokens == 7


def test_options_are_in_the_order_of_their_groups():
    def mixed(
        *,
        output: str = option("", "Results", ""),
        sampling: Annotated[SamplingParams, Only("seed")],
        size: int = option(1, "Table", ""),
        engine: Annotated[EngineConfig, Only("device model")],
    ):
        pass

    assert list(with_options(mixed).__annotations__) == [
        *("size", "model", "seed", "device", "output", "config", "return")
    ]


@pytest.mark.parametrize(
    ("asked", "length", "shown"),
    [
        (0, DraftLength(most=0), "0"),
        ("16", DraftLength(most=16), "16"),
        ("auto", DraftLength(most=7, kind="auto"), "auto, up to 7"),
        (DraftLength(most=3, kind="auto"), DraftLength(most=3, kind="auto"), "auto, up to 3"),
    ],
)
def test_a_draft_length_is_a_number_or_auto(asked, length, shown):
    config = EngineConfig(model="a", drafter="b", num_spec_tokens=asked)
    assert config.draft_length == length
    assert str(length) == shown
    fields = {"num_spec_tokens": length.most, "spec_length": "auto" if length.auto else "fixed"}
    assert {name: config.to_json()[name] for name in fields} == fields, "as manifests have always had it"


@pytest.mark.parametrize("asked", [17, -1, "many", 1.5, True, ""])
def test_invalid_draft_lengths_are_refused(asked):
    with refused(f"num-spec-tokens is {asked!r}: use 1 to 16"):
        EngineConfig(model="a", drafter="b", num_spec_tokens=asked)
    with refused("leaves no choice"):
        DraftLength(most=0, kind="auto")


def test_invalid_choices_are_refused():
    for field in ("drafter_batch", "draft_sampling", "draft_lm_head", "dtype", "attention", "cuda_graphs"):
        option = field.replace("_", "-")
        with refused(rf"^{option} is 'none': use one of \w+, "):
            EngineConfig(model="a", drafter="b", **{field: "none"})


def test_sizes_and_lists_of_numbers():
    assert [parse_bytes(text) for text in ("12", "1.5KiB", "2 GB")] == [12, 1536, 2 * 10**9]
    assert counts("n", "1, 8") == (1, 8)
    for text in ("", "1,", "0", "a"):
        with refused("write comma-separated numbers of at least 1"):
            counts("n", text)


NAMES = {
    verify: "model lora drafter dataset data_path num_prompts split prompt_field chat chat_template_kwargs "
    "num_spec_tokens draft_lm_head max_new_tokens generation_config batch_sizes device tensor_parallel dtype kv_dtype "
    "attention cuda_graphs output as_json quiet",
    evaluate: "tasks study arms limit num_fewshot apply_chat_template data_path "
    "confirm_run_unsafe_code model lora drafter chat_template_kwargs num_spec_tokens draft_sampling draft_lm_head "
    "verification seed n max_new_tokens generation_config max_batch_size "
    "max_prefill_tokens kv_memory device tensor_parallel dtype "
    "kv_dtype attention cuda_graphs gpu_memory_utilization prefix_cache log_samples output quiet",
    score: "model lora chat_template_kwargs dataset data_path num_prompts split prompt_field chat shard "
    "max_batch_size max_prefill_tokens kv_memory device tensor_parallel dtype kv_dtype attention cuda_graphs "
    "gpu_memory_utilization prefix_cache restart output quiet",
    features: "runs layers model lora device max_prefill_tokens layout output quiet",
    experts.experts: "shapes rows repeats dtype device output as_json quiet",
    kernels.kernels: "num_seqs max_seq_lens num_heads num_kv_heads head_dim latents num_spec_tokens page_size repeats "
    "dtype kv_dtype device output as_json quiet",
    tune: "batch k drafter_batch attention cuda_graphs repeats precision budget dry_run model lora drafter dataset "
    "data_path num_prompts split prompt_field chat prompt_tokens chat_template_kwargs draft_lm_head "
    "synthetic_acceptance output_lens max_new_tokens generation_config max_prefill_tokens "
    "device tensor_parallel dtype kv_dtype gpu_memory_utilization output as_json quiet",
    step.step: "batch_sizes prompt_tokens model drafter num_spec_tokens drafter_batch draft_lm_head max_prefill_tokens "
    "device tensor_parallel dtype kv_dtype attention cuda_graphs output as_json quiet",
}


@pytest.mark.parametrize("command", NAMES, ids=lambda command: command.__name__)
def test_the_options_are_a_decision(command):
    """A new option is added here as well; those of ``generate`` are in test_run.py."""
    assert [name for name in command.__annotations__ if name not in ("ctx", "config", "return")] == NAMES[
        command
    ].split()


def test_a_command_that_refuses_plain_decoding_does_not_offer_it_for_a_missing_drafter():
    target, _ = bundled.pair()
    for command, offers in {("generate",): True, ("verify",): False, ("tune",): False}.items():
        refused = str(specgen(*command, "--model", target).exception)
        assert "name one with --drafter (ngram needs no checkpoint)" in refused
        assert ("--num-spec-tokens 0" in refused) == offers, command


def test_messages_name_commands_that_exist() -> None:
    found = {
        name
        for path in (Path(__file__).parents[1] / "specgen").rglob("*.py")
        for name in re.findall(r"`specgen ([a-z]+)", path.read_text())
    }
    assert found - {*typer.main.get_command(app).commands} == set()
