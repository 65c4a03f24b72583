// A block RAM with one port to write and one to read, and with its output register, which `clear` sets to 0.
// Latency: 2 cycles to read; `clear` stands a cycle after the address.
// A word that is read in the cycle in which it is written is not defined: simulation gives its bits inverted. The engine
// never uses one.
//
// Deep memories are made of columns as wide as one block RAM is at that depth, so that no multiplexer stands behind them.
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
    input  logic clear,
    output logic [WIDTH-1:0] read_data
);
`ifdef EI_ECP5
    localparam integer COLUMN = DEPTH <= 1024 ? 18 : DEPTH <= 2048 ? 9 : DEPTH <= 4096 ? 4 : DEPTH <= 8192 ? 2 : 1;
`else
    localparam integer COLUMN = DEPTH <= 512 ? 72 : DEPTH <= 1024 ? 36 : DEPTH <= 2048 ? 18 : DEPTH <= 4096 ? 9 : 4;
`endif

    generate
        genvar i;
        for (i = 0; i < WIDTH; i = i + COLUMN) begin : g_column
            localparam integer BITS = (WIDTH - i < COLUMN) ? WIDTH - i : COLUMN;
`ifdef EI_ECP5
            ei_ecp5_ram #(.WIDTH(BITS), .ADDRESS(ADDRESS)) ram (
                .clk(clk),
                .write(write),
                .write_address(write_address),
                .write_data(write_data[i+:BITS]),
                .read_address(read_address),
                .enable(1'b1),
                .clear(clear),
                .read_data(read_data[i+:BITS])
            );
`else
            (* ram_style = "block" *) logic [BITS-1:0] words[0:DEPTH-1];
            logic [BITS-1:0] read;

            always_ff @(posedge clk) if (write) words[write_address] <= write_data[i+:BITS];

            always_ff @(posedge clk) begin
`ifdef VERILATOR
                read <= (write && write_address == read_address) ? ~words[read_address] : words[read_address];
`else
                read <= words[read_address];
`endif
                read_data[i+:BITS] <= clear ? 0 : read;
            end
`endif
        end
    endgenerate
endmodule
