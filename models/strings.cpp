// Tables of texts, as the arrays of a model file hold them, and an index that finds a text in one. What a file says is
// checked here: no length and no byte is believed before.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Texts = nb::typed<nb::list, nb::str>;

static_assert(std::endian::native == std::endian::little);

constexpr size_t kLengthBytes = 8;  // in front of each text: how many bytes it has

template <typename Word>
Word load(const char* at) {
    Word word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

// A number that holds all of n < 8 bytes; of no other n bytes it is the same.
uint64_t load_few(const char* at, size_t n) {
    if (n >= 4) return load<uint32_t>(at) | static_cast<uint64_t>(load<uint32_t>(at + n - 4)) << 32;
    const auto byte = [&](size_t i) { return static_cast<uint64_t>(static_cast<uint8_t>(at[i])); };
    return n ? byte(0) | byte(n / 2) << 8 | byte(n - 1) << 16 : 0;
}

// Whether n bytes are UTF-8 as Python has it (table 3-7 of the Unicode standard). The three bytes before them are read
// too, and must not be the beginning of a character. Without branches, so that the compiler makes vectors of it.
bool is_utf8(const char* text, size_t n) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(text);
    const uint8_t *before = bytes - 1, *second_before = bytes - 2, *third_before = bytes - 3;
    uint8_t wrong = 0;
    for (size_t i = 0; i < n; i++) {
        const uint8_t byte = bytes[i], lead = before[i];
        const uint8_t is_due = (lead >= 0xC0) | (second_before[i] >= 0xE0) | (third_before[i] >= 0xF0);
        wrong |= ((byte & 0xC0) == 0x80) ^ is_due;
        wrong |= (byte == 0xC0) | (byte == 0xC1) | (byte > 0xF4);
        wrong |= ((lead == 0xE0) & (byte < 0xA0)) | ((lead == 0xF0) & (byte < 0x90));  // longer than it need be
        wrong |= ((lead == 0xED) & (byte > 0x9F)) | ((lead == 0xF4) & (byte > 0x8F));  // a surrogate, above U+10FFFF
    }
    const bool is_cut = before[n] >= 0xC0 || second_before[n] >= 0xE0 || third_before[n] >= 0xF0;
    return !wrong && !is_cut;
}

// Bytes as a Python text. What is no UTF-8 becomes lone surrogates ("surrogateescape"), from which it can be made again.
nb::str text_of(std::string_view bytes) {
    PyObject* text = PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "surrogateescape");
    if (!text) throw nb::python_error();
    return nb::steal<nb::str>(text);
}

// The bytes that text_of made a text of. Raises UnicodeEncodeError for other lone surrogates, TypeError for no text.
std::string bytes_of(nb::handle text) {
    Py_ssize_t n_bytes;
    if (const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &n_bytes)) {
        return std::string(bytes, static_cast<size_t>(n_bytes));
    }
    if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) throw nb::python_error();
    PyErr_Clear();
    PyObject* encoded = PyUnicode_AsEncodedString(text.ptr(), "utf-8", "surrogateescape");
    if (!encoded) throw nb::python_error();
    const nb::bytes bytes = nb::steal<nb::bytes>(encoded);
    return std::string(bytes.c_str(), bytes.size());
}

// A Python text in UTF-8, for as long as that lives; none where it has a lone surrogate.
std::optional<std::string_view> utf8_of(const nb::str& text) {
    Py_ssize_t n_bytes;
    const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &n_bytes);
    if (bytes) return std::string_view(bytes, static_cast<size_t>(n_bytes));
    if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) throw nb::python_error();
    PyErr_Clear();
    return std::nullopt;
}

// Of a text in UTF-8.
size_t n_characters(std::string_view text) {
    return static_cast<size_t>(std::ranges::count_if(text, [](char byte) { return (byte & 0xC0) != 0x80; }));
}

// ---- the table -----------------------------------------------------------------------------------------------------

