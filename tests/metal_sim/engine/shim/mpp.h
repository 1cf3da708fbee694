// Metal 4's tensors and matmul2d of MetalPerformancePrimitives, for tensors in memory (tensor_inline) and a destination
// in registers. Apple does not document which thread has which element of such a destination: here elements are
// scattered over the threads, so that no kernel can rely on a layout. Undefined behaviour is an error here.
#pragma once

#include "simd.h"

namespace msl {

// `device T` as an argument of a template.
template <Space S, class T>
struct in_space {};

}  // namespace msl

namespace metal {

inline constexpr size_t dynamic_extent = ~size_t(0);

template <class I, size_t... E>
class extents {
 public:
  using index_type = I;
  static constexpr size_t rank() { return sizeof...(E); }
  static constexpr size_t rank_dynamic() { return ((E == dynamic_extent) + ... + 0); }
  static constexpr size_t static_extent(size_t r) {
    constexpr size_t all[] = {E...};
    return all[r];
  }
  constexpr extents() = default;
  template <class... V>
    requires(sizeof...(V) == rank_dynamic() && sizeof...(V) > 0)
  constexpr explicit extents(V... values) {
    const I given[] = {I(values)...};
    size_t next = 0;
    for (size_t r = 0; r < rank(); ++r)
      if (static_extent(r) == dynamic_extent) msl_at[r] = given[next++];
  }
  constexpr I extent(size_t r) const { return msl_at[r]; }

 private:
  I msl_at[sizeof...(E)] = {I(E)...};
};

template <class I, size_t Rank, size_t... E>
struct msl_dextents : msl_dextents<I, Rank - 1, dynamic_extent, E...> {};
template <class I, size_t... E>
struct msl_dextents<I, 0, E...> {
  using type = extents<I, E...>;
};
template <class I, size_t Rank>
using dextents = typename msl_dextents<I, Rank>::type;

struct tensor_inline {};
struct tensor_handle {};
template <class Element, class Extents, class Descriptor = tensor_handle, class... Tags>
class tensor {
  static_assert(sizeof(Element) == 0, "only tensors over memory of two dimensions, tensor_inline, are simulated");
};

// Element (i, j) is i * strides[0] + j * strides[1] elements after the first.
template <::msl::Space S, class T, class I, size_t E0, size_t E1>
class tensor<::msl::in_space<S, T>, extents<I, E0, E1>, tensor_inline> {
 public:
  using value_type = __remove_cv(T);
  using extents_type = extents<I, E0, E1>;
  using index_type = I;
  static constexpr ::msl::Space msl_space = S;
  static constexpr bool msl_is_const = __is_const(T);

  tensor(::msl::pointer<S, T> data, const extents_type& e) : tensor(data, e, array<I, 2>{I(1), e.extent(0)}) {}
  tensor(::msl::pointer<S, T> data, const extents_type& e, const array<I, 2>& strides)
      : data_(data), extents_(e), strides_(strides) {
    if (e.extent(0) < 0 || e.extent(1) < 0) ::msl::violation("argument", "a tensor with an extent below 0");
  }
  static constexpr size_t get_rank() { return 2; }
  I get_extent(size_t r) const { return extents_.extent(r); }
  I get_stride(size_t r) const { return strides_[r]; }

  bool msl_inside(I i, I j) const { return i < extents_.extent(0) && j < extents_.extent(1); }
  T& msl_element(I i, I j) const { return data_[i * strides_[0] + j * strides_[1]]; }

