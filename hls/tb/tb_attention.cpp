// Runs the attention tops on golden vectors (`write_golden` of hls/attention.py) and compares every bit.
//     tb_attention FOLDER [--mutate]
// --mutate turns one bit of a golden output, so that the comparison must fail. Returns 0 if all are equal.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../src/ei_attention_axi.cpp"

namespace {

template <class T>
std::vector<T> read(const std::string& path, size_t n) {
    std::vector<T> values(n);
    FILE* file = std::fopen(path.c_str(), "rb");
    if (!file) {
        std::fprintf(stderr, "%s cannot be opened\n", path.c_str());
        std::exit(2);
    }
    const size_t found = std::fread(values.data(), sizeof(T), n, file);
    const bool more = std::fgetc(file) != EOF;
    std::fclose(file);
    if (found != n || more) {
        std::fprintf(stderr, "%s must have %zu numbers: found %s\n", path.c_str(), n, more ? "more" : "fewer");
        std::exit(2);
    }
    return values;
}

int mismatches(const std::vector<float>& found, const std::vector<float>& golden) {
    int n = 0;
    for (size_t i = 0; i < golden.size(); i++) n += std::memcmp(&found[i], &golden[i], sizeof(float)) != 0;
    return n;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: tb_attention FOLDER [--mutate]\n");
        return 2;
    }
    const std::string folder = argv[1];
    // head_dim, group, n_kv_heads, first, n_tokens, stride
    const std::vector<int32_t> shape = read<int32_t>(folder + "/shape.bin", 6);
    const size_t head_dim = shape[0], group = shape[1], n_kv = shape[2], n_tokens = shape[4], stride = shape[5];
    if (head_dim != EI_HEAD_DIM || group != EI_GROUP || shape[3] + shape[4] > EI_MAX_POSITIONS) {
        std::fprintf(stderr, "the kernel has heads of %d in groups of %d and %d positions: found %d, %d and %d\n",
                     EI_HEAD_DIM, EI_GROUP, EI_MAX_POSITIONS, shape[0], shape[1], shape[3] + shape[4]);
        return 2;
    }
    const size_t row = n_kv * group * head_dim;
    const std::vector<float> scale = read<float>(folder + "/scale.bin", 1);
    const std::vector<float> q = read<float>(folder + "/q.bin", n_tokens * row);
    const std::vector<uint16_t> keys = read<uint16_t>(folder + "/keys.bin", n_kv * stride * head_dim);
    const std::vector<uint16_t> values = read<uint16_t>(folder + "/values.bin", n_kv * stride * head_dim);
    std::vector<float> golden = read<float>(folder + "/out.bin", n_tokens * row);
    if (argc > 2 && std::string(argv[2]) == "--mutate") {
        uint32_t bits;
        std::memcpy(&bits, &golden[row / 2], 4);
        bits ^= 1;
        std::memcpy(&golden[row / 2], &bits, 4);
    }
    std::vector<float> prompt(n_tokens * row), tokens(n_tokens * row);
    const auto decode = [&](size_t t, int n_positions) {
        return ei_decode_attention(&q[t * row], keys.data(), values.data(), &tokens[t * row], shape[2], n_positions,
                                   shape[5], scale[0]);
    };
    const auto prefill = [&](int first, int n) {
        return ei_prefill_attention(q.data(), keys.data(), values.data(), prompt.data(), shape[2], first, n, shape[5],
                                    scale[0]);
    };
    if (decode(0, EI_MAX_POSITIONS + 1) || decode(0, 0) || prefill(EI_MAX_POSITIONS, 1) || prefill(0, 0)) {
        std::fprintf(stderr, "positions that the kernel has no room for must be refused: they are not\n");
        return 2;
    }
    bool done = prefill(shape[3], shape[4]);
    for (size_t t = 0; t < n_tokens; t++) done = decode(t, shape[3] + static_cast<int>(t) + 1) && done;
    if (!done) {
        std::fprintf(stderr, "positions that the kernel has room for are refused\n");
        return 2;
    }
    const int of_prompt = mismatches(prompt, golden), of_tokens = mismatches(tokens, golden);
    std::printf("csim attention values=%zu prefill mismatches=%d decode mismatches=%d\n", golden.size(), of_prompt,
                of_tokens);
    return of_prompt + of_tokens != 0;
}
