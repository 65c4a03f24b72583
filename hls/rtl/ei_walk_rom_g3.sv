// The walk over the 27 entries of a table of 3 trits: word i takes the sum to the i-th entry of the walk.
// Written by hls/walk.py; do not edit. Latency: 2 cycles, both registers hold while `enable` is low.
//
//   bits [4:0]   the entry
//   bits [5:5]  the activation that is added, where it is not the last one
//   bit  6      it is subtracted
//   bit  7      it is activation 3 - 1
//   bit  8      the last word
module ei_walk_rom_g3 (
    input  logic clk,
    input  logic enable,
    input  logic [4:0] index,
    output logic [8:0] word
);
    localparam logic [27*9-1:0] WORDS = {
        9'h176, 9'h059, 9'h03a, 9'h097, 9'h06e, 9'h011,
        9'h090, 9'h047, 9'h028, 9'h005, 9'h0c4, 9'h02d,
        9'h08a, 9'h041, 9'h0c2, 9'h0cb, 9'h014, 9'h013,
        9'h072, 9'h075, 9'h098, 9'h08f, 9'h026, 9'h023,
        9'h0c0, 9'h069, 9'h04c
    };

    (* rom_style = "distributed", ram_style = "distributed" *) logic [8:0] words[0:(1<<(4+1))-1];
    logic [8:0] read;

    integer i;
    initial begin
        for (i = 0; i < (1 << (4 + 1)); i = i + 1) words[i] = 0;
        for (i = 0; i < 27; i = i + 1) words[i] = WORDS[i*9+:9];
    end

    always_ff @(posedge clk)
        if (enable) begin
            read <= words[index];
            word <= read;
        end
endmodule
