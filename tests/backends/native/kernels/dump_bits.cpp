// Runs everything that computes on made-up numbers, once for each instruction set that this CPU has, and prints a hash
// of the bits that come out: "isa what hash". All hashes of one `what` must be equal, on this CPU and on any other.
// Arguments are names of instruction sets: only those are run. With "few" among them, fewer decoders run, but all code:
// for emulators.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "decoder.h"
#include "experts/records.h"
#include "experts/router.h"
#include "packing/packing.h"
#include "random_weights.h"

namespace {

struct InputArrays {
    std::vector<int8_t> q32, q256, q_token;
    std::vector<float> scale32, scale256, scale_token;
    std::vector<int32_t> sum32, centre32, centre16, sum_token;
    std::vector<int16_t> sums16, sums32;
    std::vector<uint8_t> fits_int16;

    Inputs prepared(const Kernels& kernels, const std::vector<float>& x, int n, int n_in) {
        const size_t size = static_cast<size_t>(n) * static_cast<size_t>(n_in);
        q32.resize(size), q256.resize(size + kPaddingInputs), q_token.resize(size + kPaddingInputs);
        scale_token.resize(static_cast<size_t>(n)), sum_token.resize(static_cast<size_t>(n));
        scale32.resize(size / 32), sum32.resize(size / 32), centre32.resize(size / 32);
        scale256.resize(size / 256 + 1);
        centre16.resize(size / 16), sums16.resize(size / 16), sums32.resize(size / 32),
            fits_int16.resize(size / 256 + 1);
        Inputs in;
        in.n_in = n_in, in.x = x.data(), in.ldx = static_cast<size_t>(n_in);
        in.q32 = q32.data(), in.scale32 = scale32.data(), in.sum32 = sum32.data(), in.centre32 = centre32.data();
        in.q256 = q256.data(), in.scale256 = scale256.data(), in.centre16 = centre16.data();
        in.sums16 = sums16.data(), in.sums32 = sums32.data(), in.fits_int16 = fits_int16.data();
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
                if (1 < tokens && tokens < n - 1) continue;                         // 1 and n - 1 stand for all below n
                if (at_once / 2 >= kernels.at_once(std::max(n, tokens))) continue;  // which has not so many
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
    y = x;
    kernels.relu2(y.data(), 1024);
    report(kernels, "relu2", y);
    y = x;
    kernels.silu(y.data(), 1024);
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
    y = x;
    kernels.softplus(y.data(), 1024);
    report(kernels, "softplus", y);
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
    SequenceState cache({KvType::F16, 16, 16, {KvSizes{1, 1019, 0}}});
    const SequencePool::Want want[] = {{&cache, 16}};
    SequencePool::reserve(want);
    const KvHead head = cache.head(0, 0);
    kernels.store_key_value(head, 3, x.data(), x.data());
    std::memcpy(halves.data(), head.base + head.values_at + 3 * head.value_bytes, 2 * halves.size());
    report(kernels, "store_value", halves);
}

// A block of 32 columns of a state, and one of 16.
void recurrence(const Kernels& kernels) {
    Numbers numbers;
    const int n = 48;
    std::vector<float> x = numbers.floats(1024), w = numbers.floats(4096), out(1024);
    const float* rows[] = {x.data(), x.data() + 16, w.data(), x.data() + 32};
    kernels.convolve(rows, w.data(), 960, nullptr, 4, 960, true, out.data());
    report(kernels, "convolve", out);
    kernels.convolve(rows, w.data(), 960, x.data() + 48, 4, 960, true, out.data());
    report(kernels, "convolve-bias", out);
    out[0] = kernels.dot_product(x.data(), w.data(), 960);
    report(kernels, "dot_product", out);
    kernels.unit_length(out.data(), 960, 1e-6f, 0.3f);
    report(kernels, "unit_length", out);
    std::vector<float> rate = x;
    for (float& value : rate) value = -std::abs(value);
    out = numbers.floats(1024);
    for (float& value : out) value *= 20;
    kernels.decays(out.data(), w.data(), rate.data(), 1024);
    report(kernels, "decays", out);
    std::vector<float> steps = numbers.floats(1024);
    kernels.mamba_steps(steps.data(), out.data(), w.data(), rate.data(), 1024);
    report(kernels, "mamba_steps", steps);
    report(kernels, "mamba_steps-decays", out);
    for (const int width : {16, 32}) {
        std::vector<float> state = numbers.floats(static_cast<size_t>(n * width)), u(32), v(32), d(32), y(32);
        kernels.delta_read(state.data(), n, width, x.data(), w.data(), u.data(), v.data());
        kernels.delta_values(width, u.data(), v.data(), x.data(), 0.9f, 0.4f, 0.2f, d.data(), y.data());
        report(kernels, "delta_values-" + std::to_string(width), y);
        std::vector<float> next(state.size());
        kernels.delta_update(state.data(), next.data(), n, width, x.data(), d.data(), 0.9f, nullptr, nullptr, nullptr,
                             nullptr);
        kernels.delta_update(state.data(), state.data(), n, width, x.data(), d.data(), 0.9f, w.data(), x.data(),
                             u.data(), v.data());
        if (next != state) std::exit(1);
        state.insert(state.end(), u.begin(), u.end());
        state.insert(state.end(), v.begin(), v.end());
        report(kernels, "delta_update-" + std::to_string(width), state);
        // Without a key the query reads the same.
        kernels.delta_read(next.data(), n, width, nullptr, x.data(), nullptr, u.data());
        if (!std::equal(u.begin(), u.begin() + width, v.begin())) std::exit(1);
        kernels.mamba_values(width, u.data(), w.data(), 0.9f, 0.4f, 0.2f, 0.7f, d.data(), y.data());
        report(kernels, "mamba_values-" + std::to_string(width), y);
    }
}

// Experts of rows, and their weights: with equal products, zeros of both signs, infinities and numbers that are none.
void routing(const Kernels& kernels) {
    Numbers numbers;
    const float special[] = {0.0f, -0.0f, 1.0f, INFINITY, -INFINITY, NAN};
    for (const RouterFunction function : {RouterFunction::Softmax, RouterFunction::Sigmoid,
                                          RouterFunction::SoftmaxOfTopK, RouterFunction::SqrtSoftplus}) {
        std::vector<int32_t> chosen;
        std::vector<float> of_chosen;
        for (int row = 0; row < 64; row++) {
            ExpertsConfig config{16, 8 * (1 + row % 9), 1 + row % 8, function};
            config.is_normalised = row % 3 == 0, config.weight_scale = 1.7f;
            if (row % 2) config.n_groups = 4, config.n_used_groups = 4 - row % 3;
            const size_t n = static_cast<size_t>(config.n_experts), k = static_cast<size_t>(config.n_used);
            std::vector<float> products = numbers.floats(padded(config.n_experts)), bias = numbers.floats(n);
            for (size_t i = 0; row >= 32 && i < n; i += 3) products[i] = special[numbers.next() % (row < 48 ? 3 : 6)];
            std::vector<float> scores(n), weights(padded(config.n_used));
            std::vector<int32_t> experts(k);
            route(config, kernels, products.data(), row % 5 ? bias.data() : nullptr, scores.data(), experts.data(),
                  weights.data());
            chosen.insert(chosen.end(), experts.begin(), experts.end());
            for (size_t i = 0; i < k; i++) of_chosen.push_back(weights[i] == weights[i] ? weights[i] : -1);  // any NaN
        }
        const std::string name = std::to_string(static_cast<int>(function));
        report(kernels, "route-" + name, chosen);
        report(kernels, "weights-" + name, of_chosen);
    }
}

enum class SecondLayer { Dense, Experts, DeltaNet, ShortConv, Latents, Mamba };

// A decoder of random weights in one format, with everything that only some architectures have for some of them.
class RandomDecoder {
public:
    RandomDecoder(const Kernels& kernels, Format format, KvType kv_type, SecondLayer second)
        : format_(format), weights_(std::make_shared<Weights>(size_t{16} << 20, nullptr, nullptr)) {
        config_ = config_of(format, kv_type);
        if (second == SecondLayer::Experts) config_.layers[1].ffn = experts_of(format);
        if (second == SecondLayer::DeltaNet) config_.layers[1].mixer = DeltaNetConfig{2, 6, 48, 4, true, false};
        if (second == SecondLayer::ShortConv) config_.layers[1].mixer = ShortConvConfig{256, 3};
        if (second == SecondLayer::Mamba) {
            config_.layers[1].mixer = Mamba2Config{6, 48, 2, 32, 4};
            ExpertsConfig experts{256, 10, 3};
            experts.activation = Activation::Relu2, experts.n_ff_shared = 512, experts.n_latent = 64;
            config_.layers[1].ffn = experts;
        }
        AttentionConfig& first = std::get<AttentionConfig>(config_.layers[0].mixer);
        if (second == SecondLayer::DeltaNet) first.gate = OutputGate::InQ;
        if (second == SecondLayer::ShortConv) first.gate = OutputGate::PerHead, first.gate_is_softplus = true;
        if (second == SecondLayer::Latents) {
            first.gate = OutputGate::PerNumber;
            config_.layers[1].mixer = LatentConfig{5, 256, 32, 256, 256, 256, 1, 0.06f};
            config_.ropes.push_back({false, std::vector<double>(16, 0.3), 1.0, {}});
            config_.embedding_norm = true;
        }
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
        const StoredRows rows{embedding, kept_.back().size() / 300};
        weights_->set_embedding(std::make_unique<RowsInMemory>(rows, kept_.back().data(), 300, 256));
        decoder_ = std::make_unique<Decoder>(config_, front_, kernels, pool_, weights_, experts());
        state_ = std::make_unique<SequenceState>(config_.sequence_sizes(kv_type, 128));
    }

