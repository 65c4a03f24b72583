// The five base-3 digits of a byte, two bits each: a table.
module ei_open_decoder (
        input wire [7:0] index,
        output wire [9:0] digits
);
    // Bit `bit` of digit `digit` of all 256 bytes.
    function [255:0] column(input integer digit, input integer which);
        integer i, j, rest, value;
        begin
            column = 0;
            for (i = 0; i < 256; i = i + 1) begin
                rest = i;
                value = 0;
                for (j = 0; j < 5; j = j + 1) begin
                    if (j == digit) value = rest % 3;
                    rest = rest / 3;
                end
                column[i] = (value >> which) & 1;
            end
        end
    endfunction

    localparam [255:0] D00 = column(0, 0), D01 = column(0, 1), D10 = column(1, 0), D11 = column(1, 1);
    localparam [255:0] D20 = column(2, 0), D21 = column(2, 1), D30 = column(3, 0), D31 = column(3, 1);
    localparam [255:0] D40 = column(4, 0), D41 = column(4, 1);
    assign digits = {D41[index], D40[index], D31[index], D30[index], D21[index], D20[index], D11[index], D10[index], D01[index], D00[index]};
endmodule
