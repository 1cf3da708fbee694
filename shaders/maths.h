// Functions of one float that Metal lacks, or whose limits matter here. NaN goes in and comes out.

namespace moe_metal {

// Right at both ends: exp may overflow to infinity, and 1 / infinity is 0.
inline float sigmoid(float x) { return 1 / (1 + exp(-x)); }

// log(1 + x) for 0 <= x <= 1, also where 1 + x rounds to 1.
inline float log1p(float x) {
  const float one_plus = 1 + x;
  return one_plus == 1 ? x : log(one_plus) * (x / (one_plus - 1));
}

// log(1 + exp(x))
inline float softplus(float x) { return (x < 0 ? 0 : x) + log1p(exp(-abs(x))); }

}  // namespace moe_metal
