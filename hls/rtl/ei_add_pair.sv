// The sum of two activations with weights -1, 0, 1, whose codes are 0, 1, 2. A negative weight is ~x + 1: the 1 of a is
// in the sum, that of b goes on in minus_b. Latency: 1 cycle.
(* keep_hierarchy *)
module ei_add_pair (
    input  logic clk,
    input  logic [7:0] x_a,
    input  logic [7:0] x_b,
    input  logic [1:0] w_a,
    input  logic [1:0] w_b,
    output logic [8:0] sum,
    output logic minus_b
);
    wire [7:0] a = {8{!w_a[0]}} & (x_a ^ {8{!w_a[1]}});
    wire [7:0] b = {8{!w_b[0]}} & (x_b ^ {8{!w_b[1]}});

    // The bit below the lowest carries the 1 of a into the sum.
    logic unused;
    wire [8:0] next_sum;
    assign {next_sum, unused} = {a[7], a, 1'b1} + {b[7], b, w_a == 2'd0};
    always_ff @(posedge clk) begin
        sum <= next_sum;
        minus_b <= w_b == 2'd0;
    end
endmodule
