#include "cuda/cuda_device.hpp"

#include <utility>

namespace smart_infinity {
namespace {

constexpr unsigned kPortable = 1;       // registered for every context of the process
constexpr unsigned kNonBlocking = 1;    // no implicit order with the default stream
constexpr unsigned kBlockingSync = 1;   // a waiting thread sleeps
constexpr unsigned kDisableTiming = 2;  // makes events cheaper
constexpr unsigned kNoFlags = 0;
constexpr CudaResult kNotReady = 600;

}  // namespace

CudaDevice::Current::Current(const CudaDevice& device) : driver_(device.driver()) {
    device.process_.require_current("CudaDevice");
    driver_.call(driver_.context_push, device.context_);
}

CudaDevice::Current::~Current() {
    CudaContext popped = nullptr;
    (void)driver_.attempt(driver_.context_pop, &popped);
}

CudaDevice::CudaDevice(int index) : index_(index), driver_(cuda_driver()) {
    driver_->call(driver_->device_get, &device_, index);
    driver_->call(driver_->primary_context_retain, &context_, device_);
}

CudaDevice::~CudaDevice() {
    if (is_usable()) (void)driver_->attempt(driver_->primary_context_release, device_);
}

bool CudaDevice::register_host(void* data, std::size_t bytes) const {
    try {
        const Current current(*this);
        driver_->call(driver_->host_register, data, bytes, kPortable);
        return true;
    } catch (const CudaError& error) {
        const std::lock_guard lock(mutex_);
        if (registration_failure_.empty()) registration_failure_ = error.what();
        return false;
    }
}

std::string CudaDevice::registration_failure() const {
    const std::lock_guard lock(mutex_);
    return registration_failure_;
}

void CudaDevice::unregister_host(void* data) const noexcept { release(driver_->host_unregister, data); }

void CudaDevice::copy_to_device(Address device, const void* host, std::size_t bytes, CudaStreamHandle stream) const {
    const Current current(*this);
    driver_->call(driver_->copy_to_device, device, host, bytes, stream);
}

void CudaDevice::copy_to_host(void* host, Address device, std::size_t bytes, CudaStreamHandle stream) const {
    const Current current(*this);
    driver_->call(driver_->copy_to_host, host, device, bytes, stream);
}

CudaEvent::CudaEvent(std::shared_ptr<const CudaDevice> device) : device_(std::move(device)) {
    const CudaDevice::Current current(*device_);
    const CudaDriver& driver = device_->driver();
    driver.call(driver.event_create, &event_, kBlockingSync | kDisableTiming);
}

CudaEvent::~CudaEvent() {
    // The driver keeps an incomplete event until it completes.
    device_->release(device_->driver().event_destroy, event_);
}

void CudaEvent::record(CudaStreamHandle stream) const {
    const CudaDevice::Current current(*device_);
    const CudaDriver& driver = device_->driver();
    driver.call(driver.event_record, event_, stream);
}

void CudaEvent::synchronize() const {
    const CudaDevice::Current current(*device_);
    const CudaDriver& driver = device_->driver();
    driver.call(driver.event_synchronize, event_);
}

bool CudaEvent::done() const {
    const CudaDevice::Current current(*device_);
    const CudaDriver& driver = device_->driver();
    const CudaResult result = driver.attempt(driver.event_query, event_);
    if (result == kNotReady) return false;
    driver.require(result, driver.event_query.name);
    return true;
}

void CudaEvent::hold(CudaStreamHandle stream) const {
    const CudaDevice::Current current(*device_);
    const CudaDriver& driver = device_->driver();
    driver.call(driver.stream_wait_event, stream, event_, kNoFlags);
}

CudaStream::CudaStream(std::shared_ptr<const CudaDevice> device) : device_(std::move(device)) {
    const CudaDevice::Current current(*device_);
    const CudaDriver& driver = device_->driver();
    driver.call(driver.stream_create, &stream_, kNonBlocking);
}

CudaStream::~CudaStream() { device_->release(device_->driver().stream_destroy, stream_); }

void CudaStream::follow(CudaStreamHandle other) const {
    const CudaEvent point(device_);
    point.record(other);
    point.hold(stream_);
}

void CudaStream::lead(CudaStreamHandle other) const {
    const CudaEvent point(device_);
    point.record(stream_);
    point.hold(other);
}

}  // namespace smart_infinity
