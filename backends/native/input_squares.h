// Sums of the squares of what matrices read, by column: what importance matrices are made of.
//
// Columns are divided among the threads, and each is summed over the rows in their order and in double precision, so that
// the number of threads changes no bit.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "experts/store.h"
#include "kernels/matrix.h"
#include "weights.h"

class InputSquares {
public:
    // sums: (n_matrices, n_in).  counts: (n_matrices,), rows that were summed.
    struct Sums {
        Sums() = default;
        Sums(int n_matrices, int n_in);

        int n_in = 0;
        std::vector<double> sums;
        std::vector<int64_t> counts;
    };
    // Rows of experts: of the pass, (n_rows, n_used).  chosen: the expert of each.  place: where its row is in x, null if
    // it is that of the pass.  n_places: those from here on are left out.
    struct ExpertRowsOf {
        const int32_t *chosen, *place;
        int n_rows, n_used, n_places;
    };

    // Of all matrices of these weights but the output matrix, and of the experts of a store, null for none. Matrices of
    // the heads of latent attention count apart. The weights must outlive this.
    InputSquares(const Weights& weights, const ExpertStore* store, const DecoderConfig& config);

    // Parts into which columns are cut, each of which a thread sums on its own.
    static int parts_of(int n_in);
    // Adds the rows x (n_rows, ldx) to what each reader read, for the columns of one part. number: of the matrix, where
    // a reader is several.
    void add(std::initializer_list<const Matrix*> readers, const float* x, size_t ldx, int n_rows, int part,
             int number);
    // The same for the inputs of the experts of a layer: those of gate and up, or of down.
    void add_experts(int layer, bool is_down, const ExpertRowsOf& rows, const float* x, size_t ldx, int part);

    using ByName = std::map<std::string, Sums>;
    ByName all() const;

private:
    struct OfLayer {
        Sums inputs, down;
        bool has_gates = true;
    };

    std::map<std::string, Sums> matrices_;
    std::map<const uint8_t*, Sums*> of_data_;
    std::vector<OfLayer> experts_;
};
