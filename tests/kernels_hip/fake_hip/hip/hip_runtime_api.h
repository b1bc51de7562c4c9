/* The declarations of the HIP runtime that rocm_sd's library uses, for tests on machines that have no ROCm. */
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum hipError_t {
    hipSuccess = 0,
    hipErrorInvalidValue = 1,
    hipErrorOutOfMemory = 2,
    hipErrorNoDevice = 100,
    hipErrorNotFound = 500,
    hipErrorLaunchFailure = 719
} hipError_t;

typedef enum hipMemcpyKind { hipMemcpyHostToDevice = 1, hipMemcpyDeviceToHost = 2 } hipMemcpyKind;

typedef struct ihipStream_t* hipStream_t;
typedef struct ihipModule_t* hipModule_t;
typedef struct ihipModuleSymbol_t* hipFunction_t;
typedef struct ihipEvent_t* hipEvent_t;

typedef struct hipDeviceProp_t {
    char name[256];
    int warpSize;
    int multiProcessorCount;
    char gcnArchName[256];
} hipDeviceProp_t;

const char* hipGetErrorString(hipError_t error);
hipError_t hipGetDeviceCount(int* count);
hipError_t hipGetDevice(int* device);
hipError_t hipGetDeviceProperties(hipDeviceProp_t* properties, int device);
hipError_t hipDeviceSynchronize(void);
hipError_t hipMalloc(void** pointer, size_t size);
hipError_t hipFree(void* pointer);
hipError_t hipMemset(void* pointer, int value, size_t size);
hipError_t hipMemcpy(void* to, const void* from, size_t size, hipMemcpyKind kind);
hipError_t hipModuleLoadData(hipModule_t* module, const void* image);
hipError_t hipModuleUnload(hipModule_t module);
hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t module, const char* name);
hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                 unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                 hipStream_t stream, void** arguments, void** extra);
hipError_t hipEventCreate(hipEvent_t* event);
hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream);
hipError_t hipEventSynchronize(hipEvent_t event);
hipError_t hipEventElapsedTime(float* milliseconds, hipEvent_t from, hipEvent_t to);
hipError_t hipEventDestroy(hipEvent_t event);

#ifdef __cplusplus
}
#endif
