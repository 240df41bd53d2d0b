// A CUDA device for torch without CUDA: torch's "cuda" tensors, streams and events on the fake driver.
//
// This library is torch's backend for the device type "cuda" and the driver that the native core opens as
// libcuda.so.1. Both see one device, as with a GPU.
//
// Memory. The device's memory is one file in memory that is mapped twice. Tensors and the core know addresses of the
// first mapping, which nobody may touch: the host that follows such an address gets SIGSEGV. Streams use the second
// one. Blocks are reused as by torch's caching allocator: at once by the stream that allocated them, and by it only
// after the streams of record_stream have done the work given until the block was freed. New memory is full of NaNs.
//
// Kernels. The current stream runs an operator, with the CPU's code on the second mapping, if the memory of its results
// is known beforehand, which is so for most. So it runs copies between device memory and pinned memory. Other operators
// wait until the stream has done its work, compute, and leave their results to the stream, which stores them late. So
// whoever reads results without waiting for the stream reads NaNs or old values.
//
// Not emulated: memory that runs out, graphs, timing, peer access; a device's random generator, which is the CPU's.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/syscall.h>
#include <torch/library.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cstdio>
#include <optional>
#include <set>
#include <unordered_map>

#include "../native/fake_cuda.cpp"

namespace {

using at::Tensor;

constexpr auto kType = c10::DeviceType::CUDA;
constexpr std::size_t kMemoryBytes = std::size_t{4} << 30;  // sparse: only what is used takes memory
constexpr std::size_t kSmallestBlock = 512;
constexpr int kNumPoolStreams = 4;
constexpr int kKernelsPerDelay = 64;  // one of so many kernels is late

// ---- devices and streams

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kNumDevices> current_streams{};

void* new_stream(c10::DeviceIndex device) {
    context_stack.push_back(&driver().contexts[device]);
    void* made = nullptr;
    const int result = cuStreamCreate(&made, 0);
    context_stack.pop_back();
    TORCH_CHECK(result == kSuccess, "the driver makes no stream: ", result);
    return made;
}

// Stream 0 is the device's default stream; any other id is the driver's handle. Those that torch makes are never
// destroyed, as in its pool.
Stream& stream_of(c10::DeviceIndex device, c10::StreamId id) {
    if (id != 0) return *reinterpret_cast<Stream*>(id);
    const std::lock_guard lock(driver().mutex);
    auto& made = driver().contexts[device].default_stream;
    if (!made) made = std::make_unique<Stream>();
    return *made;
}

Stream& stream_of(const c10::Stream& stream) { return stream_of(stream.device_index(), stream.id()); }
Stream& current_stream(c10::DeviceIndex device) { return stream_of(device, current_streams.at(device)); }

void finish(Stream& stream) {
    const int result = stream.point()->wait();
    TORCH_CHECK(result == kSuccess, "CUDA error: earlier work on this stream failed with ", result);
}

void synchronize_device(c10::DeviceIndex device) {
    finish(stream_of(device, 0));
    std::vector<Stream*> all;
    {
        const std::lock_guard lock(driver().mutex);
        for (const auto& [handle, stream] : driver().streams) all.push_back(stream.get());
    }
    for (Stream* const stream : all) finish(*stream);
}

// Gives the stream work that it does now and then late. Work that throws breaks the stream, as a kernel does.
void give(Stream& stream, std::function<void()> work) {
    int delay_us = 0;
    {
        const std::lock_guard lock(driver().mutex);
        if (driver().generator() % kKernelsPerDelay == 0) delay_us = driver().delay_us();
    }
    stream.push([&stream, delay_us, work = std::move(work)] {
        if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
        if (stream.result() != kSuccess) return 0;
        try {
            work();
        } catch (const std::exception& error) {
            std::fprintf(stderr, "a kernel of the emulated device failed: %s\n", error.what());
            return 700;  // CUDA_ERROR_ILLEGAL_ADDRESS
        }
        return 0;
    });
}

// ---- memory

class Memory final : public c10::Allocator {
 public:
    Memory() {
        const int file = static_cast<int>(::syscall(SYS_memfd_create, "emulated-cuda", 0u));
        TORCH_CHECK(file >= 0 && ::ftruncate(file, kMemoryBytes) == 0, "no memory for the emulated device");
        void* const untouchable = ::mmap(nullptr, kMemoryBytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
        void* const used = ::mmap(nullptr, kMemoryBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
        TORCH_CHECK(untouchable != MAP_FAILED && used != MAP_FAILED, "no memory for the emulated device");
        ::close(file);
        begin_ = reinterpret_cast<std::uintptr_t>(untouchable);
        fake_device_memory(begin_, kMemoryBytes, reinterpret_cast<std::uintptr_t>(used) - begin_);
    }

    c10::DataPtr allocate(std::size_t bytes) override {
        const c10::Device device(kType, current_device);
        if (bytes == 0) return {nullptr, device};
        const std::size_t size = std::max(kSmallestBlock, std::bit_ceil(bytes));
        Stream& stream = current_stream(device.index());
        void* const data = take(size, stream);
        void* const where = reachable(data);
        stream.push([where, size] {
            std::memset(where, 0xff, size);
            return 0;
        });
        return {data, data, &Memory::free, device};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &Memory::free; }
    void copy_data(void*, const void*, std::size_t) const override { TORCH_CHECK(false, "not emulated"); }

    void record(void* data, Stream& stream) {
        const std::lock_guard lock(mutex_);
        const auto found = blocks_.find(data);
        if (found != blocks_.end() && found->second.owner != &stream) found->second.users.insert(&stream);
    }
    std::vector<std::int64_t> used() {
        const std::lock_guard lock(mutex_);
        return {used_, most_used_, used_ + waiting_bytes_, most_active_, static_cast<std::int64_t>(reserved_)};
    }
    void forget_most() {
        const std::lock_guard lock(mutex_);
        most_used_ = used_;
        most_active_ = used_ + waiting_bytes_;
    }

 private:
    struct Block {
        std::size_t size;
        Stream* owner;
        std::set<Stream*> users;
    };
    struct Waiting {
        void* data;
        Block block;
        std::vector<std::shared_ptr<Point>> points;
    };

    void* take(std::size_t size, Stream& stream) {
        const std::lock_guard lock(mutex_);
        std::erase_if(waiting_, [this](const Waiting& waiting) {
            for (const auto& point : waiting.points) {
                const std::lock_guard point_lock(point->mutex);
                if (!point->reached) return false;
            }
            free_[{waiting.block.owner, waiting.block.size}].push_back(waiting.data);
            waiting_bytes_ -= static_cast<std::int64_t>(waiting.block.size);
            return true;
        });
        auto& free = free_[{&stream, size}];
        void* data = nullptr;
        if (!free.empty()) {
            data = free.back();
            free.pop_back();
        } else {
            TORCH_CHECK(reserved_ + size <= kMemoryBytes, "CUDA out of memory: the emulated device has 4 GiB");
            data = reinterpret_cast<void*>(begin_ + reserved_);
            reserved_ += size;
        }
        blocks_[data] = {size, &stream, {}};
        used_ += static_cast<std::int64_t>(size);
        most_used_ = std::max(most_used_, used_);
        most_active_ = std::max(most_active_, used_ + waiting_bytes_);
        return data;
    }
    static void free(void* data);
    void release(void* data) {
        const std::lock_guard lock(mutex_);
        auto node = blocks_.extract(data);
        Block& block = node.mapped();
        used_ -= static_cast<std::int64_t>(block.size);
        if (block.users.empty()) {
            free_[{block.owner, block.size}].push_back(data);
            return;
        }
        Waiting waiting{data, block, {}};
        for (Stream* const user : block.users) waiting.points.push_back(user->point());
        waiting_bytes_ += static_cast<std::int64_t>(block.size);
        waiting_.push_back(std::move(waiting));
    }

    std::mutex mutex_;
    std::uintptr_t begin_ = 0;
    std::size_t reserved_ = 0;
    std::int64_t used_ = 0, most_used_ = 0;
    std::int64_t waiting_bytes_ = 0, most_active_ = 0;  // with what was freed, and other streams may use still
    std::unordered_map<void*, Block> blocks_;
    std::map<std::pair<Stream*, std::size_t>, std::vector<void*>> free_;
    std::vector<Waiting> waiting_;
};

// Like the driver, memory is never destroyed.
Memory& memory() {
    static auto* const instance = new Memory;
    return *instance;
}

void Memory::free(void* data) { memory().release(data); }

// Pinned memory of torch's own: it is registered with the driver for as long as it lives.
class PinnedMemory final : public c10::Allocator {
 public:
    c10::DataPtr allocate(std::size_t bytes) override {
        void* const data = std::aligned_alloc(4096, (std::max<std::size_t>(bytes, 1) + 4095) / 4096 * 4096);
        const std::lock_guard lock(driver().mutex);
        driver().registered[reinterpret_cast<std::uintptr_t>(data)] = bytes;
        return {data, data, &PinnedMemory::free, c10::DeviceType::CPU};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &PinnedMemory::free; }
    void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
    static void free(void* data) {
        {
            const std::lock_guard lock(driver().mutex);
            driver().registered.erase(reinterpret_cast<std::uintptr_t>(data));
        }
        std::free(data);
    }
};

bool is_pinned(const void* data, std::size_t bytes) {
    const std::lock_guard lock(driver().mutex);
    return driver().is_registered(data, bytes);
}

// ---- what torch asks of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kType; }
    c10::Device exchangeDevice(c10::Device device) const override {
        const c10::Device before = getDevice();
        current_device = device.index();
        return before;
    }
    c10::Device getDevice() const override { return {kType, current_device}; }
    void setDevice(c10::Device device) const override {
        TORCH_CHECK(device.index() < kNumDevices, "CUDA error: invalid device ordinal");
        current_device = device.index();
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
    c10::Stream getStream(c10::Device device) const override { return stream(device, current_streams.at(at(device))); }
    c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
    c10::Stream getNewStream(c10::Device device, int) const override {
        static std::mutex mutex;
        static std::array<std::vector<void*>, kNumDevices> pools;
        static std::array<std::size_t, kNumDevices> given{};
        const std::lock_guard lock(mutex);
        auto& pool = pools.at(at(device));
        if (pool.size() < kNumPoolStreams) pool.push_back(new_stream(at(device)));
        return stream(device, reinterpret_cast<c10::StreamId>(pool[given.at(at(device))++ % pool.size()]));
    }
    c10::Stream exchangeStream(c10::Stream next) const override {
        const c10::Stream before = getStream(next.device());
        current_streams.at(next.device_index()) = next.id();
        return before;
    }
    void* getStreamNativeHandle(const c10::Stream stream) const override {
        return reinterpret_cast<void*>(stream.id());
    }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<Event*>(event);
    }
    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
        if (*event == nullptr) *event = new Event;
        static_cast<Event*>(*event)->point = stream_of(stream).point();
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (event == nullptr) return;
        stream_of(stream).push([point = static_cast<Event*>(event)->point] { return point->wait(); });
    }
    bool queryEvent(void* event) const override {
        if (event == nullptr) return true;
        Point& point = *static_cast<Event*>(event)->point;
        const std::lock_guard lock(point.mutex);
        return point.reached;
    }
    void synchronizeEvent(void* event) const override {
        if (event != nullptr) static_cast<Event*>(event)->point->wait();
    }
    c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
    void synchronizeStream(const c10::Stream& stream) const override { finish(stream_of(stream)); }

