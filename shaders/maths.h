// Functions of one float that Metal lacks, or whose limits matter here. All of them return NaN for NaN.
#pragma once

namespace moe_metal {

// Correct for all x: exp may overflow to infinity, and 1 / infinity is 0.
inline float sigmoid(float x) { return 1 / (1 + exp(-x)); }

// log(1 + x) for 0 <= x <= 1, accurate even if 1 + x rounds to 1.
inline float log_one_plus(float x) {
  const float one_plus = 1 + x;
  return one_plus == 1 ? x : log(one_plus) * (x / (one_plus - 1));
}

// log(1 + exp(x))
inline float softplus(float x) { return (x < 0 ? 0 : x) + log_one_plus(exp(x < 0 ? x : -x)); }

// Below -20, softplus(x) is exp(x), which would underflow long before its square root does.
inline float sqrt_softplus(float x) { return x < -20 ? exp(0.5f * x) : sqrt(softplus(x)); }

// 1 - erf(x): exp(-x^2) times a polynomial in 1 / (1 + |x| / 2), fitted to within 3e-8 (root mean square over 0 to 6).
inline float complementary_erf(float x) {
  const float t = 1 / (1 + 0.5f * abs(x));
  float p = -0.0589212084f;
  p = p * t + 0.284109025f;
  p = p * t - 0.486777833f;
  p = p * t + 0.278213014f;
  p = p * t - 0.0271553879f;
  p = p * t + 0.203085596f;
  p = p * t + 0.242962361f;
  p = p * t + 0.282399583f;
  p = p * t + 0.282084851f;
  const float tail = p * t * exp(-x * x);
  return x < 0 ? 2 - tail : tail;
}

}  // namespace moe_metal
