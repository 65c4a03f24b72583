// A product by the netlist of an engine: reads the activations and the stream of weights as files of bytes, and writes
// the sums as int32, lowest byte first. Cycles are counted from the one of `start` to that of the last result.
//
// +x=FILE +w=FILE +y=FILE +steps=N +tiles=N, and +stalls=SEED for random pauses of all three streams.
`timescale 1ns / 1ps

module bench;
    localparam X_BYTES = `X_BITS / 8, W_BYTES = `W_BITS / 8;

    reg clk = 0, rst = 1, start = 0;
    reg x_valid = 0, w_valid = 0, y_ready = 0;
    reg [`X_BITS-1:0] x_data;
    reg [`W_BITS-1:0] w_data;
    wire busy, x_ready, w_ready, y_valid;
    wire [`ROWS*`ACC_BITS-1:0] y_data;
    reg signed [31:0] sum;
    reg [8*1024-1:0] name;
    integer x_file, w_file, y_file, n_steps, n_tiles, stalls, n_x, n_w, n_y, row, n_read, n_cycles, started;

    `TOP engine (
        .clk(clk), .rst(rst), .start(start), .n_steps(n_steps[`STEP_BITS-1:0]), .n_tiles(n_tiles[`TILE_BITS-1:0]),
        .busy(busy), .x_valid(x_valid), .x_ready(x_ready), .x_data(x_data), .w_valid(w_valid), .w_ready(w_ready),
        .w_data(w_data), .y_valid(y_valid), .y_ready(y_ready), .y_data(y_data)
    );

    always #2 clk = ~clk;

    function integer pauses(input integer unused);
        begin
            pauses = 0;
            if (stalls != 0) pauses = $random(stalls) % 4 == 0;
        end
    endfunction

    task fail(input [8*40-1:0] why);
        begin
            $display("failed: %0s, cycle %0d, x %0d, w %0d, y %0d", why, n_cycles, n_x, n_w, n_y);
            $finish;
        end
    endtask

    // The next beat of a file, its first byte lowest.
    task next_x;
        integer i;
        for (i = 0; i < X_BYTES; i = i + 1) x_data[8*i+:8] <= $fgetc(x_file);
    endtask

    task next_w;
        integer i;
        for (i = 0; i < W_BYTES; i = i + 1) w_data[8*i+:8] <= $fgetc(w_file);
    endtask

    initial begin
        n_read = $value$plusargs("steps=%d", n_steps) + $value$plusargs("tiles=%d", n_tiles);
        if (!$value$plusargs("stalls=%d", stalls)) stalls = 0;
        if (!$value$plusargs("x=%s", name)) name = "";
        x_file = $fopen(name, "rb");
        if (!$value$plusargs("w=%s", name)) name = "";
        w_file = $fopen(name, "rb");
        if (!$value$plusargs("y=%s", name)) name = "";
        y_file = $fopen(name, "wb");
        n_x = 0;
        n_w = 0;
        n_y = 0;
        n_cycles = 0;
        repeat (4) @(posedge clk);
        rst <= 0;
        repeat (2) @(posedge clk);
        start <= 1;
        @(posedge clk) start <= 0;
    end

    always @(posedge clk)
        if (!rst) begin
            n_cycles <= n_cycles + 1;
            if (start) started <= n_cycles;
            if (^{x_ready, w_ready, y_valid, busy} === 1'bx) fail("a control signal is x");
            if (n_cycles > 4000 * (n_steps + 2) + 16 * n_steps * n_tiles) fail("no end");
        end

    always @(posedge clk)
        if (!rst && (!x_valid || x_ready)) begin
            x_valid <= 0;
            if (n_x < n_steps * `TABLES && !pauses(0)) begin
                x_valid <= 1;
                next_x;
                n_x <= n_x + 1;
            end
        end

    always @(posedge clk)
        if (!rst && (!w_valid || w_ready)) begin
            w_valid <= 0;
            if (n_w < n_steps * n_tiles && !pauses(0)) begin
                w_valid <= 1;
                next_w;
                n_w <= n_w + 1;
            end
        end

    always @(posedge clk) begin
        if (!rst) y_ready <= !pauses(0);
        if (!rst && y_valid && y_ready) begin
            if (^y_data === 1'bx) fail("a sum is x");
            for (row = 0; row < `ROWS; row = row + 1) begin
                sum = $signed(y_data[row*`ACC_BITS+:`ACC_BITS]);
                $fwrite(y_file, "%c%c%c%c", sum[7:0], sum[15:8], sum[23:16], sum[31:24]);
            end
            n_y <= n_y + 1;
            if (n_y + 1 == n_tiles) begin
                $fclose(y_file);
                $display("done after %0d cycles", n_cycles - started);
                $finish;
            end
        end
    end
endmodule
