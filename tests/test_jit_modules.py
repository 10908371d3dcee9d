"""FlashInfer's modules are compiled side by side before a run: which, and what becomes of failures."""

import importlib.util
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from filelock import FileLock

from specgen.attention import Gpu, Heads, Use, fa3
from specgen.attention.fa3 import HEADERS
from specgen.attention.flashinfer_paged import FlashInferBackend
from specgen.attention.hopper import HopperBackend
from specgen.attention.sdpa import SdpaBackend
from specgen.attention.trtllm import TrtllmBackend
from specgen.checkpoints.checkpoint import load_target
from specgen.checkpoints.tensor_reader import TensorReader
from specgen.config import DraftLength, EngineConfig, SamplingParams, UserError
from specgen.engine.choices import attention_note, gemm_modules, modules_of, needed_modules
from specgen.engine.loading import open_checkpoints
from specgen.experiments import plans
from specgen.experiments.tune_job import TuneJob, Workload
from specgen.models.model_config import LatentConfig
from specgen.ops import jit_modules
from specgen.ops.block_fp8 import FEWEST_ROWS
from specgen.ops.jit_modules import Module, compile_missing, compiled_meanwhile
from specgen.record.startup import watched
from tests.engines import engine_config
from tests.timed_engines import write_tiny
from tests.tiny_checkpoints import write_head, write_target
from tests.tiny_fp8 import quantize
from tests.tiny_hybrids import write_hybrid
from tests.tiny_llama4 import write_eagle_llama4, write_llama4
from tests.waiting import LIMIT, wait_until

H100 = Gpu(major=9, num_sms=132)
LLAMA = Heads(
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    page_size=64,
    max_query_len=5,
)
# ninja -v -C FOLDER -f FILE -j JOBS, where the file is a shell script; with -n nothing runs
NINJA = """#!/bin/sh
cd "$3" || exit 1
if [ "$1" = -n ]; then [ -e stale ] || echo 'ninja: no work to do.'; exit; fi
echo "$7" > jobs && exec sh "$5"
"""


@pytest.fixture(autouse=True)
def _can_compile(monkeypatch):
    """Whether or not this machine can."""
    monkeypatch.setattr("specgen.attention.trtllm.compiles", lambda: True)


class Spec:
    """As FlashInfer's ``JitSpec``; ``script`` is what its ninja does."""

    def __init__(self, root, name, script, num_sources=1, is_aot=False):
        self.name, self.script, self.is_aot = name, script, is_aot
        self.sources = ["a.cu"] * num_sources
        self.build_dir, self.lock_path = root / name, root / f"{name}.lock"
        self.ninja_path = self.build_dir / "build.ninja"

    @property
    def is_compiled(self):
        return (self.build_dir / f"{self.name}.so").exists()

    def write_ninja(self):
        self.build_dir.mkdir(exist_ok=True)
        self.ninja_path.write_text(self.script)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes a module, with a stand-in for ninja in the path."""
    ninja = tmp_path / "bin" / "ninja"
    ninja.parent.mkdir()
    ninja.write_text(NINJA)
    ninja.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ninja.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MAX_JOBS", "4")

    def module(name, script="touch $(basename $PWD).so", *, longest=False, **fields):
        made = Spec(tmp_path, name, script, **fields)
        return Module(what=f"the {name}", spec=lambda: made, longest=longest)

    return module


MEETS = """touch here
for i in $(seq 12000); do
    [ -e ../a/here ] && [ -e ../b/here ] && [ -e ../c/here ] && touch $(basename $PWD).so && exit 0
    sleep .05
