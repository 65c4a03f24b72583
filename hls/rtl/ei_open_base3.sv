// A baseline for counts: the open engine for base-3 weights (MerlijnW70/bitnet-kv260) in our own words, what computes
// alone, without its control. A beat of 128 bits is 16 bytes of five weights, which decoders turn into 80 pairs of bits;
// VECTORS vectors share them. Each vector has its activations in five block RAMs, 80 gated terms, a tree of adders with
// registers on every other level, a count of the negative weights, and an accumulator of 32 bits.
module ei_open_base3 #(
        parameter VECTORS = 2
) (
        input wire clk,
        input wire clear,
        input wire first,
        input wire [127:0] beat,
        input wire beat_valid,
        input wire write,
        input wire [2:0] write_part,
        input wire [8:0] write_address,
        input wire [VECTORS*9-1:0] read_address,
        output wire [VECTORS*32-1:0] sums
);
    reg [159:0] codes;
    wire [159:0] decoded;
    genvar i;
    generate
        for (i = 0; i < 16; i = i + 1) begin : g_decoder
            ei_open_decoder decoder (
                    .index(beat[8*i+:8]),
                    .digits(decoded[10*i+:10])
            );
        end
        for (i = 0; i < VECTORS; i = i + 1) begin : g_vector
            ei_open_vector vector (
                    .clk(clk),
                    .clear(clear),
                    .first(first),
                    .codes(codes),
                    .write(write),
                    .write_part(write_part),
                    .write_address(write_address),
                    .write_data(beat),
                    .read_address(read_address[9*i+:9]),
                    .sum(sums[32*i+:32])
            );
        end
    endgenerate
    always @(posedge clk) if (beat_valid) codes <= decoded;
endmodule
