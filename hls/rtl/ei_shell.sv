// What engines have in common: streams, activations, steps, totals. The engine itself fills its tables from `x` and looks
// up the beats: the sums of all rows come LATENCY cycles after a beat.
module ei_shell #(
    parameter integer G = 5,
    parameter integer ROWS = 4,
    parameter integer TABLES = 16,
    parameter integer BANKS = 2,
    parameter integer SUM_BITS = 15,
    parameter integer LATENCY = 6,
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
    input  logic [8*G-1:0] x_data,
    input  logic w_valid,
    output logic w_ready,
    output logic y_valid,
    input  logic y_ready,
    output logic [ROWS*ACC_BITS-1:0] y_data,

    // To fill tables: activations are there, are moved to x, the bank may be written, it is written.
    output logic loaded,
    input  logic take,
    output logic [8*G*TABLES-1:0] x,
    output logic bank_free,
    input  logic filled,

    // To look up: w_data is taken, and is for the tables of this bank.
    output logic beat,
    output logic bank,
    input  logic [ROWS*SUM_BITS-1:0] sums
);
    localparam integer ROOM = 16;

`ifndef __ICARUS__  // which has no such task
    generate
        if (ACC_BITS < SUM_BITS) begin : g_too_narrow
            $error("ACC_BITS must be at least the bits of the sum of one step");
        end
        if ((TABLES & (TABLES - 1)) != 0) begin : g_no_tree
            $error("TABLES must be a power of two");
        end
    endgenerate
`endif
    localparam integer TILE = (MAX_TILES > 1) ? $clog2(MAX_TILES) : 1;

    wire begins = start && !busy && !rst;
    logic y_last;
    always_ff @(posedge clk)
        if (rst) busy <= 1'b0;
        else if (begins) busy <= 1'b1;
        else if (y_valid && y_ready && y_last) busy <= 1'b0;

    ei_activations #(.BEAT_BITS(8 * G), .TABLES(TABLES), .MAX_STEPS(MAX_STEPS)) activations (
        .clk(clk), .rst(rst), .start(begins), .n_steps(n_steps),
        .x_valid(x_valid), .x_ready(x_ready), .x_data(x_data),
        .loaded(loaded), .take(take), .x(x)
    );

    logic [TILE-1:0] tile;
    logic first_step, last_step, last_tile, result_gone;
    ei_sequencer #(.BANKS(BANKS), .MAX_STEPS(MAX_STEPS), .MAX_TILES(MAX_TILES), .ROOM(ROOM)) sequencer (
        .clk(clk), .rst(rst), .start(begins), .n_steps(n_steps), .n_tiles(n_tiles),
        .filled(filled), .bank_free(bank_free), .result_gone(result_gone),
        .w_valid(w_valid), .w_ready(w_ready),
        .beat(beat), .bank(bank), .tile(tile),
        .first_step(first_step), .last_step(last_step), .last_tile(last_tile)
    );

    logic result, last_result;
    logic [ROWS*ACC_BITS-1:0] totals;
    ei_accumulators #(
        .ROWS(ROWS), .SUM_BITS(SUM_BITS), .ACC_BITS(ACC_BITS), .LATENCY(LATENCY), .MAX_TILES(MAX_TILES)
    ) accumulators (
        .clk(clk), .rst(rst), .beat(beat), .tile(tile),
        .first_step(first_step), .last_step(last_step), .last_tile(last_tile), .sums(sums),
        .result(result), .last_result(last_result), .totals(totals)
    );

    ei_results #(.WIDTH(ROWS * ACC_BITS), .ROOM(ROOM)) results (
        .clk(clk), .rst(rst), .result(result), .last_result(last_result), .totals(totals),
        .result_gone(result_gone),
        .y_valid(y_valid), .y_ready(y_ready), .y_data(y_data), .y_last(y_last)
    );
endmodule
