// The sum of N signed numbers, N a power of two: pairs are added level after level, each level is registered.
// Latency: log2(N) cycles.
module ei_adder_tree #(
    parameter integer N = 16,
    parameter integer WIDTH = 11
) (
    /* verilator lint_off UNUSEDSIGNAL */
    input  logic clk,  // not used for N = 1
    /* verilator lint_on UNUSEDSIGNAL */
    input  logic [N*WIDTH-1:0] terms,
    output logic [WIDTH+$clog2(N)-1:0] sum
);
    generate
        if (N == 1) begin : g_one
            assign sum = terms;
        end else begin : g_pairs
            logic [N/2*(WIDTH+1)-1:0] halves;
            genvar i;
            for (i = 0; i < N / 2; i = i + 1) begin : g_pair
                ei_add #(.WIDTH(WIDTH)) add (
                    .clk(clk),
                    .a(terms[2*i*WIDTH+:WIDTH]),
                    .b(terms[(2*i+1)*WIDTH+:WIDTH]),
                    .sum(halves[i*(WIDTH+1)+:WIDTH+1])
                );
            end
            ei_adder_tree #(.N(N / 2), .WIDTH(WIDTH + 1)) rest (.clk(clk), .terms(halves), .sum(sum));
        end
    endgenerate
endmodule
