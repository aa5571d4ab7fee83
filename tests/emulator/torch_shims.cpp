// What torch/cuda.h asks of torch's CUDA: tensors are the CPU's, so there is one stream and no
// device: what is made for CUDA is made for the CPU.
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
