// Attention of decode passes, with the rotation of queries and keys and the write of the new KV.
//
// A cluster of blocks, mostly of one, attends for one sequence and some heads of one KV head: to all positions of earlier
// passes, or, of a long sequence, to a share of them, so that all have about as much to read. As many of its blocks as the
// share is worth have a part of it, of every kBlock of whose positions each warp has 16 with a softmax of its own; the
// positions of this pass are the last block's. What is there before this pass (lengths, pages, KV) is loaded before the
// kernel in front, which computes q, k and v, is done. Results meet where they are near: warps' in shared memory, blocks'
// in that of the block that adds a part of the columns, shares' in global memory, where the one that is done last adds
// them; always in the same order.
//
// Compiled for the size of a head, DIM, for MROWS rows (rows of the sequence times heads), a multiple of 16, and for
// RESIDENT blocks at a time on a multiprocessor. Each 16 rows
// have four warps of their own, which share the positions of a block with those of the other rows. Heads of 256 have two
// warps for the same rows and positions, one for each half of the columns, as sums of all would take too many registers:
// each multiplies queries and keys of its own columns, and the two add up these logits.

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

// libdevice's, as fast maths would make cosf inexact for far positions
extern "C" __device__ float __nv_cosf(float);
extern "C" __device__ float __nv_sinf(float);

namespace {

using bf16 = __nv_bfloat16;

constexpr int kSides = DIM > 128 ? 2 : 1;                // halves of a head's columns
constexpr int kParts = 4 / kSides;                      // of a block's positions
constexpr int kRowTiles = MROWS / 16;
constexpr int kThreads = 32 * kParts * kSides * kRowTiles;
constexpr int kTokens = 16;                              // of a part at a time
constexpr int kBlock = kTokens * kParts;                 // of a block at a time
constexpr int kRowBytes = DIM * 2;
constexpr int kPieces = kRowBytes / 16;                  // of 16 bytes in a row
constexpr int kTileBytes = kTokens * kRowBytes;
constexpr int kStageBytes = 2 * kTileBytes;              // keys and values of a part
constexpr int kStages = DIM == 64 ? 4 : 2;               // more would leave no room for the GEMM in front
constexpr int kColumns = DIM / kSides;                  // of a warp
constexpr int kNTiles = kColumns / 8, kKTiles = kColumns / 16;
constexpr int kMostQuery = 16;                           // rows of a sequence
constexpr int kSumPitch = DIM + 4;                       // floats: neighbouring rows lie in other banks
constexpr float kLog2e = 1.4426950408889634f;

// Shared memory: queries; a barrier and the share; logits of sides; stages and later the warps' results; keys and values of
// this pass; cos and sin; what a cluster's blocks send to one another.
constexpr int kBarrier = MROWS * kRowBytes;
constexpr int kSideLogits = kBarrier + 128;
constexpr int kSideBytes = kSides > 1 ? 1024 : 0;  // of a warp: 16 rows, 16 positions
constexpr int kSized = kSideLogits + kThreads / 32 * kSideBytes;

struct Room {
  int fresh, fresh_rows, turns, softmax, received, end;

