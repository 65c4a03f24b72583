// What ei_open_base3 has for each vector: activations, terms, adders, accumulator.
module ei_open_vector (
        input wire clk,
        input wire clear,
        input wire first,
        input wire [159:0] codes,
        input wire write,
        input wire [2:0] write_part,
        input wire [8:0] write_address,
        input wire [127:0] write_data,
        input wire [8:0] read_address,
        output reg signed [31:0] sum
);
    wire [639:0] x, terms;
    wire [79:0] minus;
    reg signed [8:0] level1[0:39];
    wire signed [9:0] level2[0:19];
    reg signed [10:0] level3[0:9];
    wire signed [11:0] level4[0:4];
    reg signed [12:0] level5[0:2];
    reg signed [14:0] total;
    reg [3:0] counts1[0:9];
    reg [5:0] counts2[0:2];
    reg [6:0] n_minus;
    reg [3:0] n;
    integer g, h;
    genvar i;
    generate
        for (i = 0; i < 5; i = i + 1) begin : g_activations
            (* ram_style = "block" *) reg [127:0] memory[0:511];
            reg [127:0] read;
            always @(posedge clk) begin
                if (write && write_part == i) memory[write_address] <= write_data;
                read <= memory[read_address];
            end
            assign x[128*i+:128] = read;
        end
        for (i = 0; i < 80; i = i + 1) begin : g_term
            assign terms[8*i+:8] = {8{~codes[2*i]}} & (x[8*i+:8] ^ {8{~codes[2*i+1]}});
            assign minus[i] = ~codes[2*i] & ~codes[2*i+1];
        end
        for (i = 0; i < 40; i = i + 1) begin : g_level1
            always @(posedge clk) level1[i] <= $signed(terms[16*i+:8]) + $signed(terms[16*i+8+:8]);
        end
        for (i = 0; i < 20; i = i + 1) begin : g_level2
            assign level2[i] = level1[2*i] + level1[2*i+1];
        end
        for (i = 0; i < 10; i = i + 1) begin : g_level3
            always @(posedge clk) level3[i] <= level2[2*i] + level2[2*i+1];
        end
        for (i = 0; i < 5; i = i + 1) begin : g_level4
            assign level4[i] = level3[2*i] + level3[2*i+1];
        end
        for (i = 0; i < 2; i = i + 1) begin : g_level5
            always @(posedge clk) level5[i] <= level4[2*i] + level4[2*i+1];
        end
    endgenerate

    always @(posedge clk) begin
        level5[2] <= level4[4];
        for (g = 0; g < 10; g = g + 1) begin
            n = 0;
            for (h = 0; h < 8; h = h + 1) n = n + minus[8*g+h];
            counts1[g] <= n;
        end
        counts2[0] <= (counts1[0] + counts1[1]) + (counts1[2] + counts1[3]);
        counts2[1] <= (counts1[4] + counts1[5]) + (counts1[6] + counts1[7]);
        counts2[2] <= counts1[8] + counts1[9];
        n_minus <= counts2[0] + counts2[1] + counts2[2];
        total <= level5[0] + level5[1] + level5[2] + $signed({1'b0, n_minus});
        sum <= clear ? 0 : (first ? 0 : sum) + total;
    end
endmodule
