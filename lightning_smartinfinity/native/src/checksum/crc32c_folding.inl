// Computes CRC-32C by carry-less multiplication and by the CPU's CRC instruction at the same time: they use different
// parts of the CPU. crc32c_128.cpp, crc32c_128_arm.cpp and crc32c_512.cpp define the CPU's instructions and registers,
// and then include this file:
//
//     using Crc = ...;  // the type of the CRC instruction's register, of which 32 bits are used
//     Crc crc_of_word(Crc crc, std::uint64_t word);
//     Crc crc_of_byte(Crc crc, unsigned char byte);
//     std::uint64_t carryless_product(std::uint32_t left, std::uint32_t right);
//     struct Lanes {
//         using Register = ...;  // one or more lanes of 16 bytes
//         static Register load(const unsigned char* data);
//         static void store(unsigned char* out, Register value);
//         static Register in_every_lane(std::uint64_t first, std::uint64_t second);
//         // Returns, in each lane: first half * first factor + second half * second factor + addend.
//         static Register multiply_add(Register value, Register factors, Register addend);
//     };
//
// Everything is in an anonymous namespace and calls no library function, for the reason given in kernels.inl.
//
// Data is a polynomial over GF(2), first byte first. Its checksum is the remainder modulo P of that polynomial times
// x**32. The lowest bit has the highest power: bit i of n bits stands for x**(n - 1 - i). Data that is followed by
// `bits` more bits counts x**bits times. So a lane with halves F and S, F first, is moved over the next bits ("folded")
// by two multiplications: F * (x**(bits + 64) mod P) + S * (x**bits mod P) leaves the same remainder and is no longer
// than the lane. The product of two 64-bit numbers has 127 bits and comes out one place below the lane's, as if
// multiplied by x, so the factors have one power less. (Gopal et al., "Fast CRC Computation for Generic Polynomials
// Using PCLMULQDQ Instruction", Intel, 2009; the same for streams of the instruction: "Fast CRC Computation for iSCSI
// Polynomial Using CRC32 Instruction", Intel, 2011.)

namespace smart_infinity {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // P without x**32
constexpr std::uint32_t kOne = 0x80000000;

constexpr std::uint32_t times_x(std::uint32_t value) { return (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0); }

// Multiplies modulo P, as everything below does.
constexpr std::uint32_t product(std::uint32_t left, std::uint32_t right) {
    std::uint32_t sum = 0;
    for (int bit = 0; bit < 32; ++bit) sum = times_x(sum) ^ ((right >> bit & 1) != 0 ? left : 0);
    return sum;
}

constexpr std::uint32_t power_of_x(std::size_t exponent) {
    std::uint32_t power = kOne;
    for (std::uint32_t square = times_x(kOne); exponent > 0; exponent >>= 1, square = product(square, square)) {
        if ((exponent & 1) != 0) power = product(power, square);
    }
    return power;
}

// ---- the shape of the loop: a block is kStreams stretches for the CRC instruction, then one for the multiplications

constexpr std::size_t kStreams = 3;  // the instruction takes three cycles, but one can start in every cycle
constexpr std::size_t kLaneBytes = 16;
constexpr std::size_t kRegisterBytes = sizeof(Lanes::Register);
// Registers folded per turn of the loop. If a multiplication can start every other cycle, both parts take the same
// time.
constexpr std::size_t kRegisters = 3;
constexpr std::size_t kFoldedBytes = kRegisters * kRegisterBytes;
constexpr std::size_t kStreamBytes = 4 * sizeof(std::uint64_t);
constexpr std::size_t kTurnBytes = kFoldedBytes + kStreams * kStreamBytes;
// Enough turns to make the end of a block cheap, and few enough to prefetch the next block meanwhile.
constexpr std::size_t kMaxTurns = 64;

inline std::uint64_t load_word(const unsigned char* data) {
    std::uint64_t word;
    __builtin_memcpy(&word, data, sizeof word);
    return word;
}

// ---- checksums moved over the bytes of a stretch

struct Moves {
    std::uint32_t factors[kMaxTurns + 1];  // indexed by the number of turns; the first is unused
};

// The product of two checksums gains 33 powers when the instruction moves it over its eight bytes.
constexpr Moves moves_over(std::size_t bytes) {
    Moves moves{};
    for (std::size_t turns = 1; turns <= kMaxTurns; ++turns) {
        moves.factors[turns] = power_of_x(8 * bytes * turns - 33);
    }
    return moves;
}

constexpr Moves kOverFolded = moves_over(kFoldedBytes);
constexpr Moves kOverStream = moves_over(kStreamBytes);

inline std::uint32_t moved(std::uint32_t crc, std::uint32_t factor) {
    return static_cast<std::uint32_t>(crc_of_word(0, carryless_product(crc, factor)));
}

// ---- the two parts

class Streams {
 public:
    Streams(std::uint32_t crc, const unsigned char* data, std::size_t turns)
        : data_(data), stretch_(turns * kStreamBytes), crcs_{crc} {}

