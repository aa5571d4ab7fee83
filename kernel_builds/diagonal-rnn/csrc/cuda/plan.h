// Which kernel runs a call, and how it is cut: pure functions of sizes. Every limit stands beside
// the measurement that set it (one H200, fp32 unless said). The tables: NOTEBOOK.md,
// "Measured on a GPU".
#pragma once
#include "engine.h"

namespace flashcell::cuda {

// Threads of a walk. A row of 128 threads keeps neighbouring channels at one time, which memory
// likes: GRU forward of 32,768 channels 0.279 ms, with 64 threads 0.298. Narrow rows take a warp.
constexpr int kWalkThreads = 128, kNarrowThreads = 32;
constexpr int walk_threads(int64_t words) {
  return words % kWalkThreads == 0 || words > 4 * kWalkThreads ? kWalkThreads : kNarrowThreads;
}

// fp32 channels of a thread of a walk: two, whose copies are twice as long, where threads enough
// are left (8x2048x4096: GRU forward 0.257 ms for 0.279 with one, backward 0.545 for 0.617).
constexpr int64_t kPairedChannels = 24576;

// Threads of which each takes one fp32 channel or two of 16 bits of a row.
inline int64_t words_of_row(int64_t D, const Launch& to) {
  return to.dtype != Dtype::kFloat && to.together >= 2 ? D / 2 : D;
}

// How shoot cuts time. Chunks enough for two warps on each scheduler of the chip: 1x131072x1024
// takes 0.614 ms in chunks of 4096, 0.636 in chunks of 1024, whose burn-ins are a sixteenth of the
// work. A chunk of fewer than 32 steps only adds burn-ins: 1x4096x32 takes 12.3 us with 32, 15.8
// with 16.
constexpr int64_t kShootThreads = 32768;
constexpr int kShortestChunk = 32;
constexpr int chunk_steps(int64_t T, int64_t words) {
  const int64_t chunks = words > 0 && words < kShootThreads ? kShootThreads / words : 1;
  const int64_t steps = (T + chunks - 1) / chunks;
  return int((steps < kShortestChunk ? kShortestChunk : steps) + 7) / 8 * 8;
}
// The first burn-in is long enough for gates of a few units (1x4096x32: none starts over from 48,
// some do from 32), the last as long as pays: past it, settling is Newton's method's.
constexpr int kBurnIn = 48, kLongestBurnIn = 1536;
constexpr double kTolerance = 5e-7, kTolerance16 = 1e-5;  // 4 roundings of 1, 1/400 of one in bf16
constexpr int kShootPasses = 3, kNewtonIterations = 16;

// How a linear recurrence runs: every channel alone, tiles that tell each other, or chunks that
// work out their first carry (the backward of cells only).
enum class Way { kSequential, kScan, kReach };

// The backward walks when there are threads enough to hide memory's latency: GRU of 8x2048x4096
// 0.62 ms, as a scan 0.92, but 1x4096x8192 0.52 against 0.44 and, in chunks of 1024, 0.30. Chunks
// compute every gate once where the scan does twice; they have to be long against their burn-in:
// 1x131072x1024 1.22 ms in chunks and 1.81 as a scan, 1x16384x128 0.054 (chunks of 256) and 0.056.
constexpr int64_t kWalkWords = 12288;
constexpr int kReachChunk = 256;
constexpr Way backward_way(int64_t T, int64_t words) {
  if (words >= kWalkWords) return Way::kSequential;
  return chunk_steps(T, words) >= kReachChunk ? Way::kReach : Way::kScan;
}

// linear_scan: 1x65536x1024 0.30 ms as a scan, 1.8 as a walk; 8x2048x4096 0.30 against 0.22.
constexpr int64_t kScanWalkWords = 16384;
constexpr Way scan_way(int64_t words) {
  return words >= kScanWalkWords ? Way::kSequential : Way::kScan;
}

// linear_scan by clusters, which beat its tiles nearly everywhere (fp32 forward of 1x65536x1024 196
// us for 290, of 1x4096x512 8.4 for 13.1), but for three columns of 128-byte rows and fewer when
// there are so many steps that tiles occupy the chip (1x65536x64 50 us as tiles, 65 by clusters).
constexpr int kMostBlocks = 8;  // of a cluster, on every GPU that has them
constexpr int64_t kFewColumns = 3, kManySteps = 16384;
constexpr bool takes_clusters(int64_t columns, int64_t T, const Device& device) {
  const bool can = device.code.arch >= 90 && device.arch < 120;  // and 227 KB for a block
  return can && (columns > kFewColumns || T < kManySteps);
}
// Channels of a thread of such a scan, or 0 for tiles. Words of 4 bytes but forward, where few
// steps of 16 bits want more blocks (1x4096x512 5.1 us with one channel, 6.5 with two) and very
// many of fp32 longer rows (1x65536x1024 201 us with two, 219 with one).
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
// Blocks of a cluster, one on an SM. Not all SMs can be had: an H200 holds 15 clusters of 8, 17 of
// 6, 30 of 4, 39 of 3, 66 of 2 at a time, and what does not fit waits for all the others
// (1x65536x1024 fp32 forward by 3 196 us, by 4 318). The fp32 backward likes fewer where L2 does
// not hold its tensors (by 2 340 us, by 3 382; in bf16 by 4 245, by 6 172).
constexpr int64_t kSparseSteps = 1 << 22;  // channel steps
constexpr int64_t cluster_blocks(int64_t columns, bool sparse, const Device& device) {
  const int64_t usable = sparse ? device.sms / 2 : device.sms * 3 / 4;
  const int64_t each = columns > 0 ? usable / columns : 1;
  return each < 1 ? 1 : each < kMostBlocks ? each : kMostBlocks;
}

}  // namespace flashcell::cuda
