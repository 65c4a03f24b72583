// The sum of two signed numbers, one bit wider. Latency: 1 cycle.
module ei_add #(
    parameter integer WIDTH = 11
) (
    input  logic clk,
    input  logic [WIDTH-1:0] a,
    input  logic [WIDTH-1:0] b,
    output logic [WIDTH:0] sum
);
    always_ff @(posedge clk) sum <= {a[WIDTH-1], a} + {b[WIDTH-1], b};
endmodule
