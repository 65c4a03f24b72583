// Products of trits and int8 activations: integers, exact in any order. The matrix is in the two-bit format of
// models/formats/ternary_packing.py without its scales: tiles of 16 rows, in them lines of 64 bytes, a word of 4 bytes a row.
//
// All kernels: lines (n_tiles, n_lines, 16) words; activations (n_tokens, 16 n_lines) int8, zero past n_in;
// out (n_tokens, n_out). A work-item sums one row; SLICES of them share it, each every SLICES-th line.

#define ROWS 16

// The sums of a row that SLICES work-items have, added up for the first of them.
int sum_of_slices(int sum, local int* parts) {
#if SLICES > 1
    int lane = get_local_id(0), slice = get_local_id(1);
    parts[slice * ROWS + lane] = sum;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int other = 1; slice == 0 && other < SLICES; other++) sum += parts[other * ROWS + lane];
    barrier(CLK_LOCAL_MEM_FENCE);  // parts are written again for the next token
#endif
    return sum;
}

// Multiply-add, or packed dot products where INTEGER_DOT is set, for TOKENS tokens at once.
// sums: (n_tokens,) of each token's activations, because codes are trits + 1.
kernel __attribute__((reqd_work_group_size(ROWS, SLICES, 1))) void multiply(global const uint* restrict lines,
                                                                            global const uint* restrict activations,
                                                                            global const int* restrict sums,
                                                                            global int* restrict out, int n_out,
                                                                            int n_lines, int n_tokens) {
    local int parts[ROWS * SLICES];
    int row = get_global_id(0), first = get_group_id(2) * TOKENS;
    global const uint* own = lines + (size_t)(row / ROWS) * n_lines * ROWS + row % ROWS;
    int sum[TOKENS];
    for (int t = 0; t < TOKENS; t++) sum[t] = 0;
    for (int line = get_local_id(1); line < n_lines; line += SLICES) {
        uint word = own[(size_t)line * ROWS];
        for (int field = 0; field < 4; field++) {
            uint codes = word >> 2 * field & 0x03030303u;
            for (int t = 0; t < TOKENS; t++) {
                size_t token = min(first + t, n_tokens - 1);
                sum[t] = DOT4(codes, activations[(token * n_lines + line) * 4 + field], sum[t]);
            }
        }
    }
    for (int t = 0; t < TOKENS; t++) {
        int total = sum_of_slices(sum[t], parts);
        if (get_local_id(1) == 0 && row < n_out && first + t < n_tokens)
            out[(size_t)(first + t) * n_out + row] = total - sums[first + t];
    }
}

// Table lookup: a table for each byte of a line holds the sum of trits times activations for every value of the byte.
// The tables of one line are made in local memory by the whole group, for ROWS * WIDTH rows, and serve all of them.
kernel __attribute__((reqd_work_group_size(ROWS * WIDTH, 1, 1))) void lookup(global const uint* restrict lines,
                                                                             global const char* restrict activations,
                                                                             global int* restrict out, int n_out,
                                                                             int n_lines) {
    local short tables[4 * 256];
    int row = get_global_id(0), token = get_global_id(1), item = get_local_id(0);
    int tile = min(row, n_out - 1) / ROWS;  // past the last tile there is none to read
    global const uint* own = lines + (size_t)tile * n_lines * ROWS + row % ROWS;
    int sum = 0;
    for (int line = 0; line < n_lines; line++) {
        global const char* numbers = activations + ((size_t)token * n_lines + line) * 16;
        for (int entry = item; entry < 4 * 256; entry += ROWS * WIDTH) {
            int of_byte = entry / 256, codes = entry % 256;
            int value = 0;
            for (int field = 0; field < 4; field++)
                value += ((codes >> 2 * field & 3) - 1) * numbers[4 * field + of_byte];
            tables[entry] = value;  // at most 4 * 2 * 128
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        uint word = own[(size_t)line * ROWS];
        for (int of_byte = 0; of_byte < 4; of_byte++) sum += tables[256 * of_byte + (word >> 8 * of_byte & 255u)];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    if (row < n_out) out[(size_t)token * n_out + row] = sum;
}
