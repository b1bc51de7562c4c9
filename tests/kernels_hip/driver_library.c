/* A driver without a GPU: the functions that the loader calls, which note what they are given and answer as told.
   Compiled once with HIP's names and once with CUDA's; the compiler in a library is in it, too. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#ifdef ROCM_SD_CUDA
#define MODULE(name) cuModule##name
#define LAUNCH cuLaunchKernel
#else
#define MODULE(name) hipModule##name
#define LAUNCH hipModuleLaunchKernel
#endif

typedef struct {
    char name[32];
    uint64_t values[12];
    char text[64];
    unsigned char parameters[128];
} call;

static call calls[128];
static int count, failure, sizes[32], parameters;
static char failing[32];
static const char* code;
static size_t code_bytes;
static char source[1 << 20], options[4096];

static call* note(const char* name) {
    call* c = &calls[count++ % 128];
    memset(c, 0, sizeof *c);
    snprintf(c->name, sizeof c->name, "%s", name);
    return c;
}
static int answer(const char* name) { return strcmp(failing, name) ? 0 : failure; }

/* What the tests ask and set. */
void fake_reset(void) { count = failure = parameters = 0, failing[0] = 0, code = 0; }
void fake_fail(const char* name, int with) { snprintf(failing, sizeof failing, "%s", name), failure = with; }
void fake_parameters(const int* bytes, int n) { memcpy(sizes, bytes, n * sizeof *bytes), parameters = n; }
void fake_code(const char* bytes, size_t n) { code = bytes, code_bytes = n; }
int fake_count(void) { return count; }
call* fake_call(int index) { return &calls[index]; }
const char* fake_source(void) { return source; }
const char* fake_options(void) { return options; }

int MODULE(LoadData)(void** module, const void* image) {
    call* c = note("load");
    c->values[0] = strlen(image);
    memcpy(c->text, image, 4);
    if (answer("load")) return answer("load");
    *module = (void*)(uintptr_t)(0x7f0000001000 + count);
    c->values[1] = (uintptr_t)*module;
    return 0;
}
int MODULE(GetFunction)(void** function, void* module, const char* name) {
    call* c = note("function");
    c->values[0] = (uintptr_t)module;
    snprintf(c->text, sizeof c->text, "%s", name);
    if (answer("function")) return answer("function");
    *function = (void*)(uintptr_t)(0x7f0000002000 + count);
    c->values[1] = (uintptr_t)*function;
    return 0;
}
int LAUNCH(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned lds,
           void* stream, void** given, void** extra) {
    call* c = note("launch");
    uint64_t all[] = {(uintptr_t)function, gx, gy, gz, bx, by, bz, lds, (uintptr_t)stream, (uintptr_t)extra};
    memcpy(c->values, all, sizeof all);
    for (int i = 0, at = 0; i < parameters; at += sizes[i++]) memcpy(c->parameters + at, given[i], sizes[i]);
    return answer("launch");
}
int MODULE(Unload)(void* module) {
    note("unload")->values[0] = (uintptr_t)module;
    return answer("unload");
}

static const char* name_of(int error) {
    return error == 2 ? "ErrorOutOfMemory" : error == 209 ? "ErrorNoBinaryForGpu" : error == 700 ? "ErrorFault" : NULL;
}
static const char* text_of(int error) {
    return error == 2 ? "out of memory" : error == 209 ? "no kernel image for the device" : error == 700 ? "a fault" : NULL;
}
#ifdef ROCM_SD_CUDA
int cuGetErrorName(int error, const char** out) { return (*out = name_of(error)) ? 0 : 1; }
int cuGetErrorString(int error, const char** out) { return (*out = text_of(error)) ? 0 : 1; }
static __thread void* context;
int cuCtxGetCurrent(void** out) { return *out = context, note("current"), answer("current"); }
int cuDevicePrimaryCtxRetain(void** out, int device) {
    note("retain")->values[0] = device;
    *out = (void*)0x7f0000003000;
    return answer("retain");
}
int cuCtxSetCurrent(void* given) { return context = given, note("set")->values[0] = (uintptr_t)given, answer("set"); }
#else
const char* hipGetErrorName(int error) { return name_of(error); }
const char* hipGetErrorString(int error) { return text_of(error); }

int hiprtcVersion(int* major, int* minor) { return *major = 7, *minor = 1, 0; }
const char* hiprtcGetErrorString(int error) { return error == 6 ? "HIPRTC_ERROR_COMPILATION" : "HIPRTC_ERROR"; }
int hiprtcCreateProgram(void** program, const char* text, const char* name, int headers, const char** given,
                        const char** names) {
    call* c = note("create");
    uint64_t all[] = {headers, (uintptr_t)given, (uintptr_t)names};
    memcpy(c->values, all, sizeof all);
    snprintf(c->text, sizeof c->text, "%s", name);
    snprintf(source, sizeof source, "%s", text);
    *program = (void*)(uintptr_t)0x7f0000004000;
    return answer("create");
}
int hiprtcCompileProgram(void* program, int n, const char** given) {
    note("compile")->values[0] = (uintptr_t)program;
    options[0] = 0;
    for (int i = 0; i < n; ++i) strcat(strcat(options, given[i]), " ");
    return answer("compile");
}
static const char program_log[] = "kernel.hip:1:1: note: of no importance\nkernel.hip:3:7: error: unknown type name 'wrong'\n";
int hiprtcGetProgramLogSize(void* program, size_t* size) { return *size = sizeof program_log, answer("log"); }
int hiprtcGetProgramLog(void* program, char* log) { return memcpy(log, program_log, sizeof program_log), answer("log"); }
int hiprtcGetCodeSize(void* program, size_t* size) { return *size = code_bytes, answer("code"); }
int hiprtcGetCode(void* program, char* out) { return memcpy(out, code, code_bytes), answer("code"); }
int hiprtcDestroyProgram(void** program) { return note("destroy")->values[0] = (uintptr_t)*program, *program = NULL, 0; }
#endif
