// The walk over the 27 entries of a table of 3 trits: word i takes the sum to the i-th entry.
// Written by hls/walk.py; do not edit. Latency: 2 cycles, both registers hold while `enable` is low.
//
//   bits [4:0]   the entry
//   bits [5:5]  the activation that is added, where it is not activation 2
//   bit  6      it is added, not subtracted
//   bit  7      it is activation 2
//   bit  8      the last word
module ei_walk_rom_g3 (
    input  logic clk,
    input  logic enable,
    input  logic [4:0] index,
    output logic [8:0] word
);
    localparam logic [27*9-1:0] WORDS = {
        9'h136, 9'h019, 9'h07a, 9'h0d7, 9'h02e, 9'h051,
        9'h0d0, 9'h007, 9'h068, 9'h045, 9'h084, 9'h06d,
        9'h0ca, 9'h001, 9'h082, 9'h08b, 9'h054, 9'h053,
        9'h032, 9'h035, 9'h0d8, 9'h0cf, 9'h066, 9'h063,
        9'h080, 9'h029, 9'h00c
    };

`ifdef EI_ECP5
    ei_ecp5_ram #(.WIDTH(9), .ADDRESS(5), .N_WORDS(27), .WORDS(WORDS)) rom (
        .clk(clk),
        .write(1'b0),
        .write_address(5'b0),
        .write_data(9'b0),
        .read_address(index),
        .enable(enable),
        .clear(1'b0),
        .read_data(word)
    );
`else
    logic [8:0] words[0:31];
    logic [8:0] read;

    integer i;
    initial begin
        for (i = 0; i <= 31; i = i + 1) words[i] = 0;
        for (i = 0; i < 27; i = i + 1) words[i] = WORDS[i*9+:9];
    end

    always_ff @(posedge clk)
        if (enable) begin
            read <= words[index];
            word <= read;
        end
`endif
endmodule
