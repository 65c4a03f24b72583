# NOT RUN: written from the manual of Vitis HLS 2023.2 (UG1399). Its authors had no licence at hand; expect to correct it.
#
#   EI_FOLDER=/path/of/an/exported/folder vitis_hls -f run_hls.tcl                    # all tops: C simulation, synthesis, IP
#   EI_FOLDER=... EI_TOPS="ei_linear_axi" EI_COSIM=1 vitis_hls -f run_hls.tcl
#
# EI_FOLDER is what `edgeinfer fpga export` wrote: its edgeinfer_model.h sets the engine, its golden vectors drive the
# test bench. Projects and reports go to build_hls/ in the current folder; IP to build_hls/TOP/solution/impl/ip.
set hls [file normalize [file join [file dirname [info script]] ..]]
set folder [file normalize $::env(EI_FOLDER)]
set tops [expr {[info exists ::env(EI_TOPS)] ? $::env(EI_TOPS) : "ei_tlmm_top ei_linear_axi ei_norm_top"}]
set part xck26-sfvc784-2LV-c
set period_ns 4.0  ;# 250 MHz
# The vendor's own ap_int.h, and floats as the C simulation rounds them: nothing is reordered or fused.
set cflags "-std=c++14 -I$hls/include -I$folder -DEI_VENDOR_TYPES -DEI_MODEL_HEADER"

file mkdir build_hls
cd build_hls
foreach top $tops {
    open_project -reset $top
    set_top $top
    add_files $hls/src/$top.cpp -cflags $cflags
    if {$top eq "ei_tlmm_top"} {
        add_files -tb $hls/tb/tb_tlmm.cpp -cflags $cflags
    }
    open_solution -reset solution -flow_target vivado
    set_part $part
    create_clock -period $period_ns -name default
    config_compile -unsafe_math_optimizations=false
    config_interface -m_axi_addr64=true -m_axi_alignment_byte_size 64 -m_axi_max_widen_bitwidth 128
    config_dataflow -default_channel fifo
    if {$top eq "ei_tlmm_top"} {
        csim_design -argv $folder
    }
    csynth_design
    if {$top eq "ei_tlmm_top" && [info exists ::env(EI_COSIM)]} {
        cosim_design -argv $folder
    }
    export_design -format ip_catalog -vendor edgeinfer -library hls -version 1.0
    close_project
}
exit
