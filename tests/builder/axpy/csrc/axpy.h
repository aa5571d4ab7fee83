#pragma once
#include <cstdint>

// y = a x + y
void axpy(float a, const float* x, float* y, int64_t size, void* stream);
