#include "code_objects.hpp"

#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>

#include "rocm_sd_kernels.h"

namespace rocm_sd {

namespace {

thread_local std::string last_error, last_variant;

struct device {
    std::string gfx;
    int wave_size, compute_units;
};

std::mutex guard;
std::map<int, device> devices;
std::map<std::pair<int, const code_object*>, hipModule_t> modules;

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
    found = devices[number] = {name.substr(0, name.find(':')), properties.warpSize,
                               properties.multiProcessorCount};
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

int device_variant::parameter(const char* key) const {
    const std::string words = std::string(" ") + object->parameters, word = std::string(" ") + key + "=";
    const size_t at = words.find(word);
    if (at == std::string::npos) throw std::logic_error(std::string(object->variant) + " has no " + key);
    return std::atoi(words.c_str() + at + word.size());
}

int find_variant(const std::string& name, device_variant& found) {
    const std::lock_guard<std::mutex> lock(guard);
    device here;
    if (const int code = current_device(found.device, here)) return code;
    found.object = find_object(name, here.gfx);
    if (found.object == nullptr) {
        return fail(rocm_sd_no_code, "there is no code for " + here.gfx + " of \"" + name + "\"; in the library: " +
                                         rocm_sd_architectures());
    }
    found.wave_size = here.wave_size;
    found.compute_units = here.compute_units;
    return 0;
}

int find_kernel(const device_variant& variant, const char* kernel, device_kernel& found) {
    const std::lock_guard<std::mutex> lock(guard);
    const std::string name = variant.object->variant;
    hipModule_t& module = modules[{variant.device, variant.object}];
    if (module == nullptr) {
        if (const hipError_t error = hipModuleLoadData(&module, variant.object->begin)) {
            module = nullptr;
            return failed(error, "loading " + name);
        }
    }
    if (const hipError_t error = hipModuleGetFunction(&found.function, module, kernel)) return failed(error, kernel);
    found.wave_size = variant.wave_size;
    last_variant = name.substr(0, name.find(' ') + 1) + variant.object->parameters;
    return 0;
}

int find_kernel(const std::string& variant, const char* kernel, device_kernel& found) {
    device_variant here;
    if (const int code = find_variant(variant, here)) return code;
    return find_kernel(here, kernel, found);
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