    void turn() {
        for (std::size_t i = 0; i < kStreamBytes; i += sizeof(std::uint64_t)) {
            for (std::size_t stream = 0; stream < kStreams; ++stream) {
                crcs_[stream] = crc_of_word(crcs_[stream], load_word(data_ + stream * stretch_ + i));
            }
        }
        data_ += kStreamBytes;
    }

    void prefetch(std::size_t bytes) const {
        for (std::size_t stream = 0; stream < kStreams; ++stream) {
            __builtin_prefetch(data_ + stream * stretch_ + bytes);
        }
    }

    // Returns the checksum of all consecutive stretches.
    std::uint32_t joined(std::size_t turns) const {
        auto crc = static_cast<std::uint32_t>(crcs_[0]);
        for (std::size_t stream = 1; stream < kStreams; ++stream) {
            crc = moved(crc, kOverStream.factors[turns]) ^ static_cast<std::uint32_t>(crcs_[stream]);
        }
        return crc;
    }

 private:
    const unsigned char* data_;
    std::size_t stretch_;
    Crc crcs_[kStreams];
};

class Folded {
 public:
    explicit Folded(const unsigned char* data) : data_(data + kFoldedBytes) {
        for (std::size_t i = 0; i < kRegisters; ++i) registers_[i] = Lanes::load(data + i * kRegisterBytes);
    }

    void turn() {
        const Lanes::Register factors = factors_over<kFoldedBytes>();
        for (std::size_t i = 0; i < kRegisters; ++i) {
            registers_[i] = Lanes::multiply_add(registers_[i], factors, Lanes::load(data_ + i * kRegisterBytes));
        }
        data_ += kFoldedBytes;
    }

    void prefetch(std::size_t bytes) const {
        for (std::size_t i = 0; i < kFoldedBytes; i += 64) __builtin_prefetch(data_ + bytes + i);
    }

    // Returns the checksum of this stretch alone: the folded data leaves the same remainder.
    std::uint32_t checksum() const {
        const Lanes::Register factors = factors_over<kRegisterBytes>();
        Lanes::Register last = registers_[0];
        for (std::size_t i = 1; i < kRegisters; ++i) last = Lanes::multiply_add(last, factors, registers_[i]);
        alignas(kRegisterBytes) unsigned char lanes[kRegisterBytes];
        Lanes::store(lanes, last);
        Crc crc = 0;
        for (std::size_t i = 0; i < kRegisterBytes; i += sizeof(std::uint64_t)) {
            crc = crc_of_word(crc, load_word(lanes + i));
        }
        return static_cast<std::uint32_t>(crc);
    }

 private:
    template <std::size_t kBytes>
    static Lanes::Register factors_over() {
        constexpr std::uint64_t kFirst = std::uint64_t{power_of_x(8 * kBytes + 63)} << 32;
        constexpr std::uint64_t kSecond = std::uint64_t{power_of_x(8 * kBytes - 1)} << 32;
        return Lanes::in_every_lane(kFirst, kSecond);
    }

    const unsigned char* data_;
    Lanes::Register registers_[kRegisters];
};

// The hardware prefetcher recognises the stretches too late. So each turn prefetches data one block ahead, if there is
// another block.
template <bool kPrefetches>
std::uint32_t extend_by_block(std::uint32_t crc, const unsigned char* data, std::size_t turns) {
    const std::size_t block_bytes = turns * kTurnBytes;
    Streams streams(crc, data, turns);
    Folded folded(data + kStreams * turns * kStreamBytes);
    streams.turn();
    for (std::size_t turn = 1; turn < turns; ++turn) {
        if constexpr (kPrefetches) {
            if (turn % 2 != 0) streams.prefetch(block_bytes);
            folded.prefetch(block_bytes);
        }
        folded.turn();
        streams.turn();
    }
    return moved(streams.joined(turns), kOverFolded.factors[turns]) ^ folded.checksum();
}

std::uint32_t extend(std::uint32_t crc, const unsigned char* data, std::size_t bytes) {
    constexpr std::size_t kBlockBytes = kMaxTurns * kTurnBytes;
    for (; bytes >= 2 * kBlockBytes; bytes -= kBlockBytes, data += kBlockBytes) {
        crc = extend_by_block<true>(crc, data, kMaxTurns);
    }
    while (bytes >= kTurnBytes) {
        const std::size_t turns = bytes < kBlockBytes ? bytes / kTurnBytes : kMaxTurns;
        crc = extend_by_block<false>(crc, data, turns);
        bytes -= turns * kTurnBytes;
        data += turns * kTurnBytes;
    }
    for (; bytes >= sizeof(std::uint64_t); bytes -= sizeof(std::uint64_t), data += sizeof(std::uint64_t)) {
        crc = static_cast<std::uint32_t>(crc_of_word(crc, load_word(data)));
    }
    for (; bytes > 0; --bytes, ++data) crc = static_cast<std::uint32_t>(crc_of_byte(crc, *data));
    return crc;
}

}  // namespace
}  // namespace smart_infinity
