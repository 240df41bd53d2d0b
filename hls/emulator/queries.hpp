#pragma once

namespace smart_infinity::emulator {

// XRT's reader of one property of a device (xrt_core::query::request).
class Query;

// The reader of a property that an emulated card has; null for one that it has not.
const Query* find_query(int key);

// How the driver tells the number of the card that a device of XRT stands for.
using CardNumber = unsigned(const void* device);
void set_card_number(CardNumber* card_number);

}  // namespace smart_infinity::emulator
