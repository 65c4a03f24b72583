// A table of base3 in block RAM, once for each row, all written alike, each read with an index of its own.
// Two banks. Its hierarchy is kept, so that synthesis does not share the banks' registers with other tables.
// Latency: 1 cycle from `write` to the entry in the RAM, 3 cycles from `indices` to `found`. `write_bank` stands from the
// cycle before `write` on.
(* keep_hierarchy *)
module ei_table #(
    parameter integer ROWS = 4,
    parameter integer WIDTH = 11
) (
    input  logic clk,
    input  logic write_bank,
    input  logic write,
    input  logic [7:0] entry,
    input  logic [WIDTH-1:0] sum,
    input  logic bank,
    input  logic [8*ROWS-1:0] indices,
    output logic [ROWS*WIDTH-1:0] found
);
    logic write_bank_here, bank_here;
    logic [8*ROWS-1:0] indices_here;
    always_ff @(posedge clk) begin
        write_bank_here <= write_bank;
        bank_here <= bank;
        indices_here <= indices;
    end

    generate
        genvar r;
        for (r = 0; r < ROWS; r = r + 1) begin : g_row
            ei_block_ram #(.WIDTH(WIDTH), .DEPTH(512)) ram (
                .clk(clk),
                .write(write),
                .write_address({write_bank_here, entry}),
                .write_data(sum),
                .read_address({bank_here, indices_here[8*r+:8]}),
                .clear(1'b0),
                .read_data(found[r*WIDTH+:WIDTH])
            );
        end
    endgenerate
endmodule
