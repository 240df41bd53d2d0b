#include "vtable.hpp"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "mapping.hpp"

namespace smart_infinity::emulator {

void refuse(const std::string& reason) {
    std::fprintf(stderr, "emulated SmartSSD: %s; it works with XRT 2.13 only\n", reason.c_str());
    std::abort();
}

void* require_symbol(void* library, const char* symbol) {
    void* address = dlsym(library, symbol);
    if (address == nullptr) refuse(std::string("libxrt_noop has no ") + symbol);
    return address;
}

VirtualTable::VirtualTable(void* library, const char* symbol)
    : library_(library), name_(symbol), begin_(static_cast<void**>(require_symbol(library, symbol))) {
    Dl_info info;
    const ElfW(Sym)* entry = nullptr;
    if (dladdr1(begin_, &info, reinterpret_cast<void**>(const_cast<ElfW(Sym)**>(&entry)), RTLD_DL_SYMENT) == 0 ||
        entry == nullptr || entry->st_size == 0) {
        refuse("the size of " + name_ + " is not known");
    }
    end_ = begin_ + entry->st_size / sizeof(void*);
    const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(begin_) / kPageBytes * kPageBytes;
    const std::size_t bytes = round_up(reinterpret_cast<std::uintptr_t>(end_) - first, kPageBytes);
    if (mprotect(reinterpret_cast<void*>(first), bytes, PROT_READ | PROT_WRITE) != 0) {
        refuse(name_ + " cannot be written");
    }
}

void* VirtualTable::replace_entry(const char* symbol, void* replacement) {
    void* const original = require_symbol(library_, symbol);
    if (std::count(begin_, end_, original) != 1) refuse(std::string(symbol) + " is not once in " + name_);
    *std::find(begin_, end_, original) = replacement;
    return original;
}

}  // namespace smart_infinity::emulator
