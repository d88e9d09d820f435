#!/usr/bin/env python3
"""router/openapi.json against the sources and a router: neither may say what the other does not."""
import json
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import ROOT, Cluster, main, shared, test

KINDS = {"/v1/chat/completions": "ChatRequest", "/v1/completions": "CompletionRequest",
         "/tokenize": "TokenizeRequest", "/detokenize": "DetokenizeRequest"}
PARSERS = ("rtr_api.c", "rtr_prompts.c", "rtr_speculation.c")
# Objects inside a body.
NESTED = ("Speculation", "Prediction", "Placement", "Message", "TextPart")


def source(name):
    with open(os.path.join(ROOT, "router", name), encoding="utf-8") as file:
        return re.sub(r"/\*.*?\*/", "", file.read(), flags=re.DOTALL)


def description():
    with open(os.path.join(ROOT, "router", "openapi.json"), encoding="utf-8") as file:
        return json.load(file)


def properties(schema):
    """Names of an object's properties, of all forms that it may have."""
    names = set(schema.get("properties", ()))
    for form in schema.get("anyOf", ()):
        names |= properties(form)
    return names


def asked(*patterns):
    """What the parsers' sources have in the places of the patterns."""
    return {name for parser in PARSERS for pattern in patterns for name in re.findall(pattern, source(parser))}


def fields_of_bodies():
    """Every name that a parser asks the body itself for."""
    names = asked(r'\b(?:rtr_field\w*|field_u32)\(ps, "(\w+)"', r'json_object_get\(ps->root, "(\w+)"')
    tables = re.search(r"fields\[\] = \{(.*?)\};.*?names\[\] = \{(.*?)\};", source("rtr_api.c"),
                       re.DOTALL)
    names |= set(re.findall(r'\{"(\w+)"', tables.group(1)))
    names |= set(re.findall(r'"(\w+)"', tables.group(2)))
    return names


def fields_inside():
    """Every name that a parser asks an object inside of the body for."""
    return asked(r'\b\w+\(&inner, "(\w+)"', r'json_object_get\((?!ps->root)\w+, "(\w+)"',
                 r'read_place\(ps, value, "(\w+)"')


@test
def test_routes_are_the_paths_described(options):
    text = source("rtr_http.c")
    prefix = re.search(r'#define MODELS_PATH "(.*?)"', text).group(1)
    table = re.search(r"routes\[\] = \{(.*?)\};", text, re.DOTALL).group(1)
    routes = re.findall(r'\{"(\w+)", (?:"(.*?)"|MODELS_PATH), (\w+), (\w+),', table)
    assert len(routes) == table.count("{"), "a line of the table was not understood"
    served = {(method.lower(), (path or prefix) + ("{model}" if many == "true" else "")): key == "true"
              for method, path, many, key in routes}
    described = {}
    for path, item in description()["paths"].items():
        for method, operation in item.items():
            described[method, path] = operation["security"] != []
            assert ("401" in operation["responses"]) == (operation["security"] != []), path
    assert served == described


@test
def test_fields_that_parsers_read_are_the_properties_described(options):
    schemas = description()["components"]["schemas"]
    bodies = set().union(*(properties(schemas[kind]) for kind in KINDS.values()))
    assert fields_of_bodies() == bodies, fields_of_bodies() ^ bodies
    inside = set().union(*(properties(schemas[name]) for name in NESTED))
    chat = schemas["ChatRequest"]["properties"]
    inside |= set(chat["stream_options"]["properties"]) | set(chat["response_format"]["properties"])
    assert fields_inside() == inside, fields_inside() ^ inside


