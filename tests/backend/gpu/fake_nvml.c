/* A stand-in for NVIDIA's management library: what it lists comes from the environment. */
#include <stdlib.h>
#include <string.h>

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

/* Word `index` of a comma-separated variable. */
static int word(const char *name, long index, char *out, unsigned length) {
    const char *text = getenv(name);
    while (text && index--) {
        text = strchr(text, ',');
        text = text ? text + 1 : 0;
    }
    if (!text) return 2;
    size_t size = strcspn(text, ",");
    if (size >= length) return 7;
    memcpy(out, text, size);
    out[size] = 0;
    return 0;
}

int nvmlInit_v2(void) { return number("FAKE_INIT", 0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "Unknown Error"; }
int nvmlSystemGetDriverVersion(char *out, unsigned length) { return word("FAKE_DRIVER", 0, out, length); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = number("FAKE_CUDA", 13000); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)number("FAKE_COUNT", 0); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(long)(index + 1); return 0; }
int nvmlDeviceGetName(void *handle, char *out, unsigned length) { return word("FAKE_NAMES", (long)handle - 1, out, length); }
int nvmlDeviceGetUUID(void *handle, char *out, unsigned length) { return word("FAKE_UUIDS", (long)handle - 1, out, length); }
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    char text[16];
    int code = word("FAKE_ARCHS", (long)handle - 1, text, sizeof text);
    if (!code) { int value = atoi(text); *major = value / 10; *minor = value % 10; }
    return code;
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) {
    memory[0] = 80ULL << 30; memory[1] = 79ULL << 30; memory[2] = 1ULL << 30;
    return 0;
}
