// FLASHCELL_OP(schema, function) wraps a function as an op that torch calls. Before the op's own
// checks, every tensor is checked, under its name in the schema: it must be a plain tensor on the
// op's device, where the others are, inside a storage that holds it. A tensor that the schema marks
// as changed, Tensor(a!), must share memory with no other, and autograd is told of the change.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <limits>
#include <new>
#include <optional>
#include <utility>

#include "common/torch/arguments.h"
#include "common/torch/checks.h"

namespace flashcell {

#if defined(CUDA_KERNEL)
inline constexpr const char* kDeviceName = "a CUDA device";
inline int32_t own_device_type() { return aoti_torch_device_type_cuda(); }
#else
inline constexpr const char* kDeviceName = "the CPU";
inline int32_t own_device_type() { return aoti_torch_device_type_cpu(); }
#endif

// The arguments of one call, which are checked one after another.
class Validator {
 public:
  // `changes_any` says whether the op changes any of the arguments.
  Validator(const std::vector<Argument>& arguments, bool changes_any)
      : arguments_(arguments), changes_any_(changes_any) {}

  template <typename T>
  void take(const T& value) {
    const Argument& argument = arguments_[index_++];
    if constexpr (std::is_same_v<T, Tensor>) {
      check(value, {argument});
    } else if constexpr (std::is_same_v<T, OptionalTensor>) {
      if (value) check(*value, {argument});
    } else if constexpr (std::is_same_v<T, std::vector<Tensor>>) {
      for (size_t i = 0; i < value.size(); ++i) check(value[i], {argument, int64_t(i)});
    }
  }

  // Called after the last argument: no tensor that is changed may overlap another one.
  void close() const {
    for (const Span& changed : spans_) {
      if (!changed.is_changed) continue;
      for (const Span& other : spans_) {
        STD_TORCH_CHECK(
            &other == &changed || other.begin >= changed.end || changed.begin >= other.end,
            changed.name, " is changed in place, so it must not share memory with ", other.name);
      }
    }
  }

  std::string first() const { return first_ ? first_->text() : ""; }

 private:
  // An argument, or an entry of one that is a list. Its text is made for an error only.
  struct Name {
    const Argument& argument;
    int64_t entry = -1;

    std::string text() const {
      return entry < 0 ? argument.name : argument.name + "[" + std::to_string(entry) + "]";
    }
  };
  struct Span {
    std::string name;
    bool is_changed;
    const char *begin, *end;
  };

  static constexpr int64_t kMostOfOne = std::numeric_limits<int32_t>::max();
  // The most bytes that a process can address.
  static constexpr int64_t kMostBytes = int64_t(1) << 47;

  const std::vector<Argument>& arguments_;
  size_t index_ = 0;
  bool changes_any_;
  int32_t device_index_ = -1;  // device of the first tensor
  std::optional<Name> first_;
  std::vector<Span> spans_;  // memory of non-empty tensors, if the op changes any

  void check(const Tensor& tensor, const Name& name) {
    TensorView view;
    STD_TORCH_CHECK(view.read(tensor), name.text(),
                    " must be a strided tensor, not a sparse, mkldnn, nested or quantized one");
    check_device(tensor, name);
    const int64_t bytes = check_memory(tensor, view, name);
    if (bytes > 0 && changes_any_) {
      const char* begin = (const char*)tensor.const_data_ptr();
      spans_.push_back({name.text(), name.argument.is_changed, begin, begin + bytes});
    }
    if (name.argument.is_changed) mark_changed(tensor, name.text().c_str());
  }

  void check_device(const Tensor& tensor, const Name& name) {
    int32_t type = 0, index = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &index));
    if (!first_) {
      STD_TORCH_CHECK(type == own_device_type(), name.text(), " must be on ", kDeviceName);
      device_index_ = index, first_.emplace(name);
    }
    STD_TORCH_CHECK(type == own_device_type() && index == device_index_, name.text(),
                    " must be on the device of ", first());
  }

  // Returns the number of bytes from the first element to the end of the last.
  static int64_t check_memory(const Tensor& tensor, const TensorView& view, const Name& name) {
    const int64_t width = tensor.element_size(), offset = tensor.storage_offset();
    int64_t bytes = width, end = 1, stored = 0;
    for (int64_t i = 0; i < view.rank; ++i) {
      STD_TORCH_CHECK(view.sizes[i] <= kMostOfOne, name.text(),
                      " must have sizes below 2^31, got shape ", to_string(shape_of(tensor)));
      if (view.sizes[i] == 0) return 0;
    }
    for (int64_t i = 0; i < view.rank; ++i) {
      const bool fits = !__builtin_mul_overflow(bytes, view.sizes[i], &bytes) && bytes < kMostBytes;
      STD_TORCH_CHECK(fits, name.text(), " must have fewer elements, got shape ",
                      to_string(shape_of(tensor)));
      end += (view.sizes[i] - 1) * view.strides[i];
    }
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &stored));
    STD_TORCH_CHECK(offset >= 0 && (offset + end) * width <= stored, name.text(),
                    " must lie within its storage, but reaches to byte ", (offset + end) * width,
                    " of ", stored, ": was it freed or made smaller?");
    return end * width;
  }

  // Copies the tensor onto itself, which moves nothing but is a change for autograd: it raises the
  // version, and is refused for a leaf that requires a gradient, as every in-place change is.
  static void mark_changed(const Tensor& tensor, const char* name) {
    if (aoti_torch_grad_mode_is_enabled()) check_is_leaf(tensor, name);
    STD_TORCH_CHECK(
        !aoti_torch_copy_(tensor.get(), tensor.get(), 0), name,
        " is changed in place, so it must not be a leaf that requires a gradient, nor a "
        "tensor of inference mode outside of that mode");
  }

  static void check_is_leaf(const Tensor& tensor, const char* name) {
    std::array<StableIValue, 1> stack{torch::stable::detail::from(tensor)};
    TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("aten::is_leaf", "", stack.data(), TORCH_ABI_VERSION));
    STD_TORCH_CHECK(torch::stable::detail::to<bool>(stack[0]), name,
                    " is changed in place without a gradient, so it must not require one");
  }
};

template <const auto& kSchema, auto kFunction>
struct Op;

template <const auto& kSchema, typename Result, typename... Arguments,
          Result (*kFunction)(Arguments...)>
struct Op<kSchema, kFunction> {
  static auto boxed() {
    // GCC 12 does not see its use below.
    [[maybe_unused]] Result (*const used)(Arguments...) = &call;
    return &torch::stable::detail::boxer<Result(Arguments...), &call>::boxed_fn;
  }

  static Result call(Arguments... arguments) {
    static const std::vector<Argument> names = arguments_of(kSchema);
    static const bool changes_any =
        std::any_of(names.begin(), names.end(), [](const Argument& a) { return a.is_changed; });
    Validator validator(names, changes_any);
    (validator.take(arguments), ...);
    validator.close();
    try {
      return kFunction(std::move(arguments)...);
    } catch (const std::bad_alloc&) {
      STD_TORCH_CHECK(false, "not enough memory for ", validator.first(), " of this shape");
    }
  }
};

#define FLASHCELL_OP(schema, ...) flashcell::Op<schema, &__VA_ARGS__>::boxed()

}  // namespace flashcell
