// An engine behind registers, for routing on a device with fewer pins than it has ports: its inputs are shifted in, its
// outputs are folded into one bit.
module harness (
    input wire clk,
    input wire in,
    output wire out
);
    localparam IN_BITS = 6 + `STEP_BITS + `TILE_BITS + `X_BITS + `W_BITS;
    localparam OUT_BITS = 4 + `ROWS * `ACC_BITS;
    reg [IN_BITS-1:0] inputs;
    reg [OUT_BITS-1:0] folded;
    wire [OUT_BITS-1:0] outputs;
    wire rst, start, x_valid, w_valid, y_ready, spare;
    wire [`STEP_BITS-1:0] n_steps;
    wire [`TILE_BITS-1:0] n_tiles;
    wire [`X_BITS-1:0] x_data;
    wire [`W_BITS-1:0] w_data;

    assign {rst, start, x_valid, w_valid, y_ready, spare, n_steps, n_tiles, x_data, w_data} = inputs;
    assign out = folded[OUT_BITS-1];

    `TOP #(
        .ROWS(`ROWS),
        .TABLES(`TABLES),
        .ACC_BITS(`ACC_BITS),
        .MAX_STEPS(`MAX_STEPS),
        .MAX_TILES(`MAX_TILES)
    ) engine (
        .clk(clk),
        .rst(rst),
        .start(start),
        .n_steps(n_steps),
        .n_tiles(n_tiles),
        .busy(outputs[0]),
        .x_valid(x_valid),
        .x_ready(outputs[1]),
        .x_data(x_data),
        .w_valid(w_valid),
        .w_ready(outputs[2]),
        .w_data(w_data),
        .y_valid(outputs[3]),
        .y_ready(y_ready),
        .y_data(outputs[OUT_BITS-1:4])
    );

    always @(posedge clk) begin
        inputs <= {inputs[IN_BITS-2:0], in};
        folded <= outputs ^ {folded[OUT_BITS-2:0], 1'b0};
    end
endmodule
