"""Malformed checkpoint directories: one short line and exit code 2, in bounded time and memory."""

import json
import os
import pickle
import re
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import specgen
from specgen.checkpoints import weight_files
from specgen.checkpoints.checkpoint import load_target, open_checkpoint
from specgen.checkpoints.fingerprint import fingerprint
from specgen.config import UserError
from tests.commands import refused
from tests.forked import Ended, generate_with_pair, inspect_pair, write_pair
from tests.marks import mostly_slow
from tests.tiny_checkpoints import change_json, change_tensors

CPU = torch.device("cpu")
WEIGHTS, PICKLE, INDEX = "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"
NORM = "model.norm.weight"
LONGEST_LINE = 700  # characters, of which the paths are most
HUGE = 1 << 40
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair with a tokenizer and two prompts; each test takes a copy."""
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def copied(pair: Path, tmp_path: Path) -> Path:
    shutil.copytree(pair, tmp_path, dirs_exist_ok=True)
    return tmp_path


def _files(path: Path) -> dict[str, int]:
    """The files of a directory, except those of a run."""
    found = (file.relative_to(path) for file in path.rglob("*"))
    return {str(file): (path / file).lstat().st_mtime_ns for file in found if file.parts[0] != "run"}


# ---- what is refused: damage to the target's directory -> the reason


def _config(**changes: Any) -> Damage:
    return lambda path: change_json(path / "config.json", **changes)


def _text(name: str, text: str | bytes) -> Damage:
    return lambda path: (path / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def _index(name: str) -> Damage:
    return _text(INDEX, json.dumps({"weight_map": {NORM: name}}))


def _replaced(name: str, make: Callable[[Path], object]) -> Damage:
    """``make`` puts something else in place of the file ``name``."""

    def damage(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        make(path / name)

    return damage


def _header(**changes: Any) -> Damage:
    """A changed entry of one tensor in the header of the weights."""

    def damage(path: Path) -> None:
        data = (path / WEIGHTS).read_bytes()
        end = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:end])
        header[NORM] |= changes
        (path / WEIGHTS).write_bytes(_safetensors(json.dumps(header).encode(), data[end:]))

    return damage


def _safetensors(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def _bytes(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path: (path / WEIGHTS).write_bytes(change((path / WEIGHTS).read_bytes()))


def _pickled(write: Callable[[Any, Path], object], **added: Any) -> Damage:
    """The weights as a pickle, with ``added`` values; ``__`` in a name is a dot."""

    def damage(path: Path) -> None:
        tensors = load_file(path / WEIGHTS) | {
            name.replace("__", "."): value for name, value in added.items()
        }
        (path / WEIGHTS).unlink()
        write(tensors, path / PICKLE)

    return damage


def _legacy(value: Any, file: Path) -> None:
    torch.save(value, file, _use_new_zipfile_serialization=False)


def _cut(write: Callable[[Any, Path], object], length: int) -> Callable[[Any, Path], object]:
    def write_cut(value: Any, file: Path) -> None:
        write(value, file)
        file.write_bytes(file.read_bytes()[:length])

    return write_cut


def _deflated(padding: int) -> Callable[[Any, Path], object]:
    """A zip file 1000 times smaller than the ``padding`` at the end of its pickle."""

    def write(value: Any, file: Path) -> None:
        torch.save(value, file)
        with zipfile.ZipFile(file) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in entries.items():
                archive.writestr(name, data + bytes(padding * name.endswith("data.pkl")))

    return write


class _Call:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def _repeated(path: Path) -> None:
    """A vocabulary of 2^24 tokens whose embeddings are one stored number."""
    table = torch.zeros(1, dtype=torch.float16).expand(1 << 24, 32)
    _pickled(torch.save, model__embed_tokens__weight=table, lm_head__weight=table)(path)
    change_json(path / "config.json", vocab_size=1 << 24)


EVIL = _Call(os.system, "touch evil")
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
NESTED = "[" * 100_000 + "]" * 100_000
# damage to the target's directory -> the reason
REFUSED: dict[str, tuple[Damage, str]] = {
    "config-missing": (lambda path: (path / "config.json").unlink(), "config.json cannot be read"),
    "config-100MB": (
        _text("config.json", '{"a": [' + "[]," * 33_000_000 + "[]]}"),
        "more than any such file needs",
    ),
    "config-symlink-loop": (_replaced("config.json", lambda file: file.symlink_to(file)), "cannot be read"),
    "config-same-key-twice": (
        _text("config.json", '{"architectures": ["LlamaForCausalLM"], "architectures": ["Evil"]}'),
        "'Evil' is not supported",
    ),
    "architectures-number": (_config(architectures=7), "architectures is 7: it must be a list"),
    "architecture-escapes": (_config(architectures=["\x1b[2J\n" * 9999]), "is not supported"),
    "layer-types-number": (_config(layer_types=1.5), "layer_types is 1.5: it must be a list"),
    "vocabulary-huge": (_config(vocab_size=HUGE), "vocab_size is 1099511627776: it must be a whole number"),
    "layers-huge": (_config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "layers-many": (_config(num_hidden_layers=10**6), "has no tensor 'model.layers.6."),
    "positions-huge": (_config(max_position_embeddings=10**400), "max_position_embeddings is 1000"),
    "width-text": (_config(hidden_size="x" * 10**6), "hidden_size is 'xxx"),
    "width-null": (_config(hidden_size=None), "has no hidden_size"),
    "heads-zero": (_config(num_attention_heads=0), "num_attention_heads is 0"),
    "heads-true": (_config(num_attention_heads=True), "num_attention_heads is True"),
    "heads-odd": (_config(head_dim=15), "head_dim is 15: rotary positions need an even one"),
    "epsilon-nan": (_config(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
    "epsilon-true": (_config(rms_norm_eps=True), "rms_norm_eps is True"),
    "epsilon-negative": (_config(rms_norm_eps=-1e-5), "rms_norm_eps is -1e-05"),
    "epsilon-list": (_config(rms_norm_eps=[1e-5]), r"rms_norm_eps is \[1e-05\]"),
    "theta-infinite": (_config(rope_parameters={"rope_theta": float("inf")}), "rope_theta is inf"),
    "theta-text": (_config(rope_parameters={"rope_theta": "1e4"}), "rope_theta is '1e4'"),
    "rope-text": (_config(rope_parameters="x"), "rope_parameters is 'x'"),
    "rope-factors": (
        _config(
            rope_parameters={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 2.0,
                "original_max_position_embeddings": float("inf"),
            }
        ),
        "low_freq_factor is 4.0 and high_freq_factor 2.0",
    ),
    "tied-text": (
        _config(tie_word_embeddings="false"),
        "tie_word_embeddings is 'false': it must be true or false",
    ),
    "eos-object": (_text("generation_config.json", '{"eos_token_id": {"a": 1}}'), "eos_token_id is"),
    "generation-end-infinite": (
        _text("generation_config.json", '{"eos_token_id": 1e400}'),
        "eos_token_id is inf",
    ),
    "generation-end-texts": (
        _text("generation_config.json", '{"eos_token_id": [1, "2"]}'),
        "eos_token_id is",
    ),
    "weights-missing": (lambda path: (path / WEIGHTS).unlink(), "has no weights"),
    "weights-link-to-nothing": (
        _replaced(WEIGHTS, lambda file: file.symlink_to("nothing")),
        "has no weights",
    ),
    "dtype-float8": (_header(dtype="F8_E4M3", shape=[128]), r"has shape \[128\]"),
    "shape-other": (_header(shape=[4, 8]), r"has shape \[4, 8\], but config.json asks for \[32\]"),
    "shape-of-1000-dims": (_header(shape=[1] * 1000 + [32]), "has shape"),
    "index-list": (_text(INDEX, '{"weight_map": []}'), "has no weight_map"),
    "pickle-of-code": (_pickled(torch.save, evil=EVIL), "imports 'posix system'"),
    "pickle-of-code-before-1.6": (_pickled(_legacy, evil=EVIL), "imports 'posix system'"),
    "pickle-numbers": (
        _pickled(lambda value, file: torch.save({1: torch.ones(1)}, file)),
        "not a named tensor",
    ),
    "pickle-sparse": (
        _pickled(torch.save, model__norm__weight=torch.ones(32).to_sparse()),
        "not part of a plain tensor",
    ),
    "pickle-without-data": (
        _pickled(torch.save, model__norm__weight=torch.empty(32, device="meta")),
        "not part of a plain tensor",
    ),
    "pickle-byte-array": (
        _pickled(torch.save, a=_Call(bytearray, 800_000_000)),
        "imports '[a-z_]* bytearray'",
    ),
    "pickle-zip-bomb": (_pickled(_deflated(400_000_000)), "is compressed"),
    "pickle-repeated-value": (_repeated, "claim 2147"),
}
SAME_REASON: dict[str, dict[str, Damage]] = {
    "cannot be read as safetensors": {
        "weights-of-passwords": _replaced(WEIGHTS, lambda file: file.symlink_to("/etc/passwd")),
        "weights-empty": _bytes(lambda data: b""),
        "header-cut": _bytes(lambda data: data[:50]),
        "data-cut": _bytes(lambda data: data[:-100]),
        "header-of-2^60": _bytes(lambda data: struct.pack("<Q", 1 << 60) + data[8:]),
        "header-of-90MB": _bytes(lambda data: struct.pack("<Q", 90_000_000) + data[8:]),
        "header-not-json": _bytes(lambda data: _safetensors(b"hello")),
        "header-nested": _bytes(lambda data: _safetensors(b'{"a": ' + NESTED.encode() + b"}")),
        "offsets-beyond": _header(data_offsets=[0, 1 << 62]),
        "offsets-backward": _header(data_offsets=[128, 0]),
        "offsets-overlap": _header(data_offsets=[0, 128]),
        "dtype-unknown": _header(dtype="F99"),
        "dtype-of-100kB": _header(dtype="F" * 100_000),
        "dtype-of-other-width": _header(dtype="F16"),
        "shape-overflow": _header(shape=[HUGE, HUGE]),
        "shape-negative": _header(shape=[-32]),
        "shape-text": _header(shape="32"),
        "shape-zero": _header(shape=[0, HUGE]),
    },
    ": this is a Git LFS pointer, not the file: run git lfs pull": {
        "weights-pointer": _bytes(lambda data: LFS_POINTER),
        "pickle-pointer": _pickled(lambda value, file: file.write_bytes(LFS_POINTER)),
        "config-pointer": _text("config.json", LFS_POINTER),
    },
    ": this is a web page, perhaps of a login or an error: check the link": {
        "weights-page": _bytes(lambda data: b"\n<!DOCTYPE html>\n<html>"),
        "pickle-page": _pickled(lambda value, file: file.write_text("<html>")),
    },
    "is not a regular file": {
        "config-pipe": _replaced("config.json", os.mkfifo),
        "config-device": _replaced("config.json", lambda file: file.symlink_to("/dev/zero")),
        "generation-pipe": _replaced("generation_config.json", os.mkfifo),
        "weights-directory": _replaced(WEIGHTS, Path.mkdir),
        "weights-pipe": _replaced(WEIGHTS, os.mkfifo),
        "weights-device": _replaced(WEIGHTS, lambda file: file.symlink_to("/dev/zero")),
        "index-pipe": _replaced(INDEX, os.mkfifo),
        "pickle-pipe": lambda path: ((path / WEIGHTS).unlink(), os.mkfifo(path / PICKLE)),
    },
    "files beside the index": {
        "index-outside": _index("../../../etc/passwd.safetensors"),
        "index-absolute": _index("/etc/passwd.safetensors"),
        "index-parent": _index(".."),
        "index-other-file": _index("config.json"),
        "index-of-numbers": _text(INDEX, '{"weight_map": {"a": 1}}'),
    },
    "cannot be read as tensors": {
        "pickle-that-is-code": _pickled(lambda value, file: file.write_bytes(pickle.dumps(EVIL))),
        "pickle-empty": _pickled(_cut(torch.save, 0)),
        "pickle-cut": _pickled(_cut(torch.save, 20_000)),
        "pickle-cut-before-1.6": _pickled(_cut(_legacy, -3000)),
        "pickle-text": _pickled(lambda value, file: file.write_text("<xml>")),
        "pickle-module": _pickled(lambda value, file: torch.save(torch.nn.Linear(2, 2), file)),
    },
    "is not valid JSON": {
        "config-not-utf8": _text("config.json", b'{"a": "\xff"}'),
        "config-nested": _text("config.json", NESTED),
        "config-long-number": _text("config.json", '{"vocab_size": ' + "9" * 5000 + "}"),
    },
    "is not a JSON object": {
        "config-list": _text("config.json", "[]"),
        "generation-list": _text("generation_config.json", "[]"),
    },
    "which is missing": {
        "index-long-name": _index("x" * 5000 + ".safetensors"),
        "index-nul": _index("a\0.safetensors"),
    },
}
REFUSED |= {name: (damage, reason) for reason, each in SAME_REASON.items() for name, damage in each.items()}


# What needs a limit of memory, or takes long to write
COMMANDS = (inspect_pair, generate_with_pair)  # one or the other of what is not
HEAVY = ("config-100MB", "pickle-byte-array", "pickle-zip-bomb", "pickle-repeated-value", "header-of-90MB")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", mostly_slow(REFUSED, *(name for name in REFUSED if name not in HEAVY)))
def test_a_malformed_target_is_refused_and_no_code_is_run(
    copied: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    damage, reason = REFUSED[name]
    monkeypatch.chdir(copied)
    damage(copied / "target")
    before = _files(copied)
    with refused(reason):
        load_target(open_checkpoint("target"), torch.float32, CPU)
    assert _files(copied) == before


@pytest.mark.parametrize("name", mostly_slow(REFUSED, "pickle-of-code", "weights-pipe", "layer-types-number"))
def test_commands_refuse_a_malformed_target_in_one_line(copied: Path, name: str) -> None:
    damage, reason = REFUSED[name]
    damage(copied / "target")
    before = _files(copied)
    for command in COMMANDS if name in HEAVY else COMMANDS[list(REFUSED).index(name) % 2 :][:1]:
        _check_refused(ended := command(copied), reason)
        assert ended.code == 2 or command is inspect_pair
    assert _files(copied) == before  # no code ran and nothing was written


def _check_refused(ended: Ended, reason: str) -> None:
    """One line on stderr and exit code 2; or, where ``inspect`` could read all headers, the last lines of its text."""
    lines = (
        ended.err.splitlines()
        if ended.code == 2
        else [line for line in ended.out.splitlines()[-2:] if "NaN" not in line][-1:]
    )
    assert ended.code in (1, 2), ended
    assert len(lines) == 1, ended
    assert len(lines[0]) < LONGEST_LINE
    assert lines[0].isprintable()
    assert re.search(reason, lines[0]), lines[0]
    assert ended.grown < 300


# ---- heads


def _head_tensors(**tensors: Tensor) -> Damage:
    return lambda path: change_tensors(path, tensors)


HEADS: dict[str, tuple[Damage, str]] = {
    "map-of-uint64": (_head_tensors(d2t=torch.zeros(48, dtype=torch.uint64)), "d2t is stored as U64"),
    "map-of-complex": (_head_tensors(d2t=torch.zeros(48, dtype=torch.complex64)), "d2t is stored as C64"),
    "mask-of-uint16": (_head_tensors(t2d=torch.ones(320, dtype=torch.uint16)), "t2d is stored as U16"),
    "map-overflows": (_head_tensors(d2t=torch.full((48,), (1 << 63) - 1)), "outside the vocabulary"),
    "map-empty": (_head_tensors(d2t=torch.zeros(0, dtype=torch.int64)), "it must hold 48 integers"),
    "map-one-number": (_head_tensors(d2t=torch.tensor(3)), "it must hold 48 integers"),
    "mask-of-two-dims": (_head_tensors(t2d=torch.ones(32, 10, dtype=torch.bool)), "t2d marks 640 of 320"),
    "vocabularies-huge": (_config(vocab_size=HUGE, draft_vocab_size=HUGE), "vocab_size is 1099511627776"),
    "drafts-text": (_config(draft_vocab_size=["x"] * 10**5), r"draft_vocab_size is \['x', "),
    "layers-huge": (_config(eagle_aux_hidden_state_layer_ids=[1, 2, 10**30]), "input of layer 1000"),
    "layers-many": (_config(eagle_aux_hidden_state_layer_ids=[2] * 10**5), "fc.weight has shape"),
    "norms-text": (_config(norm_output="no"), "norm_output is 'no': it must be true or false"),
    "kind-list": (_config(speculators_model_type=["x" * 10**5]), r"the head is of type \['xxx"),
    "nested-text": (_config(transformer_layer_config="x" * 10**5), "transformer_layer_config is 'xxx"),
}


@pytest.mark.parametrize("name", mostly_slow(HEADS, "map-of-uint64"))
def test_a_malformed_head_is_refused_in_one_line(copied: Path, name: str) -> None:
    damage, reason = HEADS[name]
    damage(copied / "head")
    inspected, generated = inspect_pair(copied), generate_with_pair(copied)
    assert re.search(reason, inspected.out + inspected.err), inspected
    assert inspected.code in (1, 2)
    assert inspected.grown < 300
    _check_refused(generated, reason)


# ---- code, links, permissions, and NaN weights


def test_code_in_a_checkpoint_directory_is_not_run(copied: Path) -> None:
    classes = {
        "AutoConfig": "evil.E",
        "AutoModelForCausalLM": "evil.E",
        "AutoTokenizer": ["evil.E", "evil.E"],
    }
    for path in (copied / "target", copied / "head"):
        change_json(path / "config.json", auto_map=classes, model_type="evil")
        (path / "evil.py").write_text("from pathlib import Path\nPath('evil').touch()\nclass E: pass\n")
        (path / "__init__.py").write_text("from .evil import E\n")
    change_json(copied / "target" / "tokenizer_config.json", auto_map=classes, tokenizer_class="E")
    before = _files(copied)
    assert inspect_pair(copied).code == 0
    assert generate_with_pair(copied).code == 0
    assert _files(copied) == before


def test_no_source_enables_trust_remote_code() -> None:
    for file in Path(specgen.__file__).parent.rglob("*.py"):
        assert "trust_remote" + "_code" not in file.read_text(), file


@pytest.mark.parametrize("write", [torch.save, _legacy], ids=["zip", "before-1.6"])
def test_the_unpickler_runs_no_code(
    copied: Path, write: Callable[[Any, Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the check of a pickle's imports, the unpickler has an allow list of its own."""
    monkeypatch.setattr(weight_files, "_require_plain", lambda file, zipped: None)
    monkeypatch.chdir(copied)
    _pickled(write, evil=EVIL)(copied / "target")
    with pytest.raises(UserError, match="cannot be read as tensors"):
        open_checkpoint("target")
    assert not (copied / "evil").exists()


def test_symlinks_of_a_hub_cache_are_followed(copied: Path) -> None:
    blobs = copied / "blobs"
    blobs.mkdir()
    for file in list((copied / "target").iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(Path("..") / "blobs" / file.name)
    assert inspect_pair(copied).code == 0
    assert generate_with_pair(copied).code == 0


def test_a_name_too_long_for_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is neither a directory nor a hub id") as caught:
        open_checkpoint("x" * 10_000)
    assert len(str(caught.value)) < LONGEST_LINE


@contextmanager
def _as_unprivileged_user() -> Iterator[None]:
    """Root may read everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "."])
def test_unreadable_files_are_refused(pair: Path, name: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        path = Path(shutil.copytree(pair / "target", Path(directory) / "target"))
        (path / name).chmod(0)
        with _as_unprivileged_user(), refused("cannot be read.*ermission denied"):
            fingerprint(open_checkpoint(str(path)))
        path.chmod(0o755)
