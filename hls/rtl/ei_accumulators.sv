// Adds the sums of a step to those of the steps before, tile after tile. The first step begins at 0; the last one also
// gives its totals out. A beat's sums come LATENCY cycles after the beat, its total one cycle after its sums.
//
// The totals of all tiles lie in a block RAM: read 2 cycles before the sums come, written 1 cycle after. So a tile may
// come again 4 cycles after its last beat at the earliest; the sequencer sees to it.
module ei_accumulators #(
    parameter integer ROWS = 4,
    parameter integer SUM_BITS = 15,
    parameter integer ACC_BITS = 21,
    parameter integer LATENCY = 6,  // 2 or more
    parameter integer MAX_TILES = 4096,
    parameter integer TILE = (MAX_TILES > 1) ? $clog2(MAX_TILES) : 1
) (
    input  logic clk,
    input  logic rst,
    input  logic beat,
    input  logic [TILE-1:0] tile,
    input  logic first_step,
    input  logic last_step,
    input  logic last_tile,
    input  logic [ROWS*SUM_BITS-1:0] sums,

    output logic result,  // the totals are results,
    output logic last_result,  // those of the last tile
    output logic [ROWS*ACC_BITS-1:0] totals
);
    // What a beat was, for as long as it is on its way: [i] is i + 1 cycles old.
    localparam integer AGES = LATENCY + 1;
    logic [TILE-1:0] tiles[0:AGES-1];
    logic [AGES-1:0] beats, results, last_results;
    logic [LATENCY-2:0] firsts;

    integer i;
    always_ff @(posedge clk) begin
        tiles[0] <= tile;
        for (i = 1; i < AGES; i = i + 1) tiles[i] <= tiles[i-1];
        beats <= rst ? 0 : {beats[AGES-2:0], beat};  // all of them: a reset may be as short as a cycle
        results <= rst ? 0 : {results[AGES-2:0], beat && last_step};
        last_results <= {last_results[AGES-2:0], last_tile};
    end
    assign result = results[AGES-1];
    assign last_result = last_results[AGES-1];

    // The first step reads 0.
    wire [TILE-1:0] read_tile;
    wire first = firsts[LATENCY-2];
    generate
        if (LATENCY == 2) begin : g_at_once
            assign read_tile = tile;
            always_ff @(posedge clk) firsts <= first_step;
        end else begin : g_later
            assign read_tile = tiles[LATENCY-3];
            always_ff @(posedge clk) firsts <= {firsts[LATENCY-3:0], first_step};
        end
    endgenerate

    logic [ROWS*ACC_BITS-1:0] earlier;
    ei_block_ram #(.WIDTH(ROWS * ACC_BITS), .DEPTH(MAX_TILES)) ram (
        .clk(clk),
        .write(beats[AGES-1]),
        .write_address(tiles[AGES-1]),
        .write_data(totals),
        .read_address(read_tile),
        .clear(first),
        .read_data(earlier)
    );

    generate
        genvar r;
        for (r = 0; r < ROWS; r = r + 1) begin : g_row
            ei_accumulate #(.SUM_BITS(SUM_BITS), .ACC_BITS(ACC_BITS)) accumulate (
                .clk(clk),
                .sum(sums[r*SUM_BITS+:SUM_BITS]),
                .earlier(earlier[r*ACC_BITS+:ACC_BITS]),
                .total(totals[r*ACC_BITS+:ACC_BITS])
            );
        end
    endgenerate

`ifdef VERILATOR
    // A tile that is read is none of those that are still to be written. Before a reset registers have any values.
    wire [AGES:0] reads = {beats, beat};
    integer age;
    always_ff @(posedge clk)
        if (!rst && reads[LATENCY-2])
            for (age = LATENCY - 2; age < AGES; age = age + 1)
                assert (!(beats[age] && tiles[age] == read_tile))
                else $fatal(1, "tile %0d is read before its total is written", read_tile);
`endif
endmodule
