// A checksum of bytes that are kept on disk. It finds damage, and is no protection against who wants another text.
//
// Eight lanes of 64 bits each take a word of a line of 64 bytes. A lane's step is a bijection for each word that it takes,
// and so is the sum for each lane: of two runs of bytes that differ in one word only, the sums differ.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

// Of n_bytes, after a sum of what came before them.
inline uint64_t byte_sum(const uint8_t* p, size_t n_bytes, uint64_t before) {
    constexpr uint64_t kOdd = 0x9E3779B97F4A7C15, kOther = 0xC2B2AE3D27D4EB4F;
    constexpr size_t kLanes = 8, kLine = kLanes * sizeof(uint64_t);
    uint64_t lanes[kLanes];
    for (size_t i = 0; i < kLanes; i++) lanes[i] = (before + n_bytes) * kOdd + i;
    const auto take = [&](const uint8_t* line) {
        for (size_t i = 0; i < kLanes; i++) {
            uint64_t word;
            std::memcpy(&word, line + i * sizeof word, sizeof word);
            lanes[i] = std::rotl((lanes[i] ^ word) * kOdd, 29);
        }
    };
    size_t at = 0;
    for (; at + kLine <= n_bytes; at += kLine) take(p + at);
    if (at < n_bytes) {
        uint8_t last[kLine] = {};
        std::memcpy(last, p + at, n_bytes - at);
        take(last);
    }
    uint64_t sum = kOther;
    for (const uint64_t lane : lanes) {
        sum = (sum ^ lane) * kOther;
        sum ^= sum >> 31;
    }
    return sum;
}
