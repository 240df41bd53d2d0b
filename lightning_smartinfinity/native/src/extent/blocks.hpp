#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/kernels.hpp"

namespace smart_infinity {

// Divides a tasklet's elements into blocks that share an exponent: at the cells of a grid, and at the borders between
// parameters. Tasklets begin on the grid, so the tasklet size does not change the blocks.
class Blocks {
 public:
    // `borders`: elements of the tasklet at which a parameter begins, in any order; those on the grid are ignored.
    explicit Blocks(std::vector<std::uint64_t> borders = {});

    // Returns the number of blocks that begin before `element`.
    std::size_t count(std::size_t element) const {
        return (element + kCellNumel - 1) / kCellNumel +
               static_cast<std::size_t>(std::lower_bound(borders_.begin(), borders_.end(), element) - borders_.begin());
    }
    // Returns whether a block begins at `element`.
    bool begins_at(std::size_t element) const {
        return element % kCellNumel == 0 || std::binary_search(borders_.begin(), borders_.end(), element);
    }

    // Calls visit(block, begin, end) for the part of every block in elements [first, last).
    template <class Visit>
    void for_each(std::size_t first, std::size_t last, const Visit& visit) const {
        if (first >= last) return;
        std::size_t block = count(first + 1) - 1;
        auto border = std::upper_bound(borders_.begin(), borders_.end(), first);
        while (first < last) {
            std::size_t end = std::min(last, (first / kCellNumel + 1) * kCellNumel);
            if (border != borders_.end() && *border <= end) end = *border++;
            visit(block, first, end);
            first = end;
            ++block;
        }
    }

    static const Blocks& grid();  // without borders

 private:
    std::vector<std::uint64_t> borders_;  // ascending, off the grid
};

}  // namespace smart_infinity