// Texts one after the other in one piece of memory.
class StringTable {
public:
    // The first of n texts in data[at..limit), each after its length, that have at most most_bytes and follow each
    // other whole. They are copied: another process may write to the file.
    static StringTable read(Bytes data, size_t at, size_t limit, size_t n, size_t most_bytes) {
        if (limit > data.size() || at > limit) throw nb::value_error("read: the limits lie outside of the data");
        const char* source = reinterpret_cast<const char*>(data.data()) + at;
        const size_t size = std::min<size_t>(limit - at, UINT32_MAX);
        std::vector<uint32_t> starts{0};
        starts.reserve(std::min(n, size / kLengthBytes) + 1);
        size_t end = 0;
        while (starts.size() <= n && size - end >= kLengthBytes) {
            const uint64_t n_bytes = load<uint64_t>(source + end);
            if (n_bytes > most_bytes || n_bytes > size - end - kLengthBytes) break;
            end += kLengthBytes + n_bytes;
            starts.push_back(static_cast<uint32_t>(end - starts.size() * kLengthBytes));
        }
        StringTable table(std::move(starts));
        for (size_t i = 0; i < table.n_; i++) {
            const size_t n_bytes = table[i].size(), from = table.starts()[i] + (i + 1) * kLengthBytes;
            char* to = table.bytes() + table.starts()[i];
            if (n_bytes <= kMargin && size - from >= kMargin) {  // the next text overwrites what is too much
                std::memcpy(to, source + from, kMargin);
            } else {
                std::memcpy(to, source + from, n_bytes);
            }
        }
        return table;
    }

    // Of texts as tolist gives them. Raises UnicodeEncodeError for other lone surrogates, TypeError for what is no text.
    static StringTable of(Texts texts) {
        std::string bytes;
        std::vector<uint32_t> starts{0};
        starts.reserve(texts.size() + 1);
        for (nb::handle text : texts) {
            bytes += bytes_of(text);
            if (bytes.size() > UINT32_MAX) throw nb::value_error("a table holds less than 4 GiB");
            starts.push_back(static_cast<uint32_t>(bytes.size()));
        }
        StringTable table(std::move(starts));
        std::memcpy(table.bytes(), bytes.data(), bytes.size());
        return table;
    }

    size_t size() const { return n_; }
    std::string_view operator[](size_t i) const {
        return {bytes() + starts()[i], static_cast<size_t>(starts()[i + 1] - starts()[i])};
    }
    std::string_view joined() const { return {bytes() + starts()[0], static_cast<size_t>(starts()[n_] - starts()[0])}; }
    std::string joined_by(std::string_view separator) const {
        std::string all;
        all.reserve(joined().size() + n_ * separator.size());
        for (size_t i = 0; i < n_; i++) {
            if (i) all += separator;
            all += (*this)[i];
        }
        return all;
    }
    // How many of the texts are UTF-8, before the first that is not. All are if they are together, and none begins
    // within a character.
    size_t n_utf8() const {
        uint8_t wrong = !is_utf8(joined().data(), joined().size());
        for (size_t i = 0; i < n_; i++) wrong |= (bytes()[starts()[i]] & 0xC0) == 0x80;
        size_t n = wrong ? 0 : n_;
        while (n < n_ && is_utf8((*this)[n].data(), (*this)[n].size())) n++;
        return n;
    }
    // Characters of the longest text.
    size_t longest() const {
        size_t longest = 0;
        for (size_t i = 0; i < n_; i++) longest = std::max(longest, n_characters((*this)[i]));
        return longest;
    }
    // Whether a text has no bytes.
    bool has_empty() const {
        for (size_t i = 0; i < n_; i++)
            if ((*this)[i].empty()) return true;
        return false;
    }
    size_t n_held() const { return joined().size() + (n_ + 1) * sizeof(uint32_t); }
    // The texts, each without bytes as prefix, its place, suffix.
    StringTable named(std::string_view prefix, std::string_view suffix) const {
        const auto name_of = [&](size_t i) { return std::string(prefix) + std::to_string(i) += suffix; };
        std::vector<uint32_t> new_starts{0};
        new_starts.reserve(n_ + 1);
        size_t end = 0;
        for (size_t i = 0; i < n_; i++) {
            end += (*this)[i].empty() ? name_of(i).size() : (*this)[i].size();
            if (end > UINT32_MAX) throw nb::value_error("a table holds less than 4 GiB");
            new_starts.push_back(static_cast<uint32_t>(end));
        }
        StringTable table(std::move(new_starts));
        for (size_t i = 0; i < n_; i++) {
            const std::string name = (*this)[i].empty() ? name_of(i) : "";
            const std::string_view text = name.empty() ? (*this)[i] : name;
            std::memcpy(table.bytes() + table.starts()[i], text.data(), text.size());
        }
        return table;
    }
    // Whether a text has the part after other characters than those of the part itself. In UTF-8 it begins no other one.
    bool has_inside(std::string_view part) const {
        const auto is_inside = [&](std::string_view text) {
            for (size_t at = 0; (at = text.find(part, at)) != text.npos; at += part.size())
                if (at > 0 && !text.substr(0, at).ends_with(part)) return true;
            return false;
        };
        for (size_t i = 0; i < n_; i++)
            if (is_inside((*this)[i])) return true;
        return false;
    }
    size_t n_spaces() const { return static_cast<size_t>(std::ranges::count(joined(), ' ')); }
    // Of the same memory.
    StringTable part(size_t first, size_t last) const {
        if (first > last || last > n_) throw nb::index_error("part: no such texts");
        StringTable table = *this;
        table.first_ += first;
        table.n_ = last - first;
        return table;
    }
    bool equals(const StringTable& other) const {
        if (n_ != other.n_ || joined() != other.joined()) return false;
        const uint32_t shift = starts()[0] - other.starts()[0];
        return std::equal(starts(), starts() + n_, other.starts(),
                          [&](uint32_t a, uint32_t b) { return a - b == shift; });
    }

private:
    static constexpr size_t kMargin = 16;  // zeros before the first text and after the last, which may be read

