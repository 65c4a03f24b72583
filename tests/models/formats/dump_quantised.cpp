// The quantisers without Python, to run them on another CPU or under an emulator:
//     dump_quantised N_ROWS N_IN < weights and importance in float32 > the bytes of every format, plain and weighted
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "quantizers.h"

extern const Quantizers quantizers_portable;

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    const int64_t n_rows = std::atoll(argv[1]), n_in = std::atoll(argv[2]);
    std::vector<float> weights(static_cast<size_t>(n_rows * n_in)), importance(static_cast<size_t>(n_in));
    if (std::fread(weights.data(), sizeof(float), weights.size(), stdin) != weights.size()) return 1;
    if (std::fread(importance.data(), sizeof(float), importance.size(), stdin) != importance.size()) return 1;
    for (int i = 0; i < quantizers_portable.n_formats; i++) {
        const Quantizer& format = quantizers_portable.formats[i];
        std::vector<uint8_t> bytes(weights.size() / format.block_elements * format.block_bytes);
        for (const Quantize quantize : {format.plain, format.weighted}) {
            quantize(Rows{weights.data(), importance.data(), n_rows, n_in, bytes.data()});
            if (std::fwrite(bytes.data(), 1, bytes.size(), stdout) != bytes.size()) return 1;
        }
    }
}
