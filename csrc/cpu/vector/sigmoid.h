// The sigmoid of a vector of float.
#pragma once
#include "cpu/vector/vec.h"

namespace moe_metal {

// x * sigmoid(z). exp(-z) saturates to inf or 0, so for large |z| the result is -0 or x. A NaN in x stays NaN.
inline Vec times_sigmoid(const Vec& x, const Vec& z) {
#ifdef MOE_METAL_HAS_AVX512
  // exp(-z) as a power of 2, and a reciprocal with one Newton step: half the instructions of the generic code below.
  const __m512 one = _mm512_set1_ps(1), sum = _mm512_add_ps(exp2(z * Vec(-1.44269504f)), one);
  __m512 inverse = _mm512_rcp14_ps(sum);
  const __mmask16 finite = _mm512_cmp_ps_mask(sum, _mm512_set1_ps(1e38f), _CMP_LT_OQ);
  inverse = _mm512_mask_fmadd_ps(inverse, finite, _mm512_fnmadd_ps(sum, inverse, one), inverse);
  return _mm512_mul_ps(x, inverse);
#else
  return x / (Vec(1) + z.neg().exp_u20());
#endif
}

}  // namespace moe_metal
