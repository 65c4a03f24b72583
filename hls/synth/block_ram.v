// Models of block RAMs of UltraScale+, which yosys maps to and has no models of. What is modelled: both ports on one
// clock, no output registers, no cascades. Bits that nobody wrote are x, and so is what a port reads while the other one
// writes it, unless the mode is READ_FIRST.

module ei_block_ram #(
    parameter BITS = 14,  // of the address of a bit
    parameter WIDTH = 18,  // of a port; both together in simple dual-port mode
    parameter READ_A = 0,
    parameter READ_B = 0,
    parameter WRITE_A = 0,
    parameter WRITE_B = 0,
    parameter MODE_A = "NO_CHANGE",
    parameter MODE_B = "NO_CHANGE",
    parameter [(1<<BITS)-1:0] CONTENT = {(1 << BITS) {1'bx}},
    parameter [(1<<(BITS-3))-1:0] PARITY = {(1 << (BITS - 3)) {1'bx}}
) (
    input wire clk_a,
    input wire clk_b,
    input wire enable_a,
    input wire enable_b,
    input wire reset_a,
    input wire reset_b,
    input wire [BITS-1:0] address_a,
    input wire [BITS-1:0] address_b,
    input wire [2*WIDTH/9-1:0] write_a,
    input wire [2*WIDTH/9-1:0] write_b,
    input wire [WIDTH*2*8/9-1:0] in_a,
    input wire [WIDTH*2*8/9-1:0] in_b,
    input wire [WIDTH*2/9-1:0] in_parity_a,
    input wire [WIDTH*2/9-1:0] in_parity_b,
    output reg [WIDTH*2*8/9-1:0] out_a,
    output reg [WIDTH*2*8/9-1:0] out_b,
    output reg [WIDTH*2/9-1:0] out_parity_a,
    output reg [WIDTH*2/9-1:0] out_parity_b
);
    reg data[0:(1<<BITS)-1];
    reg parity[0:(1<<(BITS-3))-1];
    integer i, j;

    // Data bits of a port of that width with parity.
    function integer data_bits(input integer width);
        data_bits = width % 9 == 0 ? width / 9 * 8 : width;
    endfunction

    function integer base(input [BITS-1:0] address, input integer width);
        base = width == 0 ? 0 : address / data_bits(width) * data_bits(width);
    endfunction

    // Whether a port of base `at` and width w reads a bit that the other port writes.
    function overlaps(input integer at, input integer w, input integer other, input integer v);
        overlaps = at < other + data_bits(v) && other < at + data_bits(w);
    endfunction

    wire writes_a = WRITE_A != 0 && enable_a && write_a != 0;
    wire writes_b = WRITE_B != 0 && enable_b && write_b != 0;
    wire lost_a = writes_b && MODE_B != "READ_FIRST" && overlaps(base(address_a, READ_A), READ_A, base(address_b, WRITE_B), WRITE_B);
    wire lost_b = writes_a && MODE_A != "READ_FIRST" && overlaps(base(address_b, READ_B), READ_B, base(address_a, WRITE_A), WRITE_A);

    always @(posedge clk_a) begin
        if (READ_A != 0 && enable_a) begin
            if (reset_a) begin
                out_a <= 0;
                out_parity_a <= 0;
            end else if (!(writes_a && MODE_A == "NO_CHANGE"))
                for (i = 0; i < data_bits(READ_A); i = i + 1) begin
                    out_a[i] <= lost_a ? 1'bx : writes_a && MODE_A == "WRITE_FIRST" ? in_a[i] : data[base(address_a, READ_A)+i];
                    if (i % 8 == 0)
                        out_parity_a[i/8] <= lost_a ? 1'bx : writes_a && MODE_A == "WRITE_FIRST" ? in_parity_a[i/8] : parity[(base(address_a, READ_A)+i)/8];
                end
        end
        if (writes_a)
            for (i = 0; i < data_bits(WRITE_A); i = i + 1)
                if (write_a[i/8] !== 1'b0) begin
                    data[base(address_a, WRITE_A)+i] <= in_a[i];
                    if (i % 8 == 0) parity[(base(address_a, WRITE_A)+i)/8] <= in_parity_a[i/8];
                end
    end

    always @(posedge clk_b) begin
        if (READ_B != 0 && enable_b) begin
            if (reset_b) begin
                out_b <= 0;
                out_parity_b <= 0;
            end else if (!(writes_b && MODE_B == "NO_CHANGE"))
                for (j = 0; j < data_bits(READ_B); j = j + 1) begin
                    out_b[j] <= lost_b ? 1'bx : writes_b && MODE_B == "WRITE_FIRST" ? in_b[j] : data[base(address_b, READ_B)+j];
                    if (j % 8 == 0)
                        out_parity_b[j/8] <= lost_b ? 1'bx : writes_b && MODE_B == "WRITE_FIRST" ? in_parity_b[j/8] : parity[(base(address_b, READ_B)+j)/8];
                end
        end
        if (writes_b)
            for (j = 0; j < data_bits(WRITE_B); j = j + 1)
                if (write_b[j/8] !== 1'b0) begin
                    data[base(address_b, WRITE_B)+j] <= in_b[j];
                    if (j % 8 == 0) parity[(base(address_b, WRITE_B)+j)/8] <= in_parity_b[j/8];
                end
    end

    reg [(1<<BITS)-1:0] content;  // a constant of this size is slow to index
    reg [(1<<(BITS-3))-1:0] content_parity;
    initial begin
        content = CONTENT;
        content_parity = PARITY;
        for (i = 0; i < 1 << BITS; i = i + 1) data[i] = content[i];
        for (i = 0; i < 1 << (BITS - 3); i = i + 1) parity[i] = content_parity[i];
    end

    // An x in a control signal would be taken for 0 above.
    always @(posedge clk_a) if (^{enable_a, write_a} === 1'bx) out_a <= {WIDTH * 2 * 8 / 9{1'bx}};
endmodule

module RAMB18E2 (
    output [15:0] DOUTADOUT, DOUTBDOUT,
    output [1:0] DOUTPADOUTP, DOUTPBDOUTP,
    input [13:0] ADDRARDADDR, ADDRBWRADDR,
    input ADDRENA, ADDRENB, CLKARDCLK, CLKBWRCLK, ENARDEN, ENBWREN, REGCEAREGCE, REGCEB, RSTRAMARSTRAM, RSTRAMB,
    input RSTREGARSTREG, RSTREGB, SLEEP,
    input [15:0] DINADIN, DINBDIN,
    input [1:0] DINPADINP, DINPBDINP,
    input [1:0] WEA,
    input [3:0] WEBWE
);
    parameter READ_WIDTH_A = 0;
    parameter READ_WIDTH_B = 0;
    parameter WRITE_WIDTH_A = 0;
    parameter WRITE_WIDTH_B = 0;
    parameter WRITE_MODE_A = "NO_CHANGE";
    parameter WRITE_MODE_B = "NO_CHANGE";
    parameter [16383:0] CONTENT = {16384{1'bx}};
    parameter [2047:0] PARITY = {2048{1'bx}};
    parameter DOA_REG = 0;
    parameter DOB_REG = 0;
    wire [31:0] a, b;
    wire [3:0] pa, pb;
    localparam WIDE = READ_WIDTH_A == 36, WIDE_IN = WRITE_WIDTH_B == 36;
    ei_block_ram #(
            .CONTENT(CONTENT), .PARITY(PARITY), .BITS(14), .WIDTH(18), .READ_A(READ_WIDTH_A), .READ_B(READ_WIDTH_B), .WRITE_A(WRITE_WIDTH_A),
            .WRITE_B(WRITE_WIDTH_B), .MODE_A(WRITE_MODE_A), .MODE_B(WRITE_MODE_B)
    ) ram (
            .clk_a(CLKARDCLK), .clk_b(CLKBWRCLK), .enable_a(ENARDEN), .enable_b(ENBWREN), .reset_a(RSTRAMARSTRAM),
            .reset_b(RSTRAMB), .address_a(ADDRARDADDR), .address_b(ADDRBWRADDR), .write_a({2'b0, WEA}), .write_b(WEBWE),
            .in_a({16'b0, DINADIN}), .in_b(WIDE_IN ? {DINBDIN, DINADIN} : {16'b0, DINBDIN}), .in_parity_a({2'b0, DINPADINP}),
            .in_parity_b(WIDE_IN ? {DINPBDINP, DINPADINP} : {2'b0, DINPBDINP}), .out_a(a), .out_b(b), .out_parity_a(pa),
            .out_parity_b(pb)
    );
    assign DOUTADOUT = a[15:0];
    assign DOUTBDOUT = WIDE ? a[31:16] : b[15:0];
    assign DOUTPADOUTP = pa[1:0];
    assign DOUTPBDOUTP = WIDE ? pa[3:2] : pb[1:0];
endmodule

module RAMB36E2 (
    output [31:0] DOUTADOUT, DOUTBDOUT,
    output [3:0] DOUTPADOUTP, DOUTPBDOUTP,
    input [14:0] ADDRARDADDR, ADDRBWRADDR,
    input ADDRENA, ADDRENB, CLKARDCLK, CLKBWRCLK, ENARDEN, ENBWREN, REGCEAREGCE, REGCEB, RSTRAMARSTRAM, RSTRAMB,
    input RSTREGARSTREG, RSTREGB, SLEEP,
    input [31:0] DINADIN, DINBDIN,
    input [3:0] DINPADINP, DINPBDINP,
    input [3:0] WEA,
    input [7:0] WEBWE
);
    parameter READ_WIDTH_A = 0;
    parameter READ_WIDTH_B = 0;
    parameter WRITE_WIDTH_A = 0;
    parameter WRITE_WIDTH_B = 0;
    parameter WRITE_MODE_A = "NO_CHANGE";
    parameter WRITE_MODE_B = "NO_CHANGE";
    parameter [32767:0] CONTENT = {32768{1'bx}};
    parameter [4095:0] PARITY = {4096{1'bx}};
    parameter DOA_REG = 0;
    parameter DOB_REG = 0;
    wire [63:0] a, b;
    wire [7:0] pa, pb;
    localparam WIDE = READ_WIDTH_A == 72, WIDE_IN = WRITE_WIDTH_B == 72;
    ei_block_ram #(
            .CONTENT(CONTENT), .PARITY(PARITY), .BITS(15), .WIDTH(36), .READ_A(READ_WIDTH_A), .READ_B(READ_WIDTH_B), .WRITE_A(WRITE_WIDTH_A),
            .WRITE_B(WRITE_WIDTH_B), .MODE_A(WRITE_MODE_A), .MODE_B(WRITE_MODE_B)
    ) ram (
            .clk_a(CLKARDCLK), .clk_b(CLKBWRCLK), .enable_a(ENARDEN), .enable_b(ENBWREN), .reset_a(RSTRAMARSTRAM),
            .reset_b(RSTRAMB), .address_a(ADDRARDADDR), .address_b(ADDRBWRADDR), .write_a({4'b0, WEA}), .write_b(WEBWE),
            .in_a({32'b0, DINADIN}), .in_b(WIDE_IN ? {DINBDIN, DINADIN} : {32'b0, DINBDIN}), .in_parity_a({4'b0, DINPADINP}),
            .in_parity_b(WIDE_IN ? {DINPBDINP, DINPADINP} : {4'b0, DINPBDINP}), .out_a(a), .out_b(b), .out_parity_a(pa),
            .out_parity_b(pb)
    );
    assign DOUTADOUT = a[31:0];
    assign DOUTBDOUT = WIDE ? a[63:32] : b[31:0];
    assign DOUTPADOUTP = pa[3:0];
    assign DOUTPBDOUTP = WIDE ? pa[7:4] : pb[3:0];
endmodule