done
exit 1
"""


def test_missing_modules_are_compiled_side_by_side(make, tmp_path, monkeypatch, caplog):
    modules = [
        make(name, MEETS, num_sources=n, longest=name == "b")
        for name, n in zip("abc", (1, 1, 2), strict=True)
    ]
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "there.so").touch()
    reported = []
    with watched(lambda *now: reported.append((now[0], now[1], tuple(now[2])))) as startup:
        assert compile_missing([make("there", "exit 1"), *modules]) == ["the a", "the b", "the c"]
    assert reported[0] == (0, 3, ("the b", "the c", "the a")), "the longest first"
    assert reported[-1] == (3, 3, ())
    assert [done for done, _, _ in reported] == sorted(done for done, _, _ in reported)
    assert startup.take()["kernels"] > 0
    assert compile_missing(modules) == []
    assert compile_missing([make("once", "[ -e here ] && exit 1; touch here once.so")] * 2) == ["the once"]
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert compile_missing([make("not")]) == []
    said = "compiling kernels, once on this machine: 0 of {} modules; to do: {}"
    assert [each.getMessage() for each in caplog.records] == [said.format(1, "the once")], (
        "where nobody watches"
    )


def test_what_was_compiled_of_other_files_is_compiled_again_ahead(make, tmp_path, monkeypatch):
    """Else each module would be, one after the other, where it is first used."""
    modules = [make(name, f"rm -f stale; touch {name}.so") for name in "ab"]
    assert compile_missing(modules) == ["the a", "the b"]
    (tmp_path / "b" / "stale").touch()
    with monkeypatch.context() as without:
        without.setenv("PATH", "/nowhere")
        assert compile_missing(modules) == [], "they are used as they are"
    assert compile_missing([make("b", "exit 1", is_aot=True)]) == []
    assert compile_missing(modules) == ["the b"]
    assert compile_missing(modules) == []


def test_no_more_compilers_are_at_work_than_there_is_room_for(make, tmp_path, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "1")
    alone = "mkdir ../busy || exit 1; sleep .1; rmdir ../busy; touch $(basename $PWD).so"
    for names, files in (("abc", 1), ("def", 7)):
        assert len(compile_missing([make(name, alone, num_sources=files) for name in names])) == 3
    assert (tmp_path / "a" / "jobs").read_text() == "1\n"


def test_compilers_at_once_are_as_many_as_cores_and_memory_are_for(monkeypatch):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    for gib, room in ((100, 16), (17, 8), (1, 1)):
        monkeypatch.setattr(jit_modules, "_free_memory", lambda gib=gib: gib << 30)
        assert jit_modules._room() == room
    monkeypatch.undo()
    assert 1 << 20 < jit_modules._free_memory() < 1 << 50


NINJAS = """
echo '[1/3] nvcc -c a.cu'
echo 'a.cu: warning: unused'
echo '[2/3] c++ -c b.cpp'
echo 'FAILED: [code=1] b.o'
echo 'c++ -c b.cpp'
echo 'b.cpp:1:10: fatal error: cuda.h: No such file or directory'
echo 'compilation terminated.'
for i in $(seq 30); do echo "[3/3] nvcc -c c.cu $i"; done
echo 'ninja: build stopped: subcommand failed.'
exit 1
"""


def test_a_failure_names_its_module_shows_the_last_lines_and_stops_the_others(make, tmp_path, monkeypatch):
    fails = (
        "while ! [ -e ../slow/here ]; do sleep .05; done; for i in $(seq 40); do echo line $i; done; exit 2"
    )
    slow = "echo $$ > pid; trap 'touch stopped; exit 1' TERM; touch here; while :; do sleep .05; done"
    with pytest.raises(UserError) as caught:
        compile_missing([make("slow", slow), make("bad", fails)])
    first, *lines = str(caught.value).split("\n")
    assert "module bad (the bad) cannot be compiled: install a CUDA toolkit" in first
    assert lines == [f"line {number}" for number in range(26, 41)]
    assert (tmp_path / "slow" / "stopped").exists()
    with FileLock(tmp_path / "bad.lock", timeout=0):
        """Nobody holds it any more."""
    of_b = "b.cpp:1:10: fatal error: cuda.h: No such file or directory\ncompilation terminated."
    with pytest.raises(UserError, match=rf"last lines:\n{of_b}$"):
        compile_missing([make("ninja", NINJAS)])
    with pytest.raises(KeyboardInterrupt):
        compile_missing([make("a", "echo 'ninja: build stopped: interrupted by user.'; exit 2")])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"module a .* cannot be compiled: .*ninja cannot be run"):
        compile_missing([make("a")])


def test_what_another_process_compiles_is_waited_for(make, tmp_path):
    with ThreadPoolExecutor() as pool:
        with FileLock(tmp_path / "a.lock"):
            waiting = pool.submit(compile_missing, [make("a", "exit 1")])
            time.sleep(0.2)
            assert not waiting.done()
            (tmp_path / "a").mkdir()
            (tmp_path / "a" / "a.so").touch()
        assert waiting.result() == []


def test_kernels_are_compiled_beside_other_work_and_waited_for(make, tmp_path):
    slow = "while ! [ -e ../loaded ]; do sleep .05; done; sleep .2; touch a.so"
    with watched(lambda *now: None) as startup:
        with compiled_meanwhile([make("a", slow)]):
            assert not (tmp_path / "a" / "a.so").exists()
            (tmp_path / "loaded").touch()
        assert (tmp_path / "a" / "a.so").exists()
        assert "kernels" in startup.take(), "the time that it was waited for"
    with (
        pytest.raises(UserError, match=r"module b .* cannot be compiled"),
        compiled_meanwhile([make("b", "exit 1")]),
    ):
        time.sleep(0.1)


def test_what_fails_beside_a_compilation_does_not_wait_for_it(make, tmp_path):
    others = set(threading.enumerate())  # some of which never end
    slow = "while ! [ -e ../failed ]; do sleep .05; done; touch a.so"
    with pytest.raises(ValueError, match="no weights"), compiled_meanwhile([make("a", slow)]):
        raise ValueError("no weights")
    (tmp_path / "failed").touch()
    for thread in set(threading.enumerate()) - others:  # before its folder goes
        wait_until(lambda thread=thread: thread.ident)  # about to start
        thread.join(LIMIT)


def use(heads: Heads = LLAMA, **changed: Any) -> Use:
    usual: dict[str, Any] = {"windowed": (False,), "query_lens": (5,), "prefills": True, "num_sequences": 16}
    return Use(heads=heads, **usual | changed)


def changed(**fields: Any) -> Heads:
    return Heads(**{**vars(LLAMA), **fields})


SINKS = changed(num_heads=64, head_dim=64, sinks=True)
HYBRID = changed(num_heads=24, num_kv_heads=4, head_dim=256)
GLM = changed(
    num_heads=20,
    num_kv_heads=1,
    head_dim=576,
    latent=LatentConfig.from_hf(
        {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
    ),
)
WIDE = changed(num_heads=16, num_kv_heads=1, head_dim=512)  # Gemma 4's 12B, in layers without a window
CHUNKS = changed(chunk=8192)
HALF = changed(dtype=torch.float16, kv_dtype=torch.float16)
FP8 = changed(kv_dtype=torch.float8_e4m3fn)

ALL = (False, True)  # with windows and without
# by what is asked of a backend the modules that it needs, without "heads of" so many
NEEDED = (
    (HopperBackend, 9, use(), "FA3; attention, 32 rows"),
    (  # 4 heads of a KV head
        *(HopperBackend, 9, use(num_sequences=17, query_lens=(1, 4, 17))),
        "FA3; attention, 16 rows; attention, 16 rows; XQA, 17 rows",
    ),
    (HopperBackend, 9, use(HALF), "FA3; XQA, 5 rows"),
    (HopperBackend, 9, use(HALF, num_sequences=17, query_lens=(1, 2)), "FA3; XQA, 1 row; XQA, 2 rows; FA2"),
    (HopperBackend, 9, use(HALF, num_sequences=17, query_lens=(1,)), "FA3; XQA, 1 row"),
    # 68 rows of a KV head are more than the tile
    (HopperBackend, 9, use(num_sequences=128, query_lens=(17,)), "FA3; XQA, 17 rows"),
    (HopperBackend, 9, use(prefills=False, query_lens=(1,)), "attention, 16 rows"),
    (
        *(HopperBackend, 9, use(SINKS, windowed=ALL, num_sequences=128)),
        "FA3, sinks; FA3, sinks, windows; attention, 48 rows",
    ),
    (
        *(HopperBackend, 9, use(HYBRID, query_lens=(1, 5, 9, 17))),
        "FA3; attention, 16 rows; attention, 32 rows; attention, 32 rows; XQA, 17 rows",
    ),
    (HopperBackend, 9, use(FP8, num_sequences=128), "FA2, FP8 KV; XQA, 5 rows, FP8 KV"),
    (
        *(HopperBackend, 9, use(GLM, query_lens=(1, 2))),
        "latent attention; work lists of latent attention; FA3, keys of 256 and values of 256",
    ),
    (HopperBackend, 9, use(GLM, prefills=False), "latent attention; work lists of latent attention"),
    (HopperBackend, 9, use(WIDE), ""),  # on Triton
    (
        HopperBackend,
        9,
        use(HYBRID, stores=False, prefills=False, query_lens=(1,)),
        "",
    ),  # queries alone: likewise
    (HopperBackend, 9, use(CHUNKS), "FA3; attention, 32 rows; XQA, 1 row; XQA, 5 rows"),
    (TrtllmBackend, 9, use(num_sequences=128), "FA3; XQA, 5 rows"),
    (TrtllmBackend, 9, use(CHUNKS), "FA3; XQA, 5 rows; XQA, 1 row"),
    (
        *(TrtllmBackend, 9, use(HALF, num_sequences=17, query_lens=(1, 2), windowed=ALL)),
        "FA3; FA3, windows; XQA, 1 row; XQA, 1 row, windows; XQA, 2 rows; XQA, 2 rows, windows",
    ),
    (TrtllmBackend, 12, use(), "FA2; XQA, 5 rows"),
    (TrtllmBackend, 10, use(), "FA2"),
    (FlashInferBackend, 9, use(windowed=ALL), "FA2; FA2, windows"),
    (SdpaBackend, 9, use(), ""),
)


def test_a_backend_knows_what_it_needs_compiled(monkeypatch):
    for backend, major, asked, names in NEEDED:
        gpu = Gpu(major=major, num_sms={9: 132, 10: 148, 12: 188}[major])
        found = "; ".join(module.what for module in backend.modules(gpu, asked))
        assert found.replace(f", heads of {asked.heads.head_dim}", "") == names, (backend.name, gpu, asked)
    monkeypatch.setattr("specgen.attention.trtllm.compiles", lambda: False)
    prefill = TrtllmBackend.modules(H100, use())[0]
    assert prefill.what == "FA2, heads of 128", "which FlashInfer's package may have compiled"
    assert TrtllmBackend.kernel(H100, use(), "prefill", 1) == "FlashInfer FA2"


@pytest.fixture
def generators(monkeypatch):
    """FlashInfer's functions that make specs, of which each returns what it is called with."""
    for name, functions in {
        "flashinfer": (),
        "flashinfer.jit": (),
        "flashinfer.jit.xqa": ("gen_xqa_module",),
        "flashinfer.jit.attention": ("gen_batch_prefill_module", "gen_customize_batch_prefill_module"),
        "flashinfer.jit.attention.modules": (),
        "flashinfer.jit.attention.variants": (),
        "flashinfer.jit.sampling": ("gen_sampling_module",),
    }.items():
        module: Any = ModuleType(name)
        for function in functions:
            setattr(module, function, lambda *given, **named: (*given, *named.items()))
        monkeypatch.setitem(sys.modules, name, module)
    for parent, child in (("flashinfer.jit", "attention"), ("flashinfer.jit.attention", "modules")):
        setattr(sys.modules[parent], child, sys.modules[f"{parent}.{child}"])
    sys.modules["flashinfer.jit.attention.variants"].attention_sink_decl = {  # type: ignore[attr-defined]
        "fa2": "declaration"
    }


