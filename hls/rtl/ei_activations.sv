// The activations of a product. They are taken as fast as they come, into a block RAM of a whole product. The beats of
// the next step wait in a chain of registers (`loaded`) while those of this step stand at `x`; `take` moves them on.
// Latency: 4 cycles from the beat that completes a step to `loaded`; where all its beats are there, TABLES + 3 cycles from
// the `take` of the step before.
module ei_activations #(
    parameter integer BEAT_BITS = 40,
    parameter integer TABLES = 16,
    parameter integer MAX_STEPS = 128
) (
    input  logic clk,
    input  logic rst,
    input  logic start,
    input  logic [$clog2(MAX_STEPS+1)-1:0] n_steps,

    input  logic x_valid,
    output logic x_ready,
    input  logic [BEAT_BITS-1:0] x_data,

    output logic loaded,
    input  logic take,
    output logic [TABLES*BEAT_BITS-1:0] x  // beat t of the step from bit t * BEAT_BITS on
);
    localparam integer DEPTH = MAX_STEPS * TABLES;
    localparam integer ADDRESS = (DEPTH > 1) ? $clog2(DEPTH) : 1;
    localparam integer COUNT = $clog2(DEPTH + 1);
    localparam integer WITHIN = (TABLES > 1) ? $clog2(TABLES) : 1;  // bits of a beat's place in its step
    localparam logic [WITHIN-1:0] LAST_BEAT = WITHIN'(TABLES - 1);

    // Into the RAM.
    logic [COUNT-1:0] n_missing, n_written;
    logic one_is_missing;  // n_missing is 1
    wire accept = x_valid && x_ready;

    always_ff @(posedge clk)
        if (rst) x_ready <= 1'b0;
        else if (start) x_ready <= 1'b1;
        else if (accept && one_is_missing) x_ready <= 1'b0;

    always_ff @(posedge clk)
        if (start) begin
            n_missing <= COUNT'(n_steps) * COUNT'(TABLES);
            one_is_missing <= n_steps == 1 && TABLES == 1;
        end else if (accept) begin
            n_missing <= n_missing - 1;
            one_is_missing <= n_missing == 2;
        end

    always_ff @(posedge clk)
        if (rst || start) n_written <= 0;  // a reset in a product leaves nothing to read
        else if (accept) n_written <= n_written + 1;

    // Out of the RAM, the beats of one step, and then not before `take`.
    logic [COUNT-1:0] n_read, n_unread;
    logic unread;  // n_unread is not 0
    logic [WITHIN-1:0] place;
    logic complete;
    wire read = unread && !complete;
    wire read_last = read && place == LAST_BEAT;

    always_ff @(posedge clk)
        if (rst || start) begin
            n_read <= 0;
            place <= 0;
            complete <= 1'b0;
        end else begin
            if (read) begin
                n_read <= n_read + 1;
                place <= read_last ? 0 : place + 1;
            end
            if (read_last) complete <= 1'b1;
            else if (take) complete <= 1'b0;
        end

    always_ff @(posedge clk)
        if (rst || start) begin
            n_unread <= 0;
            unread <= 1'b0;
        end else if (accept && !read) begin
            n_unread <= n_unread + 1;
            unread <= 1'b1;
        end else if (read && !accept) begin
            n_unread <= n_unread - 1;
            unread <= n_unread != 1;
        end

    logic [BEAT_BITS-1:0] beat;
    ei_block_ram #(.WIDTH(BEAT_BITS), .DEPTH(DEPTH)) ram (
        .clk(clk),
        .write(accept),
        .write_address(n_written[ADDRESS-1:0]),
        .write_data(x_data),
        .read_address(n_read[ADDRESS-1:0]),
        .clear(1'b0),
        .read_data(beat)
    );

    // Into the chain: `beat` is valid two cycles after its address.
    logic reading, shift, reading_last, shift_last;
    logic [TABLES*BEAT_BITS-1:0] next;

    always_ff @(posedge clk)
        if (rst) begin
            {reading, shift, reading_last, shift_last} <= 4'b0;
            loaded <= 1'b0;
        end else begin
            reading <= read;
            shift <= reading;
            reading_last <= read_last;
            shift_last <= reading_last;
            if (shift_last) loaded <= 1'b1;
            else if (take) loaded <= 1'b0;
        end

    generate
        if (TABLES == 1) begin : g_one
            always_ff @(posedge clk) if (shift) next <= beat;
        end else begin : g_chain
            always_ff @(posedge clk) if (shift) next <= {beat, next[TABLES*BEAT_BITS-1:BEAT_BITS]};
        end
    endgenerate

    always_ff @(posedge clk) if (take) x <= next;
endmodule
