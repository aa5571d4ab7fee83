// Chooses the kernel for a call and how the work is split: pure functions of sizes. Every limit
// stands beside the measurement that set it (on one H200, fp32 unless stated). Sizes are BxTxD.
// NOTEBOOK.md, "Measured on a GPU", has the tables.
#pragma once
#include "engine.h"

namespace flashcell::cuda {

// Threads per block of a sequential pass. A row of 128 threads keeps neighbouring channels at the
// same step, which suits memory: GRU forward of 32,768 channels takes 0.279 ms, with 64 threads
// 0.298. Narrow rows use one warp.
constexpr int kWalkThreads = 128, kNarrowThreads = 32;
constexpr int walk_threads(int64_t words) {
  return words % kWalkThreads == 0 || words > 4 * kWalkThreads ? kWalkThreads : kNarrowThreads;
}

// From this many fp32 words on, a thread of a sequential pass has two channels, so that its copies
// are twice as long (8x2048x4096: GRU forward 0.257 ms, 0.279 with one; backward 0.545 and 0.617).
constexpr int64_t kPairedChannels = 24576;

// Number of words in a row of D channels, where a thread takes one fp32 channel or two 16-bit ones.
inline int64_t words_of_row(int64_t D, const Launch& to) {
  return to.dtype != Dtype::kFloat && to.together >= 2 ? D / 2 : D;
}

// How multiple shooting splits time: into enough chunks for two warps on each scheduler of the GPU
// (1x131072x1024 takes 0.614 ms in chunks of 4096, and 0.636 in chunks of 1024, where burn-ins are
// a sixteenth of the work). Chunks of fewer than 32 steps only add burn-ins: 1x4096x32 takes 12.3
// us with 32, 15.8 with 16.
constexpr int64_t kShootThreads = 32768;
constexpr int kShortestChunk = 32;
constexpr int chunk_steps(int64_t T, int64_t words) {
  const int64_t chunks = words > 0 && words < kShootThreads ? kShootThreads / words : 1;
  const int64_t steps = (T + chunks - 1) / chunks;
  return int((steps < kShortestChunk ? kShortestChunk : steps) + 7) / 8 * 8;
}
// The first burn-in suffices for gates whose weights are of a few units (1x4096x32: no chunk starts
// over from 48, some do from 32). The longest is as long as pays: beyond it Newton's method is
// faster.
constexpr int kBurnIn = 48, kLongestBurnIn = 1536;
// 4 roundings of 1.0 in fp32; 1/400 of one in bf16.
constexpr double kTolerance = 5e-7, kTolerance16 = 1e-5;
constexpr int kShootPasses = 3, kNewtonIterations = 16;

// How a linear recurrence runs: sequentially, with every channel on its own; as a scan over tiles
// that exchange their maps; or in chunks that work out their own first carry (backward of cells
// only).
enum class Way { kSequential, kScan, kReach };

// The backward pass runs sequentially when there are enough threads to hide memory latency: GRU of
// 8x2048x4096 takes 0.62 ms, as a scan 0.92; but 1x4096x8192 takes 0.52, as a scan 0.44, in chunks
// of 1024 0.30. Chunks compute every gate once where the scan does twice, but must be long compared
// with their burn-in: 1x131072x1024 takes 1.22 ms in chunks and 1.81 as a scan, 1x16384x128 0.054
// (chunks of 256) and 0.056.
constexpr int64_t kWalkWords = 12288;
constexpr int kReachChunk = 256;
constexpr Way backward_way(int64_t T, int64_t words) {
  if (words >= kWalkWords) return Way::kSequential;
  return chunk_steps(T, words) >= kReachChunk ? Way::kReach : Way::kScan;
}

// For linear_scan: 1x65536x1024 takes 0.30 ms as a scan, 1.8 sequentially; 8x2048x4096 0.30 and
// 0.22.
constexpr int64_t kScanWalkWords = 16384;
constexpr Way scan_way(int64_t words) {
  return words >= kScanWalkWords ? Way::kSequential : Way::kScan;
}

// Whether linear_scan runs by clusters, which are faster than tiles nearly everywhere (fp32 forward
// of 1x65536x1024 196 us instead of 290, of 1x4096x512 8.4 instead of 13.1). The exception is up to
// three columns of 128-byte rows with so many steps that tiles fill the GPU (1x65536x64 takes 50 us
// as tiles, 65 by clusters).
constexpr int kMostBlocks = 8;  // the largest cluster that every GPU with clusters supports
constexpr int64_t kFewColumns = 3, kManySteps = 16384;
constexpr bool takes_clusters(int64_t columns, int64_t T, const Device& device) {
  // These also allow 227 KB per block.
  const bool can = device.code.arch >= 90 && device.arch < 120;
  return can && (columns > kFewColumns || T < kManySteps);
}
// Channels per thread of a scan by clusters, or 0 for tiles. Words are 4 bytes, except in two
// forward cases: 16-bit scans with few steps need more blocks (1x4096x512 5.1 us with one channel,
// 6.5 with two), and fp32 scans with very many steps need longer rows (1x65536x1024 201 us with
// two, 219 with one).
constexpr int64_t kSmallScan = 1 << 22, kLargeScan = 1 << 26;  // channel steps
inline int cluster_channels(int64_t B, int64_t T, int64_t D, bool forward, const Launch& to) {
  const bool is_float = to.dtype == Dtype::kFloat;
  const int word = is_float ? 1 : 2;
  const bool in_pieces = to.together * (is_float ? 4 : 2) >= 16;
  const int64_t columns = B * ((D + 32 * word - 1) / (32 * word)), steps = B * T * D;
  if (!in_pieces || !takes_clusters(columns, T, to.device)) return 0;
  if (!forward) return word;
  return is_float ? (steps >= kLargeScan ? 2 : 1) : (steps < kSmallScan ? 1 : 2);
}
// Blocks in a cluster, with one block per SM. Not all SMs can be used: an H200 holds 15 clusters of
// 8 at a time, 17 of 6, 30 of 4, 39 of 3, 66 of 2, and clusters that do not fit wait for all others
// (1x65536x1024 fp32 forward takes 196 us in clusters of 3, 318 in clusters of 4). The fp32
// backward prefers fewer blocks where L2 cannot hold its tensors (340 us in clusters of 2, 382 of
// 3; bf16 245 of 4, 172 of 6).
constexpr int64_t kSparseSteps = 1 << 22;  // channel steps
constexpr int64_t cluster_blocks(int64_t columns, bool sparse, const Device& device) {
  const int64_t usable = sparse ? device.sms / 2 : device.sms * 3 / 4;
  const int64_t each = columns > 0 ? usable / columns : 1;
  return each < 1 ? 1 : each < kMostBlocks ? each : kMostBlocks;
}

}  // namespace flashcell::cuda