def test_flashinfer_is_asked_for_what_it_would_compile_at_the_first_use(generators, monkeypatch):
    half, fp8, none = torch.float16, torch.float8_e4m3fn, (False, False)
    monkeypatch.setattr(fa3, "_spec", lambda shape: shape)
    first, step, unsplit = [
        each.spec() for each in HopperBackend.modules(H100, use(HALF, num_sequences=32, windowed=(True,)))
    ]
    assert first == fa3._Shape(paged=True, key_dim=128, value_dim=128, dtype=half, windowed=True)
    assert unsplit == ("fa2", half, half, half, torch.int32, 128, 128, 0, True, *none)
    assert step == (half, half, 64, 128, 4, True, half, 5, False)
    prefill, *steps = [each.spec() for each in HopperBackend.modules(H100, use(FP8, query_lens=(1, 5)))]
    assert prefill[:4] == ("fa2", torch.bfloat16, fp8, torch.bfloat16), "FA3 wants one dtype"
    assert [each[-2:] for each in steps] == [(2, True), (5, True)], (
        "FP8 pages take the kernel for ragged queries"
    )
    sinks = FlashInferBackend.modules(H100, use(SINKS, windowed=(True,)))[0].spec()
    assert sinks[:2] == ("fa2", "specgen_prefill_sink_bfloat16_bfloat16_64_window_fa2")
    assert sinks[-2:] == ("declaration", ("use_sliding_window", True))
    expanded = HopperBackend.modules(H100, use(GLM))[-1]
    assert expanded.spec() == fa3._Shape(paged=False, key_dim=256, value_dim=256, dtype=torch.bfloat16)
    monkeypatch.setattr(
        sys.modules["flashinfer.jit.attention.modules"],
        "_gen_batch_prefill_primary_module",
        lambda *given: ("FlashInfer 0.7's", *given),
        raising=False,
    )
    newer = HopperBackend.modules(H100, use(HALF, num_sequences=32, windowed=(True,)))
    assert [each.spec() for each in newer] == [first, step, ("FlashInfer 0.7's", *unsplit)]


