// Functions that tests call through ctypes. A card's number may be -1 for all cards; errors are texts, or null.
#include <functional>
#include <string>

#include "card.hpp"
#include "journal.hpp"

using namespace smart_infinity::emulator;

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

const char* attempt(const std::function<void()>& action) {
    static thread_local std::string message;
    try {
        action();
        return nullptr;
    } catch (const std::exception& error) {
        message = error.what();
        return message.c_str();
    }
}

const char* for_cards(int number, const std::function<void(Card&)>& action) {
    return attempt([&] {
        if (number >= 0) return action(card(static_cast<unsigned>(number)));
        for (unsigned index = 0; index < kMaxCards; ++index) action(card(index));
    });
}

}  // namespace

EXPORTED void smart_infinity_card_set_count(unsigned count) { set_num_cards(count); }

EXPORTED const char* smart_infinity_card_set(int number, const char* setting, std::int64_t value) {
    return for_cards(number, [&](Card& card) { card.settings().set(setting, value); });
}

EXPORTED const char* smart_infinity_card_inject(int number, const char* kind, std::int64_t skipped,
                                                std::uint64_t pointer, std::uint64_t bit_offset) {
    return for_cards(number, [&](Card& card) { card.faults().add({fault_kind(kind), skipped, pointer, bit_offset}); });
}

EXPORTED const char* smart_infinity_card_lose(int number) {
    return for_cards(number, [](Card& card) { card.lose(); });
}

EXPORTED const char* smart_infinity_card_release(int number) {
    return for_cards(number, [](Card& card) { card.release(); });
}

EXPORTED const char* smart_infinity_card_reset(int number) {
    return for_cards(number, [](Card& card) { card.reset(); });
}

EXPORTED const char* smart_infinity_card_counter(int number, const char* name, std::int64_t* value) {
    return attempt([&] { *value = card(static_cast<unsigned>(number)).counter(name); });
}

EXPORTED const char* smart_infinity_card_events() {
    static thread_local std::string text;
    text = journal().text();
    return text.c_str();
}

EXPORTED void smart_infinity_card_clear_events() { journal().clear(); }
