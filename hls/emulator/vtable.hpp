#pragma once

#include <string>

namespace smart_infinity::emulator {

// A table of virtual functions in a library, in which functions are replaced. Ends the process with a message if it is
// not the expected table, since calls would then reach arbitrary code.
class VirtualTable {
 public:
    // library: from dlopen; symbol: the table's mangled name.
    VirtualTable(void* library, const char* symbol);

    // Replaces the function with that mangled name; returns its address.
    template <class Function>
    Function* replace(const char* symbol, Function* replacement) {
        return reinterpret_cast<Function*>(replace_entry(symbol, reinterpret_cast<void*>(replacement)));
    }

 private:
    void* replace_entry(const char* symbol, void* replacement);

    void* const library_;
    const std::string name_;
    void** begin_;
    void** end_;
};

// Returns a function of a library by its mangled name; ends the process if it is missing.
void* require_symbol(void* library, const char* symbol);

[[noreturn]] void refuse(const std::string& reason);

}  // namespace smart_infinity::emulator
