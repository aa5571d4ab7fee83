// Runs an emulated kernel: a fiber for every CUDA thread of a block, block after block.
//
// A fiber runs until it waits: at a barrier of the block, or in a collective of its warp (a
// shuffle, ldmatrix, mma), whose results the last lane to arrive computes for all 32. A warp runs
// up to a barrier before the next warp starts. If warps ran in lockstep instead, a collective could
// stand in for a missing barrier. README.md says what this models and what it does not.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <vector>

namespace emulator {

constexpr int kWarpSize = 32;

// The options in the environment variable FLASHCELL_EMULATOR, read at every launch: words from
// `backwards` (threads and blocks run last first), `early` (a copy lands when it is issued, not
// when it is waited for), `arch=<90 for 9.0>`, `code=<80: compiled for 8.0; 90 or 90a; 0: for no
// such GPU; the default is arch>`, `processors=<number of SMs>` and `shared=<KB of a block>`.
struct Options {
  bool backwards = false, early = false;
  int arch = 90, code = -1, processors = 132, shared_bytes = 227 << 10;  // the values of an H200
  bool sm_90a = false;  // whether the code has the instructions of 9.0a
};
Options read_options();
int current_gpu();  // index of the GPU: every set of options is a GPU of its own

struct Index {  // one-dimensional
  unsigned x = 0;
};

struct Copy {  // a cp.async; without a source it writes `bytes` zeros
  uint32_t to;
  const void* from;
  int bytes;
};

struct Thread {
  char* stack = nullptr;
  void* stack_pointer = nullptr;
  bool alive = false;
  std::vector<Copy> issued;                     // since the last commit
  std::deque<std::vector<Copy>> pending;        // committed groups, oldest first
  std::vector<std::function<void()>> products;  // wgmma products, as for copies
  std::deque<std::vector<std::function<void()>>> running;
};

struct Warp {
  int arrived = 0;
  uint64_t generation = 0;        // counts the collectives that the warp has completed
  const void* kind = nullptr;     // the collective in which the lanes wait
  uint32_t given[kWarpSize][10];  // words that each lane passes; mma passes the most
  uint32_t answer[kWarpSize][4];
};

struct Machine {
  Options options;
  Index thread, block, block_size, grid_size;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::function<void()> body;                  // the kernel and its arguments
  std::deque<std::function<void()>> landings;  // landings of copies that a barrier waits for
  char* shared = nullptr;                      // dynamic shared memory of the block
  uint32_t shared_bytes = 0;
  void* main_stack = nullptr;
  unsigned alive = 0, at_barrier = 0;
  uint64_t barriers = 0, idle = 0;  // `idle` counts switches since anything last happened
  struct {
    unsigned arrived = 0;
    uint64_t generation = 0;
  } named[16];  // barriers among some of the threads
  const char* failure = nullptr;

  int lane() const { return int(thread.x % kWarpSize); }
  Warp& warp() { return warps[thread.x / kWarpSize]; }
};
extern Machine machine;

// Runs the kernel, or throws an error that says what the kernel did wrong.
void launch(const void* kernel, unsigned blocks, unsigned threads, size_t shared_bytes,
            std::function<void()> body);
// Sets the dynamic shared memory that a kernel may use beyond 48 KB; false if there is not so much.
bool allow_shared(const void* kernel, int bytes);

// ---- Actions of threads ----

[[noreturn]] void fail(const char* what);  // ends the launch
// Switches to the next of `count` threads, from `first` on, that has not returned.
void yield(unsigned first, unsigned count);
void yield_to_block();
void barrier();  // waits for all threads of the block that have not returned
void barrier(int name, unsigned threads);
void arrive(int name, unsigned threads);  // at such a barrier, without waiting
char* shared_at(uint32_t address, int bytes);
void issue_copy(const Copy& copy);
void commit_copies();
void wait_copies(int pending);
// arrive_after_copies records the thread's copies since the last commit, and what to do when they
// have landed. land_oldest lands the oldest such copies of any thread; false if there are none.
void arrive_after_copies(std::function<void()> arrive);
bool land_oldest();
void issue_product(std::function<void()> product);
void commit_products();
void wait_products(int pending);

template <typename Compute>
inline constexpr char kKind = 0;

// Every lane passes words; compute(warp) fills in the results of all lanes.
template <int kGiven, int kAnswers, typename Compute>
void collective(const uint32_t (&given)[kGiven], uint32_t (&answer)[kAnswers], Compute compute) {
  Warp& warp = machine.warp();
  if (machine.block_size.x % kWarpSize) fail("a collective of a warp that is not whole");
  if (warp.arrived == 0) warp.kind = &kKind<Compute>;
  if (warp.kind != &kKind<Compute>) fail("lanes of a warp are in different collectives");
  static_assert(kGiven <= 10 && kAnswers <= 4);
  const int lane = machine.lane();
  std::memcpy(warp.given[lane], given, sizeof given);
  machine.idle = 0;
  if (++warp.arrived == kWarpSize) {
    compute(warp);
    warp.arrived = 0, ++warp.generation;
  } else {
    // Switch only within this warp: it may run ahead of other warps as far as barriers let it.
    const unsigned first = machine.thread.x - lane;
    for (const uint64_t here = warp.generation; warp.generation == here;) yield(first, kWarpSize);
  }
  std::memcpy(answer, warp.answer[lane], sizeof answer);
}

}  // namespace emulator
