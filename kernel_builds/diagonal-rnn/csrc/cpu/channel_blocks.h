// What both directions share: the sequences cut into blocks of channels, one block per task. A task
// walks through time alone; inside a step its channels follow each other in memory, and as no
// channel waits for another, the next vectors hide the latency of the one before.
#pragma once
#include "../params.h"
#include "common/cpu/load_store.h"
#include "common/cpu/scratch.h"

namespace flashcell::FLASHCELL_ISA {

constexpr int64_t kWidest = 1024;    // channels of a task: weights and states stay in 48 KB
constexpr int64_t kNarrowest = 64;   // below this a row of x is hardly a line of the cache
constexpr int64_t kFewSteps = 4096;  // channel steps of 20 us: less is not worth another thread

template <bool kValue>
struct Constant {
  static constexpr bool value = kValue;
};

struct Block {
  const Sequence& s;
  int64_t begin, end;  // channels, of one head
  int64_t head;
};

struct Walk {
  const SequenceParams& p;
  const Host& host;

  bool reset(const Sequence& s, int64_t t) const { return p.reset && p.reset[s.row + t]; }
  bool hold(const Sequence& s, int64_t t) const { return p.hold && p.hold[s.row + t]; }

  // body(block) for every block. What is computed does not depend on how they are cut.
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
    parallel_for(host, workers, [&](int64_t worker) {  // in turns: the longest come first
      for (int64_t i = worker; i < tasks; i += workers) {
        const int64_t head = i % blocks / blocks_of_head(), last = (head + 1) * p.J;
        const int64_t begin = head * p.J + i % blocks_of_head() * width;
        body(Block{p.sequences[i / blocks], begin, begin + width < last ? begin + width : last,
                   head});
      }
    });
  }
};

// body(channel, lanes, whole) for each vector of [begin, end); `whole` is a compile-time constant.
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
