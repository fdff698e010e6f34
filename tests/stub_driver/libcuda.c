// A libcuda without a GPU. Triton compiles its own driver module against it and launches through it, so all that a launch
// does on the host is real: compiling for the target, loading the binary, packing the arguments. What would reach the
// device is written down instead, one line per launch, with as many bytes of each argument as the machine code reads.
//
// Refused, as by a driver: an image that is no cubin of the target, more shared memory than there is, pointers outside of
// the memory that was declared, and a cooperative grid that does not fit on the device.

#include <cuda.h>
#include <elf.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_PARAMETERS 64
#define MOST_REGIONS 4096
#define ADDRESS_BYTES 8

// Of the notes that a binary carries: number of registers, one parameter's place and size, and the form of a note that
// has bytes after it.
enum { NOTE_REGISTERS = 0x2f, NOTE_PARAMETER = 0x17, FORM_BYTES = 0x04 };

typedef struct {
  char name[128];
  int registers, dynamic_limit, parameters;
  int size[MOST_PARAMETERS];
} Kernel;

typedef struct {
  const unsigned char *image;
} Module;

static int capability_major, capability_minor, multiprocessors, shared_limit, most_warps;
static uint64_t region_begin[MOST_REGIONS], region_end[MOST_REGIONS];
static int regions;
static char *written;
static size_t written_bytes;

// ---------------------------------------------------------------------------------------------------------------------
// For the tests
// ---------------------------------------------------------------------------------------------------------------------

void stub_set_device(int major, int minor, int count, int shared, int warps) {
  capability_major = major, capability_minor = minor, multiprocessors = count, shared_limit = shared, most_warps = warps;
}

// Memory that counts as the device's, from now on.
void stub_declare(uint64_t begin, uint64_t bytes) {
  for (int i = 0; i < regions; ++i)
    if (region_begin[i] <= begin && begin + bytes <= region_end[i]) return;
  if (regions == MOST_REGIONS) abort();
  region_begin[regions] = begin, region_end[regions++] = begin + bytes;
}

const char *stub_launches(void) { return written ? written : ""; }

void stub_clear(void) {
  written_bytes = 0;
  if (written) *written = 0;
}

static void append(const char *text) {
  size_t length = strlen(text);
  written = realloc(written, written_bytes + length + 1);
  memcpy(written + written_bytes, text, length + 1);
  written_bytes += length;
}

// ---------------------------------------------------------------------------------------------------------------------
// Binaries
// ---------------------------------------------------------------------------------------------------------------------

static const Elf64_Shdr *section(const unsigned char *image, const char *prefix, const char *kernel) {
  const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
  const Elf64_Shdr *all = (const Elf64_Shdr *)(image + header->e_shoff);
  const char *names = (const char *)image + all[header->e_shstrndx].sh_offset;
  char wanted[256];
  snprintf(wanted, sizeof wanted, "%s%s", prefix, kernel);
  for (int i = 0; i < header->e_shnum; ++i)
    if (!strcmp(names + all[i].sh_name, wanted)) return all + i;
  return NULL;
}

