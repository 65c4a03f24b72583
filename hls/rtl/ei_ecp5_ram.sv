// A column of ei_block_ram, or a ROM, on a Lattice ECP5, with the output register of its block RAM: the RAM itself gives
// its data too late for 250 MHz, and yosys does not find the register. Latency: 2 cycles to read, while `enable` is high.
// No simulator has a model of DP16KD: this module is for the estimate of the clock rate alone.
module ei_ecp5_ram #(
    parameter integer WIDTH = 11,
    parameter integer ADDRESS = 9,
    parameter integer N_WORDS = 1,  // that it begins with, up to 256 in words of 18 bits
    parameter [N_WORDS*WIDTH-1:0] WORDS = 0
) (
    input  logic clk,
    input  logic write,
    input  logic [ADDRESS-1:0] write_address,
    input  logic [WIDTH-1:0] write_data,
    input  logic [ADDRESS-1:0] read_address,
    input  logic enable,
    input  logic clear,
    output logic [WIDTH-1:0] read_data
);
    // The address is one of bits; words of 18 bits have two flags for their bytes in its lowest bits.
    localparam integer PORT = ADDRESS <= 10 ? 18 : ADDRESS <= 11 ? 9 : ADDRESS <= 12 ? 4 : ADDRESS <= 13 ? 2 : 1;
    localparam integer LOW = ADDRESS <= 10 ? 4 : ADDRESS <= 11 ? 3 : ADDRESS <= 12 ? 2 : ADDRESS <= 13 ? 1 : 0;
    wire [13:0] a = 14'(write_address) << LOW | (PORT == 18 ? 14'd3 : 14'd0);
    wire [13:0] b = 14'(read_address) << LOW | (PORT == 18 ? 14'd3 : 14'd0);
    wire [17:0] d = 18'(write_data);
    wire [17:0] q;
    assign read_data = q[WIDTH-1:0];

    // Sixteen words, each 20 bits from the next one.
    function [319:0] words(input integer first);
        integer i;
        begin
            words = 0;
            for (i = 0; i < 16; i = i + 1)
                if (first + i < N_WORDS) words[20*i+:WIDTH] = WORDS[(first+i)*WIDTH+:WIDTH];
        end
    endfunction

    DP16KD #(
        .INITVAL_00(words(0)), .INITVAL_01(words(16)), .INITVAL_02(words(32)), .INITVAL_03(words(48)),
        .INITVAL_04(words(64)), .INITVAL_05(words(80)), .INITVAL_06(words(96)), .INITVAL_07(words(112)),
        .INITVAL_08(words(128)), .INITVAL_09(words(144)), .INITVAL_0A(words(160)), .INITVAL_0B(words(176)),
        .INITVAL_0C(words(192)), .INITVAL_0D(words(208)), .INITVAL_0E(words(224)), .INITVAL_0F(words(240)),
        .DATA_WIDTH_A(PORT), .DATA_WIDTH_B(PORT), .REGMODE_A("NOREG"), .REGMODE_B("OUTREG"), .RESETMODE("SYNC"),
        .CLKAMUX("CLKA"), .CLKBMUX("CLKB"), .CSDECODE_A("0b000"), .CSDECODE_B("0b000"), .GSR("DISABLED")
    ) ram (
        .CLKA(clk), .CEA(1'b1), .OCEA(1'b1), .WEA(write), .RSTA(1'b0), .CSA0(1'b0), .CSA1(1'b0), .CSA2(1'b0),
        .CLKB(clk), .CEB(enable), .OCEB(enable), .WEB(1'b0), .RSTB(clear), .CSB0(1'b0), .CSB1(1'b0), .CSB2(1'b0),
        .ADA0(a[0]), .ADA1(a[1]), .ADA2(a[2]), .ADA3(a[3]), .ADA4(a[4]), .ADA5(a[5]),
        .ADA6(a[6]), .ADA7(a[7]), .ADA8(a[8]), .ADA9(a[9]), .ADA10(a[10]), .ADA11(a[11]),
        .ADA12(a[12]), .ADA13(a[13]),
        .ADB0(b[0]), .ADB1(b[1]), .ADB2(b[2]), .ADB3(b[3]), .ADB4(b[4]), .ADB5(b[5]),
        .ADB6(b[6]), .ADB7(b[7]), .ADB8(b[8]), .ADB9(b[9]), .ADB10(b[10]), .ADB11(b[11]),
        .ADB12(b[12]), .ADB13(b[13]),
        .DIA0(d[0]), .DIA1(d[1]), .DIA2(d[2]), .DIA3(d[3]), .DIA4(d[4]), .DIA5(d[5]),
        .DIA6(d[6]), .DIA7(d[7]), .DIA8(d[8]), .DIA9(d[9]), .DIA10(d[10]), .DIA11(d[11]),
        .DIA12(d[12]), .DIA13(d[13]), .DIA14(d[14]), .DIA15(d[15]), .DIA16(d[16]), .DIA17(d[17]),
        .DOB0(q[0]), .DOB1(q[1]), .DOB2(q[2]), .DOB3(q[3]), .DOB4(q[4]), .DOB5(q[5]),
        .DOB6(q[6]), .DOB7(q[7]), .DOB8(q[8]), .DOB9(q[9]), .DOB10(q[10]), .DOB11(q[11]),
        .DOB12(q[12]), .DOB13(q[13]), .DOB14(q[14]), .DOB15(q[15]), .DOB16(q[16]), .DOB17(q[17])
    );
endmodule
