"""Arbitrary bytes and JSON in place of a checkpoint's files: a model, or one short error line."""

import json
import struct
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from specgen.checkpoints.checkpoint import load_drafter, load_target, open_checkpoint
from specgen.checkpoints.inspect_checkpoint import describe
from specgen.config import UserError
from specgen.models.llama import Llama
from specgen.text.tokenizer import Message, load_tokenizer
from tests.forked import write_pair
from tests.marks import mostly_slow

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


def _read(path: Path) -> Files:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


def _pickled(files: Files, *, zipped: bool) -> Files:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / WEIGHTS
        file.write_bytes(files[WEIGHTS])
        torch.save(load_file(file), Path(directory) / PICKLE, _use_new_zipfile_serialization=zipped)
        return {name: data for name, data in files.items() if name != WEIGHTS} | {
            PICKLE: (Path(directory) / PICKLE).read_bytes()
        }


def _use_target(path: Path) -> None:
    for misfit in describe(str(path)).misfits:
        assert len(misfit) < LONGEST_LINE
    load_target(open_checkpoint(str(path)), torch.float32, CPU)


def _use_head(model: Llama, path: Path) -> None:
    with suppress(UserError):  # the same reason, or another one
        describe(str(path))
    load_drafter(open_checkpoint(str(path)), model)


def _use_tokenizer(path: Path) -> None:
    tokenizer = load_tokenizer(str(path))
    tokenizer.decode(tokenizer.encode_text("Tom has 3 €"))
    tokenizer.encode_rendered(tokenizer.render_chat([Message(role="user", content="Hi")]))


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
        *("sliding_window", "use_sliding_window", "partial_rotary_factor"),
        *("attention_bias", "dtype", "torch_dtype"),
    ),
)
HEAD_KEYS = (
    *("draft_vocab_size", "target_hidden_size", "eagle_config", "eagle_aux_hidden_state_layer_ids"),
    *("speculators_model_type", "transformer_layer_config", "norm_before_residual", "norm_before_fc"),
    *("fc_norm", "norm_output"),
)
TOKENIZER_KEYS = (
    *("model", "normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens", "truncation"),
)
SETTINGS = ("chat_template", "eos_token", "added_tokens_decoder", "extra_special_tokens", "model_max_length")
PIECES = (
    *("{{", "}}", "{%", "%}", "messages", "[0]", ".content", "|", "~", "+", "for x in", "endfor", "if", "''"),
    " ",
)


def changed(name: str, keys: Sequence[str], most: int = 2) -> st.SearchStrategy[Files]:
    """The JSON file ``name`` with other values of some of ``keys``."""
    changes = st.dictionaries(st.sampled_from(keys), values, min_size=1, max_size=most)
    return changes.map(lambda new: lambda files: {name: json.dumps(json.loads(files[name]) | new).encode()})


def damaged(name: str) -> st.SearchStrategy[Files]:
    return damages().map(lambda damage: lambda files: {name: damage(files[name])})


def replaced(name: str, content: st.SearchStrategy[Any]) -> st.SearchStrategy[Files]:
    return content.map(
        lambda new: lambda files: {name: new if isinstance(new, bytes) else json.dumps(new).encode()}
    )


def with_entry(entry: dict[str, Any]) -> Callable[[Files], Files]:
    """Of a tensor in the header of the weights."""

    def change(files: Files) -> Files:
        data = files[WEIGHTS]
        end = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:end])
        header["model.norm.weight"] |= entry
        written = json.dumps(header).encode()
        return {WEIGHTS: struct.pack("<Q", len(written)) + written + data[end:]}

    return change


ENTRIES = st.dictionaries(
    st.sampled_from(["dtype", "shape", "data_offsets"]),
    values
    | st.lists(numbers, max_size=3)
    | st.sampled_from(["F64", "BF16", "F8_E5M2", "U64", "C64", "BOOL"]),
    min_size=1,
)
TEMPLATES = st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=12)
JSON_FILES = ("config.json", "generation_config.json", INDEX)
# Of files of what, how they change, and how many examples there are
FUZZ: dict[str, tuple[str, st.SearchStrategy[Any], int]] = {
    "config": ("target", changed("config.json", CONFIG_KEYS, 3), 150),
    "head": ("head", changed("config.json", CONFIG_KEYS + HEAD_KEYS, 3), 150),
    "json": ("target", st.one_of(replaced(name, st.binary() | values) for name in JSON_FILES), 100),
    "index": (
        "target",
        replaced(
            INDEX,
            (values | st.dictionaries(st.text(max_size=4), values, min_size=1) | st.just({"a": WEIGHTS})).map(
                lambda found: {"weight_map": found}
            ),
        ),
        60,
    ),
    "safetensors": ("target", damaged(WEIGHTS), 150),
    "header": ("target", (ENTRIES | st.just({"dtype": "U8", "shape": [128]})).map(with_entry), 150),
    "pickle": ("zipped", damaged(PICKLE), 40),
    "pickle-before-1.6": ("unzipped", damaged(PICKLE), 40),
    "tokenizer": ("tokenizer", changed("tokenizer.json", TOKENIZER_KEYS), 60),
    "settings": ("tokenizer", changed("tokenizer_config.json", SETTINGS), 60),
    "template": (
        "tokenizer",
        TEMPLATES.map(lambda pieces: "".join(pieces).encode(errors="replace")).map(
            lambda text: lambda files: {"chat_template.jinja": text}
        ),
        60,
    ),
}


@pytest.mark.parametrize("name", mostly_slow(FUZZ, "json", "safetensors", "tokenizer", "template"))
def test_whatever_a_file_holds(pair: Path, name: str) -> None:
    """A model or tokenizer, or a short ``UserError``."""
    kind, strategy, examples = FUZZ[name]
    files, use = _read(pair / ("head" if kind == "head" else "target")), _use_target
    if kind == "tokenizer":
        use = _use_tokenizer
    elif kind == "head":
        use = partial(_use_head, load_target(open_checkpoint(str(pair / "target")), torch.float32, CPU))
    elif kind != "target":
        files = _pickled(files, zipped=kind == "zipped")

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(change=strategy)
    def check(change: Callable[[Files], Files]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            for file, data in (files | change(files)).items():
                (Path(directory) / file).write_bytes(data)
            reason = _reason(use, Path(directory))
        assert reason is None or (
            len(reason.splitlines()) == 1 and len(reason) < LONGEST_LINE and ": " in reason
        )

    check()


def _reason(use: Callable[[Path], object], path: Path) -> str | None:
    try:
        use(path)
    except UserError as error:
        return str(error)
    return None
