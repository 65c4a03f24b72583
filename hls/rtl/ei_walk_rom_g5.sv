// The walk over the 243 entries of a table of 5 trits: word i takes the sum to the i-th entry.
// Written by hls/walk.py; do not edit. Latency: 2 cycles, both registers hold while `enable` is low.
//
//   bits [7:0]   the entry
//   bits [9:8]  the activation that is added, where it is not activation 4
//   bit  10      it is added, not subtracted
//   bit  11      it is activation 4
//   bit  12      the last word
module ei_walk_rom_g5 (
    input  logic clk,
    input  logic enable,
    input  logic [7:0] index,
    output logic [12:0] word
);
    localparam logic [243*13-1:0] WORDS = {
        13'h1470, 13'h076f, 13'h0054, 13'h0855, 13'h04a6, 13'h03a5,
        13'h00c0, 13'h01c1, 13'h04c4, 13'h07c3, 13'h00a8, 13'h0ca9,
        13'h0458, 13'h0357, 13'h0072, 13'h0273, 13'h047c, 13'h087b,
        13'h00cc, 13'h07cd, 13'h04b2, 13'h0cb1, 13'h0060, 13'h0561,
        13'h045e, 13'h085d, 13'h00ae, 13'h00af, 13'h01b0, 13'h0cb3,
        13'h0562, 13'h065f, 13'h0156, 13'h0859, 13'h05aa, 13'h03a7,
        13'h0cc2, 13'h0171, 13'h0874, 13'h02c5, 13'h0cce, 13'h057d,
        13'h087a, 13'h04cb, 13'h03ca, 13'h00e5, 13'h01e6, 13'h04e9,
        13'h06e8, 13'h00df, 13'h05e0, 13'h04dd, 13'h0cdc, 13'h008b,
        13'h018c, 13'h048f, 13'h028e, 13'h0097, 13'h0598, 13'h0495,
        13'h0c94, 13'h0043, 13'h0644, 13'h043b, 13'h013a, 13'h003d,
        13'h023e, 13'h0447, 13'h0746, 13'h062b, 13'h0022, 13'h0223,
        13'h052c, 13'h0629, 13'h0420, 13'h071f, 13'h0004, 13'h0105,
        13'h0408, 13'h0207, 13'h0010, 13'h0511, 13'h040e, 13'h030d,
        13'h0228, 13'h0031, 13'h0332, 13'h044d, 13'h014c, 13'h004f,
        13'h0750, 13'h0435, 13'h0834, 13'h0385, 13'h00a0, 13'h07a1,
        13'h0586, 13'h0383, 13'h049e, 13'h089d, 13'h00ee, 13'h01ef,
        13'h04f2, 13'h07f1, 13'h00d6, 13'h05d7, 13'h04d4, 13'h07d3,
        13'h01b8, 13'h00bb, 13'h05bc, 13'h0cb9, 13'h0168, 13'h046b,
        13'h0c6a, 13'h0019, 13'h051a, 13'h0417, 13'h0816, 13'h0367,
        13'h0682, 13'h0579, 13'h0076, 13'h0677, 13'h046e, 13'h036d,
        13'h0088, 13'h0289, 13'h0492, 13'h0c91, 13'h0040, 13'h0641,
        13'h0438, 13'h0737, 13'h001c, 13'h021d, 13'h0426, 13'h0225,
        13'h002e, 13'h032f, 13'h044a, 13'h0849, 13'h009a, 13'h079b,
        13'h0480, 13'h077f, 13'h0c64, 13'h0013, 13'h0814, 13'h0665,
        13'h0c5c, 13'h040b, 13'h060a, 13'h0001, 13'h0802, 13'h0453,
        13'h0252, 13'h085b, 13'h02ac, 13'h00b5, 13'h06b6, 13'h03ad,
        13'h02c8, 13'h04d1, 13'h03d0, 13'h00eb, 13'h06ec, 13'h04e3,
        13'h06e2, 13'h00d9, 13'h07da, 13'h07bf, 13'h04a4, 13'h03a3,
        13'h02be, 13'h04c7, 13'h01c6, 13'h02c9, 13'h01d2, 13'h07d5,
        13'h05ba, 13'h0cb7, 13'h0166, 13'h0369, 13'h0584, 13'h0c81,
        13'h0730, 13'h0115, 13'h0318, 13'h0633, 13'h072a, 13'h050f,
        13'h060c, 13'h0103, 13'h0306, 13'h0521, 13'h021e, 13'h0327,
        13'h0242, 13'h014b, 13'h064e, 13'h0845, 13'h0296, 13'h059f,
        13'h089c, 13'h01ed, 13'h06f0, 13'h05e7, 13'h06e4, 13'h01db,
        13'h0cde, 13'h0c8d, 13'h053c, 13'h0839, 13'h028a, 13'h0593,
        13'h0890, 13'h02e1, 13'h07ea, 13'h0ccf, 13'h037e, 13'h0c99,
        13'h0648, 13'h073f, 13'h0224, 13'h072d, 13'h0612, 13'h0809,
        13'h025a, 13'h0863, 13'h06b4, 13'h06ab, 13'h03a2, 13'h03bd,
        13'h0cd8, 13'h0c87, 13'h0736, 13'h071b, 13'h0800, 13'h0351,
        13'h026c, 13'h0175, 13'h0078
    };

`ifdef EI_ECP5
    ei_ecp5_ram #(.WIDTH(13), .ADDRESS(8), .N_WORDS(243), .WORDS(WORDS)) rom (
        .clk(clk),
        .write(1'b0),
        .write_address(8'b0),
        .write_data(13'b0),
        .read_address(index),
        .enable(enable),
        .clear(1'b0),
        .read_data(word)
    );
`else
    (* rom_style = "block" *)
    logic [12:0] words[0:255];
    logic [12:0] read;

    integer i;
    initial begin
        for (i = 0; i <= 255; i = i + 1) words[i] = 0;
        for (i = 0; i < 243; i = i + 1) words[i] = WORDS[i*13+:13];
    end

    always_ff @(posedge clk)
        if (enable) begin
            read <= words[index];
            word <= read;
        end
`endif
endmodule
