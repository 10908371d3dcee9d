// y = x * weight^T on Hopper for some to some hundred rows of x, nearly as fast as the weight can be read.
//
// The weight is the wide operand of the tensor cores' MMA: a block computes 128 outputs of up to 192 rows, so
// that wgmma's n is the number of rows. One warp loads with TMA, eight multiply; the first loads of weights do not wait
// for the kernel in front. A matrix with few outputs is split along K between the two blocks of a cluster, which
// exchange their sums through shared memory: each adds those of half the rows, always in the same order. Or it is split
// between any blocks, which leave their sums to the kernel behind. With more tiles than blocks, each takes an equal share of
// all tiles' steps along K. Where one share ends inside a tile and the next begins, the block of the next one starts with
// that tile and leaves its sums to the other, which ends with it and adds both.
//
// Compiled for one number of rows a tile, ROWS, a multiple of 16 up to 192, and for weights in e4m3 if E4M3, else bf16.
// See hopper_linear.py.

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "wgmma.h"

namespace {

using bf16 = __nv_bfloat16;

constexpr int kSize = E4M3 ? 1 : 2;  // bytes of a number
constexpr int kOut = 128;          // rows of the weight that a block reads at a time
constexpr int kBytes = 128;        // of each row that it reads at a time: the widest swizzle of shared memory
constexpr int kConsumers = 256;    // threads that multiply: two warp groups
constexpr int kSums = ROWS / 2;    // of a thread
constexpr int kWeightBytes = kOut * kBytes;
constexpr int kStageBytes = kWeightBytes + ROWS * kBytes;
constexpr int kPitch = kOut * 2 + 16;  // bytes of a row of results in shared memory, without bank conflicts
constexpr int kResultBytes = ROWS * kPitch;
constexpr int kOtherBytes = kResultBytes + 2048;  // results, barriers, and to begin at a multiple of 1024
constexpr int kMostStages = (227 * 1024 - kOtherBytes) / kStageBytes;
constexpr int kStages = kMostStages < 12 ? kMostStages : 12;
constexpr int kShared = kStages * kStageBytes + kOtherBytes;
static_assert(ROWS % 16 == 0 && ROWS <= 192 && kStages >= 3);
static_assert(kSums * kConsumers * 4 <= kStages * kStageBytes);  // where a cluster exchanges its sums

struct Problem {
  const void* bias;        // [out] or null
  const float* out_scale;  // [out], of weights in e4m3
  const float* x_scale;    // [rows], or [1] if x_static
  const float* y_scale;    // [1] or null: y is e4m3
  void* y;                 // [rows, out]
  float4* begun;           // [blocks, sums of a tile]: of the tiles that another block finishes; null where none are
  int rows, out, steps;    // steps: along K
  int tiles, row_tiles;    // tiles: of outputs
  int parts;               // of K whose sums are y: [parts, rows, out] in float32
  bool x_static, gelu;
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

[[maybe_unused]] __device__ __forceinline__ uint32_t at_rank(uint32_t address, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}

__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ uint64_t read_once() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

template <bool GATED>
__device__ __forceinline__ void load_weight(const CUtensorMap* map, uint64_t* barrier, uint8_t* to, int k, int tile,
                                            uint64_t policy) {
  if constexpr (GATED) {  // eight rows of gate, then the eight of up that belong to them, and so on
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(k), "r"(0), "r"(tile * (kOut / 16)), "l"(policy)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(k), "r"(tile * kOut), "l"(policy)
        : "memory");
  }
}

__device__ __forceinline__ void load_inputs(const CUtensorMap* map, uint64_t* barrier, uint8_t* to, int k, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(k), "r"(row)
      : "memory");
}

