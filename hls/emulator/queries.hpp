#pragma once

namespace smart_infinity::emulator {

// XRT's reader of one property of a device (xrt_core::query::request).
class Query;

// Returns the reader of a property; null if an emulated card does not have the property.
const Query* find_query(int key);

// Returns the number of the card that a device of XRT represents; defined in driver.cpp.
unsigned number_of(const void* device);

}  // namespace smart_infinity::emulator
