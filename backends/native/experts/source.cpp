#include "experts/source.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "packing/packing.h"

namespace {

constexpr size_t kPage = DirectFile::kAlignment;
constexpr uint64_t round_down(uint64_t n) { return n / kPage * kPage; }
constexpr uint64_t round_up(uint64_t n) { return round_down(n + kPage - 1); }

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

[[noreturn]] void refuse_file(const std::string& path, const std::system_error& error) {
    throw std::runtime_error(path + ": experts cannot be read: " + error.code().message());
}

std::unique_ptr<DirectFile> opened(const std::string& path) {
    try {
        return std::make_unique<DirectFile>(path);
    } catch (const std::system_error& error) {
        refuse_file(path, error);
    }
}

// As long as it lives, a read is under way.
struct Reading {
    DiskClock& clock;
    explicit Reading(DiskClock& clock) : clock(clock) { clock.begin(); }
    ~Reading() { clock.end(); }
};

}  // namespace

void DiskClock::begin() {
    const std::lock_guard lock(mutex_);
    if (n_reads_++ == 0) since_ = now();
}

void DiskClock::end() {
    const std::lock_guard lock(mutex_);
    if (--n_reads_ == 0) seconds_ += now() - since_;
}

double DiskClock::seconds() const {
    const std::lock_guard lock(mutex_);
    return seconds_ + (n_reads_ ? now() - since_ : 0);
}

size_t ExpertSource::read_range(const DirectFile& file, const std::string& path, uint64_t offset, size_t n_bytes,
                                uint8_t* to, const std::string& name, int expert) const {
    const auto fail = [&](const std::string& reason) {
        throw std::runtime_error(path + ": " + name + ", expert " + std::to_string(expert) + " at byte " +
                                 std::to_string(offset) + ": " + reason);
    };
    const uint64_t first = round_down(offset), last = round_up(offset + n_bytes);
    const uint64_t wanted = offset + n_bytes - first;
    size_t n_read = 0;
    try {
        const Reading reading(clock_);
        n_read = file.read(first, static_cast<size_t>(last - first), to);
        if (!file.is_unchanged()) fail("the file has changed since the model was loaded; load it again");
    } catch (const std::system_error& error) {
        fail("cannot be read: " + error.code().message());
    }
    if (n_read < wanted) {
        const uint64_t there = n_read < offset - first ? 0 : n_read - (offset - first);
        fail("only " + std::to_string(there) + " of " + std::to_string(n_bytes) + " bytes could be read");
    }
    return n_read;
}

// ---- packed --------------------------------------------------------------------------------------------------------

PackedExperts::PackedExperts(std::shared_ptr<const ExpertLayout> layout, const std::string& path, uint64_t offset,
                             std::vector<std::string> names) try
    : ExpertSource(std::move(layout)), path_(path), file_(path), offset_(offset), names_(std::move(names)) {
    if (offset % kRecordAlignment) throw std::invalid_argument("records of experts must begin at a whole page");
} catch (const std::system_error& error) {
    refuse_file(path, error);
}

// Some 1 MiB each: large enough for the speed of the disk, and an expert that several threads read together is there
// before the next ones.
int PackedExperts::n_pieces(int layer) const {
    constexpr size_t kBytes = size_t{1} << 20, kMost = 3;
    return static_cast<int>(
        std::clamp((this->layout().layer(layer).record_bytes + kBytes / 2) / kBytes, size_t{1}, kMost));
}

size_t PackedExperts::read(int layer, int expert, int piece, uint8_t*, uint8_t* record) const {
    const ExpertLayer& sizes = this->layout().layer(layer);
    const size_t n_pieces = static_cast<size_t>(this->n_pieces(layer));
    const size_t each = static_cast<size_t>(round_up((sizes.record_bytes + n_pieces - 1) / n_pieces));
    const size_t first = std::min(sizes.record_bytes, static_cast<size_t>(piece) * each);
    const size_t n_bytes = std::min(each, sizes.record_bytes - first);
    return read_range(file_, path_, offset_ + sizes.first_byte_of(expert) + first, n_bytes, record + first,
                      names_[static_cast<size_t>(layer)], expert);
}

// ---- packed as they are read ---------------------------------------------------------------------------------------

UnpackedExperts::UnpackedExperts(std::shared_ptr<const ExpertLayout> layout, const std::vector<std::string>& paths,
                                 std::vector<ExpertTensor> tensors)
    : ExpertSource(std::move(layout)), paths_(paths), tensors_(std::move(tensors)) {
    size_t n_tensors = 0;
    for (int i = 0; i < this->layout().n_layers(); i++) {
        first_tensor_.push_back(n_tensors);
        if (this->layout().layer(i).n_experts == 0) continue;
        for (const Matrix& matrix : this->layout().layer(i).parts) {
            if (n_tensors == tensors_.size())
                throw std::invalid_argument("a tensor for each matrix of experts is wanted");
            const ExpertTensor& tensor = tensors_[n_tensors++];
            if (tensor.file < 0 || tensor.file >= static_cast<int>(paths.size()) ||
                !can_pack(tensor.format, matrix.format)) {
                throw std::invalid_argument(tensor.name + " cannot be packed as an expert's matrix");
            }
            buffer_bytes_ = std::max(buffer_bytes_, buffer_bytes_of(tensor.n_bytes));
        }
    }
    if (n_tensors != tensors_.size()) throw std::invalid_argument("more tensors than matrices of experts");
    for (const std::string& path : paths) files_.push_back(opened(path));
}

size_t UnpackedExperts::buffer_bytes_of(size_t n_bytes) {
    return static_cast<size_t>(round_up(n_bytes + kPage));  // wherever in its first page it begins
}

bool UnpackedExperts::is_direct() const {
    return std::all_of(files_.begin(), files_.end(), [](const auto& file) { return file->is_direct(); });
}

// A piece is a matrix.
size_t UnpackedExperts::read(int layer, int expert, int piece, uint8_t* buffer, uint8_t* record) const {
    const ExpertLayer& sizes = this->layout().layer(layer);
    const ExpertTensor& tensor = tensors_[first_tensor_[static_cast<size_t>(layer)] + static_cast<size_t>(piece)];
    const size_t file = static_cast<size_t>(tensor.file);
    const uint64_t offset = tensor.offset + static_cast<uint64_t>(expert) * tensor.stride;
    const size_t n_read = read_range(*files_[file], paths_[file], offset, tensor.n_bytes, buffer, tensor.name, expert);
    const uint8_t* source = buffer + (offset - round_down(offset));
    if (is_ternary(tensor.format) && !holds_trits(tensor.format, source, tensor.n_bytes)) {
        throw std::runtime_error(paths_[file] + ": " + tensor.name + ", expert " + std::to_string(expert) +
                                 " at byte " + std::to_string(offset) +
                                 ": a ternary weight has the code 3; the file is damaged");
    }
    const size_t end = piece + 1 < kExpertParts ? sizes.offsets[piece + 1] : sizes.record_bytes;
    const Matrix& matrix = sizes.parts[piece];
    pack(tensor, matrix, source, record + sizes.offsets[piece]);
    const size_t packed = sizes.offsets[piece] + matrix.n_bytes();
    std::memset(record + packed, 0, end - packed);
    return n_read;
}

void UnpackedExperts::pack(const ExpertTensor& tensor, const Matrix& matrix, const uint8_t* source, uint8_t* to) const {
    for (int g = 0; g < matrix.n_groups(); g++) {
        pack_group(tensor.format, matrix.format, source, tensor.scale, matrix.n_out, matrix.n_in, g,
                   to + static_cast<size_t>(g) * matrix.group_bytes);
    }
}
