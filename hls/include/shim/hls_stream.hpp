// hls::stream<T> of the vendor's hls_stream.h, as far as the kernels use it: a queue without an end.
// Reading an empty one throws, where hardware would wait for ever.
#pragma once

#include <cstddef>
#include <deque>
#include <stdexcept>
#include <string>

namespace hls {

template <class T>
class stream {
public:
    stream() = default;
    explicit stream(const char* name) : name_(name) {}
    stream(const stream&) = delete;
    stream& operator=(const stream&) = delete;

    T read() {
        if (data_.empty()) throw std::runtime_error("hls::stream " + name_ + " is read while it is empty");
        const T head = data_.front();
        data_.pop_front();
        return head;
    }
    void write(const T& value) { data_.push_back(value); }
    bool empty() const { return data_.empty(); }
    std::size_t size() const { return data_.size(); }

private:
    std::string name_ = "without a name";
    std::deque<T> data_;
};

}  // namespace hls
