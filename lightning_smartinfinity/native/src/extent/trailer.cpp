#include "extent/trailer.hpp"

#include <bit>
#include <cstring>

#include "checksum/crc32c.hpp"

namespace smart_infinity {
namespace {

static_assert(std::endian::native == std::endian::little, "extents are little endian");

constexpr std::array<char, 8> kMagic = {'L', 'S', 'I', 'E', 'X', 'T', '0', '1'};
constexpr std::uint32_t kVersion = 1;

struct Trailer {
    std::array<char, 8> magic;
    std::uint32_t version;
    std::uint32_t state_format;
    std::array<std::uint8_t, kJobBytes> job;
    std::uint32_t rank;
    std::uint32_t num_arrays;
    std::uint64_t tasklet;
    std::uint64_t generation;
    std::uint64_t numel;
    std::uint64_t extent_bytes;
    Checksums checksums;
    std::array<std::uint8_t, 20> zero;
    std::uint32_t trailer_checksum;
};

static_assert(sizeof(Trailer) == kTrailerBytes && offsetof(Trailer, tasklet) == 40 &&
                  offsetof(Trailer, checksums) == 72 && offsetof(Trailer, trailer_checksum) == 124,
              "the layout on storage is fixed");

std::uint32_t own_checksum(const Trailer& trailer) { return crc32c(&trailer, offsetof(Trailer, trailer_checksum)); }

Trailer load(const std::byte* bytes) {
    Trailer trailer;
    std::memcpy(&trailer, bytes, sizeof trailer);
    return trailer;
}

std::string differs(const char* field, std::uint64_t found, std::uint64_t expected) {
    return std::string(field) + " is " + std::to_string(found) + ", expected " + std::to_string(expected);
}

std::optional<Refusal> check_integrity(const Trailer& trailer) {
    if (trailer.magic != kMagic) return Refusal{FailureKind::kFormat, "there is no extent here"};
    if (trailer.version != kVersion) {
        return Refusal{FailureKind::kFormat, differs("format version", trailer.version, kVersion)};
    }
    if (trailer.trailer_checksum != own_checksum(trailer)) {
        return Refusal{FailureKind::kChecksum, "the trailer does not match its checksum"};
    }
    return std::nullopt;
}

std::optional<Refusal> check_owner(const Trailer& trailer, const Identity& identity, const Tasklet& tasklet) {
    if (trailer.state_format != identity.state_format) {
        return Refusal{FailureKind::kFormat, differs("state format", trailer.state_format, identity.state_format)};
    }
    if (trailer.job != identity.job) return Refusal{FailureKind::kForeign, "it belongs to another job"};
    if (trailer.rank != identity.rank) {
        return Refusal{FailureKind::kForeign, differs("rank", trailer.rank, identity.rank)};
    }
    if (trailer.tasklet != tasklet.index) {
        return Refusal{FailureKind::kForeign, differs("tasklet", trailer.tasklet, tasklet.index)};
    }
    return std::nullopt;
}

std::optional<Refusal> check_shape(const Trailer& trailer, const Tasklet& tasklet) {
    if (trailer.numel != tasklet.numel) {
        return Refusal{FailureKind::kFormat, differs("number of elements", trailer.numel, tasklet.numel)};
    }
    if (trailer.num_arrays != tasklet.num_arrays) {
        return Refusal{FailureKind::kFormat, differs("number of arrays", trailer.num_arrays, tasklet.num_arrays)};
    }
    if (trailer.extent_bytes != tasklet.extent_bytes) {
        return Refusal{FailureKind::kFormat, differs("extent bytes", trailer.extent_bytes, tasklet.extent_bytes)};
    }
    if (trailer.generation != tasklet.read_generation) {
        return Refusal{FailureKind::kGeneration, differs("generation", trailer.generation, tasklet.read_generation)};
    }
    return std::nullopt;
}

}  // namespace

std::optional<Refusal> verify_trailer(const std::byte* bytes, const Identity& identity, const Tasklet& tasklet) {
    const Trailer trailer = load(bytes);
    if (auto refusal = check_integrity(trailer)) return refusal;
    if (auto refusal = check_owner(trailer, identity, tasklet)) return refusal;
    return check_shape(trailer, tasklet);
}

Checksums TrailerPage::checksums() const { return load(bytes()).checksums; }

void TrailerPage::write(const Identity& identity, const Tasklet& tasklet, const Checksums& checksums) const {
    Trailer trailer{};
    trailer.magic = kMagic;
    trailer.version = kVersion;
    trailer.state_format = identity.state_format;
    trailer.job = identity.job;
    trailer.rank = identity.rank;
    trailer.num_arrays = static_cast<std::uint32_t>(tasklet.num_arrays);
    trailer.tasklet = tasklet.index;
    trailer.generation = tasklet.write_generation;
    trailer.numel = tasklet.numel;
    trailer.extent_bytes = tasklet.extent_bytes;
    trailer.checksums = checksums;
    trailer.trailer_checksum = own_checksum(trailer);
    std::memset(page_, 0, kTrailerPageBytes - kTrailerBytes);
    std::memcpy(bytes(), &trailer, sizeof trailer);
}

}  // namespace smart_infinity
