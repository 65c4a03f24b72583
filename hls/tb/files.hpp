// Files of golden vectors and weights, read whole or in part. Every fault throws with what was expected and found.
#pragma once

#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace ei_tb {

// Of a file that must be there.
inline std::size_t size_of_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    if (!file) throw std::runtime_error(path + " cannot be opened");
    return static_cast<std::size_t>(file.tellg());
}

inline bool is_file(const std::string& path) { return std::ifstream(path, std::ios::binary).good(); }

inline void check_size(const std::string& what, std::size_t expected, std::size_t found) {
    if (found >= expected) return;
    throw std::runtime_error("short file: " + what + " must have " + std::to_string(expected) + " bytes: found " +
                             std::to_string(found));
}

// n_bytes from an offset on.
inline std::vector<std::uint8_t> read_part(const std::string& path, std::size_t offset, std::size_t n_bytes) {
    check_size(path, offset + n_bytes, size_of_file(path));
    std::ifstream file(path, std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    std::vector<std::uint8_t> bytes(n_bytes);
    file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(n_bytes));
    if (!file) throw std::runtime_error(path + " cannot be read");
    return bytes;
}

inline std::vector<std::uint8_t> read_whole(const std::string& path) { return read_part(path, 0, size_of_file(path)); }

// The 16 digits after "hash" in a manifest.json, which has that name once, under "geometry".
inline std::uint64_t geometry_of_manifest(const std::string& path) {
    const std::vector<std::uint8_t> bytes = read_whole(path);
    const std::string text(bytes.begin(), bytes.end());
    const std::size_t name = text.find("\"hash\"");
    const std::size_t digits = name == std::string::npos ? name : text.find('"', text.find(':', name));
    if (digits == std::string::npos) throw std::runtime_error(path + " must have the hash of a geometry: found none");
    return std::stoull(text.substr(digits + 1, 16), nullptr, 16);
}

}  // namespace ei_tb
