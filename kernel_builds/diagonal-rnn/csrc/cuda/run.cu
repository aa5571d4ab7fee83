// The CUDA functions that ops.cpp needs besides the engines.
#include "launch.h"

#include "common/cuda/code.cuh"
#include "common/cuda/sequence_table.cuh"
#include "run.h"

namespace flashcell::cuda {

static Device describe(int index) {
  int major, minor, sms;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index));
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index));
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, index));
  return {major * 10 + minor, find_code(), sms};
}
Device current_device() { return of_current_gpu(&describe); }

void sequence_table(Sequence* table, int64_t S, int64_t T, const void* values, bool is_int32,
                    bool is_cu_seqlens, int64_t x_batch, int64_t x_time, cudaStream_t stream) {
  launch_sequence_table(table, S, T, values, is_int32, is_cu_seqlens, x_batch, x_time, stream);
  check(cudaGetLastError());
}

void set_zero(void* to, int64_t bytes, cudaStream_t stream) {
  check(cudaMemsetAsync(to, 0, size_t(bytes), stream));
}

}  // namespace flashcell::cuda
