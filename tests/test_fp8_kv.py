"""``--kv-dtype fp8`` in an engine: scales from the checkpoint, texts, memory, resume, and what a report says."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bound import StepBytes

from specgen.checkpoints.checkpoint import load_target, open_checkpoint
from specgen.checkpoints.inspect_checkpoint import describe
from specgen.config import EngineConfig, SamplingParams, UserError
from specgen.core.graphs import Runner
from specgen.engine.build import assemble, page_budget, prefill_logits
from specgen.engine.choices import choose_attention, kv_note, resolve
from specgen.engine.memory_plan import memory_plans
from specgen.experiments.audit import Judge
from specgen.models.fp8_config import kv_scheme
from specgen.models.llama import Llama
from tests.commands import specgen
from tests.engines import Pair, bundled_requests, config_of, generate, load_pair, nan_at, random_requests
from tests.marks import mostly_slow
from tests.tiny_checkpoints import change_json, change_tensors, write_head, write_target
from tests.tiny_fp8 import MODELOPT, Fp8Attend, Scales, add_scales

LAYERS = 6
# no two a power of two apart, where codes would be the same; in the first layers large keys and values saturate
SCALES = [(0.003 * 1.7**i, 0.002 * 1.3**i) for i in range(LAYERS)]
TOKENS = [5, 9, 77, 3, 12, 90, 91, 92, 40, 41, 7, 8, 100, 101, 55, 56, 57, 58, 59, 60]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A random pair whose target says that its KV cache is FP8."""
    path = tmp_path_factory.mktemp("fp8")
    config = write_target(path / "target", num_layers=LAYERS)
    write_head(path / "drafter", config)
    add_scales(path / "target", SCALES)
    return load_pair(path)


def logits_error(pair: Pair, scales: Scales) -> float:
    """How far the engine's logits are from those of attention with ``scales``."""
    target = pair.models.target
    assert isinstance(target, Llama)
    found = prefill_logits(config_of(pair), pair.models)(TOKENS)
    hidden, _ = target.forward(torch.tensor(TOKENS), Fp8Attend(target, scales))
    return float((found - target.logits(hidden)[-1]).abs().max())


def test_logits_are_those_of_rounded_keys_and_values(pair: Pair) -> None:
    assert config_of(pair).kv_dtype == "fp8"
    assert logits_error(pair, SCALES) < 1e-5
    assert logits_error(pair, [(v, k) for k, v in SCALES]) > 1e-2, "keys' and values' scales swapped"
    assert logits_error(pair, [*SCALES[1:], SCALES[0]]) > 1e-2, "a layer's scales with the one before it"
    assert logits_error(pair, [(1.0, 1.0)] * LAYERS) > 1e-2, "no scales"


@pytest.mark.parametrize(
    "name", ["{0}_proj.{0}_scale", "{0}_scale", "attn.{0}_scale", "{0}_proj.output_scale", "kv_scale"]
)
def test_every_published_name_of_a_scale_is_read(tmp_path: Path, name: str) -> None:
    """One scale may be for both keys and values."""
    scales = [(0.5, 0.5), (3.0, 3.0)] if name == "kv_scale" else [(0.5, 0.25), (3.0, 7.0)]
    assert scales_of(tmp_path, scales, (name.format("k"), name.format("v"))) == scales


def test_a_scale_of_nothing_is_1(tmp_path: Path) -> None:
    assert scales_of(tmp_path, [(0.0, -1.0)]) == [(1.0, 1.0), (1.0, 1.0)]


def test_scales_are_not_rounded_to_the_dtype_of_the_model(tmp_path: Path) -> None:
    scales = [(0.012345678, 1e-7)]
    found = scales_of(tmp_path, scales, dtype=torch.float16)[0]
    assert found == pytest.approx(scales[0], rel=1e-7)


@pytest.mark.parametrize(("value", "message"), [(float("nan"), "is nan"), (float("inf"), "is inf")])
def test_a_scale_that_is_no_number_is_refused(tmp_path: Path, value: float, message: str) -> None:
    with pytest.raises(UserError, match=rf"k_proj.k_scale {message}: the checkpoint is damaged"):
        scales_of(tmp_path, [(value, 1.0)])


