#include "card/card_status.hpp"

namespace smart_infinity {
namespace {

std::string number(std::uint32_t value) { return std::to_string(value); }

constexpr std::uint32_t kErrors[] = {1, 2, 4, 8, 16, 32};
constexpr const char* kErrorTexts[] = {"an index is out of range or order",       "the payload's header is wrong",
                                       "the range of elements is wrong",          "the form is unknown",
                                       "the counts do not give the header's sum", "an exponent or a code is none"};

std::string errors_in_words(std::uint32_t errors) {
    std::string words;
    for (std::size_t i = 0; i < std::size(kErrors); ++i) {
        if ((errors & kErrors[i]) != 0) words += (words.empty() ? "" : ", ") + std::string(kErrorTexts[i]);
    }
    return "the kernel reports errors (" + number(errors) + (words.empty() ? "" : ": " + words) + ")";
}

std::optional<std::string> problem_of_gradient(const CardStatus& status, const SentGradient& sent) {
    if (status.gradient != sent.gradient) return "the gradient arrived with another checksum";
    if (status.indices != sent.indices) return "the gradient's indices or exponents arrived with another checksum";
    if (status.header_and_counts != sent.header_and_counts) {
        return "the gradient's header or counts arrived with another checksum";
    }
    return std::nullopt;
}

}  // namespace

std::optional<std::string> problem_of(const CardStatus& status, const CardKernelType& type, std::uint32_t count,
                                      const SentGradient& sent) {
    if (status.magic != kStatusMagic) return "there is no status of a kernel";
    if (status.interface_version != kKernelInterface) {
        return "the kernel's interface is version " + number(status.interface_version) + ", expected " +
               number(kKernelInterface);
    }
    if (status.kernel != type.number) {
        return "kernel " + number(status.kernel) + " answered, expected " + number(type.number) + ", " + type.name;
    }
    if (status.errors != 0) return errors_in_words(status.errors);
    if (status.count != count) {
        return "the kernel updated " + number(status.count) + " elements, expected " + number(count);
    }
    for (std::size_t array = type.num_arrays; array < kMostCardArrays; ++array) {
        if (status.arrays_read[array] != 0 || status.arrays_written[array] != 0) {
            return "the kernel has an array " + std::to_string(array);
        }
    }
    return problem_of_gradient(status, sent);
}

}  // namespace smart_infinity
