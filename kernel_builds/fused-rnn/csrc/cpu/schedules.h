// The loop over time that the forward and the backward pass share: both schedules of plan.h.
#pragma once
#include "common/cpu/pack.h"
#include "common/cpu/scratch.h"
#include "plan.h"

namespace flashcell::FLASHCELL_ISA {

// Rows whose products are kept in one tile, in cache, until the cell runs on them.
constexpr int kChunk = 32;

// Returns the steps of all sequences together, a measure of the call's size.
FN int64_t total_steps(const SequenceParams& p) {
  int64_t steps = 0;
  for (int64_t s = 0; s < p.S; ++s) steps += p.sequences[s].length;
  return steps;
}

struct Walk {
  const SequenceParams& p;
  const Host& host;

  bool reset(const Sequence& s, int64_t t) const { return p.reset && p.reset[s.row + t]; }
  bool hold(const Sequence& s, int64_t t) const { return p.hold && p.hold[s.row + t]; }

  // Returns the end of the sequences in [begin, end) that reach step t: a prefix, as they are
  // sorted by length.
  int64_t running(int64_t t, int64_t begin, int64_t end) const {
    while (end > begin && p.sequences[end - 1].length <= t) --end;
    return end;
  }

  // Calls step(head, panel, t, begin, end) for every step t in order; a panel is a block of units.
  template <typename Step>
  void run(const Plan& plan, int64_t panels, bool backward, const Step& step) const {
    const int64_t steps = p.S ? p.sequences[0].length : 0;
    auto at = [&](int64_t i) { return backward ? steps - 1 - i : i; };
    // The backward pass has one more step, t = -1, which completes the gradient of the initial
    // state.
    const int64_t count = steps + (backward && steps ? 1 : 0);
    // Panels are visited forwards and backwards in turn: a cache that holds only part of a thread's
    // weights holds the panels visited last, and finds them again only in reverse order.
    auto turned = [](int64_t i, int64_t k, int64_t begin, int64_t end) {
      return i % 2 ? end - 1 - k : begin + k;
    };
    if (plan.by_task) {
      const int64_t tiles = plan.rows ? (p.S + plan.rows - 1) / plan.rows : 0;
      parallel_for(host, p.N * tiles, [&](int64_t task) {
        const int64_t head = task / tiles, begin = task % tiles * plan.rows;
        const int64_t last = begin + plan.rows < p.S ? begin + plan.rows : p.S;
        for (int64_t s = begin; s < last; s += plan.together) {
          const int64_t end = s + plan.together < last ? s + plan.together : last;
          for (int64_t i = 0; i < count; ++i) {
            const int64_t reach = running(at(i), s, end);
            for (int64_t k = 0; k < panels; ++k) {
              step(head, turned(i, k, 0, panels), at(i), s, reach);
            }
          }
        }
      });
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t end = running(at(i), 0, p.S);
      parallel_ranges(host, p.N * panels, [&](int64_t first, int64_t last) {
        for (int64_t k = 0; k < last - first; ++k) {
          const int64_t task = turned(i, k, first, last);
          step(task / panels, task % panels, at(i), int64_t(0), end);
        }
      });
    }
  }
};

}  // namespace flashcell::FLASHCELL_ISA