// Of a matrix in shared memory whose rows of 128 bytes TMA has swizzled; see the PTX manual, "matrix descriptor".
__device__ __forceinline__ uint64_t matrix_descriptor(const uint8_t* start) {
  return static_cast<uint64_t>(shared_address(start) >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// One step along K, 128 bytes: four MMAs.
__device__ __forceinline__ void multiply(float (&sums)[kSums], const uint8_t* weight, const uint8_t* inputs, bool add) {
  uint64_t a = matrix_descriptor(weight), b = matrix_descriptor(inputs);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 4; i++)
    wgmma(sums, a + 2 * i, b + 2 * i, add || i > 0);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

struct Pipeline {
  uint64_t *full, *empty;
  uint8_t* stages;
  int stage = 0, parity = 0;
  __device__ __forceinline__ uint8_t* weight() const { return stages + stage * kStageBytes; }
  __device__ __forceinline__ uint8_t* inputs() const { return weight() + kWeightBytes; }
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// Whether a block has left its sums; 0 before and behind the kernel. For one stream, and for as many blocks as no GPU has
// multiprocessors.
__device__ int have_begun[1024];

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16(value)); }

// [8 outputs, 8 rows] of a warp, two rows of an output a thread, to two outputs of a row a thread.
__device__ __forceinline__ uint32_t transposed(float left, float right) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(left, right);
  uint32_t turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
               : "=r"(turned)
               : "r"(*reinterpret_cast<uint32_t*>(&pair)));
  return turned;
}

__device__ __forceinline__ void keep_pair(uint8_t* row, int out, uint32_t pair, bool to_e4m3, float inverse) {
  if (!to_e4m3) {
    *reinterpret_cast<uint32_t*>(row + out * 2) = pair;
  } else {
    float2 both = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&pair));
    both.x *= inverse;
    both.y *= inverse;
    *reinterpret_cast<__nv_fp8x2_storage_t*>(row + out) = __nv_cvt_float2_to_fp8x2(both, __NV_SATFINITE, __NV_E4M3);
  }
}

// Sums of COUNT rows from first_row on, of the outputs of a tile: scaled, rounded, and written row by row.
template <bool GATED, int COUNT>
__device__ __forceinline__ void finish(const Problem& p, const float (&sums)[COUNT / 2], uint8_t* results, int tile,
                                       int first_row) {
  constexpr int kTileOut = GATED ? kOut / 2 : kOut;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, pair = lane % 4 * 2;
  const int inside = GATED ? warp * 8 : warp * 16;
  const int low = tile * kTileOut + inside + group, high = GATED ? p.out + low : low + 8;  // the weight's rows
  const bool to_e4m3 = p.y_scale != nullptr;
  const float inverse = to_e4m3 ? 1.0f / *p.y_scale : 1.0f;
  float low_scale = 1, high_scale = 1, low_bias = 0, high_bias = 0;
  if constexpr (E4M3) {
    const float of_x = p.x_static ? *p.x_scale : 1.0f;
    low_scale = p.out_scale[low] * of_x;
    high_scale = p.out_scale[high] * of_x;
  }
  if (p.bias != nullptr) {
    low_bias = __bfloat162float(static_cast<const bf16*>(p.bias)[low]);
    high_bias = __bfloat162float(static_cast<const bf16*>(p.bias)[high]);
  }
  const bool by_row = E4M3 && !p.x_static;
  sync_consumers();  // the results before these have been written
#pragma unroll
  for (int j = 0; j < COUNT / 8; j++) {
    float scale[2] = {1, 1};
    if (by_row) {
      const int row = first_row + 8 * j + pair;
      scale[0] = row < p.rows ? p.x_scale[row] : 0;
      scale[1] = row + 1 < p.rows ? p.x_scale[row + 1] : 0;
    }
    float a[2], b[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      a[i] = sums[4 * j + i] * (low_scale * scale[i]) + low_bias;
      b[i] = sums[4 * j + 2 + i] * (high_scale * scale[i]) + high_bias;
    }
    uint8_t* row = results + (8 * j + group) * kPitch;
    if constexpr (GATED) {
      float y[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float gate = rounded(a[i]);
        // of GELU, by its approximation with tanh, what goes through the sigmoid
        const float opens = p.gelu ? gate * (1.5957691216057308f + 0.07135481282052193f * gate * gate) : gate;
        y[i] = rounded(gate / (1.0f + __expf(-opens))) * rounded(b[i]);
      }
      keep_pair(row, inside + pair, transposed(y[0], y[1]), to_e4m3, inverse);
    } else {
      keep_pair(row, inside + pair, transposed(a[0], a[1]), to_e4m3, inverse);
      keep_pair(row, inside + 8 + pair, transposed(b[0], b[1]), to_e4m3, inverse);
    }
  }
  sync_consumers();
  const int row_bytes = kTileOut * (to_e4m3 ? 1 : 2), pieces = row_bytes / 16;
  const int64_t pitch = static_cast<int64_t>(p.out) * (to_e4m3 ? 1 : 2);
  uint8_t* y = static_cast<uint8_t*>(p.y) + first_row * pitch + static_cast<int64_t>(tile) * row_bytes;
  const int rows = min(COUNT, p.rows - first_row);
  for (int i = threadIdx.x; i < rows * pieces; i += kConsumers) {
    const int row = i / pieces, piece = i % pieces * 16;
    *reinterpret_cast<uint4*>(y + row * pitch + piece) = *reinterpret_cast<uint4*>(results + row * kPitch + piece);
  }
}