def test_what_fa3_is_compiled_without_is_what_flashinfer_includes():
    package = importlib.util.find_spec("flashinfer")
    if package is None or package.origin is None:
        pytest.skip("flashinfer is not installed")
    data = Path(package.origin).parent / "data"
    text = (data / "include" / "flashinfer" / "cutlass_utils.cuh").read_text()
    for name in HEADERS:
        assert f'#include "{name}"' in text, name


GPU = {"dtype": "bfloat16", "kv_dtype": "model", "page_size": 64, "device": "cuda"}


def of_pair(path, expected=SamplingParams(), **settings):  # noqa: B008
    config = engine_config(path, attention="hopper", **GPU, **settings)
    return [module.what for module in modules_of(config, open_checkpoints(config), expected, H100)]


def test_a_pair_needs_what_its_passes_use(tmp_path, monkeypatch, generators):
    write_head(tmp_path / "drafter", write_target(tmp_path / "target"), draft_vocab_size=None)
    target, head = "XQA, {} rows, heads of 16", "XQA, 1 row, heads of 16"
    assert of_pair(tmp_path, num_spec_tokens=3) == ["FA3, heads of 16", target.format(4), head]
    plain = of_pair(tmp_path, num_spec_tokens=0)
    assert plain == ["FA3, heads of 16", head]
    several = of_pair(tmp_path, num_spec_tokens=DraftLength(most=2, kind="auto"))
    ragged = [f"{target.format(rows)}, ragged" for rows in (2, 3)]
    assert several == ["FA3, heads of 16", head, target.format(2), target.format(3), *ragged, head]
    monkeypatch.setattr("specgen.decoding.sampling.HAS_FLASHINFER", True)
    assert of_pair(tmp_path, SamplingParams(temperature=1.0), num_spec_tokens=0) == plain
    filtered = SamplingParams(temperature=1.0, top_p=0.9)
    assert of_pair(tmp_path, filtered, num_spec_tokens=0) == [*plain, "top-k and top-p"]


