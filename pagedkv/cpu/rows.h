/* Both products for one element type KVT, included once for each. `LOAD` reads a vector of it as floats.
 *
 * K and V are given row by row (one token's head): any block size, stride and layout is a list of pointers. Up to four rows of Q or
 * of weights share one pass, so that K and V are read once for a group of four query heads. `ahead` are rows that are needed soon,
 * four to a pointer; they are fetched into L2 (into L1 they would cost twice: its miss buffers are few) between the multiplications
 * and not in bursts.
 */
#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define FN(name) PASTE(name, KIND)

INLINE void FN(fetch)(const char *const *ahead, int token, long row_bytes, int first, int count)
{
    const char *row = ahead[token >> 2];
    if (row)
        for (int at = first; at < first + count; at += 64)
            prefetch(row + (token & 3) * row_bytes + at);
}

/* scores[r * TILE + t] = q[r] . k[t] + 0 for t < tokens, which is rounded up to the step: k has rows for that. */
INLINE void FN(dots)(const float *q, int q_stride, const char *const *k, long head, int dim, const int rows, float *scores, int tokens,
                     const char *const *ahead)
{
    const int step = rows == 1 ? NACC : rows == 2 ? NACC / 2 : NACC / 4;
    for (int t0 = 0; t0 < tokens; t0 += step) {
        V sum[NACC];
        const KVT *row[NACC];
        for (int i = 0; i < NACC; i++)
            sum[i] = v_zero();
#pragma GCC unroll 16
        for (int t = 0; t < step; t++)
            row[t] = (const KVT *)(k[t0 + t] + head);
#pragma GCC unroll 1
        for (int c = 0; c < dim; c += VW) {
            V part[4];
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                part[r] = v_load(q + r * q_stride + c);
            if (ahead && c * (int)sizeof(KVT) % 64 == 0) {
#pragma GCC unroll 16
                for (int t = 0; t < step; t++)
                    FN(fetch)(ahead, t0 + t, dim * (long)sizeof(KVT), c * (int)sizeof(KVT), 1);
            }
#pragma GCC unroll 16
            for (int t = 0; t < step; t++) {
                V key = LOAD(row[t] + c);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++)
                    sum[r * step + t] = v_fma(part[r], key, sum[r * step + t]);
            }
        }
        float found[NACC];
        v_sums(sum, found);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
            __builtin_memcpy(scores + r * TILE + t0, found + r * step, step * sizeof(float));
    }
}

/* o[r] += sum over begin <= t < end of weights[r * TILE + t] * v[t], for the columns first .. dim - 1 */
INLINE void FN(add_values)(const float *weights, const char *const *v, long head, int first, int dim, const int rows, float *o, int o_stride,
                           int begin, int end, const char *const *ahead)
{
    const int most = NACC / (rows == 3 ? 4 : rows);
#pragma GCC unroll 1
    for (int c0 = first; c0 < dim; c0 += most * VW) {
        const int wide = dim - c0 >= most * VW ? most : (dim - c0) / VW;
        if (wide == most) {
            V sum[NACC];
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
                for (int c = 0; c < most; c++)
                    sum[r * most + c] = v_load(o + r * o_stride + c0 + c * VW);
#pragma GCC unroll 1
            for (int t = begin; t < end; t++) {
                const KVT *value = (const KVT *)(v[t] + head) + c0;
                if (ahead)
                    FN(fetch)(ahead, t, dim * (long)sizeof(KVT), c0 * (int)sizeof(KVT), most * VW * (int)sizeof(KVT));
                V weight[4];
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++)
                    weight[r] = v_set1(weights[r * TILE + t]);
#pragma GCC unroll 16
                for (int c = 0; c < most; c++) {
                    V x = LOAD(value + c * VW);
#pragma GCC unroll 4
                    for (int r = 0; r < rows; r++)
                        sum[r * most + c] = v_fma(weight[r], x, sum[r * most + c]);
                }
            }
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
                for (int c = 0; c < most; c++)
                    v_store(o + r * o_stride + c0 + c * VW, sum[r * most + c]);
        } else {
            for (int c = 0; c < wide; c++) {
                V sum[4];
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++)
                    sum[r] = v_load(o + r * o_stride + c0 + c * VW);
#pragma GCC unroll 1
                for (int t = begin; t < end; t++) {
                    V x = LOAD((const KVT *)(v[t] + head) + c0 + c * VW);
#pragma GCC unroll 4
                    for (int r = 0; r < rows; r++)
                        sum[r] = v_fma(v_set1(weights[r * TILE + t]), x, sum[r]);
                }
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++)
                    v_store(o + r * o_stride + c0 + c * VW, sum[r]);
            }
        }
    }
}

static void FN(scores)(const float *q, int q_stride, const char *const *k, long head, int dim, int rows, float *scores, int tokens,
                       const char *const *ahead)
{
#define ANY(n) FN(dots)(q, q_stride, k, head, dim, n, scores, tokens, ahead)
#define LONG(n) FN(dots)(q, q_stride, k, head, 128, n, scores, tokens, ahead)
#define SHORT(n) FN(dots)(q, q_stride, k, head, 64, n, scores, tokens, ahead)
    if (dim == 128)
        BY_ROWS(LONG)
    else if (dim == 64)
        BY_ROWS(SHORT)
    else
        BY_ROWS(ANY)
#undef ANY
#undef LONG
#undef SHORT
}

static void FN(values)(const float *weights, const char *const *v, long head, int dim, int rows, float *o, int o_stride, int begin, int end,
                       const char *const *ahead)
{
#define ANY(n) FN(add_values)(weights, v, head, 0, dim, n, o, o_stride, begin, end, ahead)
#define LONG(n) FN(add_values)(weights, v, head, 0, 128, n, o, o_stride, begin, end, ahead)
#define SHORT(n) FN(add_values)(weights, v, head, 0, 64, n, o, o_stride, begin, end, ahead)
    if (dim == 128)
        BY_ROWS(LONG)
    else if (dim == 64)
        BY_ROWS(SHORT)
    else
        BY_ROWS(ANY)
#undef ANY
#undef LONG
#undef SHORT
}

/* A row as floats, zeros behind it up to `padded`. */
static void FN(expand)(const void *from, float *to, int dim, int padded)
{
    const KVT *row = from;
    int c = 0;
    for (; c + VW <= dim; c += VW)
        v_store(to + c, LOAD(row + c));
    for (; c < dim; c++)
        to[c] = scalar_of(DTYPE, row, c);
    for (; c < padded; c++)
        to[c] = 0;
}

#undef FN
#undef KVT
#undef LOAD
#undef KIND
#undef DTYPE
