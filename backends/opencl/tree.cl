// Draft trees that are chosen on the device, after common.cl.
//
// Macros: TOP, candidates of a row.

// Whether a candidate comes before another: the likelier, of equals the one with the smaller id.
int is_before(float value, int id, float other, int other_id) {
    return value > other || (value == other && id < other_id);
}

// The TOP most likely of the first n logits of each row (., stride), and their probabilities at temperature 1: rows of ids
// and probabilities (., TOP) from first_row on. names: the id of each logit, if has_names; else they are in order.
// Groups: (1, rows).
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void top_k(global const float* restrict logits,
                                                                     global int* restrict ids,
                                                                     global float* restrict probabilities,
                                                                     global const int* restrict names, int has_names,
                                                                     int n, int stride, int first_row) {
    local float parts[GROUP];
    local int places[GROUP];
    int item = get_local_id(0), row = get_group_id(1);
    global const float* own = logits + (size_t)row * stride;
    float best[TOP];
    int best_ids[TOP];
    for (int i = 0; i < TOP; i++) {
        best[i] = -INFINITY;
        best_ids[i] = n;
    }
    float largest = -INFINITY;
    for (int at = item; at < n; at += GROUP) {
        float value = own[at];
        int id = at;
        largest = fmax(largest, value);
        if (!is_before(value, id, best[TOP - 1], best_ids[TOP - 1])) continue;
        for (int i = 0; i < TOP; i++) {  // insert it, and go on with what it displaces
            if (is_before(value, id, best[i], best_ids[i])) {
                float displaced = best[i];
                int displaced_id = best_ids[i];
                best[i] = value;
                best_ids[i] = id;
                value = displaced;
                id = displaced_id;
            }
        }
    }
    largest = maximum_of_group(largest, parts);
    float total = 0;
    for (int at = item; at < n; at += GROUP) total += exp(own[at] - largest);
    total = sum_of_group(total, parts);
    for (int place = 0; place < TOP; place++) {
        parts[item] = best[0];
        places[item] = best_ids[0];
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int half_size = GROUP / 2; half_size > 0; half_size /= 2) {
            int other = item + half_size;
            if (item < half_size && is_before(parts[other], places[other], parts[item], places[item])) {
                parts[item] = parts[other];
                places[item] = places[other];
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        int chosen = places[0];
        if (item == 0) {
            int at = (first_row + row) * TOP + place;
            int id = min(chosen, n - 1);  // where logits are no numbers nothing is chosen
            ids[at] = has_names ? names[id] : id;
            probabilities[at] = exp(parts[0] - largest) / total;
        }
        if (chosen == best_ids[0]) {
            for (int i = 0; i + 1 < TOP; i++) {
                best[i] = best[i + 1];
                best_ids[i] = best_ids[i + 1];
            }
            best[TOP - 1] = -INFINITY;
            best_ids[TOP - 1] = n;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}

// The next level of a tree: of the candidates (., TOP) of the level before it, n_rows from first_row on, those `width`
// that are reached most often, by the product of the probabilities from the root on. Its nodes have indices from `first`
// on, those of the level before from `before` on; with `first` 0 they follow the one row that there is. Fills ids,
// parents, probabilities, path_probabilities and sees (n_nodes, n_nodes) for them. One item.
kernel void choose_level(global const int* restrict candidates, global const float* restrict candidate_probabilities,
                         global int* restrict ids, global int* restrict parents, global float* restrict probabilities,
                         global float* restrict path_probabilities, global uchar* restrict sees, int first_row,
                         int n_rows, int width, int before, int first, int n_nodes) {
    int n_taken[TOP];  // of each row, whose candidates come most likely first
    for (int row = 0; row < TOP; row++) n_taken[row] = 0;
    for (int node = first; node < first + width; node++) {
        int chosen = -1;
        float most = -1;
        for (int row = 0; row < n_rows; row++) {
            if (n_taken[row] == TOP) continue;
            float value = candidate_probabilities[(first_row + row) * TOP + n_taken[row]] *
                          (first ? path_probabilities[before + row] : 1);
            if (chosen < 0 || value > most) {
                chosen = row;
                most = value;
            }
        }
        int candidate = (first_row + chosen) * TOP + n_taken[chosen]++;
        int parent = first ? before + chosen : -1;
        ids[node] = candidates[candidate];
        parents[node] = parent;
        probabilities[node] = candidate_probabilities[candidate];
        path_probabilities[node] = most;
        for (int other = 0; other < n_nodes; other++)
            sees[node * n_nodes + other] = other == node || (parent >= 0 && sees[parent * n_nodes + other]);
    }
}