 private:
    static c10::DeviceIndex at(c10::Device device) { return device.has_index() ? device.index() : current_device; }
    static c10::Stream stream(c10::Device device, c10::StreamId id) {
        return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, at(device)), id);
    }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

double elapsed_ms(const int64_t begin, const int64_t end) {
    const auto reached_at = [](const int64_t event) {
        Point& point = *reinterpret_cast<Event*>(event)->point;
        const std::lock_guard lock(point.mutex);
        TORCH_CHECK(point.reached && point.result == kSuccess, "CUDA error: ", point.reached ? point.result : 600);
        return point.reached_at;
    };
    return std::chrono::duration<double, std::milli>(reached_at(end) - reached_at(begin)).count();
}

}  // namespace

namespace at {

// Torch's registry makes the class of this name.
struct CUDAHooks final : CUDAHooksInterface {
    explicit CUDAHooks(CUDAHooksArgs) {}
    void init() const override {}
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    bool hasCUDA() const override { return true; }
    bool hasCUDART() const override { return true; }
    int getNumGPUs() const override { return kNumDevices; }
    DeviceIndex deviceCount() const override { return kNumDevices; }
    DeviceIndex current_device() const override { return ::current_device; }
    DeviceIndex getCurrentDevice() const override { return ::current_device; }
    void setCurrentDevice(DeviceIndex device) const override { ::current_device = device; }
    DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(::current_device, device); }
    DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
        return device < 0 ? ::current_device : exchangeDevice(device);
    }
    bool isPinnedPtr(const void* data) const override { return is_pinned(data, 1); }
    Allocator* getPinnedMemoryAllocator() const override {
        static auto* const instance = new PinnedMemory;
        return instance;
    }
    Allocator* getCUDADeviceAllocator() const override { return &memory(); }
    const Generator& getDefaultGenerator(DeviceIndex) const override { return detail::getDefaultCPUGenerator(); }
    void deviceSynchronize(DeviceIndex device) const override { synchronize_device(device); }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