  constexpr __host__ __device__ __forceinline__ Room(int num_rows, int query_len, int cluster)
      : fresh(), fresh_rows(), turns(), softmax(), received(), end() {
    const int loads = kParts * kStages * kStageBytes, merge = kParts * num_rows * (kSumPitch + 2) * 4;
    fresh = kSized + (loads > merge ? loads : merge + 127 & ~127);
    fresh_rows = query_len > 8 ? 16 : 8;
    turns = fresh + 2 * fresh_rows * kRowBytes;
    softmax = turns + query_len * DIM * 2;
    received = softmax + (cluster > 1 ? cluster * num_rows * 8 + 15 & ~15 : 0);
    end = received + (cluster > 1 ? num_rows * DIM * 4 : 0);
  }
};

constexpr int kMostShared = 232448;  // bytes, of a block
static_assert(Room(MROWS, kMostQuery, 8).end <= kMostShared, "fewer rows fit");

struct Problem {
  const bf16* heads;         // [rows, num_heads + 2 * num_kv_heads, DIM]: q, k and v before the rotation
  const float* frequencies;  // [8 * turned]
  bf16 *keys, *values;       // [pages, page_size, num_kv_heads, DIM], strided
  const int64_t* starts;     // [batch]: positions before the new rows
  const int64_t* ends;       // [batch]: behind a sequence's last row, of which none has more than query_len; null: all have
  const int* tables;         // [batch, table_stride]
  const float* sinks;        // [num_heads] or null
  bf16* out;                 // [rows, num_heads, DIM]
  float* shares;  // [.., num_heads / group, size_of_sums]: sums [rows, DIM], largest logits and totals [cluster, rows, 2]
  int* arrivals;  // [batch, num_heads / group, cluster]: shares that are done; 0 before and behind the kernel
  int64_t page_stride, slot_stride, head_stride, table_stride;
  int batch, num_shares;         // of all sequences, at most
  int wanted, certain;           // shares to cut all positions in, where that makes no more, and where it does
  int least;                     // positions of a share
  int table_width, page_shift, query_len, num_heads, num_kv_heads, group, window;  // group: heads of a block
  int size_of_sums;
  bool causal;               // else a row sees those behind it, too, of a window as many as before it
  float scale, rope_scale;   // of logits, times log2(e); of cos and sin
  int turned;                // pieces of a head that are rotated with as many behind them: half of it, or of 256 fewer
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Piece ``piece`` of 16 bytes of row ``row``: neighbours lie in other banks.
__device__ __forceinline__ int swizzled(int row, int piece) {
  return row * kRowBytes + ((piece ^ (row & 7)) * 16);
}

__device__ __forceinline__ void barrier_init(uint32_t barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier));
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}

// The address of ``address`` in the shared memory of another block of the cluster.
__device__ __forceinline__ uint32_t at_rank(uint32_t address, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool there) {  // else zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void load_four(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void load_four_turned(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t packed(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
}

__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

// The cos and sin of a position, packed, in the number format of what they turn.
__device__ __forceinline__ uint32_t turn(const Problem& p, int position, int pair) {
  const float angle = __fmul_rn(static_cast<float>(position), p.frequencies[pair]);
  return packed(__fmul_rn(__nv_cosf(angle), p.rope_scale), __fmul_rn(__nv_sinf(angle), p.rope_scale));
}

// Turns eight pairs by ``turns``: the first halves and the second; each product is rounded, as in ops/rope.py.
__device__ __forceinline__ void rotate(uint4& low, uint4& high, const uint32_t* turns) {
  bf16* lows = reinterpret_cast<bf16*>(&low);
  bf16* highs = reinterpret_cast<bf16*>(&high);
  uint32_t packs[8];
  *reinterpret_cast<uint4*>(packs) = *reinterpret_cast<const uint4*>(turns);
  *reinterpret_cast<uint4*>(packs + 4) = *reinterpret_cast<const uint4*>(turns + 4);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float2 both = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(packs + i));
    const float x = __bfloat162float(lows[i]), y = __bfloat162float(highs[i]);
    lows[i] = __float2bfloat16_rn(__fadd_rn(rounded(__fmul_rn(x, both.x)), rounded(__fmul_rn(y, -both.y))));
    highs[i] = __float2bfloat16_rn(__fadd_rn(rounded(__fmul_rn(y, both.x)), rounded(__fmul_rn(x, both.y))));
  }
}

constexpr int kTurners = kPieces < 16 ? kPieces / 2 : 8;  // threads of a head that is rotated
constexpr int kTwos = kPieces / 2 / kTurners;             // of a thread

// Where a thread's pieces of a head are behind its first one, two by two: the first ``turned`` of a head are rotated with
// as many behind them, and those behind these stay as they are.
struct Places {
  int piece, turned, low[kTwos], high[kTwos];

  __device__ __forceinline__ explicit Places(const Problem& p)
      : piece(threadIdx.x % kTurners), turned(DIM > 128 ? p.turned : kPieces / 2) {
#pragma unroll
    for (int i = 0; i < kTwos; i++) {
      low[i] = i * kTurners + (rotated(i) ? 0 : turned);
      high[i] = i * kTurners + (rotated(i) ? turned : kPieces / 2);
    }
  }

