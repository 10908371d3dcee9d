"""``specgen inspect``: how a checkpoint is understood, its sizes, and whether a pair fits."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from specgen.checkpoints.checkpoint import load_drafter, load_target, open_checkpoint
from specgen.checkpoints.inspect_checkpoint import Description, describe
from specgen.cli.main import app
from specgen.config import UserError
from specgen.config.bundled import data_directory, heads
from specgen.models.eagle import Eagle3Config
from specgen.models.families import FAMILIES, HEAD_FAMILIES
from specgen.models.model_config import TargetConfig
from tests.tiny_checkpoints import LLAMA3_SCALING, change_json, write_head, write_target


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    write_target(path, rope=LLAMA3_SCALING, eos_token_id=[2, 9], max_shard_size="100KB")
    return path


@pytest.fixture(scope="module")
def config(target_path: Path) -> TargetConfig:
    config = describe(str(target_path)).parts[0].config
    assert isinstance(config, TargetConfig)
    return config


def _json(description: Description) -> dict[str, Any]:
    """Through JSON and back: every value must be serialisable."""
    decoded: dict[str, Any] = json.loads(json.dumps(description.to_json()))
    return decoded


def test_a_target_alone(target_path: Path) -> None:
    description = describe(str(target_path))
    [part] = _json(description)["checkpoints"]
    expected = {
        "kind": "target",
        "architecture": "LlamaForCausalLM",
        "vocab_size": 128,
        "num_layers": 6,
        "eos_token_ids": [2, 9],
        "dtypes": ["float32"],
        "problems": [],
        # embedding and head, six layers, final norm
        "num_parameters": 2 * 128 * 64 + 6 * (64 * 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64,
        "kv_bytes_per_token": 2 * 6 * 2 * 16 * 4,
    }
    assert {name: part[name] for name in expected} == expected
    assert part["num_bytes"] == 4 * part["num_parameters"]
    assert part["num_files"] > 1
    assert part["rope"]["llama3"]["factor"] == 8.0
    assert _json(description)["fit"] is None
    text = description.to_text()
    assert "EOS tokens  2, 9" in text
    assert "llama3 scaling by 8" in text
    assert "Complete and supported." in text
    assert max(map(len, text.splitlines()[1:])) <= 100


TEXT = """
{target}: a target
  family      LlamaForCausalLM
  vocabulary  128 tokens; output weights separate from the embedding
  context     256 tokens
  EOS tokens  2, 9
  layers      6, 64 wide, MLP 128 wide
  attention   4 heads, 2 KV heads, 16 wide each
  rotary      base 10,000, llama3 scaling by 8 from 64 positions
  weights     238,400 parameters, 0.9 MiB as float32 in 11 files
  KV cache    1,536 bytes per token

{head}: an EAGLE3 head
  named       'LlamaForCausalLMEagle3' in config.json
  dialect     EAGLE, SpecForge
  features    the target's residual stream at the inputs of layers 2, 3, 3
  rule        no ids given: the default layer inputs 2, L//2, L-3 of a target of L layers
  norms       fc_norm (one for each feature), norm_output (of the hidden state fed back)
  vocabulary  drafts 48 of 128 tokens (37.5%)
  embedding   its own
  output      its own output weights
  target      64 wide
  layers      1, 64 wide, MLP 128 wide
  attention   4 heads, 2 KV heads, 16 wide each
  rotary      base 10,000, no scaling
  weights     69,056 parameters, 0.3 MiB as float32 in 1 file
  KV cache    256 bytes per token

