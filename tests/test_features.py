"""Hidden states of finished runs: those of transformers, where speculators' reader looks for them."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset, load_from_disk
from safetensors.torch import load_file
from torch import Tensor

from specgen.checkpoints.checkpoint import open_checkpoint
from specgen.config.bundled import data_directory
from specgen.jobs import features
from specgen.text.tokenizer import load_tokenizer
from tests.commands import printed, refused, specgen

pytestmark = pytest.mark.xdist_group("features")
TARGET = data_directory() / "demo" / "target"
LAYERS = (2, 6, 9, 12)  # of twelve: those of EAGLE3, and the stream behind the last


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run"
    printed("generate", "--num-prompts", 2, "--max-new-tokens", 12, "--device", "cpu", "--output", path)
    return path


@pytest.fixture(scope="module")
def made(run: Path) -> Path:
    """Texts of different lengths in passes of a few, the longer ones alone."""
    path = run.with_name("features")
    printed("features", run, "--max-prefill-tokens", 100, "--device", "cpu", "--output", path)
    return path


def as_its_trainer_reads(path: Path, number: int) -> dict[str, Tensor]:
    """Row ``number`` by the rules of speculators' reader: of the layers the last is the verifier's."""
    row, found = load_from_disk(path)[number], load_file(path / f"hidden_states/hs_{number}.safetensors")
    assert torch.equal(found["token_ids"], row["input_ids"])
    return {
        "hidden_states": found["hidden_states"][:, :-1].flatten(1),
        "input_ids": found["token_ids"],
        "verifier_last_hidden_states": found["hidden_states"][:, -1],
        "loss_mask": row["loss_mask"],
    }


@torch.inference_mode()
def test_states_are_those_of_transformers_and_say_the_answers(run: Path, made: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    assert load_from_disk(made).with_format(None)["seq_len"][:] == [
        row["num_prompt_tokens"] + len(row["token_ids"]) for row in rows
    ]
    frequencies = torch.load(made / "token_freq.pt", weights_only=True)
    assert frequencies == Counter(token for row in rows for token in row["token_ids"])
    for number, row in enumerate(rows):
        found = as_its_trainer_reads(made, number)
        ids, mask = found["input_ids"], found["loss_mask"]
        assert ids[mask].tolist() == row["token_ids"]
        streams: list[Tensor] = []
        hooks = [
            layer.register_forward_pre_hook(lambda _, given, into=streams: into.append(given[0][0]))
            for layer in (*model.model.layers, model.model.norm)
        ]
        model(ids[None])
        for hook in hooks:
            hook.remove()
        expected = torch.stack([streams[layer] for layer in LAYERS], 1)
        torch.testing.assert_close(found["hidden_states"], expected[:, :-1].flatten(1), atol=2e-4, rtol=0)
        torch.testing.assert_close(found["verifier_last_hidden_states"], expected[:, -1], atol=2e-4, rtol=0)
        said = model.lm_head(model.model.norm(found["verifier_last_hidden_states"])).argmax(-1)
        assert said[:-1][mask[1:]].tolist() == row["token_ids"]


def as_specforge_reads(path: Path) -> list[dict[str, Tensor]]:
    """All texts by the rules of its offline reader: every .ckpt below, by name, of which a kind of head takes some."""
    found = []
    for file in sorted(path.rglob("*.ckpt"), key=str):
        raw = torch.load(file, weights_only=False, mmap=True)
        ids, mask = (raw[name][:2048].unsqueeze(0) for name in ("input_ids", "loss_mask"))
        assert ids.dtype == mask.dtype == torch.long
        # they meet its output weights as they are, and those are in bfloat16 whatever the target is
        assert raw["hidden_state"].dtype == raw["aux_hidden_state"].dtype == torch.bfloat16
        eagle3 = {
            "target": raw["hidden_state"].squeeze(0)[:2048].unsqueeze(0),
            "hidden_state": raw["aux_hidden_state"].squeeze(0)[:2048].unsqueeze(0),
        }
        dspark = {name: raw[name] for name in ("hidden_states", "target_last_hidden_states")}
        assert {each.shape[:2] for each in (*eagle3.values(), *dspark.values())} == {ids.shape}
        assert torch.equal(eagle3["hidden_state"], dspark["hidden_states"])
        assert torch.equal(eagle3["target"], dspark["target_last_hidden_states"])
        assert (mask[0, :-1] + mask[0, 1:] == 2).any(), "DFlash's refuses others"
        found.append({"input_ids": ids, "loss_mask": mask, **eagle3})
    return found


@torch.inference_mode()
def test_specforge_s_files_say_the_answers_by_the_output_weights_alone(
    run: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor is in a file once, and a folder has no more files than it may."""
    monkeypatch.setattr(features, "_TOGETHER", 1)
    path = run.with_name("for-specforge")
    printed("features", run, "--device", "cpu", "--layout", "specforge", "--output", path)
    files = sorted(each.relative_to(path).as_posix() for each in path.rglob("*.ckpt"))
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    assert files == [f"rows_{number}-{number + 1}/data_{number}.ckpt" for number in range(len(rows))]
    lm_head = open_checkpoint(str(TARGET)).read("model.embed_tokens.weight")  # tied
    assert lm_head is not None
    for number, (row, found) in enumerate(zip(rows, as_specforge_reads(path), strict=True)):
        ids, mask = found["input_ids"][0], found["loss_mask"][0].bool()
        assert ids[mask].tolist() == row["token_ids"]
        said = (found["target"][0].float() @ lm_head.float().T).argmax(-1)
        assert said[:-1][mask[1:]].tolist() == row["token_ids"]
        theirs = as_its_trainer_reads(made, number)["hidden_states"]
        torch.testing.assert_close(found["hidden_state"][0].float(), theirs, atol=2e-4, rtol=2**-8)
        numbers = sum(found[name].nbytes for name in ("hidden_state", "target", "input_ids", "loss_mask"))
        assert (path / files[number]).stat().st_size < numbers + 4096
    with refused("differs in data.layout"):
        printed("features", run, "--device", "cpu", "--output", path)


