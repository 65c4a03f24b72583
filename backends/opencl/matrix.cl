// Products with a matrix in one of the formats of matrices.py, which draws them; and rows of it as floats.
//
// Macros: BITS of a code, or 0 where weights are half floats (IS_HALF) or floats; OFFSET of codes; BLOCK, inputs that
// share a scale; HAS_MINIMUM, whether a block has one; TOKENS at once; SLICES, work-items that share a row.

#define ROWS 16
#define RUN 32  // inputs of an activation block

#if BITS
typedef uint Weight;      // a word: as many codes as fit
#define LINE (32 / BITS)  // inputs of a line
#elif IS_HALF
typedef half Weight;
#define LINE 1
#else
typedef float Weight;
#define LINE 1
#endif

#if BITS == 8
#define DOT_CODES DOT4_SIGNED
#else
#define DOT_CODES DOT4
#endif

// Whether products need the sum of a block's activations, which is not that of a RUN.
#if BITS && BLOCK < RUN && (OFFSET || HAS_MINIMUM)
#define HAS_BLOCK_SUMS 1
#else
#define HAS_BLOCK_SUMS 0
#endif

// Scale and minimum of a row's block. index: (tile * n_blocks + block) * ROWS + lane.
float2 scale_at(global const half* restrict scales, size_t index) {
#if HAS_MINIMUM
    return vload_half2(index, scales);
#else
    return (float2)(vload_half(index, scales), 0);
#endif
}

float weight_at(global const Weight* restrict weights, global const half* restrict scales, int row, int k, int n_in) {
    int tile = row / ROWS, lane = row % ROWS;
    size_t at = ((size_t)tile * (n_in / LINE) + k / LINE) * ROWS + lane;
#if BITS
    float2 scale = scale_at(scales, ((size_t)tile * (n_in / BLOCK) + k / BLOCK) * ROWS + lane);
    uint code = weights[at] >> (8 * (k % 4) + BITS * (k % LINE / 4));
    int value = BITS == 8 ? (int)(char)code : (int)(code & ((1u << BITS) - 1));
    return scale.x * (value - OFFSET) + scale.y;
#elif IS_HALF
    return vload_half(at, weights);
#else
    return weights[at];
#endif
}

// Rows of the matrix, as of an embedding: out (n, n_in) = multiplier * row ids[first + i].
kernel void gather(global const Weight* restrict weights, global const half* restrict scales,
                   global const int* restrict ids, global float* restrict out, int first, int n_in, float multiplier) {
    int k = get_global_id(0), i = get_global_id(1);
    if (k < n_in) out[(size_t)i * n_in + k] = multiplier * weight_at(weights, scales, ids[first + i], k, n_in);
}

// Adds weights of one row times the activations of TOKENS tokens to sums. Activations are codes (n_tokens, n_in), with
// a scale and the sum of the codes for each RUN of them, or where BITS is 0 values (n_tokens, n_in).
void add_products(global const Weight* restrict weights, global const half* restrict scales,
                  global const uint* restrict codes, global const float* restrict code_scales,
                  global const int* restrict code_sums, global const float* restrict values, int row, int n_in,
                  const size_t* tokens, float* sums) {
    int lane = row % ROWS;
    global const Weight* own = weights + (size_t)(row / ROWS) * (n_in / LINE) * ROWS + lane;
#if BITS
    int n_blocks = n_in / BLOCK;
    for (int block = get_local_id(1); block < n_blocks; block += SLICES) {
        int dots[TOKENS], block_sums[TOKENS];
        for (int t = 0; t < TOKENS; t++) dots[t] = block_sums[t] = 0;
        for (int line = block * (BLOCK / LINE); line < (block + 1) * (BLOCK / LINE); line++) {
            uint word = own[(size_t)line * ROWS];
            for (int field = 0; field < 8 / BITS; field++) {
                uint packed = BITS == 8 ? word : word >> BITS * field & 0x01010101u * ((1u << BITS) - 1);
                for (int t = 0; t < TOKENS; t++) {
                    uint four = codes[tokens[t] * (n_in / 4) + line * (LINE / 4) + field];
                    dots[t] = DOT_CODES(packed, four, dots[t]);
                    if (HAS_BLOCK_SUMS) block_sums[t] = DOT4(0x01010101u, four, block_sums[t]);
                }
            }
        }
        float2 scale = scale_at(scales, ((size_t)(row / ROWS) * n_blocks + block) * ROWS + lane);
        for (int t = 0; t < TOKENS; t++) {
            size_t run = tokens[t] * (n_in / RUN) + block * BLOCK / RUN;
            float value = scale.x * dots[t];
#if OFFSET || HAS_MINIMUM
            value += (scale.y - scale.x * OFFSET) * (HAS_BLOCK_SUMS ? block_sums[t] : code_sums[run]);
#endif
            sums[t] += code_scales[run] * value;
        }
    }
#else
    for (int k = get_local_id(1); k < n_in; k += SLICES) {
#if IS_HALF
        float weight = vload_half((size_t)k * ROWS, own);
#else
        float weight = own[(size_t)k * ROWS];
#endif
        for (int t = 0; t < TOKENS; t++) sums[t] += weight * values[tokens[t] * n_in + k];
    }
#endif
}

// out[token, first_out + row] = keep * itself + factor * (matrix times activations) + bias[first_out + row], of n_tokens
// tokens from first_token on.
kernel __attribute__((reqd_work_group_size(ROWS, SLICES, 1))) void multiply(
    global const Weight* restrict weights, global const half* restrict scales, global const uint* restrict codes,
    global const float* restrict code_scales, global const int* restrict code_sums, global const float* restrict values,
    global const float* restrict bias, int has_bias, global float* restrict out, int n_out, int n_in, int first_token,
    int n_tokens, int first_out, int out_stride, float factor, float keep) {
    local float parts[ROWS * SLICES];
    int lane = get_local_id(0), slice = get_local_id(1), row = get_global_id(0), first = get_group_id(2) * TOKENS;
    float sums[TOKENS];
    size_t tokens[TOKENS];
    for (int t = 0; t < TOKENS; t++) {
        sums[t] = 0;
        tokens[t] = first_token + min(first + t, n_tokens - 1);
    }
    add_products(weights, scales, codes, code_scales, code_sums, values, row, n_in, tokens, sums);
    for (int t = 0; t < TOKENS; t++) {
        float sum = sums[t];
#if SLICES > 1
        parts[slice * ROWS + lane] = sum;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int other = 1; slice == 0 && other < SLICES; other++) sum += parts[other * ROWS + lane];
        barrier(CLK_LOCAL_MEM_FENCE);  // parts are written again for the next token
#endif
        if (slice == 0 && row < n_out && first + t < n_tokens) {
            size_t at = (size_t)(first_token + first + t) * out_stride + first_out + row;
            float kept = keep == 0 ? 0 : keep * out[at];  // what was never written may be no number
            out[at] = kept + factor * sum + (has_bias ? bias[first_out + row] : 0);
        }
    }
}
