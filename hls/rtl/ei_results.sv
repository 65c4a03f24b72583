// The results on their way out: a queue of ROOM entries and an output register. What comes always has room: the
// sequencer takes no beat without. Latency: 2 cycles.
module ei_results #(
    parameter integer WIDTH = 84,
    parameter integer ROOM = 16  // a power of two
) (
    input  logic clk,
    input  logic rst,
    input  logic result,
    input  logic last_result,
    input  logic [WIDTH-1:0] totals,
    output logic result_gone,  // a place of the queue is free since the last cycle

    output logic y_valid,
    input  logic y_ready,
    output logic [WIDTH-1:0] y_data,
    output logic y_last
);
    localparam integer PLACE = $clog2(ROOM);
    (* ram_style = "distributed" *) logic [WIDTH:0] queue[0:ROOM-1];
    logic [PLACE-1:0] in, out;
    logic [PLACE:0] n_waiting;
    logic waiting;  // n_waiting is not 0
    wire move = waiting && (!y_valid || y_ready);

    always_ff @(posedge clk) if (result) queue[in] <= {last_result, totals};

    always_ff @(posedge clk) if (move) {y_last, y_data} <= queue[out];

    always_ff @(posedge clk)
        if (rst) begin
            in <= 0;
            out <= 0;
            n_waiting <= 0;
            waiting <= 1'b0;
            y_valid <= 1'b0;
            result_gone <= 1'b0;
        end else begin
            if (result) in <= in + 1;
            if (move) out <= out + 1;
            if (result && !move) begin
                n_waiting <= n_waiting + 1;
                waiting <= 1'b1;
            end else if (move && !result) begin
                n_waiting <= n_waiting - 1;
                waiting <= n_waiting != 1;
            end
            if (move) y_valid <= 1'b1;
            else if (y_ready) y_valid <= 1'b0;
            result_gone <= move;
        end
endmodule