def test_a_head_that_drafts_at_once_attends_with_all_its_rows(tmp_path):
    config = write_target(tmp_path / "target")
    write_head(tmp_path / "drafter", config, draft_vocab_size=None, mask_token=("mask_token_id", 5))
    found = of_pair(tmp_path, num_spec_tokens=DraftLength(most=2, kind="auto"))
    one, *more = (f"XQA, {rows}, heads of 16" for rows in ("1 row", "2 rows", "3 rows"))
    assert found[1:] == [one, *more, *(f"{each}, ragged" for each in more), one, more[0]]


def note_of(path, **settings):
    config = engine_config(path, num_spec_tokens=3, **GPU | {"max_batch_size": 256} | settings)
    return attention_note(config, open_checkpoints(config))


def test_a_report_names_the_kernels_that_attend(tmp_path, monkeypatch):
    monkeypatch.setattr(Gpu, "of", lambda device: H100)
    shape = {"hidden_size": 512, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64}
    write_head(tmp_path / "drafter", write_target(tmp_path / "target", **shape), draft_vocab_size=None)
    hopper, trtllm = ({"attention": name, "cuda_graphs": "step"} for name in ("hopper", "trtllm"))
    for changes, note in (
        (
            hopper,
            "hopper (specgen hopper_decode: 4 rows, 1 row; FlashInfer FA3: prefill; XQA: short prefill; "
            "FlashInfer FA2 without splits: short prefill of many sequences)",
        ),
        (trtllm, "trtllm (XQA: 4 rows, short prefill, 1 row; FlashInfer FA3: prefill)"),
        (
            hopper | {"kv_dtype": "fp8"},
            "hopper (XQA: 4 rows, short prefill; FlashInfer FA2: prefill; specgen hopper_decode: 1 row)",
        ),
        (
            hopper | {"dtype": "float16", "max_batch_size": 8},
            "hopper (XQA: 4 rows, short prefill, 1 row; FlashInfer",
        ),
        (
            {"attention": "flashinfer", "cuda_graphs": "off"},
            "flashinfer (FlashInfer FA2: 4 rows, prefill, 1 row)",
        ),
        ({"attention": "sdpa", "device": "cpu", "cuda_graphs": "off"}, "sdpa"),
    ):
        assert note_of(tmp_path, **changes).startswith(note), changes


