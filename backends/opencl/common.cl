// What other kernels use; it stands in front of their files. Most is done by the work-items of a group together.
//
// Macros: GROUP, work-items of a group, a power of two.

// Sum or maximum over a group, for all of it. parts: GROUP floats of local memory.
float sum_of_group(float value, local float* parts) {
    int item = get_local_id(0);
    parts[item] = value;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int half_size = GROUP / 2; half_size > 0; half_size /= 2) {
        if (item < half_size) parts[item] += parts[item + half_size];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    float sum = parts[0];
    barrier(CLK_LOCAL_MEM_FENCE);
    return sum;
}

float maximum_of_group(float value, local float* parts) {
    int item = get_local_id(0);
    parts[item] = value;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int half_size = GROUP / 2; half_size > 0; half_size /= 2) {
        if (item < half_size) parts[item] = fmax(parts[item], parts[item + half_size]);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    float maximum = parts[0];
    barrier(CLK_LOCAL_MEM_FENCE);
    return maximum;
}

float capped(float x, float cap) { return cap == 0 ? x : cap * tanh(x / cap); }