  __device__ __forceinline__ bool rotated(int i) const { return DIM <= 128 || piece + i * kTurners < turned; }
};

// These pieces; pointers are to a thread's first.
struct Head {
  uint4 low[kTwos] = {}, high[kTwos] = {};

  __device__ __forceinline__ void load(const bf16* from, const Places& at) {
#pragma unroll
    for (int i = 0; i < kTwos; i++) {
      low[i] = __ldcg(reinterpret_cast<const uint4*>(from) + at.low[i]);
      high[i] = __ldcg(reinterpret_cast<const uint4*>(from) + at.high[i]);
    }
  }

  __device__ __forceinline__ void turn(const uint32_t* turns, const Places& at) {
#pragma unroll
    for (int i = 0; i < kTwos; i++)
      if (at.rotated(i)) rotate(low[i], high[i], turns + 8 * i * kTurners);
  }

  __device__ __forceinline__ void share(uint8_t* tile, int row, const Places& at) const {
#pragma unroll
    for (int i = 0; i < kTwos; i++) {
      *reinterpret_cast<uint4*>(tile + swizzled(row, at.piece + at.low[i])) = low[i];
      *reinterpret_cast<uint4*>(tile + swizzled(row, at.piece + at.high[i])) = high[i];
    }
  }

  __device__ __forceinline__ void store(bf16* to, const Places& at) const {
#pragma unroll
    for (int i = 0; i < kTwos; i++) {
      reinterpret_cast<uint4*>(to)[at.low[i]] = low[i];
      reinterpret_cast<uint4*>(to)[at.high[i]] = high[i];
    }
  }
};

// A warp's sums over its positions for 16 rows; ``most`` and ``total`` are of rows lane / 4 and lane / 4 + 8.
struct State {
  float sums[kNTiles][4] = {};
  float most[2] = {-INFINITY, -INFINITY}, total[2] = {};
};

// Four columns of a row over some positions, relative to the largest logit of all that is added, which is known before.
struct Sum {
  float4 value = {0, 0, 0, 0};
  float largest = -INFINITY, whole = 0;

  __device__ __forceinline__ void add(float4 more, float its_largest, float its_whole) {
    const float weight = largest == -INFINITY ? 0.0f : exp2f(its_largest - largest);
    whole += its_whole * weight;
    value.x += more.x * weight, value.y += more.y * weight, value.z += more.z * weight, value.w += more.w * weight;
  }
};

// Both warps of the same rows and positions get the same sums. They meet elsewhere before the next ones.
__device__ __forceinline__ void add_other_side(float (&logits)[2][4]) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = warp / (2 * kParts) * kParts + warp % kParts;
  float4* all = reinterpret_cast<float4*>(shared + kSideLogits) + lane;
#pragma unroll
  for (int n = 0; n < 2; n++)
    all[64 * warp + 32 * n] = make_float4(logits[n][0], logits[n][1], logits[n][2], logits[n][3]);
  asm volatile("bar.sync %0, 64;" ::"r"(1 + kParts + pair) : "memory");  // the others: 0 and, of parts, from 1 on
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const float4 other = all[64 * (warp ^ kParts) + 32 * n];
    logits[n][0] += other.x, logits[n][1] += other.y, logits[n][2] += other.z, logits[n][3] += other.w;
  }
}

