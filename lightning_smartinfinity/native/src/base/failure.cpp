#include "base/failure.hpp"

namespace smart_infinity {

const char* name_of(FailureKind kind) {
    switch (kind) {
        case FailureKind::kIo:
            return "io";
        case FailureKind::kShort:
            return "short";
        case FailureKind::kChecksum:
            return "checksum";
        case FailureKind::kForeign:
            return "foreign";
        case FailureKind::kGeneration:
            return "generation";
        case FailureKind::kFormat:
            return "format";
        case FailureKind::kCuda:
            return "cuda";
        case FailureKind::kDevice:
            return "device";
        case FailureKind::kTimeout:
            return "timeout";
        case FailureKind::kGradient:
            break;
    }
    return "gradient";
}

}  // namespace smart_infinity
