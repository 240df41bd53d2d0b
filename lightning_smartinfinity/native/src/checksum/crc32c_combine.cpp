#include "checksum/crc32c.hpp"

namespace smart_infinity {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // reflected: the highest bit is the coefficient of x**0
constexpr std::uint32_t kOne = 0x80000000;

// Multiplies polynomials over GF(2) modulo the checksum's polynomial.
std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (; a != 0; a <<= 1) {
        if ((a & kOne) != 0) product ^= b;
        b = (b >> 1) ^ ((b & 1) != 0 ? kPolynomial : 0);
    }
    return product;
}

// Returns x to the power of the number of bits in `bytes` bytes.
std::uint32_t power(std::uint64_t bytes) {
    std::uint32_t result = kOne;
    std::uint32_t square = kOne >> 8;  // x**8
    for (; bytes != 0; bytes >>= 1) {
        if ((bytes & 1) != 0) result = multiply(result, square);
        square = multiply(square, square);
    }
    return result;
}

}  // namespace

// Zeros appended to the first range multiply its checksum by a power of x. The second range's checksum is then added.
std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t bytes) {
    return multiply(power(bytes), first) ^ second;
}

}  // namespace smart_infinity