    // With room for texts that start there; the last number is where the last one ends.
    explicit StringTable(std::vector<uint32_t> starts)
        : memory_(std::make_unique_for_overwrite<char[]>(kMargin + starts.back() + kMargin)),
          starts_(std::make_shared<const std::vector<uint32_t>>(std::move(starts))),
          n_(starts_->size() - 1) {
        std::memset(memory_.get(), 0, kMargin);
        std::memset(bytes() + starts_->back(), 0, kMargin);
    }

    char* bytes() const { return memory_.get() + kMargin; }
    const uint32_t* starts() const { return starts_->data() + first_; }

    std::shared_ptr<char[]> memory_;
    std::shared_ptr<const std::vector<uint32_t>> starts_;
    size_t first_ = 0, n_;
};

Texts list_of(const StringTable& table) {
    nb::list list = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(table.size())));
    if (!list.is_valid()) throw nb::python_error();
    for (size_t i = 0; i < table.size(); i++) {
        PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), text_of(table[i]).release().ptr());
    }
    return list;
}

// ---- the index -----------------------------------------------------------------------------------------------------

uint64_t folded_product(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Products of words and secrets, as in wyhash (Wang Yi). The secrets are drawn once in a process, so that nobody can
// write a file whose texts all have one hash.
uint32_t hash_of(std::string_view text) {
    static const auto secrets = [] {
        std::random_device random;
        const auto draw = [&] { return static_cast<uint64_t>(random()) << 32 | random(); };
        return std::pair{draw(), draw()};
    }();
    const auto [a, b] = secrets;
    uint64_t hash = a ^ text.size();
    for (; text.size() >= 8; text.remove_prefix(8)) hash = folded_product(hash, load<uint64_t>(text.data()) ^ b) ^ a;
    return static_cast<uint32_t>(folded_product(hash, load_few(text.data(), text.size()) ^ b));
}

// Place of each text in a table, by text; of equal ones that of the first.
class StringIndex {
public:
    explicit StringIndex(const StringTable& table) : table_(table) {
        if (table.size() >= kHidden) throw nb::value_error("an index has fewer than 2^23 texts");
        slots_.resize(std::bit_ceil(std::max<size_t>(2, 2 * table.size())));
        constexpr size_t kAhead = 16;  // slots that are on their way from memory while others are filled
        std::array<uint32_t, kAhead> hashes;
        for (size_t i = 0; i < table.size() + kAhead; i++) {
            uint32_t& hash = hashes[i % kAhead];
            if (i >= kAhead) add(static_cast<uint32_t>(i - kAhead), hash);
            if (i >= table.size()) continue;
            hash = hash_of(table[i]);
            __builtin_prefetch(&slots_[hash & (slots_.size() - 1)], 1);
        }
    }

    // As get, of UTF-8.
    std::optional<uint32_t> place_of(std::string_view text) const { return find(text, false); }

    // The first text that comes again.
    std::optional<uint32_t> repeated() const { return repeated_; }

    std::optional<uint32_t> get(const nb::str& text) const {
        const auto bytes = utf8_of(text);
        return bytes ? find(*bytes, false) : std::nullopt;
    }

    // From now on the text is not found.
    void hide(const nb::str& text) {
        const auto bytes = utf8_of(text);
        if (!bytes) return;
        uint32_t& slot = slots_[slot_of(*bytes, hash_of(*bytes))];
        if (slot) slot |= kHidden;
    }

    // The first of some merges "left right" whose text without spaces is not found.
    std::optional<size_t> first_unmade(const StringTable& merges) const {
        std::string made;
        for (size_t i = 0; i < merges.size(); i++) {
            made = merges[i];
            std::erase(made, ' ');
            if (!find(made, false)) return i;
        }
        return std::nullopt;
    }

    // Where merge i joins two texts to text first + i, hidden or not: the place in merges of "left right".
    std::optional<uint32_t> rank(const StringTable& merges, size_t first, std::string_view left,
                                 std::string_view right) const {
        std::string joined(left);
        joined += right;
        const auto found = find(joined, true);
        if (!found || *found < first || *found - first >= merges.size()) return std::nullopt;
        const uint32_t rank = *found - static_cast<uint32_t>(first);
        joined.insert(left.size(), 1, ' ');
        return merges[rank] == joined ? std::optional(rank) : std::nullopt;
    }

private:
    // A slot is 0, or the place of a text + 1, perhaps with kHidden, and the top of its hash, by which most texts that
    // are in another's way are told from it.
    static constexpr uint32_t kHash = 0xFF000000, kHidden = 1 << 23;

    static uint32_t place(uint32_t slot) { return (slot & (kHidden - 1)) - 1; }

    void add(uint32_t i, uint32_t hash) {
        uint32_t& slot = slots_[slot_of(table_[i], hash)];
        if (!slot) {
            slot = (hash & kHash) | (i + 1);
        } else {
            repeated_ = std::min(repeated_.value_or(i), place(slot));
        }
    }

    std::optional<uint32_t> find(std::string_view text, bool hidden_too) const {
        const uint32_t slot = slots_[slot_of(text, hash_of(text))];
        return slot && (hidden_too || !(slot & kHidden)) ? std::optional(place(slot)) : std::nullopt;
    }

    // The text's slot, or the free one where it belongs.
    size_t slot_of(std::string_view text, uint32_t hash) const {
        for (size_t i = hash;; i++) {
            const size_t index = i & (slots_.size() - 1);
            const uint32_t slot = slots_[index];
            if (!slot || (!((slot ^ hash) & kHash) && table_[place(slot)] == text)) return index;
        }
    }

    StringTable table_;
    std::vector<uint32_t> slots_;  // a power of two, at most half of them taken
    std::optional<uint32_t> repeated_;
};

// ---- merging -------------------------------------------------------------------------------------------------------

// Cuts words into parts: the two neighbours that cost least become one, the leftmost of equals, until none can.
class Merger {
public:
    using Costs = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

    // The cost of two neighbours is the place of "left right" in an index of merges.
    static Merger by_merges(const StringIndex& merges) {
        return Merger([&merges](std::string_view left, std::string_view right) -> std::optional<double> {
            std::string joined(left);
            (joined += ' ') += right;
            return merges.place_of(joined);
        });
    }

    // The same, where merge i makes the text first + i of an index.
    static Merger in_order(const StringIndex& ids, const StringTable& merges, size_t first) {
        return Merger([&ids, merges, first](std::string_view left, std::string_view right) -> std::optional<double> {
            return ids.rank(merges, first, left, right);
        });
    }

    // It is that of the text that they make together.
    static Merger by_costs(const StringIndex& ids, Costs costs) {
        const auto of_texts = std::make_shared<const std::vector<float>>(costs.data(), costs.data() + costs.size());
        return Merger([&ids, of_texts](std::string_view left, std::string_view right) -> std::optional<double> {
            const auto place = ids.place_of(std::string(left) += right);
            return place ? std::optional<double>(of_texts->at(*place)) : std::nullopt;
        });
    }

    // The parts of a word; at first each character is one.
    Texts merged(const nb::str& word) const {
        const std::string text = bytes_of(word);
        std::vector<Part> parts;
        {
            ReleasedGil others_may_run;
            parts = merged_parts(text);
        }
        nb::list list;
        for (const Part& part : parts) {
            if (part.size) list.append(text_of(std::string_view(text).substr(part.start, part.size)));
        }
        return list;
    }

private:
    using Cost = std::function<std::optional<double>(std::string_view, std::string_view)>;

    struct Part {
        size_t start, size;  // of bytes; a part that has become one with that before it has none
        size_t before, after;
    };

    struct Pair {
        double cost;
        size_t left, right, size;
        bool operator>(const Pair& other) const { return cost != other.cost ? cost > other.cost : left > other.left; }
    };

    explicit Merger(Cost cost) : cost_(std::move(cost)) {}

    std::vector<Part> merged_parts(std::string_view text) const {
        std::vector<Part> parts;
        for (size_t start = 0, end; start < text.size(); start = end) {
            for (end = start + 1; end < text.size() && (text[end] & 0xC0) == 0x80; end++) {
            }
            parts.push_back({start, end - start, parts.size() - 1, parts.size() + 1});
        }
        const auto text_of_part = [&](size_t i) { return text.substr(parts[i].start, parts[i].size); };
        std::vector<Pair> pairs;
        const auto consider = [&](size_t left, size_t right) {
            if (const auto cost = cost_(text_of_part(left), text_of_part(right))) {
                pairs.push_back({*cost, left, right, parts[left].size + parts[right].size});
                return true;
            }
            return false;
        };
        for (size_t right = 1; right < parts.size(); right++) consider(right - 1, right);
        std::ranges::make_heap(pairs, std::greater{});
        const auto push = [&](size_t left, size_t right) {
            if (consider(left, right)) std::ranges::push_heap(pairs, std::greater{});
        };
        while (!pairs.empty()) {
            std::ranges::pop_heap(pairs, std::greater{});
            const Pair pair = pairs.back();
            pairs.pop_back();
            Part &left = parts[pair.left], &right = parts[pair.right];
            if (!left.size || !right.size || left.size + right.size != pair.size)
                continue;  // merged with another since
            left.size += right.size;
            right.size = 0;
            left.after = right.after;
            if (pair.left > 0) push(left.before, pair.left);
            if (left.after < parts.size()) {
                parts[left.after].before = pair.left;
                push(pair.left, left.after);
            }
        }
        return parts;
    }

    Cost cost_;
};

// Whether merge i is a pair "left right", without another space, that makes token first + i, for all of them.
bool make_tokens_in_order(const StringTable& merges, const StringTable& tokens, size_t first) {
    if (first > tokens.size() || merges.size() > tokens.size() - first) return false;
    if (merges.n_spaces() != merges.size()) return false;
    for (size_t i = 0; i < merges.size(); i++) {
        const std::string_view merge = merges[i], token = tokens[first + i];
        const size_t left = merge.find(' ');
        if (left == merge.npos || merge.size() != token.size() + 1) return false;
        if (merge.substr(0, left) != token.substr(0, left)) return false;
        if (merge.substr(left + 1) != token.substr(left)) return false;
    }
    return true;
}

}  // namespace

