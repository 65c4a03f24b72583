// A table of 32 entries in LUT RAM that ROWS rows read at once, seven of them in a RAM of their own. Latency: 1 cycle.
module ei_lut_table #(
    parameter integer ROWS = 14,
    parameter integer WIDTH = 10
) (
    input  logic clk,
    input  logic write,
    input  logic [4:0] write_address,
    input  logic [WIDTH-1:0] write_data,
    input  logic [5*ROWS-1:0] read_address,
    output logic [WIDTH*ROWS-1:0] read_data
);
    // Five or six rows that are left over share a RAM too; fewer are cheaper with one each.
    localparam integer GROUPS = (ROWS + 2) / 7;
    localparam integer GROUPED = (GROUPS * 7 < ROWS) ? GROUPS * 7 : ROWS;

    generate
        genvar i;
        for (i = 0; i < GROUPED; i = i + 7) begin : g_seven
            localparam integer HERE = (GROUPED - i < 7) ? GROUPED - i : 7;
            logic [5*7-1:0] address;
            /* verilator lint_off UNUSEDSIGNAL */
            logic [WIDTH*7-1:0] data;  // of five rows or more
            /* verilator lint_on UNUSEDSIGNAL */
            assign address = 35'(read_address[5*i+:5*HERE]);
            assign read_data[WIDTH*i+:WIDTH*HERE] = data[WIDTH*HERE-1:0];
            ei_lut_ram7 #(.WIDTH(WIDTH)) ram (
                .clk(clk),
                .write(write),
                .write_address(write_address),
                .write_data(write_data),
                .read_address(address),
                .read_data(data)
            );
        end
        for (i = GROUPED; i < ROWS; i = i + 1) begin : g_one
            ei_lut_ram #(.WIDTH(WIDTH)) ram (
                .clk(clk),
                .write(write),
                .write_address(write_address),
                .write_data(write_data),
                .read_address(read_address[5*i+:5]),
                .read_data(read_data[WIDTH*i+:WIDTH])
            );
        end
    endgenerate
endmodule
