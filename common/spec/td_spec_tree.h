/* td_spec_tree.h - which of the drafts that were made a step verifies. Before drafts are made only
 * their mean chances are known, and td_spec_plan() says how many to make; once they are, their
 * drafter knows how sure it was of each, and what it would have drafted instead. A choice's drafts
 * are a tree then: a chain, and beside its places leaves. A node is right with the product of the
 * chances on its path, and brings a token if it is.
 * Source: the trees of Medusa (Cai et al., 2024) and EAGLE-2 (Li et al., 2024), whose nodes are
 * taken by that product; here as far as they are worth their rows' time. Threads: owner. Nothing
 * allocates. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/spec/td_draft.h"
#include "common/spec/td_spec_cost.h"

/** The drafts of one choice. */
typedef struct td_spec_tree {
    double chain[TD_DRAFT_TOKENS_MAX]; /* [places]: that a draft is right where those before were */
    double leaves[TD_DRAFT_TOKENS_MAX]; /* [places]: that its place's leaf is; 0: there is none */
    uint32_t places;
    uint32_t chain_min;  /* drafts that are verified whatever they cost, as far as there are rows */
    uint32_t leaves_min; /* the same of leaves, beside drafts that are */
    uint32_t leaves_max;
    uint32_t k;           /* out: drafts, from the first */
    uint32_t leaf_places; /* out: a bit for each place whose leaf is verified; below k */
    uint32_t leaf_count;  /* out: of them */
    double next;          /* scratch: chance of its likeliest further node */
    uint32_t next_leaf;   /* scratch: that node: place + 1 of a leaf, 0: the chain's next */
} td_spec_tree_t;

_Static_assert(TD_DRAFT_TOKENS_MAX <= 32, "a bit for each place");

/** Chooses the nodes that give the most tokens in the step's time, of all beginnings of the nodes
 * in order, the likeliest first. One that is longer must be worth TD_SPEC_GAIN_MIN: rows' times
 * are measured, and less is their noise. A leaf comes after the draft that it stands beside.
 * Shape:  curve as td_step_cost_curve() gives it, for rows_max. trees [count].
 * Units:  rows: of the step without these nodes; tokens: that it is expected to give; spent_ns: its
 * time besides the pass. */
void td_spec_choose(const double *curve, uint32_t rows_max, uint32_t rows, double tokens,
                    double spent_ns, td_spec_tree_t *trees, uint32_t count);
/** Is one draft more of a chain worth drafting, in a step that has so many rows by now?
 * chance: that it is right; draft_ns: to draft it. As above otherwise. */
bool td_spec_goes_on(const double *curve, uint32_t rows_max, uint32_t rows, double tokens,
                     double spent_ns, double chance, double draft_ns);