    std::vector<float> features(size_t n) { return numbers_.floats(n); }
    SequenceState& state() { return *state_; }
    Decoder& decoder() { return *decoder_; }

private:
    static DecoderConfig config_of(Format format, KvType kv_type) {
        AttentionConfig attention{256, 6, 2, 48};
        if (kv_type != KvType::F16) attention.n_heads = 9, attention.n_kv_heads = 3, attention.head_dim = 32;
        attention.rope = 0;
        attention.key_bias = kv_type == KvType::K6V4 && format != Format::Q5_K;
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
        AttentionConfig windowed = attention;
        windowed.window = 5;
        config.layers = {{attention, dense}, {windowed, dense}};
        return config;
    }

    void add_layer(int layer) {
        const std::string mixer = "layers." + std::to_string(layer) + ".mixer.";
        const std::string ffn = "layers." + std::to_string(layer) + ".ffn.";
        const LayerConfig& config = config_.layers[static_cast<size_t>(layer)];
        vector(mixer + "norm", 256), vector(ffn + "norm", 256);
        if (config.delta_net()) {
            add_delta_net(mixer, *config.delta_net());
        } else if (config.short_conv()) {
            vector(mixer + "conv", 3 * 256);
            matrix(mixer + "input", 3 * 256, 256), matrix(mixer + "output", 256, 256);
        } else if (config.mamba2()) {
            add_mamba2(mixer, *config.mamba2());
        } else if (config.latent_attention()) {
            add_latents(mixer, *config.latent_attention());
        } else {
            add_attention(mixer, ffn, *config.attention());
        }
        if (config.experts()) return add_experts(ffn);
        matrix(ffn + "gate", 512, 256), matrix(ffn + "up", 512, 256), matrix(ffn + "down", 256, 512);
    }

