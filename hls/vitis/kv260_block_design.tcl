# NOT RUN: written from the manuals of Vivado 2023.2 (UG835, UG994). Its authors had no licence at hand; expect to correct it.
#
#   vivado -mode batch -source kv260_block_design.tcl          # after run_hls.tcl, in the same folder
#
# A KV260 with ei_linear_axi: weights by HP0..HP3, one 128-bit port each; activations, scales and results by HPC0; registers
# at 0xA0000000. One clock of 250 MHz. Gives build_vivado/ei_linear.xsa with the bitstream.
#
# A host compares the register `geometry` with "hash" of manifest.json before it trusts a result, and `status` after each
# run: 1 done, 2 wrong geometry, 3 too large. A clock that runs slower than this file says shows in the time of a product.
set ip_folder [file normalize build_hls/ei_linear_axi/solution/impl/ip]
create_project -force ei_linear build_vivado -part xck26-sfvc784-2LV-c
set_property board_part xilinx.com:kv260_som:part0:1.4 [current_project]
set_property ip_repo_paths $ip_folder [current_project]
update_ip_catalog

create_bd_design design_1
set ps [create_bd_cell -type ip -vlnv xilinx.com:ip:zynq_ultra_ps_e ps]
apply_bd_automation -rule xilinx.com:bd_rule:zynq_ultra_ps_e -config {apply_board_preset 1} $ps
# S_AXI_GP0 is HPC0; GP2..GP5 are HP0..HP3.
set_property -dict [list \
    CONFIG.PSU__USE__M_AXI_GP0 1 CONFIG.PSU__USE__M_AXI_GP1 0 CONFIG.PSU__USE__M_AXI_GP2 0 \
    CONFIG.PSU__USE__S_AXI_GP0 1 CONFIG.PSU__SAXIGP0__DATA_WIDTH 128 \
    CONFIG.PSU__USE__S_AXI_GP2 1 CONFIG.PSU__SAXIGP2__DATA_WIDTH 128 \
    CONFIG.PSU__USE__S_AXI_GP3 1 CONFIG.PSU__SAXIGP3__DATA_WIDTH 128 \
    CONFIG.PSU__USE__S_AXI_GP4 1 CONFIG.PSU__SAXIGP4__DATA_WIDTH 128 \
    CONFIG.PSU__USE__S_AXI_GP5 1 CONFIG.PSU__SAXIGP5__DATA_WIDTH 128 \
    CONFIG.PSU__CRL_APB__PL0_REF_CTRL__FREQMHZ 250 CONFIG.PSU__USE__IRQ0 1] $ps
set linear [create_bd_cell -type ip -vlnv edgeinfer:hls:ei_linear_axi:1.0 linear]
set reset [create_bd_cell -type ip -vlnv xilinx.com:ip:proc_sys_reset reset]
set clock [get_bd_pins ps/pl_clk0]
connect_bd_net $clock [get_bd_pins reset/slowest_sync_clk] [get_bd_pins linear/ap_clk] \
    [get_bd_pins ps/maxihpm0_fpd_aclk] [get_bd_pins ps/saxihpc0_fpd_aclk] [get_bd_pins ps/saxihp0_fpd_aclk] \
    [get_bd_pins ps/saxihp1_fpd_aclk] [get_bd_pins ps/saxihp2_fpd_aclk] [get_bd_pins ps/saxihp3_fpd_aclk]
connect_bd_net [get_bd_pins ps/pl_resetn0] [get_bd_pins reset/ext_reset_in]
connect_bd_net [get_bd_pins reset/peripheral_aresetn] [get_bd_pins linear/ap_rst_n]
connect_bd_net [get_bd_pins linear/interrupt] [get_bd_pins ps/pl_ps_irq0]

# A SmartConnect from each master, or two of them, to a port of the processor: widths and protocols differ.
proc joined {name masters slave} {
    set joint [create_bd_cell -type ip -vlnv xilinx.com:ip:smartconnect $name]
    set_property -dict [list CONFIG.NUM_SI [llength $masters] CONFIG.NUM_MI 1] $joint
    connect_bd_net [get_bd_pins ps/pl_clk0] [get_bd_pins $name/aclk]
    connect_bd_net [get_bd_pins reset/interconnect_aresetn] [get_bd_pins $name/aresetn]
    set i 0
    foreach master $masters {
        connect_bd_intf_net [get_bd_intf_pins $master] [get_bd_intf_pins $name/[format S%02d_AXI $i]]
        incr i
    }
    connect_bd_intf_net [get_bd_intf_pins $name/M00_AXI] [get_bd_intf_pins $slave]
}
joined registers {ps/M_AXI_HPM0_FPD} linear/s_axi_control
foreach port {0 1 2 3} {
    joined weights$port [list linear/m_axi_weights$port] ps/S_AXI_HP${port}_FPD
}
joined floats {linear/m_axi_activations linear/m_axi_scales} ps/S_AXI_HPC0_FPD
assign_bd_address
set_property offset 0xA0000000 [get_bd_addr_segs {ps/Data/SEG_linear_Reg}]
validate_bd_design
save_bd_design

add_files -norecurse [make_wrapper -files [get_files design_1.bd] -top]
set_property top design_1_wrapper [current_fileset]
launch_runs impl_1 -to_step write_bitstream -jobs 4
wait_on_run impl_1
open_run impl_1
report_timing_summary -file build_vivado/timing.txt
report_utilization -hierarchical -file build_vivado/utilization.txt
write_hw_platform -fixed -include_bit -force build_vivado/ei_linear.xsa
