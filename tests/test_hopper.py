"""Kernels for Hopper without a GPU: what is compiled for which GEMM, how decode attention is cut into clusters."""

import re
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from specgen.attention import LayerAttention, hopper
from specgen.attention.hopper import (
    HopperDecode,
    Shares,
    block_heads,
    cluster_size,
    clusters_at_once,
    hopper_decode_module,
    serves,
)
from specgen.kv.layout import Layout
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
    jit_modules.compiles.cache_clear()
    try:
        assert runs_on(torch.device("cuda")) == runs_on(torch.device("cuda:0")) == (lacks is None)
    finally:
        jit_modules.compiles.cache_clear()
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


BF16, FP16 = torch.bfloat16, torch.float16


def test_a_block_has_the_most_heads_that_fit() -> None:
    for case in product(range(1, 20), (1, 3, 4, 6, 7, 8, 16), (64, 128, 256)):
        query_len, heads_per_kv, head_dim = case
        most = 48 if head_dim == 256 else 64
        heads = block_heads(*case)
        if query_len > 16:
            assert heads is None, case
            continue
        assert heads is not None, case
        assert heads_per_kv % heads == 0, case
        assert heads * query_len <= most, case
        more = [n for n in range(heads + 1, heads_per_kv + 1) if heads_per_kv % n == 0]
        assert all(n * query_len > most for n in more), case
        tile = -(-heads * query_len // 16) * 16
        assert hopper_decode_module(*case).what == f"attention, {tile} rows, heads of {head_dim}", case


def test_shares_fill_a_gpu_or_end_together() -> None:
    for sequences, groups, resident in product((1, 4, 9, 32, 128, 512), (1, 2, 8, 32), (16, 132, 264, 396)):
        shares, case = Shares.of(sequences, groups, resident), (sequences, groups, resident)
        assert 1 <= shares.certain <= shares.wanted, case
        assert shares.most >= sequences + shares.certain, "a cut leaves up to one more for each sequence"
        if sequences * groups + groups <= resident:
            assert resident - groups < shares.most * groups <= resident, case
        else:
            assert shares.wanted == max(resident // groups, 1), case


@pytest.mark.parametrize("rows", [16, 32, 48])
def test_clusters_are_large_while_they_are_few_and_can_start_at_once(rows: int) -> None:
    sizes = [cluster_size(clusters, rows, 128, 132) for clusters in range(1, 2000)]
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) == {1, 2, 4, 8} if rows == 16 else {1, 2, 8}
    for clusters, size in enumerate(sizes, 1):
        assert size == 1 or clusters <= clusters_at_once(size, rows, 128, 132), (clusters, size)


def test_a_gpu_has_room_for_the_clusters_at_once() -> None:
    for size, rows, head_dim in product((1, 2, 4, 8), (16, 32, 64), (64, 128, 256)):
        places = 132 * (1 if rows > 32 else 2 if rows > 16 or head_dim > 128 else 3)
        at_once = clusters_at_once(size, rows, head_dim, 132)
        assert (places if size == 1 else 0.6 * min(places, 132)) <= at_once * size <= places


def test_as_many_shares_as_there_is_room_for() -> None:
    """As the kernel counts them."""
    for sequences, resident in product((1, 3, 8, 40, 200), (5, 33, 49)):
        shares = Shares.of(sequences, 1, resident)
        for longest in (0, 1, 100, 5000):
            lens = [longest * (row % 7) // 3 for row in range(sequences)]
            for cut in (shares.wanted, shares.certain):
                most = max(-(-sum(lens) // cut), 16)
                counts = [max(-(-length // most), 1) for length in lens]
                if sum(counts) <= shares.most:
                    break
            assert sum(counts) <= shares.most, (sequences, resident, longest)
            assert sum(count for count in counts if count > 1) <= shares.most_cut


def test_it_is_for_bfloat16_and_heads_that_it_was_built_for() -> None:
    assert serves(5, 4, 128, BF16, BF16)
    assert serves(16, 8, 64, BF16, BF16)
    assert not serves(17, 4, 128, BF16, BF16)
    assert serves(5, 6, 256, BF16, BF16)
    assert serves(16, 8, 256, BF16, BF16)
    assert not serves(17, 8, 256, BF16, BF16)
    assert not serves(5, 4, 192, BF16, BF16)
    assert not serves(5, 4, 128, FP16, FP16)
    assert not serves(5, 4, 128, BF16, torch.float8_e4m3fn)
    assert not serves(5, 6, 256, BF16, torch.float8_e4m3fn)


def test_it_rotates_whole_heads_and_of_256_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "runs_on", lambda device: True)
    layout = Layout.uniform(torch.ones(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), 5, 64)
    for head_dim, pairs in {64: {32}, 128: {64}, 256: {8, 32, 64, 128}}.items():
        qkv, keys = torch.empty(5, 8, head_dim, dtype=BF16), torch.empty(2, 64, 2, head_dim, dtype=BF16)
        for num_pairs in (4, 8, 32, 36, 64, 128):
            rope: Any = SimpleNamespace(frequencies=torch.ones(num_pairs), scale=1.0)
            arrivals = torch.zeros(1, dtype=torch.int32)
            kernel = HopperDecode(layout=layout, rope=rope, arrivals=arrivals)
            layer = LayerAttention(index=0, scale=1.0)
            assert kernel.fits(layer, qkv, keys) == (num_pairs in pairs), (head_dim, num_pairs)


def test_python_and_the_kernel_agree_on_what_is_passed() -> None:
    """As many arguments, and as wide: ctypes would pass an int for a pointer and say nothing."""
    source = Path(hopper.__file__).with_name("hopper_decode.cu").read_text()
    declared = source[source.index('extern "C" int hopper_decode_run(') :]
    kinds = [each.split()[:-1] for each in declared[declared.index("(") + 1 : declared.index(")")].split(",")]
    wide = [" ".join(each) for each in kinds]
    pointers = [each for each in wide if each.endswith("*")]
    assert len(pointers) == 12, "eleven tensors and a stream"
    assert wide[11:15] == ["int64_t"] * 4
    assert wide[15:31] == ["int"] * 16
    assert wide[31:33] == ["float"] * 2
    assert len(wide) == 34
