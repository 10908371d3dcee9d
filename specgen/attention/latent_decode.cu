// FlashInfer's FlashAttention 3 for absorbed latents: one kernel of its template.
//
// FlashInfer compiles it together with those of other masks. HALF: numbers are float16, else bfloat16.

#include <cutlass/arch/barrier.h>
#include <flashinfer/attention/hopper.cuh>
#include <flashinfer/attention/mla.cuh>
#include <flashinfer/attention/mla_params.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/variant_helper.cuh>

#include "late.cuh"

namespace flashinfer {

// Latents are written by cp.async, and probabilities by stores, in the generic proxy, and products read them in the async
// proxy: PTX wants a fence between the two, which FlashInfer 0.6 and 0.7 leave out. Here its header takes this function.
__device__ __forceinline__ void fenced_warpgroup_arrive() {
  some_are_late();
  cutlass::arch::fence_view_async_shared();
  warpgroup_arrive();
}

}  // namespace flashinfer

#define warpgroup_arrive fenced_warpgroup_arrive
#include <flashinfer/attention/mla_hopper.cuh>
#undef warpgroup_arrive

using namespace flashinfer;

// ``out`` [rows, heads, RANK] of ``q`` [rows, heads, RANK + ROPE_DIM] by a ``list`` of latent_plan.cu, all on the device.
// ``parts`` and ``sums`` have room for what the list merges. ``sizes``: blocks of a cluster, clusters, heads, positions of a
// page, the strides of a row and of a head of q, and of a page and a position of ``latents``, then where in ``list`` each
// section begins that FlashInfer reads. A cudaError or 0.
extern "C" int latent_decode(const void* q, const void* latents, const int32_t* tables, void* out, int32_t* list,
                             void* parts, float* sums, const int64_t* sizes, double scale, void* stream) {
  using Number = std::conditional_t<HALF, half, nv_bfloat16>;
  MLAParams<Number, Number, Number, int32_t> p = {};
  p.q_nope = static_cast<Number*>(const_cast<void*>(q)), p.q_pe = p.q_nope + RANK;
  p.ckv = static_cast<Number*>(const_cast<void*>(latents)), p.kpe = p.ckv + RANK;
  p.kv_indices = const_cast<int32_t*>(tables);
  p.final_o = static_cast<Number*>(out), p.partial_o = static_cast<Number*>(parts), p.partial_lse = sums;
  const uint32_t num_heads = sizes[2];
  p.num_heads = num_heads, p.block_size = static_cast<uint32_t>(sizes[3]);
  p.q_nope_stride_n = p.q_pe_stride_n = sizes[4], p.q_nope_stride_h = p.q_pe_stride_h = sizes[5];
  p.ckv_stride_page = p.kpe_stride_page = sizes[6], p.ckv_stride_n = p.kpe_stride_n = sizes[7];
  p.o_stride_n = num_heads * RANK, p.o_stride_h = RANK;
  p.sm_scale = scale;
  int32_t** const sections[] = {&p.q_indptr,
                                &p.kv_indptr,
                                &p.partial_indptr,
                                &p.q_len,
                                &p.kv_len,
                                &p.q_start,
                                &p.kv_start,
                                &p.kv_end,
                                &p.work_indptr,
                                &p.merge_packed_offset_start,
                                &p.merge_packed_offset_end,
                                &p.merge_partial_packed_offset_start,
                                &p.merge_partial_packed_offset_end,
                                &p.merge_partial_stride};
  for (int i = 0; i < 14; i++) *sections[i] = list + sizes[8 + i];
  return mla::BatchMLAPageAttentionHopper<MaskMode::kCausal, RANK, ROPE_DIM>(p, sizes[0], sizes[1],
                                                                             static_cast<cudaStream_t>(stream));
}