NB_MODULE(_strings, m) {
    m.doc() = "Tables of texts for edgeinfer's metadata and tokeniser; use edgeinfer.models.arrays.Strings";
#if defined(NDEBUG)
    nb::set_leak_warnings(false);  // of what still lives when Python ends, such as an engine in a thread of its own
#endif

    nb::class_<StringTable>(m, "StringTable", "Texts one after the other in one piece of memory.")
        .def_static(
            "read", &StringTable::read, "data"_a, "at"_a, "limit"_a, "n"_a, "most_bytes"_a,
            "The first of n texts in data[at:limit], each after its length in 8 bytes, that have at most "
            "most_bytes and follow each other whole. What is no UTF-8 in them is \"surrogateescape\" in Python.")
        .def_static("of", &StringTable::of, "texts"_a)
        .def("__len__", &StringTable::size)
        .def(
            "__getitem__",
            [](const StringTable& table, Py_ssize_t index) {
                const Py_ssize_t n = static_cast<Py_ssize_t>(table.size()), i = index < 0 ? index + n : index;
                if (i < 0 || i >= n) throw nb::index_error("no such text");
                return text_of(table[static_cast<size_t>(i)]);
            },
            "index"_a)
        .def("part", &StringTable::part, "first"_a, "last"_a, "Texts first..last-1, of the same memory.")
        .def("tolist", &list_of)
        .def("equals", &StringTable::equals, "other"_a)
        .def(
            "joined_by",
            [](const StringTable& table, std::string_view separator) {
                const std::string all = table.joined_by(separator);
                return nb::bytes(all.data(), all.size());
            },
            "separator"_a, "The texts in UTF-8, with a separator between them.")
        .def_prop_ro(
            "n_bytes", [](const StringTable& table) { return table.joined().size() + table.size() * kLengthBytes; },
            "Bytes of the texts in a file, with their lengths.")
        .def_prop_ro("n_held", &StringTable::n_held, "Bytes of memory that the texts take.")
        .def_prop_ro("has_empty", &StringTable::has_empty, "Whether a text has no bytes.")
        .def("named", &StringTable::named, "prefix"_a, "suffix"_a,
             "The texts, each without bytes as prefix, its place, suffix.")
        .def("has_inside", &StringTable::has_inside, "part"_a,
             "Whether a text has the part after other characters than those of the part itself.")
        .def_prop_ro("n_spaces", &StringTable::n_spaces)
        .def_prop_ro("n_utf8", &StringTable::n_utf8, "How many of the texts are UTF-8, before the first that is not.")
        .def_prop_ro("longest", &StringTable::longest, "Characters of the longest text.");

    nb::class_<StringIndex>(m, "StringIndex",
                            "Place of each text in a table, by text; of equal ones that of the first.")
        .def(nb::init<const StringTable&>(), "table"_a)
        .def("get", &StringIndex::get, "text"_a)
        .def("__contains__", [](const StringIndex& index, const nb::str& text) { return index.get(text).has_value(); })
        .def("__getitem__",
             [](const StringIndex& index, const nb::str& text) {
                 if (const auto place = index.get(text)) return *place;
                 throw nb::key_error(nb::repr(text).c_str());
             })
        .def("hide", &StringIndex::hide, "text"_a, "From now on the text is not found.")
        .def("first_unmade", &StringIndex::first_unmade, "merges"_a,
             "The first of some merges \"left right\" whose text without spaces is not found.")
        .def(
            "rank",
            [](const StringIndex& index, const StringTable& merges, size_t first, const nb::str& left,
               const nb::str& right) -> std::optional<uint32_t> {
                const auto a = utf8_of(left), b = utf8_of(right);
                return a && b ? index.rank(merges, first, *a, *b) : std::nullopt;
            },
            "merges"_a, "first"_a, "left"_a, "right"_a,
            "Where merge i joins two texts to text first + i, hidden or not: the place in merges of \"left right\".")
        .def_prop_ro("repeated", &StringIndex::repeated, "Place of the first text that comes again.");

    nb::class_<Merger>(m, "Merger",
                       "Cuts words into parts: the two neighbours that cost least become one, the leftmost of equals, "
                       "until none can.")
        .def_static("by_merges", &Merger::by_merges, "merges"_a, nb::keep_alive<0, 1>(),
                    "The cost of two neighbours is the place of \"left right\" in an index of merges.")
        .def_static("in_order", &Merger::in_order, "ids"_a, "merges"_a, "first"_a, nb::keep_alive<0, 1>(),
                    "The same, where merge i makes the text first + i of an index, hidden or not.")
        .def_static("by_costs", &Merger::by_costs, "ids"_a, "costs"_a, nb::keep_alive<0, 1>(),
                    "It is that of the text that they make together, (n,) float32 by place.")
        .def("merged", &Merger::merged, "word"_a, "The parts of a word; at first each character is one.");

    m.def("make_tokens_in_order", &make_tokens_in_order, "merges"_a, "tokens"_a, "first"_a,
          "Whether merge i is a pair \"left right\", without another space, that makes token first + i, for all of "
          "them.");
}
