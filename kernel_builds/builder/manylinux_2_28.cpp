// Linked into every kernel, so that a compiler newer than manylinux_2_28 (GLIBC 2.28, GLIBCXX
// 3.4.24) makes a library that loads on such a system. torch's stable headers use three things
// whose symbols are newer. Defining them here keeps them out of the imports, and exports.map keeps
// them private.
#include <new>
#include <sstream>

// GLIBC_2.32. 0 makes shared_ptr always count atomically: right everywhere, a little slower alone.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

namespace std {

// GLIBCXX_3.4.29. Weak, because a compiler that links libstdc++ statically brings its own
// definition.
__attribute__((weak)) void __throw_bad_array_new_length() { throw bad_array_new_length(); }

// Default constructors: GLIBCXX_3.4.26; stringbuf's move: 3.4.29
template class basic_stringbuf<char>;
template class basic_istringstream<char>;
template class basic_ostringstream<char>;
template class basic_stringstream<char>;

}  // namespace std
