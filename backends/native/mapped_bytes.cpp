#include "mapped_bytes.h"

#include <algorithm>

#include "platform.h"

MappedBytes::MappedBytes(const uint8_t* bytes, size_t n_bytes) {
    // Goes by pieces: meanwhile no other thread can map or unmap memory.
    thread_ = std::thread([this, bytes, n_bytes] {
        constexpr size_t kPiece = size_t{1} << 20;
        for (size_t at = 0; at < n_bytes && !closing_; at += kPiece) {
            map_now(bytes + at, std::min(kPiece, n_bytes - at));
        }
    });
}

MappedBytes::~MappedBytes() {
    closing_ = true;
    wait();
}

void MappedBytes::wait() {
    if (thread_.joinable()) thread_.join();
}
