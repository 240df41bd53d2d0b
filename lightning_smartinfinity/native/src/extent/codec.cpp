#include "extent/codec.hpp"

#include <algorithm>
#include <cstring>

namespace smart_infinity {
namespace {

// Elements decoded, updated and encoded at a time, so that they stay in the first-level cache; a multiple of the cell.
constexpr std::size_t kChunkNumel = 2048;

constexpr std::size_t kMasterRegion = 0;
constexpr std::size_t kRemainderRegion = 1;

std::size_t index_of(DType dtype) { return static_cast<std::size_t>(dtype); }

template <class Step>
typename Updates<Step>::Kernel kernel_for(const Step&, const Kernels& kernels, const Segment& segment) {
    const std::size_t column = segment.parameter == 0 ? kNoParameter : index_of(segment.parameter_dtype);
    const Updates<Step>& updates = kernels.updates;
    return updates.table[index_of(segment.gradient_dtype)][column];
}

// Returns a key for each cell and update, by the last steps of splitmix64.
std::uint32_t cell_key(std::uint32_t seed, std::uint64_t cell) {
    std::uint64_t x = cell * 0x9e3779b97f4a7c15u + seed * 0xd1b54a32d192ed03u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return static_cast<std::uint32_t>(x >> 32);
}

}  // namespace

// Elements as fp32: in the extent if it stores fp32, otherwise in the chunk's own memory.
struct Codec::Chunk {
    std::size_t first;
    std::size_t numel;
    float* arrays[kMomentArrays];
    alignas(64) float memory[kMomentArrays][kChunkNumel];
};

template <class Item>
Item* Codec::items(std::size_t region, std::size_t first) const {
    return reinterpret_cast<Item*>(extent_.region(region)) + first;
}

float* Codec::in_place(std::size_t array) const {
    const bool fp32 = array == kMaster ? !format_.splits_master() : format_.moments == Moments::kFp32;
    return fp32 ? items<float>(region_of(array), 0) : nullptr;
}

const Blocks& Codec::blocks() const { return blocks_of(tasklet_); }

std::size_t Codec::region_of(std::size_t array) const {
    return array != kMaster && format_.splits_master() ? array + 1 : array;
}

Codes Codec::codes(std::size_t array, std::size_t block, std::size_t first) const {
    const std::size_t exponents = extent_.regions().count() - 1;
    return {items<std::uint8_t>(region_of(array), first),
            items<std::uint8_t>(exponents, 2 * block + (array - kExpAvg))};
}

CellPart Codec::cell(std::uint32_t seed, std::size_t first, std::size_t last) const {
    const std::uint64_t element = tasklet_.offset + first;
    return {cell_key(seed, element / kCellNumel), static_cast<std::uint32_t>(element % kCellNumel), last - first};
}

void Codec::decode(std::size_t array, std::size_t first, std::size_t numel, float* out) const {
    if (const float* const values = in_place(array)) {
        std::memcpy(out, values + first, numel * sizeof(float));
    } else if (array == kMaster) {
        kernels_.join(items<std::uint16_t>(kMasterRegion, first), items<std::uint16_t>(kRemainderRegion, first), out,
                      numel);
    } else if (format_.moments == Moments::kBf16) {
        kernels_.widen[index_of(DType::kBFloat16)](items<std::uint16_t>(region_of(array), first), out, numel);
    } else {
        const auto kernel = array == kExpAvg ? kernels_.decode_exp_avg : kernels_.decode_exp_avg_sq;
        blocks().for_each(first, first + numel, [&](std::size_t block, std::size_t begin, std::size_t end) {
            kernel(codes(array, block, begin), out + (begin - first), end - begin);
        });
    }
}

void Codec::encode(std::size_t array, std::size_t first, std::size_t numel, const float* values) const {
    if (float* const stored = in_place(array)) {
        std::memcpy(stored + first, values, numel * sizeof(float));
    } else if (array == kMaster) {
        kernels_.split(values, items<std::uint16_t>(kMasterRegion, first),
                       items<std::uint16_t>(kRemainderRegion, first), numel);
    } else if (format_.moments == Moments::kBf16) {
        kernels_.narrow[index_of(DType::kBFloat16)](values, items<std::uint16_t>(region_of(array), first), numel);
    } else {
        const auto kernel = array == kExpAvg ? kernels_.encode_exp_avg : kernels_.encode_exp_avg_sq;
        blocks().for_each(first, first + numel, [&](std::size_t block, std::size_t begin, std::size_t end) {
            kernel(values + (begin - first), codes(array, block, begin), end - begin);
        });
    }
}

void Codec::take_masters(std::size_t first, std::size_t numel, const void* parameters) const {
    const std::size_t width = item_bytes(format_.parameter_dtype);
    std::memcpy(items<std::byte>(kMasterRegion, first * width), parameters, numel * width);
}

void Codec::update(const UpdateStep& step, std::size_t first, std::size_t numel, const Segment& segment,
                   const std::byte* gradient, std::byte* parameter) const {
    if (!format_.in_place()) {
        return update_chunks(std::get<AdamStep>(step), first, numel, segment, gradient, parameter);
    }
    std::visit([&](const auto& scalars) { update_in_place(scalars, first, numel, segment, gradient, parameter); },
               step);
}

template <class Step>
void Codec::update_in_place(const Step& step, std::size_t first, std::size_t numel, const Segment& segment,
                            const std::byte* gradient, std::byte* parameter) const {
    UpdateArrays memory{{}, gradient, parameter};
    for (std::size_t array = 0; array < tasklet_.num_arrays; ++array) memory.arrays[array] = in_place(array) + first;
    kernel_for(step, kernels_, segment)(step, memory, numel);
}

void Codec::update_chunks(const AdamStep& step, std::size_t first, std::size_t numel, const Segment& segment,
                          const std::byte* gradient, std::byte* parameter) const {
    const auto adam = kernel_for(step, kernels_, segment);
    const std::size_t end = first + numel;
    Chunk chunk;
    for (std::size_t begin = first; begin < end; begin += chunk.numel) {
        const std::size_t skipped = begin - first;
        chunk.first = begin;
        chunk.numel = std::min(end, (begin / kChunkNumel + 1) * kChunkNumel) - begin;
        open(chunk);
        const UpdateArrays memory{
            {chunk.arrays[kMaster], chunk.arrays[kExpAvg], chunk.arrays[kExpAvgSq]},
            gradient + skipped * item_bytes(segment.gradient_dtype),
            parameter == nullptr ? nullptr : parameter + skipped * item_bytes(segment.parameter_dtype)};
        adam(step, memory, chunk.numel);
        close(chunk, step.seed);
    }
}

void Codec::open(Chunk& chunk) const {
    for (std::size_t array = 0; array < kMomentArrays; ++array) {
        if (float* const stored = in_place(array)) {
            chunk.arrays[array] = stored + chunk.first;
        } else {
            chunk.arrays[array] = chunk.memory[array];
            decode(array, chunk.first, chunk.numel, chunk.arrays[array]);
        }
    }
}

void Codec::close(const Chunk& chunk, std::uint32_t seed) const {
    if (in_place(kMaster) == nullptr) encode(kMaster, chunk.first, chunk.numel, chunk.arrays[kMaster]);
    const bool coded = format_.has_blocks();
    const Blocks& parts = coded ? blocks() : Blocks::grid();
    parts.for_each(chunk.first, chunk.first + chunk.numel, [&](std::size_t block, std::size_t begin, std::size_t end) {
        const float* const exp_avg = chunk.arrays[kExpAvg] + (begin - chunk.first);
        const float* const exp_avg_sq = chunk.arrays[kExpAvgSq] + (begin - chunk.first);
        const CellPart part = cell(seed, begin, end);
        if (coded) {
            kernels_.round_int8(exp_avg, exp_avg_sq, codes(kExpAvg, block, begin), codes(kExpAvgSq, block, begin),
                                part);
        } else {
            kernels_.round_bf16(exp_avg, exp_avg_sq, items<std::uint16_t>(region_of(kExpAvg), begin),
                                items<std::uint16_t>(region_of(kExpAvgSq), begin), part);
        }
    });
}

}  // namespace smart_infinity
