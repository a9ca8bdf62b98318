// An engine in C++ that hosts pagedkv: its own memory in two tiers, forks, evictions, and no Python in its calls.
#pragma once
#include <Python.h>
#include <pagedkv.h>

#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "toy_model.h"

constexpr int BLOCK = 8, GENERATED = 12, MAX_ROWS = 4, MAX_BLOCKS = 16, MAX_TOKENS = 512;
constexpr int FLOATS = LAYERS * 2 * BLOCK * WIDTH;  // of a block: [layer][K, V][slot][WIDTH]

// A tier's memory, the engine's own: the core knows the numbers of its blocks.
struct Arena {
    std::vector<float> memory;
    explicit Arena(int blocks) : memory(size_t(blocks) * FLOATS) {}
    float* block(int64_t number) { return &memory[size_t(number) * FLOATS]; }
    float* at(int layer, int kind, int64_t slot) {
        return block(slot / BLOCK) + ((layer * 2 + kind) * BLOCK + slot % BLOCK) * WIDTH;
    }
};

struct Counts { int64_t cached = 0, prompt = 0, up = 0, down = 0, copies = 0; };

// Serves batches of prompts. Several engines may share a placement and its arenas, each in a thread of its own.
class Engine {
    const pagedkv_api* kv;
    pagedkv_placement* placement;
    std::array<Arena, 2>& arenas;
    pagedkv_table* table = nullptr;
    int64_t tenant = 0;  // whose prefixes are found
    pagedkv_step step = {};
    std::array<int32_t, MAX_ROWS * MAX_BLOCKS> tables;
    std::array<int32_t, MAX_ROWS + 1> seq_lens, q_indptr;
    std::array<int32_t, MAX_TOKENS> positions, tokens;
    std::array<int64_t, MAX_TOKENS> slots;
    std::array<int32_t, 2 * MAX_ROWS> copies;

  public:
    Counts counts;

    Engine(const pagedkv_api* api, pagedkv_placement* shared, std::array<Arena, 2>& memory, const std::string& name)
        : kv(api), placement(shared), arenas(memory) {
        check(kv->placement_namespace(placement, name.data(), name.size(), &tenant));
        check(kv->table_new(placement, MAX_ROWS, &table));
        step.block_tables = tables.data(), step.tables_room = tables.size(), step.stride = MAX_BLOCKS;
        step.seq_lens = seq_lens.data(), step.q_indptr = q_indptr.data();
        step.positions = positions.data(), step.tokens = tokens.data(), step.slot_mapping = slots.data();
        step.tokens_room = MAX_TOKENS, step.copies = copies.data(), step.copies_room = MAX_ROWS;
    }
    ~Engine() { kv->table_delete(table); }
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    void check(int code) const {
        if (code != PAGEDKV_OK) throw std::runtime_error(kv->describe(code));
    }

    // Carries out the moves that the core has decided for any engine.
    void move() {
        std::array<pagedkv_move, PAGEDKV_MAX_RUN> moves;
        std::array<int64_t, PAGEDKV_MAX_RUN> transfers;
        std::array<uint8_t, PAGEDKV_MAX_RUN> outcomes;
        int32_t num;
        for (;;) {
            check(kv->placement_take_moves(placement, moves.data(), PAGEDKV_MAX_RUN, &num));
            if (num == 0) return std::this_thread::yield();  // another engine may be carrying some out
            for (int i = 0; i < num; i++) {
                const pagedkv_move& m = moves[i];
                std::memcpy(arenas[m.dst_tier].block(m.dst_block), arenas[m.src_tier].block(m.src_block),
                            FLOATS * sizeof(float));
                transfers[i] = m.transfer, outcomes[i] = PAGEDKV_ARRIVED;
                (m.dst_tier == 0 ? counts.up : counts.down)++;
            }
            check(kv->placement_complete(placement, transfers.data(), outcomes.data(), num, nullptr));
        }
    }

    void make_room(int64_t blocks) {
        int64_t missing = 1, flying = 1;
        for (int tries = 0; missing > 0; tries++) {
            check(kv->placement_reserve(placement, 0, int32_t(blocks), &missing));
            if (missing > 0) move();
            check(kv->placement_in_flight(placement, &flying));
            if (tries > 1000000) throw std::runtime_error("rows hold all blocks of the device");
        }
    }