// The rows from ``first_row`` attend to the 16 positions from ``first`` before ``end``, whose keys and values are those of
// ``count`` rows; where that is 8, ``end`` is no further. All of them are seen by all rows unless MASKED.
template <bool MASKED>
__device__ __forceinline__ void attend(const Problem& p, State& state, uint32_t q, int first_row, uint32_t keys_at,
                                       uint32_t values_at, int count, int first, int start, int end) {
  const int lane = threadIdx.x % 32;
  float logits[2][4] = {};
#pragma unroll
  for (int k = 0; k < kKTiles; k++) {
    uint32_t keys[4], rows[4];  // keys of positions 0-7 and 8-15, each two halves of 16 inputs
    load_four(keys, keys_at + swizzled(lane % 8 + lane / 16 * 8 & count - 1, 2 * k + lane / 8 % 2));
    load_four(rows, q + swizzled(first_row + lane % 16, 2 * k + lane / 16));
    multiply(logits[0], rows, keys[0], keys[1]);
    multiply(logits[1], rows, keys[2], keys[3]);
  }
  if constexpr (kSides > 1) add_other_side(logits);
  uint32_t weights[4];
  float kept[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int own = start + (first_row + 8 * half + lane / 4) / p.group;
    const int last = p.causal ? own : p.window > 0 ? own + p.window - 1 : end - 1;
    const int oldest = p.window > 0 ? own - p.window : -1;
    float most = -INFINITY;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int position = first + 8 * n + lane % 4 * 2 + i;
        float& logit = logits[n][2 * half + i];
        if (MASKED && (position >= end || position > last || position <= oldest)) logit = -INFINITY;
        most = fmaxf(most, logit);
      }
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    most = fmaxf(most * p.scale, state.most[half]);
    const float base = most == -INFINITY ? 0.0f : most;
    kept[half] = exp2f(state.most[half] - base);
    float total = 0;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float& logit = logits[n][2 * half + i];
        logit = exp2f(fmaf(logit, p.scale, -base));
        total += logit;
      }
      weights[2 * n + half] = packed(logits[n][2 * half], logits[n][2 * half + 1]);
    }
    state.most[half] = most;
    state.total[half] = state.total[half] * kept[half] + total;  // of this lane's positions
  }
  if (__any_sync(~0u, kept[0] != 1.0f || kept[1] != 1.0f)) {
#pragma unroll
    for (int n = 0; n < kNTiles; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) state.sums[n][i] *= kept[i / 2];
    }
  }
#pragma unroll
  for (int n = 0; n < kNTiles; n += 2) {
    uint32_t values[4];  // positions 0-7 and 8-15 of 8 columns, then of the next 8
    load_four_turned(values, values_at + swizzled(lane & count - 1, n + lane / 16));
    multiply(state.sums[n], weights, values[0], values[1]);
    multiply(state.sums[n + 1], weights, values[2], values[3]);
  }
}

__device__ __forceinline__ int page_of(const Problem& p, int sequence, int position) {
  const int index = position >> p.page_shift;
  return index < p.table_width ? __ldcg(p.tables + sequence * p.table_stride + index) : 0;
}

// Where the head's numbers of a position begin in pages of keys and of values.
__device__ __forceinline__ int64_t slot_of(const Problem& p, int page, int position, int kv_head) {
  return page * p.page_stride + (position & ((1 << p.page_shift) - 1)) * p.slot_stride + kv_head * p.head_stride;
}

// The rows of a sequence.
struct Rows {
  int64_t first;
  int count;

  __device__ __forceinline__ Rows(const Problem& p, int sequence) {
    first = static_cast<int64_t>(sequence) * p.query_len, count = p.query_len;
    if (p.ends == nullptr) return;
    first = sequence > 0 ? __ldcg(p.ends + sequence - 1) : 0;
    count = static_cast<int>(__ldcg(p.ends + sequence) - first);
  }
};

// The first of the positions of earlier passes, in whole blocks, to which the rows of a sequence attend that has ``end``.
__device__ __forceinline__ int oldest_of(const Problem& p, int end) {
  return p.window > 0 ? max(end + 1 - p.window, 0) / kBlock * kBlock : 0;
}

// What a cluster is for: share ``split`` of the ``splits`` of ``sequence``, which has ``end`` positions of earlier passes.
// Of the shares of sequences that have several, its sequence's are those from ``place`` on.
struct Share {
  int sequence = -1, end, split, splits, place;