def test_a_report_names_the_kernels_that_attend_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(Gpu, "of", lambda device: H100)
    target = write_llama4(tmp_path / "target", hidden_size=256, head_dim=64, attention_chunk_size=64)
    write_eagle_llama4(tmp_path / "drafter", target, chunk=64)
    assert note_of(tmp_path, attention="hopper", cuda_graphs="off", max_batch_size=8) == (
        "hopper (specgen hopper_decode: 4 rows, 1 row; XQA: 1 row in chunks, 4 rows in chunks; FlashInfer FA3: prefill)"
    )


BLOCK = "block FP8 GEMMs of "


def gemms(path, **settings):
    """The modules of GEMMs that the target in ``path`` needs; of those by shape the shape alone."""
    settings = {"dtype": "bfloat16"} | settings
    config = EngineConfig(model=str(path), drafter=None, num_spec_tokens=0, **settings)
    return [each.what.removeprefix(BLOCK) for each in gemm_modules(config, open_checkpoints(config))]


def by_shape(found):
    return [each for each in found if " x " in each]


def test_gemms_on_hopper_are_compiled_for_the_weights(tmp_path):
    bf16 = [f"bf16 GEMMs of {rows} rows" for rows in (16, 32, 48, 64, 96, 128, 160, 192)]
    fp8 = [f"fp8 GEMMs of {rows} rows" for rows in (96, 128, 160, 192)]
    for scheme, expected in ((None, bf16), ("block", bf16), ("modelopt", [*bf16, *fp8])):
        write_target(tmp_path / str(scheme))
        if scheme is not None:
            quantize(tmp_path / scheme, scheme)
        assert gemms(tmp_path / str(scheme)) == expected, scheme
        assert gemms(tmp_path / str(scheme), dtype="float32") == []


