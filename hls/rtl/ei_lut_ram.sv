// A table of 32 entries in LUT RAM with one port to write and one to read. Latency: 1 cycle to read.
module ei_lut_ram #(
    parameter integer WIDTH = 10
) (
    input  logic clk,
    input  logic write,
    input  logic [4:0] write_address,
    input  logic [WIDTH-1:0] write_data,
    input  logic [4:0] read_address,
    output logic [WIDTH-1:0] read_data
);
    (* ram_style = "distributed" *) logic [WIDTH-1:0] words[0:31];
    always_ff @(posedge clk) if (write) words[write_address] <= write_data;
    always_ff @(posedge clk) read_data <= words[read_address];
endmodule
