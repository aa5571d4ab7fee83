// Runs many time steps by launching one CUDA graph of a few steps again and again, which takes the
// host a fraction of the time of single launches. A graph's arguments cannot change, so its steps
// read the current time from GPU memory (`clock`).
#pragma once
#include "../run.h"
#include "cublas.cuh"

namespace flashcell::cuda::gemm {

static __global__ void set_clock_kernel(int* clock, int t) { *clock = t; }
static __global__ void advance_clock_kernel(int* clock, int steps) { *clock += steps; }

// Returns the stream on which this thread records graphs, because torch's default stream cannot
// record; null if there is none for the device.
inline cudaStream_t recording_stream() {
  struct Streams {
    cudaStream_t of_device[64] = {};
    ~Streams() {
      for (cudaStream_t stream : of_device) {
        if (stream != nullptr) cudaStreamDestroy(stream);
      }
    }
  };
  static thread_local Streams streams;
  int device;
  check(cudaGetDevice(&device));
  if (device >= 64) return nullptr;
  cudaStream_t& stream = streams.of_device[device];
  if (stream == nullptr) check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

// Records what `record(launch)` launches; returns it as a CUDA graph, or null without a stream.
template <typename Record>
cudaGraphExec_t make_graph(const Launch& launch, Record record) {
  Launch recording = launch;
  recording.stream = recording_stream();
  if (recording.stream == nullptr) return nullptr;
  check(cudaStreamBeginCapture(recording.stream, cudaStreamCaptureModeRelaxed));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t made = nullptr;
  try {
    use_stream(recording);
    record(recording);
  } catch (...) {
    cudaStreamEndCapture(recording.stream, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    use_stream(launch);
    throw;
  }
  use_stream(launch);
  check(cudaStreamEndCapture(recording.stream, &graph));
  const cudaError_t status = cudaGraphInstantiate(&made, graph, 0);
  cudaGraphDestroy(graph);
  check(status);
  return made;
}

// Runs the time steps first, first + direction, ..., `count` in all. `step(launch, t, clock)` must
// launch time step t or, if `clock` is not null, time step t + *clock.
template <typename RunStep>
void run_steps(int first, int64_t count, int direction, int* clock, const Launch& launch,
               RunStep step) {
  int64_t done = 0;
  if (count >= kLeastSteps && !is_recording(launch.stream)) {
    set_clock_kernel<<<1, 1, 0, launch.stream>>>(clock, first);
    check(cudaGetLastError());
    const cudaGraphExec_t graph = make_graph(launch, [&](const Launch& recording) {
      for (int i = 0; i < kGraphSteps; ++i) step(recording, i * direction, clock);
      advance_clock_kernel<<<1, 1, 0, recording.stream>>>(clock, kGraphSteps * direction);
      check(cudaGetLastError());
    });
    cudaError_t status = cudaSuccess;
    for (; graph != nullptr && status == cudaSuccess && done + kGraphSteps <= count;
         done += kGraphSteps) {
      status = cudaGraphLaunch(graph, launch.stream);
    }
    if (graph != nullptr) cudaGraphExecDestroy(graph);
    check(status);
  }
  for (; done < count; ++done) step(launch, first + int(done) * direction, nullptr);
}

}  // namespace flashcell::cuda::gemm
