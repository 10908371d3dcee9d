// FlashInfer's FlashAttention 3 for causal prefill: one kernel of its template, and the list of tiles of its blocks.
//
// FlashInfer compiles it together with seven others, of other masks and of keys that lie elsewhere, for as long each.
// PAGED: keys lie in pages, else one sequence behind the other. variant.h has ``Variant``.

#include <cute/tensor.hpp>
#include <cutlass/pipeline/pipeline.hpp>
#include <flashinfer/attention/hopper/attention_updater.cuh>
#include <flashinfer/attention/hopper/named_barrier.cuh>
#include <flashinfer/attention/hopper/variant_helper.cuh>
#include <flashinfer/attention/hopper/variants.cuh>
#include <flashinfer/attention/mask.cuh>
#include <flashinfer/math.cuh>

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

#include "late.cuh"

// Three places of FlashInfer 0.6 and 0.7 where warps are not ordered, and outputs are wrong if some are late. Here its
// headers take these classes for those that they name.
namespace cutlass {

// Values of pages are written by cp.async, in the generic proxy, and GEMMs read them in the async proxy: PTX wants a
// fence between the two.
template <int Stages>
class FencedPipelineAsync : public PipelineAsync<Stages> {
  using Base = PipelineAsync<Stages>;

 public:
  using Base::Base;
  CUTLASS_DEVICE void consumer_wait(typename Base::PipelineState state, ConsumerToken token = {BarrierStatus::WaitAgain}) {
    Base::consumer_wait(state, token);
    arch::fence_view_async_shared();
  }
};

namespace arch {

// Every warp arrives at the barrier behind which outputs are copied, and then waits at it: the barrier, which counts
// arrivals, counts early warps twice and opens before late ones have written theirs. To wait is enough.
struct EpilogueNamedBarrier {
  template <typename Id>
  CUTLASS_DEVICE static void arrive(uint32_t, Id) {}

  template <typename Id>
  CUTLASS_DEVICE static void sync(uint32_t num_threads, Id id) {
    some_are_late();
    NamedBarrier::sync(num_threads, id);
    some_are_late();
  }
};

}  // namespace arch
}  // namespace cutlass

#define PipelineAsync FencedPipelineAsync
#include <flashinfer/attention/hopper/kernel_traits.cuh>
#undef PipelineAsync
#define NamedBarrier EpilogueNamedBarrier
#include <flashinfer/attention/hopper/epilogue.cuh>
#undef NamedBarrier

namespace flashinfer {

// Outputs lie where values of the block's next tile go. These may come when the last warp is at that tile: up to heads
// of 128 it waits for the others in front of its first GEMM, beyond here.
template <typename Traits>
struct OrderedEpilogue : CollectiveEpilogue<Traits> {
  template <typename... Given>
  CUTLASS_DEVICE void store(Given&&... given) {
    CollectiveEpilogue<Traits>::store(static_cast<Given&&>(given)...);
    if constexpr (Traits::HEAD_DIM_VO > 128) {
      cutlass::arch::NamedBarrier::sync(Traits::NUM_MMA_THREADS, cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);
    }
  }
};

}  // namespace flashinfer

#define CollectiveEpilogue OrderedEpilogue
#include <flashinfer/attention/hopper/prefill_sm90.cuh>
#undef CollectiveEpilogue

using namespace flashinfer;

#include "variant.h"

namespace {

using Number = std::conditional_t<HALF, cutlass::half_t, cutlass::bfloat16_t>;

// What FlashInfer's kernel is called with; names are its own.
struct Params {
  using DTypeQ = Number;
  using DTypeKV = Number;
  using DTypeO = Number;
  using IdType = int32_t;
  struct AdditionalParams {
    float* sink;
    double sm_scale;
  };

  Number *q_ptr, *k_ptr, *v_ptr, *o_ptr;
  float* lse_ptr;
  int32_t *work_indptr, *qo_tile_indices, *qo_indptr, *kv_indptr, *qo_lens, *kv_lens, *head_indices, *batch_indices;
  int32_t* kv_indices;
  AdditionalParams additional_params;
  int64_t q_stride_n, k_stride_n, v_stride_n, o_stride_n, q_stride_h, k_stride_h, v_stride_h, o_stride_h;
  int64_t k_page_stride, v_page_stride, nnz_qo, nnz_kv;
  int num_qo_heads, num_kv_heads, page_size, window_left;
};

constexpr int kTile = VALUE_DIM == 64 ? 192 : 128;  // rows of a tile, by prefill_sm90.cuh
constexpr int kRowCost = 2;                         // of a row of a tile, in positions that a tile attends to

}  // namespace

