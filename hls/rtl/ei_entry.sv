// The entries of one table, one each cycle: the sum before plus or minus one of G activations, as ei_filler says.
// Latency: 2 cycles from `select` to `sum`.
module ei_entry #(
    parameter integer G = 5,
    parameter integer SELECT = 2,
    parameter integer WIDTH = 11
) (
    input  logic clk,
    input  logic [8*G-1:0] x,
    input  logic prepare,
    input  logic [SELECT-1:0] select,
    input  logic add,
    input  logic uses_last,
    input  logic positive,
    input  logic negative,  // the opposite, in a register of its own
    output logic [WIDTH-1:0] sum
);
    // The last activation joins behind the register: a select of G - 1 and the adder each fit their look-up tables.
    logic [7:0] selected;
    always_ff @(posedge clk) if (prepare) selected <= x[8*select+:8];

    wire [7:0] term = uses_last ? x[8*G-1-:8] : selected;
    wire [WIDTH-1:0] inverted = {{(WIDTH - 8) {term[7]}}, term} ^ {WIDTH{positive}};

    // sum + term = sum - ~term - 1; the bit below the lowest has the borrow. As a difference, because synthesis may exchange
    // the operands of a sum, and only with `sum` on the left does the choice of the term fit in front of the carry.
    logic unused;
    wire [WIDTH-1:0] next_sum;
    assign {next_sum, unused} = {sum, negative} - {inverted, 1'b1};
    always_ff @(posedge clk) if (!add) sum <= 0; else sum <= next_sum;
endmodule
