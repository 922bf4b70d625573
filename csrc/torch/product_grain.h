// When a product on the CPU is worth another thread.
#pragma once

#include <algorithm>
#include <cstdint>

namespace cuda_ops
{

// Multiply-adds below which it is not.
constexpr int64_t PRODUCT_GRAIN = 1 << 19;
// And by tiles, which are ten times as fast.
constexpr int64_t HALF_PRODUCT_GRAIN = 1 << 22;
// Multiply-adds that are made in the time in which an element is read or written, where it is in no near cache: what a
// product with a vector costs, whose multiply-adds are few.
constexpr int64_t ELEMENT_COST = 16;

// How many of the product's `lines`, at the least, a thread is given: of a product of so many multiply-adds, whose
// operands and result have so many elements.
inline int64_t product_grain(int64_t lines, int64_t products, int64_t elements, int64_t least = PRODUCT_GRAIN)
{
    const double cost = static_cast<double>(products) + static_cast<double>(ELEMENT_COST * elements);
    return std::max<int64_t>(
        1, static_cast<int64_t>(static_cast<double>(lines) * static_cast<double>(least) / std::max(1.0, cost)));
}

} // namespace cuda_ops
