// A table of base3 in block RAM for one row, in two banks. All rows have the same ones, and lie far apart: what goes to the
// RAM is registered beside it. Its hierarchy is kept, so that synthesis does not share these registers among rows again.
// Latency: 2 cycles from `write` to the entry in the RAM, 3 cycles from `index` to `found`.
(* keep_hierarchy *)
module ei_table #(
    parameter integer WIDTH = 11
) (
    input  logic clk,
    input  logic write_bank,
    input  logic write,
    input  logic [7:0] entry,
    input  logic [WIDTH-1:0] sum,
    input  logic bank,
    input  logic [7:0] index,
    output logic [WIDTH-1:0] found
);
    logic writes;
    logic [8:0] write_address, read_address;
    logic [WIDTH-1:0] write_data;
    always_ff @(posedge clk) begin
        writes <= write;
        write_address <= {write_bank, entry};
        write_data <= sum;
        read_address <= {bank, index};
    end

    ei_block_ram #(.WIDTH(WIDTH), .DEPTH(512)) ram (
        .clk(clk),
        .write(writes),
        .write_address(write_address),
        .write_data(write_data),
        .read_address(read_address),
        .clear(1'b0),
        .read_data(found)
    );
endmodule
