// The walk over the 243 entries of a table of 5 trits: word i takes the sum to the i-th entry of the walk.
// Written by hls/walk.py; do not edit. Latency: 2 cycles, both registers hold while `enable` is low.
//
//   bits [7:0]   the entry
//   bits [9:8]  the activation that is added, where it is not the last one
//   bit  10      it is subtracted
//   bit  11      it is activation 5 - 1
//   bit  12      the last word
module ei_walk_rom_g5 (
    input  logic clk,
    input  logic enable,
    input  logic [7:0] index,
    output logic [12:0] word
);
    localparam logic [243*13-1:0] WORDS = {
        13'h1070, 13'h036f, 13'h0454, 13'h0c55, 13'h00a6, 13'h07a5,
        13'h04c0, 13'h05c1, 13'h00c4, 13'h03c3, 13'h04a8, 13'h08a9,
        13'h0058, 13'h0757, 13'h0472, 13'h0673, 13'h007c, 13'h0c7b,
        13'h04cc, 13'h03cd, 13'h00b2, 13'h08b1, 13'h0460, 13'h0161,
        13'h005e, 13'h0c5d, 13'h04ae, 13'h04af, 13'h05b0, 13'h08b3,
        13'h0162, 13'h025f, 13'h0556, 13'h0c59, 13'h01aa, 13'h07a7,
        13'h08c2, 13'h0571, 13'h0c74, 13'h06c5, 13'h08ce, 13'h017d,
        13'h0c7a, 13'h00cb, 13'h07ca, 13'h04e5, 13'h05e6, 13'h00e9,
        13'h02e8, 13'h04df, 13'h01e0, 13'h00dd, 13'h08dc, 13'h048b,
        13'h058c, 13'h008f, 13'h068e, 13'h0497, 13'h0198, 13'h0095,
        13'h0894, 13'h0443, 13'h0244, 13'h003b, 13'h053a, 13'h043d,
        13'h063e, 13'h0047, 13'h0346, 13'h022b, 13'h0422, 13'h0623,
        13'h012c, 13'h0229, 13'h0020, 13'h031f, 13'h0404, 13'h0505,
        13'h0008, 13'h0607, 13'h0410, 13'h0111, 13'h000e, 13'h070d,
        13'h0628, 13'h0431, 13'h0732, 13'h004d, 13'h054c, 13'h044f,
        13'h0350, 13'h0035, 13'h0c34, 13'h0785, 13'h04a0, 13'h03a1,
        13'h0186, 13'h0783, 13'h009e, 13'h0c9d, 13'h04ee, 13'h05ef,
        13'h00f2, 13'h03f1, 13'h04d6, 13'h01d7, 13'h00d4, 13'h03d3,
        13'h05b8, 13'h04bb, 13'h01bc, 13'h08b9, 13'h0568, 13'h006b,
        13'h086a, 13'h0419, 13'h011a, 13'h0017, 13'h0c16, 13'h0767,
        13'h0282, 13'h0179, 13'h0476, 13'h0277, 13'h006e, 13'h076d,
        13'h0488, 13'h0689, 13'h0092, 13'h0891, 13'h0440, 13'h0241,
        13'h0038, 13'h0337, 13'h041c, 13'h061d, 13'h0026, 13'h0625,
        13'h042e, 13'h072f, 13'h004a, 13'h0c49, 13'h049a, 13'h039b,
        13'h0080, 13'h037f, 13'h0864, 13'h0413, 13'h0c14, 13'h0265,
        13'h085c, 13'h000b, 13'h020a, 13'h0401, 13'h0c02, 13'h0053,
        13'h0652, 13'h0c5b, 13'h06ac, 13'h04b5, 13'h02b6, 13'h07ad,
        13'h06c8, 13'h00d1, 13'h07d0, 13'h04eb, 13'h02ec, 13'h00e3,
        13'h02e2, 13'h04d9, 13'h03da, 13'h03bf, 13'h00a4, 13'h07a3,
        13'h06be, 13'h00c7, 13'h05c6, 13'h06c9, 13'h05d2, 13'h03d5,
        13'h01ba, 13'h08b7, 13'h0566, 13'h0769, 13'h0184, 13'h0881,
        13'h0330, 13'h0515, 13'h0718, 13'h0233, 13'h032a, 13'h010f,
        13'h020c, 13'h0503, 13'h0706, 13'h0121, 13'h061e, 13'h0727,
        13'h0642, 13'h054b, 13'h024e, 13'h0c45, 13'h0696, 13'h019f,
        13'h0c9c, 13'h05ed, 13'h02f0, 13'h01e7, 13'h02e4, 13'h05db,
        13'h08de, 13'h088d, 13'h013c, 13'h0c39, 13'h068a, 13'h0193,
        13'h0c90, 13'h06e1, 13'h03ea, 13'h08cf, 13'h077e, 13'h0899,
        13'h0248, 13'h033f, 13'h0624, 13'h032d, 13'h0212, 13'h0c09,
        13'h065a, 13'h0c63, 13'h02b4, 13'h02ab, 13'h07a2, 13'h07bd,
        13'h08d8, 13'h0887, 13'h0336, 13'h031b, 13'h0c00, 13'h0751,
        13'h066c, 13'h0575, 13'h0478
    };

    (* rom_style = "block", ram_style = "block" *) logic [12:0] words[0:(1<<(7+1))-1];
    logic [12:0] read;

    integer i;
    initial begin
        for (i = 0; i < (1 << (7 + 1)); i = i + 1) words[i] = 0;
        for (i = 0; i < 243; i = i + 1) words[i] = WORDS[i*13+:13];
    end

    always_ff @(posedge clk)
        if (enable) begin
            read <= words[index];
            word <= read;
        end
endmodule