def test_several_scales_of_a_layer_are_refused(tmp_path: Path) -> None:
    write_target(tmp_path / "target", num_layers=1)
    change_tensors(tmp_path / "target", {"model.layers.0.self_attn.k_scale": torch.ones(2)})
    problems = describe(str(tmp_path / "target")).misfits
    assert len(problems) == 1
    assert problems[0].endswith(
        "self_attn.k_scale has shape [2]: one number for a layer is supported, use a checkpoint without it"
    )


def scales_of(
    path: Path,
    scales: Scales,
    names: tuple[str, str] = ("k_proj.k_scale", "v_proj.v_scale"),
    dtype: torch.dtype = torch.float32,
) -> Scales:
    """What a target of two layers has of the given ones."""
    write_target(path, num_layers=2)
    add_scales(path, scales, names)
    blocks = load_target(open_checkpoint(str(path)), dtype, torch.device("cpu")).blocks  # type: ignore[attr-defined]
    return [(block.attention.layer.k_scale, block.attention.layer.v_scale) for block in blocks]


# --- texts ----------------------------------------------------------------------------------------

GREEDY = SamplingParams(max_tokens=24)


@pytest.mark.parametrize("batch", mostly_slow(["padded", "non-padded"], "non-padded"))
def test_speculation_changes_no_text(pair: Pair, batch: str) -> None:
    requests = random_requests(16, 128, GREEDY, lengths=(1, 30))
    plain = generate(pair, requests, num_spec_tokens=0).texts
    assert generate(pair, requests, num_spec_tokens=3, drafter_batch=batch).texts == plain
    assert generate(pair, requests, num_spec_tokens=0, kv_dtype="model").texts != plain


@pytest.mark.slow
def test_padded_and_non_padded_batches_draft_alike(demo_pair: Pair) -> None:
    requests = bundled_requests(8, SamplingParams(max_tokens=48))
    runs = {
        (batch, k): generate(demo_pair, requests, num_spec_tokens=k, drafter_batch=batch, kv_dtype="fp8")
        for batch, k in (("padded", 4), ("non-padded", 4), ("padded", 0))
    }
    padded, non_padded, plain = runs.values()
    assert padded.texts == non_padded.texts == plain.texts
    assert padded.verified == non_padded.verified
    assert set(padded.accepted) >= {0, 1, 2, 3, 4}


def test_shared_pages_and_lost_ones_change_no_text(demo_pair: Pair) -> None:
    requests = bundled_requests(8, SamplingParams(max_tokens=48))
    settings: dict[str, Any] = {"num_spec_tokens": 4, "kv_dtype": "fp8"}
    roomy = generate(demo_pair, requests, prefix_cache=False, **settings)
    page = page_budget(config_of(demo_pair, **settings), demo_pair.models).page_bytes
    tight = generate(demo_pair, requests, kv_memory=45 * page, **settings)
    assert tight.num_preempted > 0
    assert tight.texts == roomy.texts


@pytest.mark.slow
def test_nan_stays_with_its_request(pair: Pair) -> None:
    """An FP8 page can hold NaN: it is neither cut to the largest number nor left in a page that is used again."""
    requests = random_requests(16, 128, GREEDY, lengths=(1, 12))
    right = generate(pair, requests, max_batch_size=3).texts
    bad = 10
    outputs = generate(nan_at(pair, bad), requests, max_batch_size=3)
    touched = {r.id for r in requests if bad in (*r.prompt_token_ids, *right[r.id][:-1])}
    assert 0 < len(touched) < len(requests)
    for request in requests:
        completion = outputs.completions[request.id]
        assert (completion.error is not None) == (request.id in touched)
        assert request.id in touched or completion.token_ids == right[request.id]


# --- what a checkpoint says -------------------------------------------------------------------------