@test
def test_each_route_reads_what_is_described_for_it(options):
    """What is wrong in every field is refused by the routes that have it, and by no other one."""
    cluster = shared(options, prefill=0, decode=0, kvstore=0)
    schemas = description()["components"]["schemas"]
    base = {"ChatRequest": {"messages": [{"role": "user", "content": "a"}]},
            "CompletionRequest": {"prompt": "a"}, "TokenizeRequest": {"prompt": "a"},
            "DetokenizeRequest": {"tokens": [1]}}
    for path, kind in KINDS.items():
        for name in sorted(fields_of_bodies()):
            body = {**base[kind], name: [{}]}
            if (kind, name) == ("TokenizeRequest", "add_generation_prompt"):  # of messages alone
                body = {**base["ChatRequest"], name: [{}]}
            answer = cluster.request("POST", path, body)
            refused = answer.status == 400 and answer.json["error"]["param"] == name
            assert refused == (name in properties(schemas[kind])), (path, name, answer.body)


@test
def test_ranges_described_are_those_of_the_parser(options):
    """The ends of each range of numbers are taken, and what lies beyond is refused."""
    cluster = shared(options, prefill=0, decode=0, kvstore=0)
    schemas = description()["components"]["schemas"]
    base = {"ChatRequest": {"messages": [{"role": "user", "content": "a"}], "logprobs": True},
            "CompletionRequest": {"prompt": "a"}}
    tried = 0

    def refused(path, kind, name, value):
        body = {**base[kind], name: value}
        if name == "best_of":
            body["n"] = 16
        answer = cluster.request("POST", path, body)
        # What is in its range may be refused for another reason: no node, the context's end.
        return answer.status == 400 and \
            re.search("must be between|must be (above|at least) |too big", answer.json["error"]["message"])

    for path, kind in list(KINDS.items())[:2]:
        for name, schema in schemas[kind]["properties"].items():
            whole = "integer" in schema.get("type", ())
            step = 1 if whole else 0.001
            for key, inside, outside in (("minimum", 0, -step), ("exclusiveMinimum", step, 0),
                                         ("maximum", 0, step), ("exclusiveMaximum", -step, 0)):
                if key in schema and not (name == "best_of" and key == "maximum"):
                    tried += 1
                    assert not refused(path, kind, name, schema[key] + inside), (path, name, key)
                    assert refused(path, kind, name, schema[key] + outside), (path, name, key)
    assert tried > 50, tried


@test
def test_words_described_are_all_taken(options):
    cluster = shared(options, prefill=0, decode=0, kvstore=0)
    schemas = description()["components"]["schemas"]
    for name in ("drafter", "rule"):
        for word in schemas["Speculation"]["properties"][name]["enum"]:
            answer = cluster.request("POST", "/v1/completions",
                                     {"prompt": "a", "speculation": {name: word}})
            assert answer.status == 503, (word, answer.body)
    names = re.search(r'TD_DRAFTER_NAMES "(.*?)"', open_header("common/spec/td_draft.h")).group(1)
    assert {"auto", *names.split(", ")} == set(schemas["Speculation"]["properties"]["drafter"]["enum"]) - {None}


def open_header(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


@test
def test_the_description_is_served_as_it_is(options):
    cluster = shared(options, prefill=0, decode=0, kvstore=0)
    answer = cluster.request("GET", "/openapi.json", check=True)
    assert answer.headers["Content-Type"] == "application/json"
    with open(os.path.join(ROOT, "router", "openapi.json"), "rb") as file:
        assert answer.body == file.read()
    version = cluster.request("GET", "/status", check=True).json["version"]
    assert answer.json["info"]["version"] == version

    def check_references(value):
        if isinstance(value, dict):
            at = answer.json
            for word in value.get("$ref", "#").split("/")[1:]:
                at = at[word]
            for each in value.values():
                check_references(each)
        elif isinstance(value, list):
            for each in value:
                check_references(each)
    check_references(answer.json)


@test
def test_the_description_needs_no_key(options):
    folder = shared(options, prefill=0, decode=0, kvstore=0).dir
    path = os.path.join(folder, "api.keys")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
        file.write("sk-only\n")
    with Cluster(options.bin, prefill=0, decode=0, kvstore=0, router_args=["--api-key-file", path]) as c:
        for route, item in description()["paths"].items():
            for method, operation in item.items():
                status = c.request(method.upper(), route.replace("{model}", "x")).status
                assert (status == 401) == (operation["security"] != []), (route, status)


if __name__ == "__main__":
    main(__doc__)
