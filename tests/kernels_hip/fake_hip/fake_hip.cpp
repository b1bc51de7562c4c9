// A HIP runtime that has no device until a test connects one: memory is the host's, and a launch is handed to the test,
// which has the emulator execute it. Times are those of no card.
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <string>

#include "hip/hip_runtime_api.h"

struct ihipModule_t {
    const void* image;
};
struct ihipModuleSymbol_t {
    const void* image;
    std::string name;
};
struct ihipEvent_t {};

namespace {

using launch_callback = int (*)(const void* image, const char* kernel, int x, int y, int z, int threads, void** places);

std::string gfx;
int wave_size = 0;
launch_callback launched = nullptr;
std::map<const char*, size_t> allocations;
ihipEvent_t event;

}  // namespace

extern "C" {

void fake_hip_connect(const char* name, int lanes, launch_callback callback) {
    gfx = name;
    wave_size = lanes;
    launched = callback;
}

// Bytes from the address to the end of its allocation, or 0.
size_t fake_hip_extent(const void* address) {
    const char* at = static_cast<const char*>(address);
    auto next = allocations.upper_bound(at);
    if (next == allocations.begin()) return 0;
    const auto found = std::prev(next);
    return at < found->first + found->second ? found->second - static_cast<size_t>(at - found->first) : 0;
}

size_t fake_hip_allocations(void) { return allocations.size(); }

const char* hipGetErrorString(hipError_t error) {
    switch (error) {
        case hipErrorNoDevice: return "no ROCm-capable device is detected";
        case hipErrorLaunchFailure: return "unspecified launch failure";
        default: return "an error of the fake runtime";
    }
}

hipError_t hipGetDeviceCount(int* count) {
    *count = launched ? 1 : 0;
    return launched ? hipSuccess : hipErrorNoDevice;
}
hipError_t hipGetDevice(int* device) {
    *device = 0;
    return launched ? hipSuccess : hipErrorNoDevice;
}
hipError_t hipGetDeviceProperties(hipDeviceProp_t* properties, int) {
    *properties = {};
    std::strcpy(properties->name, "emulator");
    std::strncpy(properties->gcnArchName, gfx.c_str(), sizeof(properties->gcnArchName) - 1);
    properties->warpSize = wave_size;
    properties->multiProcessorCount = 4;
    return hipSuccess;
}
hipError_t hipDeviceSynchronize(void) { return hipSuccess; }

hipError_t hipMalloc(void** pointer, size_t size) {
    *pointer = std::aligned_alloc(256, (size + 255) / 256 * 256);
    if (!*pointer) return hipErrorOutOfMemory;
    allocations[static_cast<const char*>(*pointer)] = size;
    return hipSuccess;
}
hipError_t hipFree(void* pointer) {
    if (!allocations.erase(static_cast<const char*>(pointer))) return hipErrorInvalidValue;
    std::free(pointer);
    return hipSuccess;
}
hipError_t hipMemset(void* pointer, int value, size_t size) {
    if (fake_hip_extent(pointer) < size) return hipErrorInvalidValue;
    std::memset(pointer, value, size);
    return hipSuccess;
}
hipError_t hipMemcpy(void* to, const void* from, size_t size, hipMemcpyKind kind) {
    if (fake_hip_extent(kind == hipMemcpyHostToDevice ? to : from) < size) return hipErrorInvalidValue;
    std::memcpy(to, from, size);
    return hipSuccess;
}

hipError_t hipModuleLoadData(hipModule_t* module, const void* image) {
    if (std::memcmp(image, "\177ELF", 4) != 0) return hipErrorInvalidValue;
    *module = new ihipModule_t{image};
    return hipSuccess;
}
hipError_t hipModuleUnload(hipModule_t module) {
    delete module;
    return hipSuccess;
}
hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t module, const char* name) {
    // As long as the program, as a real one is as long as its module.
    static std::map<std::pair<const void*, std::string>, ihipModuleSymbol_t> symbols;
    *function = &symbols.insert({{module->image, name}, {module->image, name}}).first->second;
    return hipSuccess;
}
hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                 unsigned block_x, unsigned block_y, unsigned block_z, unsigned, hipStream_t,
                                 void** arguments, void**) {
    if (block_y != 1 || block_z != 1 || grid_x * grid_y * grid_z == 0) return hipErrorInvalidValue;
    const int code = launched(function->image, function->name.c_str(), static_cast<int>(grid_x),
                              static_cast<int>(grid_y), static_cast<int>(grid_z), static_cast<int>(block_x), arguments);
    return code ? hipErrorLaunchFailure : hipSuccess;
}

hipError_t hipEventCreate(hipEvent_t* made) {
    *made = &event;
    return hipSuccess;
}
hipError_t hipEventRecord(hipEvent_t, hipStream_t) { return hipSuccess; }
hipError_t hipEventSynchronize(hipEvent_t) { return hipSuccess; }
hipError_t hipEventElapsedTime(float* milliseconds, hipEvent_t, hipEvent_t) {
    *milliseconds = 1.0f;
    return hipSuccess;
}
hipError_t hipEventDestroy(hipEvent_t) { return hipSuccess; }
}
