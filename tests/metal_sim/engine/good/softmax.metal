// One row per threadgroup, in blocks: the maximum and the sum are updated together in one pass over the row.
#include <metal_stdlib>
using namespace metal;

template <typename T>
struct Limits {
  static constant constexpr float lowest = -3.402823466e+38f;
};

struct MaxSum {
  float largest = Limits<float>::lowest;
  float sum = 0;

  void add(float v) thread {
    const float before = largest;
    largest = max(largest, v);
    sum = sum * fast::exp(before - largest) + fast::exp(v - largest);
  }
  MaxSum over_simdgroup() const {
    MaxSum all;
    all.largest = simd_max(largest);
    all.sum = simd_sum(sum * fast::exp(largest - all.largest));
    return all;
  }
};

struct Partial {
  float largest, sum;
};

template <typename T>
kernel void softmax(device const T* in [[buffer(0)]], device T* out [[buffer(1)]], constant int& size [[buffer(2)]],
                    uint row [[threadgroup_position_in_grid]], uint tid [[thread_position_in_threadgroup]],
                    uint threads [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                    uint simdgroup [[simdgroup_index_in_threadgroup]],
                    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup Partial partial[32];
  in += row * size_t(size);
  out += row * size_t(size);
  MaxSum mine;
  for (int i = tid; i < size; i += threads) mine.add(float(in[i]));
  const MaxSum ours = mine.over_simdgroup();
  if (lane == 0) partial[simdgroup] = {ours.largest, ours.sum};
  threadgroup_barrier(mem_flags::mem_threadgroup);
  MaxSum all;
  if (lane < simdgroups) {
    const Partial theirs = partial[lane];
    all.largest = theirs.largest;
    all.sum = theirs.sum;
  }
  all = all.over_simdgroup();
  const float scale = 1 / all.sum;
  for (int i = tid; i < size; i += threads) out[i] = T(fast::exp(float(in[i]) - all.largest) * scale);
}

template [[host_name("softmax_float")]] [[kernel]] decltype(softmax<float>) softmax<float>;
template [[host_name("softmax_half")]] [[kernel]] decltype(softmax<half>) softmax<half>;
