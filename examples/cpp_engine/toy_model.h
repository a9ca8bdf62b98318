// A toy model of two attention layers whose weights follow from a seed; numpy_loop.py is the same one.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

constexpr int LAYERS = 2, HEADS = 2, DIM = 8, WIDTH = HEADS * DIM, VOCABULARY = 64;
using Vector = std::vector<double>;

inline double weight(uint64_t number) {  // splitmix64, as a number from -1.73 to 1.73: variance 1
    uint64_t x = (number + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (double((x ^ (x >> 31)) >> 40) / (1 << 23) - 1) * 1.7320508075688772;
}

// x times matrix `number` of a layer: 0 to 3 for q, k, v and the output, 4 the head.
inline Vector times(const Vector& x, int layer, int number, int columns = WIDTH) {
    Vector out(columns, 0.0);
    const uint64_t first = 1000000 + uint64_t(layer * 5 + number) * 10000;
    for (int i = 0; i < WIDTH; i++)
        for (int j = 0; j < columns; j++) out[j] += x[i] * weight(first + i * columns + j) / std::sqrt(WIDTH);
    return out;
}

// The token with the largest logit.
inline int32_t best(const Vector& logits) {
    return int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

inline Vector embedded(int32_t token, int32_t position) {
    Vector x(WIDTH);
    for (int i = 0; i < WIDTH; i++) x[i] = weight(uint64_t(token) * WIDTH + i) + std::sin(position / 3.0 + i);
    return x;
}

// Attention of one token: `key(j)` and `value(j)` point to the WIDTH numbers of token j, of `length` tokens.
template <class Key, class Value>
Vector attended(const Vector& q, int length, Key key, Value value) {
    Vector out(WIDTH, 0.0), score(length);
    for (int h = 0; h < HEADS; h++) {
        double most = -1e300, sum = 0;
        for (int j = 0; j < length; j++) {
            score[j] = 0;
            for (int d = 0; d < DIM; d++) score[j] += q[h * DIM + d] * key(j)[h * DIM + d] / std::sqrt(DIM);
            most = std::max(most, score[j]);
        }
        for (double& each : score) sum += each = std::exp(each - most);
        for (int j = 0; j < length; j++)
            for (int d = 0; d < DIM; d++) out[h * DIM + d] += score[j] / sum * value(j)[h * DIM + d];
    }
    return out;
}