    // A row for a prompt, with the cached prefix on the device, wherever it lay.
    int64_t open(const std::vector<int32_t>& prompt) {
        int64_t owner, row, cached, needed;
        int32_t started, num_blocks;
        const int64_t n = int64_t(prompt.size());
        check(kv->placement_acquire(placement, tenant, prompt.data(), n, (n - 1) / BLOCK, &owner, nullptr));
        int code;
        while ((code = kv->placement_promote(placement, owner, &started, &needed)) == PAGEDKV_E_BLOCKS)
            make_room(needed);
        check(code);
        move();
        check(kv->placement_settle(placement, owner, &num_blocks));
        check(kv->table_open(table, tenant, prompt.data(), n, 1, owner, &row, &cached));
        counts.cached += cached, counts.prompt += n;
        return row;
    }

    // Computes the rows' tokens that are not computed yet: the logits behind the last token of each row.
    std::vector<Vector> forward(const std::vector<int64_t>& rows) {
        const int32_t n = int32_t(rows.size());
        int64_t committed;
        int code;
        while ((code = kv->table_step(table, rows.data(), n, nullptr, 0, &step, nullptr)) == PAGEDKV_E_BLOCKS)
            make_room(step.num_new_blocks);
        check(code);
        for (int i = 0; i < step.num_copies; i++)  // blocks that forks share and one of them writes into
            std::memcpy(arenas[0].block(copies[2 * i + 1]), arenas[0].block(copies[2 * i]), FLOATS * sizeof(float));
        check(kv->table_copies_done(table, copies.data(), int32_t(step.num_copies)));
        counts.copies += step.num_copies;
        std::vector<Vector> x, logits;
        for (int t = 0; t < step.num_tokens; t++) x.push_back(embedded(tokens[t], positions[t]));
        for (int layer = 0; layer < LAYERS; layer++) {
            for (int t = 0; t < step.num_tokens; t++)
                for (int kind = 0; kind < 2; kind++) {
                    const Vector kv_of = times(x[t], layer, 1 + kind);
                    std::copy(kv_of.begin(), kv_of.end(), arenas[0].at(layer, kind, slots[t]));
                }
            for (int i = 0; i < n; i++)
                for (int t = q_indptr[i]; t < q_indptr[i + 1]; t++) {
                    const auto read = [&](int kind) {
                        return [&, kind, i](int j) {
                            const int64_t block = tables[i * MAX_BLOCKS + j / BLOCK];
                            return arenas[0].at(layer, kind, block * BLOCK + j % BLOCK);
                        };
                    };
                    const Vector seen = attended(times(x[t], layer, 0), positions[t] + 1, read(0), read(1));
                    const Vector more = times(seen, layer, 3);
                    for (int d = 0; d < WIDTH; d++) x[t][d] = std::tanh(x[t][d] + more[d]);
                }
        }
        check(kv->table_commit(table, rows.data(), n, step.number, &committed, nullptr));
        for (int i = 0; i < n; i++) logits.push_back(times(x[q_indptr[i + 1] - 1], 0, 4, VOCABULARY));
        return logits;
    }

    // Two answers to each prompt, all in one batch: one begins with the best token, the other with the second best.
    std::vector<std::vector<int32_t>> answers(const std::vector<std::vector<int32_t>>& prompts) {
        std::vector<int64_t> rows;
        for (const auto& prompt : prompts) rows.push_back(open(prompt));
        std::vector<std::vector<int32_t>> out(2 * rows.size());
        std::vector<int32_t> next(2 * rows.size());
        const std::vector<Vector> first = forward(rows);
        for (size_t i = 0; i < prompts.size(); i++) {
            int64_t fork;
            check(kv->table_fork(table, rows[i], 1, &fork));
            rows.push_back(fork);
            Vector rest = first[i];
            next[i] = best(rest);
            rest[next[i]] = -1e300;
            next[prompts.size() + i] = best(rest);
        }
        for (int step_number = 0;; step_number++) {
            for (size_t i = 0; i < rows.size(); i++) out[i].push_back(next[i]);
            if (step_number + 1 == GENERATED) break;
            check(kv->table_append(table, rows.data(), next.data(), int32_t(rows.size()), nullptr));
            const std::vector<Vector> logits = forward(rows);
            for (size_t i = 0; i < rows.size(); i++) next[i] = best(logits[i]);
        }
        for (int64_t row : rows) check(kv->table_release(table, row, 0));
        return out;
    }
};
