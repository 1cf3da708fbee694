// Random bits by Threefry 2x32 with 20 rounds: two words from a key and a counter, without state.
#include <metal_stdlib>
using namespace metal;

static constant constexpr uint32_t rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};

union rbits {
  uint2 val;
  uchar4 bytes[2];
};

static inline uint32_t rotated(uint32_t v, uint32_t by) { return (v << by) | (v >> (32 - by)); }

rbits threefry2x32_hash(const thread uint2& key, uint2 count) {
  uint4 ks = {key.x, key.y, key.x ^ key.y ^ 0x1BD11BDA, 0};
  rbits v;
  v.val.x = count.x + ks[0];
  v.val.y = count.y + ks[1];
  for (int i = 0; i < 5; ++i) {
    for (auto r : rotations[i % 2]) {
      v.val.x += v.val.y;
      v.val.y = rotated(v.val.y, r);
      v.val.y ^= v.val.x;
    }
    v.val.x += ks[(i + 1) % 3];
    v.val.y += ks[(i + 2) % 3] + i + 1;
  }
  return v;
}

[[kernel]] void threefry_bits(device const uint32_t* keys [[buffer(0)]], device char* out [[buffer(1)]],
                              constant const bool& odd [[buffer(2)]], constant const uint& bytes_per_key [[buffer(3)]],
                              uint2 grid_dim [[threads_per_grid]], uint2 index [[thread_position_in_grid]]) {
  auto kidx = 2 * index.x;
  auto key = uint2(keys[kidx], keys[kidx + 1]);
  auto half_size = grid_dim.y - odd;
  out += index.x * bytes_per_key;
  bool drop_last = odd && (index.y == half_size);
  auto bits = threefry2x32_hash(key, uint2(index.y, drop_last ? 0 : index.y + grid_dim.y));
  size_t idx = size_t(index.y) << 2;
  for (int i = 0; i < 4; ++i) out[idx + i] = bits.bytes[0][i];
  if (!drop_last) {
    idx = (size_t(index.y) + grid_dim.y) << 2;
    for (int i = 0; i < 4; ++i) out[idx + i] = bits.bytes[1][i];
  }
}
