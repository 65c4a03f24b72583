// Fills the tables of a step: walks over their entries in an order in which each differs by one activation from the one
// before (ei_walk_rom_g*), and tells the adders of all tables (ei_entry) what to add.
//
// When the activations of a step are `loaded`, it takes them, and waits with the first entry until the bank of the
// tables is free (`bank_free`); from then on an entry is written each cycle. Latency: the first entry is written 2 cycles
// after `bank_free`, the last one 3^G + 1 cycles after it, together with `filled`. A fill follows another one after
// 3^G + 2 cycles.
//
// The tables lie far apart, so each has registers of its own for what all are told: they get the values of the next cycle.
module ei_filler #(
    parameter integer G = 5,
    parameter integer ADDRESS = 8,
    parameter integer SELECT = 2
) (
    input  logic clk,
    input  logic rst,
    input  logic loaded,
    output logic take,
    input  logic bank_free,
    output logic filled,

    output logic next_advance,  // the tables take the next word, and select the activation of the one before
    output logic next_move,  // what was selected becomes the term
    output logic next_add,  // the term is added; the sum is cleared where this is low
    output logic [ADDRESS-1:0] entry,  // the next word
    output logic [SELECT-1:0] select,
    output logic uses_last,
    output logic positive
);
    localparam logic [ADDRESS-1:0] LAST_INDEX = ADDRESS'(3 ** G - 1);
    localparam integer WORD = ADDRESS + SELECT + 3;

    // Prepare the first entry, wait for the bank, run.
    logic preparing, waiting, running, advance, move, almost_filled;
    logic word_is_last, next_is_last, selected_is_last, is_last;  // that comes, to be selected, is selected, is added
    logic begins;  // `take` and the cycle after; or the walk is brought to its beginning
    logic [3:0] warming;
    logic restart;  // a reset was: `advance` may still be high in its first cycle
    wire go = waiting && bank_free;
    wire ends = running && selected_is_last && !is_last;  // the last entry is added in the next cycle
    wire takes = loaded && !take && (ends || (!running && !preparing && !waiting));
    assign next_add = go || (running && !is_last);
    assign next_move = begins || next_add;
    assign next_advance = begins || go || (running && !selected_is_last && !next_is_last);

    always_ff @(posedge clk) begin
        advance <= next_advance;
        move <= next_move;
        if (rst) begin
            {take, preparing, waiting, running} <= 4'b0;
            {begins, filled, almost_filled} <= 3'b0;
        end else begin
            take <= takes;
            begins <= takes || take || (warming[0] && !restart);
            preparing <= take;
            waiting <= preparing || (waiting && !bank_free);
            running <= next_add;
            {filled, almost_filled} <= {almost_filled, ends};
        end
    end

    // The words of the walk, round and round. Between two steps the first word waits in the tables to be selected, and the
    // next ones after it; four cycles soon after a reset bring them there.
    logic [ADDRESS-1:0] index;
    logic [WORD-1:0] read_word;

    always_ff @(posedge clk) begin
        restart <= rst;
        if (restart) begin
            warming <= 4'b1111;
            index <= 0;
        end else begin
            warming <= warming >> 1;
            if (advance) index <= (index == LAST_INDEX) ? 0 : index + 1;
        end
    end

    generate
        if (G == 5) begin : g_base3
            ei_walk_rom_g5 rom (.clk(clk), .enable(advance), .index(index), .word(read_word));
        end else begin : g_g3x5
            ei_walk_rom_g3 rom (.clk(clk), .enable(advance), .index(index), .word(read_word));
        end
    endgenerate

    always_ff @(posedge clk)
        if (advance) begin
            entry <= read_word[ADDRESS-1:0];
            select <= read_word[ADDRESS+:SELECT];
            positive <= read_word[ADDRESS+SELECT];
            uses_last <= read_word[ADDRESS+SELECT+1];
            {selected_is_last, next_is_last, word_is_last} <= {next_is_last, word_is_last, read_word[WORD-1]};
        end

    always_ff @(posedge clk) if (move) is_last <= selected_is_last;
endmodule
