"""Headers of CUTLASS that FlashInfer's FA3 includes and of which it uses nothing, or some declarations.

A compiler that finds these first is done sooner: on a CPU, nvcc 13.0 and FlashInfer 0.6.18, a file of FA3's takes 129 s
as FlashInfer compiles it and 76 s with these and without instructions of sizes that it does not use
(``CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED``). The kernels are the same to the instruction for every size of heads, with
windows and with sinks.
"""

_DECLARATIONS = """#pragma once
#include "cutlass/detail/dependent_false.hpp"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/collective/collective_builder_decl.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cute/atom/mma_atom.hpp"
#include "cutlass/gemm/collective/builders/sm90_common.inl"
#include "cutlass/arch/memory_sm80.h"
"""
HEADERS = {  # text by name: whole GEMMs, their epilogues and what tests them
    "cutlass/gemm/collective/collective_builder.hpp": _DECLARATIONS,
    **dict.fromkeys(
        [
            "cutlass/epilogue/collective/collective_builder.hpp",
            "cutlass/epilogue/collective/default_epilogue.hpp",
            "cutlass/epilogue/thread/linear_combination.h",
            "cutlass/gemm/device/gemm_grouped.h",
            "cutlass/gemm/device/gemm_universal_adapter.h",
            "cutlass/gemm/group_array_problem_shape.hpp",
            "cutlass/gemm/kernel/default_gemm_grouped.h",
            "cutlass/gemm/kernel/gemm_universal.hpp",
            "cutlass/util/command_line.h",
            "cutlass/util/distribution.h",
            "cutlass/util/host_tensor.h",
            "cutlass/util/packed_stride.hpp",
            "cutlass/util/reference/device/gemm.h",
            "cutlass/util/reference/device/tensor_compare.h",
            "cutlass/util/reference/device/tensor_fill.h",
            "cutlass/util/tensor_view_io.h",
        ],
        "#pragma once\n",
    ),
}
