// The records of all experts, in memory or in a mapped file: one after the other, as ExpertLayout counts them.
#pragma once

#include <cstdint>
#include <memory>

#include "experts/store.h"
#include "mapped_bytes.h"
#include "platform.h"

// Packs one of the matrices of an expert, which lies at source as GGUF stores it, into its record. Row group g of it.
void pack_expert_group(const ExpertLayer& layer, ExpertPart which, Format of, const uint8_t* source, int g,
                       uint8_t* record);

class ExpertRecords {
public:
    // mapped: null, or the bytes of all records, which must outlive this; then nothing is packed.
    ExpertRecords(std::shared_ptr<const ExpertLayout> layout, const uint8_t* mapped);

    const std::shared_ptr<const ExpertLayout>& layout() const { return layout_; }
    const uint8_t* data() const { return mapped_ ? mapped_ : memory_.data(); }
    bool is_mapped() const { return mapped_ != nullptr; }
    // Of an expert that is to be packed; not for mapped ones.
    uint8_t* record(int layer, int expert) { return memory_.data() + layout_->layer(layer).first_byte_of(expert); }
    void wait_until_mapped() {
        if (mapping_) mapping_->wait();
    }

private:
    std::shared_ptr<const ExpertLayout> layout_;
    Memory memory_;
    const uint8_t* mapped_;
    std::unique_ptr<MappedBytes> mapping_;
};

// All experts in memory, or mapped.
class ResidentExperts : public ExpertStore {
public:
    explicit ResidentExperts(std::shared_ptr<ExpertRecords> records)
        : ExpertStore(records->layout()), records_(std::move(records)), data_(records_->data()) {}

    void begin_pass() override { records_->wait_until_mapped(); }
    int begin(int, std::span<int32_t> wanted) override { return static_cast<int>(wanted.size()); }
    const uint8_t* wait(int layer, int expert, const std::function<bool()>&) override {
        return data_ + layout().layer(layer).first_byte_of(expert);
    }
    void done(int, int) override {}

private:
    std::shared_ptr<ExpertRecords> records_;
    const uint8_t* data_;
};
