// Runs ei_tlmm_top on golden vectors and compares every sum.
//     tb_tlmm FOLDER [--mutate KIND]
//     tb_tlmm --weights FILE --x FILE --y FILE --rows N --inputs K [--geometry HASH] [--mutate KIND]
// FOLDER is an exported one, and the bench is compiled with its edgeinfer_model.h: -I FOLDER -DEI_MODEL_HEADER.
// Else weights are the stream of hls/packing.py, x int8 (n, K), y int32 (n, N). KIND is a fault that is made on the way:
// weight, golden, geometry or short; each must be found. Returns 0 if all is equal, 1 for other sums, 2 for other faults.
#define EI_TABLES_HERE

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <map>

#include "../src/ei_tlmm_top.hpp"
#include "ei_streams.hpp"
#include "files.hpp"
#include "words.hpp"

namespace {

using Engine = ei::Configured;
using Bytes = std::vector<std::uint8_t>;
using ei_tb::read_part;
using ei_tb::read_whole;

struct Golden {
    std::string name;
    int n_out, n_in;
    Bytes stream;                 // as hls/packing.py has it, of all ports
    std::vector<std::int8_t> x;   // (n, n_in)
    std::vector<std::int32_t> y;  // (n, n_out)

    int n() const { return static_cast<int>(x.size()) / n_in; }
    int n_beats() const { return Engine::n_steps(n_in) * Engine::n_tiles(n_out); }
    std::size_t beat_bytes() const { return static_cast<std::size_t>(n_beats()) * (Engine::Beat::width / 8); }
};

Golden read_golden(const std::string& name, int n_out, int n_in, const Bytes& stream, const std::string& x,
                   const std::string& y) {
    Golden golden{name, n_out, n_in, stream, {}, {}};
    if (n_in > Engine::kMaxIn || n_out > Engine::kMaxOut) {
        throw std::runtime_error(name + " is larger than the engine that this bench is compiled for");
    }
    const Bytes inputs = read_whole(x);
    const std::size_t n = inputs.size() / static_cast<std::size_t>(n_in);
    if (n == 0 || inputs.size() % static_cast<std::size_t>(n_in) != 0) {
        throw std::runtime_error("short file: " + x + " must have rows of " + std::to_string(n_in) + " bytes: found " +
                                 std::to_string(inputs.size()) + " bytes");
    }
    golden.x.assign(inputs.begin(), inputs.end());
    golden.y.resize(n * static_cast<std::size_t>(n_out));
    const Bytes sums = read_part(y, 0, 4 * golden.y.size());
    std::memcpy(golden.y.data(), sums.data(), sums.size());
    return golden;
}

// The indices of a stream, one after another.
int index_at(const Bytes& stream, std::size_t i) {
    int index = 0;
    for (int bit = 0; bit < Engine::kIndexBits; bit++) {
        const std::size_t at = i * Engine::kIndexBits + static_cast<std::size_t>(bit);
        index |= (stream[at / 8] >> at % 8 & 1) << bit;
    }
    return index;
}

void check_indices(const Golden& golden) {
    for (std::size_t i = 0; i < golden.beat_bytes() * 8 / Engine::kIndexBits; i++) {
        const int index = index_at(golden.stream, i);
        if (index < Engine::kEntries) continue;
        throw std::runtime_error("weights of " + golden.name + " are damaged: index " + std::to_string(index) +
                                 " at place " + std::to_string(i) + " stands for none");
    }
}

// ---- faults ----------------------------------------------------------------------------------------------------------

// A bit of the first index, so that it stands for other weights of row 0.
void change_weight(Golden& golden) {
    golden.stream.at(0) ^= (index_at(golden.stream, 0) ^ 1) < Engine::kEntries ? 1 : 2;
}

void mutate(const std::string& kind, Golden& golden) {
    if (kind == "weight") change_weight(golden);
    if (kind == "golden") golden.y.at(0) += 1;
    if (kind == "short") golden.stream.resize(golden.beat_bytes() - 1);
    for (const char* known : {"weight", "golden", "geometry", "short"}) {
        if (kind == known) return;
    }
    throw std::runtime_error("--mutate takes weight, golden, geometry or short: found " + kind);
}

// ---- comparing -------------------------------------------------------------------------------------------------------

void check_geometry(std::uint64_t of_engine, std::uint64_t of_weights) {
    if (of_engine == of_weights) return;
    char text[160];
    std::snprintf(text, sizeof text,
                  "wrong geometry: the weights are packed for %016" PRIx64 ", and the engine is of %016" PRIx64
                  ": compile it for them, or export the model again",
                  of_weights, of_engine);
    throw std::runtime_error(text);
}

std::vector<std::int32_t> run(const Golden& golden, int token, std::uint64_t* geometry) {
    hls::stream<Engine::Group> x("x");
    hls::stream<Engine::Beat> w("w");
    hls::stream<Engine::Tile> y("y");
    ei_tb::write_inputs<Engine>(golden.x.data() + static_cast<std::size_t>(token) * golden.n_in, golden.n_in, x);
    ei_tb::write_words<Engine::Beat>(golden.stream.data(), golden.n_beats(), w);
    ei_tlmm_top(x, w, y, Engine::n_steps(golden.n_in), Engine::n_tiles(golden.n_out), geometry);
    std::vector<std::int32_t> sums(static_cast<std::size_t>(golden.n_out));
    ei_tb::read_rows<Engine>(y, golden.n_out, sums.data());
    return sums;
}

// A changed weight shows in the sums of most tokens, a changed golden value in those of one.
const char* cause(int n_wrong, int n) {
    if (n == 1) return "the weights or the golden value were changed";
    return n_wrong > 1 ? "the weights are not those of the golden vectors" : "a golden value is not the product";
}

// How many sums differ; says so of the first row with any.
int mismatches(const Golden& golden, std::uint64_t of_weights) {
    std::map<int, int> wrong;  // tokens by row
    int n_wrong = 0;
    for (int token = 0; token < golden.n(); token++) {
        std::uint64_t of_engine = 0;
        const std::vector<std::int32_t> sums = run(golden, token, &of_engine);
        check_geometry(of_engine, of_weights);
        for (int row = 0; row < golden.n_out; row++) {
            if (sums[static_cast<std::size_t>(row)] == golden.y[static_cast<std::size_t>(token * golden.n_out + row)])
                continue;
            wrong[row]++;
            n_wrong++;
        }
    }
    if (n_wrong) {
        const auto& first = *wrong.begin();
        std::fprintf(stderr, "%s: row %d differs for %d of %d tokens, and %zu rows in all: %s\n", golden.name.c_str(),
                     first.first, first.second, golden.n(), wrong.size(), cause(first.second, golden.n()));
    }
    return n_wrong;
}

// ---- what is compared ------------------------------------------------------------------------------------------------

using Arguments = std::map<std::string, std::string>;

Arguments parsed(int argc, char** argv) {
    Arguments given;
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i];
        if (word.substr(0, 2) != "--") {
            given["folder"] = word;
            continue;
        }
        if (++i == argc) throw std::runtime_error(word + " needs a value");
        given[word.substr(2)] = argv[i];
    }
    return given;
}

