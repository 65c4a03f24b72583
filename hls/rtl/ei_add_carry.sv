// The sum of two signed numbers and a bit, one bit wider. Latency: 1 cycle.
(* keep_hierarchy *)
module ei_add_carry #(
    parameter integer WIDTH = 9
) (
    input  logic clk,
    input  logic [WIDTH-1:0] a,
    input  logic [WIDTH-1:0] b,
    input  logic carry,
    output logic [WIDTH:0] sum
);
    logic unused;
    wire [WIDTH:0] next_sum;
    assign {next_sum, unused} = {a[WIDTH-1], a, 1'b1} + {b[WIDTH-1], b, carry};
    always_ff @(posedge clk) sum <= next_sum;
endmodule
