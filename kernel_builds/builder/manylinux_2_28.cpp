// Linked into every kernel, so that a compiler newer than manylinux_2_28 (GLIBC 2.28, GLIBCXX
// 3.4.24) makes a library that loads on such a system. torch's stable headers, and libstdc++ where
// it is linked statically, use things whose symbols are newer. Defining them here keeps them out of
// the imports, and exports.map keeps them private.
#include <sched.h>

#include <new>
#include <sstream>
#include <string>

#define HIDDEN extern "C" __attribute__((visibility("hidden")))

// GLIBC_2.32. 0 makes shared_ptr always count atomically: right everywhere, a little slower alone.
HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;

// GLIBC_2.38, of a static libstdc++: ISO C23's strtoul, which takes "0b1" too. Nothing here needs
// that.
extern "C" unsigned long plain_strtoul(const char*, char**, int) __asm__("strtoul");
HIDDEN unsigned long isoc23_strtoul(const char*, char**, int) __asm__("__isoc23_strtoul");
unsigned long isoc23_strtoul(const char* text, char** end, int base) {
  return plain_strtoul(text, end, base);
}

// GLIBC_2.34, of a static libstdc++: it was in libpthread before. A control is 0 at first, 1 while
// `routine` runs and 2 after that.
HIDDEN int run_once(int* control, void (*routine)()) __asm__("pthread_once");
int run_once(int* control, void (*routine)()) {
  for (;;) {
    int found = 0;
    if (__atomic_compare_exchange_n(control, &found, 1, false, __ATOMIC_ACQUIRE,
                                    __ATOMIC_ACQUIRE)) {
      try {
        routine();
      } catch (...) {
        __atomic_store_n(control, 0, __ATOMIC_RELEASE);
        throw;
      }
      __atomic_store_n(control, 2, __ATOMIC_RELEASE);
      return 0;
    }
    if (found == 2) return 0;
    sched_yield();
  }
}

namespace std {

// GLIBCXX_3.4.29. Weak, because a static libstdc++ brings its own definition.
__attribute__((weak)) void __throw_bad_array_new_length() { throw bad_array_new_length(); }

#if _GLIBCXX_RELEASE >= 13
// GLIBCXX_3.4.31
template void basic_string<char>::_M_replace_cold(char*, size_type, const char*, const size_type,
                                                  const size_type);
#endif

// Default constructors: GLIBCXX_3.4.26; stringbuf's move: 3.4.29
template class basic_stringbuf<char>;
template class basic_istringstream<char>;
template class basic_ostringstream<char>;
template class basic_stringstream<char>;

}  // namespace std
