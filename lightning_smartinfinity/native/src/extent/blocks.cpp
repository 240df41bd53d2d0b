#include "extent/blocks.hpp"

#include <utility>

namespace smart_infinity {

Blocks::Blocks(std::vector<std::uint64_t> borders) : borders_(std::move(borders)) {
    std::sort(borders_.begin(), borders_.end());
    const auto on_grid = [](std::uint64_t border) { return border % kCellNumel == 0; };
    borders_.erase(std::remove_if(borders_.begin(), borders_.end(), on_grid), borders_.end());
    borders_.erase(std::unique(borders_.begin(), borders_.end()), borders_.end());
}

const Blocks& Blocks::grid() {
    static const Blocks blocks;
    return blocks;
}

}  // namespace smart_infinity
