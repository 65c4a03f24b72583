// Where the records of experts come from: a packed file that has them as they are in memory, or the model's own files,
// whose matrices are packed as they are read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "experts/layout.h"
#include "platform.h"

// Seconds in which at least one read was under way.
class DiskClock {
public:
    void begin();
    void end();
    double seconds() const;

private:
    mutable std::mutex mutex_;
    int n_reads_ = 0;
    double since_ = 0, seconds_ = 0;
};

class ExpertSource {
public:
    explicit ExpertSource(std::shared_ptr<const ExpertLayout> layout) : layout_(std::move(layout)) {}
    virtual ~ExpertSource() = default;

    // Of memory that each reader has for itself, page-aligned.
    virtual size_t buffer_bytes() const = 0;
    // A record is read in so many pieces, which fill it in together.
    virtual int n_pieces(int layer) const = 0;
    // Fills in a piece of a record, any number of them at once; gives the bytes that were read for it. Throws
    // std::runtime_error, which says what could not be read and why; then the record is of no use.
    virtual size_t read(int layer, int expert, int piece, uint8_t* buffer, uint8_t* record) const = 0;
    // Whether all files are read past the system's cache.
    virtual bool is_direct() const = 0;

    double busy_seconds() const { return clock_.seconds(); }

protected:
    const ExpertLayout& layout() const { return *layout_; }
    // Reads n_bytes at an offset, rounded outwards to whole pages; gives how many bytes those were. name: of what lies
    // there.
    size_t read_range(const DirectFile& file, const std::string& path, uint64_t offset, size_t n_bytes, uint8_t* to,
                      const std::string& name, int expert) const;

private:
    std::shared_ptr<const ExpertLayout> layout_;
    mutable DiskClock clock_;
};

// Records one after the other, as ExpertLayout counts them.
class PackedExperts : public ExpertSource {
public:
    // offset: of the first record in the file. names: of the experts of each layer, for errors. Throws
    // std::runtime_error if the file cannot be opened.
    PackedExperts(std::shared_ptr<const ExpertLayout> layout, const std::string& path, uint64_t offset,
                  std::vector<std::string> names);

    size_t buffer_bytes() const override { return 0; }
    int n_pieces(int layer) const override;
    size_t read(int layer, int expert, int piece, uint8_t* buffer, uint8_t* record) const override;
    bool is_direct() const override { return file_.is_direct(); }

private:
    std::string path_;
    DirectFile file_;
    uint64_t offset_;
    std::vector<std::string> names_;
};

// A matrix of each expert of a layer, in one of the model's files: that of expert e has n_bytes at offset + e * stride,
// row by row as GGUF stores it. scale: of I2_S.
struct ExpertTensor {
    std::string name;
    int file;
    uint64_t offset, stride;
    size_t n_bytes;
    Format format;
    float scale = 1;
};

class UnpackedExperts : public ExpertSource {
public:
    // tensors: kExpertParts of each layer that has experts, in their order. Throws std::runtime_error if a file cannot be
    // opened, std::invalid_argument for a tensor that cannot be packed as the layout wants it.
    UnpackedExperts(std::shared_ptr<const ExpertLayout> layout, const std::vector<std::string>& paths,
                    std::vector<ExpertTensor> tensors);

    // For matrices of at most so many bytes.
    static size_t buffer_bytes_of(size_t n_bytes);
    size_t buffer_bytes() const override { return buffer_bytes_; }
    int n_pieces(int) const override { return kExpertParts; }
    size_t read(int layer, int expert, int piece, uint8_t* buffer, uint8_t* record) const override;
    bool is_direct() const override;

private:
    void pack(const ExpertTensor& tensor, const Matrix& matrix, const uint8_t* source, uint8_t* to) const;

    std::vector<std::string> paths_;
    std::vector<std::unique_ptr<DirectFile>> files_;
    std::vector<ExpertTensor> tensors_;
    std::vector<size_t> first_tensor_;  // by layer
    size_t buffer_bytes_ = 0;
};
