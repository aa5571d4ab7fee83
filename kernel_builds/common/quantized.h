// How the weights of linear layers are kept in fewer bits than their input has.
#pragma once

namespace flashcell {

// kInt8, kFp8 (float8_e4m3fn, on CUDA only): a value for each weight, and a factor in fp32 for each
// row.
//
// kInt4: a row is groups of kInt4Group weights, K / kInt4Group of them. A group is 16 bytes: byte i
// has weight i in its low four bits and weight 16 + i in its high four, both plus 8. Each group has
// a factor in bf16.
enum class Format { kPlain, kInt8, kFp8, kInt4 };
constexpr int kInt4Group = 32;

}  // namespace flashcell
