"""The commands on a target with latent attention and MTP layers of its own, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specgen.checkpoints.inspect_checkpoint import describe
from specgen.config import EngineConfig, UserError
from specgen.engine.choices import choose_attention, resolve
from specgen.engine.loading import open_checkpoints
from specgen.engine.memory_plan import memory_plans
from tests.test_run import call, rows
from tests.tiny_latents import write_latent
from tests.tiny_tokenizers import write_byte_level


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latents") / "target"
    write_latent(path, vocab_size=352, num_mtp=1, seed=3)
    write_byte_level(path)
    return path


def test_generate_drafts_with_the_target_s_own_layers_and_changes_no_text(
    target: Path, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("Tom has", "Stop here", "5 bags of"))
    )
    texts = {}
    for name, options in (
        ("mtp", ["--drafter", "mtp", "--num-spec-tokens", 3]),
        ("plain", ["--num-spec-tokens", 0]),
    ):
        out = tmp_path / name
        asked = ["--model", target, *options, "--dataset", data, "--max-new-tokens", 12, "--ignore-eos"]
        result = call("generate", *asked, "--output", out)
        assert result.exit_code == 0, result.output
        texts[name] = [row["token_ids"] for row in rows(out / "completions.jsonl")]
    assert texts["mtp"] == texts["plain"]
    assert json.loads((tmp_path / "mtp" / "report.json").read_text())["num_draft_tokens"] > 0


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_two_ranks_draft_and_generate_as_one(target: Path, tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2):
        asked = [
            "--model",
            target,
            "--drafter",
            "mtp",
            "--num-prompts",
            6,
            "--max-new-tokens",
            12,
            "--ignore-eos",
        ]
        out = tmp_path / str(ranks)
        result = call("generate", *asked, "--device", "cpu", "--tensor-parallel", ranks, "--output", out)
        assert result.exit_code == 0, result.output
        numbers = json.loads((out / "report.json").read_text())
        tokens = [row["token_ids"] for row in rows(out / "completions.jsonl")]
        found.append((tokens, numbers["num_draft_tokens"], numbers["num_accepted_tokens"]))
    assert found[0] == found[1]


@pytest.mark.slow
def test_verify_finds_no_difference(target: Path) -> None:
    result = call("verify", "--model", target, "--drafter", "mtp", "--max-new-tokens", 8, "--num-prompts", 2)
    assert result.exit_code == 0, result.output


def test_inspect_says_what_there_is(target: Path) -> None:
    alone = describe(str(target))
    assert alone.misfits == ()
    text = " ".join(alone.to_text().split())
    assert "MTP 1 layer, used by --drafter mtp" in text
    assert (
        "attention 4 heads, latent: 24 + 8 numbers a position for all heads, queries from 32; keys 12 + 8, values 20 "
        "wide" in text
    )
    assert "8 in 2 of 3 layers, 32 wide; beside one for all tokens, 32 wide" in text
    assert f"KV cache {3 * 32 * 4:,} bytes per token" in text
    pair = describe(str(target), "mtp")
    assert pair.misfits == ()
    assert [part["kind"] for part in pair.to_json()["checkpoints"]] == ["target", "head"]
    assert json.loads(json.dumps(pair.to_json()))["kv_bytes_per_token"] == 4 * 32 * 4
    text = " ".join(pair.to_text().split())
    assert "the target's MTP layer features" in text
    assert "fed back the hidden state behind shared_head.norm" in text


def test_inspect_refuses_mtp_without_a_target(target: Path) -> None:
    with pytest.raises(UserError, match="mtp is part of a target's checkpoint"):
        describe("mtp")


def test_a_missing_part_of_an_mtp_layer_is_named(target: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    stored = load_file(target / "model.safetensors")
    del stored["model.layers.3.hnorm.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((target / "config.json").read_text())
    found = describe(str(tmp_path), "mtp")
    assert any("has no tensor 'model.layers.3.hnorm.weight'" in reason for reason in found.misfits)


def config(target: Path, **changes: object) -> EngineConfig:
    asked = EngineConfig(model=str(target), drafter="mtp", device="cpu")
    return replace(resolve(asked, open_checkpoints(asked)), **changes)  # type: ignore[arg-type]


def test_a_gpu_takes_other_widths_with_torch_alone(
    target: Path, monkeypatch: pytest.MonkeyPatch, flashinfer_installed: None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    asked = config(target, device="cuda", attention="auto", dtype="bfloat16")
    name, why = choose_attention(asked, open_checkpoints(asked))
    assert name == "sdpa"
    assert "hopper does not support latent attention with latents and rotated keys of 24 + 8" in why
    assert "trtllm does not support latent attention;" in why
    asked = config(target, device="cuda", attention="hopper", dtype="bfloat16")
    with pytest.raises(UserError, match=r"rotated keys of 24 \+ 8: use --attention sdpa$"):
        choose_attention(asked, open_checkpoints(asked))


def test_what_holds_no_latents_is_refused_on_a_cpu_too(target: Path) -> None:
    asked = config(target, kv_dtype="fp8")
    with pytest.raises(UserError, match="does not support latents in FP8: use --kv-dtype model"):
        choose_attention(asked, open_checkpoints(asked))


def test_the_plan_of_a_gpu_s_memory_has_a_latent_a_token(target: Path) -> None:
    plain, *_, most = memory_plans(str(target), "mtp", 4 << 30)
    layer = (24 + 8) * 2  # bytes: a latent and a rotated key
    assert (plain.kv_bytes_per_token, most.kv_bytes_per_token) == (3 * layer, 4 * layer)
    assert plain.weights + plain.workspace + plain.passes + plain.kv_cache == int(0.9 * (4 << 30))
    assert 0 < plain.passes < most.passes