// Sums of one part of K as they are. Eight lanes write 32 bytes in a row each.
[[maybe_unused]] __device__ __forceinline__ void write_sums(const Problem& p, const float (&sums)[kSums], int tile,
                                                            int first_row, int part) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = first_row + lane % 4 * 2;
  const int out = tile * kOut + warp * 16 + lane / 4;
  const bool adds = part == 0 && p.bias != nullptr;
  const float low_bias = adds ? __bfloat162float(static_cast<const bf16*>(p.bias)[out]) : 0;
  const float high_bias = adds ? __bfloat162float(static_cast<const bf16*>(p.bias)[out + 8]) : 0;
  float* y = static_cast<float*>(p.y) + (static_cast<int64_t>(part) * p.rows + first) * p.out + out;
#pragma unroll
  for (int j = 0; j < ROWS / 8; j++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (first + 8 * j + i >= p.rows) continue;
      float* at = y + static_cast<int64_t>(8 * j + i) * p.out;
      at[0] = sums[4 * j + i] + low_bias;
      at[8] = sums[4 * j + 2 + i] + high_bias;
    }
  }
}

// A block's first piece is the end of a tile, to which the block before it comes last.
__device__ __forceinline__ void leave(const Problem& p, const float (&sums)[kSums]) {
  float4* to = p.begun + static_cast<int64_t>(blockIdx.x) * (kSums / 4) * kConsumers + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kSums / 4; i++)
    __stcg(to + i * kConsumers, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
  __threadfence();
  sync_consumers();
  if (threadIdx.x == 0) atomicExch(have_begun + blockIdx.x, 1);
}

// Blocks start in their order, and none waits before it has left its own sums: those of the next one are there, or will be.
__device__ __forceinline__ void add_begun(const Problem& p, float (&sums)[kSums]) {
  const int other = blockIdx.x + 1;
  if (threadIdx.x == 0) {
    while (atomicExch(have_begun + other, 0) == 0) __nanosleep(100);
    __threadfence();
  }
  sync_consumers();
  const float4* from = p.begun + static_cast<int64_t>(other) * (kSums / 4) * kConsumers + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kSums / 4; i++) {
    const float4 more = __ldcg(from + i * kConsumers);
    sums[4 * i] += more.x, sums[4 * i + 1] += more.y, sums[4 * i + 2] += more.z, sums[4 * i + 3] += more.w;
  }
}

// The blocks of a cluster have a part of K each; every one adds the sums of its share of the rows.
template <int PARTS>
__device__ __forceinline__ void exchange(const float (&sums)[kSums], float (&total)[kSums / PARTS], uint8_t* stages,
                                         uint64_t* received) {
  constexpr int kShare = kSums / PARTS;  // of a thread's sums
  const int rank = cluster_rank(), thread = threadIdx.x;
  // all blocks are through with their stages, and have made their barriers
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  const uint32_t slot = shared_address(stages) + (rank * (kShare / 4) * kConsumers + thread) * 16;
#pragma unroll
  for (int to = 0; to < PARTS; to++) {
    const uint32_t there = at_rank(slot, to), barrier = at_rank(shared_address(received), to);
#pragma unroll
    for (int i = 0; i < kShare / 4; i++) {
      const float* four = sums + to * kShare + 4 * i;
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
              there + i * kConsumers * 16),
          "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]), "r"(barrier)
          : "memory");
    }
  }
  barrier_wait(received, 0);
