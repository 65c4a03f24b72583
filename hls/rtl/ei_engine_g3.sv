// The engine of g3x5: TABLES tables of 27 sums in LUT RAM, each looked up by ROWS indices of five bits every cycle.
// A LUT RAM holds 32 entries, so tables have one bank: they are filled between the steps, and a step takes n_tiles + 29
// cycles. (A second bank would take as many LUTs again, and a multiplexer for each row and table.)
// hls/README.md has the ports, hls/cycles.py all cycles.
// Latency: log2(TABLES) + 5 cycles from a beat of the last step to its results.
module ei_engine_g3 #(
    parameter integer ROWS = 14,
    parameter integer TABLES = 4,
    parameter integer ACC_BITS = 21,
    parameter integer MAX_STEPS = 1024,
    parameter integer MAX_TILES = 1024
) (
    input  logic clk,
    input  logic rst,
    input  logic start,
    input  logic [$clog2(MAX_STEPS+1)-1:0] n_steps,
    input  logic [$clog2(MAX_TILES+1)-1:0] n_tiles,
    output logic busy,

    input  logic x_valid,
    output logic x_ready,
    input  logic [23:0] x_data,
    input  logic w_valid,
    output logic w_ready,
    input  logic [5*ROWS*TABLES-1:0] w_data,
    output logic y_valid,
    input  logic y_ready,
    output logic [ROWS*ACC_BITS-1:0] y_data
);
    localparam integer G = 3;
    localparam integer SELECT = 1;
    localparam integer ENTRY = 10;  // of +-384
    localparam integer SUM = ENTRY + $clog2(TABLES);

    logic loaded, take, bank_free, filled;
    logic [8*G*TABLES-1:0] x;
    logic [ROWS*SUM-1:0] sums;
    /* verilator lint_off PINCONNECTEMPTY */
    ei_shell #(
        .G(G), .ROWS(ROWS), .TABLES(TABLES), .BANKS(1), .SUM_BITS(SUM), .LATENCY(2 + $clog2(TABLES)),
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

    logic next_advance, next_move, next_add, uses_last, positive;
    logic [SELECT-1:0] select;
    logic [4:0] next_entry;
    ei_filler #(.G(G), .ADDRESS(5), .SELECT(SELECT)) filler (
        .clk(clk), .rst(rst), .loaded(loaded), .take(take), .bank_free(bank_free), .filled(filled),
        .next_advance(next_advance), .next_move(next_move), .next_add(next_add),
        .entry(next_entry), .select(select), .uses_last(uses_last), .positive(positive)
    );

    logic [5*ROWS*TABLES-1:0] weights;
    always_ff @(posedge clk) weights <= w_data;

    logic [ROWS*TABLES*ENTRY-1:0] found;  // row by row
    generate
        genvar r, t;
        for (t = 0; t < TABLES; t = t + 1) begin : g_table
            logic [ENTRY-1:0] sum;
            logic write;
            logic [4:0] entry;
            ei_entry #(.G(G), .ADDRESS(5), .SELECT(SELECT), .WIDTH(ENTRY)) entry_adder (
                .clk(clk), .x(x[8*G*t+:8*G]),
                .next_advance(next_advance), .next_move(next_move), .next_add(next_add),
                .next_entry(next_entry), .next_select(select), .next_uses_last(uses_last), .next_positive(positive),
                .write(write), .entry(entry), .sum(sum)
            );

            logic [5*ROWS-1:0] address;
            logic [ENTRY*ROWS-1:0] data;
            for (r = 0; r < ROWS; r = r + 1) begin : g_row
                assign address[5*r+:5] = weights[5*(r*TABLES+t)+:5];
                assign found[(r*TABLES+t)*ENTRY+:ENTRY] = data[ENTRY*r+:ENTRY];
            end
            ei_lut_table #(.ROWS(ROWS), .WIDTH(ENTRY)) rows (
                .clk(clk), .write(write), .write_address(entry), .write_data(sum),
                .read_address(address), .read_data(data)
            );
        end
        for (r = 0; r < ROWS; r = r + 1) begin : g_tree
            ei_adder_tree #(.N(TABLES), .WIDTH(ENTRY)) tree (
                .clk(clk), .terms(found[r*TABLES*ENTRY+:TABLES*ENTRY]), .sum(sums[r*SUM+:SUM])
            );
        end
    endgenerate
endmodule
