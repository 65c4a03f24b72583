// The entries of one table, one each cycle: the sum before plus or minus one of G activations, as ei_filler says.
// Its hierarchy is kept, so that synthesis does not share the registers of all tables again.
// Latency: 4 cycles from a word of the walk to its sum, while all moves on.
(* keep_hierarchy *)
module ei_entry #(
    parameter integer G = 5,
    parameter integer ADDRESS = 8,
    parameter integer SELECT = 2,
    parameter integer WIDTH = 11
) (
    input  logic clk,
    input  logic [8*G-1:0] x,
    input  logic next_advance,
    input  logic next_move,
    input  logic next_add,
    input  logic [ADDRESS-1:0] next_entry,
    input  logic [SELECT-1:0] next_select,
    input  logic next_uses_last,
    input  logic next_positive,
    output logic write,  // the sum is that of entry `entry`
    output logic [ADDRESS-1:0] entry,
    output logic [WIDTH-1:0] sum
);
    logic advance, move, add;
    always_ff @(posedge clk) begin
        advance <= next_advance;
        move <= next_move;
        add <= next_add;
    end

    // A word, and what it selects. The last activation joins in the term: a select of G - 1 fits a look-up table.
    logic [SELECT-1:0] select;
    logic [ADDRESS-1:0] word_entry, selected_entry;
    logic word_uses_last, word_positive, uses_last, positive;
    logic [7:0] selected, last;
    always_ff @(posedge clk)
        if (advance) begin
            select <= next_select;
            {word_entry, word_uses_last, word_positive} <= {next_entry, next_uses_last, next_positive};
            {selected_entry, uses_last, positive} <= {word_entry, word_uses_last, word_positive};
            selected <= x[8*select+:8];
            last <= x[8*G-1-:8];
        end

    // The term, inverted where it is added: sum + term = sum - ~term - 1; the bit below the lowest has the borrow.
    logic [7:0] term;
    logic negative;
    logic [ADDRESS-1:0] term_entry;
    always_ff @(posedge clk)
        if (move) begin
            term <= (uses_last ? last : selected) ^ {8{positive}};
            negative <= !positive;
            term_entry <= selected_entry;
        end

    logic unused;
    wire [WIDTH-1:0] next_sum;
    assign {next_sum, unused} = {sum, negative} - {{(WIDTH - 8) {term[7]}}, term, 1'b1};
    always_ff @(posedge clk) begin
        if (!add) sum <= 0;
        else sum <= next_sum;
        entry <= term_entry;
        write <= add;
    end
endmodule
