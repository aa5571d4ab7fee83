// The engine for any x86-64, and any AArch64 (NEON).
#define FLASHCELL_ISA baseline
#include "backend.h"