#pragma unroll
  for (int i = 0; i < kShare / 4; i++) {
    float4 sum = {0, 0, 0, 0};
#pragma unroll
    for (int from = 0; from < PARTS; from++) {
      const float4 more = reinterpret_cast<float4*>(stages)[(from * (kShare / 4) + i) * kConsumers + thread];
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    total[4 * i] = sum.x, total[4 * i + 1] = sum.y, total[4 * i + 2] = sum.z, total[4 * i + 3] = sum.w;
  }
}

// Steps of a block along K, those of all tiles numbered one behind the other: a share of all, or, in turns, those of a
// tile or of a part of one.
struct Steps {
  int next, end, of_turn;  // 0 of a share

  __device__ __forceinline__ explicit Steps(const Problem& p) : of_turn(p.begun == nullptr ? p.steps / p.parts : 0) {
    const int64_t all = static_cast<int64_t>(p.tiles) * p.row_tiles * p.steps;
    next = of_turn > 0 ? blockIdx.x * of_turn : static_cast<int>(all * blockIdx.x / gridDim.x);
    end = of_turn > 0 ? static_cast<int>(all) : static_cast<int>(all * (blockIdx.x + 1) / gridDim.x);
  }
};

// Those of one tile.
struct Piece {
  int out_tile, first_row, first, count;

  __device__ __forceinline__ Piece(const Problem& p, Steps& left) {  // takes it from these
    const int tile = left.next / p.steps;
    out_tile = tile / p.row_tiles, first_row = tile % p.row_tiles * ROWS;
    first = left.next % p.steps, count = left.of_turn > 0 ? left.of_turn : min(p.steps - first, left.end - left.next);
    left.next += left.of_turn > 0 ? gridDim.x * left.of_turn : count;
  }
};

template <bool GATED>
__device__ __forceinline__ void produce(const Problem& p, const CUtensorMap* x_map, const CUtensorMap* w_map,
                                        Pipeline pipe) {
  constexpr int kWidth = kBytes / kSize;
  const uint64_t policy = read_once();
  const Pipeline start = pipe;
  bool waited = false;
  int loaded = 0;
  // The weights of the first stages are loaded at once, their inputs when the kernel in front is done.
  for (Steps left(p); left.next < left.end;) {
    const Piece piece(p, left);
    for (int step = 0; step < piece.count; step++, pipe.next(), loaded++) {
      const auto load_x = [&](const Pipeline& to, int at) {
        load_inputs(x_map, to.full + to.stage, to.inputs(), (piece.first + at) * kWidth, piece.first_row);
      };
      if (loaded >= kStages) barrier_wait(pipe.empty + pipe.stage, pipe.parity ^ 1);
      barrier_expect(pipe.full + pipe.stage, kStageBytes);
      load_weight<GATED>(w_map, pipe.full + pipe.stage, pipe.weight(), (piece.first + step) * kWidth, piece.out_tile,
                         policy);
      if (waited) {
        load_x(pipe, step);
      } else if (loaded + 1 == kStages || step + 1 == piece.count) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        waited = true;
        Pipeline behind = start;
        for (int at = 0; at <= step; at++, behind.next()) load_x(behind, at);
      }
    }
  }
  asm volatile("griddepcontrol.launch_dependents;");
}

__device__ __forceinline__ void release(uint64_t* empty) {  // by each warp group
  if (threadIdx.x % 128 == 0) barrier_arrive(empty);
}

// The sums of one tile.
[[maybe_unused]] __device__ __forceinline__ void consume(float (&sums)[kSums], Pipeline& pipe, int steps) {
  const int half = threadIdx.x / 128 * (kWeightBytes / 2);
  uint64_t* before = nullptr;
  for (int step = 0; step < steps; step++, pipe.next()) {
    barrier_wait(pipe.full + pipe.stage, pipe.parity);
    multiply(sums, pipe.weight() + half, pipe.inputs(), step > 0);
    wgmma_wait<1>();
    if (before != nullptr) release(before);
    before = pipe.empty + pipe.stage;
  }
  wgmma_wait<0>();
  release(before);
}

