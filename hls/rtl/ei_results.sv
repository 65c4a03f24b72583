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
    output logic result_gone,  // a place of the queue is free again

    output logic y_valid,
    input  logic y_ready,
    output logic [WIDTH-1:0] y_data,
    output logic y_last
);
    localparam integer PLACE = $clog2(ROOM);
    (* ram_style = "distributed" *) logic [WIDTH:0] queue[0:ROOM-1];
    logic [PLACE:0] n_in, n_out;
    assign result_gone = n_in != n_out && (!y_valid || y_ready);

    always_ff @(posedge clk) if (result) queue[n_in[PLACE-1:0]] <= {last_result, totals};

    always_ff @(posedge clk) if (result_gone) {y_last, y_data} <= queue[n_out[PLACE-1:0]];

    always_ff @(posedge clk)
        if (rst) begin
            n_in <= 0;
            n_out <= 0;
            y_valid <= 1'b0;
        end else begin
            if (result) n_in <= n_in + 1;
            if (result_gone) n_out <= n_out + 1;
            if (result_gone) y_valid <= 1'b1;
            else if (y_ready) y_valid <= 1'b0;
        end
endmodule
