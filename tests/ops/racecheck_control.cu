// What `compute-sanitizer --tool racecheck` says of a hand-over that is right.
//
//   nvcc -arch=sm_90a -o control tests/ops/racecheck_control.cu
//   compute-sanitizer --tool racecheck ./control one     one thread arrives, after a barrier of its group
//   compute-sanitizer --tool racecheck ./control all     every thread arrives
//   compute-sanitizer --tool racecheck ./control none    nobody waits: a race
//
// Half of a block writes shared memory, the other half reads it after waiting for an mbarrier. Our
// Gluon kernels hand over as "one" does (PTX ISA, mbarrier: arrive releases, wait acquires; bar.sync
// orders the group's writes before the arrival).
#include <cstdint>
#include <cstdio>
#include <cstring>

__device__ void arrive(uint64_t* bar) {
  uint32_t address = (uint32_t)__cvta_generic_to_shared(bar);
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
}

__device__ void wait(uint64_t* bar) {
  uint32_t address = (uint32_t)__cvta_generic_to_shared(bar), done = 0;
  while (!done)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(address)
        : "memory");
}

__global__ void hand_over(int* out, int arrivals) {
  __shared__ uint64_t bar;
  __shared__ int values[128];
  if (threadIdx.x == 0) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(&bar);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals ? arrivals : 1));
  }
  __syncthreads();
  int thread = threadIdx.x % 128;
  if (threadIdx.x < 128) {
    values[thread] = thread;
    asm volatile("bar.sync 1, 128;" ::: "memory");
    if (arrivals == 128 || (arrivals == 1 && thread == 0)) arrive(&bar);
  } else {
    if (arrivals) wait(&bar);
    out[thread] = values[127 - thread];
  }
}

int main(int argc, char** argv) {
  const char* mode = argc > 1 ? argv[1] : "one";
  int* out;
  cudaMalloc(&out, 128 * sizeof(int));
  hand_over<<<1, 256>>>(out, !strcmp(mode, "one") ? 1 : !strcmp(mode, "all") ? 128 : 0);
  printf("%s: %s\n", mode, cudaGetErrorString(cudaDeviceSynchronize()));
}