Target and head fit; together 1,792 bytes of KV cache per token.
NaN in weights is not looked for here, but when they are loaded."""


def test_full_text_of_a_pair(tmp_path: Path, target_path: Path, config: TargetConfig) -> None:
    write_head(tmp_path, config, fc_norm=True, norm_output=True, own_embedding=True)
    text = describe(str(target_path), str(tmp_path)).to_text()
    assert text == TEXT.strip().format(target=target_path, head=tmp_path)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_fitting_pair_in_either_order(
    tmp_path: Path, target_path: Path, config: TargetConfig, swapped: bool
) -> None:
    write_head(
        tmp_path, config, aux_layer_ids=[1, 2, 2], aux_at="eagle_config", fc_norm=True, norm_output=True
    )
    paths = (str(tmp_path), str(target_path)) if swapped else (str(target_path), str(tmp_path))
    description = describe(*paths)
    document = _json(description)
    target, head = document["checkpoints"]
    assert (target["kind"], head["kind"]) == ("target", "head")
    assert (document["fit"], document["misfits"]) == (True, [])
    assert head["dialect"] == "eagle"
    assert head["aux_layers"] == [2, 3, 3]
    assert head["draft_vocab_share"] == 48 / 128
    assert (head["fc_norm"], head["norm_output"], head["norm_before_fc"]) == (True, True, False)
    assert head["kv_bytes_per_token"] == 2 * 2 * 16 * 4
    assert document["kv_bytes_per_token"] == target["kv_bytes_per_token"] + head["kv_bytes_per_token"]
    assert "are layer outputs" in description.to_text()


def test_a_head_alone(tmp_path: Path, config: TargetConfig) -> None:
    write_head(tmp_path, config, "speculators", norm_before_residual=True)
    description = describe(str(tmp_path))
    [head] = _json(description)["checkpoints"]
    assert head["problems"] == []
    assert (head["dialect"], head["aux_layers"]) == ("speculators", [])
    assert "inputs of layers 2, L//2, L-3" in description.to_text()
    assert "norm_before_residual" in description.to_text()


def test_the_dtype_is_the_stored_one(tmp_path: Path, config: TargetConfig) -> None:
    from safetensors.torch import load_file, save_file

    write_head(tmp_path, config)
    file = tmp_path / "model.safetensors"
    halves = {name: x.bfloat16() if x.is_floating_point() else x for name, x in load_file(file).items()}
    save_file(halves, file)
    [head] = _json(describe(str(tmp_path)))["checkpoints"]
    assert head["dtypes"] == ["bfloat16"]
    assert head["num_bytes"] == 2 * head["num_parameters"]
    assert head["kv_bytes_per_token"] == 2 * 2 * 16 * 2


def test_every_misfit_is_listed(tmp_path: Path, target_path: Path, config: TargetConfig) -> None:
    write_head(
        tmp_path,
        config,
        changed_config={"vocab_size": 129},
        changed={"d2t": torch.full((48,), 200), "odd.weight": torch.ones(1)},
        aux_layer_ids=[2, 3, 7],
    )
    description = describe(str(target_path), str(tmp_path))
    assert _json(description)["fit"] is False
    for reason in ("an unknown tensor, 'odd.weight", "d2t maps to", "129 tokens", "input of layer 7"):
        assert any(reason in misfit for misfit in description.misfits), reason
        assert all(misfit.count(str(tmp_path)) <= 1 for misfit in description.misfits)
        assert reason in description.to_text()


def test_the_architecture_of_a_head_is_said_beside_what_it_is_read_as(
    tmp_path: Path, config: TargetConfig
) -> None:
    write_head(tmp_path, config, changed_config={"architectures": ["MedusaModel"]})
    text = describe(str(tmp_path)).to_text()
    assert "an EAGLE3 head\n  named       'MedusaModel' in config.json\n" in text


def test_two_of_a_kind_are_not_a_pair(tmp_path: Path, target_path: Path, config: TargetConfig) -> None:
    """Of two models the second is a draft model, whose tokens are compared."""
    assert "there is no file tokenizer.json" in describe(str(target_path), str(target_path)).misfits[0]
    write_head(tmp_path, config)
    assert "both are heads" in describe(str(tmp_path), str(tmp_path)).misfits[0]


def test_a_new_architecture_is_one_table_entry(
    tmp_path: Path, target_path: Path, config: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading and describing know families and heads only through the tables."""

    @dataclass(frozen=True, kw_only=True)
    class OtherConfig(Eagle3Config):
        family = "OTHER"
        refusal = "no OTHER"

    shutil.copytree(target_path, tmp_path / "target")
    change_json(tmp_path / "target" / "config.json", architectures=["OtherForCausalLM"])
    write_head(tmp_path / "head", config)
    with pytest.raises(UserError, match="'OtherForCausalLM' is not supported"):
        describe(str(tmp_path / "target"))
    monkeypatch.setitem(FAMILIES, "OtherForCausalLM", FAMILIES["LlamaForCausalLM"])
    monkeypatch.setitem(
        HEAD_FAMILIES, "OTHER", replace(HEAD_FAMILIES["EAGLE3"], kind=OtherConfig, config=OtherConfig.from_hf)
    )
    monkeypatch.delitem(HEAD_FAMILIES, "EAGLE3")
    text = describe(str(tmp_path / "target"), str(tmp_path / "head")).to_text()
    assert "family      OtherForCausalLM\n" in text
    assert "head: an OTHER head\n" in text
    assert "Target and head fit" in text
    target = load_target(open_checkpoint(str(tmp_path / "target")), torch.float32, torch.device("cpu"))
    assert load_drafter(open_checkpoint(str(tmp_path / "head")), target).config.family == "OTHER"
    assert load_drafter(open_checkpoint(str(tmp_path / "target")), target).config.family == "draft model"


def test_no_weights_are_read(
    tmp_path: Path, target_path: Path, config: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_head(tmp_path, config)
    names = []

    def spy(infos: Any) -> Any:
        names.extend(infos)
        return read(infos)

    from specgen.checkpoints import tensor_reader, weight_files

    read = weight_files.read_tensors
    for module in (weight_files, tensor_reader):
        monkeypatch.setattr(module, "read_tensors", spy)
    describe(str(target_path), str(tmp_path))
    assert sorted(names) == ["d2t", "t2d"]


def test_unknown_checkpoints_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    with pytest.raises(UserError, match="has no weights"):
        describe(str(tmp_path))
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="'BertModel' is not supported"):
        describe(str(tmp_path))


def test_without_a_checkpoint_it_is_the_bundled_pair() -> None:
    runner = CliRunner()
    given = runner.invoke(
        app, ["inspect", str(data_directory() / "demo" / "target"), heads()[0], "--gpu", "80GiB"]
    )
    bundled = runner.invoke(app, ["inspect", "--gpu", "80GiB"])
    assert bundled.exit_code == 0
    assert bundled.stdout == given.stdout
    assert "Target and head fit" in bundled.stdout
