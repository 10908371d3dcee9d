// GEMMs of block FP8 of many rows on Hopper by DeepGEMM's kernel, whose headers FlashInfer installs: this holds its
// tiles for one weight and the call of it.
//
// x [rows, WIDTH] and weight [OUT, WIDTH] are e4m3, y [rows, OUT] is bfloat16. A scale belongs to 128 inputs of a row or
// of 128 outputs: x_scale [WIDTH / 128, rows], rows a multiple of 128, w_scale [OUT / 128, WIDTH / 128], in float32.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#include <string>

#include <deep_gemm/nvrtc_cutlass.cuh>
#include <deep_gemm/fp8_gemm_impl.cuh>

namespace {

constexpr int kRows = 128, kGroup = 128;  // rows of a tile; inputs and outputs of a scale
constexpr int kShared = 227 << 10;        // bytes of a block

constexpr int shared_bytes(int block_out, int stages) {
  const int scales = (WIDTH / kGroup) * (kGroup % block_out == 0 ? 1 : 2) * 4;
  return kRows * block_out * 2 + stages * (kRows * kGroup + block_out * kGroup + kRows * 4 + 16) + (scales + 7) / 8 * 8;
}

// As many as fit, but no more than the library unrolls: with two scales a tile its code grows.
constexpr int num_stages(int block_out) {
  int stages = kGroup % block_out == 0 ? 8 : 6;
  while (shared_bytes(block_out, stages) > kShared) stages--;
  return stages;
}

struct Call {
  const void *x, *weight;
  const float *x_scale, *w_scale;
  void* y;
  uint32_t rows;
  int num_blocks;
  cudaStream_t stream;
};

template <typename T>
CUtensorMap map_of(const void* data, uint64_t rows, uint64_t columns, uint32_t box_rows, uint32_t box_columns,
                   CUtensorMapSwizzle swizzle) {
  static const auto encode = deep_gemm::get_cuTensorMapEncodeTiled();
  uint64_t sizes[2] = {columns, rows};
  uint32_t box[2] = {box_columns, box_rows};
  return deep_gemm::make_2d_tma_copy_desc(static_cast<T*>(const_cast<void*>(data)), sizes, columns * sizeof(T), box,
                                          swizzle, encode);
}

// In a pair of blocks (PAIR 2) both read the same rows of x, which are loaded once.
template <int BLOCK_OUT, int PAIR>
int run(const Call& call) {
  using namespace deep_gemm;
  using Scheduler = typename SchedulerSelector<GemmType::Normal, OUT, WIDTH, kRows, BLOCK_OUT, kGroup, 1, PAIR>::type;
  constexpr int kStages = num_stages(BLOCK_OUT), kBytes = shared_bytes(BLOCK_OUT, kStages);
  const auto kernel = fp8_gemm_kernel<OUT, WIDTH, kRows, BLOCK_OUT, kGroup, 1, kStages, 128, 128, PAIR, Scheduler,
                                      NormalSchedulerInput>;
  const uint32_t padded = (call.rows + 3) / 4 * 4;
  const auto x = map_of<__nv_fp8_e4m3>(call.x, call.rows, WIDTH, kRows, kGroup, CU_TENSOR_MAP_SWIZZLE_128B);
  const auto weight = map_of<__nv_fp8_e4m3>(call.weight, OUT, WIDTH, BLOCK_OUT, kGroup, CU_TENSOR_MAP_SWIZZLE_128B);
  const auto scale = map_of<float>(call.x_scale, WIDTH / kGroup, padded, 1, kRows, CU_TENSOR_MAP_SWIZZLE_NONE);
  const auto y = map_of<__nv_bfloat16>(call.y, call.rows, OUT, call.rows < kRows ? call.rows : kRows, BLOCK_OUT,
                                       CU_TENSOR_MAP_SWIZZLE_NONE);
  // for each device, so not once
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes))
    return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {PAIR, 1, 1};
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(call.num_blocks / PAIR * PAIR);
  launch.blockDim = dim3(get_num_threads_per_sm<128, 128>(kRows));
  launch.dynamicSmemBytes = kBytes;
  launch.stream = call.stream;
  launch.attrs = &attribute;
  launch.numAttrs = 1;
  NormalSchedulerInput input = {call.rows, nullptr};
  return cudaLaunchKernelEx(&launch, kernel, static_cast<__nv_bfloat16*>(call.y), const_cast<float*>(call.w_scale),
                            input, x, weight, scale, y);
}

int chosen(const Call& call, int block_out, int pair) {
  if constexpr (OUT % 256 == 0) {
    if (pair == 2 && block_out == 128) return run<128, 2>(call);
  }
  if (pair != 1) return -2;
  switch (block_out) {
    case 32: return run<32, 1>(call);
    case 48: return run<48, 1>(call);
    case 64: return run<64, 1>(call);
    case 80: return run<80, 1>(call);
    case 96: return run<96, 1>(call);
    case 112: return run<112, 1>(call);
    case 128: return run<128, 1>(call);
  }
  return -2;
}

}  // namespace

// 0, -1 if a tensor has no map, -2 for a tile that was not compiled; else a cudaError.
extern "C" int block_fp8(const void* x, const float* x_scale, const void* weight, const float* w_scale, void* y,
                         int64_t rows, int block_out, int pair, int num_blocks, void* stream) {
  const Call call = {x, weight, x_scale, w_scale, y, static_cast<uint32_t>(rows), num_blocks,
                     static_cast<cudaStream_t>(stream)};
  try {
    return chosen(call, block_out, pair);
  } catch (...) {
    return -1;
  }
}