std::string required(const Arguments& given, const std::string& name) {
    const auto found = given.find(name);
    if (found == given.end()) throw std::runtime_error("--" + name + " is needed, or a folder");
    return found->second;
}

std::vector<Golden> of_files(const Arguments& given) {
    const int n_out = std::stoi(required(given, "rows")), n_in = std::stoi(required(given, "inputs"));
    const Bytes stream = read_whole(required(given, "weights"));
    return {read_golden(required(given, "weights"), n_out, n_in, stream, required(given, "x"), required(given, "y"))};
}

#ifdef EI_MODEL_HEADER
// The ports' bytes of a tensor as the stream that they were dealt from.
Bytes gathered(const std::string& folder, const ei_tensor& tensor) {
    hls::stream<ei::Lane> ports[ei::kPorts];
    const int n = static_cast<int>(tensor.bytes / 16);
    for (int p = 0; p < ei::kPorts; p++) {
        const std::string path = folder + "/" + tensor.stream + "." + std::to_string(p) + ".bin";
        const Bytes bytes = read_part(path, tensor.offset, tensor.bytes);
        ei_tb::write_words<ei::Lane>(bytes.data(), n, ports[p]);
    }
    hls::stream<ap_uint<ei::kPorts * ei::kLaneBits>> groups("groups");
    hls::stream<ap_uint<8>> single("bytes");
    ei::gather<ei::kPorts>(ports, n, groups);
    ei::change_width(groups, n, single, 16 * ei::kPorts * n);
    Bytes stream;
    while (!single.empty()) stream.push_back(static_cast<std::uint8_t>(single.read().to_uint()));
    return stream;
}

std::vector<Golden> of_folder(const std::string& folder) {
    std::vector<Golden> found;
    for (int i = 0; i < EI_N_TENSORS; i++) {
        const ei_tensor& tensor = ei_tensors[i];
        const std::string vectors = folder + "/golden/" + tensor.name;
        if (!ei_tb::is_file(vectors + ".x.bin")) continue;
        const Bytes stream = gathered(folder, tensor);
        found.push_back(
            read_golden(tensor.name, tensor.n_out, tensor.n_in, stream, vectors + ".x.bin", vectors + ".y.bin"));
    }
    if (found.empty()) throw std::runtime_error(folder + " has no golden vectors: export with --golden 3");
    return found;
}
#else
std::vector<Golden> of_folder(const std::string& folder) {
    throw std::runtime_error("compile this bench with -I " + folder + " -DEI_MODEL_HEADER");
}
#endif

int compare(const Arguments& given) {
    const bool whole = given.count("folder") != 0;
    std::vector<Golden> all = whole ? of_folder(given.at("folder")) : of_files(given);
    std::uint64_t geometry = ei::kGeometryHash;
    if (whole) geometry = ei_tb::geometry_of_manifest(given.at("folder") + "/manifest.json");
    if (given.count("geometry")) geometry = std::stoull(given.at("geometry"), nullptr, 16);
    if (given.count("mutate")) {
        mutate(given.at("mutate"), all.front());
        if (given.at("mutate") == "geometry") geometry ^= 1;
    }
    int n_rows = 0, n_wrong = 0;
    for (const Golden& golden : all) {
        ei_tb::check_size("weights of " + golden.name, golden.beat_bytes(), golden.stream.size());
        check_indices(golden);
        n_wrong += mismatches(golden, geometry);
        n_rows += golden.n() * golden.n_out;
    }
    std::printf("csim rows=%d mismatches=%d\n", n_rows, n_wrong);
    return n_wrong ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return compare(parsed(argc, argv));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 2;
    }
}
