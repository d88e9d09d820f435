"""The router chooses drafter and bound of k by what drafts were worth: per tenant and class of prompt,
never with another token in an answer, and as before when it comes back after its end."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, main, shared, test, wait_until
from speculation import TEXT, ask

SHIPS = ("Anna", "Elsa", "Frida", "Greta", "Hanna", "Irma")
# What tests predict must not depend on which requests explore.
ROUTER_ARGS = ["--allow-placement", "--draft-explore", "0"]


DRAFTED = {}  # requests of each cluster that had drafts: what is learned from


def cluster(options):
    return shared(options, router_args=ROUTER_ARGS)


def copying(ship):
    """A prompt whose answer is in it; each ship makes another prompt, so none of them is hot."""
    text = TEXT.replace("Anna", ship)
    return f"{text}\nRepeat the text above, word for word:\n{text[:60]}"


def draft_of(reply):
    """What the request got: drafter, smallest and largest k, why, class of prompt."""
    drafter, bounds, why, prompt_class = reply.headers["x-tandem-draft"].split()
    k_min, k_max = bounds.removeprefix("k=").split("-")
    return drafter, int(k_min), int(k_max), why, prompt_class


def complete(c, prompt, **more):
    reply = c.complete(prompt, ignore_eos=True, **{"max_tokens": 40, "temperature": 0, **more})
    if draft_of(reply)[2] > 0:
        DRAFTED[c] = DRAFTED.get(c, 0) + 1
    return reply


def teach_copies(c, salt, name=""):
    """Requests whose drafts are accepted, others for each name; answers what the last one got."""
    for ship in SHIPS:
        reply = complete(c, copying(ship + name), cache_salt=salt)
    return draft_of(reply)


def colours(c):
    """Sampling that says a few words in no order: what came before says nothing of what comes."""
    def token(word):
        body = {"model": c.model, "prompt": f" {word}", "add_special_tokens": False}
        return str(c.request("POST", "/tokenize", body, check=True).json["tokens"][0])
    words = ("red", "blue", "green", "old", "new", "big", "small", "cold")
    return {"temperature": 2, "frequency_penalty": 2,
            "logit_bias": {token(word): 100 for word in words}}


def story(number):
    return f"Tell me a story about a lighthouse and the number {number}."


def teach_failures(c, salt):
    """Requests that must draft, of whose drafts hardly any is accepted."""
    for number in range(4):
        reply = complete(c, story(number), cache_salt=salt, seed=number, max_tokens=64,
                         speculation={"k": 4}, **colours(c))
    return draft_of(reply)


def known(c):
    """{(tenant, class, drafter): entry} of the JSON view."""
    entries = c.request("GET", "/speculation", check=True).json["newest"]
    return {(entry["tenant"], entry["class"], entry["drafter"]): entry for entry in entries}


def wait_until_shown(c):
    """The view is refreshed a moment after an answer."""
    wait_until(lambda: c.request("GET", "/speculation").json["reports"] == DRAFTED[c], 10,
               "the view shows all that was learned")


@test
def test_choice_goes_on_where_copies_are_accepted(options):
    """How far depends on what rows were measured to cost, and a new node's first measurements may be
    wrong: they don't stay so."""
    c = cluster(options)
    for number in range(12):
        drafter, k_min, k_max, why, prompt_class = teach_copies(c, "copies", f" {number}")
        assert (drafter, k_min, why, prompt_class) == ("memo", 0, "learned", "repeats")
        if k_max >= 2:
            break
    assert k_max >= 2, k_max


@test
def test_choice_ends_drafts_that_nothing_is_accepted_of(options):
    """And only theirs: other classes of the tenant, and other tenants, draft as before."""
    c = cluster(options)
    assert teach_failures(c, "failures") == ("memo", 4, 4, "learned", "plain")
    reply = complete(c, story(50), cache_salt="failures", **colours(c))
    drafter, k_min, k_max, why, prompt_class = draft_of(reply)
    assert (drafter, k_min, why, prompt_class) == ("memo", 0, "learned", "plain")
    assert k_max <= 1, known(c)  # an eighth of the first drafts may be worth what a row costs
    reply = complete(c, copying("Anna"), cache_salt="failures")
    assert draft_of(reply) == ("memo", 0, 16, "default", "repeats")
    reply = complete(c, story(50), cache_salt="failures")  # asked again: another class
    assert draft_of(reply) == ("memo", 0, 16, "default", "hot")
    for number in range(3):
        reply = complete(c, story(number), cache_salt="others")
        assert draft_of(reply)[2] > 0
    # Who asks for drafts gets them.
    reply = complete(c, story(51), cache_salt="failures", speculation={"drafter": "memo", "k": 3})
    assert draft_of(reply) == ("memo", 3, 3, "asked", "plain")