 private:
  ::msl::pointer<S, T> data_;
  extents_type extents_;
  array<I, 2> strides_;
};

template <class T>
inline constexpr bool msl_is_tensor = false;
template <class... A>
inline constexpr bool msl_is_tensor<tensor<A...>> = true;

// --- scopes: the threads that run an operation together

template <size_t N>
struct execution_simdgroups {
  static_assert(N != 0);
  static constexpr size_t static_size = N;
};
using execution_simdgroup = execution_simdgroups<1>;

template <class Scope>
inline constexpr size_t msl_simdgroups = 0;
template <size_t N>
inline constexpr size_t msl_simdgroups<execution_simdgroups<N>> = N;

// All threads of a scope must reach the same call. It orders no memory, since Apple does not guarantee that.
template <class Scope>
__attribute__((convergent, noinline)) MSL_UNCHECKED void msl_meet(::msl::Site site) {
  constexpr size_t simdgroups = msl_simdgroups<Scope>;
  static_assert(simdgroups > 0, "only execution_simdgroups<N> is simulated");
  if constexpr (simdgroups == 1) {
    ::msl::state.rendezvous(::msl::abi::Op::tensor_operation, site.value, nullptr, 0);
  } else {
    if (::msl::state.thread_count != 32 * simdgroups)
      ::msl::violation("launch", "a tensor operation of execution_simdgroups<N> in a threadgroup of other than N");
    ::msl::state.barrier(::msl::abi::tensor_operation_flag, site.value);
  }
}

// --- a tensor in the registers of a scope's threads; Op is the operation that made it

template <class T, class Op, class Left, class Right>
class cooperative_tensor {
  static constexpr uint kElements = Op::descriptor.m * Op::descriptor.n;
  static constexpr uint kThreads = 32 * msl_simdgroups<typename Op::scope>;
  static constexpr uint kOfThread = kElements / kThreads;
  static_assert(kElements % kThreads == 0);

 public:
  using element_type = T;
  using msl_operation = Op;
  using msl_left = Left;
  using msl_right = Right;
  static constexpr ushort get_rank() { return 2; }

  cooperative_tensor() {
    for (uint i = 0; i < kOfThread; ++i) at_[i] = T(__builtin_nanf(""));
  }
  ushort get_capacity() const { return kOfThread + 1; }  // the last element is not valid
  bool is_valid_element(ushort i) const { return i < kOfThread; }
  T& operator[](ushort i) { return at_[checked(i)]; }
  const T& operator[](ushort i) const { return at_[checked(i)]; }
  // The column comes first, as in a tensor's extents.
  array<int, 2> get_multidimensional_index(ushort i) const {
    const uint at = msl_place(checked(i));
    return {int(at % Op::descriptor.n), int(at / Op::descriptor.n)};
  }
  // Elements beyond the target's extents are skipped.
  template <class Target>
  void store(const Target& target, ::msl::Site site = MSL_SITE) const {
    static_assert(msl_is_tensor<Target>, "store takes a tensor over memory");
    static_assert(__is_same(typename Target::value_type, T), "store converts nothing");
    static_assert(!Target::msl_is_const, "store writes to a tensor of const elements");
    msl_meet<typename Op::scope>(site);
    for (ushort i = 0; i < kOfThread; ++i) {
      const array<int, 2> at = get_multidimensional_index(i);
      if (target.msl_inside(at[0], at[1])) target.msl_element(at[0], at[1]) = at_[i];
    }
  }

 private:
  static uint checked(ushort i) {
    if (i >= kOfThread) ::msl::violation("bounds", "an element of a cooperative_tensor that is_valid_element() denies");
    return i;
  }
  static uint msl_place(uint i) {
    const ::msl::abi::Thread& t = *::msl::state.thread;
    const uint thread = msl_simdgroups<typename Op::scope> == 1 ? t.lane : t.index;
    return ((i * kThreads + thread) * 1009 + 77) % kElements;
  }
  T at_[kOfThread];
};

}  // namespace metal

namespace mpp::tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(int m, int n, int k = static_cast<int>(metal::dynamic_extent),
                                bool transpose_left = false, bool transpose_right = false,
                                bool relaxed_precision = false, mode matmul_mode = mode::multiply)
      : m(m),
        n(n),
        k(k),
        transpose_left(transpose_left),
        transpose_right(transpose_right),
        relaxed_precision(relaxed_precision),
        matmul_mode(matmul_mode) {}
};

