// From a variant's name to a function on the current device. A variant is a source with its parameters, written as
// variants.cmake writes them: "upsample element=half width=8 scale=2 bilinear=1". A tile is "large" or "small" in a
// name; the numbers that it stands for on an architecture are among the parameters of its code.
#pragma once

#include <hip/hip_runtime_api.h>

#include <string>

namespace rocm_sd {

// The table that CMake writes: every variant for every architecture.
struct code_object {
    const char* variant;
    const char* gfx;
    const char* parameters;  // "element=half width=8": what the source was compiled with
    const unsigned char* begin;
};
extern const code_object code_objects[];
extern const int code_object_count;

// Remembers the sentence for rocm_sd_last_error, and gives the code back.
int fail(int code, const std::string& sentence);

// The code of a variant for the current device, and what the launchers need to know of that device.
struct device_variant {
    const code_object* object;
    int device, wave_size, compute_units;

    // parameter("block_m"), a number that the source was compiled with.
    int parameter(const char* key) const;
};

// 0 or what the public functions return.
int find_variant(const std::string& name, device_variant& found);

struct device_kernel {
    hipFunction_t function;
    int wave_size;
};

// Loads the module when it is first asked for on a device; 0 or what the public functions return.
int find_kernel(const device_variant& variant, const char* kernel, device_kernel& found);
int find_kernel(const std::string& variant, const char* kernel, device_kernel& found);

struct grid_size {
    int x, y, z;
};

// A workgroup has `threads` threads. Arguments are copied as they are: their types must be the kernel's.
template <typename... Arguments>
int launch(const device_kernel& kernel, grid_size grid, int threads, hipStream_t stream, Arguments... arguments) {
    void* places[] = {&arguments...};
    const hipError_t error =
        hipModuleLaunchKernel(kernel.function, static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y),
                              static_cast<unsigned>(grid.z), static_cast<unsigned>(threads), 1, 1, 0, stream, places,
                              nullptr);
    return error == hipSuccess ? 0 : fail(error, std::string("a launch failed: ") + hipGetErrorString(error));
}

}  // namespace rocm_sd
