#include "common/spec/td_spec_tree.h"

#include "common/base/td_base.h"

/* That the drafts before a place are right. */
static double reach(const td_spec_tree_t *t, uint32_t place)
{
    double chance = 1;

    for (uint32_t i = 0; i < place; i++) {
        chance *= t->chain[i];
    }
    return chance;
}

/* The likeliest node that can be taken now; next is 0 where there is none. */
static void find_next(td_spec_tree_t *t)
{
    double reached = 1;

    t->next = 0;
    t->next_leaf = 0;
    for (uint32_t i = 0; i < t->k && t->leaf_count < t->leaves_max; i++) {
        const double chance = reached * t->leaves[i];
        if (chance > t->next && (t->leaf_places & 1u << i) == 0) {
            t->next = chance;
            t->next_leaf = i + 1;
        }
        reached *= t->chain[i];
    }
    if (t->k < t->places && reach(t, t->k + 1) >= t->next) {
        t->next = reach(t, t->k + 1);
        t->next_leaf = 0;
    }
}

static void take(td_spec_tree_t *t)
{
    if (t->next_leaf > 0) {
        t->leaf_places |= 1u << (t->next_leaf - 1);
        t->leaf_count++;
    } else {
        t->k++;
    }
    find_next(t);
}

/* What is verified whatever it costs. Answers the rows with it. */
static uint32_t begin(td_spec_tree_t *trees, uint32_t count, uint32_t rows, uint32_t rows_max,
                      double *tokens)
{
    for (uint32_t i = 0; i < count; i++) {
        td_spec_tree_t *t = &trees[i];
        t->k = TD_MIN(TD_MIN(t->chain_min, t->places), rows_max - TD_MIN(rows, rows_max));
        t->leaf_places = 0;
        t->leaf_count = 0;
        rows += t->k;
        for (uint32_t place = 1; place <= t->k; place++) {
            *tokens += reach(t, place);
        }
        find_next(t);
    }
    return rows;
}

static td_spec_tree_t *likeliest(td_spec_tree_t *trees, uint32_t count)
{
    td_spec_tree_t *best = NULL;

    for (uint32_t i = 0; i < count; i++) {
        if (trees[i].next > 0 && (best == NULL || trees[i].next > best->next)) {
            best = &trees[i];
        }
    }
    return best;
}

static void add_leaves(td_spec_tree_t *t, uint32_t *rows, uint32_t rows_max)
{
    const uint32_t most = TD_MIN(t->leaves_min, t->leaves_max);

    for (uint32_t i = 0; i < t->k && t->leaf_count < most && *rows < rows_max; i++) {
        if (t->leaves[i] > 0 && (t->leaf_places & 1u << i) == 0) {
            t->leaf_places |= 1u << i;
            t->leaf_count++;
            (*rows)++;
        }
    }
}

void td_spec_choose(const double *curve, uint32_t rows_max, uint32_t rows, double tokens,
                    double spent_ns, td_spec_tree_t *trees, uint32_t count)
{
    double expected = tokens;
    uint32_t now = begin(trees, count, rows, rows_max, &expected);
    double most = expected / (curve[TD_MIN(now, rows_max)] + spent_ns);
    td_spec_tree_t *next = NULL;
    uint32_t worth = 0; /* nodes of the best beginning */

    for (uint32_t n = 1; now < rows_max && (next = likeliest(trees, count)) != NULL; n++) {
        expected += next->next;
        take(next);
        now++;
        if (expected / (curve[now] + spent_ns) > most * TD_SPEC_GAIN_MIN) {
            most = expected / (curve[now] + spent_ns);
            worth = n;
        }
    }
    /* Once more, as far as it was worth it. */
    now = begin(trees, count, rows, rows_max, &expected);
    for (uint32_t n = 0; n < worth && (next = likeliest(trees, count)) != NULL; n++, now++) {
        take(next);
    }
    for (uint32_t i = 0; i < count; i++) {
        add_leaves(&trees[i], &now, rows_max);
    }
}

bool td_spec_goes_on(const double *curve, uint32_t rows_max, uint32_t rows, double tokens,
                     double spent_ns, double chance, double draft_ns)
{
    return rows < rows_max && (tokens + chance) * (curve[rows] + spent_ns) >
                                  tokens * (curve[rows + 1] + spent_ns + draft_ns);
}