    void add_delta_net(const std::string& mixer, const DeltaNetConfig& net) {
        std::vector<float> decay = numbers_.floats(static_cast<size_t>(net.n_value_heads));
        for (float& value : decay) value = -0.1f * std::abs(value);
        weights_->set_vector(mixer + "decay", decay.data(), net.n_value_heads);
        vector(mixer + "step_bias", net.n_value_heads), vector(mixer + "out_norm", net.head_dim);
        vector(mixer + "conv", net.n_conv * net.n_channels());
        matrix(mixer + "qkv", net.n_channels(), 256), matrix(mixer + "gate", net.n_v(), 256);
        matrix(mixer + "beta", net.n_value_heads, 256), matrix(mixer + "alpha", net.n_value_heads, 256);
        matrix(mixer + "output", 256, net.n_v());
    }

    void add_mamba2(const std::string& mixer, const Mamba2Config& mamba) {
        std::vector<float> decay = numbers_.floats(static_cast<size_t>(mamba.n_heads));
        for (float& value : decay) value = -0.1f * std::abs(value);
        weights_->set_vector(mixer + "decay", decay.data(), mamba.n_heads);
        vector(mixer + "skip", mamba.n_heads), vector(mixer + "step_bias", mamba.n_heads);
        vector(mixer + "conv", mamba.n_conv * mamba.n_channels()), vector(mixer + "conv_bias", mamba.n_channels());
        vector(mixer + "out_norm", mamba.n_v());
        matrix(mixer + "input", mamba.n_input_rows(), 256), matrix(mixer + "output", 256, mamba.n_v());
    }

