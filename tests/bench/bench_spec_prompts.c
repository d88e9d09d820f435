#include "tests/bench/bench_spec_prompts.h"

#include "common/base/td_base.h"

#define COPY_SENTENCES 10u

const char *const spec_kind_names[SPEC_KINDS] = {"chat", "copy", "code", "hot"};

static const char *const things[] = {
    "lighthouse", "bridge",   "library", "market", "garden", "harbour", "railway",  "mill",
    "school",     "hospital", "theatre", "bakery", "museum", "brewery", "workshop", "castle"};
static const char *const names[] = {"total", "average", "longest", "merge",  "count", "parse",
                                    "scale", "filter",  "rotate",  "encode", "split", "search",
                                    "pack",  "shuffle", "group",   "render"};

/* In all of these '@' stands for the name, '#' for the number. */
static const char *const sentences[COPY_SENTENCES] = {
    "The @ of the town was built by Anna Berger in the year 1#2. ",
    "Before that, the place of the @ had been a field with #1 old oaks. ",
    "Twice a year the keepers of the @ opened all #4 doors to visitors. ",
    "A painter from the south made a picture of the @ and sold it for #5 silver coins. ",
    "In the winter of the great storm the roof of the @ lost #7 of its tiles. ",
    "The mayor promised that the @ would be repaired within #3 weeks, and it was. ",
    "Children say that under the @ there is a tunnel of #8 steps which leads to the sea. ",
    "The clock of the @ has been wrong by #6 minutes for as long as anybody remembers. ",
    "Every stone of the @ has a number, and number #9 is missing. ",
    "When the @ is closed, a man with #2 keys sits in front of it and reads."};

static const char code[] =
    "# The program:\n"
    "\n"
    "def @_values(values, limit):\n"
    "    \"\"\"Walks over the values and keeps a result below the limit.\"\"\"\n"
    "    result = []\n"
    "    seen = set()\n"
    "    for index, value in enumerate(values):\n"
    "        if value in seen or value > limit + #:\n"
    "            continue\n"
    "        seen.add(value)\n"
    "        result.append((index, value * #))\n"
    "        if len(result) >= limit:\n"
    "            break\n"
    "    return sorted(result, key=lambda pair: pair[1])\n"
    "\n"
    "\n"
    "# The same program, with the function's name changed to @_items:\n"
    "\n"
    "def @_items(values, limit):\n"
    "    \"\"\"Walks";

static const char chat[] =
    "Question #: What would you tell a visitor about the @ of a small town, and why?\nAnswer:";
static const char hot[] =
    "Support ticket #: My parcel from the @ has not come yet. What can I do?\nReply:";

static bool add(const char *text, const char *name, uint32_t number, td_str_t *out)
{
    bool ok = true;

    for (const char *c = text; ok && *c != '\0'; c++) {
        ok = *c == '@'   ? td_str_append_text(out, name) == TD_OK
             : *c == '#' ? td_str_printf(out, "%u", number) == TD_OK
                         : td_str_append(out, c, 1) == TD_OK;
    }
    return ok;
}

static bool add_copy(const char *thing, uint32_t number, td_str_t *out)
{
    bool ok = true;

    for (uint32_t i = 0; ok && i < COPY_SENTENCES; i++) { /* an order of its own */
        ok = add(sentences[(i + number) % COPY_SENTENCES], thing, number + 3, out);
    }
    return ok && add("\n\nThe same text once more, word for word:\n\n", "", 0, out) &&
           add(sentences[number % COPY_SENTENCES], thing, number + 3, out);
}

bool spec_prompt(spec_kind_t kind, uint32_t number, td_str_t *out)
{
    const char *thing = things[number % TD_ARRAY_LEN(things)];

    switch (kind) {
    case SPEC_CHAT:
        return add(chat, thing, number, out);
    case SPEC_COPY:
        return add_copy(thing, number, out);
    case SPEC_CODE:
        return add(code, names[number % TD_ARRAY_LEN(names)], number, out);
    case SPEC_HOT:
        return add(hot, thing, number, out);
    case SPEC_KINDS:
        break;
    }
    return false;
}