// What the assembler has noted of a kernel: in a section of its own, or in that of the module, which holds one kernel.
static int read_notes(const unsigned char *image, const Elf64_Shdr *notes, Kernel *kernel) {
  if (!notes) return 0;
  const unsigned char *at = image + notes->sh_offset, *end = at + notes->sh_size;
  while (at < end) {
    uint16_t bytes, ordinal;
    uint32_t number;
    memcpy(&bytes, at + 2, 2);
    if (at[0] == FORM_BYTES && at[1] == NOTE_REGISTERS) {
      memcpy(&number, at + 8, 4);
      kernel->registers = number;
    } else if (at[0] == FORM_BYTES && at[1] == NOTE_PARAMETER) {
      memcpy(&ordinal, at + 8, 2);
      memcpy(&number, at + 12, 4);
      if (ordinal >= MOST_PARAMETERS) return 0;
      kernel->size[ordinal] = number >> 18;
      if (ordinal >= kernel->parameters) kernel->parameters = ordinal + 1;
    }
    at += 4 + (at[0] == FORM_BYTES ? bytes : 0);
  }
  return 1;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  if (memcmp(image, ELFMAG, SELFMAG)) return CUDA_ERROR_INVALID_IMAGE;
  Module *made = calloc(1, sizeof *made);
  made->image = image;
  *module = (CUmodule)made;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  const unsigned char *image = ((Module *)module)->image;
  if (!section(image, ".text.", name)) return CUDA_ERROR_NOT_FOUND;
  Kernel *kernel = calloc(1, sizeof *kernel);
  snprintf(kernel->name, sizeof kernel->name, "%s", name);
  kernel->dynamic_limit = 48 << 10;
  int whole = read_notes(image, section(image, ".nv.info", ""), kernel);
  if (!whole || !read_notes(image, section(image, ".nv.info.", name), kernel)) return CUDA_ERROR_INVALID_IMAGE;
  *function = (CUfunction)kernel;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
  free(module);
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = 0;
  if (attribute == CU_FUNC_ATTRIBUTE_NUM_REGS) *value = ((Kernel *)function)->registers;
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) *value = 1024;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
  if (value > shared_limit) return CUDA_ERROR_INVALID_VALUE;
  ((Kernel *)function)->dynamic_limit = value;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

// ---------------------------------------------------------------------------------------------------------------------
// Launches
// ---------------------------------------------------------------------------------------------------------------------

static int programs_that_fit(const Kernel *kernel, int threads, int shared) {
  int warps = (threads + 31) / 32, per_warp = (kernel->registers * 32 + 255) / 256 * 256;
  int fit = 65536 / (per_warp * warps), by_shared = (shared_limit + 1024) / (shared + 1024);
  fit = by_shared < fit ? by_shared : fit;
  return most_warps / warps < fit ? most_warps / warps : fit;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  const Kernel *kernel = (const Kernel *)function;
  int cooperative = 0, shared = config->sharedMemBytes;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) cooperative = config->attrs[i].value.cooperative;
  if (shared > kernel->dynamic_limit) return CUDA_ERROR_INVALID_VALUE;
  unsigned grid = config->gridDimX * config->gridDimY * config->gridDimZ;
  if (cooperative && grid > (unsigned)(programs_that_fit(kernel, config->blockDimX, shared) * multiprocessors))
    return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  char text[256];
  snprintf(text, sizeof text, "%s %u %u %d %d %d", kernel->name, grid, config->blockDimX, shared, cooperative,
           kernel->registers);
  append(text);
  for (int i = 0; i < kernel->parameters; ++i) {
    uint64_t value = 0;
    if (kernel->size[i] > ADDRESS_BYTES) return CUDA_ERROR_INVALID_VALUE;
    memcpy(&value, parameters[i], kernel->size[i]);
    snprintf(text, sizeof text, " %d:%llu", kernel->size[i], (unsigned long long)value);
    append(text);
  }
  append("\n");
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void **parameters, void **extra) {
  CUlaunchConfig config = {.gridDimX = gx, .gridDimY = gy, .gridDimZ = gz, .blockDimX = bx, .blockDimY = by,
                           .blockDimZ = bz, .sharedMemBytes = shared, .hStream = stream};
  return cuLaunchKernelEx(&config, function, parameters, extra);
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  for (int i = 0; i < regions; ++i)
    if (region_begin[i] <= pointer && pointer < region_end[i]) {
      *(CUdeviceptr *)value = pointer;
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_INVALID_VALUE;
}

// ---------------------------------------------------------------------------------------------------------------------
// The device
// ---------------------------------------------------------------------------------------------------------------------

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = capability_major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = capability_minor; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = multiprocessors; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = shared_limit; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = shared_limit + 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    default: *value = 1;
  }
  return CUDA_SUCCESS;
}

static int context;

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *current) { return *current = (CUcontext)&context, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext wanted) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *retained, CUdevice device) { return cuCtxGetCurrent(retained); }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE ? "too many blocks in cooperative launch"
          : error == CUDA_ERROR_INVALID_IMAGE              ? "device kernel image is invalid"
                                                           : "invalid argument";
  return CUDA_SUCCESS;
}