    void add_latents(const std::string& mixer, const LatentConfig& latents) {
        vector(mixer + "q_norm", latents.n_q_latent), vector(mixer + "kv_norm", latents.n_latent);
        matrix(mixer + "q_a", latents.n_q_latent, 256), matrix(mixer + "q_b", latents.n_q(), latents.n_q_latent);
        matrix(mixer + "kv", latents.n_row(), 256);
        matrix(mixer + "k_b", latents.n_heads * latents.n_latent, latents.n_plain);
        matrix(mixer + "v_b", latents.n_heads * latents.n_value, latents.n_latent);
        matrix(mixer + "output", 256, latents.n_heads * latents.n_value);
    }

    void add_attention(const std::string& mixer, const std::string& ffn, const AttentionConfig& attention) {
        if (attention.n_gate()) matrix(mixer + "gate", attention.n_gate(), 256);
        vector(mixer + "q_bias", attention.n_q_rows());
        if (attention.key_bias) vector(mixer + "k_bias", 96);
        if (attention.qk_norm == QKNorm::PerHead) {
            vector(mixer + "q_norm", attention.head_dim), vector(mixer + "k_norm", attention.head_dim);
            vector(mixer + "post_norm", 256), vector(ffn + "post_norm", 256);
        }
        if (format_ == Format::MXFP4) vector(mixer + "sinks", attention.n_heads);
        if (format_ == Format::I2_S) vector(mixer + "sub_norm", 288), vector(ffn + "sub_norm", 512);
        matrix(mixer + "q", attention.n_q_rows(), 256), matrix(mixer + "k", 96, 256), matrix(mixer + "v", 96, 256);
        matrix(mixer + "output", 256, 288);
    }

    static ExpertsConfig experts_of(Format format) {
        ExpertsConfig experts{256, 10, 3};
        experts.function = static_cast<RouterFunction>(static_cast<int>(format) % 4);
        experts.is_normalised = format == Format::Q8_0, experts.weight_scale = 1.3f;
        if (format == Format::Q4_K) experts.n_groups = 5, experts.n_used_groups = 2;
        if (format == Format::MXFP4) experts.activation = Activation::ClampedSwiglu;
        if (format == Format::Q6_K || format == Format::F16) experts.n_ff_shared = 512;
        return experts;
    }

    void add_experts(const std::string& ffn) {
        kept_.push_back(source_of(Format::F32, 10, 256, numbers_));
        weights_->set_matrix(ffn + "router", Format::F32, 10, 256);
        weights_->pack_rows(ffn + "router", 0, 10, Format::F32, kept_.back().data(), 1.0f, *pool_);
        if (format_ == Format::MXFP4) {
            vector(ffn + "router_bias", 10), vector(ffn + "gate_bias", 2560), vector(ffn + "down_bias", 2560);
        }
        if (format_ == Format::Q4_K) vector(ffn + "selection_bias", 10), vector(ffn + "up_scale", 10);
        if (format_ == Format::Q6_K) vector(ffn + "shared_router", 256);
        if (config_.layers[1].experts()->n_ff_shared) {
            matrix(ffn + "shared_up", 512, 256), matrix(ffn + "shared_down", 256, 512);
            if (!n_latent()) matrix(ffn + "shared_gate", 512, 256);
        }
        if (n_latent()) matrix(ffn + "latent_down", n_latent(), 256), matrix(ffn + "latent_up", 256, n_latent());
    }

