// A table of 32 entries in LUT RAM that seven rows read at once. Latency: 1 cycle to read.
//
// With EI_XILINX defined it is made of RAM32M16, a LUT RAM of eight ports of two bits: each holds the same two bits of
// all entries on seven ports to read, and the eighth has the address to write. Inferred RAMs take 8 LUTs a row, these
// 5.7 (for 10 bits).
module ei_lut_ram7 #(
    parameter integer WIDTH = 10  // even
) (
    input  logic clk,
    input  logic write,
    input  logic [4:0] write_address,
    input  logic [WIDTH-1:0] write_data,
    input  logic [7*5-1:0] read_address,
    output logic [7*WIDTH-1:0] read_data
);
    logic [7*WIDTH-1:0] read;
    always_ff @(posedge clk) read_data <= read;

    genvar i;
`ifdef EI_XILINX
    generate
        for (i = 0; i < WIDTH; i = i + 2) begin : g_two_bits
            wire [1:0] data = write_data[i+:2];
            RAM32M16 ram (
                .WCLK(clk),
                .WE(write),
                .ADDRH(write_address),
                .DIA(data), .DIB(data), .DIC(data), .DID(data), .DIE(data), .DIF(data), .DIG(data), .DIH(2'b00),
                .ADDRA(read_address[0+:5]), .DOA(read[0*WIDTH+i+:2]),
                .ADDRB(read_address[5+:5]), .DOB(read[1*WIDTH+i+:2]),
                .ADDRC(read_address[10+:5]), .DOC(read[2*WIDTH+i+:2]),
                .ADDRD(read_address[15+:5]), .DOD(read[3*WIDTH+i+:2]),
                .ADDRE(read_address[20+:5]), .DOE(read[4*WIDTH+i+:2]),
                .ADDRF(read_address[25+:5]), .DOF(read[5*WIDTH+i+:2]),
                .ADDRG(read_address[30+:5]), .DOG(read[6*WIDTH+i+:2]),
                .DOH()
            );
        end
    endgenerate
`else
    (* ram_style = "distributed" *) logic [WIDTH-1:0] words[0:31];
    always_ff @(posedge clk) if (write) words[write_address] <= write_data;
    generate
        for (i = 0; i < 7; i = i + 1) begin : g_port
            assign read[WIDTH*i+:WIDTH] = words[read_address[5*i+:5]];
        end
    endgenerate
`endif
endmodule
