"""Opening checkpoints, reading their configs, and refusing those that would load and then draft badly."""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specgen import storage
from specgen.checkpoints import weight_files
from specgen.checkpoints.checkpoint import (
    draft_to_target,
    drafter_config,
    load_drafter,
    load_target,
    open_checkpoint,
    target_config,
)
from specgen.checkpoints.fingerprint import fingerprint
from specgen.config import UserError
from specgen.models.eagle import Eagle3Config
from specgen.models.families import family_of
from specgen.models.llama import Llama
from tests.commands import refused
from tests.tiny_checkpoints import change_json, change_tensors, write_head, write_target
from tests.tiny_mixtures import change

CPU = torch.device("cpu")
AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    write_target(path, num_layers=12, hidden_size=32, vocab_size=64)
    return path


@pytest.fixture(scope="module")
def target(target_path: Path) -> Llama:
    return _load(target_path)


def _load(path: Path) -> Llama:
    return load_target(open_checkpoint(str(path)), torch.float32, CPU)


def _read(config: dict[str, Any]) -> Any:
    return family_of(config).config(config)


def _load_head(path: Path, target: Llama) -> Any:
    return load_drafter(open_checkpoint(str(path)), target)


def _copy(source: Path, path: Path, **changes: Any) -> Path:
    """The target at ``source`` with other settings in its config.json."""
    path.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    if changes:
        change_json(path / "config.json", **changes)
    return path


# ---- files


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    write_target(tmp_path / "one")
    write_target(tmp_path / "many", max_shard_size="40KB")
    one, many = open_checkpoint(str(tmp_path / "one")), open_checkpoint(str(tmp_path / "many"))
    assert len(one.files) == 1
    assert len(many.files) > 5
    for name in one.tensors:
        expected, got = one.read(name), many.read(name)
        assert torch.equal(expected, got), name


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before-1.6"])
def test_pickles_hold_the_same_target(tmp_path: Path, zipped: bool) -> None:
    write_target(tmp_path / "safetensors", num_layers=2)
    path = _copy(tmp_path / "safetensors", tmp_path / "pickle")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    checkpoint = open_checkpoint(str(path))
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert torch.equal(_load(path).embedding, _load(tmp_path / "safetensors").embedding)


def test_a_pickle_is_read_once_however_many_tensors_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, loads, load = tmp_path / "pytorch_model.bin", list[Path](), torch.load

    def counted(path: Path, **how: Any) -> Any:
        loads.append(path)
        return load(path, **how)

    monkeypatch.setattr(torch, "load", counted)
    for value in (1.0, 2.0):
        tensors = {name: torch.full((5,), value) for name in "abcdefgh"}
        torch.save(tensors, tmp_path / "new")
        (tmp_path / "new").replace(file)
        infos = weight_files.tensor_infos(tmp_path)
        for name in [*tensors, *tensors]:
            found = weight_files.read_tensor(name, infos[name])
            assert torch.equal(found, tensors[name])
            found.zero_()  # it is the reader's own
    assert loads == [file, file]


def _beside_shards(path: Path, whole: dict[str, Tensor], *, pickled: bool) -> None:
    """``whole`` as a single file beside the shards of a target, all pickles or none."""
    write_target(path, num_layers=2, max_shard_size="40KB")
    stem, suffix = ("pytorch_model", ".bin") if pickled else ("model", ".safetensors")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    for file in path.glob("*.safetensors*"):
        if pickled and file.suffix == ".safetensors":
            torch.save(load_file(file), path / f"{file.stem}.bin")
        if pickled:
            file.unlink()
    if pickled:
        shards = {name: file.replace(".safetensors", ".bin") for name, file in index["weight_map"].items()}
        (path / f"{stem}{suffix}.index.json").write_text(json.dumps({**index, "weight_map": shards}))
    (torch.save if pickled else save_file)(whole, path / f"{stem}{suffix}")


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pickle"])
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, None),
        ({"model.norm.weight": torch.full((64,), 0.5)}, "model.norm.weight"),
        ({"model.norm.weight": torch.ones(64, dtype=torch.float16)}, "model.norm.weight"),
        ({"model.norm.weight": torch.ones(65)}, "model.norm.weight"),
        ({"extra.weight": torch.ones(3)}, "extra.weight"),
        ({"lm_head.weight": None}, "lm_head.weight"),
    ],
)
def test_two_models_in_one_directory_are_refused(
    tmp_path: Path, changed: dict[str, Tensor | None], named: str | None, pickled: bool
) -> None:
    write_target(tmp_path / "one", num_layers=2)
    tensors = load_file(tmp_path / "one" / "model.safetensors") | changed
    path = tmp_path / "both"
    _beside_shards(path, {name: x for name, x in tensors.items() if x is not None}, pickled=pickled)
    if named is None:
        assert torch.equal(_load(path).embedding, _load(tmp_path / "one").embedding)
        return
    with refused(r"two models: .* differ in '" + named + "': remove the one that is stale"):
        open_checkpoint(str(path))


