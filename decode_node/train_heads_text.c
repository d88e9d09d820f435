/* Prompts of many kinds: a form and a subject each. What is held out has subjects of its own. */
#include <stdio.h>

#include "common/base/td_base.h"
#include "decode_node/train_heads.h"

#define HELD_OUT_EVERY 8u /* of the subjects, the last of so many is held out */

static const char *const forms[] = {
    "Tell me a story about %s.",
    "Explain %s to a child.",
    "What is %s?",
    "Write a short poem about %s.",
    "List ten facts about %s.",
    "What are the advantages and disadvantages of %s?",
    "Write a letter to a friend about %s.",
    "Give me step by step instructions that have to do with %s.",
    "Summarise what is known about %s in three sentences.",
    "Write a dialogue between two people who talk about %s.",
    "How did %s change over time?",
    "Write a product description for something to do with %s.",
    "Why is %s important?",
    "Write a news article about %s.",
    "Compare %s with something similar.",
    "Write a Python program that has to do with %s.",
    "Make a table of five examples of %s.",
    "Invent a quiz about %s with answers.",
    "Write an essay about %s with an introduction and a conclusion.",
    "Describe %s as if I had never seen it.",
    "Give advice to a beginner who wants to learn about %s.",
    "Write an email to my team about %s.",
    "What questions do people ask about %s? Answer them.",
    "Repeat these words and go on: %s, and then",
};

static const char *const subjects[] = {
    "a lighthouse",
    "photosynthesis",
    "the Roman empire",
    "baking bread",
    "sorting algorithms",
    "the water cycle",
    "a trip to the mountains",
    "the moon", /* held out */
    "electric cars",
    "chess",
    "a lonely robot",
    "growing tomatoes",
    "databases",
    "the human heart",
    "an old library",
    "the weather", /* held out */
    "healthy breakfasts",
    "the stock market",
    "a dragon and a knight",
    "volcanoes",
    "learning the piano",
    "prime numbers",
    "city parks",
    "honey bees", /* held out */
    "the French revolution",
    "remote work",
    "a lost dog",
    "black holes",
    "recycling",
    "web servers",
    "the ocean floor",
    "bicycles", /* held out */
    "vaccines",
    "a detective in the rain",
    "time management",
    "ancient Egypt",
    "linear equations",
    "coffee",
    "the Internet",
    "a school play", /* held out */
    "solar panels",
    "dinosaurs",
    "saving money",
    "a string that is reversed",
    "mountain railways",
    "friendship",
    "the brain",
    "spiders", /* held out */
    "job interviews",
    "the printing press",
    "a small fishing village",
    "gravity",
    "yoga",
    "reading files line by line",
    "the rainforest",
    "a birthday party", /* held out */
    "jazz",
    "the Great Wall of China",
    "machine learning",
    "winter",
    "cleaning a kitchen",
    "the number of vowels in a text",
    "a king without a crown",
    "the periodic table", /* held out */
};

static uint32_t subject_of(uint32_t number, bool held_out)
{
    return held_out
               ? number * HELD_OUT_EVERY + HELD_OUT_EVERY - 1
               : number / (HELD_OUT_EVERY - 1) * HELD_OUT_EVERY + number % (HELD_OUT_EVERY - 1);
}

static uint32_t subject_count(bool held_out)
{
    const uint32_t held = TD_ARRAY_LEN(subjects) / HELD_OUT_EVERY;
    return held_out ? held : (uint32_t)TD_ARRAY_LEN(subjects) - held;
}

uint32_t train_prompts(bool held_out)
{
    return subject_count(held_out) * (uint32_t)TD_ARRAY_LEN(forms) * 2;
}

void train_prompt(uint32_t number, bool held_out, char *out, size_t cap, bool *is_chat_out)
{
    const uint32_t at = number % train_prompts(held_out) / 2;
    const char *form = forms[at % TD_ARRAY_LEN(forms)];
    const char *subject = subjects[subject_of(at / (uint32_t)TD_ARRAY_LEN(forms), held_out)];
    size_t len = 0;

    *is_chat_out = number % 2 == 0;
    for (; *form != '\0' && len + 1 < cap; form++) {
        if (form[0] == '%' && form[1] == 's') {
            for (const char *s = subject; *s != '\0' && len + 1 < cap; s++) {
                out[len++] = *s;
            }
            form++;
        } else {
            out[len++] = *form;
        }
    }
    out[len] = '\0';
}
