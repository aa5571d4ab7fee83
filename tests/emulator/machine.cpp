// The fibers and the shared memory of the emulator.
#include "machine.h"

#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) (void(address), void(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) (void(address), void(bytes))
#endif

namespace flashcell::cuda {
constexpr int kMostShared = 227 << 10;
// The array that kernels declare as `extern __shared__ char memory[]`.
alignas(1024) thread_local char memory[kMostShared];
}  // namespace flashcell::cuda

// Saves on the stack what a function must preserve, stores the stack pointer in *from, and
// continues `to`.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.type emulator_switch, @function
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size emulator_switch, . - emulator_switch
)");

namespace emulator {

Machine machine;

namespace {

constexpr size_t kStack = 256 << 10, kGuard = 4 << 10;
constexpr int kSharedUnasked = 48 << 10, kMostThreads = 1024;

std::mutex one_at_a_time;
std::map<const void*, int> allowed;  // bytes of dynamic shared memory allowed, for each kernel

// All shared memory is thread-local storage of this library: `__shared__` becomes `thread_local`,
// which works for an extern array and for a function's variable alike, and puts both in one block.
struct Storage {
  char* data = nullptr;
  size_t bytes = 0;
};
Storage find_storage() {
  Storage storage;
  const auto visit = [](dl_phdr_info* library, size_t, void* found) {
    const char *base = reinterpret_cast<char*>(library->dlpi_addr), *own = (char*)&machine;
    bool is_own = false;
    size_t bytes = 0;
    for (int i = 0; i < library->dlpi_phnum; ++i) {
      const auto& part = library->dlpi_phdr[i];
      const char* begin = base + part.p_vaddr;
      is_own |= part.p_type == PT_LOAD && begin <= own && own < begin + part.p_memsz;
      if (part.p_type == PT_TLS) bytes = part.p_memsz;
    }
    if (is_own) *static_cast<Storage*>(found) = {static_cast<char*>(library->dlpi_tls_data), bytes};
    return int(is_own);
  };
  flashcell::cuda::memory[0] = 0;  // thread-local storage exists only after its first use
  dl_iterate_phdr(visit, &storage);
  if (storage.data == nullptr) throw std::runtime_error("emulator: found no thread-local storage");
  return storage;
}

// Bits that are NaN in every type, and an index far out of range: reads of unwritten memory show
// up.
void poison(const Storage& storage) {
  char* memory = flashcell::cuda::memory;
  ASAN_UNPOISON_MEMORY_REGION(memory, flashcell::cuda::kMostShared);
  std::memset(storage.data, 0xff, storage.bytes);
  ASAN_POISON_MEMORY_REGION(memory + machine.shared_bytes,
                            flashcell::cuda::kMostShared - machine.shared_bytes);
}

void run_on(unsigned thread, void** from) {
  machine.thread.x = thread;
  emulator_switch(from, machine.threads[thread].stack_pointer);
}

__attribute__((no_sanitize_address)) void run_thread() {
  machine.body();
  machine.threads[machine.thread.x].alive = false;
  machine.idle = 0;
  // Barriers do not wait for threads that have returned.
  if (--machine.alive && machine.at_barrier == machine.alive) {
    machine.at_barrier = 0, ++machine.barriers;
  }
  void* never_again;
  if (machine.alive == 0) emulator_switch(&never_again, machine.main_stack);
  yield_to_block();
  std::abort();
}

char* new_stack() {
  void* stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED || mprotect(stack, kGuard, PROT_NONE)) throw std::bad_alloc();
  return static_cast<char*>(stack);
}

void start(Thread& thread) {
  if (thread.stack == nullptr) thread.stack = new_stack();
  thread.alive = true, thread.issued.clear(), thread.pending.clear();
  thread.products.clear(), thread.running.clear();
  void** top = reinterpret_cast<void**>(thread.stack + kStack);
  *--top = nullptr;  // at a call the stack is 8 bytes off a multiple of 16
  *--top = reinterpret_cast<void*>(&run_thread);
  for (int kept = 0; kept < 6; ++kept) *--top = nullptr;
  thread.stack_pointer = top;
}

void run_block(unsigned block, const Storage& storage) {
  poison(storage);
  machine.block.x = block, machine.alive = unsigned(machine.threads.size());
  machine.at_barrier = 0, machine.idle = 0;
  for (auto& own : machine.named) own = {};
  machine.landings.clear();
  machine.warps.assign((machine.threads.size() + kWarpSize - 1) / kWarpSize, Warp{});
  for (Thread& thread : machine.threads) start(thread);
  run_on(machine.options.backwards ? machine.alive - 1 : 0, &machine.main_stack);
}

std::string failure() {
  return std::string("emulator: ") + machine.failure + " (block " +
         std::to_string(machine.block.x) + ", thread " + std::to_string(machine.thread.x) + ")";
}

}  // namespace

