#include "checksum/crc32c.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#ifdef SMART_INFINITY_ARM
#include <sys/auxv.h>
#endif

#include "checksum/crc32c_folding.hpp"
#include "kernels/instruction_set.hpp"

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

ExtendCrc32c* extend_with([[maybe_unused]] int width) {
#ifdef SMART_INFINITY_X86
    if (width == 512) return extend_crc32c_512;
#endif
#if defined(SMART_INFINITY_X86) || defined(SMART_INFINITY_ARM)
    if (width == 128) return extend_crc32c_128;
#endif
    return extend_by_table;
}

// Returns the greatest width that an instruction set allows. The scalar kernels use the table, unless the CPU supports
// no others: then scalar is the default and nothing was selected.
int width_for(InstructionSet set) {
    static const std::vector<int> widths = crc32c_widths();
    static const bool has_others = supported_instruction_sets().size() > 1;
    if (set == InstructionSet::kScalar) return has_others ? 0 : widths.back();
    const int most = set == InstructionSet::kAvx512 ? 512 : 128;
    return *std::find_if(widths.rbegin(), widths.rend(), [most](int width) { return width <= most; });
}

}  // namespace

std::vector<int> crc32c_widths() {
    std::vector<int> widths{0};
#ifdef SMART_INFINITY_X86
    if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul")) widths.push_back(128);
    if (widths.size() == 2 && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f")) {
        widths.push_back(512);
    }
#elif defined(SMART_INFINITY_ARM)
    constexpr unsigned long kNeeded = HWCAP_CRC32 | HWCAP_PMULL;
    if ((::getauxval(AT_HWCAP) & kNeeded) == kNeeded) widths.push_back(128);
#endif
    return widths;
}

std::atomic<bool>& crc32c_left_out() {
    static std::atomic<bool> left_out{false};
    return left_out;
}

std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t value) {
    if (crc32c_left_out().load(std::memory_order_relaxed)) return 0;
    return crc32c_by(width_for(selected_instruction_set().load(std::memory_order_relaxed)), data, bytes, value);
}

std::uint32_t crc32c_by(int width, const void* data, std::size_t bytes, std::uint32_t value) {
    return ~extend_with(width)(~value, static_cast<const unsigned char*>(data), bytes);
}

}  // namespace smart_infinity
