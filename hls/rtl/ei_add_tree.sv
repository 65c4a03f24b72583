// The sum of N signed numbers and N bits, N a power of two: pairs are added level after level, each level is registered,
// and each adder takes a bit as its carry. One bit is left, `carry`. Latency: log2(N) cycles.
module ei_add_tree #(
    parameter integer N = 8,
    parameter integer WIDTH = 9
) (
    /* verilator lint_off UNUSEDSIGNAL */
    input  logic clk,  // not used for N = 1
    /* verilator lint_on UNUSEDSIGNAL */
    input  logic [N*WIDTH-1:0] terms,
    input  logic [N-1:0] carries,
    output logic [WIDTH+$clog2(N)-1:0] sum,
    output logic carry
);
    generate
        if (N == 1) begin : g_one
            assign sum = terms;
            assign carry = carries;
        end else begin : g_pairs
            logic [N/2*(WIDTH+1)-1:0] halves;
            logic [N/2-1:0] left;
            always_ff @(posedge clk) left <= carries[N-1:N/2];

            genvar i;
            for (i = 0; i < N / 2; i = i + 1) begin : g_pair
                ei_add_carry #(.WIDTH(WIDTH)) add (
                    .clk(clk),
                    .a(terms[2*i*WIDTH+:WIDTH]),
                    .b(terms[(2*i+1)*WIDTH+:WIDTH]),
                    .carry(carries[i]),
                    .sum(halves[i*(WIDTH+1)+:WIDTH+1])
                );
            end
            ei_add_tree #(.N(N / 2), .WIDTH(WIDTH + 1)) rest (
                .clk(clk), .terms(halves), .carries(left), .sum(sum), .carry(carry)
            );
        end
    endgenerate
endmodule
