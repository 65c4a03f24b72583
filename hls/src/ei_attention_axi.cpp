// Tops of attention: one of a token, one of a prompt. All arrays lie in the board's memory and are read in bursts.
// Each returns whether it has room for the positions; where not, or where there are none, nothing is read and written.
#include "ei_attention.hpp"

#ifndef EI_HEAD_DIM
#define EI_HEAD_DIM 128
#endif
#ifndef EI_LANES
#define EI_LANES 16
#endif
#ifndef EI_GROUP
#define EI_GROUP 4
#endif
#ifndef EI_TOKENS
#define EI_TOKENS 2
#endif
#ifndef EI_MAX_POSITIONS
#define EI_MAX_POSITIONS 2048
#endif

extern "C" bool ei_decode_attention(const float* q, const uint16_t* keys, const uint16_t* values, float* out,
                                    int n_kv_heads, int n_positions, int stride, float scale) {
#pragma HLS INTERFACE m_axi port = q offset = slave bundle = gmem0
#pragma HLS INTERFACE m_axi port = keys offset = slave bundle = gmem1 max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = values offset = slave bundle = gmem2 max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = out offset = slave bundle = gmem0
#pragma HLS INTERFACE s_axilite port = return
    if (n_positions < 1 || n_positions > EI_MAX_POSITIONS) return false;
    ei::decode_attention<EI_HEAD_DIM, EI_LANES, EI_GROUP, EI_MAX_POSITIONS>(q, keys, values, out, n_kv_heads,
                                                                            n_positions, stride, scale);
    return true;
}

extern "C" bool ei_prefill_attention(const float* q, const uint16_t* keys, const uint16_t* values, float* out,
                                     int n_kv_heads, int first, int n_tokens, int stride, float scale) {
#pragma HLS INTERFACE m_axi port = q offset = slave bundle = gmem0
#pragma HLS INTERFACE m_axi port = keys offset = slave bundle = gmem1 max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = values offset = slave bundle = gmem2 max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = out offset = slave bundle = gmem0
#pragma HLS INTERFACE s_axilite port = return
    if (first < 0 || n_tokens < 1 || n_tokens > EI_MAX_POSITIONS - first) return false;
    ei::prefill_attention<EI_HEAD_DIM, EI_LANES, EI_GROUP, EI_TOKENS, EI_MAX_POSITIONS>(
        q, keys, values, out, n_kv_heads, first, n_tokens, stride, scale);
    return true;
}