namespace {

// ---- tensors

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

void* data_of(const Tensor& tensor) {  // without a look at the memory
    auto* const base = static_cast<char*>(tensor.storage().mutable_data());
    return base == nullptr ? nullptr : base + tensor.storage_offset() * static_cast<std::int64_t>(tensor.itemsize());
}

// Returns a tensor of the CPU's over the same memory.
Tensor seen(const Tensor& tensor) {
    void* const data = data_of(tensor);
    const auto options = tensor.options().device(c10::DeviceType::CPU);
    if (data == nullptr || tensor.numel() == 0) {
        return at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type());
    }
    return at::from_blob(reachable(data), tensor.sizes(), tensor.strides(), options);
}

std::size_t span(const Tensor& tensor) {
    return tensor.numel() == 0 ? 0
                               : at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
}

Tensor empty_strided_like(const Tensor& tensor, c10::DeviceIndex device) {
    const c10::impl::VirtualGuardImpl guard(kType);
    const c10::Device before = guard.exchangeDevice({kType, device});
    Tensor made = at::detail::empty_strided_generic(tensor.sizes(), tensor.strides(), &memory(),
                                                    c10::DispatchKeySet(c10::DispatchKey::CUDA), tensor.scalar_type());
    guard.setDevice(before);
    return made;
}

