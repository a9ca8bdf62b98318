// What every kernel needs: integer names, constants, shared memory, small arithmetic. No inline PTX here (ptx.cuh).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

namespace pagedkv {

constexpr int kWarpSize = 32;
constexpr u32 kFullMask = 0xffffffffu;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float neg_inf() { return __int_as_float(0xff800000);  }

template <class T> __device__ __host__ constexpr T ceil_div(T a, T b) { return (a + b - 1) / b; }
template <class T> __device__ __host__ constexpr T min_of(T a, T b) { return a < b ? a : b; }
template <class T> __device__ __host__ constexpr T max_of(T a, T b) { return a > b ? a : b; }

__device__ __forceinline__ int lane_id() { return threadIdx.x % kWarpSize; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / kWarpSize; }
// The same in a way that tells the compiler that all lanes have it: branches on it do not split the warp. Whole warps call it.
__device__ __forceinline__ int uniform_warp_id() { return __shfl_sync(kFullMask, warp_id(), 0); }

// Dynamic shared memory of the CTA, 1024-byte aligned: what the 128-byte swizzle of TMA and wgmma needs.
extern __shared__ __align__(1024) u8 dynamic_shared[];

}  // namespace pagedkv