  // By a whole warp: from the number of positions of all sequences how many a share may have, and from those of the
  // sequences before it the sequence. A lane counts for EACH of 32 * EACH sequences, fewer where there are few.
  template <int EACH>
  __device__ __forceinline__ void find(const Problem& p, int cluster) {
    constexpr int kAll = 32 * EACH;
    const int lane = threadIdx.x % 32;
    int ends[EACH], counts[EACH], most = 0;
    const auto read = [&](int first) {
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int at = first + EACH * lane + i;
        ends[i] = at < p.batch ? static_cast<int>(__ldcg(p.starts + at)) : -1;
      }
    };
    const auto positions = [&](int i) { return max(ends[i], 0) - oldest_of(p, max(ends[i], 0)); };
    // Of this lane's sequences: shares, and from bit 16 on those of sequences with several
    const auto count = [&] {
      int sum = 0;
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int shares = (positions(i) + most - 1) / most;
        counts[i] = ends[i] < 0 ? 0 : shares > 1 ? shares * 0x10001 : 1;
        sum += counts[i];
      }
      return sum;
    };
    const auto total = [&](auto&& of_lane) {
      int sum = 0;
      for (int first = 0; first < p.batch; first += kAll) {
        if (most == 0 || p.batch > kAll) read(first);
        sum += of_lane();
      }
      return __reduce_add_sync(~0u, sum);
    };
    const int all = total([&] {
      int sum = 0;
#pragma unroll
      for (int i = 0; i < EACH; i++) sum += positions(i);
      return sum;
    });
    most = max((all + p.wanted - 1) / p.wanted, p.least);
    if (p.wanted > p.certain && (total(count) & 0xffff) > p.num_shares)
      most = max((all + p.certain - 1) / p.certain, p.least);
    int before = 0;
    for (int first = 0; first < p.batch; first += kAll) {
      if (p.batch > kAll) read(first);
      const int sum = count();
      int upto = sum;  // this lane's and those of the lanes before
#pragma unroll
      for (int i = 1; i < 32; i *= 2) {
        const int add = __shfl_up_sync(~0u, upto, i);
        if (lane >= i) upto += add;
      }
      int at = before + upto - sum;
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int next = at + counts[i];
        if ((at & 0xffff) <= cluster && cluster < (next & 0xffff)) {
          sequence = first + EACH * lane + i, end = ends[i], place = at >> 16;
          split = cluster - (at & 0xffff), splits = counts[i] & 0xffff;
        }
        at = next;
      }
      if (__any_sync(~0u, sequence >= 0)) return;
      before += __shfl_sync(~0u, upto, 31);
    }
  }

  // The first warp finds it, for which there is room at ``room``.
  __device__ __forceinline__ Share(const Problem& p, int cluster, uint8_t* room) : end(), split(), splits(), place() {
    Share* all = reinterpret_cast<Share*>(room);
    if (threadIdx.x == 0) all->sequence = -1;
    if (threadIdx.x < 32) {
      p.batch > 32 ? find<4>(p, cluster) : find<1>(p, cluster);
      __syncwarp();
      if (sequence >= 0) *all = *this;  // one lane's
    }
    __syncthreads();
    *this = *all;
  }
};

