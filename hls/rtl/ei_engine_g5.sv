// The engine of base3: ROWS * TABLES tables of 243 sums in block RAM, each looked up by a byte of weights every cycle.
// Tables have two banks: the next step's are filled while this step's are looked up, so a step takes
// max(245, n_tiles) cycles. hls/README.md has the ports, hls/cycles.py all cycles.
// Latency: log2(TABLES) + 6 cycles from a beat of the last step to its results.
module ei_engine_g5 #(
    parameter integer ROWS = 4,
    parameter integer TABLES = 16,
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
    input  logic [39:0] x_data,
    input  logic w_valid,
    output logic w_ready,
    input  logic [8*ROWS*TABLES-1:0] w_data,
    output logic y_valid,
    input  logic y_ready,
    output logic [ROWS*ACC_BITS-1:0] y_data
);
    localparam integer G = 5;
    localparam integer SELECT = 2;
    localparam integer ENTRY = 11;  // of +-640
    localparam integer SUM = ENTRY + $clog2(TABLES);

    logic loaded, take, bank_free, filled, bank;
    logic [8*G*TABLES-1:0] x;
    logic [ROWS*SUM-1:0] sums;
    /* verilator lint_off PINCONNECTEMPTY */
    ei_shell #(
        .G(G), .ROWS(ROWS), .TABLES(TABLES), .BANKS(2), .SUM_BITS(SUM), .LATENCY(3 + $clog2(TABLES)),
        .ACC_BITS(ACC_BITS), .MAX_STEPS(MAX_STEPS), .MAX_TILES(MAX_TILES)
    ) shell (
        .clk(clk), .rst(rst), .start(start), .n_steps(n_steps), .n_tiles(n_tiles), .busy(busy),
        .x_valid(x_valid), .x_ready(x_ready), .x_data(x_data),
        .w_valid(w_valid), .w_ready(w_ready),
        .y_valid(y_valid), .y_ready(y_ready), .y_data(y_data),
        .loaded(loaded), .take(take), .x(x), .bank_free(bank_free), .filled(filled),
        .beat(), .bank(bank), .sums(sums)
    );
    /* verilator lint_on PINCONNECTEMPTY */

    logic next_advance, next_move, next_add, uses_last, positive, write_bank;
    logic [SELECT-1:0] select;
    logic [7:0] next_entry;
    ei_filler #(.G(G), .ADDRESS(8), .SELECT(SELECT)) filler (
        .clk(clk), .rst(rst), .loaded(loaded), .take(take), .bank_free(bank_free), .filled(filled),
        .next_advance(next_advance), .next_move(next_move), .next_add(next_add),
        .entry(next_entry), .select(select), .uses_last(uses_last), .positive(positive)
    );
    always_ff @(posedge clk)
        if (rst || start && !busy) write_bank <= 1'b0;
        else if (filled) write_bank <= !write_bank;

    logic [ROWS*TABLES*ENTRY-1:0] found;
    generate
        genvar r, t;
        for (t = 0; t < TABLES; t = t + 1) begin : g_table
            logic write;
            logic [7:0] entry;
            logic [ENTRY-1:0] sum;
            ei_entry #(.G(G), .ADDRESS(8), .SELECT(SELECT), .WIDTH(ENTRY)) entry_adder (
                .clk(clk), .x(x[8*G*t+:8*G]),
                .next_advance(next_advance), .next_move(next_move), .next_add(next_add),
                .next_entry(next_entry), .next_select(select), .next_uses_last(uses_last), .next_positive(positive),
                .write(write), .entry(entry), .sum(sum)
            );

            for (r = 0; r < ROWS; r = r + 1) begin : g_row
                ei_table #(.WIDTH(ENTRY)) table_of_row (
                    .clk(clk), .write_bank(write_bank), .write(write), .entry(entry), .sum(sum),
                    .bank(bank), .index(w_data[8*(r*TABLES+t)+:8]), .found(found[(r*TABLES+t)*ENTRY+:ENTRY])
                );
            end
        end
        for (r = 0; r < ROWS; r = r + 1) begin : g_tree
            ei_adder_tree #(.N(TABLES), .WIDTH(ENTRY)) tree (
                .clk(clk), .terms(found[r*TABLES*ENTRY+:TABLES*ENTRY]), .sum(sums[r*SUM+:SUM])
            );
        end
    endgenerate
endmodule
