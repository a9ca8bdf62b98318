/* The scales of quantised K and V that lie in the blocks, one for each token and head: included by kernels.h. Like K and V they come
 * from memory, from lines of their own, so they are fetched before they are needed. */

/* Where the scales of n tokens from a key on lie, of the first head. */
static void find_scales(const call_t *c, const task_t *t, int from, int n, int64_t *place)
{
    for (int i = 0; i < n;) {
        int64_t at = place_of(c, t->seq, from + i, c->scale_block, c->scale_token);
        int left = c->tables ? c->block_size - (from + i) % c->block_size : n;
        for (; left && i < n; left--, i++, at += c->scale_token)
            place[i] = at;
    }
}

/* The scales of a task's heads lie beside each other, or those of a head's tokens do: each line of 64 bytes once. */
static void fetch_scales(const call_t *c, const task_t *t, const int64_t *place, int n)
{
    const int heads_adjoin = c->scale_head == 1, per_line = heads_adjoin ? t->num_heads : 1, step = heads_adjoin ? 1 : 16;
    for (int h = 0; h < t->num_heads; h += per_line)
        for (int i = 0; i < n; i += step)
            for (int k = 0; k < per_line; k += 16) {
                const int64_t at = place[i] + (t->first_head + h + k) * c->scale_head;
                prefetch((const char *)(c->k_scale + at));
                prefetch((const char *)(c->v_scale + at));
            }
}

static void take_scales(const call_t *c, const int64_t *place, int n, int head, float *to, const float *scales)
{
    scales += head * c->scale_head;
    for (int i = 0; i < n; i++)
        to[i] = scales[place[i]];
}
