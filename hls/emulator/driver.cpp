// The library that XRT loads as the driver of emulated SmartSSDs: $XILINX_XRT/lib/libsmart_infinity_card.so.2, with
// XCL_EMULATION_MODE=hw_emu and "hw_em_driver=smart_infinity_card" in xrt.ini.
//
// It loads Debian's libxrt_noop, a driver without a device, and replaces the virtual functions of its devices that move
// and compute. README.md says how it finds them; no private header is needed.
#include <dlfcn.h>
#include <version.h>
#include <xrt.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "card.hpp"
#include "queries.hpp"
#include "vtable.hpp"

static_assert(XRT_VERSION_CODE == XRT_VERSION(2, 13), "the tables below are those of XRT 2.13");

namespace smart_infinity::emulator {
namespace {

// Functions are called as members of xrt_core::noop::device and ::system: the object comes first.
using Device = const void*;
using DevicePointer = std::shared_ptr<void>;

struct Originals {
    void (*load)(Device, const axlf*);
    const Query& (*query)(Device, int);
    DevicePointer (*open)(const void*, unsigned);
} originals;

// The card of each device. It is recorded when the device is opened: when a process ends, XRT frees what belongs to a
// device after the handle by which libxrt_noop knows the device.
struct Numbers {
    std::mutex mutex;
    std::map<Device, unsigned> of;
};

Numbers& numbers() {
    static auto* const numbers = new Numbers;
    return *numbers;
}

Card& card_of(Device device) { return card(number_of(device)); }

unsigned allocate(Device device, std::size_t bytes, unsigned flags) {
    return card_of(device).allocate(bytes, flags, nullptr);
}

unsigned allocate_around(Device device, void* user_memory, std::size_t bytes, unsigned flags) {
    return card_of(device).allocate(bytes, flags, user_memory);
}

void free(Device device, unsigned handle) { card_of(device).free(handle); }

void* map(Device device, unsigned handle, bool /*write*/) { return card_of(device).map(handle); }

void unmap(Device, unsigned, void*) {}  // buffers stay mapped until they are freed

void sync(Device device, unsigned handle, xclBOSyncDirection direction, std::size_t bytes, std::size_t offset) {
    const bool to_card = direction == XCL_BO_SYNC_BO_TO_DEVICE;
    card_of(device).sync(handle, to_card ? Direction::kToCard : Direction::kFromCard, bytes, offset);
}

void copy(Device device, unsigned to, unsigned from, std::size_t bytes, std::size_t to_offset,
          std::size_t from_offset) {
    card_of(device).copy(to, from, bytes, to_offset, from_offset);
}

void properties(Device device, unsigned handle, xclBOProperties* properties) {
    const auto buffer = card_of(device).buffer(handle);
    properties->handle = handle;
    properties->flags = buffer->flags();
    properties->size = buffer->bytes();
    properties->paddr = buffer->address();
}

void submit(Device device, unsigned handle) { card_of(device).submit(handle); }

int wait(Device device, int timeout_ms) {
    constexpr int kLong = 1 << 30;
    return card_of(device).wait(std::chrono::milliseconds(timeout_ms < 0 ? kLong : timeout_ms)) ? 1 : 0;
}

void load(Device device, const axlf* file) {
    card_of(device).load(*file);
    originals.load(device, file);
}

const Query& query(Device device, int key) {
    const Query* found = find_query(key);
    return found != nullptr ? *found : originals.query(device, key);  // the original raises XRT's own error
}

// Returns the number of usable devices and the number of all devices.
std::pair<unsigned, unsigned> count_devices(const void*, bool /*user_function*/) { return {num_cards(), num_cards()}; }

DevicePointer open(const void* system, unsigned number) {
    if (number >= num_cards())
        throw std::runtime_error("Could not open device with index '" + std::to_string(number) + "'");
    DevicePointer device = originals.open(system, number);
    const std::scoped_lock lock(numbers().mutex);
    numbers().of[device.get()] = number;
    return device;
}

#define XRT_SHIM "_ZN8xrt_core4shimINS_11device_pcieEE"
#define XRT_SHIM_CONST "_ZNK8xrt_core4shimINS_11device_pcieEE"

void replace_device(void* library) {
    VirtualTable table(library, "_ZTVN8xrt_core4noop6deviceE");
    table.replace(XRT_SHIM "8alloc_boEmj", allocate);
    table.replace(XRT_SHIM "8alloc_boEPvmj", allocate_around);
    table.replace(XRT_SHIM "7free_boEj", free);
    table.replace(XRT_SHIM "6map_boEjb", map);
    table.replace(XRT_SHIM "8unmap_boEjPv", unmap);
    table.replace(XRT_SHIM "7sync_boEj18xclBOSyncDirectionmm", sync);
    table.replace(XRT_SHIM "7copy_boEjjmmm", copy);
    table.replace(XRT_SHIM_CONST "17get_bo_propertiesEjP15xclBOProperties", properties);
    table.replace(XRT_SHIM "8exec_bufEj", submit);
    table.replace(XRT_SHIM_CONST "9exec_waitEi", wait);
    originals.load = table.replace(XRT_SHIM "9load_axlfEPK4axlf", load);
    originals.query = table.replace("_ZNK8xrt_core4noop6device12lookup_queryENS_5query8key_typeE", query);
}

void replace_system(void* library) {
    VirtualTable table(library, "_ZTVN8xrt_core4noop6systemE");
    table.replace("_ZNK8xrt_core4noop6system17get_total_devicesEb", count_devices);
    originals.open = table.replace("_ZNK8xrt_core4noop6system17get_userpf_deviceEj", open);
}

struct Installation {
    Installation() {
        void* library = dlopen("libxrt_noop.so.2", RTLD_NOW | RTLD_GLOBAL);
        if (library == nullptr) refuse(dlerror());
        replace_device(library);
        replace_system(library);
    }
} installation;

}  // namespace

unsigned number_of(Device device) {
    const std::scoped_lock lock(numbers().mutex);
    return numbers().of.at(device);
}

}  // namespace smart_infinity::emulator