// Lets the stream store values, which nobody changes, to a tensor of the device's.
void store(Stream& stream, const Tensor& to, const Tensor& values) {
    if (to.numel() == 0) return;
    give(stream, [to = seen(to), values] {
        const c10::InferenceMode guard;
        to.copy_(values);
    });
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    const c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_generic(size, &memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                     c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
    const c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_strided_generic(size, stride, &memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                             c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
    c10::TensorImpl& impl = *self.unsafeGetTensorImpl();
    impl.set_sizes_contiguous(size);
    const std::size_t wanted = impl.numel() * self.itemsize() + impl.storage_offset() * self.itemsize();
    c10::StorageImpl& storage = *impl.storage().unsafeGetStorageImpl();
    if (impl.numel() == 0 || wanted <= storage.nbytes()) return self;
    c10::DataPtr data = memory().allocate(wanted);
    if (storage.nbytes() > 0) {
        give(current_stream(self.device().index()),
             [to = reachable(data.get()), from = reachable(storage.mutable_data()), bytes = storage.nbytes()] {
                 std::memcpy(to, from, bytes);
             });
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(wanted);
    return self;
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
    return at::native::as_strided_tensorimpl(self, size, stride, std::nullopt);
}

Tensor& set(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
    c10::TensorImpl& impl = *self.unsafeGetTensorImpl();
    impl.set_storage_keep_dtype(std::move(storage));
    impl.set_storage_offset(offset);
    impl.set_sizes_contiguous(size);
    if (!stride.empty()) impl.set_sizes_and_strides(size, stride);
    return self;
}

Tensor& copy(Tensor& self, const Tensor& from, bool non_blocking) {
    if (self.numel() == 0) return self;
    const Tensor source = from.sizes() == self.sizes() ? from : from.expand(self.sizes());
    Stream& stream = current_stream(on_device(self) ? self.device().index() : source.device().index());
    const auto pinned = [&](const Tensor& host) { return non_blocking && is_pinned(data_of(host), span(host)); };
    if (on_device(self) && on_device(source)) {
        give(stream, [to = seen(self), values = seen(source)] {
            const c10::InferenceMode guard;
            to.copy_(values);
        });
    } else if (on_device(self)) {
        const bool late = pinned(source);
        store(stream, self, late ? source.detach() : source.detach().clone());
        if (!late && !non_blocking) finish(stream);
    } else if (pinned(self)) {
        give(stream, [to = self.detach(), values = seen(source)] {
            const c10::InferenceMode guard;
            to.copy_(values);
        });
    } else {
        finish(stream);
        self.detach().copy_(seen(source));
    }
    return self;
}

void record_stream(Tensor& self, c10::Stream stream) {
    if (void* const data = self.storage().mutable_data()) memory().record(data, stream_of(stream));
}

// ---- all other operators: on the CPU

class Call {
 public:
    Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : schema_(op.schema()), stack_(*stack) {}

    void run(const c10::OperatorHandle& op) {
        find_device();
        Stream& stream = current_stream(device_);
        const std::size_t num_arguments = schema_.arguments().size();
        const std::size_t first = stack_.size() - num_arguments;
        if (const auto written = known_results(); !written.empty()) {
            torch::jit::Stack values, results;
            for (std::size_t i = first; i < stack_.size(); ++i) values.push_back(to_cpu(stack_[i], false, true));
            for (std::size_t i = 0; i < schema_.returns().size(); ++i) results.push_back(stack_[first + written[i]]);
            stack_.resize(first);
            stack_.insert(stack_.end(), results.begin(), results.end());
            later(stream, op, std::move(values));
            return;
        }
        finish(stream);
        for (std::size_t i = 0; i < num_arguments; ++i) {
            const auto* const alias = schema_.arguments()[i].alias_info();
            stack_[first + i] = to_cpu(stack_[first + i], alias != nullptr && alias->isWrite());
        }
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
        for (const auto& [mine, theirs] : written_) {
            if (theirs.sizes() != mine.sizes()) resize(mine, theirs.sizes(), std::nullopt);
            store(stream, mine, theirs);
        }
        const std::size_t results = stack_.size() - schema_.returns().size();
        for (std::size_t i = results; i < stack_.size(); ++i) stack_[i] = to_device(stream, stack_[i]);
    }

 private:
    // Returns which arguments the operator changes if it does nothing else and they have their sizes already: it may
    // run late. Otherwise it returns none. Operators with a generator would take its numbers in another order.
    std::vector<std::size_t> known_results() const {
        const std::vector<c10::Argument>& arguments = schema_.arguments();
        if (!schema_.operator_name().name.starts_with("aten::") || schema_.argumentIndexWithName("generator"))
            return {};
        std::vector<std::size_t> written;
        for (std::size_t i = 0; i < arguments.size(); ++i) {
            if (arguments[i].alias_info() == nullptr || !arguments[i].alias_info()->isWrite()) continue;
            const c10::IValue& value = stack_[stack_.size() - arguments.size() + i];
            if (value.isTensor() && (!on_device(value.toTensor()) || value.toTensor().numel() == 0)) return {};
            written.push_back(i);
        }
        if (!schema_.returns().empty() && schema_.returns().size() != written.size()) return {};
        for (const c10::Argument& result : schema_.returns()) {
            if (result.alias_info() == nullptr || !result.alias_info()->isWrite()) return {};
        }
        return written;
    }

    static void later(Stream& stream, const c10::OperatorHandle& op, torch::jit::Stack values) {
        give(stream, [op, values = std::move(values)]() mutable {
            const c10::InferenceMode guard;
            op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &values);
            values.clear();
        });
    }

    void find_device() {
        device_ = current_device;
        for (std::size_t i = stack_.size() - schema_.arguments().size(); i < stack_.size(); ++i) {
            const c10::IValue& value = stack_[i];
            if (value.isTensor() && on_device(value.toTensor())) {
                device_ = value.toTensor().device().index();
                return;
            }
            if (value.isDevice() && value.toDevice().has_index()) device_ = value.toDevice().index();
            if (!value.isTensorList()) continue;
            for (const Tensor& tensor : value.toTensorVector()) {
                if (on_device(tensor)) device_ = tensor.device().index();
            }
        }
    }

    // A kernel that runs late gets a copy of what it reads from host memory, as a launch gets it.
    Tensor to_cpu(const Tensor& tensor, bool written, bool late = false) {
        if (!on_device(tensor)) {
            const bool copied = late && tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
            return copied ? tensor.detach().clone() : tensor;
        }
        Tensor theirs = seen(tensor);
        if (written) {
            const Tensor copied = at::detail::empty_strided_cpu(theirs.sizes(), theirs.strides(), theirs.scalar_type());
            if (theirs.numel() > 0) std::memcpy(copied.mutable_data_ptr(), theirs.const_data_ptr(), span(theirs));
            theirs = copied;
            written_.emplace_back(tensor, theirs);
        }
        mine_.emplace(theirs.unsafeGetTensorImpl(), tensor);
        kept_.push_back(theirs);
        inputs_.push_back(tensor);
        return theirs;
    }

    c10::IValue to_cpu(const c10::IValue& value, bool written, bool late = false) {
        if (value.isTensor()) return to_cpu(value.toTensor(), written, late);
        if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(c10::DeviceType::CPU);
        if (value.isTensorList()) {
            c10::List<Tensor> list;
            for (const Tensor& tensor : value.toTensorVector()) list.push_back(to_cpu(tensor, written));
            return list;
        }
        if (value.isOptionalTensorList()) {
            c10::List<std::optional<Tensor>> list;
            for (const std::optional<Tensor> tensor : value.toOptionalTensorList()) {
                list.push_back(tensor ? std::optional(to_cpu(*tensor, written)) : std::nullopt);
            }
            return list;
        }
        if (value.isList()) {  // a collective's list of lists
            for (const c10::IValue& inner : value.toListRef()) {
                if (!inner.isTensorList()) return value;
            }
            c10::List<c10::List<Tensor>> lists;
            for (const c10::IValue& inner : value.toListRef()) {
                c10::List<Tensor> list;
                for (const Tensor& tensor : inner.toTensorVector()) list.push_back(to_cpu(tensor, written));
                lists.push_back(list);
            }
            return value.toListRef().empty() ? value : c10::IValue(lists);
        }
        return value;
    }

    Tensor to_device(Stream& stream, const Tensor& result) {
        if (!result.defined() || on_device(result)) return result;
        if (const auto found = mine_.find(result.unsafeGetTensorImpl()); found != mine_.end()) return found->second;
        for (const Tensor& input : inputs_) {  // a view of an input
            auto* const base = static_cast<char*>(input.storage().mutable_data());
            if (base == nullptr || result.numel() == 0) continue;
            const std::ptrdiff_t offset = static_cast<char*>(result.data_ptr()) - static_cast<char*>(reachable(base));
            if (offset < 0 || static_cast<std::size_t>(offset) >= input.storage().nbytes()) continue;
            TORCH_CHECK(result.scalar_type() == input.scalar_type(), schema_.name(), ": a view as another dtype");
            return at::native::as_strided_tensorimpl(input, result.sizes(), result.strides(),
                                                     offset / static_cast<std::ptrdiff_t>(result.itemsize()));
        }
        const Tensor made = empty_strided_like(result, device_);
        if (result.numel() > 0) {
            give(stream, [to = reachable(data_of(made)), result, bytes = span(result)] {
                std::memcpy(to, result.const_data_ptr(), bytes);
            });
        }
        return made;
    }

    c10::IValue to_device(Stream& stream, const c10::IValue& value) {
        if (value.isTensor()) return to_device(stream, value.toTensor());
        if (value.isTensorList()) {
            c10::List<Tensor> list;
            for (const Tensor& tensor : value.toTensorVector()) list.push_back(to_device(stream, tensor));
            return list;
        }
        if (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList()) {
            c10::List<c10::List<Tensor>> lists;
            for (const c10::IValue& inner : value.toListRef()) {
                c10::List<Tensor> list;
                for (const Tensor& tensor : inner.toTensorVector()) list.push_back(to_device(stream, tensor));
                lists.push_back(list);
            }
            return lists;
        }
        return value;
    }

    const c10::FunctionSchema& schema_;
    torch::jit::Stack& stack_;
    c10::DeviceIndex device_ = 0;
    std::unordered_map<c10::TensorImpl*, Tensor> mine_;
    std::vector<std::pair<Tensor, Tensor>> written_;
    std::vector<Tensor> kept_, inputs_;
};

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(op); }

// ---- the functions of torch._C for CUDA, as operators; tests' controls

struct Installed {
    Installed() { c10::SetAllocator(kType, &memory()); }
} installed;

TORCH_LIBRARY(emulated_cuda, m) {
    m.def("init", []() { at::globalContext().lazyInitDevice(kType); });
    m.def("set_device", [](int64_t device) { Guard{}.setDevice({kType, static_cast<c10::DeviceIndex>(device)}); });
    m.def("device", []() -> int64_t { return current_device; });
    m.def("stream", [](int64_t device) -> int64_t { return current_streams.at(device); });
    m.def("set_stream", [](int64_t device, int64_t stream) { current_streams.at(device) = stream; });
    m.def("synchronize", [](int64_t device) { synchronize_device(static_cast<c10::DeviceIndex>(device)); });
    m.def("busy", [](int64_t microseconds) {
        current_stream(current_device).push([microseconds] {
            std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
            return 0;
        });
    });
    m.def("used", []() -> std::vector<int64_t> { return memory().used(); });
    m.def("elapsed_ms", [](int64_t begin, int64_t end) { return elapsed_ms(begin, end); });
    m.def("forget_most", []() { memory().forget_most(); });
    m.def("delay", [](int64_t seed, int64_t most_us) { fake_delay(seed, static_cast<int>(most_us)); });
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("resize_", &resize);
    m.impl("set_.source_Storage_storage_offset", &set);
    m.impl("set_.source_Storage",
           [](Tensor& self, at::Storage from) -> Tensor& { return at::native::set_(self, from); });
    m.impl("set_.source_Tensor",
           [](Tensor& self, const Tensor& from) -> Tensor& { return at::native::set_tensor_(self, from); });
    m.impl("as_strided", &as_strided);
    m.impl("view", [](const Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); });
    m.impl("_reshape_alias", &reshape_alias);
    m.impl("copy_", static_cast<Tensor& (*)(Tensor&, const Tensor&, bool)>(&copy));
    m.impl("record_stream", &record_stream);
    // Some operators are made of others unless a device has a kernel of its own, as the CPU has: the bits differ.
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
        if (!name.name.starts_with("aten::")) continue;
        const auto op = c10::Dispatcher::singleton().findOp(name);
        const auto has = [&op](c10::DispatchKey key) { return op && op->hasKernelForDispatchKey(key); };
        const bool made_of_others = has(c10::DispatchKey::CompositeExplicitAutograd);
        if (!made_of_others || !has(c10::DispatchKey::CPU) || has(c10::DispatchKey::CUDA)) continue;
        m.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
    }
}

struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
};

// Torch sends the collectives of CUDA tensors to the group's CUDA backend. These go to that of the CPU.
TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
    Silent silent;  // about kernels of torch's that these replace
    const c10::WarningUtils::WarningHandlerGuard guard(&silent);
    for (const char* const name : {"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_",
                                   "_allgather_base_", "allgather_into_tensor_coalesced_", "reduce_scatter_",
                                   "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "gather_", "scatter_",
                                   "alltoall_", "alltoall_base_", "barrier", "send", "recv_"}) {
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
    }
}

}  // namespace
