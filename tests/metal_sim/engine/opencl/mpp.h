// The declarations of ../shim/mpp.h with Metal's address spaces. C++17 does not allow template parameters of class
// types, so a descriptor is a number.
#pragma once
#pragma clang system_header

namespace metal {

constant constexpr size_t dynamic_extent = ~(size_t)0;

template <class I, size_t... E>
struct extents {
  extents() = default;
  template <class... V>
  explicit extents(V... values);
  I extent(size_t r) const thread;
};
template <class I, size_t Rank, size_t... E>
struct msl_dextents : msl_dextents<I, Rank - 1, dynamic_extent, E...> {};
template <class I, size_t... E>
struct msl_dextents<I, 0, E...> {
  typedef extents<I, E...> type;
};
template <class I, size_t Rank>
using dextents = typename msl_dextents<I, Rank>::type;

struct tensor_inline {};
struct tensor_handle {};
template <class Element, class Extents, class Descriptor = tensor_handle>
struct tensor;
template <class Element, class I, size_t... E>
struct tensor<Element, extents<I, E...>, tensor_inline> {
  tensor(Element* data, extents<I, E...> e);
  tensor(Element* data, extents<I, E...> e, array<I, sizeof...(E)> strides);
  I get_extent(size_t r) const thread;
  I get_stride(size_t r) const thread;
};

template <size_t N>
struct execution_simdgroups {};
typedef execution_simdgroups<1> execution_simdgroup;

template <class T, class Left, class Right>
struct cooperative_tensor {
  ushort get_capacity() const thread;
  bool is_valid_element(ushort i) const thread;
  thread T& operator[](ushort i) thread;
  array<int, 2> get_multidimensional_index(ushort i) const thread;
  template <class Target>
  void store(const thread Target& target) const thread;
};

}  // namespace metal

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n;
  constexpr matmul2d_descriptor(int m, int n, int k = -1, bool transpose_left = false, bool transpose_right = false,
                                bool relaxed_precision = false, mode matmul_mode = mode::multiply)
      : m(m), n(n) {}
  constexpr operator int() const { return m * 1024 + n; }
};

template <int Descriptor, class Scope>
struct matmul2d {
  template <class Left, class Right, class Element>
  metal::cooperative_tensor<Element, Left, Right> get_destination_cooperative_tensor() const thread;
  template <class Left, class Right, class Element>
  void run(thread Left& left, thread Right& right,
           thread metal::cooperative_tensor<Element, Left, Right>& destination) const thread;
};

}  // namespace tensor_ops
}  // namespace mpp