// The same of e4m3. The tensor cores keep fewer bits than float32: their sums of 256 terms are added in float32.
[[maybe_unused]] __device__ __forceinline__ void consume_e4m3(float (&sums)[kSums], Pipeline& pipe, int steps) {
  const int half = threadIdx.x / 128 * (kWeightBytes / 2);
#pragma unroll
  for (int i = 0; i < kSums; i++) sums[i] = 0;
  for (int step = 0; step < steps; step += 2) {
    float few[kSums];
    uint64_t *first = pipe.empty + pipe.stage, *second = nullptr;
    barrier_wait(pipe.full + pipe.stage, pipe.parity);
    multiply(few, pipe.weight() + half, pipe.inputs(), false);
    pipe.next();
    if (step + 1 < steps) {
      second = pipe.empty + pipe.stage;
      barrier_wait(pipe.full + pipe.stage, pipe.parity);
      multiply(few, pipe.weight() + half, pipe.inputs(), true);
      pipe.next();
    }
    wgmma_wait<0>();
    release(first);
    if (second != nullptr) release(second);
#pragma unroll
    for (int i = 0; i < kSums; i++) sums[i] += few[i];
  }
}

// A quarter of a multiprocessor has 16,384 registers for three warps of this kernel. Where they need more than 168 each,
// the loading warp gets companions, and all of them give theirs. Elsewhere a bound of 512 threads, which leaves 128
// registers a thread, keeps some for small kernels before and behind this one: they then run beside it.
constexpr bool kGives = E4M3 && ROWS > 128;
constexpr int kThreads = kConsumers + (kGives ? 128 : 32);
constexpr int kBound = !E4M3 && ROWS <= 160 ? 512 : kThreads;

// PARTS: 1, 2 to a cluster, or 0, where p.parts blocks without one leave their sums
template <bool GATED, int PARTS>
__global__ void __launch_bounds__(kBound, 1)
    linear_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                  const Problem p) {
  extern __shared__ uint8_t shared[];
  uint8_t* aligned = shared + (1024 - shared_address(shared) % 1024) % 1024;
  Pipeline pipe;
  pipe.stages = aligned;
  uint8_t* results = aligned + kStages * kStageBytes;
  pipe.full = reinterpret_cast<uint64_t*>(results + kResultBytes);
  pipe.empty = pipe.full + kStages;
  uint64_t* received = pipe.empty + kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      barrier_init(pipe.full + i, 1);
      barrier_init(pipe.empty + i, 2);  // warp groups
    }
    barrier_init(received, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (PARTS > 1) barrier_expect(received, kSums * kConsumers * 4);
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {  // leaves early: the blocks of a cluster then wait for the other warps alone
    if constexpr (kGives) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == kConsumers) produce<GATED>(p, &x_map, &w_map, pipe);
    return;
  }
  if constexpr (kGives) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  asm volatile("griddepcontrol.wait;" ::: "memory");  // for scales of rows, and before anything is written
  for (Steps left(p); left.next < left.end;) {
    const Piece piece(p, left);
    float sums[kSums];
    if constexpr (E4M3) {
      consume_e4m3(sums, pipe, piece.count);
    } else {
      consume(sums, pipe, piece.count);
    }
    if constexpr (PARTS == 0) {
      write_sums(p, sums, piece.out_tile, piece.first_row, blockIdx.x % p.parts);
    } else if constexpr (PARTS == 1) {
      if (piece.first > 0) {
        leave(p, sums);
        continue;
      }
      if (piece.count < p.steps) add_begun(p, sums);
      finish<GATED, ROWS>(p, sums, results, piece.out_tile, piece.first_row);
    } else {  // one tile a cluster
      float total[kSums / PARTS];
      exchange<PARTS>(sums, total, pipe.stages, received);
      finish<GATED, ROWS / PARTS>(p, total, results, piece.out_tile, piece.first_row + cluster_rank() * (ROWS / PARTS));
    }
  }
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode encode_function() {
  static Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return found;
}

