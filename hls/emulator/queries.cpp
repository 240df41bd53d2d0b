#include "queries.hpp"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <typeinfo>
#include <utility>

// XRT passes properties as boost::any. These classes have its layout and the order of its virtual functions, so that
// Boost's headers are not needed.
namespace smart_infinity::emulator {
namespace {

class AnyContent {
 public:
    virtual ~AnyContent() = default;
    virtual const std::type_info& type() const noexcept = 0;
    virtual AnyContent* clone() const = 0;
};

template <class Value>
class AnyValue final : public AnyContent {
 public:
    explicit AnyValue(Value value) : value_(std::move(value)) {}
    const std::type_info& type() const noexcept override { return typeid(Value); }
    AnyContent* clone() const override { return new AnyValue(value_); }

 private:
    Value value_;
};

class Any {
 public:
    template <class Value>
    explicit Any(Value value) : content_(new AnyValue<Value>(std::move(value))) {}
    Any(const Any&) = delete;
    Any& operator=(const Any&) = delete;
    ~Any() { delete content_; }

 private:
    AnyContent* content_;
};

[[noreturn]] void no_arguments() { throw std::runtime_error("emulated SmartSSD: this property takes no arguments"); }

}  // namespace

// The virtual functions stand in XRT's order.
class Query {
 public:
    virtual ~Query() = default;
    virtual Any get(const void* device) const = 0;
    virtual Any get(const void*, const Any&) const { no_arguments(); }
    virtual Any get(const void*, const Any&, const Any&) const { no_arguments(); }
    virtual Any get(const void*, int, const std::string&) const { no_arguments(); }
    virtual Any get(const void*, const Any&, const Any&, const Any&) const { no_arguments(); }
    virtual void put(const void*, const Any&) const { no_arguments(); }
};

namespace {

// Keys of xrt_core::query::key_type in 2.13.
constexpr int kBdf = 8;
constexpr int kShell = 12;

class Shell final : public Query {
    Any get(const void*) const override { return Any(std::string("xilinx_u2_gen3x4_xdma_gc_base_2")); }
};

class Bdf final : public Query {
    // Domain, bus, device and function.
    using Address = std::tuple<std::uint16_t, std::uint16_t, std::uint16_t, std::uint16_t>;

    Any get(const void* device) const override {
        return Any(Address{0, static_cast<std::uint16_t>(0x10 + number_of(device)), 0, 1});
    }
};

}  // namespace

const Query* find_query(int key) {
    static const Shell shell;
    static const Bdf bdf;
    switch (key) {
        case kShell:
            return &shell;
        case kBdf:
            return &bdf;
        default:
            return nullptr;
    }
}

}  // namespace smart_infinity::emulator
