#include "code_objects.hpp"

#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "rocm_sd_kernels.h"

namespace rocm_sd {

namespace {

thread_local std::string last_error, last_variant;

struct device {
    std::string gfx;
    int wave_size;
};

std::mutex guard;
std::map<int, device> devices;
std::map<std::pair<int, std::string>, hipModule_t> modules;

int failed(hipError_t error, const std::string& doing) { return fail(error, doing + ": " + hipGetErrorString(error)); }

int current_device(int& number, device& found) {
    if (const hipError_t error = hipGetDevice(&number)) return failed(error, "no device");
    const auto known = devices.find(number);
    if (known != devices.end()) {
        found = known->second;
        return 0;
    }
    hipDeviceProp_t properties;
    if (const hipError_t error = hipGetDeviceProperties(&properties, number)) return failed(error, "no properties");
    const std::string name = properties.gcnArchName;
    // gfx90a:sramecc+:xnack- is gfx90a: the code runs with either.
    found = devices[number] = {name.substr(0, name.find(':')), properties.warpSize};
    return 0;
}

const code_object* find_object(const std::string& variant, const std::string& gfx) {
    for (int i = 0; i < code_object_count; ++i) {
        if (variant == code_objects[i].variant && gfx == code_objects[i].gfx) return &code_objects[i];
    }
    return nullptr;
}

}  // namespace

int fail(int code, const std::string& sentence) {
    last_error = sentence;
    return code;
}

int find_kernel(const std::string& variant, const char* kernel, device_kernel& found) {
    const std::lock_guard<std::mutex> lock(guard);
    int number;
    device here;
    if (const int code = current_device(number, here)) return code;
    hipModule_t& module = modules[{number, variant}];
    if (module == nullptr) {
        const code_object* object = find_object(variant, here.gfx);
        if (object == nullptr) {
            return fail(rocm_sd_no_code, "there is no code for " + here.gfx + " of \"" + variant +
                                             "\"; in the library: " + rocm_sd_architectures());
        }
        if (const hipError_t error = hipModuleLoadData(&module, object->begin)) {
            module = nullptr;
            return failed(error, "loading " + variant);
        }
    }
    if (const hipError_t error = hipModuleGetFunction(&found.function, module, kernel)) return failed(error, kernel);
    found.wave_size = here.wave_size;
    last_variant = variant;
    return 0;
}

}  // namespace rocm_sd

const char* rocm_sd_last_error(void) { return rocm_sd::last_error.c_str(); }

const char* rocm_sd_last_variant(void) { return rocm_sd::last_variant.c_str(); }

const char* rocm_sd_architectures(void) {
    static const std::string names = [] {
        std::set<std::string> each;
        for (int i = 0; i < rocm_sd::code_object_count; ++i) each.insert(rocm_sd::code_objects[i].gfx);
        std::string all;
        for (const std::string& name : each) all += (all.empty() ? "" : " ") + name;
        return all;
    }();
    return names.c_str();
}

int rocm_sd_unload(void) {
    const std::lock_guard<std::mutex> lock(rocm_sd::guard);
    int code = 0;
    for (const auto& entry : rocm_sd::modules) {
        if (entry.second == nullptr) continue;
        if (const hipError_t error = hipModuleUnload(entry.second)) code = rocm_sd::failed(error, "unloading");
    }
    rocm_sd::modules.clear();
    rocm_sd::devices.clear();
    return code;
}
