// Part of kernels.cpp: the attention of a few query heads that share keys and values, and what fills the cache.
//
// Everything goes segment by segment, and within one over rows that share what is loaded: their number changes no bit.
#pragma once

namespace {

EI_INLINE uint8_t* segment_of(const KvHead& kv, int slot) {
    return kv.base + static_cast<size_t>(kv.segments[slot / kSegment]) * kv.segment_bytes;
}

EI_INLINE uint8_t* key_tile(const KvHead& kv, int tile) {
    return segment_of(kv, 16 * tile) + static_cast<size_t>(tile % (kSegment / 16)) * kv.tile_bytes;
}

void store_f16_key_value(const KvHead& kv, int slot, const float* key, const float* value) {
    uint16_t* k = reinterpret_cast<uint16_t*>(key_tile(kv, slot / 16)) + slot % 16;
    uint8_t* v = segment_of(kv, slot) + kv.values_at + static_cast<size_t>(slot % kSegment) * kv.value_bytes;
    for (int i = 0; i < kv.head_dim; i += 16) {
        const int n = kv.head_dim - i < 16 ? kv.head_dim - i : 16;
        float lanes[16] = {};
        uint16_t h[16];
        std::memcpy(lanes, key + i, sizeof(float) * static_cast<size_t>(n));
        store_f16(h, load_f32(lanes));
        for (int j = 0; j < n; j++) k[(i + j) * 16] = h[j];
        std::memcpy(lanes, value + i, sizeof(float) * static_cast<size_t>(n));
        store_f16(v + 2 * i, load_f32(lanes));
    }
}

void store_q8_key_value(const KvHead& kv, int slot, const float* key, const float* value) {
    uint8_t* tile = key_tile(kv, slot / 16);
    uint8_t* values = segment_of(kv, slot) + kv.values_at;
    const int lane = slot % 16, n_blocks = kv.head_dim / 32;
    uint8_t* lines = tile + 64 * n_blocks + 4 * lane;
    const size_t at = static_cast<size_t>(slot % kSegment);
    for (int b = 0; b < n_blocks; b++) {
        int8_t codes[32];
        int32_t sums[2];
        float scale = quantize<32>(key + 32 * b, codes, sums);
        std::memcpy(tile + 64 * b + 4 * lane, &scale, sizeof scale);
        for (int i = 0; i < 32; i++) lines[64 * (8 * b + i / 4) + i % 4] = static_cast<uint8_t>(codes[i] ^ 0x80);
        scale = quantize<32>(value + 32 * b, codes, sums);
        std::memcpy(values + (at * static_cast<size_t>(n_blocks) + static_cast<size_t>(b)) * 4, &scale, sizeof scale);
        std::memcpy(values + kv.scales_bytes + at * kv.value_bytes + 32 * b, codes, sizeof codes);
    }
}

// The smallest bf16 from x on, for x >= 0. NaN and infinity stay.
EI_INLINE uint16_t bf16_from(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return static_cast<uint16_t>((bits + 0xffff) >> 16);
}
EI_INLINE float bf16_at(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, sizeof half);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Codes 0..top of a head: number = (step * code - step * top / 2) * scale, as fine as its largest number lets them be.
struct Codes {
    uint16_t scale;
    float factor, middle, top;

