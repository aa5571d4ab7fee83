// The engine for any x86-64 (build.toml sets the flags).
#define FLASHCELL_ISA baseline
#include "backend.h"
