// A block RAM with one port to write and one to read, and with its output register. Latency: 2 cycles to read.
// A word that is read in the cycle in which it is written is not defined; the engine never uses one.
module ei_block_ram #(
    parameter integer WIDTH = 11,
    parameter integer DEPTH = 512,
    parameter integer ADDRESS = (DEPTH > 1) ? $clog2(DEPTH) : 1
) (
    input  logic clk,
    input  logic write,
    input  logic [ADDRESS-1:0] write_address,
    input  logic [WIDTH-1:0] write_data,
    input  logic [ADDRESS-1:0] read_address,
    output logic [WIDTH-1:0] read_data
);
    (* ram_style = "block" *) logic [WIDTH-1:0] words[0:DEPTH-1];
    logic [WIDTH-1:0] read;

    always_ff @(posedge clk) if (write) words[write_address] <= write_data;

    always_ff @(posedge clk) begin
        read <= words[read_address];
        read_data <= read;
    end
endmodule
