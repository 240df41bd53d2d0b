#include "extent/extent.hpp"

#include <cstring>
#include <string>

#include "checksum/crc32c.hpp"

namespace smart_infinity {

std::uint32_t Extent::checksum(std::size_t index) const { return crc32c(region(index), regions_.bytes(index)); }

std::optional<Refusal> Extent::verify(const Identity& identity, std::size_t first_region) const {
    if (auto refusal = trailer_page().verify(identity, tasklet_)) return refusal;
    const Checksums checksums = trailer_page().checksums();
    for (std::size_t index = first_region; index < regions_.count(); ++index) {
        if (checksum(index) != checksums[index]) {
            return Refusal{FailureKind::kChecksum, "region " + std::to_string(index) + " does not match its checksum"};
        }
    }
    return std::nullopt;
}

void Extent::seal(const Identity& identity, const Checksums& checksums) const {
    for (std::size_t index = 0; index < regions_.count(); ++index) {
        const std::size_t used = regions_.bytes(index);
        std::memset(region(index) + used, 0, regions_.padded_bytes(index) - used);
    }
    trailer_page().write(identity, tasklet_, checksums);
}

}  // namespace smart_infinity