// The rows of Apple's table with floating-point types.
template <class L, class R, class D>
constexpr bool msl_multiplies() {
  constexpr bool has_float = __is_same(L, float) || __is_same(R, float);
  if (__is_same(D, float)) return true;
  if (has_float) return false;
  return __is_same(L, R) ? __is_same(D, L) : __is_same(D, half) || __is_same(D, bfloat);
}

template <matmul2d_descriptor Descriptor, class Scope, class... Args>
class matmul2d {
  static_assert(sizeof...(Args) == 0);
  static_assert(Descriptor.m % 16 == 0 && Descriptor.n % 16 == 0 && Descriptor.m > 0 && Descriptor.n > 0,
                "M and N of matmul2d are multiples of 16");
  static_assert(Descriptor.k == int(metal::dynamic_extent) || (Descriptor.k > 0 && Descriptor.k % 16 == 0),
                "K of matmul2d is dynamic_extent or a multiple of 16");
  static constexpr bool kDynamic = Descriptor.k == int(metal::dynamic_extent);

 public:
  static constexpr matmul2d_descriptor descriptor = Descriptor;
  using scope = Scope;

  template <class Left, class Right, class Element>
  metal::cooperative_tensor<Element, matmul2d, Left, Right> get_destination_cooperative_tensor() const {
    static_assert(metal::msl_is_tensor<Left> && metal::msl_is_tensor<Right>,
                  "a destination needs the types of run's operands");
    return {};
  }

  // destination = left * right, or += with multiply_accumulate. Operands' elements beyond their extents count as 0.
  template <class Left, class Right, class Destination>
  void run(Left& left, Right& right, Destination& destination, ::msl::Site site = MSL_SITE) const {
    check_types<Left, Right, Destination>();
    const int depth = left.get_extent(Descriptor.transpose_left ? 1 : 0);
    if (depth != right.get_extent(Descriptor.transpose_right ? 0 : 1))
      ::msl::violation("argument", "matmul2d: the operands have different extents along K");
    if (!kDynamic && depth != Descriptor.k)
      ::msl::violation("argument", "matmul2d: the operands' extent along K is not that of the descriptor");
    if (left.get_stride(0) != 1 || right.get_stride(0) != 1)
      ::msl::violation("argument", "matmul2d: the first stride of an operand is not 1");
    metal::msl_meet<Scope>(site);
    using Element = typename Destination::element_type;
    for (ushort i = 0; destination.is_valid_element(i); ++i) {
      const auto at = destination.get_multidimensional_index(i);
      const bool adds = Descriptor.matmul_mode == matmul2d_descriptor::mode::multiply_accumulate;
      float sum = adds ? float(destination[i]) : 0;
      for (int k = 0; k < depth; ++k)
        sum = __builtin_fmaf(element<Descriptor.transpose_left>(left, k, at[1]),
                             element<!Descriptor.transpose_right>(right, k, at[0]), sum);
      destination[i] = Element(sum);
    }
  }

 private:
  template <bool depth_is_second, class Operand>
  static float element(Operand& operand, int k, int other) {
    const int i = depth_is_second ? other : k, j = depth_is_second ? k : other;
    return operand.msl_inside(i, j) ? float(operand.msl_element(i, j)) : 0;
  }
  template <class Left, class Right, class Destination>
  static constexpr void check_types() {
    static_assert(metal::msl_is_tensor<Left> && metal::msl_is_tensor<Right>,
                  "only tensors over memory are simulated as operands of matmul2d");
    static_assert(!Left::msl_is_const && !Right::msl_is_const, "matmul2d refuses operands of const elements");
    static_assert(
        requires { typename Destination::msl_operation; },
        "only a cooperative_tensor is simulated as the destination of matmul2d");
    static_assert(__is_same(typename Destination::msl_operation, matmul2d), "the destination is another operation's");
    static_assert(__is_same(typename Destination::msl_left, Left) && __is_same(typename Destination::msl_right, Right),
                  "the destination was made for operands of other types, or in the other order");
    static_assert(
        msl_multiplies<typename Left::value_type, typename Right::value_type, typename Destination::element_type>(),
        "matmul2d has no such combination of types");
  }
};

}  // namespace mpp::tensor_ops
