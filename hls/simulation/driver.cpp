// Runs products on a Verilog engine that Verilator has made C++ of, as a library with a C interface. Compiled by
// hls/simulation/build.py, which defines ROWS, TABLES, TRITS (of a table), INDEX_BITS, ACC_BITS and FILL.
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "Vengine.h"
#include "verilated.h"

namespace {

constexpr int kBeatBytes = ROWS * TABLES * INDEX_BITS / 8;
constexpr int64_t kHung = -1;       // the engine gave no result in many times the cycles that it should take
constexpr int64_t kAssertion = -2;  // an assertion of the Verilog failed; standard error has its text

// One draw for `length` cycles, of their number alone: hls/stalls.py has the same.
class Draws {
public:
    Draws(uint64_t seed, double stall, int64_t length)
        : seed_(seed), stall_(static_cast<uint64_t>(stall * 4294967296.0)), length_(length) {}

    bool goes(int64_t cycle) const {
        uint64_t z = seed_ + static_cast<uint64_t>(cycle / length_) * 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return ((z ^ (z >> 31)) >> 32) >= stall_;
    }

private:
    uint64_t seed_, stall_;
    int64_t length_;
};

// A sender of beats of n_bytes. It offers the next beat in the first cycle that goes, and until it is taken.
class Sender {
public:
    Sender(const uint8_t* bytes, int n_bytes, int64_t n_beats, Draws draws)
        : bytes_(bytes), n_bytes_(n_bytes), n_beats_(n_beats), draws_(draws) {}

    bool offer(int64_t cycle) {
        offered_ = at_ < n_beats_ && (offered_ || draws_.goes(cycle));
        return offered_;
    }
    void write(void* port) const { std::memcpy(port, bytes_ + at_ * n_bytes_, n_bytes_); }
    void taken() {
        ++at_;
        offered_ = false;
    }

private:
    const uint8_t* bytes_;
    int n_bytes_;
    int64_t n_beats_, at_ = 0;
    Draws draws_;
    bool offered_ = false;
};

int32_t signed_field(const uint32_t* words, int first) {
    uint64_t bits = 0;
    for (int i = 0; i < ACC_BITS; ++i) {
        bits |= static_cast<uint64_t>(words[(first + i) / 32] >> ((first + i) % 32) & 1) << i;
    }
    return static_cast<int32_t>(static_cast<int64_t>(bits << (64 - ACC_BITS)) >> (64 - ACC_BITS));
}

class Engine {
public:
    Engine() : engine_(random_at_start(context_)) {
        context_.fatalOnError(false);  // an assertion must not end the process
        reset();
    }

    int64_t product(const int8_t* x, int32_t n_in, const uint8_t* stream, int32_t n_out, int32_t* y, Draws draws_x,
                    Draws draws_w, Draws draws_y, int64_t patience) {
        const int n_steps = (n_in + TABLES * TRITS - 1) / (TABLES * TRITS), n_tiles = (n_out + ROWS - 1) / ROWS;
        inputs_.assign(static_cast<size_t>(n_steps) * TABLES * TRITS, 0);
        std::memcpy(inputs_.data(), x, static_cast<size_t>(n_in));
        Sender sender_x(inputs_.data(), TRITS, static_cast<int64_t>(n_steps) * TABLES, draws_x);
        Sender sender_w(stream, kBeatBytes, static_cast<int64_t>(n_steps) * n_tiles, draws_w);
        const int64_t limit = patience * (1000 + TABLES + static_cast<int64_t>(n_steps) * (FILL + n_tiles + TABLES));
        begin(n_steps, n_tiles);
        int tile = 0;
        for (int64_t cycle = 1; cycle < limit; ++cycle) {
            if ((engine_.x_valid = sender_x.offer(cycle))) sender_x.write(&engine_.x_data);
            if ((engine_.w_valid = sender_w.offer(cycle))) sender_w.write(&engine_.w_data);
            engine_.y_ready = draws_y.goes(cycle);
            engine_.start = cycle % 2;  // ignored while busy, and so are the sizes
            engine_.eval();
            if (engine_.x_valid && engine_.x_ready) sender_x.taken();
            if (engine_.w_valid && engine_.w_ready) sender_w.taken();
            if (engine_.y_valid && engine_.y_ready) take(y, n_out, tile++);
            tick();
            if (context_.gotFinish()) return failed(kAssertion);
            if (tile == n_tiles) return engine_.busy ? failed(kHung) : cycle;
        }
        return failed(kHung);
    }

private:
    // Registers and memories begin with any values, as after power-up; the same ones each time.
    static VerilatedContext* random_at_start(VerilatedContext& context) {
        context.randReset(2);
        context.randSeed(1);
        return &context;
    }

    // A rising edge, and the values after it.
    void tick() {
        engine_.clk = 1;
        engine_.eval();
        engine_.clk = 0;
        engine_.eval();
    }

    void reset() {
        engine_.rst = 1;
        engine_.clk = engine_.start = engine_.x_valid = engine_.w_valid = engine_.y_ready = 0;
        std::memset(&engine_.x_data, 0, sizeof engine_.x_data);
        engine_.eval();
        tick();  // one cycle must do
        engine_.rst = 0;
        for (int i = 0; i < 20; ++i) tick();  // an engine that is reset does nothing until it is started
    }

    void begin(int n_steps, int n_tiles) {
        engine_.start = 1;
        engine_.n_steps = n_steps;
        engine_.n_tiles = n_tiles;
        engine_.x_valid = engine_.w_valid = engine_.y_ready = 0;
        engine_.eval();
        tick();
        engine_.start = 0;
        engine_.n_steps = engine_.n_tiles = 1;
    }

    void take(int32_t* y, int32_t n_out, int tile) {
        uint32_t words[(ROWS * ACC_BITS + 63) / 64 * 2] = {};
        std::memcpy(words, &engine_.y_data, sizeof engine_.y_data);
        for (int r = 0; r < ROWS && tile * ROWS + r < n_out; ++r) {
            y[tile * ROWS + r] = signed_field(words, r * ACC_BITS);
        }
    }

    int64_t failed(int64_t why) {
        context_.gotFinish(false);
        reset();
        return why;
    }

    VerilatedContext context_;
    Vengine engine_;
    std::vector<uint8_t> inputs_;
};

}  // namespace

extern "C" {

struct ei_stalls {
    uint64_t seeds[3];  // of x, w, y
    double stalls[3];   // share of cycles in which a stream does not go on
    int64_t length;     // cycles that are drawn together
    int64_t patience;   // cycles that a product may take, as a multiple of those without stalls
};

void* ei_engine_new() { return new Engine(); }

void ei_engine_delete(void* engine) { delete static_cast<Engine*>(engine); }

// The cycles from start to the last result, or -1 (hung) or -2 (an assertion failed).
// x: (n_in,), stream: as hls/packing.py draws it, y: (n_out,).
int64_t ei_engine_product(void* engine, const int8_t* x, int32_t n_in, const uint8_t* stream, int32_t n_out,
                          int32_t* y) {
    const Draws always(0, 0.0, 1);
    return static_cast<Engine*>(engine)->product(x, n_in, stream, n_out, y, always, always, always, 1);
}

int64_t ei_engine_product_stalled(void* engine, const int8_t* x, int32_t n_in, const uint8_t* stream, int32_t n_out,
                                  int32_t* y, const ei_stalls* s) {
    const auto draws = [s](int stream) { return Draws(s->seeds[stream], s->stalls[stream], s->length); };
    return static_cast<Engine*>(engine)->product(x, n_in, stream, n_out, y, draws(0), draws(1), draws(2), s->patience);
}
}
