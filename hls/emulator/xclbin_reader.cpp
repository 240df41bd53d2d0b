#include "xclbin_reader.hpp"

#include <xclbin.h>

#include <algorithm>
#include <cerrno>

#include "base/system_error.hpp"

namespace smart_infinity::emulator {
namespace {

template <class Section>
const Section& section(const axlf& file, axlf_section_kind kind, const char* name) {
    const axlf_section_header* header = xclbin::get_axlf_section(&file, kind);
    if (header == nullptr) {
        throw SystemError(EINVAL, std::string("the xclbin has no section ") + name);
    }
    return *reinterpret_cast<const Section*>(reinterpret_cast<const char*>(&file) + header->m_sectionOffset);
}

}  // namespace

Xclbin::Xclbin(const axlf& file) : uuid(reinterpret_cast<const char*>(file.m_header.uuid), sizeof file.m_header.uuid) {
    const auto& topology = section<mem_topology>(file, MEM_TOPOLOGY, "MEM_TOPOLOGY");
    for (int index = 0; index < topology.m_count; ++index) {
        const mem_data& bank = topology.m_mem_data[index];
        banks.push_back({bank.m_base_address, bank.m_used != 0 ? bank.m_size * 1024 : 0});
    }
    const auto& layout = section<ip_layout>(file, IP_LAYOUT, "IP_LAYOUT");
    std::vector<ip_data> units;
    for (int index = 0; index < layout.m_count; ++index) {
        if (layout.m_ip_data[index].m_type == IP_KERNEL) units.push_back(layout.m_ip_data[index]);
    }
    std::ranges::stable_sort(units, {}, [](const ip_data& unit) { return unit.properties & IP_INTERRUPT_ID_MASK; });
    for (const ip_data& unit : units) compute_units.emplace_back(reinterpret_cast<const char*>(unit.m_name));
}

}  // namespace smart_infinity::emulator
