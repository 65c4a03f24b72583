// What an expert cache did.
#pragma once

#include <cstdint>
#include <vector>

struct ExpertLayerStats {
    uint64_t lookups = 0;  // experts that passes wanted
    uint64_t hits = 0;     // of these, in memory
    uint64_t reads = 0;    // experts read
    uint64_t bytes_read = 0;
    uint64_t evictions = 0;
    uint64_t prefetches = 0;     // reads that nobody waited for when they began
    uint64_t useful = 0;         // of these, wanted before they were evicted
    uint64_t dropped = 0;        // hints that were too late, or for which there was no room
    double seconds_waited = 0;   // by threads that compute
    double seconds_stalled = 0;  // in which at least one of them waited

    ExpertLayerStats& operator+=(const ExpertLayerStats& other) {
        return combine(other, [](auto& mine, auto its) { mine += its; });
    }
    ExpertLayerStats& operator-=(const ExpertLayerStats& other) {
        return combine(other, [](auto& mine, auto its) { mine -= its; });
    }

private:
    template <class Operation>
    ExpertLayerStats& combine(const ExpertLayerStats& other, const Operation& each) {
        each(lookups, other.lookups);
        each(hits, other.hits);
        each(reads, other.reads);
        each(bytes_read, other.bytes_read);
        each(evictions, other.evictions);
        each(prefetches, other.prefetches);
        each(useful, other.useful);
        each(dropped, other.dropped);
        each(seconds_waited, other.seconds_waited);
        each(seconds_stalled, other.seconds_stalled);
        return *this;
    }
};

struct ExpertStats {
    std::vector<ExpertLayerStats> layers;
    double busy_seconds = 0;  // while at least one read was under way
    uint64_t n_slots = 0, n_in_memory = 0;
};