__global__ void __launch_bounds__(kThreads, RESIDENT) hopper_decode(const Problem p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int rank = blockIdx.x, first_head = blockIdx.y * p.group;
  const int heads_per_kv = p.num_heads / p.num_kv_heads, kv_head = first_head / heads_per_kv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % kParts;
  const int row_tile = warp / (kParts * kSides), side = warp / kParts % kSides, side_at = side * kColumns * 2;
  const uint32_t q = shared_address(shared), barrier = q + kBarrier;
  const uint32_t stages = q + kSized + part * kStages * kStageBytes;
  asm volatile("griddepcontrol.launch_dependents;");
  // The kernel in front lets this one start when it has itself waited for those before: see ops/launch.py.
  const Share its_share(p, blockIdx.z, shared + kBarrier + 16);
  const int sequence = its_share.sequence, split = its_share.split, splits = its_share.splits, start = its_share.end;
  if (sequence < 0) return;
  const Rows its(p, sequence);
  const int num_rows = its.count * p.group;
  const bool idle = row_tile * 16 >= num_rows;  // warps that only load, where a sequence has few rows
  const Room room(num_rows, its.count, gridDim.x);
  const int oldest = oldest_of(p, start);
  const int share = (start - oldest + splits * kBlock - 1) / (splits * kBlock) * kBlock;
  // Blocks that have a part of it, a power of two: rather few too many than half of them
  const int worth = share * 5 / (4 * kBlock), ranks = worth < 2 ? 1 : min(1 << (31 - __clz(worth)), gridDim.x);
  const int columns = DIM / ranks;  // that a block adds up
  if (rank >= ranks) return;
  if (ranks > 1) {
    if (threadIdx.x == 0) {
      barrier_init(barrier);
      asm volatile("fence.mbarrier_init.release.cluster;");
      barrier_expect(barrier, ranks * num_rows * (columns * 4 + 8));
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
  const int its_part = (share + ranks * kBlock - 1) / (ranks * kBlock) * kBlock;
  const int first_of_part = oldest + split * share + rank * its_part;
  const int end_of_part = min(first_of_part + its_part, oldest + (split + 1) * share);
  const int from = first_of_part + part * kTokens, until = min(end_of_part, start);
  constexpr int kLoaders = 32 * kSides * kRowTiles;         // threads of a part
  const int loader = (row_tile * kSides + side) * 32 + lane, its_row = loader / kPieces, its_piece = loader % kPieces;
  const int64_t its_offset = its_row * p.slot_stride + its_piece * 8;
  int loaded = 0;                                            // stages
  int page = from < until ? page_of(p, sequence, from) : 0;  // of the next positions: pages hold whole stages
  const auto load_next = [&] {
    const int first = from + loaded * kBlock;
    if (first < until) {
      int64_t at = slot_of(p, page, first, kv_head) + its_offset;
      const uint32_t to = stages + loaded % kStages * kStageBytes;
#pragma unroll
      for (int row = its_row; row < kTokens; row += kLoaders / kPieces, at += kLoaders / kPieces * p.slot_stride) {
        const bool there = first + row < until;  // what is not is read where the stage begins
        const int64_t from_here = there ? at : at - row * p.slot_stride;
        copy_async(to + swizzled(row, its_piece), p.keys + from_here, there);
        copy_async(to + kTileBytes + swizzled(row, its_piece), p.values + from_here, there);
      }
      if (first + kBlock < until) page = page_of(p, sequence, first + kBlock);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    loaded++;
  };
#pragma unroll
  for (int i = 0; i < kStages; i++) load_next();

  const Places places(p);
  const int pairs = 8 * places.turned;
  uint32_t* turns = reinterpret_cast<uint32_t*>(shared + room.turns);
  for (int i = threadIdx.x; i < its.count * pairs; i += kThreads) turns[i] = turn(p, start + i / pairs, i % pairs);
  static_assert(MROWS * kTurners <= kThreads && kMostQuery * kTurners <= kThreads, "one each for a thread");
  const int row = threadIdx.x / kTurners;
  const bool fresh = split == splits - 1 && rank == ranks - 1;
  const bool has_key = fresh && row < its.count, has_query = row < num_rows;
  int64_t key_at = 0;
  if (has_key) key_at = slot_of(p, page_of(p, sequence, start + row), start + row, kv_head);
  __syncthreads();
  if (ranks > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");

  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int row_stride = (p.num_heads + 2 * p.num_kv_heads) * DIM;
  const bf16* rows = p.heads + its.first * row_stride + 8 * places.piece;
  Head query, key, value;
  if (has_query) query.load(rows + row / p.group * row_stride + (first_head + row % p.group) * DIM, places);
  if (has_key) {
    const bf16* head = rows + row * row_stride + (p.num_heads + kv_head) * DIM;
    key.load(head, places);
    value.load(head + p.num_kv_heads * DIM, places);
  }
  if (has_query) query.turn(turns + row / p.group * pairs + 8 * places.piece, places);
  if (row < MROWS) query.share(shared, row, places);
  const int fresh_values = room.fresh + room.fresh_rows * kRowBytes;
  if (fresh && row < room.fresh_rows) {  // those that are not there as zeros
    if (has_key) key.turn(turns + row * pairs + 8 * places.piece, places);
    key.share(shared + room.fresh, row, places);
    value.share(shared + fresh_values, row, places);
    if (has_key && first_head % heads_per_kv == 0) {
      key.store(p.keys + key_at + 8 * places.piece, places);
      value.store(p.values + key_at + 8 * places.piece, places);
    }
  }
  __syncthreads();
  State state;
  const auto meet = [&] {  // the warps of this part
    if (kLoaders == 32) __syncwarp();
    else asm volatile("bar.sync %0, %1;" ::"r"(part + 1), "n"(kLoaders) : "memory");
  };
  for (int done = 0; from + done * kBlock < until; done++) {
    const int first = from + done * kBlock;
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
    meet();
    const uint32_t at = stages + done % kStages * kStageBytes + side_at;
    if (!idle && first + kTokens <= until && p.window <= 0) {
      attend<false>(p, state, q + side_at, 16 * row_tile, at, at + kTileBytes, kTokens, first, start, until);
    } else if (!idle) {
      attend<true>(p, state, q + side_at, 16 * row_tile, at, at + kTileBytes, kTokens, first, start, until);
    }
    meet();
    load_next();
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (fresh && part == kParts - 1 && !idle)
    attend<true>(p, state, q + side_at, 16 * row_tile, q + room.fresh + side_at, q + fresh_values + side_at, room.fresh_rows,
                 start, start, start + its.count);
  __syncthreads();  // the stages are free

  // Of the warps: largest logits and totals [kParts, num_rows], then sums [kParts, num_rows, kSumPitch].
  float* sums = reinterpret_cast<float*>(shared + kSized);
  float* most = sums + kParts * num_rows * kSumPitch;
  float* total = most + kParts * num_rows;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int at = 16 * row_tile + 8 * half + lane / 4;
    float all = state.total[half];
    all += __shfl_xor_sync(~0u, all, 1);
    all += __shfl_xor_sync(~0u, all, 2);
    if (at >= num_rows) continue;
    if (lane % 4 == 0) most[part * num_rows + at] = state.most[half], total[part * num_rows + at] = all;
#pragma unroll
    for (int n = 0; n < kNTiles; n++)
      *reinterpret_cast<float2*>(sums + (part * num_rows + at) * kSumPitch + kColumns * side + 8 * n + lane % 4 * 2) =
          make_float2(state.sums[n][2 * half], state.sums[n][2 * half + 1]);
  }
  __syncthreads();
  const auto shared_sums = [&](int split) {
    return p.shares + ((its_share.place + split) * static_cast<int64_t>(gridDim.y) + blockIdx.y) * p.size_of_sums;
  };
  const int softmax_at = num_rows * (DIM + 2 * rank);  // in these
  const auto store = [&](int row, int column, Sum sum) {
    const int head = first_head + row % p.group;
    if (p.sinks != nullptr) {
      const float sink = p.sinks[head] * kLog2e;
      Sum both;
      both.largest = fmaxf(sum.largest, sink);
      both.add(sum.value, sum.largest, sum.whole);
      both.add({0, 0, 0, 0}, sink, 1);
      sum = both;
    }
    const float inverse = 1.0f / sum.whole;
    bf16* out = p.out + ((its.first + row / p.group) * p.num_heads + head) * DIM;
    const float4 all = sum.value;
    *reinterpret_cast<uint2*>(out + column) =
        make_uint2(packed(all.x * inverse, all.y * inverse), packed(all.z * inverse, all.w * inverse));
  };
  const auto finish = [&](int row, int column, const Sum& sum) {  // of a share
    if (splits == 1) return store(row, column, sum);
    float* to = shared_sums(split);
    __stcg(reinterpret_cast<float4*>(to + row * DIM + column), sum.value);
    if (column % columns == 0)
      __stcg(reinterpret_cast<float2*>(to + softmax_at) + row, make_float2(sum.largest, sum.whole));
  };
  for (int i = threadIdx.x; i < num_rows * DIM / 4; i += kThreads) {
    const int row = i / (DIM / 4), column = i % (DIM / 4) * 4;
    Sum sum;
#pragma unroll
    for (int w = 0; w < kParts; w++) sum.largest = fmaxf(sum.largest, most[w * num_rows + row]);
#pragma unroll
    for (int w = 0; w < kParts; w++)
      sum.add(*reinterpret_cast<const float4*>(sums + (w * num_rows + row) * kSumPitch + column), most[w * num_rows + row],
              total[w * num_rows + row]);
    if (ranks == 1) {
      finish(row, column, sum);
      continue;
    }
    const int other = column / columns;  // the block that adds up this column
    const uint32_t there = at_rank(barrier, other);
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     at_rank(q + room.received + ((rank * num_rows + row) * columns + column % columns) * 4, other)),
                 "f"(sum.value.x), "f"(sum.value.y), "f"(sum.value.z), "f"(sum.value.w), "r"(there)
                 : "memory");
    if (column % columns == 0)
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                       at_rank(q + room.softmax + (rank * num_rows + row) * 8, other)),
                   "f"(sum.largest), "f"(sum.whole), "r"(there)
                   : "memory");
  }
  const int items = num_rows * columns / 4;
  const auto row_of = [&](int item) { return item / (columns / 4); };
  const auto column_of = [&](int item) { return rank * columns + item % (columns / 4) * 4; };
  if (ranks > 1) {
    barrier_wait(barrier, 0);
    const float2* softmax = reinterpret_cast<const float2*>(shared + room.softmax);
    const float4* received = reinterpret_cast<const float4*>(shared + room.received);
    for (int i = threadIdx.x; i < items; i += kThreads) {
      Sum sum;
#pragma unroll 4
      for (int other = 0; other < ranks; other++) sum.largest = fmaxf(sum.largest, softmax[other * num_rows + row_of(i)].x);
#pragma unroll 4
      for (int other = 0; other < ranks; other++) {
        const float2 its = softmax[other * num_rows + row_of(i)];
        sum.add(received[other * items + i], its.x, its.y);
      }
      finish(row_of(i), column_of(i), sum);
    }
  }
  if (splits == 1) return;
  __syncthreads();
  bool is_last = false;
  if (threadIdx.x == 0) {
    int* arrivals = p.arrivals + (sequence * gridDim.y + blockIdx.y) * gridDim.x + rank;
    __threadfence();  // the sums of all threads are there for who sees this block arrive
    is_last = atomicAdd(arrivals, 1) == splits - 1;
    if (is_last) *arrivals = 0;
    __threadfence();
  }
  if (!__syncthreads_or(is_last)) return;
  const auto softmax_of = [&](int other, int row) {
    return __ldcg(reinterpret_cast<const float2*>(shared_sums(other) + softmax_at) + row);
  };
  for (int i = threadIdx.x; i < items; i += kThreads) {
    const int row = row_of(i), column = column_of(i);
    Sum sum;
#pragma unroll 8
    for (int other = 0; other < splits; other++) sum.largest = fmaxf(sum.largest, softmax_of(other, row).x);
#pragma unroll 8
    for (int other = 0; other < splits; other++) {
      const float2 its = softmax_of(other, row);
      sum.add(__ldcg(reinterpret_cast<const float4*>(shared_sums(other) + row * DIM + column)), its.x, its.y);
    }
    store(row, column, sum);
  }
}

}  // namespace

