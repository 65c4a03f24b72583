// The baseline: no tables, ROWS * TABLES activations with their weights (2bit) are added every cycle. It has the shell of
// the engines with tables: streams, activations, steps, totals. hls/README.md has the ports.
// Latency: log2(TABLES) + 4 cycles from a beat of the last step to its results.
module ei_engine_add #(
    parameter integer ROWS = 4,
    parameter integer TABLES = 16,  // activations of a step, a power of two from 2 on
    parameter integer ACC_BITS = 21,
    parameter integer MAX_STEPS = 128,
    parameter integer MAX_TILES = 4096
) (
    input  logic clk,
    input  logic rst,
    input  logic start,
    input  logic [$clog2(MAX_STEPS+1)-1:0] n_steps,
    input  logic [$clog2(MAX_TILES+1)-1:0] n_tiles,
    output logic busy,

    input  logic x_valid,
    output logic x_ready,
    input  logic [7:0] x_data,
    input  logic w_valid,
    output logic w_ready,
    input  logic [2*ROWS*TABLES-1:0] w_data,
    output logic y_valid,
    input  logic y_ready,
    output logic [ROWS*ACC_BITS-1:0] y_data
);
    localparam integer SUM = 9 + $clog2(TABLES);

    logic loaded, bank_free, filled;
    logic [8*TABLES-1:0] x;
    logic [ROWS*SUM-1:0] sums;
    // The activations of a step are its table: they are there a cycle after they are taken.
    wire take = loaded && bank_free && !filled;
    always_ff @(posedge clk) filled <= take && !rst;

    /* verilator lint_off PINCONNECTEMPTY */
    ei_shell #(
        .G(1), .ROWS(ROWS), .TABLES(TABLES), .BANKS(1), .SUM_BITS(SUM), .LATENCY(1 + $clog2(TABLES)),
        .ACC_BITS(ACC_BITS), .MAX_STEPS(MAX_STEPS), .MAX_TILES(MAX_TILES)
    ) shell (
        .clk(clk), .rst(rst), .start(start), .n_steps(n_steps), .n_tiles(n_tiles), .busy(busy),
        .x_valid(x_valid), .x_ready(x_ready), .x_data(x_data),
        .w_valid(w_valid), .w_ready(w_ready),
        .y_valid(y_valid), .y_ready(y_ready), .y_data(y_data),
        .loaded(loaded), .take(take), .x(x), .bank_free(bank_free), .filled(filled),
        .beat(), .bank(), .sums(sums)
    );
    /* verilator lint_on PINCONNECTEMPTY */

    generate
        genvar r;
        for (r = 0; r < ROWS; r = r + 1) begin : g_row
            ei_add_row #(.N(TABLES)) row (
                .clk(clk), .x(x), .weights(w_data[2*TABLES*r+:2*TABLES]), .sum(sums[SUM*r+:SUM])
            );
        end
    endgenerate
endmodule
