// Emulates the functions of torch's CUDA that torch/cuda.h needs. Tensors are on the CPU, so there
// is one stream and no device, and CUDA allocations are CPU allocations.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

extern "C" {
int32_t aoti_torch_device_type_cuda() { return aoti_torch_device_type_cpu(); }
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = nullptr;
  return AOTI_TORCH_SUCCESS;
}
}
