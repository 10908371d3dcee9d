"""What FlashInfer's FA3 includes of CUTLASS and uses nothing of, and how a compiler is kept from reading it.

On a CPU, nvcc 13.0 and FlashInfer 0.6.18, a file of its kernels takes 129 s as it is and 76 s without; the kernels are
the same to the instruction for every size of heads, with windows and with sinks. The variables of ``environment`` leave
ninja's command as it is, so FlashInfer, which knows nothing of it, does not compile again what it loads.
"""

import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

_DECLARATIONS = """#pragma once
#include "cutlass/detail/dependent_false.hpp"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/collective/collective_builder_decl.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cute/atom/mma_atom.hpp"
#include "cutlass/gemm/collective/builders/sm90_common.inl"
#include "cutlass/arch/memory_sm80.h"
"""
_HEADERS = {  # text by name: whole GEMMs, their epilogues and what tests them
    "gemm/collective/collective_builder.hpp": _DECLARATIONS,
    **dict.fromkeys(
        [
            "epilogue/collective/collective_builder.hpp",
            "epilogue/collective/default_epilogue.hpp",
            "epilogue/thread/linear_combination.h",
            "gemm/device/gemm_grouped.h",
            "gemm/device/gemm_universal_adapter.h",
            "gemm/group_array_problem_shape.hpp",
            "gemm/kernel/default_gemm_grouped.h",
            "gemm/kernel/gemm_universal.hpp",
            "util/command_line.h",
            "util/distribution.h",
            "util/host_tensor.h",
            "util/packed_stride.hpp",
            "util/reference/device/gemm.h",
            "util/reference/device/tensor_compare.h",
            "util/reference/device/tensor_fill.h",
            "util/tensor_view_io.h",
        ],
        "#pragma once\n",
    ),
}
_UNUSED_SHAPES = "CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED"  # a thousand types of instructions


def environment(modules: Path) -> Mapping[str, str]:
    """The variables for nvcc, with the headers in a folder of ``modules``, where FlashInfer compiles its own.

    The folder is named after its contents and written once: modules that were compiled with it are compiled again where
    it is newer than they are.
    """
    digest = sha256(repr(_HEADERS).encode()).hexdigest()[:12]
    folder = modules / f"specgen_headers_{digest}"
    for name, text in _HEADERS.items():
        path = folder / "cutlass" / name
        if not path.exists():  # as a whole: another process may read it
            path.parent.mkdir(parents=True, exist_ok=True)
            mine = path.with_name(f"{path.name}.{os.getpid()}")
            mine.write_text(text)
            mine.replace(path)
    before, behind = f"-isystem {folder}", f"-U{_UNUSED_SHAPES}"
    return os.environ | {
        "NVCC_PREPEND_FLAGS": f"{before} {os.environ.get('NVCC_PREPEND_FLAGS', '')}".strip(),
        "NVCC_APPEND_FLAGS": f"{os.environ.get('NVCC_APPEND_FLAGS', '')} {behind}".strip(),
    }
