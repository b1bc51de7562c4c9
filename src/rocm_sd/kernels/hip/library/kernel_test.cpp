// Every family of kernels on this machine's GPU, against references computed here: right, and how fast.
#include <iomanip>

#include "test_cases.hpp"

namespace rocm_sd_test {

namespace {

const char* const help =
    R"(rocm_sd_kernel_test [--kernel NAME] [--dtype NAME] [--shape TEXT] [--repeats N] [--small] [--list] [--help]

Runs rocm_sd's HIP kernels on the current GPU. Each line has the kernel, its dtype and shape, the average time, how
much it moved or computed in that time, its largest error with the share of what is allowed, and PASSED or FAILED; the
line below has the variant that was launched.

--kernel NAME  this family only; --list names them
--dtype NAME   this dtype only: float16, bfloat16, float32
--shape TEXT   only calls whose shape, as it is printed, has this text: "head 40"
--repeats N    launches that the time is the average of (100)
--small        odd small shapes only
--list         names the families, one a line

The exit code is 0 where all passed, 1 where one failed, 2 where nothing could be run.
)";

const std::vector<family>& families() {
    static const std::vector<family> all = [] {
        std::vector<family> made = plain_families();
        for (const auto& more : {product_families(), convolution_families()})
            made.insert(made.end(), more.begin(), more.end());
        return made;
    }();
    return all;
}

double average_seconds(const test_case& test, int repeats) {
    hipEvent_t before, after;
    must(hipEventCreate(&before), "making an event");
    must(hipEventCreate(&after), "making an event");
    must(hipEventRecord(before, nullptr), "recording an event");
    for (int i = 0; i < repeats; ++i) test.launch();
    must(hipEventRecord(after, nullptr), "recording an event");
    must(hipEventSynchronize(after), "waiting for the device");
    float milliseconds = 0.0f;
    must(hipEventElapsedTime(&milliseconds, before, after), "reading the time");
    must(hipEventDestroy(before), "freeing an event");
    must(hipEventDestroy(after), "freeing an event");
    return static_cast<double>(milliseconds) / 1e3 / repeats;
}

// Prints the line; whether it passed.
bool run(const test_case& test, int repeats) {
    std::cout << std::left << std::setw(20) << test.kernel << " " << std::setw(8) << name_of(test.dtype) << " "
              << std::setw(34) << test.shape << std::right << std::flush;
    if (test.launch() != 0) {
        std::cout << " FAILED: " << rocm_sd_last_error() << std::endl;
        return false;
    }
    const std::string variant = rocm_sd_last_variant();
    must(hipDeviceSynchronize(), "waiting for the device");
    difference worst;
    bool guards = true;
    for (const auto& result : test.results) {
        bool whole;
        const difference one = compare(result.found->read(whole), result.right, result.dtype);
        guards = guards && whole;
        worst.wrong += one.wrong;
        worst.largest = std::max(worst.largest, one.largest);
        worst.of_allowed = std::max(worst.of_allowed, one.of_allowed);
    }
    const double seconds = average_seconds(test, repeats);
    const bool ok = worst.wrong == 0 && guards;
    std::string trouble = guards ? "" : ", wrote beyond the end";
    if (worst.wrong) trouble += ", " + std::to_string(worst.wrong) + " values wrong";
    std::cout << std::fixed << std::setprecision(1) << std::setw(9) << seconds * 1e6 << " us " << std::setw(9)
              << test.work / 1e9 / std::max(seconds, 1e-12) << (test.is_flops ? " GFLOP/s" : " GB/s   ")
              << std::scientific << std::setprecision(2) << "  error " << worst.largest << std::fixed << " ("
              << std::setprecision(0) << worst.of_allowed * 100 << "% of allowed)"
              << trouble << (ok ? "  PASSED" : "  FAILED") << "\n    " << variant << std::endl;
    return ok;
}

}  // namespace

}  // namespace rocm_sd_test

int main(int count, char** words) {
    using namespace rocm_sd_test;
    std::string only, only_dtype, only_shape;
    int repeats = 100;
    bool small = false;
    for (int i = 1; i < count; ++i) {
        const std::string word = words[i];
        if (word == "--help") {
            std::cout << help;
            return 0;
        } else if (word == "--list") {
            for (const family& each : families()) std::cout << each.name << "\n";
            return 0;
        } else if (word == "--small") {
            small = true;
        } else if (word == "--kernel" && i + 1 < count) {
            only = words[++i];
        } else if (word == "--dtype" && i + 1 < count) {
            only_dtype = words[++i];
        } else if (word == "--shape" && i + 1 < count) {
            only_shape = words[++i];
        } else if (word == "--repeats" && i + 1 < count) {
            repeats = std::atoi(words[++i]);
        } else {
            std::cerr << "What is \"" << word << "\"?\n\n" << help;
            return 2;
        }
    }
    const bool known = only.empty() || std::any_of(families().begin(), families().end(),
                                                   [&](const family& each) { return only == each.name; });
    if (!known || repeats < 1) {
        std::cerr << (known ? "--repeats must be 1 or more.\n" : "There is no kernel " + only + ".\n") << "\n" << help;
        return 2;
    }

    int devices = 0;
    const hipError_t error = hipGetDeviceCount(&devices);
    if (error != hipSuccess || devices == 0) {
        std::cerr << "HIP sees no GPU here (" << hipGetErrorString(error == hipSuccess ? hipErrorNoDevice : error)
                  << ").\nIs the card listed by rocminfo? "
                  << "May you open /dev/kfd and /dev/dri (groups render and video)?\n"
                  << "This build has code for: " << rocm_sd_architectures() << "\n";
        return 2;
    }
    int number = 0;
    hipDeviceProp_t device;
    must(hipGetDevice(&number), "asking for the device");
    must(hipGetDeviceProperties(&device, number), "asking for the device's properties");
    std::cout << "device " << number << ": " << device.name << ", " << device.gcnArchName << ", "
              << device.multiProcessorCount << " compute units, waves of " << device.warpSize
              << "\nbuilt for: " << rocm_sd_architectures() << "\n" << std::endl;

    int ran = 0, failed = 0;
    for (const family& each : families()) {
        if (!only.empty() && only != each.name) continue;
        cases all;
        for (const rocm_sd_dtype dtype : {rocm_sd_float16, rocm_sd_bfloat16, rocm_sd_float32}) each.small(all, dtype);
        if (!small) each.real(all);
        for (const auto& test : all) {
            if (!only_dtype.empty() && only_dtype != name_of(test->dtype)) continue;
            if (test->shape.find(only_shape) == std::string::npos) continue;
            ++ran;
            if (!run(*test, repeats)) ++failed;
        }
    }
    must(static_cast<hipError_t>(std::max(0, rocm_sd_unload())), "unloading");
    std::cout << "\n" << ran - failed << " of " << ran << " passed" << std::endl;
    if (ran == 0) std::cerr << "There is no test for these options.\n";
    return ran == 0 ? 2 : failed ? 1 : 0;
}