extern "C" int hopper_decode_run(const void* heads, const float* frequencies, void* keys, void* values,
                                 const int64_t* starts, const int64_t* ends, const int* tables, const float* sinks, void* out,
                                 float* shares, int* arrivals, int64_t page_stride, int64_t slot_stride, int64_t head_stride,
                                 int64_t table_stride, int table_width, int page_shift, int batch, int query_len, int num_heads,
                                 int num_kv_heads, int group, int window, int causal, int cluster, int num_shares, int wanted,
                                 int certain, int least, int size_of_sums, int num_pairs, float scale, float rope_scale,
                                 void* stream) {
  const Problem p = {static_cast<const bf16*>(heads), frequencies, static_cast<bf16*>(keys), static_cast<bf16*>(values),
                     starts, ends, tables, sinks, static_cast<bf16*>(out), shares, arrivals, page_stride, slot_stride,
                     head_stride, table_stride, batch, num_shares, wanted, certain, least, table_width, page_shift,
                     query_len, num_heads, num_kv_heads, group, window, size_of_sums,
                     causal != 0, scale * kLog2e, rope_scale, num_pairs / 8};
  static const cudaError_t prepared =
      cudaFuncSetAttribute(hopper_decode, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared);
  if (prepared) return prepared;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(cluster, num_heads / group, num_shares);  // clusters without one end at once
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = Room(group * query_len, query_len, cluster).end;
  launch.stream = static_cast<cudaStream_t>(stream);
  launch.attrs = attributes;
  launch.numAttrs = 2;
  return cudaLaunchKernelEx(&launch, hopper_decode, p);
}
