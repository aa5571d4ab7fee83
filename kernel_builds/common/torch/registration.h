// Registers the ops of a kernel: macros that expand the op namespace before torch concatenates it,
// and an importable, empty Python module that loads the registrations.
//
// The module uses Python's limited API (3.9). Its four types are declared here, as PEP 384 froze
// them, because Python.h is a separate package on many machines (python3-dev) and nothing else in a
// kernel needs it. HF's kernel-builder generates a file of this name with these macros.
#pragma once

#define STABLE_TORCH_LIBRARY_EXPAND(name, library) STABLE_TORCH_LIBRARY(name, library)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(name, key, library) \
  STABLE_TORCH_LIBRARY_IMPL(name, key, library)

#if defined(CUDA_KERNEL)
#define FLASHCELL_DEVICE CUDA
#else
#define FLASHCELL_DEVICE CPU
#endif

// FLASHCELL_IMPLEMENT(implement(ops)) registers the ops for tensors of this device. Tensors of
// other devices and layouts, and mixtures, are dispatched to the same functions: these reject them
// with an error that names the argument, while the dispatcher's own error would name none. Nested
// tensors need a registration of their own, because no composite key includes them.
#define FLASHCELL_IMPLEMENT_FOR(key, ...) \
  STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, key, ops) { __VA_ARGS__; }
#define FLASHCELL_IMPLEMENT(...)                                                        \
  FLASHCELL_IMPLEMENT_FOR(FLASHCELL_DEVICE, __VA_ARGS__)                                \
  FLASHCELL_IMPLEMENT_FOR(CompositeExplicitAutograd, __VA_ARGS__)                       \
  FLASHCELL_IMPLEMENT_FOR(FLASHCELL_PASTE(NestedTensor, FLASHCELL_DEVICE), __VA_ARGS__) \
  FLASHCELL_IMPLEMENT_FOR(NestedTensorMeta, __VA_ARGS__)                                \
  FLASHCELL_IMPLEMENT_FOR(AutogradNestedTensor, __VA_ARGS__)

namespace flashcell::python {

struct Object {
  long reference_count;  // Py_ssize_t
  void* type;
};

struct ModuleDefBase {
  Object object;
  Object* (*init)();
  long index;
  Object* copy;
};

struct ModuleDef {
  ModuleDefBase base;
  const char* name;
  const char* doc;
  long size;
  void* methods;
  void* slots;
  void* traverse;
  void* clear;
  void* free;
};

extern "C" Object* PyModule_Create2(ModuleDef* definition, int api_version);

constexpr int kLimitedApiVersion = 3;  // PYTHON_ABI_VERSION

}  // namespace flashcell::python

#define FLASHCELL_PASTE_(a, b) a##b
#define FLASHCELL_PASTE(a, b) FLASHCELL_PASTE_(a, b)
#define FLASHCELL_STRING_(a) #a
#define FLASHCELL_STRING(a) FLASHCELL_STRING_(a)

// Defines PyInit_<extension>, the one symbol the library exports.
#define REGISTER_EXTENSION(extension)                                                           \
  extern "C" __attribute__((visibility("default"))) flashcell::python::Object* FLASHCELL_PASTE( \
      PyInit_, extension)() {                                                                   \
    static flashcell::python::ModuleDef module = {{{1, nullptr}, nullptr, 0, nullptr},          \
                                                  FLASHCELL_STRING(extension),                  \
                                                  nullptr,                                      \
                                                  0,                                            \
                                                  nullptr,                                      \
                                                  nullptr,                                      \
                                                  nullptr,                                      \
                                                  nullptr,                                      \
                                                  nullptr};                                     \
    return flashcell::python::PyModule_Create2(&module, flashcell::python::kLimitedApiVersion); \
  }
