"""The experts bench on a CPU: what is timed, its bound, and that results are checked."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from bench import experts as expert_bench
from bench.experts import SHAPES, ExpertJob, _matrix, exact, expert_bytes, measure, touched

from specgen.ops.experts import grouped_experts
from tests.commands import printed, refused

pytestmark = pytest.mark.scripts

CPU, F32 = torch.device("cpu"), torch.float32
JOB = ExpertJob(shapes=("small",), rows=(3, 1), repeats=2, dtype=F32, device=CPU)


def test_the_table_grows_by_rows_and_has_bounds() -> None:
    first, table = measure(JOB)
    assert [row["rows"] for row in first.rows] == [1]
    assert [row["rows"] for row in table.rows] == [1, 3]
    assert table.rows[0]["touched"] == SHAPES["small"].k
    assert 2 < table.rows[1]["touched"] <= 6
    for row in table.rows:
        assert row["over_bound"] == pytest.approx(row["mean"] / row["bound"])
        assert row["speedup"] == pytest.approx(row["grouped_mean"] / row["mean"])
        assert row["difference"] < 1e-5
    assert table.notes == ()


def test_the_bound_is_of_bytes_or_of_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["small"]
    size = expert_bytes(shape.layer(0, F32, CPU))
    assert size == 4 * (3 * 64 * 96 + 2 * 96 + 64)
    monkeypatch.setattr(expert_bench, "copy_bandwidth", lambda device: 1e6)
    monkeypatch.setattr(expert_bench, "matrix_flops", lambda device, dtype: 1e12)
    *_, table = measure(JOB)
    assert table.rows[0]["bound"] == pytest.approx(2 * size)  # microseconds
    monkeypatch.setattr(expert_bench, "matrix_flops", lambda device, dtype: 1e3)
    *_, table = measure(JOB)
    assert table.rows[1]["bound"] == pytest.approx(1e3 * 3 * 2 * 2 * 3 * 64 * 96)


def test_layers_and_their_routes_differ() -> None:
    shape = SHAPES["small"]
    assert not torch.equal(shape.layer(0, F32, CPU).down.data, shape.layer(1, F32, CPU).down.data)
    assert not torch.equal(shape.routes(9, 0, F32, CPU)[0], shape.routes(9, 1, F32, CPU)[0])
    ids, weights = shape.routes(50, 0, F32, CPU)
    assert all(len(set(row)) == shape.k for row in ids.tolist())
    assert touched(ids) == list(range(8))
    torch.testing.assert_close(weights.sum(1), torch.ones(50))


@pytest.mark.parametrize("changes", [{}, {"mxfp4": True}, {"fp8": "token"}, {"fp8": "group"}], ids=str)
def test_the_exact_result_is_that_of_the_matrices(changes) -> None:
    shape = replace(SHAPES["small"], **changes)
    experts, x = shape.layer(3, F32, CPU), torch.randn(5, 64)
    ids, weights = shape.routes(5, 0, F32, CPU)
    found = exact(experts, x, ids, weights)
    if shape.mxfp4:
        byte, scale = int(experts.down.data[2, 7, 20]), int(experts.down.scale[2, 7, 1])
        low, high = (e2m1(half) * 2.0 ** (scale - 127) for half in (byte & 15, byte >> 4))
        assert _matrix(experts.down, 2)[7, 40:42].tolist() == [low, high]
    else:
        expected = grouped_experts(experts)(x, ids, weights).sum(0)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("fp8", "scales"), [("token", 2 * 128 + 256), ("group", 2 * 2 + 2)])
def test_experts_in_fp8_take_a_byte_a_weight_and_their_scales(fp8, scales: int) -> None:
    shape = replace(SHAPES["small"], hidden=256, inner=128, biases=False, fp8=fp8)
    assert expert_bytes(shape.layer(0, F32, CPU)) == 3 * 256 * 128 + 4 * scales


def e2m1(bits: int) -> float:
    """E2M1: a sign, two bits of exponent and one of mantissa, subnormal at exponent 0."""
    sign, exponent, mantissa = 1 - 2 * (bits >> 3), bits >> 1 & 3, bits & 1
    return sign * (mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2))


def wrong(experts):
    right = grouped_experts(experts)
    return lambda x, ids, weights: right(x, ids, weights.flip(1))


def noisy(experts):
    right = grouped_experts(experts)
    return lambda x, ids, weights: right(x, ids, weights) * (1 + 5e-5 * torch.rand(()))


@pytest.mark.parametrize(
    ("kernel", "note"), [(wrong, "1 rows: differs from float32 by"), (noisy, "differs between runs")]
)
def test_a_result_that_is_wrong_or_differs_is_not_in_the_table(
    monkeypatch: pytest.MonkeyPatch, kernel, note: str
) -> None:
    bound = expert_bench.bind_ops(CPU, F32)
    monkeypatch.setattr(expert_bench, "bind_ops", lambda *_: replace(bound, experts=kernel))
    *_, table = measure(JOB)
    assert not table.rows
    assert note in table.notes[0]


def test_the_command_leaves_table_document_and_files(tmp_path) -> None:
    options = ["--device", "cpu", "--rows", "2", "--repeats", "2", "--output", str(tmp_path / "out")]
    done = printed(*options, "--json", program=expert_bench.app)
    document = json.loads(done)
    assert [(row["shape"], row["rows"]) for row in document["rows"]] == [("small", 2)]
    assert "small: 8 experts of 64 x 96, top 2" in document["head"]["shapes"]
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["experts.csv", "experts.html", "experts.json", "experts.yaml"]
    for changes, message in (
        ({"repeats": 1}, "repeats is 1"),
        ({"shapes": ("large",)}, "'large': use qwen3-30b-a3b"),
    ):
        with refused(message):
            replace(JOB, **changes)


@pytest.mark.slow
def test_a_script_repeats_itself_and_says_in_one_line_what_is_wrong(tmp_path) -> None:
    script, first, again = expert_bench.__file__, tmp_path / "first", tmp_path / "again"
    run = partial(subprocess.run, capture_output=True, text=True)
    asked = ["--device=cpu", "--rows=2", "--repeats=2", f"--output={first}", "--quiet"]
    assert run([sys.executable, script, *asked]).returncode == 0
    config = first / "experts.yaml"
    assert config.read_text().startswith(
        "# python scripts/bench/experts.py --config FILE\nrows: 2\nrepeats: 2\ndevice: cpu\n"
    )
    done = run([sys.executable, script, f"--config={config}", f"--output={again}"])
    assert json.loads((again / "experts.json").read_text())["head"]["repeats"] == 2, done.stderr
    done = run([sys.executable, script, "--rowz=0"])
    line = "unknown option --rowz (did you mean --rows?): `python scripts/bench/experts.py -h` lists them"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"specgen: {line}\n")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_the_kernels_are_right_and_do_not_beat_the_memory() -> None:
    job = ExpertJob(
        shapes=("qwen3-30b-a3b", "gpt-oss-20b", "qwen3-30b-a3b-fp8", "qwen3-30b-a3b-fp8-dynamic"),
        rows=(1, 5, 40),
        repeats=5,
        dtype=torch.bfloat16,
        device=torch.device("cuda", 0),
    )
    *_, table = measure(job)
    assert table.notes == ()
    assert len(table.rows) == 12
    for row in table.rows:
        assert 0.9 < row["over_bound"] < 5
