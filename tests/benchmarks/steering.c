// The page cache steered for llama.cpp, from its callback: as soon as a layer has chosen its experts, the kernel is told
// to read them. With n_predicted it is also told of those that the next layer's router makes of this layer's input.
#define _GNU_SOURCE
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { kLayers = 256, kParts = 3, kExperts = 1024, kMulMat = 29 };
// Of struct ggml_tensor of llama-cpp-python 0.3.36, in bytes.
enum { kSizes = 16, kStrides = 48, kOp = 80, kSources = 152, kData = 248, kName = 256 };

static char* slices[kLayers][kParts];
static size_t slice_bytes[kLayers][kParts];
static const float* routers[kLayers];
static int n_experts, n_predicted;

void steer_slices(int layer, int part, void* address, size_t bytes) {
    slices[layer][part] = address;
    slice_bytes[layer][part] = bytes;
}
void steer_router(int layer, const float* weights) { routers[layer] = weights; }
void steer_sizes(int experts, int predicted) {
    n_experts = experts;
    n_predicted = predicted;
}

static void will_need(int layer, int expert) {
    for (int part = 0; part < kParts; part++) {
        uintptr_t first = (uintptr_t)slices[layer][part] + (size_t)expert * slice_bytes[layer][part];
        uintptr_t last = (first + slice_bytes[layer][part] + 4095) & ~(uintptr_t)4095;
        first &= ~(uintptr_t)4095;
        madvise((void*)first, last - first, MADV_WILLNEED);
    }
}

static const int64_t* sizes_of(const char* tensor) { return (const int64_t*)(tensor + kSizes); }
static char* data_of(const char* tensor) { return *(char**)(tensor + kData); }
static const char* source_of(const char* tensor, int i) { return *(const char**)(tensor + kSources + 8 * i); }

// topk: (n_used,) of one token; what its scores were made of leads to the router's input.
static void predict(int layer, const char* topk) {
    const char* product = topk;
    while (product && *(const int*)(product + kOp) != kMulMat) product = source_of(product, 0);
    if (!product || !routers[layer]) return;
    const char* input = source_of(product, 1);
    const float* x = (const float*)data_of(input);
    int64_t n_embd = sizes_of(input)[0];
    float scores[kExperts];
    for (int e = 0; e < n_experts; e++) {
        float sum = 0;
        for (int64_t i = 0; i < n_embd; i++) sum += routers[layer][e * n_embd + i] * x[i];
        scores[e] = sum;
    }
    for (int i = 0; i < n_predicted; i++) {
        int best = 0;
        for (int e = 1; e < n_experts; e++)
            if (scores[e] > scores[best]) best = e;
        scores[best] = -1e30f;
        will_need(layer, best);
    }
}

bool steer(const char* tensor, bool ask, void* unused) {
    (void)unused;
    const char* name = tensor + kName;
    if (strncmp(name, "ffn_moe_topk-", 13)) return !ask;
    if (ask) return true;
    int layer = atoi(name + 13);
    const int64_t* sizes = sizes_of(tensor);
    const size_t* strides = (const size_t*)(tensor + kStrides);
    bool seen[kExperts] = {false};
    for (int64_t row = 0; row < sizes[1]; row++)
        for (int64_t i = 0; i < sizes[0]; i++) {
            int expert = *(int*)(data_of(tensor) + row * strides[1] + i * strides[0]);
            if (!seen[expert]) will_need(layer, expert);
            seen[expert] = true;
        }
    if (n_predicted && sizes[1] == 1) predict(layer + 1, tensor);
    return true;
}