def test_gemms_of_block_fp8_are_compiled_by_shape_for_passes_of_many_rows(tmp_path):
    write_target(tmp_path, hidden_size=384, head_dim=128)
    quantize(tmp_path, "block")
    few = FEWEST_ROWS - 1
    for prefill, batch in ((8192, 8), (few, FEWEST_ROWS), (FEWEST_ROWS, 1)):
        rows = {"max_prefill_tokens": prefill, "max_batch_size": batch}
        assert by_shape(gemms(tmp_path, **rows)) == ["384 x 512", "1024 x 384", "1536 x 384", "384 x 768"]
        halves = ["384 x 256", "512 x 384", "768 x 384", "384 x 384"]
        assert by_shape(gemms(tmp_path, tensor_parallel=2, **rows)) == halves
        assert gemms(tmp_path, dtype="float16", **rows) == []
    assert by_shape(gemms(tmp_path, max_prefill_tokens=few, max_batch_size=few)) == []


_HEADS = {"hidden_size": 384, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
_LINEAR = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "intermediate_size": 640}


@pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", "Qwen3NextForCausalLM"])
def test_those_of_a_hybrid_are_of_the_matrices_that_it_loads(tmp_path, monkeypatch, architecture):
    dense = {"mlp_only_layers": [0, 1, 2, 3]} if architecture == "Qwen3NextForCausalLM" else {}
    write_hybrid(tmp_path, architecture, **_HEADS, **_LINEAR, **dense)
    quantize(tmp_path, "block")
    loaded, linear = set(), TensorReader.linear

    def watched_linear(self, *given, **settings):
        weight = linear(self, *given, **settings)
        if weight.format == "fp8":
            loaded.add("{} x {}".format(*weight.data.shape))
        return weight

    monkeypatch.setattr(TensorReader, "linear", watched_linear)
    config = EngineConfig(model=str(tmp_path), drafter=None, num_spec_tokens=0, dtype="bfloat16")
    load_target(open_checkpoints(config)["model"], torch.float32, torch.device("cpu"))
    assert {*by_shape(gemms(tmp_path))} == loaded
    assert len(loaded) == 6


def test_a_shared_expert_is_compiled_for_where_it_runs_beside_the_others(tmp_path):
    for width, compiled in ((128, []), (256, ["512 x 384", "384 x 256"])):
        sizes = {"hidden_size": 384, "moe_intermediate_size": 128, "shared_expert_intermediate_size": width}
        path, layers = tmp_path / str(width), {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        write_hybrid(path, "Qwen3_5MoeForCausalLM", **layers, **sizes)
        quantize(path, "block")
        shapes = ("256 x 384", "384 x 128", "512 x 384", "384 x 256")
        assert [each for each in gemms(path) if each in shapes] == compiled, width


def test_a_cpu_needs_nothing_compiled():
    config = EngineConfig(model="a", drafter=None, num_spec_tokens=0, device="cpu")
    assert needed_modules(config, {}, SamplingParams()) == []


def test_a_bench_compiles_for_all_of_its_arms_at_once(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        plans, "needed_modules", lambda asked, *_: [Module(what=str(asked.draft_length.most), spec=list)]
    )
    monkeypatch.setattr(plans, "compile_missing", lambda found: asked.append([each.what for each in found]))
    job = TuneJob(
        engine=engine_config(write_tiny(tmp_path)),
        workload=Workload(dataset="random", max_new_tokens=4),
        draft_lengths=(DraftLength(most=2), DraftLength(most=3)),
        drafter_batches=("padded",),
        batches=(1,),
    )
    ready = plans.prepare(job)
    assert ready.load().target.device.type == "cpu"
    assert asked == [["0", "2", "3"]]
