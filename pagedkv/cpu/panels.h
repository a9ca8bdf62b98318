/* The products of a tiled task: included by kernels.h, for one instruction set. */

/* Tokens of a panel: K's tile turned on its side is [panels][head dim][PANEL], so that a product needs no sums across a vector, and a
 * panel stays in the L1 cache. */
enum { ABREAST = NACC / 4, PANEL = ABREAST * VW };

static void turn_keys(const float *const *rows, float *panels, int dim, int tokens)
{
    for (int t = 0; t < tokens; t += VW)
        for (int d = 0; d < dim; d += VW)
            v_transpose(rows + t, (size_t)d, panels + (size_t)(t / PANEL * dim + d) * PANEL + t % PANEL, PANEL);
}

/* scores[r * TILE + t] = q[r] . k[t] for the panels that hold begin .. end - 1 */
INLINE void panel_dots(const float *q, size_t dim, const float *panels, const int rows, float *scores, int begin, int end)
{
    for (int t = begin / PANEL * PANEL; t < end; t += PANEL) {
        const float *keys = panels + (size_t)t * dim;
        V sum[NACC];
        for (int i = 0; i < NACC; i++)
            sum[i] = v_zero();
#pragma GCC unroll 2
        for (size_t d = 0; d < dim; d++, keys += PANEL) {
            V key[ABREAST];
#pragma GCC unroll 4
            for (int i = 0; i < ABREAST; i++)
                key[i] = v_load(keys + i * VW);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                const V part = v_set1(q[r * dim + d]);
#pragma GCC unroll 4
                for (int i = 0; i < ABREAST; i++)
                    sum[r * ABREAST + i] = v_fma(part, key[i], sum[r * ABREAST + i]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int i = 0; i < ABREAST; i++)
                v_store(scores + r * TILE + t + i * VW, sum[r * ABREAST + i]);
    }
}

static void panel_scores(const float *q, int dim, const float *panels, int rows, float *scores, int begin, int end)
{
#define CALL(n) panel_dots(q, dim, panels, n, scores, begin, end)
    BY_ROWS(CALL)
#undef CALL
}

/* Some of V's columns. */
static void panel_values(const float *weights, const char *const *v, int first, int last, int rows, float *o, int dim, int begin, int end)
{
#define CALL(n) add_values_f32(weights, v, 0, first, last, n, o, dim, begin, end, NULL)
    BY_ROWS(CALL)
#undef CALL
}
