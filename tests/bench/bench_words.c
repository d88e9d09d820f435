#include "tests/bench/bench_words.h"

#include "common/base/td_base.h"
#include "common/base/td_buf.h"

/* One token each, with the space before it, in the vocabularies of most models. */
static const char *const words[] = {
    "time",    "year",    "people",   "way",    "day",    "man",     "thing",   "woman",
    "life",    "child",   "world",    "school", "state",  "family",  "student", "group",
    "country", "problem", "hand",     "part",   "place",  "case",    "week",    "company",
    "system",  "program", "question", "work",   "number", "night",   "point",   "home",
    "water",   "room",    "mother",   "area",   "money",  "story",   "fact",    "month",
    "lot",     "right",   "study",    "book",   "eye",    "job",     "word",    "business",
    "issue",   "side",    "kind",     "head",   "house",  "service", "friend",  "father",
    "power",   "hour",    "game",     "line",   "end",    "member",  "law",     "car"};

uint64_t bench_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

json_t *bench_message_of_words(const char *role, uint32_t count, uint64_t *state)
{
    td_str_t text = {0};
    json_t *message = NULL;
    bool ok = true;

    for (uint32_t i = 0; i < count && ok; i++) {
        ok = (i == 0 || td_str_append_text(&text, " ") == TD_OK) &&
             td_str_append_text(&text, words[bench_random(state) % TD_ARRAY_LEN(words)]) == TD_OK;
    }
    if (ok) {
        message =
            json_pack("{s:s, s:s}", "role", role, "content", text.bytes == NULL ? "" : text.bytes);
    }
    td_str_fini(&text);
    return message;
}
