// Splits the sequences into blocks of channels, one block per task, for both directions. A task
// runs through time without synchronising. Within a step its channels are contiguous in memory, and
// as channels are independent, the next vectors hide the latency of the one before.
#pragma once
#include "../params.h"
#include "common/cpu/load_store.h"
#include "common/cpu/scratch.h"

namespace flashcell::FLASHCELL_ISA {

constexpr int64_t kWidest = 1024;  // most channels of a task: weights and states then stay in 48 KB
// Fewest channels: below this a row of x is hardly one cache line.
constexpr int64_t kNarrowest = 64;
constexpr int64_t kFewSteps = 4096;  // channel steps, some 20 us: less is not worth another thread

template <bool kValue>
struct Constant {
  static constexpr bool value = kValue;
};

struct Block {
  const Sequence& s;
  int64_t begin, end;  // channels of the block, all in one head
  int64_t head;
};

struct Walk {
  const SequenceParams& p;
  const Host& host;

  bool reset(const Sequence& s, int64_t t) const { return p.reset && p.reset[s.row + t]; }
  bool hold(const Sequence& s, int64_t t) const { return p.hold && p.hold[s.row + t]; }

  // Calls body(block) for every block. Results do not depend on how the channels are split.
  template <typename Body>
  void run(const Body& body) const {
    int64_t steps = 0;
    for (int64_t i = 0; i < p.S; ++i) steps += p.sequences[i].length + p.sequences[i].padding;
    const int64_t useful = steps * p.D / kFewSteps + 1;
    const int64_t threads = useful < host.threads ? useful : host.threads;
    const int64_t heads = p.D > 0 ? p.D / p.J : 0;
    int64_t width = kWidest;
    const auto blocks_of_head = [&] { return (p.J + width - 1) / width; };
    while (width > kNarrowest && p.S * heads * blocks_of_head() < 4 * threads) width /= 2;
    const int64_t blocks = heads * blocks_of_head(), tasks = p.S * blocks;
    const int64_t workers = threads < tasks ? threads : tasks;
    // Workers take blocks in turn, because the longest sequences come first.
    parallel_for(host, workers, [&](int64_t worker) {
      for (int64_t i = worker; i < tasks; i += workers) {
        const int64_t head = i % blocks / blocks_of_head(), last = (head + 1) * p.J;
        const int64_t begin = head * p.J + i % blocks_of_head() * width;
        body(Block{p.sequences[i / blocks], begin, begin + width < last ? begin + width : last,
                   head});
      }
    });
  }
};

// Calls body(channel, lanes, whole) for each vector of [begin, end); `whole` is a compile-time
// constant.
template <typename T, typename Body>
FN void for_vectors(int64_t begin, int64_t end, const Body& body) {
  constexpr int kWidth = Vec<T>::kWidth;
  int64_t c = begin;
  for (; c + kWidth <= end; c += kWidth) body(c, kWidth, Constant<true>());
  if (c < end) body(c, int(end - c), Constant<false>());
}

template <typename T>
FN void fill_zero(T* row, int64_t begin, int64_t end) {
  memset((void*)(row + begin), 0, (end - begin) * sizeof(T));
}

}  // namespace flashcell::FLASHCELL_ISA
