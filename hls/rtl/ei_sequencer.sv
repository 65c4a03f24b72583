// Takes the beats of weights: n_tiles beats a step, as soon as the tables of the step are filled. Latency: none.
//
// There are BANKS sets of tables. Steps fill and read them in turn; n_full counts those that are filled and not yet
// read to the end. The beats of the last step give results, and are taken only while ei_results has room for them.
module ei_sequencer #(
    parameter integer BANKS = 2,
    parameter integer MAX_STEPS = 128,
    parameter integer MAX_TILES = 4096,
    parameter integer ROOM = 16,  // results that ei_results holds, a power of two
    parameter integer TILE = (MAX_TILES > 1) ? $clog2(MAX_TILES) : 1
) (
    input  logic clk,
    input  logic rst,
    input  logic start,
    input  logic [$clog2(MAX_STEPS+1)-1:0] n_steps,
    input  logic [$clog2(MAX_TILES+1)-1:0] n_tiles,

    input  logic filled,  // the tables of one more step are ready from the next cycle on
    output logic bank_free,  // the tables of the next step may be written
    input  logic result_gone,

    input  logic w_valid,
    output logic w_ready,

    output logic beat,  // a beat is taken, of this step and tile:
    output logic bank,
    output logic [TILE-1:0] tile,
    output logic first_step,
    output logic last_step,
    output logic last_tile
);
    localparam integer STEPS = $clog2(MAX_STEPS + 1);
    localparam integer TILES = $clog2(MAX_TILES + 1);
    localparam integer USED = $clog2(ROOM) + 1;

    logic [1:0] n_full;
    logic open;  // tables are full, and no step pauses
    logic [2:0] pause;
    logic [USED-1:0] n_used;  // room for results that is taken, in the last step alone; the highest bit says all
    assign bank_free = !n_full[BANKS-1];
    assign w_ready = open && !n_used[USED-1];
    assign beat = w_valid && w_ready;
    wire step_ends = beat && last_tile;

    always_ff @(posedge clk)
        if (rst) n_full <= 0;
        else if (filled && !step_ends) n_full <= n_full + 1;
        else if (!filled && step_ends) n_full <= n_full - 1;

    generate
        if (BANKS == 1) begin : g_one_bank
            assign bank = 1'b0;
        end else begin : g_two_banks
            always_ff @(posedge clk)
                if (rst || start) bank <= 1'b0;
                else if (step_ends) bank <= !bank;
        end
    endgenerate

    // A sum is read 4 cycles after it was written at the earliest (ei_accumulators): with fewer tiles the steps pause.
    logic few_tiles;
    always_ff @(posedge clk)
        if (rst) pause <= 3'b0;
        else if (step_ends && few_tiles) pause <= 3'b111;
        else pause <= pause >> 1;

    always_ff @(posedge clk)
        if (rst) open <= 1'b0;
        else if (step_ends) open <= !few_tiles && (filled || n_full[1]);
        else open <= !pause[1] && (filled || n_full != 0);

    logic [TILES-1:0] tile_before_last;  // n_tiles - 2; one tile has none
    logic one_tile;
    always_ff @(posedge clk)
        if (start) begin
            tile_before_last <= TILES'(32'(n_tiles) - 2);
            one_tile <= n_tiles == 1;
            few_tiles <= 32'(n_tiles) < 4;
            last_tile <= n_tiles == 1;
            tile <= 0;
        end else if (beat) begin
            last_tile <= last_tile ? one_tile : TILES'(tile) == tile_before_last;
            tile <= last_tile ? 0 : tile + 1;
        end

    logic [STEPS-1:0] n_steps_left;
    always_ff @(posedge clk)
        if (start) begin
            n_steps_left <= n_steps;
            first_step <= 1'b1;
            last_step <= n_steps == 1;
        end else if (step_ends) begin
            n_steps_left <= n_steps_left - 1;
            first_step <= 1'b0;
            last_step <= 32'(n_steps_left) == 2;
        end

    wire room_taken = beat && last_step;
    always_ff @(posedge clk)
        if (rst) n_used <= 0;
        else if (room_taken && !result_gone) n_used <= n_used + 1;
        else if (!room_taken && result_gone) n_used <= n_used - 1;
endmodule
