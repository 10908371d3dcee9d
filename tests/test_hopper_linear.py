"""GEMMs of many rows on Hopper: what is compiled for which, without a GPU."""

import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from specgen.ops import jit_modules
from specgen.ops.hopper_linear import FEWEST_ROWS, _tile, _wgmma_header, fits, modules
from specgen.ops.jit_modules import runs_on


def test_tiles_hold_all_rows_and_waste_few() -> None:
    for rows in (*range(FEWEST_ROWS, 400), 1000, 8192):
        tile = _tile(rows)
        tiles = -(-rows // tile)
        assert tiles == -(-rows // 192), rows
        assert tile * tiles - rows < max(32 * tiles, 96 - 64), rows


def test_matrices_of_whole_blocks_fit() -> None:
    assert fits(14336, 4096, torch.bfloat16, gated=True)
    assert fits(64, 64, torch.bfloat16, gated=True)
    assert not fits(96, 64, torch.bfloat16, gated=True)
    assert not fits(64, 64, torch.float8_e4m3fn, gated=True)
    assert not fits(64, 128, torch.float8_e4m3fn, gated=False)


def test_a_cpu_has_other_gemms() -> None:
    assert not runs_on(torch.device("cpu"))


@pytest.mark.parametrize("lacks", [None, "flashinfer", "nvcc", "ninja", "jit"])
def test_where_they_cannot_be_compiled_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, lacks: str | None
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(jit_modules, "find_spec", lambda name: None if lacks == name else object())
    monkeypatch.setattr(jit_modules, "which", lambda name: None if lacks == name else f"/bin/{name}")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1" if lacks == "jit" else "")
    jit_modules._compiles.cache_clear()
    try:
        assert runs_on(torch.device("cuda")) == runs_on(torch.device("cuda:0")) == (lacks is None)
    finally:
        jit_modules._compiles.cache_clear()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (lacks is not None), "said once"
    assert all("take other kernels, which are slower: " in line for line in lines)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_all_sums_of_a_thread_are_operands(kind: str) -> None:
    header = _wgmma_header(kind, 160)  # type: ignore[arg-type]
    assert re.findall(r"d\[(\d+)\]\)", header) == [str(i) for i in range(80)]
    assert "%79}, %80, %81, p, 1, 1" in header
    assert "m64n160k16.f32.bf16.bf16" in header or kind == "fp8"


def test_each_kind_and_size_is_a_module_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    made = []

    def gen_jit_spec(name: str, sources: list[object], **options: list[str]) -> SimpleNamespace:
        made.append(options["extra_cuda_cflags"])
        return SimpleNamespace(name=name)

    env, core = ModuleType("flashinfer.jit.env"), ModuleType("flashinfer.jit.core")
    env.FLASHINFER_GEN_SRC_DIR, core.gen_jit_spec = tmp_path, gen_jit_spec  # type: ignore[attr-defined]
    jit = ModuleType("flashinfer.jit")
    jit.env, jit.core = env, core  # type: ignore[attr-defined]
    for name, module in {
        "": ModuleType("flashinfer"),
        ".jit": jit,
        ".jit.env": env,
        ".jit.core": core,
    }.items():
        monkeypatch.setitem(__import__("sys").modules, f"flashinfer{name}", module)
    names = {each.spec().name for kind in ("bf16", "fp8") for each in modules(kind)}
    assert len(names) == 12
    headers = [file.name for folder in Path(str(tmp_path)).iterdir() for file in folder.iterdir()]
    assert headers == ["wgmma.h"] * 12
    assert {tuple(each[:2]) for each in made} == {
        (f"-DROWS={rows}", f"-DE4M3={e4m3}")
        for e4m3, sizes in ((0, (16, 32, 48, 64, 96, 128, 160, 192)), (1, (96, 128, 160, 192)))
        for rows in sizes
    }
