#pragma once

#include <string>

namespace smart_infinity::emulator {

// A table of virtual functions in a library, some of which are replaced. Ends the process with a message if it is not
// the table that was expected: calling on would call anything.
class VirtualTable {
 public:
    // library: from dlopen; symbol: the table's mangled name.
    VirtualTable(void* library, const char* symbol);

    // Puts a function where the one of that mangled name stands; that name's address.
    template <class Function>
    Function* replace(const char* symbol, Function* replacement) {
        return reinterpret_cast<Function*>(replace_slot(symbol, reinterpret_cast<void*>(replacement)));
    }

 private:
    void* replace_slot(const char* symbol, void* replacement);

    void* const library_;
    const std::string name_;
    void** begin_;
    void** end_;
};

// A function of a library by its mangled name; ends the process if it is missing.
void* require_symbol(void* library, const char* symbol);

[[noreturn]] void refuse(const std::string& reason);

}  // namespace smart_infinity::emulator