def test_an_index_of_the_single_file_is_one_model(tmp_path: Path) -> None:
    write_target(tmp_path, num_layers=2)
    names = open_checkpoint(str(tmp_path)).tensors
    shards = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(shards))
    assert open_checkpoint(str(tmp_path)).tensors == names


def test_an_index_that_names_what_no_file_has_is_refused(tmp_path: Path) -> None:
    """A head without its norms of q and k, say, would be another model."""
    write_target(tmp_path, num_layers=2, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    shards = json.loads(index.read_text())
    shards["weight_map"]["model.layers.0.self_attn.q_norm.weight"] = min(shards["weight_map"].values())
    index.write_text(json.dumps(shards))
    with refused(r"names 'model\.layers\.0\.self_attn\.q_norm\.weight', which no file has: download again"):
        open_checkpoint(str(tmp_path))


def test_a_pickle_beside_safetensors_is_not_read(tmp_path: Path) -> None:
    write_target(tmp_path, num_layers=2)
    torch.save({"model.norm.weight": torch.zeros(64)}, tmp_path / "pytorch_model.bin")
    assert [file.name for file in open_checkpoint(str(tmp_path)).files] == ["model.safetensors"]


@pytest.mark.parametrize(
    "name", ["nowhere", "./no/where", "/no/where", "a/b/c", "owner/", "../no-such-checkpoint"]
)
def test_neither_a_directory_nor_a_hub_id_is_refused(name: str) -> None:
    with refused("neither a directory nor a hub id"):
        open_checkpoint(name)


def test_a_file_of_weights_is_called_that(target_path: Path) -> None:
    with refused(r"model\.safetensors is a file: name the directory that holds it"):
        open_checkpoint(str(target_path / "model.safetensors"))


def test_a_hub_download_leaves_out_unneeded_files(target_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def snapshot_download(repo_id: str, **settings: Any) -> str:
        calls.append((repo_id, settings))
        return str(target_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    checkpoint = open_checkpoint("owner/model-1.5")
    assert checkpoint.path == target_path
    assert checkpoint.name == "owner/model-1.5"
    [(repo_id, settings)] = calls
    assert repo_id == "owner/model-1.5"
    assert {"*.json", "*.safetensors", "mask_embedding.pt"} <= set(settings["allow_patterns"])
    assert not [pattern for pattern in settings["allow_patterns"] if "bin" in pattern]
    assert settings["ignore_patterns"] == ["*/*"]  # Llama's own original/ folder is the whole model again


def test_a_hub_id_without_safetensors_is_downloaded_as_pickles(
    tmp_path: Path, target: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_head(tmp_path, target.config, binary=True)
    patterns = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        patterns.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert "fc.weight" in open_checkpoint("owner/head").tensors
    assert ["pytorch_model*.bin" in asked for asked in patterns] == [False, True]


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, **settings: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nand much more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with refused(r"'owner/model' is not a directory .*the hub cannot be reached, or HF_HUB_OFFLINE.*check"):
        open_checkpoint("owner/model")


def test_the_fingerprint_depends_on_contents_only(tmp_path: Path, target_path: Path) -> None:
    same, other = _copy(target_path, tmp_path / "same"), _copy(target_path, tmp_path / "other")
    norm = open_checkpoint(str(other)).read("model.norm.weight")
    norm[3] += 1
    _change(other, model__norm__weight=norm)
    prints = [fingerprint(open_checkpoint(str(path))) for path in (target_path, same, other)]
    assert prints[0] == prints[1] != prints[2]
    assert len(prints[0]) == 64
    _copy(target_path, same, rms_norm_eps=0.5)
    assert fingerprint(open_checkpoint(str(same))) != prints[0]


def test_a_fingerprint_reads_each_file_once_until_it_changes(
    tmp_path: Path, target_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = _copy(target_path, tmp_path / "target"), list[str]()
    digest = hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda file, kind: read.append(file.name) or digest(file, kind)
    )
    first = fingerprint(open_checkpoint(str(path)))
    once = len(read)
    assert fingerprint(open_checkpoint(str(path))) == first
    assert len(read) == once > 1
    weights = path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # of the same size
    assert fingerprint(open_checkpoint(str(path))) != first
    assert len(read) == once + 1


@pytest.fixture
def large(
    tmp_path: Path, target_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[str, int]]:
    """The fingerprint of a checkpoint whose files count as large, in a new process each, and how many it read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(storage, "_LARGE", 1000)
    path, read = _copy(target_path, tmp_path / "target"), list[str]()
    monkeypatch.setattr(
        storage,
        "_read",
        lambda file: (read.append(file.name), hashlib.sha256(file.read_bytes()).hexdigest())[1],
    )

    def fresh(*, later: float = 100.0) -> tuple[str, int]:
        storage._digest.cache_clear()
        read.clear()
        now = time.time() + later
        monkeypatch.setattr(storage.time, "time", lambda: now)
        found = fingerprint(open_checkpoint(str(path)))
        return found, len([name for name in read if name == "model.safetensors"])

    return fresh


def test_digests_of_large_files_are_kept_for_later_processes(large, tmp_path: Path) -> None:
    first, num_read = large()
    assert num_read == 1
    assert large() == (first, 0)
    weights = tmp_path / "target" / "model.safetensors"
    content, times = weights.read_bytes(), weights.stat()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))  # as if it were the same
    second, num_read = large()
    assert (second != first, num_read) == (True, 1)
    assert large() == (second, 0)


def test_a_file_that_was_just_changed_is_read_again(large) -> None:
    """Its times might be those of another change as well."""
    assert [large(later=10)[1], large(later=10)[1]] == [1, 1]


def test_a_damaged_digest_is_not_used(large, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = large()
    for spoil in (
        lambda found: {**found, "sha256": "12"},
        lambda found: {**found, "sha256": None},
        lambda found: [],
    ):
        for file in (tmp_path / "cache").rglob("*.json"):
            file.write_text(json.dumps(spoil(json.loads(file.read_text()))))
        caplog.clear()
        assert large() == (first, 1)
        assert "a file's digest kept in" in caplog.text
        assert large() == (first, 0)


# ---- targets


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (2, {"eos_token_id": [7, 0]}, (7, 0)),
        (2, {"eos_token_id": 0}, (0,)),
        (2, {"eos_token_id": None}, (2,)),
        (None, {"top_p": 0.9}, ()),
    ],
)
def test_eos_tokens_come_from_the_generation_config_first(
    tmp_path: Path, target_path: Path, config: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    path = _copy(target_path, tmp_path, eos_token_id=config)
    (path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    assert target_config(open_checkpoint(str(path))).eos_token_ids == expected


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"architectures": ["MistralForCausalLM"]},
        "'MistralForCausalLM' is not supported: use one of Llama",
    ),
    "no-architecture": ({"architectures": None}, "'none' is not supported"),
    "attention-bias": ({"attention_bias": True}, "has no tensor 'model.layers.0.self_attn.q_proj.bias'"),
    "mlp-bias": ({"mlp_bias": True}, "has no tensor 'model.layers.0.mlp.gate_proj.bias'"),
    "longrope": ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "rope type 'longrope'"),
    "yarn-incomplete": ({"rope_parameters": {"rope_type": "yarn"}}, "has no factor"),
    "yarn-bounds": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_slow": 40}, "rope_parameters": None},
        "beta_slow is 40.0 and beta_fast 32.0",
    ),
    "old-dynamic": (
        {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope type 'dynamic'",
    ),
    "linear-incomplete": ({"rope_scaling": {"type": "linear"}}, "has no factor"),
    "scaling-beside-parameters": (
        {"rope_scaling": {"type": "longrope", "factor": 2.0}},
        "rope type 'longrope' is not supported: use a checkpoint whose .* 'default' or 'linear'",
    ),
    "theta-null": ({"rope_theta": None, "rope_parameters": {"rope_type": "default"}}, "has no rope_theta"),
    "rope-type-null": ({"rope_scaling": {"rope_type": None, "type": "yarn"}}, "rope type None"),
    "lost-theta": (
        {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "so 1000000.0 there would become 10000.0: write rope_theta into rope_scaling",
    ),
    "rope-by-layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope type 'by layer'"),
    "partial-rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "llama3-incomplete": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        "has no low_freq_factor",
    ),
    "sliding-window": ({"sliding_window": 4096}, "sliding_window is 4096 and in use"),
    "window-said-unused": (
        {"sliding_window": 4096, "use_sliding_window": False},  # transformers' cache forgets all the same
        "sliding_window is 4096 and in use",
    ),
    "sliding-layers": (
        {"layer_types": ["sliding_attention"] * 12},
        "layer_types has 'sliding_attention': a target of this family needs full attention in all layers",
    ),
    "chunked-layers": ({"layer_types": ["chunked_attention"] * 12}, "layer_types has 'chunked_attention'"),
    "kinds-of-one-layer": (
        {"layer_types": ["full_attention"]},
        "layer_types names 1 layers, num_hidden_layers 12",
    ),
    "quantized": ({"quantization_config": {"quant_method": "awq"}}, "quant_method is 'awq'"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "no-layers": ({"num_hidden_layers": None}, "no num_hidden_layers"),
    "text-for-a-number": ({"hidden_size": "many"}, "hidden_size is 'many'"),
    "negative": ({"vocab_size": -1}, "vocab_size is -1"),
    "uneven-heads": ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
}


@pytest.mark.parametrize(("changes", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_targets_are_refused_by_name(
    tmp_path: Path, target_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = _copy(target_path, tmp_path, **changes)
    with refused(f"^{re.escape(str(path))}.*{message}"):  # which of both checkpoints
        _load(path)


def test_an_unused_window_is_accepted(tmp_path: Path, target_path: Path) -> None:
    _load(
        _copy(
            target_path,
            tmp_path,
            sliding_window=4096,
            use_sliding_window=False,
            layer_types=["full_attention"] * 12,
        )
    )


def _change(path: Path, **tensors: Tensor | None) -> Path:
    """Replace, add or (None) remove tensors; ``__`` in a name is a dot."""
    change_tensors(path, {name.replace("__", "."): tensor for name, tensor in tensors.items()})
    return path


def test_missing_and_unexpected_target_tensors_are_refused(tmp_path: Path, target_path: Path) -> None:
    layer = "model.layers.{}.{}"
    cases: list[tuple[dict[str, Tensor | None], dict[str, Any], str]] = [
        (
            {layer.format(3, "mlp.up_proj.weight"): None},
            {},
            "has no tensor 'model.layers.3.mlp.up_proj.weight'",
        ),
        (
            {layer.format(0, "self_attn.sinks"): torch.ones(4)},
            {},
            "an unknown tensor, 'model.layers.0.self_attn.si",
        ),
        ({layer.format(0, "self_attn.q_proj.bias"): torch.ones(4)}, {}, "unknown tensor"),
        ({}, {"num_hidden_layers": 11}, "9 unknown tensors, such as 'model.layers.11"),
        ({}, {"intermediate_size": 65}, r"has shape \[64, 32\], but config.json asks for \[65, 32\]"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, {}, "quantized weights are not supported"),
    ]
    for number, (tensors, config, message) in enumerate(cases):
        path = _copy(target_path, tmp_path / str(number), **config)
        change_tensors(path, tensors)
        with refused(message):
            _load(path)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_eos_token_that_the_model_has_not_is_refused(tmp_path: Path, target_path: Path, file: str) -> None:
    path = _copy(target_path, tmp_path)
    (path / "generation_config.json").unlink(missing_ok=True)

    def eos(value: object) -> str | None:
        change_json(path / file, eos_token_id=value)
        try:
            target_config(open_checkpoint(str(path)))
        except UserError as error:
            return str(error)
        return None

    for value in (None, [], 63, [2, 64]):
        assert eos(value) is None
    for value in (64, [999999, 64]):
        reason = eos(value)
        assert "outside of the vocabulary of 64, so that no text would end" in reason
        assert reason.endswith(f"correct it in {file}")


def test_a_gguf_is_called_that(tmp_path: Path) -> None:
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    for given in (tmp_path, file):
        with refused(r"holds model-Q4_K_M\.gguf, a GGUF, which is not read: give the model's"):
            open_checkpoint(str(given))


def test_harmless_tensors_are_ignored(tmp_path: Path, target_path: Path) -> None:
    extra = _change(
        _copy(target_path, tmp_path), model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8)
    )
    assert torch.equal(_load(extra).embedding, _load(target_path).embedding)


def test_a_tied_target_may_carry_its_head_twice(tmp_path: Path) -> None:
    write_target(tmp_path, tied=True)
    _load(_change(tmp_path, lm_head__weight=torch.zeros(128, 64)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_are_converted_to_the_dtype(target_path: Path, dtype: torch.dtype) -> None:
    assert load_target(open_checkpoint(str(target_path)), dtype, CPU).dtype == dtype


# ---- heads


@pytest.mark.parametrize(
    ("dialect", "place", "ids", "expected", "rule"),
    [
        ("eagle", "top", None, (2, 6, 9), "default layer inputs"),
        ("speculators", "top", None, (2, 6, 9), "default layer inputs"),
        ("speculators", "top", [2, 6, 9], (2, 6, 9), "layer inputs"),
        ("speculators", "top", [1, 5, 8], (1, 5, 8), "if acceptance is poor, add 1"),
        ("eagle", "top", [3, 7, 12], (3, 7, 12), "layer inputs"),
        ("eagle", "eagle_config", [1, 5, 8], (2, 6, 9), "layer outputs"),
        ("eagle", "eagle_config", [0, 5, 11], (1, 6, 12), "so 1 is added"),
        ("eagle", "eagle_config", [2, 6, 9], (2, 6, 9), "are the default layer inputs"),
    ],
)
def test_aux_layers_are_read_by_format(
    tmp_path: Path, target: Llama, dialect: Any, place: Any, ids: list[int] | None, expected: Any, rule: str
) -> None:
    write_head(tmp_path, target.config, dialect, aux_layer_ids=ids, aux_at=place)
    config = _load_head(tmp_path, target).config
    assert config.aux_layers == expected
    assert rule in config.aux_rule
    assert config.dialect == dialect


def test_norm_flags_are_read_at_the_top_and_in_eagle_config(tmp_path: Path, target: Llama) -> None:
    write_head(tmp_path / "top", target.config, norm_before_fc=True)
    write_head(tmp_path / "nested", target.config, norm_before_fc=True)
    nested = {"eagle_config": {"norm_before_fc": True}}
    change(tmp_path / "nested", {}, norm_before_fc=None, **nested)
    assert _load_head(tmp_path / "top", target).config.norm_before_fc
    assert _load_head(tmp_path / "nested", target).config.norm_before_fc


def _ids(*values: int) -> Tensor:
    return torch.tensor(values)


# heads that would draft badly by what is changed in them, and what is said
OF_TENSORS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "no-d2t": ({"d2t": None, "t2d": None}, "drafts 48 of 64 tokens but has no d2t: add the tensor"),
    "d2t-too-short": ({"d2t": torch.zeros(47, dtype=torch.int64)}, "must hold 48 integers"),
    "d2t-of-floats": ({"d2t": torch.zeros(48)}, "d2t is stored as float32"),
    "d2t-above": ({"d2t": torch.full((48,), 17), "t2d": None}, "ids 17 to 64, outside the vocabulary of 64"),
    "d2t-below": ({"d2t": torch.full((48,), -1), "t2d": None}, "ids -1 to 46, outside"),
    "d2t-twice": ({"d2t": -torch.arange(48), "t2d": None}, "two draft tokens to one target token"),
    "d2t-against-t2d": ({"t2d": torch.arange(64) < 48}, "t2d marks 48 of 64 tokens, not the 48 of d2t"),
    "t2d-of-another": ({"t2d": torch.arange(65) < 48}, "mixes two vocabularies"),
    "narrow-fc": ({"fc.weight": torch.zeros(32, 90)}, r"fc.weight has shape \[32, 90\]"),
    "unknown-tensor": (
        {"midlayer.gate.weight": torch.ones(1)},
        "unknown tensors?,( such as)? 'midlayer.gate",
    ),
    "missing-tensor": ({"midlayer.mlp.up_proj.weight": None}, "has no tensor 'midlayer.mlp.up_proj"),
    "no-lm-head": ({"lm_head.weight": None}, "has no tensor 'lm_head.weight'"),
    "no-head-at-all": ({"midlayer.hidden_norm.weight": None}, "the checkpoint is not an EAGLE3 head"),
    "norm-without-flag": ({"input_norm.weight": torch.ones(96)}, "unknown tensors?,( such as)? 'input_norm"),
    "mask-state-alone": ({"mask_hidden": torch.ones(1, 96)}, "none of mask_token_id, pard_token"),
}
OF_CONFIG: dict[str, tuple[dict[str, Any], str]] = {
    "draft-vocabulary-larger": (
        {"draft_vocab_size": 65},
        "draft_vocab_size is 65, more than the vocabulary of 64",
    ),
    "wide-target": ({"target_hidden_size": 40}, "features 40 wide, but the target's hidden size is 32"),
    "vocabulary": ({"vocab_size": 65}, "vocabulary has 65 tokens, the target's 64"),
    "aux-not-numbers": ({AUX: ["2", "6", "9"]}, "must be a list of layer numbers"),
    "aux-fewer-than-fc": ({AUX: [2, 6]}, r"fc.weight has shape \[32, 96\], but .* \[32, 64\]"),
    "flag-without-norm": ({"norm_before_fc": True}, "has no tensor 'input_norm.weight'"),
    "two-layers": ({"num_hidden_layers": 2}, "has no tensor 'layers.1.self_attn.q_proj"),
    "bias": ({"attention_bias": True}, "is true, but there is no q_proj.bias"),
    "layer-kinds": ({"layer_types": ["chunked_attention"]}, "only full_attention and"),
    "window-of-no-size": ({"layer_types": ["sliding_attention"]}, "no sliding_window"),
    "kinds-of-more-layers": (
        {"layer_types": ["full_attention"] * 2},
        "layer_types names 2 layers, num_hidden_layers 1",
    ),
    "no-mask-token": ({"parallel_drafting": True}, "none of mask_token_id, pard_token"),
    "window-of-which": ({"sliding_window": 9}, "no layer_types say of which layers"),
    "mask-outside": (
        {"parallel_drafting": True, "mask_token_id": 64},
        "the mask token is 64, outside the vocabulary of 64",
    ),
    "no-mask-state": ({"parallel_drafting": True, "ptd_token_id": 3}, "has no tensor 'mask_hidden'"),
    "rope": ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
}
MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    **{name: ({"changed": tensors}, message) for name, (tensors, message) in OF_TENSORS.items()},
    **{name: ({"changed_config": config}, message) for name, (config, message) in OF_CONFIG.items()},
    "no-embedding": ({"hidden_size": 16}, "no embedding and is 16 wide"),
    "embedding-of-another": (
        {"own_embedding": True, "changed": {"embed_tokens.weight": torch.zeros(65, 32)}},
        r"embed_tokens.weight has shape \[65, 32\]",
    ),
    "aux-above": ({"aux_layer_ids": [2, 6, 13]}, "input of layer 13, but the target has layers 0 to 11"),
    "aux-below": ({"aux_layer_ids": [-1, 6, 9]}, "input of layer -1"),
    "aux-output-above": ({"aux_layer_ids": [2, 6, 13], "aux_at": "eagle_config"}, "input of layer 14"),
    "both-norms": ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm are both true"),
    "aux-order": ({"aux_layer_ids": [6, 2, 9]}, r"is \[6, 2, 9\]: the layers must ascend"),
    "last-state-of-eagle1": (
        {
            "changed": {"fc.weight": torch.zeros(32, 64)},
            "changed_config": {"eagle_config": {"use_aux_hidden_state": False}},
        },
        r"fc.weight has shape \[32, 64\], but .* \[32, 32\]",
    ),
    "last-state-of-another-width": (
        {
            "hidden_size": 16,
            "own_embedding": True,
            "changed_config": {"eagle_config": {"use_aux_hidden_state": False}},
        },
        "it is 32 wide, the head 16",
    ),
    "last-state-and-norms": (
        {"fc_norm": True, "changed_config": {"eagle_config": {"use_aux_hidden_state": False}}},
        "no features for norm_before_fc or fc_norm",
    ),
    "residual-not-said": (
        {"dialect": "speculators", "changed_config": {"norm_before_residual": None}},
        "does not say norm_before_residual",
    ),
    "other-speculator": (
        {"dialect": "speculators", "changed_config": {"speculators_model_type": "dflash"}},
        "the head is of type 'dflash'",
    ),
}


@pytest.mark.parametrize("dialect", ["eagle", "speculators"])
def test_an_eagle3_head_is_known_by_its_tensors_too(tmp_path: Path, target: Llama, dialect: Any) -> None:
    write_head(tmp_path, target.config, dialect, changed_config={"architectures": ["LlamaForCausalLM"]})
    assert _load_head(tmp_path, target).config.family == "EAGLE3"


@pytest.mark.parametrize(("settings", "message"), MISFITS.values(), ids=MISFITS)
def test_heads_that_would_draft_badly_are_refused(
    tmp_path: Path, target: Llama, settings: dict[str, Any], message: str
) -> None:
    write_head(tmp_path, target.config, **settings)
    with refused(f"^{re.escape(str(tmp_path))}.*{message}"):
        _load_head(tmp_path, target)


def test_a_directory_is_named_though_the_reason_begins_with_its_name(
    tmp_path: Path, target: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_head(tmp_path / "head", target.config, changed_config={"head_dim": 0})
    with refused("^head: head_dim is 0"):
        _load_head(Path("head"), target)


def test_a_head_is_refused_as_target(tmp_path: Path, target: Llama) -> None:
    write_head(tmp_path, target.config)
    with refused("is a draft head and no target: name it with --drafter"):
        _load(tmp_path)


def test_the_vocabulary_map_turns_offsets_into_ids(tmp_path: Path, target: Llama) -> None:
    offsets = _ids(5, 5, 7, 60) - _ids(0, 0, 0, 3)  # 5, 6, 9, 60
    mask = torch.zeros(64, dtype=torch.bool)
    mask[_ids(5, 6, 9, 60)] = True
    write_head(tmp_path, target.config, draft_vocab_size=4, changed={"d2t": offsets, "t2d": mask})
    checkpoint = open_checkpoint(str(tmp_path))
    config = drafter_config(checkpoint, target.config.num_layers)
    assert draft_to_target(checkpoint, config).tolist() == [5, 6, 9, 60]


def test_a_full_vocabulary_needs_no_map_and_may_carry_the_identity(tmp_path: Path, target: Llama) -> None:
    write_head(tmp_path / "none", target.config, draft_vocab_size=None)
    identity = {"d2t": torch.zeros(64, dtype=torch.int64), "t2d": torch.ones(64, dtype=torch.bool)}
    write_head(tmp_path / "identity", target.config, draft_vocab_size=None, changed=identity)
    for name in ("none", "identity"):
        assert torch.equal(_load_head(tmp_path / name, target).draft_to_target, torch.arange(64)), name


def test_the_heads_embedding_is_used_if_present_else_the_targets(tmp_path: Path, target: Llama) -> None:
    write_head(tmp_path / "own", target.config, own_embedding=True)
    write_head(tmp_path / "shared", target.config)
    own = open_checkpoint(str(tmp_path / "own")).read("embed_tokens.weight")
    assert torch.equal(_load_head(tmp_path / "own", target).embedding, own)
    assert _load_head(tmp_path / "shared", target).embedding is target.embedding


def test_a_head_alone_has_no_default_layers(tmp_path: Path, target: Llama) -> None:
    write_head(tmp_path, target.config)
    config = drafter_config(open_checkpoint(str(tmp_path)), None)
    assert isinstance(config, Eagle3Config)
    assert config.aux_layers == ()
    assert config.num_features == 3
