// The entries of one table, one each cycle: the sum before plus or minus one of G activations, as ei_filler says.
// Its hierarchy is kept, so that synthesis does not share the registers of all tables again.
// Latency: 4 cycles from a word of the walk to its sum, while it advances.
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
    input  logic next_add,
    input  logic [ADDRESS-1:0] next_entry,
    input  logic [SELECT-1:0] next_select,
    input  logic next_uses_last,
    input  logic next_not_last,
    input  logic next_positive,
    input  logic next_negative,
    output logic write,  // the sum is that of entry `entry`
    output logic [ADDRESS-1:0] entry,
    output logic [WIDTH-1:0] sum
);
    logic advance, add;
    logic [ADDRESS-1:0] entry_to_select, entry_selected;
    logic [SELECT-1:0] select;
    logic uses_last, not_last, positive_to_select, negative_to_select, positive, negative;
    always_ff @(posedge clk) begin
        advance <= next_advance;
        add <= next_add;
        write <= add;
        entry <= entry_selected;
        if (advance) begin
            entry_to_select <= next_entry;
            entry_selected <= entry_to_select;
            select <= next_select;
            {uses_last, not_last} <= {next_uses_last, next_not_last};
            {positive_to_select, negative_to_select} <= {next_positive, next_negative};
            {positive, negative} <= {positive_to_select, negative_to_select};
        end
    end

    // The last activation has a register of its own: a select of G - 1 and the adder each fit their look-up tables. The
    // register of the two that is not selected is 0. It is cleared also while the walk stands still: with its first word
    // selected and its second one waiting, neither of which may use the last activation (walk.py).
    logic [7:0] selected, last;
    always_ff @(posedge clk) begin
        if (uses_last) selected <= 0;
        else if (advance) selected <= x[8*select+:8];
        if (not_last) last <= 0;
        else if (advance) last <= x[8*G-1-:8];
    end

    wire [7:0] term = selected | last;
    wire [WIDTH-1:0] inverted = {{(WIDTH - 8) {term[7]}}, term} ^ {WIDTH{positive}};

    // sum + term = sum - ~term - 1; the bit below the lowest has the borrow. As a difference, because synthesis may exchange
    // the operands of a sum, and only with `sum` on the left does the choice of the term fit in front of the carry.
    logic unused;
    wire [WIDTH-1:0] next_sum;
    assign {next_sum, unused} = {sum, negative} - {inverted, 1'b1};
    always_ff @(posedge clk) if (!add) sum <= 0; else sum <= next_sum;
endmodule
