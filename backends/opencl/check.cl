// What every device must be able to do: see check_device.

kernel void dot_products(global const uint* codes, global const uint* numbers, global int* out) {
    size_t i = get_global_id(0);
    out[i] = DOT4(codes[i], numbers[i], 0);
}
