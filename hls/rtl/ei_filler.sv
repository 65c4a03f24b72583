// Fills the tables of a step: walks over their entries in an order in which each differs by one activation from the one
// before (ei_walk_rom_g*), and tells the adders of all tables (ei_entry) what to add and the tables where to write.
//
// When the activations of a step are `loaded`, it takes them, and waits with the first entry until the bank of the
// tables is free (`bank_free`); from then on it writes an entry each cycle. Latency: the first entry is written 2 cycles
// after `bank_free`, the last one 3^G + 1 cycles after it, together with `filled`. A fill follows another one after
// 3^G + 2 cycles.
module ei_filler #(
    parameter integer G = 5,
    parameter integer ADDRESS = 8,
    parameter integer SELECT = 2
) (
    input  logic clk,
    input  logic rst,
    input  logic loaded,
    output logic take,
    input  logic bank_free,
    output logic filled,

    output logic prepare,  // the activation to add is selected
    output logic [SELECT-1:0] select,
    output logic add,  // and added; the sum is cleared where this is low
    output logic uses_last,
    output logic positive,
    output logic negative,
    output logic write,  // the sum is that of entry `entry`
    output logic [ADDRESS-1:0] entry
);
    localparam logic [ADDRESS-1:0] LAST_INDEX = ADDRESS'(3 ** G - 1);
    localparam integer WORD = ADDRESS + SELECT + 3;

    // Prepare the first entry, wait for the bank, run.
    logic preparing, waiting, running;
    logic next_is_last, is_last;  // the entry to be selected, to be added
    wire go = waiting && bank_free;
    assign add = running;

    always_ff @(posedge clk)
        if (rst) begin
            {take, preparing, waiting, running} <= 4'b0;
            {prepare, filled} <= 2'b0;
        end else begin
            take <= loaded && !take && (running ? prepare && next_is_last : !preparing && !waiting);
            preparing <= take;
            waiting <= preparing || (waiting && !bank_free);
            running <= go || (running && !is_last);
            prepare <= take || go || (running && !is_last && !next_is_last);
            filled <= running && is_last;
        end

    // The words of the walk, round and round. Where it stands still, the first word waits to be selected and the next
    // ones behind it; the three cycles after a reset bring them there.
    logic [2:0] warming;
    logic [ADDRESS-1:0] index;
    logic [WORD-1:0] read_word, word;
    wire enable = prepare || warming[0];

    always_ff @(posedge clk)
        if (rst) begin
            warming <= 3'b111;
            index <= 0;
        end else begin
            warming <= warming >> 1;
            if (enable) index <= (index == LAST_INDEX) ? 0 : index + 1;
        end

    generate
        if (G == 5) begin : g_base3
            ei_walk_rom_g5 rom (.clk(clk), .enable(enable), .index(index), .word(read_word));
        end else begin : g_g3x5
            ei_walk_rom_g3 rom (.clk(clk), .enable(enable), .index(index), .word(read_word));
        end
    endgenerate

    // All tables read the word: behind a register that can lie among them.
    always_ff @(posedge clk) if (enable) word <= read_word;

    // From a word to the sum that is written: selected, added, written.
    logic [ADDRESS-1:0] entry_selected;
    assign select = word[ADDRESS+:SELECT];
    assign next_is_last = word[WORD-1];

    always_ff @(posedge clk)
        if (prepare) begin
            entry_selected <= word[ADDRESS-1:0];
            positive <= word[ADDRESS+SELECT];
            negative <= !word[ADDRESS+SELECT];
            uses_last <= word[ADDRESS+SELECT+1];
            is_last <= next_is_last;
        end

    always_ff @(posedge clk) begin
        entry <= entry_selected;
        write <= running && !rst;
    end
endmodule
