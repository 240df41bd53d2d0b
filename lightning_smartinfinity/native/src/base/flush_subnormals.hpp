#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace smart_infinity {

// While an object exists, its thread treats subnormals as zero if kFlushes, and exactly otherwise. The destructor
// restores the earlier mode.
template <bool kFlushes>
class SubnormalMode {
 public:
    SubnormalMode() : saved_(read()) { write(kFlushes ? saved_ | kFlush : saved_ & ~kFlush); }
    ~SubnormalMode() { write(saved_); }
    SubnormalMode(const SubnormalMode&) = delete;
    SubnormalMode& operator=(const SubnormalMode&) = delete;

 private:
#if defined(__x86_64__)
    using Control = std::uint32_t;
    static constexpr Control kFlush = 0x8040;  // MXCSR: flush to zero, denormals are zero
    static Control read() { return _mm_getcsr(); }
    static void write(Control control) { _mm_setcsr(control); }
#elif defined(__aarch64__)
    using Control = std::uint64_t;
    static constexpr Control kFlush = Control{1} << 24;  // FPCR.FZ: inputs and results
    static Control read() {
        Control control;
        __asm__ volatile("mrs %0, fpcr" : "=r"(control));
        return control;
    }
    static void write(Control control) { __asm__ volatile("msr fpcr, %0" : : "r"(control)); }
#else
    using Control = std::uint32_t;
    static constexpr Control kFlush = 0;
    static Control read() { return 0; }
    static void write(Control) {}
#endif

    Control saved_;
};

// For updates: subnormals slow a CPU down severely, and accelerators flush them too.
using FlushSubnormals = SubnormalMode<true>;
// For compressed gradients, where no element may be lost. A library compiled with fast math may have changed the mode.
using KeepSubnormals = SubnormalMode<false>;

}  // namespace smart_infinity