@test
def test_i1_choice_changes_no_token(options):
    c = cluster(options)
    jobs = [(prompt, sampling) for prompt in (story(60), copying("Karla"), "Hi")
            for sampling in ({"temperature": 0}, {"temperature": 0.9, "seed": 5, "n": 2})]
    expected = [ask(c, prompt, {"drafter": "none"}, max_tokens=40, **sampling)[0]
                for prompt, sampling in jobs]
    teach_failures(c, "tokens")
    teach_copies(c, "tokens")
    for _ in range(3):
        for (prompt, sampling), want in zip(jobs, expected):
            got, _ = ask(c, prompt, None, max_tokens=40, cache_salt="tokens", **sampling)
            assert got == want, (prompt, sampling)


@test
def test_i1_exploring_changes_no_token(options):
    """Every open request tries a drafter, whichever; all of them are tried."""
    with Cluster(options.bin, kvstore=0, prefill=1,
                 router_args=["--allow-placement", "--draft-explore", "100"]) as c:
        expected, _ = ask(c, copying("Lotte"), {"drafter": "none"}, max_tokens=24, temperature=0)
        tried = set()
        for _ in range(40):
            reply = c.complete(copying("Lotte"), max_tokens=24, temperature=0, ignore_eos=True,
                               logprobs=3)
            drafter, k_min, k_max, why, _ = draft_of(reply)
            assert (k_min, k_max, why) == (0, 16, "explored")
            assert [(choice["text"], choice["finish_reason"], choice["logprobs"])
                    for choice in reply.choices] == expected[0]
            tried.add(drafter)
            if tried == {"memo", "early_exit", "lookahead"}:
                break
        assert tried == {"memo", "early_exit", "lookahead"}, tried


@test
def test_drafts_are_counted_by_position(options):
    c = cluster(options)
    before = c.metrics()
    details = complete(c, copying("Marie"), cache_salt="positions", speculation={"k": 8},
                       max_tokens=64).usage["completion_tokens_details"]
    after = c.metrics()
    grown = {series: value - before.get(series, 0) for series, value in after.items()}
    for result in ("accepted", "rejected"):
        by_position = [grown['tandem_router_draft_tokens_total{drafter="memo",position="%u",result="%s"}'
                             % (position, result)] for position in range(1, 17)]
        assert sum(by_position) == details[f"{result}_prediction_tokens"], (result, by_position)
        assert sum(by_position[8:]) == 0
    accepted = details["accepted_prediction_tokens"]
    # 63 tokens behind the first; the last step may have drafted past the end.
    assert 63 - accepted <= grown['tandem_router_draft_steps_total{drafter="memo"}'] <= 63
    time = 'tandem_router_draft_seconds_total{drafter="memo",result="%s"}'
    assert grown[time % "saved"] + grown[time % "lost"] > 0
    assert grown['tandem_router_draft_choices_total{why="default"}'] == 1
    tenants = [series for series in after if series.startswith("tandem_router_tenant_draft_tokens")]
    assert 0 < len(tenants) <= 16


@test
def test_a_new_router_knows_what_drafts_were_worth(options):
    """To the last digit: the node remembers what it has reported."""
    with Cluster(options.bin, kvstore=0, router_args=ROUTER_ARGS) as c:
        teach_copies(c, "restart")
        assert teach_failures(c, "restart")[3] == "learned"
        wait_until_shown(c)
        before = known(c)
        assert len(before) == 2, before
        c.restart("router")
        wait_until(lambda: c.request("GET", "/ready").status == 200, 20, "all have joined again")
        wait_until(lambda: len(known(c)) == len(before), 20, "the node has told what it remembers")
        assert known(c) == before
        reply = complete(c, story(50), cache_salt="restart", max_tokens=2)
        assert draft_of(reply)[2] <= 1 and draft_of(reply)[3] == "learned"
        assert draft_of(complete(c, copying("Nora"), cache_salt="restart"))[3] == "learned"
        assert draft_of(complete(c, story(50), cache_salt="others"))[3] == "default"


if __name__ == "__main__":
    main(__doc__)
