"""Arbitrary bytes and JSON in place of a checkpoint's files: a model, or one short error line."""

import json
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from specgen.checkpoints.checkpoint import load_drafter, load_target, open_checkpoint
from specgen.checkpoints.inspect_checkpoint import describe
from specgen.config import UserError
from specgen.models.llama import Llama
from specgen.text.tokenizer import Message, load_tokenizer
from tests.forked import write_pair

WEIGHTS, PICKLE, INDEX = "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"
CPU = torch.device("cpu")
LONGEST_LINE = 700  # characters
Files = dict[str, bytes]

numbers = st.integers() | st.floats() | st.sampled_from([-1, 0, 1, 2**24, 2**31, 2**63, 10**400, 1e400])
leaves = (
    st.none()
    | st.booleans()
    | numbers
    | st.text(max_size=8)
    | st.sampled_from(["x" * 10**5, "../x", "\ud83d"])
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
)


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Settings of so many examples; files make their times uneven."""
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def _read(path: Path) -> Files:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def target(pair: Path) -> Files:
    return _read(pair / "target")


@pytest.fixture(scope="module")
def head(pair: Path) -> Files:
    return _read(pair / "head")


@pytest.fixture(scope="module")
def model(pair: Path) -> Llama:
    return load_target(open_checkpoint(str(pair / "target")), torch.float32, CPU)


def _pickled(files: Files, *, zipped: bool) -> Files:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / WEIGHTS
        file.write_bytes(files[WEIGHTS])
        torch.save(load_file(file), Path(directory) / PICKLE, _use_new_zipfile_serialization=zipped)
        return {name: data for name, data in files.items() if name != WEIGHTS} | {
            PICKLE: (Path(directory) / PICKLE).read_bytes()
        }


def _try(files: Files, use: Callable[[Path], object]) -> None:
    """Use ``files`` in a directory of their own: success, or a short ``UserError``."""
    error = _error(files, use)
    if error is not None:
        assert type(error) is UserError
        assert len(str(error).splitlines()) == 1
        assert len(str(error)) < LONGEST_LINE
        assert ": " in str(error)


def _error(files: Files, use: Callable[[Path], object]) -> UserError | None:
    with tempfile.TemporaryDirectory() as directory:
        for name, data in files.items():
            (Path(directory) / name).write_bytes(data)
        try:
            use(Path(directory))
        except UserError as error:
            return error
        return None


def _use_target(path: Path) -> None:
    for misfit in describe(str(path)).misfits:
        assert len(misfit) < LONGEST_LINE
    load_target(open_checkpoint(str(path)), torch.float32, CPU)


def _changed_json(data: bytes, changes: dict[str, Any]) -> bytes:
    return json.dumps(json.loads(data) | changes).encode()


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Cuts a file, or puts other bytes into it, mostly near its ends, where headers and tables are."""
    place, width = draw(st.floats(0, 1) | st.sampled_from([0.0, 0.001, 0.999])), draw(st.integers(0, 8))
    new, cut = draw(st.binary(max_size=8)), draw(st.booleans())

    def damage(data: bytes) -> bytes:
        at = int(place * len(data))
        return data[:at] if cut and not new else data[:at] + new + data[at + width :]

    return damage


