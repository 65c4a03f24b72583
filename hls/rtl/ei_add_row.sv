// The sum of N activations with the weights of a row, N a power of two from 2 on. Latency: log2(N) + 1 cycles.
module ei_add_row #(
    parameter integer N = 16
) (
    input  logic clk,
    input  logic [8*N-1:0] x,
    input  logic [2*N-1:0] weights,
    output logic [$clog2(N)+8:0] sum
);
    localparam integer PAIRS = N / 2;
    localparam integer WIDTH = 9 + $clog2(PAIRS);

    logic [PAIRS*9-1:0] sums;
    logic [PAIRS-1:0] minus;
    generate
        genvar i;
        for (i = 0; i < PAIRS; i = i + 1) begin : g_pair
            ei_add_pair add (
                .clk(clk),
                .x_a(x[16*i+:8]),
                .x_b(x[16*i+8+:8]),
                .w_a(weights[4*i+:2]),
                .w_b(weights[4*i+2+:2]),
                .sum(sums[9*i+:9]),
                .minus_b(minus[i])
            );
        end
    endgenerate

    logic [WIDTH-1:0] tree_sum;
    logic carry;
    ei_add_tree #(.N(PAIRS), .WIDTH(9)) tree (
        .clk(clk), .terms(sums), .carries(minus), .sum(tree_sum), .carry(carry)
    );
    always_ff @(posedge clk) sum <= {tree_sum[WIDTH-1], tree_sum} + (WIDTH + 1)'(carry);
endmodule
