#include "crc32c.hpp"

#include <array>
#include <cstring>

#include "instruction_set.hpp"

#ifdef SMART_INFINITY_X86
#include <nmmintrin.h>
#endif

namespace smart_infinity {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // reflected

using Table = std::array<std::uint32_t, 256>;

// tables[k][b]: the checksum register after byte b and k zero bytes.
std::array<Table, 8> slicing_tables() {
    std::array<Table, 8> tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
        tables[0][byte] = crc;
    }
    for (std::size_t k = 1; k < tables.size(); ++k) {
        for (std::size_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t crc = tables[k - 1][byte];
            tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xff];
        }
    }
    return tables;
}

const std::array<Table, 8>& slices() {
    static const std::array<Table, 8> tables = slicing_tables();
    return tables;
}

std::uint64_t load_word(const unsigned char* data) {
    std::uint64_t word;
    std::memcpy(&word, data, sizeof word);
    return word;
}

std::uint32_t extend_by_table(std::uint32_t crc, const unsigned char* data, std::size_t bytes) {
    const auto& table = slices();
    for (; bytes >= 8; bytes -= 8, data += 8) {
        const std::uint64_t word = load_word(data) ^ crc;
        crc = table[7][word & 0xff] ^ table[6][(word >> 8) & 0xff] ^ table[5][(word >> 16) & 0xff] ^
              table[4][(word >> 24) & 0xff] ^ table[3][(word >> 32) & 0xff] ^ table[2][(word >> 40) & 0xff] ^
              table[1][(word >> 48) & 0xff] ^ table[0][word >> 56];
    }
    for (; bytes > 0; --bytes, ++data) crc = (crc >> 8) ^ table[0][(crc ^ *data) & 0xff];
    return crc;
}

#ifdef SMART_INFINITY_X86

// What `kBytes` zero bytes do to a checksum register, one table per byte of the register (the operation is linear).
template <std::size_t kBytes>
class ZeroBytes {
 public:
    ZeroBytes() {
        for (std::size_t position = 0; position < tables_.size(); ++position) {
            Table& table = tables_[position];
            table[0] = 0;
            for (std::uint32_t bit = 0; bit < 8; ++bit) {
                const std::uint32_t basis = append_slowly(1u << (8 * position + bit));
                for (std::uint32_t lower = 0; lower < (1u << bit); ++lower)
                    table[(1u << bit) + lower] = table[lower] ^ basis;
            }
        }
    }

    std::uint32_t append(std::uint32_t crc) const {
        return tables_[0][crc & 0xff] ^ tables_[1][(crc >> 8) & 0xff] ^ tables_[2][(crc >> 16) & 0xff] ^
               tables_[3][crc >> 24];
    }

 private:
    static std::uint32_t append_slowly(std::uint32_t crc) {
        for (std::size_t i = 0; i < kBytes; ++i) crc = (crc >> 8) ^ slices()[0][crc & 0xff];
        return crc;
    }

    std::array<Table, 4> tables_;
};

// The instruction takes three cycles but one can start in every cycle: three streams keep it busy. The checksums of
// three neighbouring stretches are then joined by appending zeros.
template <std::size_t kStretch>
__attribute__((target("sse4.2,crc32"))) std::uint32_t extend_three_ways(std::uint32_t crc, const unsigned char*& data,
                                                                        std::size_t& bytes) {
    static const ZeroBytes<kStretch> zeros;
    for (; bytes >= 3 * kStretch; bytes -= 3 * kStretch, data += 3 * kStretch) {
        std::uint64_t first = crc;
        std::uint64_t second = 0;
        std::uint64_t third = 0;
        for (std::size_t i = 0; i < kStretch; i += 8) {
            first = _mm_crc32_u64(first, load_word(data + i));
            second = _mm_crc32_u64(second, load_word(data + kStretch + i));
            third = _mm_crc32_u64(third, load_word(data + 2 * kStretch + i));
        }
        crc = zeros.append(static_cast<std::uint32_t>(first)) ^ static_cast<std::uint32_t>(second);
        crc = zeros.append(crc) ^ static_cast<std::uint32_t>(third);
    }
    return crc;
}

__attribute__((target("sse4.2,crc32"))) std::uint32_t extend_by_instruction(std::uint32_t crc,
                                                                            const unsigned char* data,
                                                                            std::size_t bytes) {
    crc = extend_three_ways<4096>(crc, data, bytes);
    crc = extend_three_ways<256>(crc, data, bytes);
    for (; bytes >= 8; bytes -= 8, data += 8) crc = static_cast<std::uint32_t>(_mm_crc32_u64(crc, load_word(data)));
    for (; bytes > 0; --bytes, ++data) crc = _mm_crc32_u8(crc, *data);
    return crc;
}

// Choosing the scalar kernels chooses the table too, unless the CPU has no others: then nobody chose.
bool use_instruction() {
    static const bool supported = __builtin_cpu_supports("sse4.2") != 0;
    static const bool has_others = supported_instruction_sets().size() > 1;
    return supported && !(has_others && selected_instruction_set() == InstructionSet::kScalar);
}

#endif

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t value) {
    const auto* first = static_cast<const unsigned char*>(data);
#ifdef SMART_INFINITY_X86
    if (use_instruction()) return ~extend_by_instruction(~value, first, bytes);
#endif
    return ~extend_by_table(~value, first, bytes);
}

}  // namespace smart_infinity