CONFIG_KEYS = (
    *("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
    *("rope_parameters", "rope_scaling", "eos_token_id", "tie_word_embeddings", "layer_types", "hidden_act"),
    *(
        "sliding_window",
        "use_sliding_window",
        "partial_rotary_factor",
        "attention_bias",
        "dtype",
        "torch_dtype",
    ),
)
HEAD_KEYS = (
    *("draft_vocab_size", "target_hidden_size", "eagle_config", "eagle_aux_hidden_state_layer_ids"),
    *("speculators_model_type", "transformer_layer_config", "norm_before_residual", "norm_before_fc"),
    *("fc_norm", "norm_output"),
)


@pytest.mark.slow
@fuzz(150)
@given(changes=st.dictionaries(st.sampled_from(CONFIG_KEYS), values, min_size=1, max_size=3))
def test_any_config_of_a_target(target: Files, changes: dict[str, Any]) -> None:
    _try(target | {"config.json": _changed_json(target["config.json"], changes)}, _use_target)


@pytest.mark.slow
@fuzz(150)
@given(changes=st.dictionaries(st.sampled_from(CONFIG_KEYS + HEAD_KEYS), values, min_size=1, max_size=3))
def test_any_config_of_a_head(head: Files, model: Llama, changes: dict[str, Any]) -> None:
    def use(path: Path) -> None:
        with suppress(UserError):  # the same reason, or another one
            describe(str(path))
        load_drafter(open_checkpoint(str(path)), model)

    _try(head | {"config.json": _changed_json(head["config.json"], changes)}, use)


@fuzz(100)
@given(name=st.sampled_from(["config.json", "generation_config.json", INDEX]), data=st.binary() | values)
def test_any_json_file(target: Files, name: str, data: Any) -> None:
    content = data if isinstance(data, bytes) else json.dumps(data).encode()
    _try(target | {name: content}, _use_target)


@pytest.mark.slow
@fuzz(60)
@given(weight_map=values | st.dictionaries(st.text(max_size=4), values, min_size=1))
@example(weight_map={"a": WEIGHTS})
def test_any_index(target: Files, weight_map: Any) -> None:
    _try(target | {INDEX: json.dumps({"weight_map": weight_map}).encode()}, _use_target)


@fuzz(150)
@given(damage=damages())
def test_any_damage_to_safetensors(target: Files, damage: Callable[[bytes], bytes]) -> None:
    _try(target | {WEIGHTS: damage(target[WEIGHTS])}, _use_target)


@pytest.mark.slow
@fuzz(150)
@given(
    entry=st.dictionaries(
        st.sampled_from(["dtype", "shape", "data_offsets"]),
        values
        | st.lists(numbers, max_size=3)
        | st.sampled_from(["F64", "BF16", "F8_E5M2", "U64", "C64", "BOOL"]),
        min_size=1,
    )
)
@example(entry={"dtype": "U8", "shape": [128]})
def test_any_entry_of_a_header(target: Files, entry: dict[str, Any]) -> None:
    data = target[WEIGHTS]
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    header["model.norm.weight"] |= entry
    written = json.dumps(header).encode()
    _try(target | {WEIGHTS: struct.pack("<Q", len(written)) + written + data[end:]}, _use_target)


@pytest.mark.slow
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before-1.6"])
def test_any_damage_to_pickles(target: Files, zipped: bool) -> None:
    files = _pickled(target, zipped=zipped)

    @fuzz(40)
    @given(damage=damages())
    def check(damage: Callable[[bytes], bytes]) -> None:
        _try(files | {PICKLE: damage(files[PICKLE])}, _use_target)

    check()


def _use_tokenizer(path: Path) -> None:
    tokenizer = load_tokenizer(str(path))
    tokenizer.decode(tokenizer.encode_text("Tom has 3 €"))
    tokenizer.encode_rendered(tokenizer.render_chat([Message(role="user", content="Hi")]))


TOKENIZER_KEYS = (
    "model",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "added_tokens",
    "truncation",
)
SETTINGS = ("chat_template", "eos_token", "added_tokens_decoder", "extra_special_tokens", "model_max_length")


@fuzz(60)
@given(changes=st.dictionaries(st.sampled_from(TOKENIZER_KEYS), values, min_size=1, max_size=2))
def test_any_tokenizer(target: Files, changes: dict[str, Any]) -> None:
    _try(target | {"tokenizer.json": _changed_json(target["tokenizer.json"], changes)}, _use_tokenizer)


@pytest.mark.slow
@fuzz(60)
@given(changes=st.dictionaries(st.sampled_from(SETTINGS), values, min_size=1, max_size=2))
def test_any_settings_of_a_tokenizer(target: Files, changes: dict[str, Any]) -> None:
    name = "tokenizer_config.json"
    _try(target | {name: _changed_json(target[name], changes)}, _use_tokenizer)


PIECES = [
    "{{",
    "}}",
    "{%",
    "%}",
    "messages",
    "[0]",
    ".content",
    "|",
    "~",
    "+",
    "for x in",
    "endfor",
    "if",
    "''",
    " ",
]


@fuzz(60)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=12))
def test_any_template(target: Files, pieces: list[str]) -> None:
    template = "".join(pieces).encode(errors="replace")
    _try(target | {"chat_template.jinja": template}, _use_tokenizer)