Options read_options() {
  const char* text = std::getenv("FLASHCELL_EMULATOR");
  std::istringstream words(text ? text : "");
  Options options;
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    const int value = equals == word.npos ? 0 : std::atoi(word.c_str() + equals + 1);
    if (word == "backwards") {
      options.backwards = true;
    } else if (word == "early") {
      options.early = true;
    } else if (name == "arch" && value > 0) {
      options.arch = value;
    } else if (name == "code" && equals != word.npos && value >= 0) {
      options.code = value, options.sm_90a = word == "code=90a";
    } else if (name == "processors" && value > 0) {
      options.processors = value;
    } else if (name == "shared" && 48 <= value && value << 10 <= flashcell::cuda::kMostShared) {
      options.shared_bytes = value << 10;
    } else {
      throw std::invalid_argument("FLASHCELL_EMULATOR has the word '" + word +
                                  "', but knows backwards, early, arch=<number>, code=<number>, "
                                  "processors=<count>, shared=<KB>");
    }
  }
  if (options.code < 0) options.code = options.arch, options.sm_90a = options.arch == 90;
  return options;
}

int current_gpu() {
  static std::vector<Options> gpus;
  const std::lock_guard lock(one_at_a_time);
  const Options options = read_options();
  const auto facts = [](const Options& o) {
    return std::tuple(o.arch, o.code, o.sm_90a, o.processors, o.shared_bytes);
  };
  const auto is_it = [&](const Options& o) { return facts(o) == facts(options); };
  const auto found = std::find_if(gpus.begin(), gpus.end(), is_it);
  const int index = int(found - gpus.begin());
  if (found == gpus.end()) gpus.push_back(options);
  return index;
}

bool allow_shared(const void* kernel, int bytes) {
  const std::lock_guard lock(one_at_a_time);
  if (bytes > read_options().shared_bytes) return false;
  allowed[kernel] = bytes;
  return true;
}

void launch(const void* kernel, unsigned blocks, unsigned threads, size_t shared_bytes,
            std::function<void()> body) {
  const std::lock_guard lock(one_at_a_time);
  machine.options = read_options();
  const int most = allowed.count(kernel) ? allowed[kernel] : kSharedUnasked;
  if (threads == 0 || threads > kMostThreads || shared_bytes > size_t(most)) {
    throw std::runtime_error("emulator: " + std::to_string(threads) + " threads and " +
                             std::to_string(shared_bytes) +
                             " bytes of shared memory, but at most " +
                             std::to_string(kMostThreads) + " and " + std::to_string(most));
  }
  const Storage storage = find_storage();
  machine.shared = flashcell::cuda::memory, machine.shared_bytes = uint32_t(shared_bytes);
  machine.body = std::move(body), machine.block_size = {threads}, machine.grid_size = {blocks};
  machine.failure = nullptr;
  for (size_t t = threads; t < machine.threads.size(); ++t)
    munmap(machine.threads[t].stack, kStack);
  machine.threads.resize(threads);
  for (unsigned b = 0; b < blocks && machine.failure == nullptr; ++b) {
    run_block(machine.options.backwards ? blocks - 1 - b : b, storage);
  }
  ASAN_UNPOISON_MEMORY_REGION(machine.shared, flashcell::cuda::kMostShared);
  machine.body = nullptr;
  if (machine.failure == nullptr) return;
  for (Thread& thread : machine.threads) {  // unwinds the frames of threads that will not run again
    ASAN_UNPOISON_MEMORY_REGION(thread.stack + kGuard, kStack - kGuard);
  }
  throw std::runtime_error(failure());
}

void fail(const char* what) {
  machine.failure = what;
  void* never_again;
  emulator_switch(&never_again, machine.main_stack);
  std::abort();
}

void yield(unsigned first, unsigned count) {
  const unsigned self = machine.thread.x;
  if (++machine.idle > 2 * machine.threads.size()) fail("threads wait for others that never come");
  unsigned next = self;
  do {
    next = first + (next - first + (machine.options.backwards ? count - 1 : 1)) % count;
  } while (!machine.threads[next].alive && next != self);
  if (next != self) run_on(next, &machine.threads[self].stack_pointer);
}
void yield_to_block() { yield(0, unsigned(machine.threads.size())); }

void barrier() {
  machine.idle = 0;
  const uint64_t here = machine.barriers;
  if (++machine.at_barrier == machine.alive) {
    machine.at_barrier = 0, ++machine.barriers;
  } else {
    while (machine.barriers == here) yield_to_block();
  }
}

void arrive(int name, unsigned threads) {
  machine.idle = 0;
  auto& own = machine.named[name];
  if (++own.arrived == threads) own.arrived = 0, ++own.generation;
}

void barrier(int name, unsigned threads) {
  const uint64_t here = machine.named[name].generation;
  arrive(name, threads);
  while (machine.named[name].generation == here) yield_to_block();
}

char* shared_at(uint32_t address, int bytes) {
  if (uint64_t(address) + bytes > machine.shared_bytes) fail("shared memory: out of range");
  if (address % bytes) fail("shared memory: misaligned address");
  return machine.shared + address;
}

}  // namespace emulator
