// Runs everything that computes on made-up numbers, once for each instruction set that this CPU has, and prints a hash
// of the bits that come out: "isa what hash". All hashes of one `what` must be equal, on this CPU and on any other.
// Arguments are names of instruction sets: only those are run.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "decoder.h"
#include "packing.h"

namespace {

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

uint64_t hash(const void* data, size_t n_bytes) {  // FNV-1a
    uint64_t h = 1469598103934665603u;
    for (size_t i = 0; i < n_bytes; i++) h = (h ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211u;
    return h;
}

template <class T>
void report(const Kernels& kernels, const std::string& what, const std::vector<T>& values) {
    std::printf("%s %s %016llx\n", kernels.name, what.c_str(),
                static_cast<unsigned long long>(hash(values.data(), values.size() * sizeof(T))));
}

constexpr Format kFormats[] = {Format::F32,  Format::F16,   Format::BF16,  Format::Q8_0, Format::Q4_0,
                               Format::Q4_1, Format::Q5_0,  Format::Q5_1,  Format::Q4_K, Format::Q5_K,
                               Format::Q6_K, Format::TQ1_0, Format::TQ2_0, Format::I2_S, Format::MXFP4};
constexpr Format kBaseThree[] = {Format::TQ_BASE_THREE, Format::I2_S_BASE_THREE};

// A matrix of random codes as GGUF stores it, with every f16 and float in it small and finite.
std::vector<uint8_t> source_of(Format format, int n_out, int n_in, Numbers& numbers) {
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
            case Format::Q6_K: small_f16(p + 208); break;
            case Format::MXFP4: p[0] = static_cast<uint8_t>(0x70 | (p[0] & 0x0f)); break;  // 2^-16 .. 2^-1
            case Format::I2_S:
            case Format::TQ_BASE_THREE:
            case Format::I2_S_BASE_THREE: break;
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

struct InputArrays {
    std::vector<int8_t> q32, q256, q_token;
    std::vector<float> scale32, scale256, scale_token;
    std::vector<int32_t> sum32, centre32, centre16, sum_token;
    std::vector<int16_t> sums32;
    std::vector<uint8_t> fits_int16;

    Inputs prepared(const Kernels& kernels, const std::vector<float>& x, int n, int n_in) {
        const size_t size = static_cast<size_t>(n) * static_cast<size_t>(n_in);
        q32.resize(size), q256.resize(size + kBehindInputs), q_token.resize(size + kBehindInputs);
        scale_token.resize(static_cast<size_t>(n)), sum_token.resize(static_cast<size_t>(n));
        scale32.resize(size / 32), sum32.resize(size / 32), centre32.resize(size / 32);
        scale256.resize(size / 256 + 1);
        centre16.resize(size / 16), sums32.resize(size / 32), fits_int16.resize(size / 256 + 1);
        Inputs in;
        in.n_in = n_in, in.x = x.data(), in.ldx = static_cast<size_t>(n_in);
        in.q32 = q32.data(), in.scale32 = scale32.data(), in.sum32 = sum32.data(), in.centre32 = centre32.data();
        in.q256 = q256.data(), in.scale256 = scale256.data(), in.centre16 = centre16.data();
        in.sums32 = sums32.data(), in.fits_int16 = fits_int16.data();
        in.q_token = q_token.data(), in.scale_token = scale_token.data(), in.sum_token = sum_token.data();
        for (int c = 0; c < n; c++) {
            kernels.quantize32(in, c);
            kernels.quantize256(in, c);
            kernels.quantize_token(in, c);
        }
        return in;
    }
};

// Ends the program where another way to read the matrix gives other bits than y.
void check_all_ways(const Kernels& kernels, Matrix m, const Inputs& inputs, int n_groups, const std::vector<float>& y) {
    PrefetchPolicy policy;
    m.policy = &policy;
    std::vector<float> z(y.size());
    for (const int at_once : {1, 2, 4}) {
        for (int tokens = 1; tokens <= kFewTokens; tokens++) {
            const Prefetch way{64 * tokens, true, static_cast<Hint>(tokens % 3), at_once, tokens, 0, 1, true};
            for (int n = 1; n <= kFewTokens; n++) {
                policy.plain[n] = policy.ternary[n] = way;
                kernels.matmul(m, inputs, n, 0, n_groups, nullptr, z.data(), static_cast<size_t>(m.n_out));
                if (!std::memcmp(y.data(), z.data(), static_cast<size_t>(n * m.n_out) * sizeof(float))) continue;
                std::fprintf(stderr, "%s: format %d, %d tokens of %d, %d groups at once: other bits\n", kernels.name,
                             static_cast<int>(m.format), n, tokens, at_once);
                std::exit(1);
            }
        }
    }
}

void matrix_product(const Kernels& kernels, Format of, Format as, Numbers& numbers) {
    const int n_out = 72, n_in = 512, n = 11, n_groups = 5;
    const std::vector<uint8_t> source = source_of(of, n_out, n_in, numbers);
    Matrix m{as, n_out, n_in, packed_group_bytes(as, n_in), nullptr};
    std::vector<uint8_t> packed(m.group_bytes * n_groups + 8192);
    for (int g = 0; g < n_groups; g++) {
        pack_group(of, as, source.data(), 0.3f, n_out, n_in, g, packed.data() + m.group_bytes * static_cast<size_t>(g));
    }
    m.data = packed.data();
    InputArrays arrays;
    const std::vector<float> x = numbers.floats(static_cast<size_t>(n * n_in));
    std::vector<float> y(static_cast<size_t>(n * n_out));
    const Inputs inputs = arrays.prepared(kernels, x, n, n_in);
    kernels.matmul(m, inputs, n, 0, n_groups, nullptr, y.data(), n_out);
    report(kernels, "matmul-" + std::to_string(static_cast<int>(as)), y);
    check_all_ways(kernels, m, inputs, n_groups, y);
}

void matrices(const Kernels& kernels) {
    Numbers numbers;
    for (const Format format : kFormats) matrix_product(kernels, format, format, numbers);
    for (const Format as : kBaseThree) {
        matrix_product(kernels, as == Format::TQ_BASE_THREE ? Format::TQ2_0 : Format::I2_S, as, numbers);
    }
}

void the_rest_of_a_layer(const Kernels& kernels) {
    Numbers numbers;
    std::vector<float> x = numbers.floats(1024), w = numbers.floats(1024), out(1024);
    kernels.rms_norm(x.data(), w.data(), 1000, 1e-5f, out.data());
    report(kernels, "rms_norm", out);
    for (float& value : x) value *= 40;
    std::vector<float> y = x;
    kernels.geglu(y.data(), w.data(), 1024);
    report(kernels, "geglu", y);
    y = x;
    kernels.relu2_glu(y.data(), w.data(), 1024);
    report(kernels, "relu2_glu", y);
    y = x;
    kernels.clamped_swiglu(y.data(), w.data(), 1024);
    report(kernels, "clamped_swiglu", y);
    y = x;
    kernels.add_scaled(y.data(), x.data(), 1024, 0.22f);
    report(kernels, "add_scaled", y);
    kernels.scale_and_cap(y.data(), 1019, 0.3f, 7.0f);
    report(kernels, "scale_and_cap", y);
    y = x;
    kernels.silu(y.data(), 1024);
    report(kernels, "silu", y);
    kernels.blend(x.data(), y.data(), w.data(), 1024, out.data());
    report(kernels, "blend", out);
    y = x;
    kernels.softmax(y.data(), 1003);
    report(kernels, "softmax", y);
    y = x;
    kernels.sigmoid(y.data(), 1024);
    report(kernels, "sigmoid", y);
    y = x;
    kernels.sqrt_softplus(y.data(), 1024);
    report(kernels, "sqrt_softplus", y);
    const float* rows[] = {x.data(), y.data(), w.data()};
    kernels.weighted_sum(rows, w.data(), 3, 1024, out.data());
    report(kernels, "weighted_sum", out);
    kernels.swiglu(x.data(), w.data(), 1024);
    report(kernels, "swiglu", x);
    // Halves of every size, subnormal ones and infinities among them.
    std::vector<uint16_t> halves(1024);
    for (size_t i = 0; i < x.size(); i++) {
        const uint32_t bits = numbers.next() & 0xbfffffff;
        std::memcpy(&x[i], &bits, 4);
        if (i % 3) x[i] = numbers.uniform() * (i % 3 == 1 ? 1e-6f : 1.0f);
    }
    TextState cache({KvType::F16, 16, 16, {{1, 1019, 0}}});
    cache.reserve(16);
    const KvHead head = cache.head(0, 0);
    kernels.store_key_value(head, 3, x.data(), x.data());
    std::memcpy(halves.data(), head.base + head.values_at + 3 * head.value_bytes, 2 * halves.size());
    report(kernels, "store_value", halves);
}

// A decoder of random weights in one format, with everything that only some architectures have for some of them.
class RandomDecoder {
public:
    RandomDecoder(const Kernels& kernels, Format format, KvType kv_type)
        : format_(format), weights_(std::make_shared<Weights>(size_t{16} << 20, nullptr, nullptr)) {
        config_ = config_of(format, kv_type);
        for (int layer = 0; layer < config_.n_layers(); layer++) add_layer(layer);
        if (format == Format::Q4_0) {
            front_.kind = FrontKind::GatedFusion;
            vector("front.token_norm", 256);
            matrix("front.feature", 256, 256), matrix("front.token", 256, 256), matrix("front.mix", 256, 512);
        } else {
            vector("output_norm", 256);
        }
        matrix("output", 300, 256);
        const Format embedding = format == Format::I2_S ? Format::F16 : format;
        kept_.push_back(source_of(embedding, 300, 256, numbers_));
        weights_->set_embedding({embedding, kept_.back().data(), 300, 256, kept_.back().size() / 300});
        decoder_ = std::make_unique<Decoder>(config_, front_, kernels, pool_, weights_);
        state_ = std::make_unique<TextState>(config_.text_sizes(kv_type, 128));
    }

    std::vector<float> features(size_t n) { return numbers_.floats(n); }
    TextState& state() { return *state_; }
    Decoder& decoder() { return *decoder_; }

private:
    static DecoderConfig config_of(Format format, KvType kv_type) {
        AttentionConfig attention{256, 6, 2, 48};
        if (kv_type == KvType::Q8_0) attention.n_heads = 9, attention.n_kv_heads = 3, attention.head_dim = 32;
        attention.rope = 0;
        DenseConfig dense{512};
        DecoderConfig config{300, 300, 256, 128, 32, 1e-5f, {}, {}, {}};
        if (format == Format::Q5_K) {
            attention.qk_norm = QKNorm::PerHead, attention.soft_cap = 3;
            dense.activation = Activation::GeluTanh;
            config.embedding_scale = 16, config.residual_scale = 0.7f, config.logit_scale = 0.5f;
            config.logit_soft_cap = 5;
        }
        if (format == Format::I2_S) dense.activation = Activation::Relu2;
        if (format == Format::MXFP4) dense.activation = Activation::ClampedSwiglu;
        Rope rope{format != Format::Q4_K, {}, 1.0, {}};
        for (int i = 0; i < attention.head_dim / 2; i++) rope.frequencies.push_back(1.0 / (1 + 3 * i));
        config.ropes = {rope};
        config.query_scales = {{{0.14f}, 128}};
        config.layers = {{attention, dense}, {attention, dense}};
        config.layers[1].attention.window = 5;
        return config;
    }

    void add_layer(int layer) {
        const std::string mixer = "layers." + std::to_string(layer) + ".mixer.";
        const std::string ffn = "layers." + std::to_string(layer) + ".ffn.";
        const AttentionConfig& attention = config_.layers[static_cast<size_t>(layer)].attention;
        vector(mixer + "norm", 256), vector(ffn + "norm", 256), vector(mixer + "q_bias", 288);
        if (attention.qk_norm == QKNorm::PerHead) {
            vector(mixer + "q_norm", attention.head_dim), vector(mixer + "k_norm", attention.head_dim);
            vector(mixer + "post_norm", 256), vector(ffn + "post_norm", 256);
        }
        if (format_ == Format::MXFP4) vector(mixer + "sinks", attention.n_heads);
        if (format_ == Format::I2_S) vector(mixer + "sub_norm", 288), vector(ffn + "sub_norm", 512);
        matrix(mixer + "q", 288, 256), matrix(mixer + "k", 96, 256), matrix(mixer + "v", 96, 256);
        matrix(mixer + "output", 256, 288), matrix(ffn + "gate", 512, 256);
        matrix(ffn + "up", 512, 256), matrix(ffn + "down", 256, 512);
    }

    void matrix(const std::string& name, int n_out, int n_in) {
        // The attention is 288 wide, which only blocks of 32 divide.
        const bool fits =
            !(n_in % 256 && input_kind(format_) == InputKind::Int8By256) && !(n_in % 128 && format_ == Format::I2_S);
        const Format format = fits ? format_ : Format::Q8_0;
        kept_.push_back(source_of(format, n_out, n_in, numbers_));
        weights_->set_matrix(name, format, n_out, n_in);
        weights_->pack_rows(name, 0, n_out, format, kept_.back().data(), 0.3f, *pool_);
    }

    void vector(const std::string& name, int n) {
        const std::vector<float> values = numbers_.floats(static_cast<size_t>(n));
        weights_->set_vector(name, values.data(), n);
    }

    Numbers numbers_;
    Format format_;
    DecoderConfig config_;
    FrontConfig front_;
    std::shared_ptr<Pool> pool_ = std::make_shared<Pool>(2);
    std::shared_ptr<Weights> weights_;
    std::vector<std::vector<uint8_t>> kept_;
    std::unique_ptr<Decoder> decoder_;
    std::unique_ptr<TextState> state_;
};

void decoder(const Kernels& kernels, KvType kv_type) {
    const int n = 13;
    std::vector<int32_t> tokens(n), chain(n), rows(n);
    for (int i = 0; i < n; i++)
        tokens[static_cast<size_t>(i)] = (7 * i + 3) % 300, rows[static_cast<size_t>(i)] = i,
        chain[static_cast<size_t>(i)] = i - 1;
    const std::vector<int32_t> tree = {-1, 0, 1, 2, 1, 4, 5, 6, -1, 8, 9, 5, 11}, path = {0, 1, 4, 5, 11};
    for (const Format format : kFormats) {
        RandomDecoder random(kernels, format, kv_type);
        std::vector<float> logits(n * 300);
        const std::vector<float> features = random.features(n * 256);
        const auto pass = [&](const std::vector<int32_t>& parents) {
            const TextRows text{&random.state(), 128, tokens.data(), parents.data(), n, 0, features.data(),
                                nullptr,         0,   nullptr,       size_t{0}};
            random.decoder().forward({&text, 1}, rows.data(), n, logits.data(), 0, [] { return false; });
            report(kernels,
                   "decoder-" + std::to_string(static_cast<int>(kv_type)) + "-" +
                       std::to_string(static_cast<int>(format)) + "-" + std::to_string(random.state().n_past()),
                   logits);
        };
        pass(chain);
        random.state().commit(rows.data(), n);
        pass(tree);
        random.state().commit(path.data(), static_cast<int>(path.size()));
        pass(chain);
    }
}

}  // namespace

int main(int n_arguments, char** arguments) {
    for (int i = 0; i < n_instruction_sets; i++) {
        const Kernels& kernels = *instruction_sets[i].kernels;
        bool is_wanted = n_arguments == 1;
        for (int a = 1; a < n_arguments; a++) is_wanted = is_wanted || std::strcmp(arguments[a], kernels.name) == 0;
        if (!is_wanted || !instruction_sets[i].present()) continue;
        matrices(kernels);
        the_rest_of_a_layer(kernels);
        decoder(kernels, KvType::F16);
        decoder(kernels, KvType::Q8_0);
    }
}