    Codes(const float* x, int n, int top_code, float step) : middle(0.5f * static_cast<float>(top_code)) {
        const float most = largest_magnitude(x, n);
        top = static_cast<float>(top_code);
        scale = most < 1e-30f ? uint16_t{0} : bf16_from(most / (0.5f * step * (top + 1.0f)));
        const float used = bf16_at(reinterpret_cast<const uint8_t*>(&scale));
        factor = used == 0.0f ? 0.0f : 1.0f / (step * used);
    }
    // Of 32 numbers.
    EI_INLINE void of(const float* x, int8_t* codes) const {
        for (int i = 0; i < 32; i += 16) {
            const F32 v = fma_f32(load_f32(x + i), set_f32(factor), set_f32(middle));
            store_i8(codes + i, round_to_i32(min_f32(max_f32(v, set_f32(0.0f)), set_f32(top))));
        }
    }
};

// 32 numbers of a key to a lane of six lines.
EI_INLINE void store_6_bits(uint8_t* lane, const int8_t* codes) {
    for (int i = 0; i < 16; i++)
        lane[64 * (i / 4) + i % 4] = static_cast<uint8_t>((codes[i] & 15) | (codes[16 + i] & 15) << 4);
    for (int i = 0; i < 8; i++) {
        const int8_t* c = codes + 16 * (i / 4) + i % 4;
        lane[64 * (4 + i / 4) + i % 4] =
            static_cast<uint8_t>(c[0] >> 4 | (c[4] >> 4) << 2 | (c[8] >> 4) << 4 | (c[12] >> 4) << 6);
    }
}

void store_k6v4_key_value(const KvHead& kv, int slot, const float* key, const float* value) {
    const size_t at = static_cast<size_t>(slot % kSegment);
    uint8_t* segment = segment_of(kv, slot);
    uint8_t* lane = key_tile(kv, slot / 16) + 4 * (slot % 16);
    uint8_t* values = segment + kv.values_at + kv.scales_bytes + at * kv.value_bytes;
    const Codes of_key(key, kv.head_dim, 63, 2.0f), of_value(value, kv.head_dim, 15, 16.0f);
    std::memcpy(segment + kv.key_scales_at + 2 * at, &of_key.scale, 2);
    std::memcpy(segment + kv.values_at + 2 * at, &of_value.scale, 2);
    for (int d = 0; d < kv.head_dim; d += 32) {
        int8_t codes[32];
        of_key.of(key + d, codes);
        store_6_bits(lane + 12 * d, codes);
        of_value.of(value + d, codes);
        for (int i = 0; i < 16; i++) values[d / 2 + i] = static_cast<uint8_t>(codes[i] | codes[16 + i] << 4);
    }
}

// A row that is both, at the place of values.
void store_row(const KvHead& kv, int slot, const float* row) {
    const size_t at = static_cast<size_t>(slot % kSegment);
    uint8_t* values = segment_of(kv, slot) + kv.values_at;
    uint8_t* own = values + kv.scales_bytes + at * kv.value_bytes;
    if (kv.type == KvType::F16) {
        for (int i = 0; i < kv.head_dim; i += 16) store_f16(own + 2 * i, load_f32(row + i));
        return;
    }
    for (int b = 0; b < kv.head_dim / 32; b++) {
        int8_t codes[32];
        int32_t sums[2];
        const float scale = quantize<32>(row + 32 * b, codes, sums);
        std::memcpy(values + at * (kv.scales_bytes / kSegment) + 4 * static_cast<size_t>(b), &scale, sizeof scale);
        std::memcpy(own + 32 * b, codes, sizeof codes);
    }
}

void store_key_value(const KvHead& kv, int slot, const float* key, const float* value) {
    if (kv.is_row) return store_row(kv, slot, key);
    switch (kv.type) {
        case KvType::F16: return store_f16_key_value(kv, slot, key, value);
        case KvType::Q8_0: return store_q8_key_value(kv, slot, key, value);
        case KvType::K6V4: return store_k6v4_key_value(kv, slot, key, value);
    }
}

// scores[slot] = q . key for the slots of one tile. Two sums, of the even and of the odd dimensions.
template <int NR>
EI_INLINE void score_f16(const uint8_t* bytes, int head_dim, const AttentionRow* rows, F32 (&scores)[NR]) {
    const uint16_t* tile = reinterpret_cast<const uint16_t*>(bytes);
    F32 even[NR], odd[NR];
    for (int r = 0; r < NR; r++) even[r] = odd[r] = set_f32(0.0f);
    for (int d = 0; d < head_dim; d += 2) {
        const F32 k0 = load_f16(tile + 16 * d), k1 = load_f16(tile + 16 * d + 16);
        for (int r = 0; r < NR; r++) {
            even[r] = fma_f32(k0, set_f32(rows[r].q[d]), even[r]);
            odd[r] = fma_f32(k1, set_f32(rows[r].q[d + 1]), odd[r]);
        }
    }
    for (int r = 0; r < NR; r++) scores[r] = add_f32(even[r], odd[r]);
}

// The same with codes: integers within a block of 32 dimensions, floats over the blocks.
template <int NR>
EI_INLINE void score_q8(const uint8_t* tile, int head_dim, const AttentionRow* rows, F32 (&scores)[NR]) {
    const int n_blocks = head_dim / 32;
    for (int r = 0; r < NR; r++) scores[r] = set_f32(0.0f);
    for (int b = 0; b < n_blocks; b++) {
        I32 sum[NR];
        for (int r = 0; r < NR; r++) sum[r] = set_i32(-kOffset8 * rows[r].sums[b]);
        const int8_t* codes[NR];
        for (int r = 0; r < NR; r++) codes[r] = rows[r].codes + 32 * b;
        dot32<8, NR, 1>(tile + 64 * (n_blocks + 8 * b), codes, from_zero,
                        [&](int r, Dot d) { sum[r] = add_dot(sum[r], d); });
        const F32 scale = load_f32(reinterpret_cast<const float*>(tile + 64 * b));
        for (int r = 0; r < NR; r++) {
            scores[r] = fma_f32(mul_f32(to_f32(sum[r]), scale), set_f32(rows[r].scales[b]), scores[r]);
        }
    }
}

// The same with one scale a key, and integers before it.
template <int NR>
EI_INLINE void score_k6(const KvHead& kv, int tile, const AttentionRow* rows, F32 (&scores)[NR]) {
    const uint8_t* lines = key_tile(kv, tile);
    I32 sum[NR];
    for (int r = 0; r < NR; r++) sum[r] = set_i32(0);
    for (int d = 0; d < kv.head_dim; d += 32) {
        const int8_t* codes[NR];
        for (int r = 0; r < NR; r++) codes[r] = rows[r].codes + d;
        dot32<6, NR, 1>(lines + 12 * d, codes, from_zero, [&](int r, Dot dots) { sum[r] = add_dot(sum[r], dots); });
    }
    const F32 scale = load_bf16(segment_of(kv, 16 * tile) + kv.key_scales_at + 2 * (16 * tile % kSegment));
    for (int r = 0; r < NR; r++) {
        const I32 centred = sub_i32(shl_i32(sum[r], 1), set_i32(63 * rows[r].sums[0]));
        scores[r] = mul_f32(mul_f32(to_f32(centred), scale), set_f32(rows[r].scales[0]));
    }
}

// 16 numbers of the value in a slot, from number d on; values: those of the slot's segment.
template <KvType TYPE>
EI_INLINE F32 load_value(const KvHead& kv, const uint8_t* values, int slot, int d) {
    const size_t at = static_cast<size_t>(slot % kSegment);
    if constexpr (TYPE == KvType::F16) {
        return load_f16(values + at * kv.value_bytes + 2 * static_cast<size_t>(d));
    } else if constexpr (TYPE == KvType::K6V4) {
        const bool is_high = d % 32 != 0;
        const float scale = bf16_at(values + 2 * at);
        const uint8_t* bytes = values + kv.scales_bytes + at * kv.value_bytes + d / 32 * 16;
        const F32 code = to_f32(and_i32(load_u8_as_i32(bytes), set_i32(is_high ? 0xf0 : 0x0f)));   // high: 16 times it
        return fma_f32(code, set_f32(is_high ? scale : 16.0f * scale), set_f32(-120.0f * scale));  // exact
    } else {
        float scale;
        std::memcpy(&scale, values + (at * static_cast<size_t>(kv.head_dim) + static_cast<size_t>(d)) / 32 * 4, 4);
        const uint8_t* codes = values + kv.scales_bytes + at * kv.value_bytes + d;
        return mul_f32(to_f32(load_i8_as_i32(codes)), set_f32(scale));
    }
}

// The same of rows that are both: of each slot 16 lanes over its numbers, in two sums of every second piece, and then one
// tree.
template <KvType TYPE, int NR>
EI_INLINE void score_row_slots(const KvHead& kv, int tile, const AttentionRow* rows, F32 (&scores)[NR]) {
    const uint8_t* values = segment_of(kv, 16 * tile) + kv.values_at;
    float lanes[NR][16];
    for (int slot = 0; slot < 16; slot++) {
        F32 even[NR], odd[NR];
        for (int r = 0; r < NR; r++) even[r] = odd[r] = set_f32(0.0f);
        int d = 0;
        for (; d + 32 <= kv.head_dim; d += 32) {
            const F32 k0 = load_value<TYPE>(kv, values, 16 * tile + slot, d);
            const F32 k1 = load_value<TYPE>(kv, values, 16 * tile + slot, d + 16);
            for (int r = 0; r < NR; r++) {
                even[r] = fma_f32(k0, load_f32(rows[r].q + d), even[r]);
                odd[r] = fma_f32(k1, load_f32(rows[r].q + d + 16), odd[r]);
            }
        }
        for (; d < kv.head_dim; d += 16) {
            const F32 k = load_value<TYPE>(kv, values, 16 * tile + slot, d);
            for (int r = 0; r < NR; r++) even[r] = fma_f32(k, load_f32(rows[r].q + d), even[r]);
        }
        for (int r = 0; r < NR; r++) lanes[r][slot] = sum_lanes(add_f32(even[r], odd[r]));
    }
    for (int r = 0; r < NR; r++) scores[r] = load_f32(lanes[r]);
}

template <int NR>
void score_tiles(const KvHead& kv, const AttentionRow* rows, int first, int last) {
    for (int t = first; t < last; t++) {
        F32 scores[NR];
        if (kv.is_row && kv.type == KvType::F16) {
            score_row_slots<KvType::F16, NR>(kv, t, rows, scores);
        } else if (kv.is_row) {
            score_row_slots<KvType::Q8_0, NR>(kv, t, rows, scores);
        } else if (kv.type == KvType::F16) {
            score_f16<NR>(key_tile(kv, t), kv.head_dim, rows, scores);
        } else if (kv.type == KvType::Q8_0) {
            score_q8<NR>(key_tile(kv, t), kv.head_dim, rows, scores);
        } else {
            score_k6<NR>(kv, t, rows, scores);
        }
        for (int r = 0; r < NR; r++) store_f32(rows[r].scores + 16 * t, scores[r]);
    }
}

// The first tile from `tile` on with slots that one of these rows sees. n_seen: of each row's path, those before the tiles
// that were asked for already. Of a wide tree, most tiles are other branches'.
template <int NR>
EI_INLINE int next_seen(const AttentionRow* rows, int* n_seen, int tile) {
    int next = INT_MAX;
    for (int r = 0; r < NR; r++) {
        const AttentionRow& row = rows[r];
        if (16 * tile < row.n_past) return tile;
        int& i = n_seen[r];
        while (i < row.n_path && row.path[i] < 16 * tile) i++;
        if (i < row.n_path && row.path[i] / 16 < next) next = row.path[i] / 16;
    }
    return next;
}

// Turns scores[0..n) into exp(score - max) and gives 1 / their sum. Lane i of the sum takes positions i modulo 16. A sink
// counts in both, and comes last.
EI_INLINE float soft_max(float* scores, int n, const float* sink) {
    for (int i = n; i % 16 != 0; i++) scores[i] = scores[0];
    F32 lanes = load_f32(scores);
    for (int i = 16; i < n; i += 16) lanes = max_f32(lanes, load_f32(scores + i));
    float lane_max[16];
    store_f32(lane_max, lanes);
    float most = lane_max[0];
    for (int i = 1; i < 16; i++) most = most > lane_max[i] ? most : lane_max[i];
    if (sink) most = most > *sink ? most : *sink;
    F32 sum = set_f32(0.0f);
    const int whole = n / 16 * 16;
    for (int i = 0; i < whole; i += 16) {
        const F32 e = exp_f32(sub_f32(load_f32(scores + i), set_f32(most)));
        store_f32(scores + i, e);
        sum = add_f32(sum, e);
    }
    if (whole < n) {
        float lane[16];
        store_f32(lane, exp_f32(sub_f32(load_f32(scores + whole), set_f32(most))));
        for (int i = n - whole; i < 16; i++) lane[i] = 0.0f;
        store_f32(scores + whole, load_f32(lane));
        sum = add_f32(sum, load_f32(lane));
    }
    if (!sink) return 1.0f / sum_lanes(sum);
    float of_sink[16];
    store_f32(of_sink, exp_f32(set_f32(*sink - most)));
    return 1.0f / (sum_lanes(sum) + of_sink[0]);
}

// sum += weight * value over n slots of one segment, in order, for NB pieces of the value from number d on.
// weights[r] + i is the weight of slot first + i.
template <KvType TYPE, int NR, int NB>
EI_INLINE void weigh(const KvHead& kv, int first, int n, const float* const (&weights)[NR], const AttentionRow* rows,
                     int d) {
    F32 sum[NR][NB];
    for (int r = 0; r < NR; r++) {
        for (int b = 0; b < NB; b++) sum[r][b] = load_f32(rows[r].sum + d + 16 * b);
    }
    const uint8_t* values = segment_of(kv, first) + kv.values_at;
    for (int i = 0; i < n; i++) {
        for (int b = 0; b < NB; b++) {
            const F32 value = load_value<TYPE>(kv, values, first + i, d + 16 * b);
            for (int r = 0; r < NR; r++) sum[r][b] = fma_f32(value, set_f32(weights[r][i]), sum[r][b]);
        }
    }
    for (int r = 0; r < NR; r++) {
        for (int b = 0; b < NB; b++) store_f32(rows[r].sum + d + 16 * b, sum[r][b]);
    }
}

// sum += weight * value over the path of a row from its element `from` on, in order, for NB pieces of the value.
template <KvType TYPE, int NB>
EI_INLINE void weigh_path(const KvHead& kv, const AttentionRow& row, int from, int d) {
    F32 sum[NB];
    for (int b = 0; b < NB; b++) sum[b] = load_f32(row.sum + d + 16 * b);
    for (int i = from; i < row.n_path; i++) {
        const uint8_t* values = segment_of(kv, row.path[i]) + kv.values_at;
        const F32 weight = set_f32(row.scores[row.n_past + i]);
        for (int b = 0; b < NB; b++)
            sum[b] = fma_f32(load_value<TYPE>(kv, values, row.path[i], d + 16 * b), weight, sum[b]);
    }
    for (int b = 0; b < NB; b++) store_f32(row.sum + d + 16 * b, sum[b]);
}

// Calls f<TYPE, NB>(d) for the pieces of a value, NB at once from number d on.
template <class F>
EI_INLINE void for_pieces(const KvHead& kv, const F& f) {
    const auto pieces = [&]<KvType TYPE>() {
        int d = 0;
        for (; d + 16 * kValuesAtOnce <= kv.ld_v; d += 16 * kValuesAtOnce)
            f.template operator()<TYPE, kValuesAtOnce>(d);
        for (; d < kv.ld_v; d += 16) f.template operator()<TYPE, 1>(d);
    };
    switch (kv.type) {
        case KvType::F16: return pieces.template operator()<KvType::F16>();
        case KvType::Q8_0: return pieces.template operator()<KvType::Q8_0>();
        case KvType::K6V4: return pieces.template operator()<KvType::K6V4>();
    }
}

// The slots first..last-1 of one segment, for rows whose scores are at their slots.
template <int NR>
void weigh_slots(const KvHead& kv, const AttentionRow* rows, int first, int last) {
    const float* weights[NR];
    for (int r = 0; r < NR; r++) weights[r] = rows[r].scores + first;
    for_pieces(kv, [&]<KvType TYPE, int NB>(int d) { weigh<TYPE, NR, NB>(kv, first, last - first, weights, rows, d); });
}

// Calls f<NR>(row) for rows row..n_rows-1 in groups of NR at most.
template <int NR, class F>
EI_INLINE void for_rows(int row, int n_rows, const F& f) {
    for (; row + NR <= n_rows; row += NR) f.template operator()<NR>(row);
    if constexpr (NR > 1) for_rows<NR - 1>(row, n_rows, f);
}

// Calls f(first, last) for the pieces of slots first..last-1 that lie in one segment each.
template <class F>
EI_INLINE void for_segments(int first, int last, const F& f) {
    while (first < last) {
        const int end = first - first % kSegment + kSegment, stop = end < last ? end : last;
        f(first, stop);
        first = stop;
    }
}

// Adds what the bias of the keys gives at each position, see RopeTables. Scratch for the turned offset is the row's sum.
void add_offsets(const RopeTables& rope, const AttentionRow& row) {
    const int ld = rope.ld;
    const float *a = row.offset, *b = row.offset + ld;
    for (int tile = row.first / 16; 16 * tile < row.n_past + row.n_path; tile++) {
        const float *cosine = rope.tiles + static_cast<size_t>(tile) * 2 * static_cast<size_t>(ld), *sine = cosine + ld;
        for (int m = 0; m < ld; m += 16) {
            const F32 am = load_f32(a + m), bm = load_f32(b + m), c = load_f32(cosine + m), s = load_f32(sine + m);
            store_f32(row.sum + m, fma_f32(bm, s, mul_f32(am, c)));
            store_f32(row.sum + ld + m, fnma_f32(am, s, mul_f32(bm, c)));
        }
        F32 sum[4] = {set_f32(row.offset[2 * ld]), set_f32(0.0f), set_f32(0.0f), set_f32(0.0f)};
        for (int m = 0; m < ld; m += 2) {
            const float* lanes = rope.within + 32 * m;
            sum[0] = fma_f32(load_f32(lanes), set_f32(row.sum[m]), sum[0]);
            sum[1] = fma_f32(load_f32(lanes + 16), set_f32(row.sum[ld + m]), sum[1]);
            sum[2] = fma_f32(load_f32(lanes + 32), set_f32(row.sum[m + 1]), sum[2]);
            sum[3] = fma_f32(load_f32(lanes + 48), set_f32(row.sum[ld + m + 1]), sum[3]);
        }
        float* scores = row.scores + 16 * tile;
        const F32 all = add_f32(add_f32(sum[0], sum[1]), add_f32(sum[2], sum[3]));
        store_f32(scores, add_f32(load_f32(scores), all));
    }
}

// Scores by positions, and their softmax but for the factor of each row, which goes to scale. Clears the sums.
inline void soft_max_rows(const Attention& a, float* scale) {
    for (int r = 0; r < a.n_rows; r++) {
        const AttentionRow& row = a.rows[r];
        const int n = row.n_past + row.n_path;
        for (int i = 0; i < row.n_path; i++)
            row.scores[row.n_past + i] = row.scores[row.path[i]];  // slots to positions
        if (row.offset) add_offsets(a.rope, row);
        if (a.soft_cap != 0.0f) scale_and_cap(row.scores + row.first, n - row.first, 1.0f, a.soft_cap);
        scale[r] = soft_max(row.scores + row.first, n - row.first, row.sink);
        std::memset(row.sum, 0, sizeof(float) * static_cast<size_t>(a.kv.ld_v));
    }
}

void attention(const Attention& a) {
    int first = a.rows[0].first, common_first = first, common_last = a.rows[0].n_past, last = 0;
    for (int r = 0; r < a.n_rows; r++) {
        const AttentionRow& row = a.rows[r];
        const int end = row.n_path ? row.path[row.n_path - 1] + 1 : row.n_past;
        first = row.first < first ? row.first : first;
        common_first = row.first > common_first ? row.first : common_first;
        common_last = row.n_past < common_last ? row.n_past : common_last;
        last = end > last ? end : last;
    }
    if (first > common_last) first = common_last;  // a window that begins within the path
    int n_seen[kTaskRows] = {};                    // of each row's path
    for_segments(first / 16 * 16, (last + 15) / 16 * 16, [&](int begin, int end) {
        for_rows<kRowsAtOnce>(0, a.n_rows, [&]<int NR>(int r) {
            const auto seen_from = [&](int tile) { return next_seen<NR>(a.rows + r, n_seen + r, tile); };
            for (int t = seen_from(begin / 16); t < end / 16; t = seen_from(t + 1)) {
                const int past = end < a.rows[r].n_past ? end / 16 : a.rows[r].n_past / 16;
                const int stop = past > t ? past : t + 1;
                score_tiles<NR>(a.kv, a.rows + r, t, stop);
                t = stop - 1;
            }
        });
    });
    float scale[kTaskRows];
    soft_max_rows(a, scale);
    const auto one_row = [&](int r, int from, int to) {
        for_segments(from, to, [&](int begin, int end) { weigh_slots<1>(a.kv, a.rows + r, begin, end); });
    };
    if (common_first > common_last) common_first = common_last;
    for (int r = 0; r < a.n_rows; r++) one_row(r, a.rows[r].first, common_first);
    for_segments(common_first, common_last, [&](int begin, int end) {
        for_rows<kRowsAtOnce>(0, a.n_rows, [&]<int NR>(int r) { weigh_slots<NR>(a.kv, a.rows + r, begin, end); });
    });
    for (int r = 0; r < a.n_rows; r++) {
        const AttentionRow& row = a.rows[r];
        one_row(r, row.first > common_last ? row.first : common_last, row.n_past);
        const int from = row.first > row.n_past ? row.first - row.n_past : 0;
        for_pieces(a.kv, [&]<KvType TYPE, int NB>(int d) { weigh_path<TYPE, NB>(a.kv, row, from, d); });
        for (int d = 0; d < a.kv.ld_v; d += 16) {
            store_rows(row.out + d, mul_f32(load_f32(row.sum + d), set_f32(scale[r])), a.kv.n_value - d);
        }
    }
}

}  // namespace