    // Those that have latent rows have no gates.
    int n_latent() const { return config_.layers[1].experts()->n_latent; }

    // Null without a layer that has any.
    std::shared_ptr<ExpertStore> experts() {
        if (!config_.has_experts()) return nullptr;
        const auto layout = std::make_shared<ExpertLayout>();
        layout->add_layer_without_experts();
        const int n_in = n_latent() ? n_latent() : 256, n_up = n_latent() ? 0 : 256;
        config_.inputs.add(format_, n_in), config_.inputs.add(format_, 256);
        layout->add_layer(10, {format_, 256, n_in}, {format_, n_up, n_in}, {format_, n_in, 256});
        auto records = std::make_shared<ExpertRecords>(layout, nullptr);
        for (int i = 0; i < 10 * kExpertParts; i++) {
            const Matrix& part = layout->layer(1).parts[i % kExpertParts];
            if (!part.n_out) continue;
            const std::vector<uint8_t> source = source_of(format_, part.n_out, part.n_in, numbers_);
            for (int g = 0; g < part.n_groups(); g++) {
                pack_expert_group(layout->layer(1), static_cast<ExpertPart>(i % kExpertParts), format_, source.data(),
                                  g, records->record(1, i / kExpertParts));
            }
        }
        return std::make_shared<ResidentExperts>(std::move(records));
    }

