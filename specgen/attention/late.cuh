// With LATE, of a test, some warps are late wherever this is called: what then goes wrong is in no order.

#pragma once

__device__ __forceinline__ void some_are_late() {
#ifdef LATE
  const unsigned mixed = (threadIdx.x / 32 + blockIdx.x * 31 + static_cast<unsigned>(clock64()) / 64) * 0x9E3779B9u;
  const unsigned drawn = __shfl_sync(0xffffffff, mixed, 0) >> 16;
  if (drawn % 3 == 0) __nanosleep(drawn & 4095);
#endif
}
