// Stands in for the toolchain's header, which C simulation does without: declarations of what the kernels call.
#pragma once

namespace hls {
float sqrt(float value);
}