bool encode(CUtensorMap* map, const void* data, int dims, const cuuint64_t* sizes, const cuuint64_t* strides,
            const cuuint32_t* box) {
  const cuuint32_t ones[4] = {1, 1, 1, 1};
  Encode function = encode_function();
  return function != nullptr &&
         function(map, E4M3 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, dims,
                  const_cast<void*>(data), sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

struct Call {
  const void *x, *weight;
  int64_t width;
  int blocks;  // of one part; more tiles are shared
  cudaStream_t stream;
};

template <bool GATED, int PARTS>
int run(const Call& call, const Problem& p) {
  constexpr cuuint32_t kWidth = kBytes / kSize;
  CUtensorMap x_map, w_map;
  const cuuint64_t row_bytes = call.width * kSize, columns = call.width, rows = p.rows, out = p.out;
  const cuuint64_t x_sizes[2] = {columns, rows}, x_strides[1] = {row_bytes};
  const cuuint32_t x_box[2] = {kWidth, ROWS};
  if (!encode(&x_map, call.x, 2, x_sizes, x_strides, x_box)) return -1;
  if (GATED) {
    const cuuint64_t sizes[4] = {columns, 8, 2, out / 8}, strides[3] = {row_bytes, out * row_bytes, 8 * row_bytes};
    const cuuint32_t box[4] = {kWidth, 8, 2, kOut / 16};
    if (!encode(&w_map, call.weight, 4, sizes, strides, box)) return -1;
  } else {
    const cuuint64_t sizes[2] = {columns, out}, strides[1] = {row_bytes};
    const cuuint32_t box[2] = {kWidth, kOut};
    if (!encode(&w_map, call.weight, 2, sizes, strides, box)) return -1;
  }
  const auto kernel = linear_kernel<GATED, PARTS>;
  // for each device, so not once
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared))
    return error;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {PARTS > 1 ? PARTS : 1, 1, 1};
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3((PARTS > 0 ? PARTS : p.parts) * call.blocks);
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = kShared;
  launch.stream = call.stream;
  launch.attrs = attributes;
  launch.numAttrs = PARTS > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&launch, kernel, x_map, w_map, p);
}

}  // namespace

// ``parts`` of K, of which each tile has a block: with ``sums`` y is their sums in float32, which only bf16 has; else they
// are 1, where ``blocks`` share the tiles, or 2 in e4m3, where each tile has a cluster. Blocks that share tiles, of which
// there are more, leave sums in ``begun`` [blocks, ROWS * 128]. ``is_gated``: 1 by SiLU, 2 by GELU. In bf16 only the gated kernel was compiled without
// ``sums``. 0, -1 if a tensor has no map, -2 for what was not compiled; else a cudaError.
extern "C" int hopper_linear(const void* x, const void* weight, const void* bias, const float* out_scale,
                             const float* x_scale, const float* y_scale, void* y, float* begun, int64_t rows, int64_t out,
                             int64_t width, int blocks, int parts, int x_static, int is_gated, int sums, void* stream) {
  Problem p = {};
  p.bias = bias, p.out_scale = out_scale, p.x_scale = x_scale, p.y_scale = y_scale, p.y = y;
  p.begun = reinterpret_cast<float4*>(begun);
  p.rows = rows, p.out = out, p.steps = width * kSize / kBytes;
  p.tiles = out * (is_gated ? 2 : 1) / kOut, p.row_tiles = (rows + ROWS - 1) / ROWS, p.x_static = x_static;
  p.parts = parts, p.gelu = is_gated == 2;
  const int tiles = p.tiles * p.row_tiles;
  const Call call = {x, weight, width, parts > 1 || sums || tiles < blocks ? tiles : blocks, static_cast<cudaStream_t>(stream)};
  if (p.steps % parts != 0) return -2;
  if (is_gated && parts == 1) return run<true, 1>(call, p);
  if constexpr (!E4M3) {
    if (!is_gated && sums) return run<false, 0>(call, p);
  } else {
    if (!is_gated && !sums && parts == 1) return run<false, 1>(call, p);
    if (!is_gated && !sums && parts == 2) return run<false, 2>(call, p);
  }
  return -2;
}