FLOAT8 = {"num_bits": 8, "type": "float"}
SCHEME = FLOAT8 | {"strategy": "tensor", "dynamic": False, "symmetric": True}
COMPRESSED = {"quant_method": "compressed-tensors"}
OF_MODELOPT = {"quant_method": "modelopt"}
# what config.json says of quantization, hf_quant_config.json, and how it is read
STATED: dict[str, tuple[Mapping[str, Any], Mapping[str, Any] | None, str | None]] = {
    "nothing": ({}, None, None),
    "modelopt": ({}, MODELOPT, "FP8"),
    "modelopt without": ({}, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, None),
    "modelopt in config.json": (OF_MODELOPT | {"quantization": {"kv_cache_quant_algo": "FP8"}}, None, "FP8"),
    "newer modelopt": (OF_MODELOPT | {"kv_cache_scheme": FLOAT8}, None, "FP8"),
    "modelopt in one of two files": (
        OF_MODELOPT | {"quant_algo": "FP8", "config_groups": {}},
        {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        "FP8",
    ),
    "AutoFP8": ({"quant_method": "fp8", "kv_cache_scheme": "static"}, None, "FP8"),
    "compressed-tensors": (COMPRESSED | {"kv_cache_scheme": SCHEME}, None, "FP8"),
    "compressed-tensors without": (COMPRESSED | {"kv_cache_scheme": None}, None, None),
    "an empty scheme": ({"kv_cache_scheme": {}}, None, None),
    "a scheme of one word": ({"kv_cache_scheme": "int8"}, None, "int8"),
    "a scale by head": (
        {"kv_cache_scheme": FLOAT8 | {"strategy": "attn_head"}},
        None,
        "num_bits 8, strategy attn_head, type float",
    ),
    "INT8": ({}, {"quantization": {"kv_cache_quant_algo": "INT8"}}, "INT8"),
    "dynamic": (
        {"kv_cache_scheme": FLOAT8 | {"dynamic": True}},
        None,
        "dynamic True, num_bits 8, type float",
    ),
    "4 bits": ({"kv_cache_scheme": FLOAT8 | {"num_bits": 4}}, None, "num_bits 4, type float"),
}


@pytest.mark.parametrize("stated", STATED)
def test_every_statement_is_read(pair: Pair, tmp_path: Path, stated: str) -> None:
    config, export, scheme = STATED[stated]
    shutil.copytree(pair.path / "target", tmp_path, dirs_exist_ok=True)
    (tmp_path / "hf_quant_config.json").unlink()
    change_json(tmp_path / "config.json", quantization_config=config)
    if export is not None:
        change_json(tmp_path / "hf_quant_config.json", **export)
    assert kv_scheme(open_checkpoint(str(tmp_path)).config) == scheme


def checkpoints_with(pair: Pair, stated: Mapping[str, object]) -> dict[str, Any]:
    model = pair.models.checkpoints["model"]
    config = {**model.config, "quantization_config": {"quant_method": "modelopt", **stated}}
    return {**pair.models.checkpoints, "model": replace(model, config=config)}


def asked(pair: Pair, kv_dtype: str) -> EngineConfig:
    return EngineConfig(**pair.names, device="cpu", kv_dtype=kv_dtype)  # type: ignore[arg-type]


def test_scales_of_another_format_are_not_used_for_fp8(pair: Pair) -> None:
    checkpoints = checkpoints_with(pair, {"kv_cache_quant_algo": "NVFP4"})
    for name in ("auto", "model"):
        assert resolve(asked(pair, name), checkpoints).kv_dtype == "model"
    with pytest.raises(UserError, match=r"has scales for a KV cache of 'NVFP4': use --kv-dtype model"):
        resolve(asked(pair, "fp8"), checkpoints)


def test_reports_say_why_the_cache_is_fp8(pair: Pair, demo_pair: Pair) -> None:
    def note(pair: Pair, name: str) -> dict[str, str]:
        checkpoints = pair.models.checkpoints
        return kv_note(resolve(asked(pair, name), checkpoints), asked(pair, name), checkpoints)

    assert note(pair, "auto") == {"KV cache": "FP8 (e4m3), as the checkpoint says; the head's in float32"}
    assert note(demo_pair, "fp8") == {"KV cache": "FP8 (e4m3), as asked; the head's in float32"}
    assert note(pair, "model") == note(demo_pair, "auto") == {}


def test_backends_are_asked_about_the_cache_of_each_model(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, flashinfer_installed: None
) -> None:
    """An old GPU reads no FP8 pages; ``auto`` says so and ``trtllm`` refuses."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    config = replace(config_of(pair), device="cuda", dtype="bfloat16", attention="auto", page_size=16)
    name, why = choose_attention(config, pair.models.checkpoints)
    assert name == "sdpa"
    assert "flashinfer does not support a KV cache in FP8 on GPUs of compute capability 8.x" in why
    with pytest.raises(UserError, match=r"8.x: use --kv-dtype model or --attention sdpa"):
        choose_attention(replace(config, attention="flashinfer"), pair.models.checkpoints)


# --- memory -----------------------------------------------------------------------------------------


def test_the_caches_take_what_a_page_counts(pair: Pair) -> None:
    for kv_dtype, width in (("model", 4), ("fp8", 1)):
        config = config_of(pair, kv_dtype=kv_dtype)
        engine = assemble(config, pair.models, 9, Runner(), lambda event: None)
        steps: Any = engine._steps
        planes = [plane for layer in range(LAYERS) for plane in steps._cache.pages(layer)]
        assert {plane.dtype.itemsize for plane in planes} == {width}
        taken = sum(plane.nbytes for plane in planes) + sum(
            plane.nbytes for plane in steps._drafter._cache.pages(0)
        )
        assert taken == 10 * page_budget(config, pair.models).page_bytes  # one more for padding rows


def test_a_plan_and_inspect_count_a_byte(pair: Pair) -> None:
    target, drafter = str(pair.path / "target"), str(pair.path / "drafter")
    one = 2 * 2 * 16  # keys and values of a layer, in numbers
    description = describe(target, drafter)
    assert description.kv_bytes_per_token == LAYERS * one + 4 * one
    assert "768 bytes per token" not in description.to_text()
    assert "384 bytes per token in FP8, as the checkpoint says" in description.to_text()
    found = {name: memory_plans(target, drafter, 1 << 30, name)[-1] for name in ("auto", "fp8", "model")}
    assert {name: plan.kv_bytes_per_token for name, plan in found.items()} == {
        "auto": LAYERS * one + 2 * one,
        "fp8": LAYERS * one + 2 * one,
        "model": 2 * (LAYERS + 1) * one,
    }


def test_the_bound_reads_a_byte(pair: Pair, random_pair: Pair) -> None:
    plain, fp8 = StepBytes.of(pair.models), StepBytes.of(pair.models, 1)
    assert plain.target_kv.layers[0][0] == 4 * fp8.target_kv.layers[0][0] == 4 * 2 * 2 * 16
    assert plain.head_kv == fp8.head_kv
    assert plain.target == fp8.target == StepBytes.of(random_pair.models).target, "scales are no weights"


# --- runs that go on --------------------------------------------------------------------------------


def test_a_manifest_names_the_cache_only_where_it_is_fp8(pair: Pair) -> None:
    assert "kv_dtype" not in config_of(pair, kv_dtype="model").to_json()
    assert config_of(pair, kv_dtype="auto").to_json()["kv_dtype"] == "fp8"


@pytest.mark.slow
def test_another_cache_is_another_run(demo_path: Path, tmp_path: Path) -> None:
    out, own, target = tmp_path / "run", tmp_path / "own.jsonl", tmp_path / "target"
    own.write_text('{"id": "a", "prompt_token_ids": [5, 6, 7]}\n')
    target.mkdir()
    for file in (demo_path / "target").iterdir():
        (target / file.name).symlink_to(file.resolve())

    def run(*arguments: str) -> str:
        """What the command complains about."""
        names = ["--model", str(target), "--drafter", str(demo_path / "drafter"), "--dataset", str(own)]
        found = specgen("generate", *names, "--output", str(out), "--quiet", *arguments)
        return str(found.exception or "")

    assert run() == ""
    assert "kv_dtype" not in json.loads((out / "manifest.json").read_text())["engine"], (
        "as in earlier versions"
    )
    assert run() == run("--kv-dtype", "model") == ""
    assert "--kv-dtype model -> fp8" in run("--kv-dtype", "fp8")
    (target / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    assert "--kv-dtype model -> fp8" in run()
    assert run("--restart") == ""
    assert "FP8 (e4m3), as the checkpoint says" in (out / "report.html").read_text()
    assert run("--kv-dtype", "fp8") == "", "what auto had stood for"


def test_rounding_of_keys_and_values_explains_more(pair: Pair) -> None:
    plain, fp8 = (Judge.of(config_of(pair, kv_dtype=name), pair.models) for name in ("model", "fp8"))
    assert (plain.fp8_kv, fp8.fp8_kv) == (False, True)
