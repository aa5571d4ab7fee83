// The limits that decide whether an engine can run a call, as data: the planner tests them, and
// explain.h prints them.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace flashcell::cuda {

struct Limit {  // holds if used <= limit; otherwise the engine cannot run the call
  const char* name;
  int64_t used, limit;
  const char* unit;

  constexpr bool holds() const { return used <= limit; }
};

template <size_t kCount>
constexpr bool all_hold(const std::array<Limit, kCount>& limits) {
  for (const Limit& limit : limits) {
    if (!limit.holds()) return false;
  }
  return true;
}

}  // namespace flashcell::cuda
