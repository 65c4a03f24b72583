// Numbers and weights that are the same on every machine, and hashes of what is computed with them.
#pragma once

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "packing/packing.h"

// Numbers that are the same everywhere (Knuth's linear congruential generator).
class Numbers {
public:
    uint32_t next() {
        return static_cast<uint32_t>((state_ = state_ * 6364136223846793005u + 1442695040888963407u) >> 32);
    }
    float uniform() { return static_cast<float>(static_cast<int32_t>(next() >> 8) - (1 << 23)) * 0x1p-22f; }  // -2..2
    std::vector<float> floats(size_t n) {
        std::vector<float> values(n);
        for (float& value : values) value = uniform();
        return values;
    }

private:
    uint64_t state_ = 42;
};

inline uint64_t hash(const void* data, size_t n_bytes) {  // FNV-1a
    uint64_t h = 1469598103934665603u;
    for (size_t i = 0; i < n_bytes; i++) h = (h ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211u;
    return h;
}

template <class T>
void report(const Kernels& kernels, const std::string& what, const std::vector<T>& values) {
    std::printf("%s %s %016llx\n", kernels.name, what.c_str(),
                static_cast<unsigned long long>(hash(values.data(), values.size() * sizeof(T))));
}

constexpr Format kFormats[] = {Format::F32,  Format::F16,   Format::BF16,  Format::Q8_0, Format::Q4_0, Format::Q4_1,
                               Format::Q5_0, Format::Q5_1,  Format::Q2_K,  Format::Q3_K, Format::Q4_K, Format::Q5_K,
                               Format::Q6_K, Format::TQ1_0, Format::TQ2_0, Format::I2_S, Format::MXFP4};
constexpr Format kBaseThree[] = {Format::TQ_BASE_THREE, Format::I2_S_BASE_THREE};

// A matrix of random codes as GGUF stores it, with every f16 and float in it small and finite.
inline std::vector<uint8_t> source_of(Format format, int n_out, int n_in, Numbers& numbers) {
    int n_inputs;
    size_t n_bytes;
    block_size(static_cast<int>(format), n_inputs, n_bytes);
    std::vector<uint8_t> data(static_cast<size_t>(n_out) * static_cast<size_t>(n_in / n_inputs) * n_bytes);
    for (uint8_t& byte : data) byte = static_cast<uint8_t>(numbers.next());
    if (format == Format::TQ2_0 || format == Format::I2_S) {  // no code is 3
        for (uint8_t& byte : data) byte = static_cast<uint8_t>(byte & ~((byte & 0x55) << 1));
    }
    const auto small_f16 = [&](uint8_t* p) { p[1] = static_cast<uint8_t>(0x20 | (p[1] & 0x83)); };  // 2^-7 or so
    for (uint8_t* p = data.data(); p < data.data() + data.size(); p += n_bytes) {
        switch (format) {
            case Format::F32: {
                const float value = numbers.uniform();
                std::memcpy(p, &value, 4);
                break;
            }
            case Format::BF16: p[1] = static_cast<uint8_t>(0x3e | (p[1] & 0x80)); break;
            case Format::Q2_K: small_f16(p + 80), small_f16(p + 82); break;
            case Format::Q6_K: small_f16(p + 208); break;
            case Format::MXFP4: p[0] = static_cast<uint8_t>(0x70 | (p[0] & 0x0f)); break;  // 2^-16 .. 2^-1
            case Format::I2_S:
            case Format::TQ_BASE_THREE:
            case Format::I2_S_BASE_THREE: break;
            case Format::Q3_K:
            case Format::TQ1_0:
            case Format::TQ2_0: small_f16(p + n_bytes - 2); break;
            case Format::Q4_K:
            case Format::Q5_K:
            case Format::Q4_1:
            case Format::Q5_1: small_f16(p + 2); [[fallthrough]];
            default: small_f16(p);
        }
    }
    return data;
}