def test_it_goes_on_with_what_is_missing(run: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = shutil.copytree(made, made.with_name("again"))
    states = again / "hidden_states"
    kept = {file.name: file.stat().st_mtime_ns for file in states.iterdir()}
    (states / "hs_1.safetensors").write_bytes(b"")  # as a copy of them that was broken off may leave it
    whole, asked = features.prefill, list[int]()

    def counted(config: object, target: object, texts: list[list[int]], *others: object) -> object:
        asked.append(len(texts))
        return whole(config, target, texts, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(features, "prefill", counted)
    # room for what is missing, and not for the whole
    free = 2 * (states / "hs_0.safetensors").stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, free))  # type: ignore[attr-defined]
    printed("features", run, "--max-prefill-tokens", 100, "--device", "cpu", "--output", again)
    assert asked == [1]
    assert {name for name, at in kept.items() if (states / name).stat().st_mtime_ns != at} == {
        "hs_1.safetensors"
    }
    assert (
        as_its_trainer_reads(again, 1)["input_ids"].tolist()
        == as_its_trainer_reads(made, 1)["input_ids"].tolist()
    )


def test_a_data_set_that_is_half_written_is_written_again(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ("features", run, "--device", "cpu", "--output", tmp_path / "out")

    def killed(self: Dataset, path: Path) -> None:
        save_to_disk(self, path)
        (path / "dataset_info.json").write_text("")
        raise SystemExit

    save_to_disk = Dataset.save_to_disk
    with monkeypatch.context() as patch:
        patch.setattr(Dataset, "save_to_disk", killed)
        specgen(*ask)
    assert (tmp_path / "out" / "features.json").exists()
    printed(*ask)
    assert len(load_from_disk(tmp_path / "out")) == 4


def test_what_cannot_be_is_refused_before_anything_is_written(
    run: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ("features", run, "--device", "cpu", "--output")
    printed(*ask, tmp_path / "embeddings", "--layers", "0")
    for command, reason in (
        (
            (*ask, tmp_path / "out", "--layers", "1,13"),
            "layers has 13: the target has inputs of layers 0 to 12",
        ),
        ((*ask, tmp_path / "out", "--layers", "1,5,1"), "layers is 1, 5, 1: name each once"),
        (("features", tmp_path, "--output", tmp_path / "out"), "manifest.json cannot be read"),
        (("features", run), "no output is named"),
        ((*ask, made, "--layers", "1"), "differs in data.layers"),
    ):
        with refused(reason):
            printed(*command)
    anew = shutil.copytree(run, tmp_path / "anew")
    printed("features", anew, "--device", "cpu", "--output", tmp_path / "of-anew")
    rows = (anew / "completions.jsonl").read_text().splitlines()
    first = json.loads(rows[0])
    first["token_ids"][-1] += 1
    (anew / "completions.jsonl").write_text("\n".join([json.dumps(first), *rows[1:]]) + "\n")
    with refused("differs in data.texts"):
        printed("features", anew, "--device", "cpu", "--output", tmp_path / "of-anew")
    other = shutil.copytree(TARGET, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    with refused("was made by other files of .*: name the target with --model"):
        printed(*ask, tmp_path / "out", "--model", other)
    unfinished = shutil.copytree(run, tmp_path / "unfinished")
    (unfinished / "report.json").unlink()
    with refused("is not finished"):
        printed("features", unfinished, "--output", tmp_path / "out")
    cut = shutil.copytree(run, tmp_path / "cut")
    (cut / "completions.jsonl").write_text((run / "completions.jsonl").read_text().splitlines()[0] + "\n")
    for command in ((*ask[:1], cut, "--output", tmp_path / "out"), ("report", run, cut)):
        with refused(
            "cut/completions.jsonl has 1 of the 4 requests that its report is of: copy the directory"
        ):
            printed(*command)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))  # type: ignore[attr-defined]
    with refused("take 0.0 GB and the disk has 0.0 GB free"):
        printed(*ask, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert specgen("features", run, "--layers", "x", "--output", tmp_path / "out").exit_code != 0


def test_prompts_of_token_ids_are_taken_as_they_were_given(tmp_path: Path) -> None:
    """Also where the tokenizer makes others, as many, of their text."""
    tokenizer = load_tokenizer(str(TARGET))
    given = [2197, 347, 1220, 313, 828, 454, 589, 2691]
    others = tokenizer.encode_rendered(tokenizer.decode_with_special(given))
    assert others != given
    assert len(others) == len(given)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "a", "prompt_token_ids": given}))
    ask = ("--dataset", tmp_path / "rows.jsonl", "--max-new-tokens", 4, "--device", "cpu")
    printed("generate", *ask, "--output", tmp_path / "run")
    printed("features", tmp_path / "run", "--device", "cpu", "--output", tmp_path / "out")
    assert as_its_trainer_reads(tmp_path / "out", 0)["input_ids"][: len(given)].tolist() == given