    void matrix(const std::string& name, int n_out, int n_in) {
        // The attention is 288 wide, which only blocks of 32 divide.
        const bool fits =
            !(n_in % 256 && input_kind(format_) == InputKind::Int8By256) && !(n_in % 128 && format_ == Format::I2_S);
        const Format format = fits ? format_ : Format::Q8_0;
        kept_.push_back(source_of(format, n_out, n_in, numbers_));
        config_.inputs.add(format, n_in);
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
    std::unique_ptr<SequenceState> state_;
};

// A chain, a tree and a chain after what of each was kept, and a token alone.
void passes(const Kernels& kernels, const std::string& name, RandomDecoder& random) {
    const int n = 13;
    std::vector<int32_t> tokens(n), chain(n), rows(n);
    for (int i = 0; i < n; i++)
        tokens[static_cast<size_t>(i)] = (7 * i + 3) % 300, rows[static_cast<size_t>(i)] = i,
        chain[static_cast<size_t>(i)] = i - 1;
    const std::vector<int32_t> tree = {-1, 0, 1, 2, 1, 4, 5, 6, -1, 8, 9, 5, 11}, path = {0, 1, 4, 5, 11};
    const std::vector<float> features = random.features(n * 256);
    const auto pass = [&](const std::vector<int32_t>& parents, int n_tokens) {
        std::vector<float> logits(static_cast<size_t>(n_tokens) * 300);
        const SequenceRows text{&random.state(), 128, tokens.data(), parents.data(), n_tokens, 0, features.data(),
                                nullptr,         0,   nullptr,       size_t{0}};
        random.decoder().forward({&text, 1}, rows.data(), n_tokens, logits.data(), 0, [] { return false; });
        report(kernels, name + "-" + std::to_string(random.state().n_past()), logits);
    };
    pass(chain, n);
    random.state().commit(rows.data(), n);
    pass(tree, n);
    random.state().commit(path.data(), static_cast<int>(path.size()));
    pass(chain, 3);
    random.state().commit(rows.data(), 1);
    pass(chain, 1);
}

// A chain that is too long for rows of recurrent layers, in two passes, and a token after it.
void long_chain(const Kernels& kernels, const std::string& name, RandomDecoder& random) {
    const int n = 30;
    std::vector<int32_t> tokens(2 * n), chain(2 * n);
    for (int i = 0; i < 2 * n; i++)
        tokens[static_cast<size_t>(i)] = (11 * i + 5) % 300, chain[static_cast<size_t>(i)] = i - 1;
    std::vector<int32_t> rows = chain;
    for (int32_t& row : rows) row++;
    const std::vector<float> features = random.features(2 * n * 256);
    const auto pass = [&](int n_pending, int n_tokens) {
        std::vector<float> logits(static_cast<size_t>(n_tokens) * 300);
        const SequenceRows text{&random.state(), 128,      tokens.data() + n_pending,
                                chain.data(),    n_tokens, n_pending,
                                features.data(), nullptr,  0,
                                nullptr,         size_t{0}};
        random.decoder().forward({&text, 1}, rows.data(), n_tokens, logits.data(), 0, [] { return false; });
        report(kernels, name + "-long-" + std::to_string(n_pending) + "-" + std::to_string(n_tokens), logits);
    };
    pass(0, n);
    pass(n, n);
    random.state().commit(rows.data(), 2 * n);
    pass(0, 1);
}

// Whether the decoder of this format has something in its attention or before it that only some have, which meets each
// type of the cache in code of its own.
bool has_other_attention(Format format) {
    return format == Format::Q4_0 || format == Format::Q4_K || format == Format::Q5_K || format == Format::I2_S ||
           format == Format::MXFP4;
}

// Likewise of its experts.
bool has_other_experts(Format format) {
    return format == Format::F16 || format == Format::Q8_0 || format == Format::Q4_K || format == Format::Q6_K ||
           format == Format::MXFP4;
}

void decoders(const Kernels& kernels, bool few) {
    const auto name = [](const char* kind, int number, Format format) {
        return kind + std::to_string(number) + "-" + std::to_string(static_cast<int>(format));
    };
    for (const Format format : kFormats) {
        for (const KvType kv_type : {KvType::F16, KvType::Q8_0, KvType::K6V4}) {
            if (few && kv_type != KvType::F16 && !has_other_attention(format)) continue;
            RandomDecoder random(kernels, format, kv_type, SecondLayer::Dense);
            passes(kernels, name("decoder-", static_cast<int>(kv_type), format), random);
        }
        if (format == Format::Q8_0) {
            const std::map<std::string, SecondLayer> recurrent = {{"delta-net", SecondLayer::DeltaNet},
                                                                  {"mamba2", SecondLayer::Mamba},
                                                                  {"short-conv", SecondLayer::ShortConv}};
            for (const auto& [kind, second] : recurrent) {
                RandomDecoder random(kernels, format, KvType::F16, second);
                passes(kernels, kind, random);
                long_chain(kernels, kind, random);
            }
        }
        for (const KvType kv_type : {KvType::F16, KvType::Q8_0}) {
            if (format != Format::Q8_0 && format != Format::Q4_K) continue;
            RandomDecoder random(kernels, format, kv_type, SecondLayer::Latents);
            passes(kernels, name("latents-", static_cast<int>(kv_type), format), random);
        }
        if (format == Format::I2_S || (few && !has_other_experts(format))) continue;  // I2_S: not of experts
        RandomDecoder random(kernels, format, KvType::F16, SecondLayer::Experts);
        passes(kernels, "experts-" + std::to_string(static_cast<int>(format)), random);
    }
}

}  // namespace

int main(int n_arguments, char** arguments) {
    const std::set<std::string> named(arguments + 1, arguments + n_arguments);
    const bool few = named.count("few"), all_sets = named.size() == size_t{few};
    for (int i = 0; i < n_instruction_sets; i++) {
        if (!instruction_sets[i].can_run()) continue;
        const Kernels& kernels = *instruction_sets[i].kernels;
        if (!all_sets && !named.count(kernels.name)) continue;
        matrices(kernels);
        the_rest_of_a_layer(kernels);
        recurrence(kernels);
        routing(kernels);
        decoders(kernels, few);
    }
}
