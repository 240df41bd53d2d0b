#include "tensor/tensor_store.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/buffer.hpp"

namespace smart_infinity {
namespace {

void require_blocks(const TensorExtent& extent, std::uint64_t offset, std::size_t bytes) {
    const bool inside = offset <= extent.bytes() && bytes <= extent.bytes() - offset;
    if (inside && offset % kBlockBytes == 0 && bytes % kBlockBytes == 0) return;
    throw std::invalid_argument("TensorStore: " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) +
                                " are not whole blocks of an extent of " + std::to_string(extent.bytes()) + " bytes");
}

std::uint64_t whole_blocks(std::uint64_t bytes) {
    if (bytes == 0) throw std::invalid_argument("TensorStore: no bytes");
    return align_up(bytes, kBlockBytes);
}

}  // namespace

TensorStore::TensorStore(const std::vector<StateFile>& files, std::size_t io_threads,
                         std::optional<IoEngineKind> io_engine, std::uint64_t step_bytes,
                         std::optional<FileQueue::Deadline> deadline, TensorExtent::Checks checks)
    : checks_(checks),
      queue_(io_threads, io_engine, {}, std::move(deadline), checks == TensorExtent::Checks::kChecksums, files) {
    if (files.empty()) throw std::invalid_argument("TensorStore: there are no files");
    for (const StateFile& file : files) files_.push_back(std::make_shared<TensorFile>(file, step_bytes));
}

std::shared_ptr<TensorExtent> TensorStore::allocate(std::uint64_t bytes) {
    const std::uint64_t whole = whole_blocks(bytes);
    const std::shared_ptr<TensorFile>& file = emptiest();
    return std::make_shared<TensorExtent>(file, file->allocate(whole), whole, checks_);
}

std::optional<std::shared_ptr<TensorExtent>> TensorStore::allocate_free(std::uint64_t bytes) {
    const std::uint64_t whole = whole_blocks(bytes);
    const std::shared_ptr<TensorFile>& file = emptiest();
    const std::optional<std::uint64_t> offset = file->allocate_free(whole);
    if (!offset) return std::nullopt;
    return std::make_shared<TensorExtent>(file, *offset, whole, checks_);
}

void TensorStore::keep_length() {
    for (const std::shared_ptr<TensorFile>& file : files_) file->keep_length();
}

TensorStore::Ticket TensorStore::submit(Direction direction, const std::shared_ptr<TensorExtent>& extent,
                                        std::uint64_t offset, std::byte* data, std::size_t bytes, IoClass io_class) {
    const auto ended = [extent](const IoRequest& part, std::optional<Failure> failure) {
        return extent->ended(part, std::move(failure));
    };
    return submit(direction, extent, offset, data, bytes, {io_class, {}, ended, nullptr});
}

void TensorStore::read(const std::shared_ptr<TensorExtent>& extent, std::byte* data, std::size_t bytes,
                       IoClass io_class, std::shared_ptr<void> owner, FileQueue::Finished finished) {
    const auto ended = [extent, owner = std::move(owner)](const IoRequest& part, std::optional<Failure> failure) {
        return extent->ended(part, std::move(failure));
    };
    submit(Direction::kRead, extent, 0, data, bytes, {io_class, {}, ended, std::move(finished)});
}

TensorStore::Ticket TensorStore::submit(Direction direction, const std::shared_ptr<TensorExtent>& extent,
                                        std::uint64_t offset, std::byte* data, std::size_t bytes,
                                        FileQueue::Options options) {
    require_blocks(*extent, offset, bytes);
    const std::lock_guard lock(mutex_);
    options.after = extent->conflicts(direction, offset, bytes, queue_);
    const Ticket ticket =
        queue_.submit(direction, extent->file().file(), extent->offset() + offset, data, bytes, options);
    extent->begun(ticket, direction, offset, bytes);
    return ticket;
}

const std::shared_ptr<TensorFile>& TensorStore::emptiest() const {
    return *std::min_element(files_.begin(), files_.end(),
                             [](const auto& a, const auto& b) { return a->taken_bytes() < b->taken_bytes(); });
}

std::uint64_t TensorStore::taken_bytes() const {
    return std::accumulate(files_.begin(), files_.end(), std::uint64_t{0},
                           [](std::uint64_t sum, const auto& file) { return sum + file->taken_bytes(); });
}

std::uint64_t TensorStore::file_bytes() const {
    return std::accumulate(files_.begin(), files_.end(), std::uint64_t{0},
                           [](std::uint64_t sum, const auto& file) { return sum + file->file_bytes(); });
}

void TensorStore::close() {
    queue_.close();
    for (const auto& file : files_) file->close();
}

}  // namespace smart_infinity
