// y[Q][P] from x[P][Q], one thread for one value: layout_copy.hip is compared with it.
#include <rocm_sd/types.hpp>
using namespace rocm_sd;
ROCM_SD_KERNEL(256) naive(const bits16* x, bits16* y, int P, int Q) {
    const int i = block_x() * 256 + thread_index();
    if (i < P * Q) y[i % Q * P + i / Q] = x[i];
}
