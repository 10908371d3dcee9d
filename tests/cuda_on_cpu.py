"""A CUDA source of one block on the CPU: a thread for each of the block's, compiled by the system's C++ compiler.

Only for sources of plain C++ with shared memory, ``__syncthreads``, ``atomicMax`` and one launch of ``(p)``.
"""

import ctypes
import re
import subprocess
from functools import cache
from pathlib import Path
from shutil import which
from tempfile import mkdtemp
from typing import Any

import pytest

_HEADER = """
#include <algorithm>
#include <barrier>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>
using std::max;
using std::min;
#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)
struct int2 { int x, y; };
struct Place { int x; };
static thread_local Place threadIdx;
static std::barrier<>* block;
static std::mutex alone;
static void __syncthreads() { block->arrive_and_wait(); }
static void atomicMax(int* to, int value) {
  std::lock_guard<std::mutex> lock(alone);
  *to = max(*to, value);
}
enum { cudaErrorInvalidValue = 1 };
static int cudaGetLastError() { return 0; }
static void launch(const std::function<void()>& kernel, int num_threads) {
  std::barrier<> all(num_threads);
  block = &all;
  std::vector<std::thread> threads;
  for (int t = 0; t < num_threads; t++) threads.emplace_back([&kernel, t] { threadIdx.x = t; kernel(); });
  for (std::thread& thread : threads) thread.join();
}
"""


@cache
def on_cpu(source: Path) -> ctypes.CDLL:
    """The functions of ``source``; a test is skipped where they cannot be compiled."""
    text = source.read_text().replace("#include <cuda_runtime.h>", _HEADER)
    text, launches = re.subn(r"(\w+)<<<1, (\w+),.*?>>>\(p\);", r"launch([&] { \1(p); }, \2);", text)
    assert launches == 1, source
    return _compiled(text)


@cache
def plain_function(source: Path, name: str, value_dim: int) -> Any:
    """The function ``name`` of ``source``, with its standard headers and constants, where ``VALUE_DIM`` is that."""
    text = source.read_text()
    function = re.search(rf'^extern "C" int {name}\(.*?^}}$', text, re.MULTILINE | re.DOTALL)
    assert function is not None, name
    needed = re.findall(r"^#include <\w+>$|^constexpr .*?;", text, re.MULTILINE)
    return getattr(_compiled("\n".join([f"#define VALUE_DIM {value_dim}", *needed, function[0]])), name)


def _compiled(text: str) -> ctypes.CDLL:
    compiler = which("g++") or which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = Path(mkdtemp())
    (folder / "kernel.cpp").write_text(text)
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-o", "kernel.so", "kernel.cpp"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if "std=c++20" in done.stderr or "barrier: No such file" in done.stderr:
        pytest.skip("needs a compiler of C++20")
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "kernel.so"))
