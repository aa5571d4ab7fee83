#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "axpy.h"
#include "common/torch/registration.h"

using torch::stable::Tensor;

#ifdef CUDA_KERNEL
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
#endif

Tensor axpy_op(double a, const Tensor& x, const Tensor& y) {
  STD_TORCH_CHECK(x.numel() == y.numel(), "x has ", x.numel(), " elements, y ", y.numel());
  Tensor out = torch::stable::clone(y);
  void* stream = nullptr;
#ifdef CUDA_KERNEL
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
#endif
  axpy(static_cast<float>(a), static_cast<const float*>(x.data_ptr()),
       static_cast<float*>(out.data_ptr()), x.numel(), stream);
  return out;
}

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, library) {
  library.def("axpy(float a, Tensor x, Tensor y) -> Tensor");
}
#ifdef CUDA_KERNEL
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, library) {
#else
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, library) {
#endif
  library.impl("axpy", TORCH_BOX(&axpy_op));
}
REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
