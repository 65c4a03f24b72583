#include "weights.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "packing/packing.h"

namespace {

// Weights up to so many bytes are worth keeping in the outer caches: those of a draft head, used again in each step.
constexpr size_t kKept = size_t{16} << 20;

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

std::string shape_of(int n_out, int n_in) {
    std::string shape = std::to_string(n_out);
    shape += n_in ? " x " + std::to_string(n_in) : "";
    return shape;
}

[[noreturn]] void refuse_shape(const std::string& name, const std::string& expected, const std::string& found) {
    throw std::invalid_argument("weight " + name + " must be " + expected + ": found " + found);
}

[[noreturn]] void refuse_missing(const std::string& name) {
    throw std::invalid_argument("weight " + name + " is missing");
}

}  // namespace

Weights::Weights(size_t n_bytes, const uint8_t* packed, std::shared_ptr<const Weights> parent)
    : n_bytes_(n_bytes), memory_(packed ? 0 : n_bytes), packed_(packed), parent_(std::move(parent)) {
    if (packed) mapping_ = std::make_unique<MappedBytes>(packed, n_bytes);
}

// ---- filling in ----------------------------------------------------------------------------------------------------

void Weights::read_packed(const std::string& path, uint64_t offset) {
    constexpr size_t kPiece = size_t{8} << 20;
    const DirectFile file(path);
    const size_t last = round_up(n_bytes_, DirectFile::kAlignment);  // memory has whole pages
    for (size_t at = 0; at < last; at += kPiece) {
        const size_t n = std::min(kPiece, last - at);
        const size_t n_read = file.read(offset + at, n, memory_.data() + at);
        if (n_read < std::min(n, n_bytes_ - at)) throw std::runtime_error("the file ends too early");
    }
    packed_ = memory_.data();
}

// Where in the packed weights the next n_bytes go.
size_t Weights::take(size_t n_bytes) {
    n_bytes = round_up(n_bytes, 64);
    if (n_bytes > n_bytes_ - n_taken_) throw std::bad_alloc();
    n_taken_ += n_bytes;
    return n_taken_ - n_bytes;
}

void Weights::check_new(const std::string& name) const {
    if (used_.count(name)) throw std::invalid_argument("weight " + name + " is there already");
}

void Weights::set_matrix(const std::string& name, Format format, int n_out, int n_in) {
    check_new(name);
    Matrix m;
    m.format = format;
    m.n_out = n_out;
    m.n_in = n_in;
    m.group_bytes = packed_group_bytes(format, n_in);
    m.is_kept = n_bytes_ <= kKept;
    m.policy = &policy_;
    m.data = data() + take(m.group_bytes * static_cast<size_t>(m.n_groups()));
    matrices_[name] = m;
    used_[name] = false;
}

const Matrix& Weights::own_matrix(const std::string& name) const {
    const auto found = matrices_.find(name);
    if (found == matrices_.end()) refuse_missing(name);
    return found->second;
}

void Weights::pack_rows(const std::string& name, int first_row, int n_rows, Format of, const uint8_t* source,
                        float scale, Pool& pool) {
    const Matrix& m = own_matrix(name);
    uint8_t* to = memory_.data() + (m.data - memory_.data()) + static_cast<size_t>(first_row / kRows) * m.group_bytes;
    pool.run([&](int thread) {
        pool.for_tasks(thread, (n_rows + kRows - 1) / kRows, [&](int g) {
            pack_group(of, m.format, source, scale, n_rows, m.n_in, g, to + static_cast<size_t>(g) * m.group_bytes);
        });
    });
}

void Weights::set_vector(const std::string& name, const float* source, int n) {
    check_new(name);
    const size_t at = take(round_up(static_cast<size_t>(n), 16) * sizeof(float));
    if (source) std::memcpy(memory_.data() + at, source, static_cast<size_t>(n) * sizeof(float));
    vectors_[name] = {reinterpret_cast<const float*>(data() + at), n};
    used_[name] = false;
}

void Weights::set_device(const std::string& name, std::shared_ptr<ProductDevice> device, int number) {
    const auto found = matrices_.find(name);
    if (found == matrices_.end()) refuse_missing(name);
    Matrix& m = found->second;
    if (input_kind(m.format) != InputKind::Int8ByToken) {
        throw std::invalid_argument("weight " + name + " must be I2_S for a device: found another format");
    }
    if (device_ && device_ != device) throw std::invalid_argument("weights can have one device: found a second one");
    device_ = std::move(device);
    m.device = device_.get();
    m.number = number;
}

// ---- looking up ----------------------------------------------------------------------------------------------------

const Matrix& Weights::matrix(const std::string& name, int n_out, int n_in) const {
    const auto found = matrices_.find(name);
    if (found == matrices_.end()) refuse_missing(name);
    const Matrix& m = found->second;
    if (m.n_out != n_out || m.n_in != n_in) refuse_shape(name, shape_of(n_out, n_in), shape_of(m.n_out, m.n_in));
    used_[name] = true;
    return m;
}

const Matrix& Weights::output(int n_out, int n_in) const {
    const bool is_own = !parent_ || matrices_.count("output");
    return is_own ? matrix("output", n_out, n_in) : parent_->output(n_out, n_in);
}

const float* Weights::vector(const std::string& name, int n) const {
    const auto found = vectors_.find(name);
    if (found == vectors_.end()) return nullptr;
    if (found->second.n != n) refuse_shape(name, shape_of(n, 0), shape_of(found->second.n, 0));
    used_[name] = true;
    return found->second.data;
}

const float* Weights::required_vector(const std::string& name, int n) const {
    const float* found = vector(name, n);
    if (!found) refuse_missing(name);
    return found;
}

namespace {

const Embedding& checked(const Embedding* found, const char* name, int n_vocab, int n_embd) {
    if (!found) refuse_missing(name);
    if (found->n_vocab() != n_vocab || found->n_embd() != n_embd) {
        refuse_shape(name, shape_of(n_vocab, n_embd), shape_of(found->n_vocab(), found->n_embd()));
    }
    return *found;
}

}  // namespace

const Embedding& Weights::embedding(int n_vocab, int n_embd) const {
    if (!embedding_ && parent_) return parent_->embedding(n_vocab, n_embd);
    return checked(embedding_.get(), "token_embd", n_vocab, n_embd);
}

const Embedding& Weights::layer_table(int n_vocab, int n_all) const {
    return checked(layer_table_.get(), "the table of the layers' inputs", n_vocab, n_all);
}

void Weights::check_inputs(const InputSizes& sizes) const {
    for (const auto& [name, matrix] : matrices_) {
        if (!name.starts_with("features.") && !sizes.fit(matrix.format, matrix.n_in)) {
            throw std::invalid_argument("weight " + name + " has longer inputs than there is room for");
        }
    }
    if (parent_ && !matrices_.count("output")) {
        const Matrix& output = parent_->own_matrix("output");
        if (!sizes.fit(output.format, output.n_in))
            throw std::invalid_argument("output has longer inputs than there is room for");
    }
}

void Weights::check_all_are_used() const {
    for (const auto& [name, used] : used_) {
        if (!used) throw std::invalid_argument("weight " + name + " is none that this model has a use for");
    }
}
