"""What is read of FP8 checkpoints, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specgen.checkpoints.checkpoint import drafter_config, load_target, open_checkpoint, target_config
from specgen.checkpoints.inspect_checkpoint import describe
from specgen.checkpoints.tensor_reader import TensorReader
from specgen.config import UserError
from specgen.models.fp8_config import fp8_config
from tests.commands import refused
from tests.engines import load_pair
from tests.test_fp8 import exact, fp8_weight
from tests.tiny_checkpoints import change_json, change_tensors, write_head, write_target
from tests.tiny_fp8 import CONFIGS, E4M3, quantize

CPU = torch.device("cpu")
LAYER = "model.layers.0."
NOISE = torch.Generator().manual_seed(5)


def write(path: Path, form: str) -> Path:
    write_target(path, num_layers=1, hidden_size=192, head_dim=48, num_kv_heads=4)
    quantize(path, form)
    return path


def load(path: Path) -> None:
    load_target(open_checkpoint(str(path)), torch.float32, CPU)


def change(path: Path, **tensors: Any) -> None:
    """Replace tensors of the first layer, or (None) remove them; ``__`` in a name is a dot."""
    change_tensors(path, {LAYER + name.replace("__", "."): tensor for name, tensor in tensors.items()})


def configure(path: Path, file: str = "config.json", **settings: Any) -> None:
    change_json(path / file, **settings)


def is_refused(path: Path, message: str) -> None:
    with refused(message):
        load(path)


def compressed(**changes: Any) -> dict[str, Any]:
    """A config of compressed-tensors with ``group__part__setting`` changed."""
    config = json.loads(json.dumps(CONFIGS["dynamic"][2]))
    for name, value in changes.items():
        *parts, last = name.split("__")
        where = config["config_groups"]["group_0"]
        for part in parts:
            where = where[part]
        where[last] = value
    return config


def modelopt(algorithm: str | None) -> tuple[dict[str, Any], str]:
    return {"quant_method": "modelopt", "quant_algo": algorithm}, f"quant_algo is {algorithm!r}"


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "nvfp4": modelopt("NVFP4"),
    "w4a8": modelopt("W4A8_AWQ"),
    "fp8-pb-wo": modelopt("FP8_PB_WO"),
    "modelopt-channel": modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    "no-algorithm": modelopt(None),
    "w8a8-int8": (
        compressed(weights__type="int", input_activations__type="int"),
        "of the kind W8A8-int is not",
    ),
    "w4a16": (
        compressed(weights__type="int", weights__num_bits=4, input_activations=None),
        "kind W4A16 is not",
    ),
    "nvfp4-compressed": (compressed(weights__num_bits=4, input_activations__num_bits=4), "kind W4A4 is not"),
    "weights-only": (compressed(input_activations=None), "of the kind W8A16 is not supported"),
    "asymmetric": (compressed(weights__symmetric=False), "weights are not symmetric"),
    "grouped-weights": (compressed(weights__strategy="group"), "weights have the strategy 'group'"),
    "outputs": (compressed(output_activations={"num_bits": 8}), "output_activations are set"),
    "compressed-of-64": (
        compressed(
            weights__strategy="block",
            weights__block_structure=[64, 64],
            input_activations__strategy="group",
            input_activations__group_size=128,
        ),
        "weights have the strategy 'block' and input_activations 'group'",
    ),
    "some-layers": (compressed(targets=["re:.*mlp.*"]), "targets is"),
    "two-groups": ({**compressed(), "config_groups": {"a": {}, "b": {}}}, "config_groups has 2 groups"),
    "awq": ({"quant_method": "awq", "bits": 4}, "quant_method is 'awq'"),
    "gptq": ({"quant_method": "gptq", "bits": 4}, "quant_method is 'gptq'"),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "quant_method is 'bitsandbytes'",
    ),
    "nameless": ({"bits": 4}, "quant_method is None"),
    "other-blocks": (
        CONFIGS["block"][2] | {"weight_block_size": [64, 64]},
        r"weight_block_size is \[64, 64\]",
    ),
    "static-blocks": (CONFIGS["block"][2] | {"activation_scheme": "static"}, "activation_scheme is 'static'"),
    "e5m2": (CONFIGS["block"][2] | {"fmt": "e5m2"}, "fmt is 'e5m2'"),
    "power-of-two-scales": (CONFIGS["block"][2] | {"scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'"),
    "rotated": (
        {**compressed(), "transform_config": {"config_groups": {"R1": {}}}},
        "transform_config is set",
    ),
    "broken-pattern": ({**compressed(), "ignore": ["re:(("]}, "no regular expression"),
    "no-names": ({**compressed(), "ignore": [3]}, "ignore has 3"),
}


@pytest.mark.parametrize(("config", "message"), OTHER.values(), ids=OTHER)
def test_other_formats_are_refused_by_name_with_what_to_use(config: dict[str, Any], message: str) -> None:
    with refused(message) as caught:
        fp8_config({"quantization_config": config})
    assert "use plain weights, or FP8" in str(caught.value) or "ignore" in str(caught.value)


SCHEMES = {
    ("tensor", "tensor", False): ("tensor", "static"),
    ("channel", "tensor", False): ("channel", "static"),
    ("tensor", "token", True): ("tensor", "token"),
    ("channel", "token", True): ("channel", "token"),
    ("block", "group", True): ("block", "group"),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("inputs", ["tensor", "token", "group"])
@pytest.mark.parametrize("weights", ["tensor", "channel", "block", "group"])
def test_schemes_of_compressed_tensors(weights: str, inputs: str, dynamic: bool) -> None:
    config = compressed(
        weights__strategy=weights,
        weights__block_structure=[128, 128],
        input_activations__strategy=inputs,
        input_activations__group_size=128,
        input_activations__dynamic=dynamic,
    )
    known = SCHEMES.get((weights, inputs, dynamic))
    if known is None:
        how = "dynamic" if dynamic else "static"
        with refused(rf"'{weights}' and input_activations '{inputs}' \({how}\), which"):
            fp8_config({"quantization_config": config})
        return
    found = fp8_config({"quantization_config": config})
    assert (found.weights, found.activations) == known


def test_the_separate_file_of_modelopt_must_agree(tmp_path: Path) -> None:
    path = write(tmp_path, "modelopt-newer")
    load(path)
    configure(path, "hf_quant_config.json", quantization={"quant_algo": "NVFP4"})
    is_refused(path, "hf_quant_config.json has the quant_algo 'NVFP4' and config.json 'FP8'")
    nested = {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}
    configure(path, quantization_config=nested)
    is_refused(path, "quant_algo is 'NVFP4', which is not supported")
    configure(path, quantization_config={})
    is_refused(path, "quant_algo is 'NVFP4', which is not supported")
    configure(path, "hf_quant_config.json", quantization={})
    is_refused(path, "hf_quant_config.json has no quantization")


def test_two_configs_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "dynamic")
    old = compressed()
    configure(path, compression_config=old)
    is_refused(path, "has quantization_config and compression_config")
    configure(path, quantization_config=None)
    load(path)


NOT_ABOVE_0 = "is not a finite number above 0"
# of a form: tensors of the first layer that are changed, and what is said
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no-scale": ("dynamic", {"mlp__up_proj__weight_scale": None}, "has no tensor .*up_proj.weight_scale'"),
    "too-few": ("dynamic", {"mlp__up_proj__weight_scale": torch.ones(383, 1)}, r"has shape \[383, 1\], but"),
    "zero": ("dynamic", {"mlp__up_proj__weight_scale": torch.zeros(384, 1)}, NOT_ABOVE_0),
    "nan": ("static", {"mlp__up_proj__weight_scale": torch.tensor([torch.nan])}, NOT_ABOVE_0),
    "infinite": ("dynamic", {"mlp__up_proj__weight_scale": torch.full((384, 1), torch.inf)}, NOT_ABOVE_0),
    "negative": ("static", {"mlp__down_proj__input_scale": torch.tensor([-1.0])}, NOT_ABOVE_0),
    "no-input-scale": ("static", {"mlp__down_proj__input_scale": None}, "no tensor .*down_proj.input_scale'"),
    "integer-scale": (
        "static",
        {"mlp__down_proj__weight_scale": torch.ones(1, dtype=torch.int64)},
        "weight_scale is stored as int64",
    ),
    "other-input-scale": (
        "modelopt",
        {"mlp__up_proj__input_scale": torch.tensor(0.5)},
        "gate_proj, .*up_proj have the same inputs, but different input_scales: quantize them with one",
    ),
    "plain-part": (
        "dynamic",
        {"self_attn__v_proj__weight": torch.zeros(192, 192), "self_attn__v_proj__weight_scale": None},
        "v_proj' is not in FP8, but what it is joined with is",
    ),
    "scale-of-plain": ("dynamic", {"mlp__down_proj__weight": torch.zeros(192, 384)}, "an unknown tensor"),
    "norm": ("dynamic", {"input_layernorm__weight": torch.zeros(192).to(E4M3)}, "is stored as float8_e4m3fn"),
    "zero-point": (
        "dynamic",
        {"mlp__down_proj__weight_zero_point": torch.zeros(192, 1)},
        "unknown tensors?,.*zero_point",
    ),
    "input-scale-of-dynamic": ("dynamic", {"mlp__down_proj__input_scale": torch.ones(1)}, "unknown tensor"),
}


@pytest.mark.parametrize(("form", "tensors", "message"), WRONG.values(), ids=WRONG)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, form: str, tensors: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, form)
    change(path, **tensors)
    is_refused(path, message)


@pytest.mark.parametrize(
    "pattern",
    [
        f"{LAYER}mlp.down_proj",
        "model.layers.0",
        "*down_proj",
        "model.layers.*.mlp*",
        r"re:.*\.down_proj$",
        "re:model.*",
    ],
)
@pytest.mark.parametrize(("form", "name"), [("dynamic", "ignore"), ("block", "modules_to_not_convert")])
def test_a_layer_is_not_in_fp8_and_named_as_ignored(
    tmp_path: Path, form: str, name: str, pattern: str
) -> None:
    path = write(tmp_path, form)
    config = {**CONFIGS[form][2], name: ["lm_head", "model.layers.1", pattern]}
    configure(path, quantization_config=config)
    is_refused(path, "is in FP8, but config.json names it among the layers that are not")
    suffix = "weight_scale_inv" if form == "block" else "weight_scale"
    plain = torch.randn(192, 384, generator=NOISE).bfloat16()
    change(path, mlp__down_proj__weight=plain, **{f"mlp__down_proj__{suffix}": None})
    if pattern.endswith(("down_proj", "down_proj$")):
        load(path)


def test_separate_patterns_do_not_match_more(tmp_path: Path) -> None:
    path = write(tmp_path, "dynamic")
    names = [
        *("layers.0", "model.layers.00", "model.layers.1"),
        *("mlp", "re:mlp", "*.gate", "lm_head", "re:.*gate$"),
    ]
    configure(path, quantization_config={**CONFIGS["dynamic"][2], "ignore": names})
    load(path)


def test_a_layer_that_no_name_ignores_may_be_plain(tmp_path: Path) -> None:
    path = write(tmp_path, "dynamic")
    change(path, mlp__down_proj__weight=torch.zeros(192, 384), mlp__down_proj__weight_scale=None)
    load(path)


def test_an_output_layer_is_plain_unless_it_is_stored_in_fp8(tmp_path: Path) -> None:
    path = write(tmp_path, "dynamic")
    weight = fp8_weight(128, 192, "token")
    change_tensors(path, {"lm_head.weight": weight.data, "lm_head.weight_scale": weight.scale})
    is_refused(path, "lm_head is in FP8, but config.json names it")
    configure(path, quantization_config={**CONFIGS["dynamic"][2], "ignore": []})
    target = load_target(open_checkpoint(str(path)), torch.float32, CPU)
    x = torch.randn(3, 192, generator=NOISE)
    torch.testing.assert_close(target.logits(x).double(), exact(x, weight), atol=1e-4, rtol=0)


def test_a_config_without_weights_in_fp8_and_such_weights_without_one_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "dynamic")
    configure(path, quantization_config=None)
    is_refused(path, "is stored as float8_e4m3fn: quantized weights are not supported here")
    write_target(tmp_path, num_layers=1)
    configure(tmp_path, quantization_config=CONFIGS["dynamic"][2])
    is_refused(tmp_path, "config.json says FP8, but no weight is stored in it")


@pytest.mark.parametrize("name", ["k_scale", "k_proj.k_scale", "attn.k_scale", "v_scale", "v_proj.v_scale"])
def test_scales_of_a_kv_cache_are_known_names(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, "dynamic")
    change(path, **{f"self_attn.{name}": torch.tensor(0.5)})
    load(path)


def test_a_head_in_fp8_is_refused(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    write_head(tmp_path / "head", target)
    quantize(tmp_path / "head", "dynamic")
    with pytest.raises(UserError, match="a head in FP8 is not supported"):
        drafter_config(open_checkpoint(str(tmp_path / "head")), target.num_layers)


def test_a_plain_head_may_carry_what_its_targets_config_says_of_fp8(tmp_path: Path) -> None:
    write_head(tmp_path / "drafter", write_target(tmp_path / "target"))
    quantize(tmp_path / "target", "dynamic")
    configure(tmp_path / "drafter", quantization_config=CONFIGS["dynamic"][2])
    head = load_pair(tmp_path).models.head
    assert head.config.fp8 is None


def test_inspect_names_the_format_and_counts_bytes_as_stored(tmp_path: Path) -> None:
    path = write(tmp_path, "block")
    found = describe(str(path)).parts[0]
    assert found.facts()["quantized"] == (
        "FP8 e4m3 (quant_method fp8), one scale per 128x128 block; activations rounded by groups of 128"
    )
    stored = load_file(path / "model.safetensors")
    weights: Any = found.to_json()
    assert weights["num_bytes"] == sum(tensor.nbytes for tensor in stored.values())
    assert weights["num_parameters"] == sum(x.numel() for name, x in stored.items() if "scale" not in name)
    assert weights["dtypes"][0] == "float8_e4m3fn"
    assert weights["kv_bytes_per_token"] == 2 * 4 * 48 * 4  # float32, as the plain tensors
    assert weights["problems"] == []


def test_bytes_on_the_device_are_those_of_the_weights(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write(tmp_path, "block")))
    taken = []
    for device in (CPU, torch.device("meta")):
        reader = TensorReader(
            checkpoint=checkpoint, dtype=torch.float32, device=device, fp8=target_config(checkpoint).fp8
        )
        weight = reader.linear({LAYER + "mlp.gate_proj": 384, LAYER + "mlp.up_proj": 384}, 192)
        assert (weight.data.shape, weight.scale.shape) == ((768, 192), (768, 2))
        assert weight.num_bytes == sum(reader.taken.values()) == 768 * 192 + 768 // 128 * 2 * 4
        taken.append(reader.taken)
    assert taken[0] == taken[1]
