// A total of a row: the earlier one plus a sum. Latency: 1 cycle.
module ei_accumulate #(
    parameter integer SUM_BITS = 15,
    parameter integer ACC_BITS = 21
) (
    input  logic clk,
    input  logic [SUM_BITS-1:0] sum,
    input  logic [ACC_BITS-1:0] earlier,
    output logic [ACC_BITS-1:0] total
);
    wire [ACC_BITS-1:0] wide = ACC_BITS'($signed(sum));
    always_ff @(posedge clk) total <= wide + earlier;
endmodule