// The tiles of each block, so that all have about as much to do: ``list`` [blocks + 1 + 7 * tiles] holds where each block's
// begin, and of every tile its number in the sequence, the first row and key of the sequence, its rows and positions, the
// head and the sequence. ``first_rows``, ``first_keys`` [batch + 1] and ``kv_lens`` [batch]; all on the host. 0, or -1 where
// the list has no room for just these tiles.
extern "C" int fa3_prefill_plan(const int* first_rows, const int* first_keys, const int* kv_lens, int* list, int batch,
                                int num_heads, int num_blocks, int num_tiles) {
  std::vector<int> longest_first(batch);
  std::iota(longest_first.begin(), longest_first.end(), 0);
  std::stable_sort(longest_first.begin(), longest_first.end(), [&](int a, int b) { return kv_lens[a] > kv_lens[b]; });

  struct Tile {
    int block, number, head, sequence;
  };
  std::vector<Tile> tiles;
  tiles.reserve(num_tiles);
  using Load = std::pair<int64_t, int>;  // of a block
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> least;
  for (int block = 0; block < num_blocks; block++) least.push({0, block});
  for (int head = 0; head < num_heads; head++) {
    for (int sequence : longest_first) {
      const int rows = first_rows[sequence + 1] - first_rows[sequence], before = kv_lens[sequence] - rows;
      for (int number = (rows + kTile - 1) / kTile - 1; number >= 0; number--) {
        const auto [load, block] = least.top();
        least.pop();
        least.push({load + kRowCost * kTile + before + std::min((number + 1) * kTile, rows), block});
        tiles.push_back({block, number, head, sequence});
      }
    }
  }
  if (static_cast<int>(tiles.size()) != num_tiles) return -1;

  std::fill(list, list + num_blocks + 1, 0);
  for (const Tile& tile : tiles) list[tile.block + 1]++;
  std::partial_sum(list, list + num_blocks + 1, list);
  std::vector<int> next(list, list + num_blocks);
  int* const of_tiles = list + num_blocks + 1;
  for (const Tile& tile : tiles) {
    const int s = tile.sequence, at = next[tile.block]++;
    const int fields[] = {tile.number, first_rows[s], first_keys[s], first_rows[s + 1] - first_rows[s], kv_lens[s], tile.head, s};
    for (int i = 0; i < 7; i++) of_tiles[i * num_tiles + at] = fields[i];
  }
  return 0;
}

// ``out`` of ``q`` [rows, heads, dim] by a ``list`` as above, on the device. ``sizes``: blocks, tiles, rows, heads, KV heads,
// keys, positions of a page, window (-1: none), and of q, out, keys and values the strides of a row, of a head and, of
// ``keys`` and ``values``, of a page. ``pages`` are those of all sequences, one behind the other. A cudaError or 0.
extern "C" int fa3_prefill(const void* q, const void* keys, const void* values, void* out, const void* pages,
                           const void* list, const void* sinks, const int64_t* sizes, double scale, void* stream) {
  Params p = {};
  p.q_ptr = static_cast<Number*>(const_cast<void*>(q)), p.k_ptr = static_cast<Number*>(const_cast<void*>(keys));
  p.v_ptr = static_cast<Number*>(const_cast<void*>(values)), p.o_ptr = static_cast<Number*>(out);
  p.kv_indices = static_cast<int32_t*>(const_cast<void*>(pages));
  p.additional_params = {static_cast<float*>(const_cast<void*>(sinks)), scale};
  const int64_t blocks = sizes[0], tiles = sizes[1];
  p.nnz_qo = sizes[2], p.num_qo_heads = sizes[3], p.num_kv_heads = sizes[4], p.nnz_kv = sizes[5];
  p.page_size = sizes[6], p.window_left = sizes[7];
  p.q_stride_n = sizes[8], p.q_stride_h = sizes[9], p.o_stride_n = sizes[10], p.o_stride_h = sizes[11];
  p.k_stride_n = sizes[12], p.k_stride_h = sizes[13], p.k_page_stride = sizes[14];
  p.v_stride_n = sizes[15], p.v_stride_h = sizes[16], p.v_page_stride = sizes[17];
  p.work_indptr = static_cast<int32_t*>(const_cast<void*>(list));
  int32_t** const fields[] = {&p.qo_tile_indices, &p.qo_indptr,    &p.kv_indptr,    &p.qo_lens,
                              &p.kv_lens,         &p.head_indices, &p.batch_indices};
  for (int i = 0; i < 7; i++) *fields[i] = p.work_indptr + blocks + 1 + i * tiles;
  if constexpr (PAGED) {
    return BatchPrefillWithPagedKVCacheDispatched<KEY_DIM, VALUE_DIM, MaskMode::kCausal, WINDOWED, false, Variant>(
        p, false, static_cast<cudaStream_t>(stream));
  } else {
    return BatchPrefillWithRaggedKVCacheDispatched<KEY_DIM, VALUE_DIM, MaskMode::kCausal, WINDOWED, false, Variant>(
        p, false, static_cast<cudaStream_t>(stream));
  }
}
